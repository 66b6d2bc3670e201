"""Figures of results."""

import numpy as np
import pytest
import xarray as xr

from fedjax_mm import plots
from fedjax_mm.data import digits, federate, partition
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


def test_cells_lie_around_their_coordinates_and_names_are_their_legend():
    coords = {"case": ["A", "B"], "client": ["3", "7"], "round": [1, 3, 9]}
    values = xr.DataArray(np.arange(12).reshape(2, 2, 3) % 2 == 0, coords)
    figure = plots.cells(values, ["absent", "present"])
    assert [axes.get_title() for axes in figure.axes] == ["(a) A", "(b) B"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["absent", "present"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["3", "7"]
    (mesh,) = figure.axes[1].collections
    np.testing.assert_array_equal(mesh.get_array(), values[1])
    np.testing.assert_array_equal(mesh.get_coordinates()[0, :, 0], [0, 2, 6, 12])
    np.testing.assert_array_equal(mesh.get_coordinates()[:, 0, 1], [-0.5, 0.5, 1.5])
    with pytest.raises(ValueError, match="give \\(row, column\\), or panels too"):
        plots.cells(values[0, 0])


def test_partitions_side_by_side_have_one_scale():
    pool = digits()
    dealt = {f"{n} clients": partition.iid(pool.train[1], n) for n in (2, 20)}
    figure = plots.partition({name: federate(pool, rows) for name, rows in dealt.items()})
    *panels, bar = figure.axes
    assert [axes.get_title() for axes in panels] == ["(a) 2 clients", "(b) 20 clients"]
    first, second = (axes.collections[0] for axes in panels)
    assert first.get_clim() == second.get_clim() == (0, np.nanmax(first.get_array()))
    assert bar.get_ylabel() == "training examples"


def test_a_long_curve_has_a_band_and_many_points_have_bars_below_and_above():
    x, errors = np.arange(20.0), np.stack([np.full(20, 0.1), np.full(20, 0.4)])
    drawn = [plots.Line("", x, x, errors), plots.Line("", x, x, errors, style="o")]
    band, bars = plots.draw([[plots.Panel("", "x", "y", drawn)]]).axes[0].collections
    np.testing.assert_allclose(band.get_paths()[0].get_extents().intervaly, [-0.1, 19.4])
    np.testing.assert_allclose(bars.get_segments()[3][:, 1], [2.9, 3.4])
