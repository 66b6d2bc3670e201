"""Tables 1 to 6, Figures 3, 4, 7 of Cho et al.: the best points, the claims, and small runs."""

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
from fedjax_mm.papers.cho2022 import comparison, runs, table2, table4
from fedjax_mm.papers.cho2022.clients import POPULATIONS, classifier, draw_clients
from fedjax_mm.papers.cho2022.grid import DIMS, POINT
from fedjax_mm.papers.cho2022.runs import run_comparison, run_grid, select, warm_up
from fedjax_mm.plots import save_figure
from fedjax_mm.sweeps import execute
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.execute import Execution
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
AXES = ("algorithm", *DIMS.values())
AT = {"learning_rate": 0.1, "local_steps": 2, "batch_size": 8}
METRICS = ("accuracy", "appeal", "preferred_accuracy", "loss", "train_loss")


def config_of(name, **changes):
    item = ITEMS[name]
    return validate(type(item.settings), item.settings.model_dump() | changes)


def measured_of(config, values, *metrics):
    """Metrics of the best points of a result that is made up."""
    return comparison.measure(grid(config, values), config, id="maxfl-fig3", metrics=metrics)


def grid(config, values):
    """A result in which each metric of each method is what a function of where it is says."""
    points = {name: config.candidates(name)[-1] for name in config.methods}
    variants = [next(iter(config.at(*each).variants)) for each in points.items()]
    axes = {
        "algorithm": list(points),
        "byzantine": list(config.byzantine),
        "warm_up_steps": list(config.requirement.num_steps),
        "demand_rate": list(config.requirement.learning_rates),
        "seed": list(range(config.num_seeds)),
        "round": [0, config.num_rounds],
    }
    shape = tuple(map(len, axes.values()))
    names = [*METRICS, *(f"unseen_{name}" for name in METRICS)]
    arrays = {name: np.zeros(shape) for name in names}
    for place in np.ndindex(shape):
        where = {name: axis[i] for (name, axis), i in zip(axes.items(), place, strict=True)}
        for name in names:
            arrays[name][place] = values(name, variant=variants[place[0]], **where)
    dataset = xr.Dataset({name: (tuple(axes), x) for name, x in arrays.items()}, axes)
    dataset["idle_rounds"] = xr.zeros_like(dataset["accuracy"], int)
    dataset["diverged"] = xr.full_like(dataset["accuracy"].isel(round=0, drop=True), -1, int)
    dataset.attrs["manifest"] = {"data": "real", "datasets": ["made up"]}
    coords = {key: [getattr(each, key) for each in points.values()] for key in POINT[1:]}
    coords["variant"] = variants
    return dataset.assign_coords({key: ("algorithm", each) for key, each in coords.items()})


def ours(lead, noise=0.0):
    """MaxFL is ahead by `lead` in every metric; seeds differ by `noise`."""

    def values(name, variant, seed, **where):
        return 0.5 + (variant == "MaxFL") * (lead + noise * (-1) ** seed)

    return values


@pytest.mark.parametrize(
    ("lead", "noise", "by", "verdict"),
    [
        (0.2, 0.0, 0.0, "holds"),
        (0.0, 0.0, 0.0, "fails"),
        (0.1, 0.1, 0.0, "open"),
        (0.1, 0.01, 0.0, "holds"),
        (-0.1, 0.01, 0.0, "fails"),
        (0.1, 0.0, 5.0, "holds"),
        (0.1, 0.01, 5.0, "open"),
        (0.1, 0.0, 10.5, "fails"),
    ],
)
def test_exceeding_is_judged_by_standard_errors(lead, noise, by, verdict):
    config = config_of("maxfl-fig3", num_seeds=4)
    measured = measured_of(config, ours(lead, noise), "appeal", "unseen_appeal")
    claims = comparison.exceeds(measured, config, by=by)
    assert [claim.verdict for claim in claims] == [verdict, verdict]
    assert {claim.seeds for claim in claims} == {4}
    assert all("SCAFFOLD" in claim.evidence for claim in claims)


def test_one_seed_leaves_all_open():
    """Its spread is not known."""
    config = config_of("maxfl-fig3", num_seeds=1)
    measured = measured_of(config, ours(0.3), "appeal")
    claims = [*comparison.exceeds(measured, config), *comparison.not_below(measured, config)]
    assert [claim.verdict for claim in claims] == ["open", "open"]
    for claim in claims:
        assert "ahead of SCAFFOLD: 30.0" in claim.evidence
        assert "±" not in claim.evidence


def test_without_maxfl_or_without_others_nothing_is_claimed():
    for methods in ({"FedAvg": {"name": "fedavg"}}, {"MaxFL": {"name": "maxfl"}}):
        config = config_of("maxfl-table1", methods=methods)
        findings = ITEMS["maxfl-table1"].judge(grid(config, ours(0.3)), config)
        assert findings.claims
        assert {claim.verdict for claim in findings.claims} == {"fails"}


@pytest.mark.parametrize(
    "changes", [{"byzantine": (0.0,)}, {"methods": {"MW-Fed": {"name": "mwfed"}}}]
)
def test_without_attackers_nothing_is_withstood(changes):
    config = config_of("maxfl-table2", **changes)
    findings = ITEMS["maxfl-table2"].judge(grid(config, lambda name, **w: 0.5), config)
    assert findings.claims
    assert not any(claim.holds for claim in findings.claims)


@pytest.mark.parametrize(("clients", "attackers"), [(10, [0, 1, 1]), (100, [0, 5, 10])])
def test_attackers_are_rounded_up(clients, attackers):
    """A share of few clients is one attacker, and what is whole stays as it is."""

    def asked(share):
        return Byzantine(fraction=0.0).model_copy(update={"fraction": share})

    @jax.jit
    def updates(share):
        algorithm = asked(share).wrap(fedavg(0.1, local_steps=1), clients)
        task = requiring(quadratic(clients, 1, mu=0.1), jnp.full(clients, -1e9))
        task = asked(share).wrap_task(task)
        staying = appealing(full_participation(clients), cohort_size=clients, from_round=1)
        return simulate(jax.random.key(0), task, algorithm, staying, 1)[1].client_updates[1, 0]

    for share, number in zip((0.0, 0.05, 0.1), attackers, strict=True):
        assert updates(np.float32(share)) == number
        for given in (share, np.float32(share)):
            assert asked(given).attackers(clients).sum() == number


@pytest.mark.parametrize(
    ("lead", "noise", "verdict"),
    [(0.0, 0.0, "holds"), (-0.1, 0.0, "fails"), (-0.1, 0.2, "open"), (0.1, 0.01, "holds")],
)
def test_not_being_below_is_judged_by_standard_errors(lead, noise, verdict):
    config = config_of("maxfl-fig4", num_seeds=4)
    measured = measured_of(config, ours(lead, noise), "unseen_preferred_accuracy")
    (claim,) = comparison.not_below(measured, config)
    assert claim.verdict == verdict


@pytest.mark.parametrize(
    ("maxfl", "mwfed", "holds"),
    [(0.05, 0.2, [True, True]), (0.15, 0.2, [False, True]), (0.05, 0.04, [True, False])],
)
def test_attackers_take_from_the_one_and_the_other(maxfl, mwfed, holds):
    def values(name, variant, byzantine, **where):
        lost = {"MaxFL": maxfl, "MW-Fed": mwfed}[variant]
        return 0.8 - lost * (byzantine > 0)

    config = config_of("maxfl-table2")
    claims = table2.withstands(measured_of(config, values, "accuracy", "unseen_accuracy"), config)
    assert [claim.holds for claim in claims] == 2 * holds


@pytest.mark.parametrize(("step", "holds"), [(0.02, True), (0.03, False)])
def test_the_warm_up_matters_little(step, holds):
    def values(name, variant, warm_up_steps, **where):
        return 0.2 + step * warm_up_steps / 50 * (variant == "FedProx (mu = 0.1)")

    config = config_of("maxfl-table4")
    claim, *_ = table4.claims(measured_of(config, values, "appeal"), config)
    assert claim.claim.startswith("GM-Appeal varies by at most 5 points")
    assert claim.verdict == ("holds" if holds else "fails")
    assert "FedProx: " + ("4.0" if holds else "6.0") in claim.evidence


@pytest.mark.parametrize(("test_loss", "holds"), [(1.05, True), (0.95, True), (1.2, False)])
def test_nearly_identical_losses(test_loss, holds):
    def values(name, round, **where):
        return {"loss": test_loss if round else 1.0, "train_loss": 1.0}.get(name, 0.5)

    config = config_of("maxfl-fig7")
    (claim,) = ITEMS["maxfl-fig7"].judge(grid(config, values), config).claims
    assert claim.holds == holds


@pytest.mark.parametrize("name", [*NAMES, "maxfl-demand"])
def test_published_rows_are_rows_of_ours_and_are_drawn(name):
    """What the paper has stands beside what we have: no name differs."""
    item = ITEMS[name]
    result = grid(item.settings, lambda name, **where: 0.5)
    measured, _, (table,) = item.judge(result, item.settings)
    rows = comparison.names_of(measured["mean"])
    assert len(table.rows) == len(rows)
    values = item.paper.get("values", {})
    for numbers in values.values():
        assert set(numbers) <= set(rows)
        assert all(len(row) == measured.sizes["metric"] for row in numbers.values())
    paper = values.get("fmnist", {})
    for label, row, numbers in zip(
        rows, table.rows, measured.published.stack(row=AXES).values.T, strict=True
    ):
        shown = [text for text in row if text.startswith("50.0")]
        wanted = paper.get(label, [np.nan] * measured.sizes["metric"])
        np.testing.assert_array_equal(numbers, wanted)
        assert shown == [f"50.0 ± 0.0 ({x:g})" if np.isfinite(x) else "50.0 ± 0.0" for x in wanted]
    figure = item.figure(result, measured, item.settings)
    assert f"T = {item.settings.num_rounds}" in figure.get_suptitle()
    # Each row is drawn once for each metric, and no panel has more names than can be read.
    panels = {axes.get_title().partition(") ")[2]: len(axes.get_xticks()) for axes in figure.axes}
    kinds = {title.partition(",")[0] for title in measured["metric"].values}
    if item.figure is comparison.figure:
        assert len(panels) == len(figure.axes)
        assert sum(panels.values()) == len(rows) * len(kinds)
        assert max(panels.values()) <= 10


@functools.cache
def small_instance(name, tuning_steps, *methods):
    """An item's config with some methods, and its result."""
    item = ITEMS[name]
    settings = {"methods": {method: item.settings.methods[method] for method in methods}}
    demand = item.settings.requirement
    short = {"num_steps": tuple(steps // 10 for steps in demand.num_steps), "batch_size": 8}
    settings["requirement"] = demand.model_dump() | short
    config = config_of(name, **SMALL | settings | {"tuning_steps": tuning_steps})
    return config, run_comparison(config)


LOWERED: dict = {}  # the programs of the quick instance
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
def test_small_instances(name, tuning_steps, tmp_path):
    """Every item runs from the data to the figure; the digits stand in and it is said."""
    item = ITEMS[name]
    with traced_once(LOWERED if (name, tuning_steps) == QUICK.values else None):
        config, result = small_instance(name, tuning_steps, "MaxFL")
    findings = item.judge(result, config)
    figure = item.figure(result, findings.measured, config)
    save_figure(figure, tmp_path / "figure.png")
    text = " ".join(text.get_text() for text in figure.texts)
    assert "standing in for fmnist" in figure.get_suptitle() + text
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
def test_a_grid_that_was_stopped_continues_bit_by_bit(which, how, tmp_path):
    """Own models are trained again, and are the same; what was saved is not computed again."""
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
        run_comparison(config, Execution(stop_halfway, checkpoints, save_every=0.0))
    first, seen[:] = max(seen), []
    with Checkpoints(tmp_path, resume=True).open() as checkpoints:
        result = run_comparison(
            config,
            Execution(lambda what, done, total: seen.append((what, done)), checkpoints),
        )
    assert min(done for what, done in seen if what.startswith("variant")) > 0
    assert first > 0
    xr.testing.assert_identical(result.drop_attrs(), expected.drop_attrs())


def test_own_models_are_where_the_grid_looks_for_them():
    """Those of every number of steps, rate, draw and client equal a warm-up of that one replica."""
    demand = {"num_steps": (2, 3), "learning_rates": (0.1, 0.05), "batch_size": 8}
    config = config_of("maxfl-table4", **SMALL | {"requirement": demand, "num_rounds": 2})
    population = config.population
    data = draw_clients(
        "digits",
        None,
        population,
        partition="clusters",
        flipped=0.3,
        flips="everywhere",
        seeds=[7, 8],
    )
    own = warm_up(config, data, None)
    clients = population.num_clients + population.num_unseen
    assert own.threshold.shape == own.accuracy.shape == (2, 2, 2, clients)
    assert len(np.unique(own.threshold)) == own.threshold.size

    @functools.partial(jax.jit, static_argnames="num_steps")
    def alone_of(key, data, draw, **how):
        task = classifier(data.select(draw), dropout_rate=config.dropout_rate)
        key = jax.random.fold_in(key, draw)
        start = task.init(jax.random.fold_in(key, 1))
        return own_models(key, task, start, batch_size=8, **how)

    for i, steps in enumerate((2, 3)):
        for rate, draw in ((0, 1), (1, 0)):
            how = {"learning_rate": demand["learning_rates"][rate], "num_steps": steps}
            alone = alone_of(jax.random.key(config.seed), data, draw, **how)
            np.testing.assert_allclose(own.threshold[i, rate, draw], alone.threshold, rtol=1e-5)
            np.testing.assert_allclose(own.accuracy[i, rate, draw], alone.accuracy, rtol=1e-5)


def test_the_whole_grid_of_table_1_is_two_programs_a_method(monkeypatch):
    """Traced, not compiled: 7 methods, 2 sizes of arrays, for 81 points of 9 variants."""
    found = []

    def count(grid, **_):
        found.append([program.label for program in grid.programs])
        raise StopIteration

    monkeypatch.setattr(execute, "make_plan", count)
    monkeypatch.setattr(runs, "warm_up", lambda *_: None)
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
def test_points_that_share_a_program_are_those_of_programs_of_their_own(points):
    """Steps, batches, variants and demands at once, two devices; floats, so to round-off."""
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


def test_each_seed_has_clients_of_its_own_and_a_share_is_flipped():
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


def test_the_models_are_those_of_appendix_d():
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
        ({"points": {"Fed": AT}}, "points.Fed: there is no such method"),
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
