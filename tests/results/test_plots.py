"""Figures of a user's own results, and the refusals of wrong ones."""

import pickle
from functools import partial
from io import BytesIO

import numpy as np
import pytest
import xarray as xr
from IPython.core.formatters import DisplayFormatter
from PIL import Image

from fedjax_mm import plots
from fedjax_mm.data import digits, federate, partition, partition_summary, stack_data
from fedjax_mm.topologies import mixing_matrix, ring

X = np.array([1.0, 2.0])


def result(**dims):
    updates = np.cumsum([[0, 0], [8, 4], [6, 6], [0, 12]], axis=0).astype(float)
    made = xr.Dataset(
        {"client_updates": (("round", "model"), updates)}, {"round": [0, 2, 4, 6], "model": [1, 2]}
    )
    return made.expand_dims(dims) if dims else made


def trained(metric="test_accuracy", **axes):
    """Values between 0.05 and 0.95 of two seeds and models, the second of which is ahead by 0.2."""
    axes = {"rate": [0.1, 0.2, 0.3]} | axes
    sizes = [*map(len, axes.values())]
    points = 0.1 * np.arange(np.prod(sizes)).reshape(sizes) / np.prod(sizes)
    grown = np.array([0.05, 0.3, 0.5])[:, None] + [0.0, 0.2]
    values = points[..., None, None, None] + grown + np.array([0.0, 0.05])[:, None, None]
    dims = (*axes, "seed", "round", "model")
    made = xr.Dataset({metric: (dims, values)}, axes | {"round": [0, 5, 10], "model": [1, 2]})
    made[metric].attrs["long_name"] = metric
    made["diverged"] = xr.full_like(made[metric].isel(round=0, drop=True), -1, int)
    return made


@pytest.mark.parametrize(
    ("metric", "factor", "scale"),
    [
        ("test_accuracy", 1, "linear"),
        ("appeal", 1, "linear"),
        ("gradients", 10, "log"),
        ("loss", 1, "log"),
        ("excess_loss", 1, "log"),
        ("distance", 1, "log"),
    ],
)
def test_shares_have_a_linear_axis_and_losses_a_logarithmic_one(metric, factor, scale):
    for draw in [plots.sweep_overview, partial(plots.curves, hue="rate")]:
        made = trained(metric)
        made[metric] = factor * made[metric].assign_attrs(made[metric].attrs)
        (axes,) = draw(made, metric=metric).axes
        assert (axes.get_yscale(), axes.get_ylabel()) == (scale, metric.replace("_", " "))


def test_panels_of_a_figure_have_the_same_limits():
    figure = plots.curves(trained(), col="rate")
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert [axes.get_ylabel() for axes in figure.axes] == ["test accuracy", "", "test accuracy"]
    rows = [[plots.Panel("", "x", "y", [plots.Line("", X, n * X)])] for n in (1, 9)]
    first, second = plots.draw(rows, title="", caption="").axes
    assert first.get_ylim() != second.get_ylim()


def lines(axes):
    return [container[0] for container in axes.containers]


def test_models_are_lines_panels_or_places():
    made = trained()
    made["client_updates"] = 0 * made.test_accuracy + made["round"] * made.model
    made.diverged[2, 0, 1] = 5
    figure = plots.curves(made, hue="model", col="rate")
    for i, axes in enumerate(figure.axes):
        expected = made.test_accuracy[i].where(made.diverged[i] < 0).mean("seed")
        drawn = [line.get_ydata() for line in lines(axes)]
        np.testing.assert_allclose(drawn, expected.transpose("model", "round"))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["model = 1", "model = 2"]
    assert figure.get_label().startswith("Means over 2 seeds")
    one = made.isel(rate=0)
    first, second = lines(plots.curves(one, "client_updates", hue="model").axes[0])
    assert (first.get_xdata().tolist(), second.get_xdata().tolist()) == ([0, 5, 10], [0, 10, 20])
    panels = plots.curves(made, hue="rate", col="model").axes
    assert [axes.get_title() for axes in panels] == ["(a) model = 1", "(b) model = 2"]
    (line,) = lines(plots.curves(one, "model").axes[0])
    assert line.get_xdata().tolist() == [1, 2]
    with pytest.raises(ValueError, match="no axis 'metod', but rate, model"):
        plots.curves(made, hue="metod")
    made["client_loss"] = made.test_accuracy.expand_dims({"client": 3}, -1)
    with pytest.raises(ValueError, match="metrics that have it are client_loss"):
        plots.curves(one.assign(client_loss=made.client_loss[0]), hue="client")
    assert (
        len(lines(plots.curves(made.isel(rate=0), hue="client", metric="client_loss").axes[0])) == 3
    )


def test_what_clients_get_is_drawn_unless_another_metric_is_chosen():
    made = trained("personal_accuracy").assign(loss=trained("loss").loss)
    assert plots.curves(made, hue="rate").axes[0].get_ylabel() == "personal accuracy"
    assert plots.curves(made, hue="rate", metric="loss").axes[0].get_yscale() == "log"


def test_a_figure_is_the_picture_of_a_cell_and_a_figure_of_matplotlib():
    figure = plots.curves(trained(), hue="rate")
    shown, _ = DisplayFormatter().format(figure)
    assert set(shown) == {"text/plain", "image/png"}
    with Image.open(BytesIO(shown["image/png"])) as image:
        assert image.size[0] == 715
    assert len(pickle.loads(pickle.dumps(figure)).axes) == 1


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


def test_a_topology_shows_links_and_the_values_of_models():
    figure = plots.topology(mixing_matrix(ring(), 5), np.arange(5.0), label="loss")
    links, points = figure.axes[0].collections
    assert len(links.get_segments()) == 5
    assert points.get_array().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="one value for each row"):
        plots.topology(np.eye(3), np.zeros(2))


@pytest.mark.parametrize(("num_clients", "shown"), [(7, 7), (400, 300)])
def test_a_partition_shows_how_many_examples_of_each_label_a_client_has(num_clients, shown):
    pool = digits()
    rows = partition.quantity_skew(pool.train[1], num_clients, "linear")
    data = federate((pool.train, pool.test), clients=rows)
    (image,) = plots.partition(data).axes[0].collections
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
