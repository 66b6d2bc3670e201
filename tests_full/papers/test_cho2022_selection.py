"""Hyperparameter selection on separate seeds, and opt-in participation: Cho et al., section 5."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm.papers import ITEMS, selection
from fedjax_mm.papers.cho2022 import runs
from fedjax_mm.papers.cho2022.grid import POINT, Comparison
from fedjax_mm.papers.cho2022.mechanism import METRICS, Watched
from fedjax_mm.papers.cho2022.runs import SCORES, best_points, run_comparison, select
from fedjax_mm.papers.selection import SELECTION
from fedjax_mm.results.dataset import join_seeds
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.tasks import requiring
from tests_full.papers.test_cho2022_tables import SMALL, config_of

FEDPROX = {"FedProx": {"name": "fedprox", "mu": [0.01, 0.1]}, "MaxFL": {"name": "maxfl"}}


def scores_of(config, accuracy):
    """Made-up scores of all candidates of the selection."""
    grid = config.selecting
    labels, names = zip(*((v, name) for v, (name, _) in grid.variants.items()), strict=True)
    dims = (*POINT, "selection_seed")
    axes = [labels, grid.learning_rates, grid.local_steps, grid.batch_sizes, range(grid.num_seeds)]
    coords = dict(zip(dims, map(list, axes), strict=True)) | {"algorithm": ("variant", list(names))}
    array = xr.DataArray(accuracy(*map(len, axes)), coords, dims)
    flat = array.stack(candidate=POINT, create_index=False)
    flat = flat.rename({name: f"candidate_{name}" for name in (*POINT, "algorithm")})
    return xr.Dataset({f"selection_{name}": flat for name in SCORES}), array


def test_the_best_point_has_the_highest_mean_accuracy():
    """Candidates with a diverged seed have NaN scores and are never chosen."""
    config = config_of("maxfl-table1", batch_sizes=(32, 64))
    rng = np.random.default_rng(0)

    def accuracy(*shape):
        values = rng.uniform(size=shape)
        values[:, 3, 0, 1] = 2.0
        values[:, 3, 0, 1, 1] = np.nan
        return values

    scores, array = scores_of(config, accuracy)
    found = best_points(scores, config)
    assert list(found) == list(config.methods)
    for name, point in found.items():
        mine = array.isel(variant=np.flatnonzero(array["algorithm"].values == name))
        best, where = -1.0, None
        for place in np.ndindex(mine.shape[:-1]):
            values = mine.values[place]
            if np.isfinite(values).all() and values.mean() > best:
                best, where = values.mean(), place
        variant, rate, steps, size = (
            mine[key].values[i] for key, i in zip(POINT, where, strict=True)
        )
        assert (point.learning_rate, point.local_steps, point.batch_size) == (rate, steps, size)
        settings = config.variants[variant][1]
        assert point.own == {key: settings[key] for key in point.own}
        assert set(point.own) == {"FedProx": {"mu"}, "qFFL": {"q"}}.get(name, set())


def test_clusters_choose_by_appeal_and_break_ties_by_accuracy():
    config = config_of("maxfl-fig3", methods={"MaxFL": {"name": "maxfl"}})
    assert config.chosen_by == "appeal"
    scores = scores_of(config, lambda *shape: np.zeros(shape))[0].copy(deep=True)
    appeal, accuracy = (scores[f"selection_{name}"].values for name in ("appeal", "accuracy"))
    appeal[:, [3, 5]], accuracy[:, 5], accuracy[:, 7] = 0.4, 0.3, 0.9
    for chosen_by, place in (("appeal", 5), ("accuracy", 7)):
        best = scores.isel(candidate=place)
        point = best_points(scores, config.model_copy(update={"chosen_by": chosen_by}))["MaxFL"]
        assert point.learning_rate == best["candidate_learning_rate"].item()
        assert point.local_steps == best["candidate_local_steps"].item()


def test_given_points_are_not_selected_again():
    at = {"learning_rate": 0.1, "local_steps": 2, "batch_size": 8}
    config = config_of("maxfl-table1", methods=FEDPROX, points={"MaxFL": at})
    assert list(config.selecting.methods) == ["FedProx"]
    both = {"MaxFL": at, "FedProx": at | {"own": {"mu": 0.5}}}
    config = config_of("maxfl-table1", methods=FEDPROX, points=both)
    assert not config.selecting.methods
    assert not select(config, Execution()).variables
    assert best_points(xr.Dataset(), config) == config.points
    (label,) = config.at("FedProx", config.points["FedProx"]).variants
    assert label == "FedProx (mu = 0.5)"


def test_selection_seeds_are_disjoint_from_judged_seeds():
    """Selection seeds do not depend on the judged seeds, and draw other clients."""
    config = config_of("maxfl-table2", num_seeds=20)
    chosen = {tuple(each.selecting.data_seeds) for each in (config, config.with_seeds(20, 40))}
    (seeds,) = chosen
    assert len(seeds) == config.selection_seeds == 3
    assert not set(seeds) & set(config.with_seeds(0, 1000).data_seeds)
    assert config.selecting.first_seed == SELECTION
    assert config.selecting.byzantine == (0.0,)


def test_only_tables_with_tuning_weigh_tuned_models():
    steps = {
        (name, tuned): config_of(name, tuned_weights=tuned)
        .method("MaxFL", 0.1, 10, 32)
        .tuning_steps
        for name in ("maxfl-table1", "maxfl-table3", "maxfl-table5")
        for tuned in (True, False)
    }
    assert {key for key, number in steps.items() if number} == {
        ("maxfl-table3", True),
        ("maxfl-table5", True),
    }
    assert set(steps.values()) == {5, None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "test"),
        ({"flips": "everywhere"}, "training"),
        ({"flips": "everywhere", "participation": "test"}, "test"),
        ({"participation": "training"}, "training"),
    ],
)
def test_clients_opt_in_by_labels_that_are_not_flipped(changes, expected):
    assert config_of("maxfl-table1", **changes).stays_by == expected


@jax.tree_util.register_static
class Losses:
    """A task with given client losses, independent of the model."""

    def __init__(self, losses):
        self.losses, self.num_clients = jnp.asarray(losses), len(losses)

    def nothing(self, *_):
        """Not called by this test."""

    init = weight = batch = loss = nothing

    def client_loss(self, params, client):
        return self.losses[client]

    def metrics(self, rng_key, params):
        return {}


def test_shares_and_weights_of_clients_that_opt_in():
    losses, rho = np.array([0.1, 1.0, 3.0, 0.2, 9.0]), np.array([0.5, 0.9, 4.0, 0.1, 1.0])
    flags = np.array([True, False, False, True, True])
    task = Watched(requiring(Losses(losses), rho, num_unseen=1), 4, jnp.asarray(flags))
    found = task.metrics(jax.random.key(0), jnp.zeros(1))
    assert set(METRICS) <= set(found)
    stays = (losses < rho)[:4]
    s = 1 / (1 + np.exp(-(losses - rho)[:4]))
    expected = {
        "flipped": flags[:4].mean(),
        "available": stays.mean(),
        "available_flipped": (stays & flags[:4]).mean(),
        "weight": (s * (1 - s) * stays).mean(),
        "weight_flipped": (s * (1 - s) * (stays & flags[:4])).mean(),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name
    assert len(set(expected.values())) == 4


def test_batches_of_seeds_share_selected_points_and_equal_one_run(monkeypatch, tmp_path):
    """The selection grid and saved batches run only once."""
    changes = {
        "methods": {"MaxFL": {"name": "maxfl"}},
        "learning_rates": (1e-6, 0.1),
        "num_rounds": 2,
        "record_every": 1,
        "appealing_from": 2,
        "selection_seeds": 2,
    }
    config = config_of("maxfl-table1", **SMALL | changes)
    assert isinstance(config, Comparison)
    ran, grid = [], runs.run_grid

    def counted(settings, *others):
        ran.append(settings.first_seed)
        return grid(settings, *others)

    def batch(seed, place):
        with Checkpoints(place, resume=True).open() as checkpoints:
            return run_comparison(config.with_seeds(seed, 1), Execution(checkpoints=checkpoints))

    monkeypatch.setattr(runs, "run_grid", counted)
    monkeypatch.setattr(selection, "_searched", {})
    batches = [batch(seed, tmp_path / str(seed)) for seed in (0, 1)]
    assert ran == [SELECTION, 0, 1]
    monkeypatch.setattr(selection, "_searched", {})
    again = batch(0, tmp_path / "0")
    assert ran == [SELECTION, 0, 1]
    xr.testing.assert_identical(again.drop_attrs(), batches[0].drop_attrs())
    both = join_seeds(*batches)
    assert both["seed"].values.tolist() == [0, 1]
    assert best_points(both, config)["MaxFL"].learning_rate == both["learning_rate"].item()
    xr.testing.assert_identical(
        both["selection_accuracy"].drop_attrs(), again["selection_accuracy"].drop_attrs()
    )
    assert both["selection_accuracy"].dims == ("selection_seed", "candidate")
    assert set(ITEMS["maxfl-table1"].measure(both, config).dims) >= {"algorithm", "metric"}
