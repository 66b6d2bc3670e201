"""Figures of a user's own results: what they show, and what they refuse."""

import numpy as np
import pytest
import xarray as xr

from fedjax_mm import plots


def result(**dims):
    updates = np.cumsum([[0, 0], [8, 4], [6, 6], [0, 12]], axis=0).astype(float)
    made = xr.Dataset(
        {"client_updates": (("round", "model"), updates)}, {"round": [0, 2, 4, 6], "model": [1, 2]}
    )
    return made.expand_dims(dims) if dims else made


def test_time_lines_show_clients_per_round_from_record_to_record():
    axes = plots.timelines(result(seed=2)).axes[0]
    first, second = (area.get_paths()[0] for area in axes.collections)
    for t, clients in ((1, 4), (3, 3), (5, 0)):
        heights = [clients - 0.1, clients + 0.1, 5.9, 6.1]
        inside = [[area.contains_point((t, y)) for y in heights] for area in (first, second)]
        assert inside == [[clients > 0, False, False, False], [False, True, True, False]]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (result(learning_rate=[0.1, 0.2]), "axis 'learning_rate', too; choose a value of it"),
        (result().isel(round=[0]), "one record; record more often"),
    ],
)
def test_time_lines_refuse_other_axes_and_a_single_record(made, words):
    with pytest.raises(ValueError, match=words):
        plots.timelines(made)
