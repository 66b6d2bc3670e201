"""Figures of results."""

import numpy as np

from fedjax_mm import plots
from tests.results.test_plots import lines, trained


def test_points_are_at_their_x_where_the_ticks_are():
    made = trained().assign_coords(rate=[0.01, 0.03, 0.1])
    made = made.expand_dims(method=["FedAvg", "FedProx"])
    for axes in (*plots.curves(made, "rate", "method").axes, *plots.sweep_overview(made).axes):
        assert axes.get_xscale() == "log"
        assert [text.get_text() for text in axes.get_xticklabels()] == ["0.01", "0.03", "0.1"]
        assert axes.get_xticks(minor=True).size == 0
        for line in lines(axes):
            at = line.get_transform().transform([(0.01, 0.5), (0.1, 0.5)])
            np.testing.assert_allclose(at, axes.transData.transform([(0.01, 0.5), (0.1, 0.5)]))
