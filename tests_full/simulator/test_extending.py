"""The code in docs/extending.md is short, and all ways to run it agree."""

import functools
import re
import subprocess
import sys
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_mm import fedprox, full_participation, local_sgd, simulate, sweep, to_dataset
from fedjax_mm.base import Cohort
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.sweeps import Execution, Grid, Setup, layout
from fedjax_mm.tasks import MLP, classification
from tests.helpers import (
    NOTHING_TO_SEE,
    labelled_data,
    remembering,
    roll_out,
    rows_of,
    slow_unless,
)
from tests_full.test_docs import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
PARTS = {
    "Logistic": "class Logistic:",
    "scaffold": "def scaffold(",
    "least_trained": "def least_trained(",
    "rank_list": "def rank_list(",
}
N, M, K, ROUNDS, SEEDS = 7, 3, 4, 36, 2


@pytest.fixture(scope="module")
def page():
    """Executes the definitions on the page, without the runs at its end."""
    names = {"__name__": "extending"}
    for block in BLOCKS:
        exec(compile(block.partition("tasks = ")[0], "extending.md", "exec"), names)
        if "def problem(" in block:
            return names
    raise AssertionError("the page has no problem")


def problems(page):
    """A small version of the page's problem for each model."""
    draw = functools.partial(page["problem"], num_clients=N, num_examples=12, dim=3)
    drawn = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), M))
    return [jax.tree.map(itemgetter(m), drawn) for m in range(M)]


@pytest.fixture(scope="module")
def tasks(page):
    """The page's regression, an MLP with three classes, and another regression."""
    first, _, last = problems(page)
    return [first, classification(labelled_data(N), MLP(3, hidden=(4,))), last]


def one_run(page, client_map, client_axis=None):
    """The page's SCAFFOLD and bandit with one seed."""

    def run(rng_key, tasks):
        return simulate(
            rng_key,
            tasks,
            page["scaffold"](local_sgd(0.1, steps=2, batch_size=4)),
            remembering(page["rank_list"](N, M, K), ROUNDS),
            ROUNDS,
            client_map=client_map,
            client_axis=client_axis,
            record_every=9,
        )

    return run


@pytest.fixture(scope="module")
def expected(page, tasks):
    """Results of all clients and seeds at once, on one device."""
    program = jax.jit(jax.vmap(one_run(page, "auto"), (0, None)))
    return jax.device_get(program(seed_keys(0, range(SEEDS)), tasks))


def close(actual, expected):
    """Asserts equality to 1e-5 of the largest number in an array, and exact counts."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.nanmax(np.abs(b)))
        elif not jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


def ruff(*arguments, code):
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--line-length=100", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", PARTS)
def test_each_part_is_complete_in_at_most_40_lines(name):
    (code,) = (block for block in BLOCKS if PARTS[name] in block)
    assert len(code.splitlines()) <= 40
    undefined_or_unused = ruff("check", "--select=E,F,I,B", code=code)
    assert undefined_or_unused.returncode == 0, undefined_or_unused.stdout
    names = {"__name__": "extending"}
    exec(compile(code, "extending.md", "exec"), names)
    assert name in names


def test_the_code_is_formatted():
    for code in BLOCKS:
        assert ruff("format", code=code).stdout == code


@pytest.mark.parametrize(
    "shorter",
    [
        {"num_rounds=50": "num_rounds=30", "num_seeds=4": "num_seeds=2"},
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=["shorter", "as it stands"],
)
def test_the_page_runs_and_prints(capsys, shorter):
    names = {"__name__": "extending"}
    assert all(any(old in block for block in BLOCKS) for old in shorter)
    for block in BLOCKS:
        for old, new in shorter.items():
            block = block.replace(old, new)
        exec(compile(block, "extending.md", "exec"), names)
    assert "availability" in capsys.readouterr().out
    assert (names["trace"].metrics["loss"][-1] < names["trace"].metrics["loss"][0]).all()
    loss = names["result"].loss
    assert loss.sizes["algorithm"] == 2
    assert (loss.isel(round=-1) < loss.isel(round=0)).all()
    end = loss.isel(round=-1).sel(learning_rate=0.1).mean(("seed", "model"))
    few, all_there = end.sel(algorithm="fedavg") - end.sel(algorithm="scaffold")
    assert few > all_there > 0


def test_one_seed_and_client_at_a_time_agrees_with_all_at_once(page, tasks, expected):
    """Compares parameters, states of servers and clients, cohorts, losses and traces."""
    (controls,) = jax.tree.leaves(expected[0].models[0].clients)
    assert np.all(np.abs(controls).max((2, 3)) > 0.1)  # every model has moved clients' states
    program = jax.jit(one_run(page, "scan"))
    for seed, key in enumerate(seed_keys(0, range(SEEDS))):
        close(program(key, tasks), jax.tree.map(itemgetter(seed), expected))


@pytest.mark.slow  # test_allocation does this with the library's bandit
def test_clients_on_two_devices_agree_with_one(page, tasks, expected):
    """Each device computes its share of a group two clients at a time."""
    where = layout(SEEDS, jax.devices()[:2], "clients")
    seeds = jax.vmap(one_run(page, 2, where.client_axis), (0, None))
    close(jax.jit(where.over(seeds, (0, None)))(seed_keys(0, range(SEEDS)), tasks), expected)


@pytest.mark.slow  # test_devices does this with the library's methods
def test_replicas_of_a_sweep_on_two_devices_agree_with_one(page, tasks, expected, monkeypatch):
    def build(learning_rate, gamma):
        algorithm = page["scaffold"](local_sgd(learning_rate, steps=2, batch_size=4))
        return Setup(tasks, algorithm, page["rank_list"](N, M, K, gamma))

    devices = jax.devices()[:2]
    monkeypatch.setattr("fedjax_mm.sweeps.plan.layout", lambda n, axis: layout(n, devices, axis))
    swept = sweep(
        Grid(
            build,
            {"learning_rate": [0.05, 0.1], "gamma": [0.5, 0.9]},
            num_rounds=ROUNDS,
            num_seeds=SEEDS,
            record_every=9,
            client_map="vmap",
        ),
        execution=Execution(split="replicas"),
    )
    same = swept.sel(learning_rate=0.1, gamma=0.9)
    alone = to_dataset(expected[1], ["seed"])
    for name in alone:
        np.testing.assert_allclose(same[name].values, alone[name].values, rtol=1e-4)
    assert not np.array_equal(swept.sel(learning_rate=0.1, gamma=0.5).loss, same.loss)


def rank_list_loop(losses, num_clients, num_models, cohort_size, gamma=0.9):
    """Sets of clients ``[T][M]`` if client k reports the loss ``losses[t, m, k]``."""
    total, count = np.zeros((2, num_models, num_clients))
    time, rounds = 0.0, []
    for t, loss in enumerate(losses, start=1):
        groups = [set() for _ in range(num_models)]
        if t <= num_models:
            groups[t - 1] = set(range(num_clients))
        else:
            order = np.roll(np.arange(num_models), -(t - 1 if num_models > 2 else 0))
            ranked = {}
            for m in range(num_models):
                bound = total[m] / count[m] + np.sqrt(2 * np.log(time) / count[m])
                ranked[m] = sorted(range(num_clients), key=lambda c, bound=bound: -bound[c])
            for turn in range(cohort_size):
                m = order[turn % num_models]
                taken = set().union(*groups)
                groups[m].add(next(c for c in ranked[m] if c not in taken))
        for m in range(num_models):
            for c in range(num_clients):
                new = loss[m, c] if c in groups[m] else 0.0
                total[m, c] = new + gamma * total[m, c]
                count[m, c] = (new > 0) + gamma * count[m, c]
        time = 1 + gamma * time
        rounds.append(groups)
    return rounds


def members(clients):
    """Sets of clients in rows ``[T, M, n]``, none of which may repeat a client."""
    groups = [[[c for c in row.tolist() if c >= 0] for row in groups] for groups in clients]
    assert all(len(set(row)) == len(row) for rows in groups for row in rows)
    return [[set(row) for row in rows] for rows in groups]


def test_the_bandit_in_a_simulation_matches_the_papers_loop(expected):
    """Models differ in structure, and losses are the clients' reports."""
    _, clients, losses = expected[0].assignment
    for seed in range(SEEDS):
        by_client = np.full((ROUNDS, M, N), np.nan)
        t, m, place = np.nonzero(clients[seed] >= 0)
        by_client[t, m, clients[seed][t, m, place]] = losses[seed][t, m, place]
        assert np.all(losses[seed][clients[seed] < 0] == 0)
        groups = members(clients[seed])
        assert groups == rank_list_loop(by_client, N, M, K)
        assert {len(rows[0]) for rows in groups[M:]} == {1, 2}  # of the first model
    assert members(clients[0]) != members(clients[1])


@pytest.mark.parametrize(
    "size",
    [(7, 3, 4), (6, 2, 3), *(slow_unless(False, each) for each in ((5, 1, 2), (9, 4, 9)))],
    ids=str,
)
def test_the_bandit_matches_the_papers_loop(page, size):
    """Losses are random, and some are large."""
    bandit = page["rank_list"](*size)
    losses = np.random.default_rng(0).gamma(1, 1, (60, size[1], size[0])).astype(np.float32)

    def one_round(state, at):
        t, loss = at
        groups, state = bandit.assign(None, t, state, NOTHING_TO_SEE)
        told = loss[groups.models, jnp.maximum(groups.clients, 0)]
        reports = {"loss": jnp.where(groups.clients >= 0, told, 0)}
        return bandit.observe(t, groups, reports, state), rows_of(groups, size[1])

    clients = jax.jit(
        lambda x: lax.scan(one_round, bandit.init(None, NOTHING_TO_SEE), (jnp.arange(1, 61), x))[1]
    )
    assert members(np.asarray(clients(losses))) == rank_list_loop(losses, *size)


def test_averaging_makes_fedprox(page, tasks):
    """The page's FedProx equals the library's exactly."""

    @functools.partial(jax.jit, static_argnums=0)
    def run(algorithm, task):
        return simulate(jax.random.key(0), task, algorithm, full_participation(N), 3)[1].metrics

    of_library = fedprox(local_sgd(0.1, steps=10, batch_size=10), mu=1.0)
    actual, expected = run(page["fedprox"], tasks[0]), run(of_library, tasks[0])
    np.testing.assert_array_equal(actual["loss"], expected["loss"])


def test_clients_and_data_do_not_depend_on_precision(page, tasks):
    def groups():
        return roll_out(page["least_trained"](13, 3, 0.6), jax.random.key(5), 10)

    single = groups()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(groups(), single)
        for a, b in zip([tasks[0], tasks[2]], problems(page)[::2], strict=True):
            assert b.x.dtype == jnp.float64
            np.testing.assert_array_equal(a.x, b.x)
            np.testing.assert_array_equal(a.y, b.y)


def test_clients_train_their_least_trained_model(page):
    groups = roll_out(page["least_trained"](40, 3, 0.5), jax.random.key(6), 300)
    trained = np.stack([(groups == client).any(-1) for client in range(40)], 1)  # [T, N, M]
    assert trained.sum(-1).max() == 1
    counts = trained.cumsum(0)
    assert (counts.max(-1) - counts.min(-1)).max() == 1
    share, error = trained.any(-1).mean(), np.sqrt(0.25 / (300 * 40))
    assert abs(share - 0.5) < 4 * error


@pytest.mark.parametrize("scale", [None, 2.0])
def test_scaffold_matches_the_papers_loop(page, x64, scale):
    """Full batches, all clients and one model, with option II written out.

    Doubling the weights of all clients changes nothing.
    """
    rate, steps, rounds = 0.1, 3, 8
    algorithm = page["scaffold"](local_sgd(rate, steps=steps))
    task, everybody = problems(page)[0], remembering(full_participation(N), rounds)

    def assign(rng_key, t, state, look):
        groups, state = everybody.assign(rng_key, t, state, look)
        scaled = None if scale is None else jnp.full((1, N), scale)
        return Cohort.of_rows(groups.clients[None], scaled), state

    run = jax.jit(lambda task: simulate(key, task, algorithm, assignment, rounds)[0])
    key, assignment = jax.random.key(0), everybody._replace(assign=assign)
    state = run(task)
    x, mean, own, losses = np.zeros(3), np.zeros(3), np.zeros((N, 3)), np.zeros((rounds, 1, N))
    gradient = jax.jit(jax.value_and_grad(task.loss))
    for t in range(rounds):
        new_own, changes = own.copy(), []
        for k in range(N):
            y = x.copy()
            for _ in range(steps):
                loss, slope = map(np.asarray, gradient(y, (task.x[k], task.y[k])))
                losses[t, 0, k] += loss / steps
                y = y - rate * (slope - own[k] + mean)
            new_own[k] = own[k] - mean + (x - y) / (steps * rate)
            changes.append(y - x)
        x, mean = x + np.mean(changes, 0), mean + (new_own - own).mean(0)
        own = new_own
    np.testing.assert_allclose(state.models[0].params[0], x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state.models[0].clients[0], own, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state.models[0].server[1][0], mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(state.assignment[2], losses, rtol=0, atol=1e-12)
