"""Benchmarks against other systems, documented in README.md."""
