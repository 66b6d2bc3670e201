"""Runs split over 1, 2 and 8 devices agree with one device without a mesh."""

import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import (
    Experiment,
    advance,
    afl,
    apfl,
    attacked,
    fedavg,
    feddyn,
    full_participation,
    local_sgd,
    mfa_rand,
    mfa_rr,
    mifa,
    mwfed,
    power_of_choice,
    run,
    scaffold,
    simulate,
    sweep,
)
from fedjax_mm.asynchrony import fedast
from fedjax_mm.availability import dropping
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.data import client_data, shared_client_data, stack_data, synthetic
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.overrides import load
from fedjax_mm.robust import median, robust
from fedjax_mm.sweeps import Callback, Execution, Grid, InterruptedRunError, Setup, layout, plan
from fedjax_mm.tasks import (
    LogisticRegression,
    Tuning,
    classification,
    f1,
    requiring,
    with_clients,
    with_metrics,
)
from fedjax_mm.tools.compiler import SAFE
from tests.helpers import Measured, Towards, counting, slow_unless
from tests.sweeps.test_devices import ASSIGNMENTS, N, close

LOCAL = local_sgd(0.1, steps=2)
STATEFUL = {
    "counting": (counting(), mfa_rand(N, 3)),  # all 13 clients train, in cohorts of 4 or 5
    "scaffold": (scaffold(LOCAL), dropping(mfa_rr(N, 2, cohort_size=5), 0.4)),
    "feddyn": (feddyn(LOCAL, alpha=0.1), mfa_rand(N, 2, cohort_size=3)),
    "mifa": (mifa(LOCAL), dropping(mfa_rand(N, 2, cohort_size=5), 0.4)),
    "apfl": (apfl(LOCAL, alpha=0.5), mfa_rr(N, 2, cohort_size=5)),
    "momentum": (
        fedavg(local_sgd(0.1, steps=2, momentum=0.9, keeps="client")),
        mfa_rand(N, 2, cohort_size=5),
    ),
    "compressed": (compressed(fedavg(LOCAL), top_k(0.5)), mfa_rand(N, 2, cohort_size=5)),
    "robust": (robust(compressed(fedavg(LOCAL), top_k(0.5)), median()), mfa_rand(N, 2)),
    "afl": (afl(LOCAL, mixture_rate=0.1), full_participation(N)),
}


def stateful_run(name, client_axis=None):
    """The states and traces of two replicas, after a run and its continuation."""
    algorithm, assignment = STATEFUL[name]

    def one(rng_key, task):
        parts = task, algorithm, assignment, 4
        state, trace = simulate(rng_key, *parts, client_map=2, client_axis=client_axis)
        return state.models, trace, advance(state, *parts, client_axis=client_axis)[1]

    return jax.vmap(one, (0, None))


@functools.cache
def stateful_alone(name):
    """The same on one device."""
    return jax.jit(stateful_run(name))(*stateful_inputs())


def stateful_inputs():
    return seed_keys(1, range(2)), Measured(jnp.arange(float(N)) / N)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("count", [slow_unless(count == 8, count) for count in (1, 2, 8)])
def test_states_of_clients_are_those_of_one_device(name, count):
    """8 devices hold 2 clients each, the last one none, and are more than a cohort has clients."""
    where = layout(2, jax.devices()[:count], "clients")
    program = where.over(stateful_run(name, where.client_axis), (0, None))
    actual = jax.jit(program)(*stateful_inputs())
    close(actual, stateful_alone(name), 0 if name == "counting" else 1e-6)


def planned(monkeypatch, setup, count):
    """A plan of one run with 513 clients, of which a device holds a share."""
    monkeypatch.setattr(plan, "layout", lambda n, axis: layout(n, jax.devices()[:count], axis))
    return plan.make_plan(Grid(setup, {}, num_rounds=4), split="clients")


def stateful(algorithm):
    return Setup(Measured(jnp.arange(513.0), 1000), algorithm, mfa_rand(513, 1, cohort_size=8))


def with_data():
    """1,000 numbers of each client, in examples of unequal clients."""
    rows = [(np.ones((n, 100), np.float32), np.zeros(n, int)) for n in [8, 12] * 256 + [10]]
    data = FederatedData("ones", "synthetic", 2, client_data(rows), client_data(rows[:1]))
    task = classification(data, LogisticRegression(2), block_size=64)
    return Setup(task, fedavg(LOCAL), mfa_rand(513, 1, cohort_size=8))


@pytest.mark.parametrize(
    ("setup", "line"),
    [
        (
            stateful(scaffold(LOCAL)),
            "each device holds 0.5 MiB of 2.0 MiB of the clients' states, and all of the data (0.0 "
            "MiB), because Measured does not declare that it divides them",
        ),
        (
            with_data(),
            "each device holds no states of clients, and 0.5 MiB of 2.0 MiB of the data",
        ),
    ],
    ids=["states", "data"],
)
def test_a_device_holds_its_share(monkeypatch, setup, line):
    needed = {}
    for count in (1, 2, 4):
        made = planned(monkeypatch, setup, count)
        needed[count] = plan.memory_of(made.compiled[0].call)
    whole = 513 * 1000 * 4
    assert whole < needed[1] < 1.1 * whole
    for count in (2, 4):
        assert needed[count] < needed[1] / count + 0.1 * whole
    assert made.lines[2] == line
    assert len(made.lines) == 3


def test_a_plan_says_that_a_server_reads_all_states(monkeypatch):
    assert (
        "server reads the states of all clients"
        in planned(monkeypatch, stateful(mifa(LOCAL)), 2).lines[3]
    )


def drawn(seed, num_clients=N, low=1, **how):
    """Clients of unequal size, with test examples of their own."""
    rng = np.random.default_rng(seed)

    def store(low, high):
        sizes = rng.integers(low, high, num_clients)
        return client_data([(rng.normal(size=(n, 4)), rng.integers(0, 3, n)) for n in sizes])

    data = FederatedData("drawn", "synthetic", 3, store(low, 9), store(1, 5))
    return classification(data, LogisticRegression(3), **how)


def fields(task, algorithm=None, assignment=None):
    algorithm = algorithm or fedavg(local_sgd(0.1, epochs=1, batch_size=3))
    return Setup(task, algorithm, assignment or mfa_rand(N, 1, cohort_size=5))


EVERY = ["loss", "train_accuracy", "test_accuracy"]
DIVIDED = {
    "stateful": lambda seed: fields(drawn(0), scaffold(LOCAL)),
    "whole scores": lambda seed: fields(drawn(0, metrics={"f1": f1})),
    "of clients": lambda seed: fields(with_clients(drawn(0), EVERY)),
    "personal": lambda seed: fields(with_clients(drawn(0), EVERY), apfl(LOCAL, alpha=0.5)),
    "requiring": lambda seed: fields(
        requiring(drawn(0), np.linspace(0.5, 1.5, N), num_unseen=3),
        assignment=mfa_rand(N - 3, 1, cohort_size=5),
    ),
    "attacked": lambda seed: fields(
        attacked(drawn(0), np.arange(N) < 3, loss_factor=5.0),
        assignment=power_of_choice(N, 1, cohort_size=3, candidates=6),
    ),
    "models": lambda seed: fields(
        [drawn(0), drawn(1), drawn(0, column=None)], assignment=mfa_rr(N, 3)
    ),
    "alike models": lambda seed: fields([drawn(0)] * 2, assignment=mfa_rr(N, 2)),
    "asynchronous": lambda seed: fields(drawn(0), assignment=fedast(N, 1, at_work=4, ratio=1)),
    "seeds in one store": lambda seed: fields(classification(STACK.select(seed), NETWORK)),
    "seeds of their own": lambda seed: fields(drawn(seed, low=8)),
}
NETWORK = LogisticRegression(3)
STACK = stack_data(
    [synthetic(N, dim=4, num_classes=3, seed=seed, test_fraction=0.2) for seed in (0, 1)]
)


@functools.cache
def divided(name, count):
    """A plan and its result on some devices."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "layout", lambda n, axis: layout(n, jax.devices()[:count], axis))
        how = Execution(split="clients", callbacks=[Callback(on_start=seen.append)])
        result = sweep(DIVIDED[name], {}, num_rounds=3, num_seeds=2, execution=how)
    return seen[0], result


@pytest.mark.parametrize(
    "name",
    [slow_unless(name in ("of clients", "models", "seeds in one store"), name) for name in DIVIDED],
)
def test_divided_data_give_the_records_of_one_device(name):
    """8 devices hold 2 clients each, the last one none."""
    made, actual = divided(name, 8)
    expected = divided(name, 1)[1]
    close(dict(actual.data_vars), dict(expected.data_vars), 1e-6)
    assert "of the data" in made.lines[2]


def own(task, params):
    return {"first": jax.tree.leaves(task.train.examples)[0][0, 0]}


WHOLE = {
    "WithMetrics does not declare": lambda: fields(with_metrics(drawn(0), own)),
    "Requiring does not declare": lambda: fields(
        requiring(drawn(0), np.ones(N), tuning=Tuning(0.1, 1))
    ),
    "prepare may read": lambda: fields(drawn(0))._replace(prepare=lambda rng_key, setup: setup),
    "a function of all clients, such as the server's, reads them": lambda: fields(
        requiring(drawn(0), np.ones(N)), mwfed(LOCAL)
    ),
    "clients share them": lambda: fields(dataclasses.replace(drawn(0), train=SHARED, test=SHARED)),
}
EXAMPLES = np.zeros((2, 4), np.float32), np.arange(2)
SHARED = shared_client_data(EXAMPLES, [[[0], [0, 1]] * 6 + [[1]]]).select(0)


@pytest.mark.parametrize("why", WHOLE)
def test_a_plan_says_why_data_are_not_divided(why):
    """Functions that may read other clients' examples would read wrong ones."""
    made = plan.make_plan(Grid(WHOLE[why](), {}, num_rounds=4), split="clients", compiles=False)
    assert f", because {why}" in " ".join(made.lines)


def test_dense_updates_and_gradients_are_summed_once():
    """JAX must not sum a gradient inside the mesh over the devices a second time."""
    where = layout(1, jax.devices()[:8], "clients")
    task = Towards(jnp.arange(float(N)))

    def one(rng_key, task):
        start = {"w": jnp.zeros(3)}
        return (
            simulate(
                rng_key,
                task,
                fedavg(1.0, local_steps=1),
                mfa_rand(N, 1),
                1,
                params=start,
                client_axis="clients",
            )[0]
            .models[0]
            .params["w"]
        )

    moved = jax.jit(where.over(jax.vmap(one, (0, None)), (0, None)))(seed_keys(0, range(1)), task)
    np.testing.assert_allclose(moved, np.full((1, 1, 3), (N - 1) / 2), rtol=1e-6)


def some_seeds(num_seeds):
    config = {
        "task": {"num_clients": N, "block_size": 2, "mu": 0.05},
        "num_models": 3,
        "num_rounds": 6,
        "num_seeds": num_seeds,
        "algorithms": {
            "RR": {"assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 2}
        },
    }
    return run(Experiment.model_validate(config))


@functools.cache
def eleven_seeds_alone():
    first = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedjax_mm.sweeps.plan.layout", lambda n, axis: layout(n, first, axis))
        return some_seeds(11)


@pytest.mark.parametrize("num_seeds", [slow_unless(n in (3, 11), n) for n in (1, 3, 8, 11)])
def test_run_uses_all_devices_and_drops_the_padding(num_seeds):
    """The number of seeds is below, equal to, and above that of devices, which is 8 here."""
    everywhere, alone = some_seeds(num_seeds), eleven_seeds_alone()
    assert everywhere.sizes["seed"] == num_seeds
    for name in alone.data_vars:
        expected = alone[name].isel(seed=slice(num_seeds))
        np.testing.assert_allclose(everywhere[name], expected, rtol=2e-6)


ONE = {
    name: f"""
num_models = 3
num_rounds = 10
num_seeds = 3

[task]
name = "quadratic"
num_clients = 13

[algorithms.A]
assignment = {assignment}
learning_rate = 0.1
local_steps = 5
"""
    for name, assignment in (
        ("mfa_rand", '{ name = "mfa_rand" }'),
        ("mfa_rr", '{ name = "mfa_rr", cohort_size = 11 }'),
    )
}


ONE["data"] = """
num_models = 2
num_rounds = 4
num_seeds = 2

[task]
name = "synthetic"
num_clients = 13

[algorithms.A]
assignment = { name = "mfa_rr" }
learning_rate = 0.1
local_steps = 2
"""

AXES = """
[axes]
learning_rate = [0.05, 0.1, 0.2]
"""


COMMANDS = """
import json
import sys
from fedjax_mm import cli

for arguments in json.loads(sys.argv[1]):
    try:
        cli.main(arguments)
    except SystemExit as end:
        if end.code:
            raise
"""


STRUCK = """
import signal
from fedjax_mm.sweeps import plan, checkpoint as saving

def struck(number, usual):
    def then(*args):
        signal.raise_signal(number)
        return usual(*args)
    return then
"""


def in_two_processes(directory, commands, seconds=None, code=""):
    """Runs commands in two processes, the second of which begins with `code`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def start(process):
        first = ["--devices", "1", "--process", f"{process}/2@localhost:{port}", *commands[0]]
        return subprocess.Popen(
            [sys.executable, "-c", code * process + COMMANDS, json.dumps([first, *commands[1:]])],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    processes = [start(0), start(1)]
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


SPLITS = [
    (name, split, precision)
    for precision in ("float32", "float64")
    for split in ("replicas", "clients")
    for name in ASSIGNMENTS
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([("mfa_rr", "replicas", "float64"), ("data", "clients", "float32")], id="two"),
        pytest.param([*SPLITS, ("data", "clients", "float32")], id="all", marks=pytest.mark.slow),
    ],
)
def test_two_processes_agree_with_one(tmp_path, cases):
    """Neither nine replicas nor 13 clients in 3 cohorts divide evenly over two devices."""
    commands = []
    for name, split, precision in cases:
        (tmp_path / f"{name}.toml").write_text(ONE[name] + AXES)
        options = ["--set", f"precision={precision}", "--split", split]
        where = ["--out", f"{split}-{precision}"]
        commands.append(["sweep", f"{name}.toml", *where, *options])

    codes, outputs = in_two_processes(tmp_path, commands)
    assert codes == [0, 0], outputs
    assert outputs[0][1].count("on 2 of 2 devices on 1 host (") == len(cases)
    assert outputs[0][0].count("result.nc, manifest.json") == len(cases)
    said = [line for line in outputs[1][0].splitlines() if not line.startswith("[Gloo]")]
    assert said == []  # only the first process prints and writes

    @functools.cache
    def alone(name, precision):
        return run(load(tmp_path / f"{name}.toml", Experiment, [f"precision={precision}"]))

    for name, split, precision in cases:
        tolerance = 1e-6 if precision == "float32" else 1e-12
        expected = alone(name, precision)
        path = tmp_path / f"{split}-{precision}" / name / "result.nc"
        with xr.open_dataset(path) as result:
            for each in expected.data_vars:
                scale = np.abs(expected[each]).max().item()
                np.testing.assert_allclose(
                    result[each], expected[each], rtol=0, atol=tolerance * scale, err_msg=each
                )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strike", "codes", "said"),
    [
        pytest.param(
            "plan._lower = struck(signal.SIGTERM, plan._lower)\n",
            [143, 143],
            "SIGTERM: stopped before it computed anything; continue with --resume, "
            "or in Python by the same call with Checkpoints(directory, resume=True)\n",
            id="stopped while it compiles",
        ),
        pytest.param(
            "saving.Saving.save = struck(signal.SIGKILL, saving.Saving.save)\n",
            [1, -9],
            "if another process has ended, start all of them again with --resume\n",
            id="killed while it computes",
        ),
    ],
)
def test_two_processes_end_together_with_a_one_line_reason(tmp_path, strike, codes, said):
    """Otherwise the surviving process would wait for minutes and then show a traceback."""
    (tmp_path / "both.toml").write_text(ONE["mfa_rr"] + AXES)
    command = ["sweep", "both.toml", "--resume"]
    ended, outputs = in_two_processes(tmp_path, [command], 90, STRUCK + strike)
    assert ended == codes, outputs
    last = outputs[0][1]
    assert last.endswith(said)
    assert "Traceback" not in last
    assert in_two_processes(tmp_path, [command])[0] == [0, 0]


PATIENT = """
import os
import jax
from fedjax_mm.sweeps import use_cpu_devices
from fedjax_mm.sweeps.devices import layout
use_cpu_devices(2)
where = layout(1, axis="clients")
total = where.over(lambda x: jax.lax.psum(x + jax.lax.axis_index("clients"), "clients"))
assert jax.jit(total)(jax.numpy.ones(1)).tolist() == [3]
print(os.environ["XLA_FLAGS"])
"""


def test_collectives_have_no_timeout():
    """The user's XLA flags come last, so that they take precedence.

    By default XLA aborts after 40 seconds. Clients of 925, 54, 63 and 86 examples on two devices
    reached that limit.
    """
    given = "--xla_cpu_collective_timeout_seconds=7"
    done = subprocess.run(
        [sys.executable, "-c", PATIENT],
        env=os.environ | {"XLA_FLAGS": given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warn, terminate, network, safe, last = done.stdout.split()
    assert safe == SAFE
    assert warn == "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1000000000"
    assert terminate == "--xla_cpu_collective_call_terminate_timeout_seconds=1000000000"
    assert network == "--xla_cpu_collective_timeout_seconds=1000000000"
    assert last == given


def test_stopping_one_process_while_it_compiles_stops_all(monkeypatch):
    def placing(*args):
        signal.raise_signal(signal.SIGTERM)
        return [], None, 0.0, 0.0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(plan, "_place", placing)
    monkeypatch.setattr(plan, "agree", lambda *numbers: list(numbers))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InterruptedRunError, match="SIGTERM: stopped before it computed anything"):
        plan.make_plan(None)
    assert signal.getsignal(signal.SIGTERM) is before
