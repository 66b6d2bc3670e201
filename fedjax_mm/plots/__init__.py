"""Figures drawn with matplotlib, which need no display."""

from fedjax_mm.plots.drawing import Line, Panel, draw, lines, panels, save_figure
from fedjax_mm.plots.pictures import (
    cells,
    claims,
    client_distribution,
    curves,
    partition,
    sweep_overview,
    timelines,
    topology,
)

__all__ = [
    "Line",
    "Panel",
    "cells",
    "claims",
    "client_distribution",
    "curves",
    "draw",
    "lines",
    "panels",
    "partition",
    "save_figure",
    "sweep_overview",
    "timelines",
    "topology",
]
