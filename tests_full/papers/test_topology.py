"""Peers and edges in small runs: exact floors against plain loops, and from data to figure."""

import numpy as np
import pytest

from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS
from fedjax_mm.plots import save_figure

FEW = {"num_seeds": 2, "quadratic_rounds": 40, "num_rounds": 16, "local_steps": 2}


def small(name, **changes):
    settings = ITEMS[name].settings
    return validate(type(settings), settings.model_dump() | FEW | changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("topology-edges", {"periods": [1, 4], "record_every": 4, "groupings": ["alike"]}),
        ("topology-gossip", {"alphas": [1.0], "local_steps": [2], "record_every": 4}),
    ],
)
def test_a_small_run_is_judged_and_drawn(name, changes, tmp_path):
    config = small(name, **changes)
    result = ITEMS[name].make(config)
    findings = ITEMS[name].findings(result, config)
    assert np.isfinite(result["floor"]).all()
    assert result["parameters_mixed"].isel(round=-1).min() > 0
    assert findings.checks
    assert all(table.rows for table in findings.tables)
    save_figure(ITEMS[name].figure(result, findings.measured, config), tmp_path / "figure.png")


def rounds_of(config, steps, mix, seeds=4000, rounds=240):
    """Clients' models after all rounds, ``[seeds, clients]``, by a loop over rounds and steps."""
    rng, rate = np.random.default_rng(0), config.quadratic_rate
    a, b = config.quadratics
    x = np.zeros((seeds, len(a)))
    for t in range(1, rounds + 1):
        for _ in range(steps):
            target = b + rng.choice([-1, 1], x.shape)
            x = x - rate * a * (x - target)
        x = mix(t, x)
    return x


@pytest.mark.parametrize("graph", ["ring", "4-regular"])
def test_the_floor_of_peers_is_that_of_a_loop(graph):
    config = ITEMS["topology-gossip"].settings
    W = config.matrix(graph)
    errors = rounds_of(config, 5, lambda t, x: x @ W.T).var(1)
    standard_error = errors.std(ddof=1) / np.sqrt(len(errors))
    assert abs(errors.mean() - config.exact(graph, 5)) < 4 * standard_error


@pytest.mark.parametrize("grouping", ["alike", "mixed"])
def test_the_floor_of_edges_is_that_of_a_loop(grouping):
    config, period = ITEMS["topology-edges"].settings, 4
    edge = config.edge_of(grouping)
    mean = (edge[:, None] == edge) / 4.0

    def mix(t, x):
        x = x @ mean
        return np.repeat(x.mean(1, keepdims=True), x.shape[1], 1) if t % period == 0 else x

    a, b = config.quadratics
    end = rounds_of(config, config.local_steps, mix)[:, 0]
    excess = np.mean(a) / 2 * (end - np.average(b, weights=a)) ** 2
    standard_error = excess.std(ddof=1) / np.sqrt(len(excess))
    assert abs(excess.mean() - config.exact(grouping, period)) < 4 * standard_error
