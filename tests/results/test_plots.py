"""Figures of a user's own results: what they show, and what they refuse."""

import numpy as np
import pytest
import xarray as xr

from fedjax_mm import plots
from fedjax_mm.data import digits, federate, partition, partition_summary, stack_data


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


@pytest.mark.parametrize(("num_clients", "shown"), [(7, 7), (400, 300)])
def test_a_partition_shows_how_many_examples_of_each_label_a_client_has(num_clients, shown):
    pool = digits()
    rows = partition.quantity_skew(pool.train[1], num_clients, "linear")
    data = federate((pool.train, pool.test), clients=rows)
    (image,) = plots.partition(data).axes[0].images
    counts = partition_summary(pool.train[1], rows).counts
    if shown < num_clients:
        counts = counts[np.argsort(counts.sum(1), kind="stable")]
        counts = counts[np.linspace(0, num_clients - 1, shown).astype(int)]
    np.testing.assert_array_equal(image.get_array(), counts.T)


def test_a_partition_refuses_a_stack_and_a_label_that_is_not_there():
    pool = digits()
    data = federate(pool, clients=partition.iid(pool.train[1], 3))
    with pytest.raises(ValueError, match="a stack of 2 draws"):
        plots.partition(stack_data([data, data]))
    with pytest.raises(ValueError, match="column is 1, and examples have 1 label"):
        plots.partition(data, column=1)
