"""Benchmarks beside other systems; see README.md."""
