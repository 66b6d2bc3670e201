"""Experiments described by files: their fields, tasks and methods, and how to run them."""
