"""Experiments described by files: their fields, tasks and methods, and how they run."""
