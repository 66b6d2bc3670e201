"""Optimizers and schedules of optax in an experiment file."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import Experiment, fedavg, local_sgd, mfa_rand, run
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.optimizers import OPTIMIZER_TABLES, SERVER_OPTIMIZER_TABLES
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.sweeps import Setup
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import quadratic
from tests.experiments.test_method_tables import lowered

ROUNDS = 12


def values(**algorithm):
    """A small experiment as plain values."""
    return {
        "task": {"num_clients": 4, "block_size": 2, "mu": 0.1},
        "assignment": {"name": "mfa_rand"},
        "num_models": 2,
        "num_rounds": ROUNDS,
        "num_seeds": 2,
        "algorithms": {"A": {"learning_rate": 0.1, "local_steps": 3} | algorithm},
    }


# Learning rates


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"schedule": "cosine", "start": 0.1}, optax.cosine_decay_schedule(0.1, ROUNDS)),
        (
            {"schedule": "cosine", "start": 0.1, "alpha": 0.2, "decay_steps": 5},
            optax.cosine_decay_schedule(0.1, 5, alpha=0.2),
        ),
        (
            {"schedule": "cosine", "start": 0.1, "warmup_steps": 3},
            optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, ROUNDS),
        ),
        (
            {"schedule": "linear", "start": 0.1, "end": 0.01},
            optax.linear_schedule(0.1, 0.01, ROUNDS),
        ),
        (
            {"schedule": "polynomial", "start": 0.1, "end": 0, "power": 2, "transition_begin": 4},
            optax.polynomial_schedule(0.1, 0.0, 2.0, ROUNDS, 4),
        ),
        (
            {"schedule": "exponential", "start": 0.1, "decay_rate": 0.5, "transition_steps": 4}
            | {"staircase": True},
            optax.exponential_decay(0.1, 4, 0.5, staircase=True),
        ),
        (
            {"schedule": "cosine", "start": 0.1, "per": "frame"},
            lambda count: optax.cosine_decay_schedule(0.1, ROUNDS // 2)(count // 2),
        ),
    ],
)
def test_round_1_is_count_0_of_a_schedule(table, expected):
    experiment = validate(Experiment, values(learning_rate=table))
    assert validate(Experiment, experiment.model_dump()) == experiment
    rate = experiment.algorithms["A"].schedule(2, ROUNDS)
    rounds = np.arange(1, ROUNDS + 3)
    found = [float(rate(t)) for t in rounds]
    np.testing.assert_allclose(found, [float(expected(t - 1)) for t in rounds], rtol=1e-6)
    if "warmup_steps" not in table:
        assert found[0] == pytest.approx(0.1)


def test_inverse_time_may_be_given_by_name():
    table = {"beta": 3.0, "gamma": 20.0}
    named = validate(Experiment, values(learning_rate={"schedule": "inverse_time"} | table))
    assert named == validate(Experiment, values(learning_rate=table))
    assert named.algorithms["A"].learning_rate.model_dump() == table | {"per": "round"}


# Optimizers


def program_of(algorithm):
    """The text of the program that an algorithm makes in Python."""

    def build(algorithm):
        task = quadratic(4, 2, mu=0.1)
        start = jnp.zeros(task.dim)
        return Setup([task] * 2, made, mfa_rand(4, 2), start)

    made = algorithm
    return lowered(Grid(build, {"algorithm": ["A"]}, ROUNDS, 2))


@functools.cache
def plain_program():
    """The text of the program of an algorithm without further settings."""
    return program_of(fedavg(0.1, local_steps=3))


def cosine(t):
    return optax.cosine_decay_schedule(0.1, ROUNDS)(t - 1)


FILES = {
    "nothing": ({}, lambda: fedavg(0.1, local_steps=3)),
    "the default, named": ({"optimizer": {"name": "sgd"}}, lambda: fedavg(0.1, local_steps=3)),
    "adam": (
        {"optimizer": {"name": "adam", "b1": 0.8}},
        lambda: fedavg(local_sgd(0.1, steps=3, optimizer=lambda rate: optax.adam(rate, b1=0.8))),
    ),
    "clipped and decayed": (
        {"clip": 1, "weight_decay": 0.01, "learning_rate": {"schedule": "cosine", "start": 0.1}},
        lambda: fedavg(
            local_sgd(
                cosine,
                steps=3,
                optimizer=lambda rate: optax.chain(
                    optax.clip_by_global_norm(1.0),
                    optax.add_decayed_weights(0.01),
                    optax.sgd(rate),
                ),
            )
        ),
    ),
    "server with momentum": (
        {"server_optimizer": {"name": "sgd", "momentum": 0.9}},
        lambda: fedavg(0.1, local_steps=3, server_optimizer=optax.sgd(1.0, momentum=0.9)),
    ),
    "server with a schedule": (
        {
            "server_optimizer": {
                "name": "adam",
                "learning_rate": {"schedule": "linear", "start": 0.1, "end": 0},
            }
        },
        lambda: fedavg(
            0.1,
            local_steps=3,
            # The file converts optax's count from 0 to rounds from 1 and back.
            server_optimizer=optax.adam(
                lambda count: optax.linear_schedule(0.1, 0.0, ROUNDS)(count + 1 - 1)
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_makes_the_program_of_python(name):
    table, algorithm = FILES[name]
    texts = lowered(grid_of(validate(Experiment, values(**table))))
    expected = program_of(algorithm()) if table else plain_program()
    assert texts["A"] == expected["A"]
    assert (texts["A"] == plain_program()["A"]) == (name in ("nothing", "the default, named"))


def test_numbers_of_optimizers_and_schedules_are_axes_of_one_program():
    table = {
        "optimizer": {"name": "adam"},
        "server_optimizer": {"name": "sgd", "momentum": 0.5},
        "learning_rate": {"schedule": "cosine", "start": 0.1, "alpha": 0.1},
        "weight_decay": 0.01,
        "clip": 1.0,
    }
    axes = {
        "optimizer.b1": [0.9, 0.5],
        "server_optimizer.momentum": [0.5, 0.9],
        "learning_rate.start": [0.1, 0.2],
        "weight_decay": [0.01, 0.1],
        "clip": [1.0, 0.01],
    }
    experiment = validate(Experiment, values(**table) | {"axes": axes})
    assert len(programs_of(grid_of(experiment))) == 1
    result = run(experiment).excess_loss.isel(round=-1, seed=0, model=0, algorithm=0)
    assert len(np.unique(result)) == 2**5
    changes = {"optimizer": {"name": "adam", "b1": 0.5}, "weight_decay": 0.1}
    single = run(validate(Experiment, values(**table | changes)))
    there = result.sel(b1=0.5, momentum=0.5, start=0.1, weight_decay=0.1, clip=1.0)
    np.testing.assert_allclose(
        there, single.excess_loss.isel(round=-1, seed=0, model=0, algorithm=0), rtol=1e-5
    )


def test_optimizers_may_be_values_of_an_axis():
    axis = [{"name": "sgd", "momentum": 0.9}, {"name": "adam"}]
    grid = grid_of(validate(Experiment, values(optimizer=axis[1]) | {"axes": {"optimizer": axis}}))
    assert grid.labels["optimizer"] == ["sgd(momentum=0.9)", "adam"]
    assert len(programs_of(grid)) == 2


@pytest.mark.parametrize("name", OPTIMIZER_TABLES)
def test_values_of_every_number_of_an_optimizer_share_a_program(name):
    """One of the values is optax's own."""
    fields = SERVER_OPTIMIZER_TABLES[name].model_fields
    numbers = {key: field.default for key, field in fields.items()}
    numbers = {key: x for key, x in numbers.items() if isinstance(x, float)}
    axes = {f"server_optimizer.{key}": [x, 0.1 + 0.5 * x] for key, x in numbers.items()}
    own = {"name": name, "learning_rate": 0.1}
    given = validate(Experiment, values(server_optimizer=own) | {"axes": axes})
    assert len(programs_of(grid_of(given))) == 1


# Errors

COSINE = {"schedule": "cosine", "start": 0.1}


@pytest.mark.parametrize(
    ("table", "fragments"),
    [
        (
            {"learning_rate": {"schedule": "cosin", "start": 0.1}},
            ["algorithms.A.learning_rate.schedule = 'cosin'", "'cosine'", "'inverse_time'"],
        ),
        ({"learning_rate": {"schedule": "cosine"}}, ["learning_rate.start: missing"]),
        ({"learning_rate": COSINE | {"end": 1}}, ["end = 1", "known keys", "decay_steps"]),
        ({"learning_rate": COSINE | {"start": 0}}, ["learning_rate.start = 0", "greater than 0"]),
        (
            {"learning_rate": COSINE | {"warmup_steps": 12}},
            ["algorithms.A: learning_rate: warmup_steps is 12, of 12 rounds", "give fewer"],
        ),
        (
            {"optimizer": {"name": "adamm"}},
            ["algorithms.A.optimizer.name = 'adamm'", "'adam', 'adamw'"],
        ),
        ({"optimizer": {"name": "adam", "b3": 1}}, ["b3 = 1", "known keys of adam are b1, b2"]),
        ({"optimizer": {"momentum": 0.9}}, ["algorithms.A.optimizer.name: missing"]),
        (
            {"optimizer": {"name": "sgd", "learning_rate": 1.0}},
            ["optimizer.learning_rate = 1.0: unknown key, known keys of sgd are"],
        ),
        ({"server_optimizer": {"name": "adam"}}, ["server_optimizer.learning_rate: missing"]),
        ({"weight_decay": -1}, ["algorithms.A.weight_decay = -1", "greater than or equal to 0"]),
        ({"clip": 0}, ["algorithms.A.clip = 0", "greater than 0"]),
        (
            {"name": "scaffold", "optimizer": {"name": "adam"}},
            [
                "algorithms.A: optimizer is the function adam",
                "scaffold, option II refuses",
                "leave out optimizer",
            ],
        ),
    ],
)
def test_an_error_names_the_fault_and_the_remedy(table, fragments):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        validate(Experiment, values(**table))
    for fragment in fragments:
        assert fragment in str(error.value)


def test_a_rate_that_optax_needs_before_compiling_is_no_axis():
    rate = {"schedule": "exponential", "start": 0.1, "decay_rate": 0.5}
    axes = {"learning_rate.decay_rate": [0.5, 0.9]}
    with pytest.raises(ValueError, match=r"decay_rate: it cannot vary within a sweep; run one"):
        validate(Experiment, values(learning_rate=rate) | {"axes": axes})
