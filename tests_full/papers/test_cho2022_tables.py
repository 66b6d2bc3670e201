"""Tables 1 to 6 and Figures 3, 4 and 7 of Cho et al.: small runs, clients and settings."""

import contextlib
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import appealing, fedavg, full_participation, simulate
from fedjax_mm.experiments.methods import Byzantine
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS
from fedjax_mm.papers.cho2022 import runs, several
from fedjax_mm.papers.cho2022.clients import POPULATIONS, classifier, draw_clients
from fedjax_mm.papers.cho2022.grid import METHODS
from fedjax_mm.papers.cho2022.runs import best_points, run_comparison, run_grid, select
from fedjax_mm.plots import save_figure
from fedjax_mm.sweeps import execute
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.execution import Execution, progress
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import own_models, quadratic, requiring
from tests.helpers import traced_once

SMALL = {
    "num_clients": 4,
    "num_unseen": 3,
    "cohort_size": 2,
    "num_rounds": 4,
    "num_seeds": 2,
    "learning_rates": (0.1,),
    "local_steps": (2,),
    "batch_sizes": (8,),
    "requirement": {"num_steps": (10,)},
    "record_every": 2,
}
NAMES = (
    *("maxfl-table1", "maxfl-table2", "maxfl-fig3", "maxfl-fig4", "maxfl-table3"),
    *("maxfl-table4", "maxfl-table5", "maxfl-table6", "maxfl-fig7"),
)
AT = {"learning_rate": 0.1, "local_steps": 2, "batch_size": 8}


def config_of(name, **changes):
    item = ITEMS[name]
    return validate(type(item.settings), item.settings.model_dump() | changes)


@pytest.mark.parametrize(("clients", "attackers"), [(10, [0, 1, 1]), (100, [0, 5, 10])])
def test_the_number_of_attackers_is_rounded_up(clients, attackers):
    """5 % of 10 clients is one attacker, and whole numbers are kept."""

    def asked(share):
        return Byzantine(fraction=0.0).model_copy(update={"fraction": share})

    @jax.jit
    def updates(share):
        algorithm = asked(share).wrap(fedavg(0.1, local_steps=1), clients)
        task = requiring(quadratic(clients, 1, mu=0.1), jnp.full(clients, -1e9))
        task = asked(share).on_tasks(clients)(task)
        staying = appealing(full_participation(clients), cohort_size=clients, from_round=1)
        return simulate(jax.random.key(0), task, algorithm, staying, 1)[1].client_updates[1, 0]

    for share, number in zip((0.0, 0.05, 0.1), attackers, strict=True):
        assert updates(np.float32(share)) == number
        for given in (share, np.float32(share)):
            assert asked(given).attackers(clients).sum() == number


@functools.cache
def small_instance(name, tuning_steps, *methods):
    """The config and the result of a small version of an item with some of its methods."""
    item = ITEMS[name]
    settings = {"methods": {method: item.settings.methods[method] for method in methods}}
    demand = item.settings.requirement
    short = {"num_steps": tuple(steps // 10 for steps in demand.num_steps), "batch_size": 8}
    settings["requirement"] = demand.model_dump() | short
    config = config_of(name, **SMALL | settings | {"tuning_steps": tuning_steps})
    return config, run_comparison(config)


LOWERED: dict = {}  # programs of the quick instance
QUICK = pytest.param("maxfl-table2", 5, id="maxfl-table2, tuned")  # attackers and tuning at once


@pytest.mark.parametrize(
    ("name", "tuning_steps"),
    [
        QUICK,
        *(
            pytest.param(name, ITEMS[name].settings.tuning_steps, id=name, marks=pytest.mark.slow)
            for name in NAMES
        ),
    ],
)
def test_small_instances_run_from_data_to_figure(name, tuning_steps, tmp_path):
    """The figure says that the digits stand in for the paper's dataset."""
    item = ITEMS[name]
    with traced_once(LOWERED if (name, tuning_steps) == QUICK.values else None):
        config, result = small_instance(name, tuning_steps, "MaxFL")
    findings = item.findings(result, config)
    figure = item.figure(result, findings.measured, config)
    save_figure(figure, tmp_path / "figure.png")
    assert "standing in for fmnist" in figure.get_label()
    assert result.sizes["algorithm"] == 1
    assert result.sizes["round"] == 3
    about = result.attrs["manifest"]
    assert about["population"] == {
        **POPULATIONS["digits"]._asdict(),
        **{key: SMALL[key] for key in ("num_clients", "num_unseen", "cohort_size")},
    }
    json.dumps(about)
    assert np.isfinite(result["unseen_preferred_accuracy"]).all()


@pytest.mark.parametrize(
    ("which", "how"),
    [
        ((*QUICK.values, "MaxFL"), traced_once(LOWERED)),
        pytest.param(
            ("maxfl-table1", 0, "FedAvg", "MaxFL"),
            contextlib.nullcontext(),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one method", "two methods, traced again"],
)
def test_a_stopped_grid_resumes_bit_for_bit(which, how, tmp_path):
    """The clients' own models are trained again with equal results, saved runs are not."""
    with how:
        stop_and_continue(which, tmp_path)


def stop_and_continue(which, tmp_path):
    config, expected = small_instance(*which)
    seen = []

    class StoppedError(Exception):
        pass

    def stop_halfway(what, done, total):
        if what.startswith("variant"):
            seen.append(done)
            if 2 * done > total:
                raise StoppedError

    with Checkpoints(tmp_path, resume=False).open() as checkpoints, pytest.raises(StoppedError):
        run_comparison(config, Execution([progress(stop_halfway)], checkpoints, save_every=0.0))
    first, seen[:] = max(seen), []
    with Checkpoints(tmp_path, resume=True).open() as checkpoints:
        result = run_comparison(
            config,
            Execution([progress(lambda what, done, total: seen.append((what, done)))], checkpoints),
        )
    assert min(done for what, done in seen if what.startswith("variant")) > 0
    assert first > 0
    xr.testing.assert_identical(result.drop_attrs(), expected.drop_attrs())


def test_own_models_are_those_of_their_steps_rate_and_draw():
    """Own models of every number of steps, rate and draw equal a warm-up of that replica alone."""
    demand = {"num_steps": (2, 3), "learning_rates": (0.1, 0.05), "batch_size": 8}
    config = config_of("maxfl-table4", **SMALL | {"requirement": demand, "num_rounds": 2})
    drawn = runs.draw(config, Execution())
    found = np.stack([each.threshold for here in drawn.clients for each in here.own.values()])
    clients = config.population.num_clients + config.population.num_unseen
    assert found.shape == (2 * 2 * 2, clients)
    assert len(np.unique(found)) == found.size

    @functools.partial(jax.jit, static_argnames=("num_steps", "learning_rate"))
    def alone_of(key, data, draw, **how):
        task = classifier(data.select(draw), dropout_rate=config.dropout_rate)
        key = jax.random.fold_in(key, draw)
        start = task.init(jax.random.fold_in(key, 1))
        return own_models(key, task, start, batch_size=8, **how)

    for steps, rate, draw in ((2, 0.1, 1), (3, 0.05, 0)):
        how = {"learning_rate": rate, "num_steps": steps}
        alone = alone_of(jax.random.key(config.seed), drawn.data, draw, **how)
        own = drawn.clients[draw].own[steps, rate]
        np.testing.assert_allclose(own.threshold, alone.threshold, rtol=1e-5)
        np.testing.assert_allclose(own.accuracy, alone.accuracy, rtol=1e-5)


def test_seeds_may_share_their_clients():
    """Seeds on the same clients still have initial parameters of their own."""
    short = {"num_steps": (2,), "batch_size": 8}
    for name, is_same in (("maxfl-fixed", True), ("maxfl-table1", False)):
        config = config_of(name, **SMALL | {"requirement": short})
        drawn = runs.draw(config, Execution())
        params = drawn.clients[0].start
        losses = [each.task.metrics(jax.random.key(0), params)["loss"] for each in drawn.clients]
        flips = [each.is_flipped for each in drawn.clients]
        assert np.isclose(*losses, rtol=1e-5) == np.array_equal(*flips) == is_same
        first, second = (each.own[2, 0.05].threshold for each in drawn.clients)
        assert not np.isclose(first, second).any()
        assert (set(config.data_seeds) == set(config.selecting.data_seeds)) == is_same


def literal(rates, demand, **changes):
    """A small instance of Table 3 with thresholds of a warm-up at these rates."""
    demand = {"learning_rates": demand, "num_steps": (10,), "batch_size": 8}
    few = {name: METHODS[name] for name in ("FedAvg", "MaxFL")}
    settings = {"methods": few, "learning_rates": rates, "requirement": demand}
    return config_of("maxfl-literal", **SMALL | settings | changes)


def test_thresholds_are_those_of_a_warm_up_at_the_rate_of_maxfl():
    """The search has the rate of each point, and the judged runs that of MaxFL's best one."""
    rates, both = (0.01, 0.3), {"local_steps": (2, 3)}
    config = literal(rates, "training", **both)
    scores = select(config, Execution())
    for rate in rates:
        alone = select(literal((rate,), (rate,), **both), Execution())
        here = scores.isel(candidate=scores["candidate_learning_rate"].values == rate)
        xr.testing.assert_identical(here.drop_attrs(), alone.drop_attrs())
    assert len(np.unique(scores["selection_appeal"])) > 1

    result, rate = run_comparison(config), best_points(scores, config)["MaxFL"].learning_rate
    alone = run_comparison(literal(rates, (rate,), points=best_points(scores, config)))
    assert result["demand_rate"].values.tolist() == [rate]
    xr.testing.assert_identical(result[[*alone]].drop_attrs(), alone.drop_attrs())
    with pytest.raises(ValueError, match='is "training", the rate of MaxFL; add it to methods'):
        literal(rates, "training", methods={"FedAvg": METHODS["FedAvg"]})


def test_each_protocol_is_a_run_of_its_own():
    few = {"methods": {"MaxFL": METHODS["MaxFL"]}, "byzantine": (0.0, 0.3), "appealing_from": 3}
    config = config_of("maxfl-table2", **SMALL | few)
    changes = {"leaving": {"attackers_stay": False}, "strong": {"noise": 10.0}}
    found = several.run(config, name="attack", protocols=changes)
    for label, changed in changes.items():
        alone = run_comparison(config.model_copy(update=changed))
        xr.testing.assert_identical(
            found.sel(attack=label, drop=True).drop_attrs(), alone.drop_attrs()
        )
    assert (
        not found["accuracy"].sel(attack="leaving").equals(found["accuracy"].sel(attack="strong"))
    )


def test_the_grid_of_table_1_has_two_programs_per_method(monkeypatch):
    """7 methods with 2 sizes of arrays give 14 programs, which are traced but not compiled here."""
    found = []

    def count(grid, **_):
        found.append([program.label for program in programs_of(grid)])
        raise StopIteration

    monkeypatch.setattr(execute, "make_plan", count)
    config = config_of("maxfl-table1", num_clients=4, num_unseen=3, cohort_size=2)
    with pytest.raises(StopIteration):
        select(config, Execution())
    (labels,) = found
    assert len(labels) == len(set(labels)) == 14
    assert "variant=FedProx (mu = 0.01) | FedProx (mu = 0.1), byzantine" not in labels[0]
    assert any("mu = 0.01" in label and "mu = 0.1)" in label for label in labels)


EVERY_VALUE = [(1, 4, 1.0), (3, 8, 2.0), (1, 16, 2.0)]
EVERY_PAIR = [(1, 4, 1.0), (1, 8, 2.0), (1, 16, 1.0), (3, 4, 2.0), (3, 8, 1.0), (3, 16, 2.0)]


@pytest.mark.parametrize(
    "points", [EVERY_VALUE, pytest.param(EVERY_PAIR, marks=pytest.mark.slow)], ids=["some", "more"]
)
def test_points_that_share_a_program_equal_separate_programs(points):
    """Steps, batch sizes, variants and requirements all vary, and results agree to round-off."""
    changes = {
        "local_steps": (1, 3),
        "batch_sizes": (4, 8, 16),
        "learning_rates": (0.1,),
        "requirement": {"num_steps": (2, 3), "learning_rates": (0.1, 0.05), "batch_size": 8},
        "methods": {"qFFL": {"name": "qffl", "q": [1.0, 2.0]}},
        "tuning_steps": 2,
        "num_rounds": 2,
    }
    config = config_of("maxfl-table4", **SMALL | changes)
    drawn = runs.draw(config, Execution())
    shared = run_grid(config, drawn)
    for tau, size, q in points:
        point = {"local_steps": (tau,), "batch_sizes": (size,)}
        alone = {**changes, **point, "methods": {"qFFL": {"name": "qffl", "q": [q]}}}
        expected = run_grid(config_of("maxfl-table4", **SMALL | alone), drawn)
        got = shared.sel(local_steps=[tau], batch_size=[size], variant=expected["variant"])
        for name in ("loss", "appeal", "preferred_accuracy", "gradients"):
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-6, err_msg=name)


def test_each_seed_draws_clients_and_flips_a_share_of_them():
    population = POPULATIONS["digits"]
    settings = {"partition": "dirichlet_labels", "flips": "everywhere", "seeds": [1, 2]}
    flipped = draw_clients("digits", None, population, flipped=0.3, **settings)
    plain = draw_clients("digits", None, population, flipped=0.0, **settings)
    assert flipped.num_clients == population.num_clients + population.num_unseen
    first, second = (np.asarray(plain.select(i).train.counts) for i in (0, 1))
    assert not np.array_equal(first, second)
    for draw in (0, 1):
        one, other = (data.select(draw) for data in (flipped, plain))
        np.testing.assert_array_equal(one.train.counts, other.train.counts)
        for part in ("train", "test"):
            changed = set()
            for client in range(one.num_clients):
                mine = [getattr(data, part) for data in (one, other)]
                where = slice(
                    int(mine[0].offsets[client]),
                    int(mine[0].offsets[client]) + int(mine[0].counts[client]),
                )
                labels, before = (np.asarray(store.examples[1])[where] for store in mine)
                if (labels != before).any():
                    changed.add(client)
                    np.testing.assert_array_equal(labels, 9 - before)
            assert len(changed) == round(0.3 * one.num_clients)
    counts = np.asarray(plain.train.counts) + np.asarray(plain.test.counts)
    assert counts.min() >= population.min_examples
    shares = np.asarray(plain.test.counts) / counts
    np.testing.assert_allclose(shares, 0.4, atol=0.02)


def test_the_networks_are_those_of_appendix_d():
    data = draw_clients(
        "digits",
        None,
        POPULATIONS["digits"],
        partition="clusters",
        flipped=0.0,
        flips="training",
        seeds=[0],
    )
    task = classifier(data.select(0), dropout_rate=0.5)
    assert task.module.hidden == (64, 30)
    assert (task.module.dropout_rate, task.rngs) == (0.5, ("dropout",))
    tweets = draw_clients(
        "sent140",
        None,
        POPULATIONS["digits"],
        partition="clusters",
        flipped=0.3,
        flips="training",
        seeds=[0],
    )
    assert tweets.kind == "surrogate"
    assert classifier(tweets.select(0), dropout_rate=0.0).module.hidden == (128, 86, 30)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "cifar"}, "dataset = 'cifar'"),
        ({"directory": Path("nowhere"), "dataset": "fmnist"}, "nowhere"),
        ({"directory": Path("nowhere"), "dataset": "sent140"}, "nowhere"),
        ({"directory": Path("nowhere"), "dataset": "digits"}, "leave out --data"),
        ({"cohort_size": 11}, "cohort_size is 11; it must be at most num_clients = 10"),
        ({"methods": {"q": {"name": "qffl", "q": -1.0}}}, "methods.q"),
        ({"methods": {"FedProx": {"name": "fedprocks"}}}, "methods.FedProx"),
        ({"methods": {"FedProx": {"name": "fedprox", "mew": 1.0}}}, "methods.FedProx"),
        ({"methods": {}}, "methods"),
        ({"flipped": 1.5}, "flipped = 1.5"),
        ({"byzantine": (2.0,)}, "byzantine"),
        ({"learning_rates": ()}, "learning_rates"),
        ({"num_seeds": 0}, "num_seeds = 0"),
        ({"byzantine": (0.1,)}, "begin with 0.0"),
        ({"methods": {"FedProx": {"name": "fedprox", "mu": []}}}, "mu has no values"),
        ({"points": {"Fed": AT}}, "points.Fed: no such method"),
        ({"points": {"FedProx": AT}}, r"points.FedProx.own is \{\}; it must have mu"),
        ({"points": {"FedAvg": AT | {"own": {"q": 1.0}}}}, "it must have nothing"),
        ({"points": {"qFFL": AT | {"own": {"q": -1.0}}}}, "points.qFFL"),
        ({"points": {"FedAvg": AT | {"local_steps": 0}}}, "local_steps"),
        ({"flips": "test"}, "flips"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_computed(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of("maxfl-table1", **changes)
