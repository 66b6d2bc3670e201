"""Checks of arguments: annotations, values and parts."""
