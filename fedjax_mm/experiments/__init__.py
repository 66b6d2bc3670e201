"""Experiments as files describe them: their fields, tasks and methods, and how they run."""
