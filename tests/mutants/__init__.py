"""Patches by hand, each with one plausible fault of the package that some test should find."""
