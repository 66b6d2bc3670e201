"""All methods, attackers and requirements in an experiment file."""

import inspect
import json
import operator
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_mm
from fedjax_mm import (
    Experiment,
    local_sgd,
    mfa_rand,
    run,
    simulate,
)
from fedjax_mm.algorithms import methods
from fedjax_mm.experiments import methods as tables
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.methods import METHOD_TABLES, Requirement
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.sweeps import Setup
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import OwnModels, least_squares, quadratic, requiring
from tests.experiments.test_method_tables import (
    METHOD,
    QUADRATIC,
    A,
    described,
    full,
    lowered,
    own_by_hand,
    read,
)
from tests.helpers import Featured, slow_unless


def examples():
    """Yields settings of every method from its signature, once required ones and once all."""
    for name, factory in methods().items():
        parameters = inspect.signature(factory).parameters
        needed = {key: 2.0 for key, p in parameters.items() if p.default is p.empty}
        needed |= {} if name == "afl" else {"local_steps": 2}
        del needed["local"]
        yield name, name, needed
        more = {
            key: changed(p) for key, p in parameters.items() if p.default not in (p.empty, None)
        }
        more = {key: value for key, value in more.items() if value is not None}
        if more:
            yield f"{name}, all set", name, needed | more


def changed(parameter):
    """A value that differs from the default, or None if a file has no other."""
    default, annotation = parameter.default, parameter.annotation
    if isinstance(default, bool):
        return not default
    if isinstance(default, float):
        return 2 * default
    if get_origin(annotation) is Literal:
        return next(value for value in get_args(annotation) if value != default)
    return None


def in_toml(settings):
    """Formats settings as TOML, with 2 for 2.0."""
    return "\n".join(
        f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {json.dumps(value)}"
        for key, value in settings.items()
    )


EXAMPLES = {label: (name, settings) for label, name, settings in examples()}


# Quadratics have no features, which moon needs.
ALL = [*(label for label in EXAMPLES if not label.startswith("moon")), "without a name"]


# each method with all settings
QUICK = [label for label in ALL if f"{label}, all set" not in EXAMPLES]


WHOLE = "maxfl"  # the quick run compares its whole program


@pytest.mark.parametrize(
    ("label", "told"),
    [
        *(slow_unless(label in QUICK, label, described) for label in ALL),
        *(slow_unless(label == WHOLE, label, lowered) for label in ALL),
    ],
)
def test_every_method_of_a_file_equals_that_of_python(label, told):
    name, settings = EXAMPLES.get(label, ("fedavg", {"local_steps": 2}))
    text = in_toml(settings if label not in EXAMPLES else {"name": name} | settings)
    # Include the factors 1/p, which stalevr needs.
    unbiased = QUADRATIC.replace("cohort_size = 4", "cohort_size = 4, unbiased = true")
    experiment = read(f"{unbiased}{A}{text}")
    assert validate(Experiment, experiment.model_dump()) == experiment
    own = {key: value for key, value in settings.items() if key != "local_steps"}
    by_hand = methods()[name](local_sgd(0.1, steps=settings.get("local_steps")), **own)

    start = experiment.task.initial_params()

    def prepare(rng_key, setup):
        (task,) = setup.tasks
        own = own_by_hand(rng_key, task, start, learning_rate=0.2, num_steps=3)
        asked = requiring(task, jax.tree.map(operator.itemgetter(0), own))
        return setup._replace(tasks=[asked])

    def build(algorithm):
        assignment = mfa_rand(6, 1, cohort_size=4, unbiased=True)
        return Setup([quadratic(6, 2, mu=0.1)], by_hand, assignment, start, prepare=prepare)

    expected = Grid(build, {"algorithm": ["A"]}, 3)
    assert told(grid_of(experiment)) == told(expected)


TOY = """
from typing import Literal

import jax
import optax

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.base import Algorithm, Scalar
from fedjax_mm.local import LocalSGD


def toy(
    local: LocalSGD,
    *,
    count: int | None = 3,
    factor: Scalar,
    way: Literal["up", "down"] = "down",
    flag: bool = False,
    chain: optax.GradientTransformation | None = None,
) -> Algorithm:
    if not isinstance(factor, jax.core.Tracer) and not factor > 1:
        raise ValueError(f"factor is {factor}; it must be greater than 1")
    steps = count + flag + (way == "up")
    return fedavg(local._replace(learning_rate=factor * local.learning_rate, steps=steps))
"""


PROGRAM = """
import json
import sys
from fedjax_mm import Experiment, run
from fedjax_mm.experiments.overrides import validate

A = {"learning_rate": 0.1}
top = {"task": {"start": "normal"}, "num_models": 1, "num_rounds": 2, "num_seeds": 1}
top["assignment"] = {"name": "full_participation"}


def loss(**settings):
    result = run(validate(Experiment, top | {"algorithms": {"A": A | settings}}))
    return result.loss.values[..., -1, 0].item()


for own, steps in json.loads(sys.argv[1]):
    expected = loss(local_steps=steps, learning_rate=1.5 * 0.1)
    assert loss(name="toy", factor=1.5, **own) == expected
wrong = ["factor=1", "factor=true", "count=0", "way=left", "flag=1", "chain=1", "name=tow"]
for text in wrong:
    values = top | {"algorithms": {"A": A | {"name": "toy", "factor": 2}}}
    try:
        validate(Experiment, values, [f"algorithms.A.{text}"])
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([({"way": "up", "flag": True}, 5)], id="some set"),
        pytest.param(
            [({}, 3), ({"count": 4, "way": "up", "flag": True}, 6)],
            id="none and all",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_new_method_needs_only_a_new_file(tmp_path, cases):
    """Cases are settings and their number of local steps."""
    package = Path(fedjax_mm.__file__).parent
    shutil.copytree(package, tmp_path / package.name)
    (tmp_path / package.name / "algorithms" / "toy.py").write_text(TOY)
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    # XLA of jaxlib 0.9 logs reading a program from the cache.
    assert (done.returncode, re.sub(r"(?m)^[WE]\d{4} .*\n", "", done.stderr)) == (0, "")
    messages = done.stdout.splitlines()
    for fragments in (
        ["algorithms.A: factor is 1.0; it must be greater than 1"],
        ["algorithms.A.factor = True", "valid number"],
        ["algorithms.A.count = 0", "greater than or equal to 1"],
        ["algorithms.A.way = 'left'", "'up' or 'down'"],
        ["algorithms.A.flag = 1", "valid boolean"],
        ["algorithms.A.chain = 1", "known keys of toy are", "count, epochs, factor, flag"],
        ["algorithms.A.name = 'tow'", "'stalevr', 'toy'"],
    ):
        message = messages.pop(0)
        for fragment in fragments:
            assert fragment in message


@pytest.mark.parametrize("label", EXAMPLES)
def test_methods_declare_that_they_need_thresholds(label):
    name, settings = EXAMPLES[label]
    own = {key: value for key, value in settings.items() if key != "local_steps"}
    algorithm = methods()[name](local_sgd(0.1, steps=settings.get("local_steps")), **own)
    assignment = mfa_rand(6, 1, cohort_size=4, unbiased=True)
    once = partial(simulate, algorithm=algorithm, assignment=assignment, num_rounds=1)
    once = partial(
        once, tasks=Featured(least_squares([np.eye(2)] * 6, [np.ones(2)] * 6, ridge=0.1), 6)
    )
    table = METHOD_TABLES[name].model_validate({"name": name, "learning_rate": 0.1} | settings)
    if table.needs_thresholds:
        with pytest.raises(ValueError, match="is not a task whose clients have thresholds"):
            jax.eval_shape(once, jax.random.key(0))
    else:
        jax.eval_shape(once, jax.random.key(0))


def test_moon_in_a_file_trains_a_network_with_features():
    text = QUADRATIC.split("task =")[0] + A + 'name = "moon"\nmu = 1\nlocal_steps = 2\n'
    text += 'batch_size = 5\n[task]\nname = "digits"\nnum_clients = 6\n'
    text += 'model = "{}"\n[assignment]\nname = "full_participation"\n'
    losses = run(read(text.format("mlp"))).loss.isel(round=[0, -1]).values.ravel()
    assert np.isfinite(losses).all()
    assert losses[1] < losses[0]
    with pytest.raises(ValueError, match="LogisticRegression gives no features"):
        run(read(text.format("logistic")))


def test_a_file_with_everything_runs():
    result = run(full("MaxFL"))
    for name in ("accuracy", "appeal", "preferred_accuracy", "train_loss", "train_appeal"):
        for prefix in ("", "unseen_"):
            assert np.isfinite(result[prefix + name]).all()
    trained = result.client_updates.squeeze()
    assert np.all(trained.isel(round=1) <= 9)
    assert np.all(trained.isel(round=1) >= 6)  # all clients participate in rounds 1 and 2
    assert result.attrs["manifest"]["config"]["requirement"]["num_unseen"] == 4


def test_an_algorithm_may_override_the_common_assignment():
    text = f"{QUADRATIC}{A}local_steps = 1\n"
    text += '[algorithms.B]\nlearning_rate = 0.1\nlocal_steps = 1\nassignment.name = "mfa_rr"\n'
    programs = programs_of(grid_of(read(text)))
    updates = [program.traced.facts.updates_per_round for program in programs]
    assert updates == [4, 6]
    # An axis applies to the algorithm's assignment if it has one, and otherwise to the common one.
    swept = read(f"{text}[axes]\nassignment.cohort_size = [2, 5]", Experiment)
    assert [p.traced.facts.updates_per_round for p in programs_of(grid_of(swept))] == [2, 5, 2, 5]
    assert swept.points().values == {"assignment.cohort_size": [2, 5]}


def on_axes(name):
    """A sweep with one value on each of a method's axes of numbers, and further values."""
    text = in_toml({"name": name} | EXAMPLES[name][1])
    text = f"{QUADRATIC}byzantine = {{ fraction = 0.5 }}\n{A}{text}\n"
    fields = METHOD_TABLES[name].model_fields
    keys = [key for key, field in fields.items() if field.annotation is float]
    keys = [*keys, "byzantine.noise", "requirement.learning_rate"]
    shares = {
        key: [0.25, 0.75]
        for key, field in fields.items()
        if any(getattr(limit, "le", None) == 1 for limit in field.metadata)
    }
    points = {key: shares.get(key, [2.0, 4.0]) for key in keys} | {
        "byzantine.fraction": [0.25, 0.75]
    }
    axes = "\n".join(f"{key} = {values[:1]}" for key, values in points.items())
    return text, read(f"{text}[axes]\n{axes}", Experiment), points


REFUSED = {  # with attackers, or without factors
    "mifa": "noisy: the server of this method does not read the sum of updates",
    "stalevr": "stalevr needs the factors 1/p of its assignment",
    "moon": "is not a task with features",
    "fednova": "noisy changes the clients' updates, but the algorithm sends two parts",
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_do_not_fit_are_refused_when_a_program_is_traced(name):
    (program,) = programs_of(grid_of(on_axes(name)[1]))
    with pytest.raises(ValueError, match=REFUSED[name]):
        _ = program.traced


@pytest.mark.parametrize("name", sorted(methods().keys() - REFUSED.keys()))
def test_numbers_of_methods_attackers_and_requirements_are_axes_of_one_program(name):
    _, base, points = on_axes(name)
    assert "train_loss" in programs_of(grid_of(base))[0].traced.record.metrics
    (program,) = programs_of(grid_of(validate(Experiment, base.model_dump() | {"axes": points})))
    assert len(program) == 2 ** len(points)


def test_a_point_on_all_axes_equals_that_experiment():
    text, base, points = on_axes("maxfl")
    settings = [
        f"{key if '.' in key else f'algorithms.A.{key}'}={values[0]}"
        for key, values in points.items()
    ]
    single = run(validate(Experiment, tomllib.loads(text), settings))
    swept = run(base).squeeze([key.rpartition(".")[2] for key in points])
    for metric in ("loss", "train_loss"):
        np.testing.assert_allclose(swept[metric].values, single[metric].values, rtol=2e-5)


def test_points_of_an_axis_differ():
    text = f'{QUADRATIC}byzantine = {{ fraction = 0 }}\n{A}name = "qffl"\nq = 1\nlocal_steps = 2\n'
    axes = "q = [0, 1, 2]\nbyzantine.fraction = [0.0, 0.5]\nrequirement.learning_rate = [0.01, 0.2]"
    grid = read(f"{text}[axes]\n{axes}", Experiment)
    result = run(grid)
    assert len(programs_of(grid_of(grid))) == 1
    last = result.isel(round=-1, seed=0, model=0, algorithm=0)
    assert len(np.unique(last.loss.isel(learning_rate=0))) == 6
    assert np.all(last.loss.isel(learning_rate=0) == last.loss.isel(learning_rate=1))


@pytest.mark.parametrize(
    ("table", "warm_up", "tuning"),
    [
        ("{ num_steps = 2 }", (0.05, 2, None), None),
        (
            "{ learning_rate = 0.3, batch_size = 2, num_unseen = 1, tuning_steps = 2 }",
            (0.3, 100, 2),
            (3 / 101, 2, 3),
        ),
    ],
)
def test_the_warm_up_has_separate_settings_and_tuning_those_of_the_algorithm(
    monkeypatch, table, warm_up, tuning
):
    told = []

    def own(rng_key, task, params, *, model, learning_rate, num_steps, batch_size):
        told.append((learning_rate, num_steps, batch_size))
        return OwnModels(jnp.zeros(4))

    monkeypatch.setattr(tables, "own_models", own)
    rate = {"beta": 3, "gamma": 100}
    method = METHOD.validate_python({"learning_rate": rate, "local_steps": 2, "batch_size": 3})
    config, task = (
        validate(Requirement, tomllib.loads(f"x = {table}")["x"]),
        quadratic(4, 1, mu=1.0),
    )
    demand = config.demand(method, method.schedule(1))
    asked = demand(jax.random.key(0), [task] * 2, None)
    assert set(told) == {warm_up}
    assert len(asked) == 2
    for each in asked:
        assert each.num_clients == 4 - config.num_unseen
        how = each.tuning
        assert (how and (how.learning_rate, how.num_steps, how.batch_size)) == tuning
