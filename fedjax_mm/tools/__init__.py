"""Loops, numbers of calls, files, signals and the compiler."""
