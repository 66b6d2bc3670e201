"""All methods, attackers and requirements in an experiment file."""

import inspect
import json
import operator
import re
import tomllib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter

import fedjax_mm
from fedjax_mm import (
    Experiment,
    appealing,
    attacked,
    fedavg,
    full_participation,
    local_sgd,
    maxfl,
    noisy,
    scheduled,
    simulate,
)
from fedjax_mm.algorithms import methods
from fedjax_mm.availability import arriving, finishing
from fedjax_mm.base import Algorithm, Assignment, ClientContext, Look, ServerContext
from fedjax_mm.data import digits, federate, flip_labels, partition
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.methods import METHOD_TABLES, Byzantine, MethodConfig
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.sweeps import Setup
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.tasks import Tuning, classification, own_models, quadratic, requiring
from fedjax_mm.tasks.networks import MLP
from tests.helpers import roll_out

ROOT = Path(__file__).parent.parent.parent


METHOD = TypeAdapter(MethodConfig)


QUADRATIC = """
num_models = 1
num_rounds = 3
num_seeds = 1
task = { num_clients = 6, block_size = 2, mu = 0.1, start = "normal" }
assignment = { name = "mfa_rand", cohort_size = 4 }
requirement = { num_steps = 3, learning_rate = 0.2 }
"""


A = "[algorithms.A]\nlearning_rate = 0.1\n"


def read(text, kind=Experiment):
    return validate(kind, tomllib.loads(text))


def lowered(grid):
    """The text of every point's run, with all constants, so that equal texts give equal results."""

    def run(setup, key):
        setup = setup if setup.prepare is None else setup.prepare(key, setup)
        how = {"record_every": grid.record_every, "client_map": grid.client_map}
        return simulate(key, *setup[:3], grid.num_rounds, params=setup.params, **how)

    texts = {}
    for (algorithm, *_), setup in ((point, grid.setup(point, 0)) for point in grid.points):
        label = grid.labels["algorithm"][algorithm]
        texts[label] = jax.jit(partial(run, setup)).lower(jax.random.key(0)).as_text()
    return texts


def described(grid):
    """The settings of the runs, and the text of the parts of their programs, with all constants.

    The parts are the preparation, the start, the cohort of a round, the training of a client, the
    server's step and the metrics. The loops of the library around them are left out.
    """
    sizes = {"num_seeds", "num_rounds", "seed", "record_every", "client_map", "axes"}
    return {name: getattr(grid, name) for name in sizes}, [
        parts(grid.setup(point, 0)) for point in grid.points
    ]


def parts(setup):
    """The lowered text of the parts of a run."""

    def once(key, round, client):
        prepared = setup.prepare(key, setup)
        (task,), algorithm, assignment, params, *_ = prepared
        params = task.init(key) if params is None else params
        server, state = algorithm.init(task, params)
        losses = jax.vmap(lambda k: task.client_loss(params, k)[None], out_axes=1)
        look = Look(
            lambda: losses(jnp.arange(task.num_clients)),
            lambda: task.appeals(params)[None],
            lambda *names: jnp.zeros(1),
        )
        groups, assigned = assignment.assign(key, round, assignment.init(key, look), look)
        steps = algorithm.num_steps and algorithm.num_steps(task, client, server)
        local = ClientContext(key, round, task, client, params)
        sent, state = algorithm.client(local, server, state)
        states = jax.tree.map(lambda x: jnp.broadcast_to(x, (task.num_clients, *x.shape)), state)
        total = sent._replace(report=())
        moved = algorithm.server(ServerContext(round, task, params, server, states, total, key))
        trained = steps, sent, state
        return groups, assigned, trained, moved, task.metrics(key, params)

    t, client = np.int32(1), np.int32(0)
    return jax.jit(once).lower(jax.random.key(0), t, client).as_text()


def own_by_hand(rng_key, task, start=None, **how):
    """Trains the clients' own models for a single model."""

    one = partial(own_models, rng_key, task, start, **how)
    return jax.lax.map(lambda model: one(model=model), jnp.arange(1))


def test_keys_of_a_table_are_parameters_of_the_function():
    local = set(inspect.signature(local_sgd).parameters) - {"steps"} | {"local_steps"}
    rest = {"name", "assignment", "compression", "privacy", "robust", "personal"} | {
        "reports_updates"
    }
    for name, method in methods().items():
        own = set(inspect.signature(method).parameters) - {"local"}
        assert set(METHOD_TABLES[name].model_fields) == local | own | rest, name


def test_methods_are_the_public_algorithms():
    public = {name: getattr(fedjax_mm, name) for name in fedjax_mm.__all__}
    assert methods() == {
        name: value
        for name, value in public.items()
        if inspect.isfunction(value)
        and inspect.signature(value).return_annotation is Algorithm
        and next(iter(inspect.signature(value).parameters)) == "local"
    }


def test_the_fraction_of_attackers_is_rounded_up():
    for fraction, expected in [(0, 0), (0.3, 3), (0.25, 3), (0.05, 1), (1, 10)]:
        task = quadratic(10, 1, mu=1.0)
        first, second = (
            Byzantine(fraction=fraction, loss_factor=5.0, stays=False, seed=seed).on_tasks(10)(task)
            for seed in (0, 1)
        )
        assert (first.attacks.sum(), second.attacks.sum()) == (expected, expected)
        np.testing.assert_array_equal(first.factors, np.where(first.attacks, 5.0, 1.0))
        assert not first.stays
        assert bool((first.attacks == second.attacks).all()) == (expected in (0, 10))


DOCUMENTED, *_ = re.findall(
    r"```toml\n(.*?)```", (ROOT / "docs" / "experiments.md").read_text(), re.DOTALL
)


SMALLER = [
    *("num_rounds=6", "num_seeds=2", "record_every=3", "byzantine={fraction=0.25, seed=3}"),
    *("task.num_clients=12", "task.data_seed=7", "assignment.appealing.cohort_size=3"),
    *("assignment.appealing.from_round=3", "requirement.num_steps=20"),
    *("requirement.num_unseen=4", "requirement.tuning_steps=2"),
    *(
        f"algorithms.{label}.{number}"
        for label in ("MaxFL", "FedAvg")
        for number in ("learning_rate=0.1", "local_steps=5", "batch_size=16")
    ),
]


def full(*labels):
    """A smaller version of the documented experiment with some of its algorithms."""
    experiment = validate(Experiment, tomllib.loads(DOCUMENTED), SMALLER)
    algorithms = {label: experiment.algorithms[label] for label in labels}
    return experiment.model_copy(update={"algorithms": algorithms})


def cho_clients(seed=7):
    pool = digits(seed=seed)
    parts = partition.dirichlet(pool.train[1], 12, alpha=0.5, min_examples=20, seed=seed)
    return flip_labels(federate(pool, parts, test_fraction=0.4, seed=seed), fraction=0.3, seed=seed)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["MaxFL"], described),
        pytest.param(["MaxFL", "FedAvg"], described, marks=pytest.mark.slow),
        pytest.param(["MaxFL", "FedAvg"], lowered, marks=pytest.mark.slow),
    ],
    ids=["one described", "described", "lowered"],
)
def test_a_file_with_everything_equals_python(labels, told):
    attacks = np.random.Generator(np.random.PCG64(3)).permutation(8) < 2
    methods = {
        "MaxFL": maxfl(local_sgd(0.1, steps=5, batch_size=16)),
        "FedAvg": fedavg(local_sgd(0.1, steps=5, batch_size=16)),
    }

    def task(data):
        return classification(data, MLP(10, dropout_rate=0.5), rngs=("dropout",), scale=1 / 255)

    def prepare(rng_key, setup):
        (task,) = setup.tasks
        how = {"learning_rate": 0.05, "batch_size": 32, "num_steps": 20}
        own = jax.tree.map(operator.itemgetter(0), own_by_hand(rng_key, task, **how))
        asked = requiring(task, own, num_unseen=4, tuning=Tuning(0.1, 2, 16))
        return setup._replace(tasks=[attacked(asked, jnp.asarray(attacks))])

    data = cho_clients()

    def build(algorithm):
        return Setup(
            [task(data)],
            noisy(methods[algorithm], jnp.asarray(attacks)),
            appealing(full_participation(8), cohort_size=3, from_round=3),
            prepare=prepare,
        )

    expected = Grid(
        build,
        {"algorithm": labels},
        num_rounds=6,
        num_seeds=2,
        record_every=3,
    )
    assert told(grid_of(full(*labels))) == told(expected)


JOBS = """
num_models = 2
num_rounds = 3
num_seeds = 1
task = { num_clients = 4, block_size = 2, mu = 0.1 }

[assignment]
name = "scheduled"
demand = [3, 1]
policy = "venn"
eligible = [[true, true, true, true], [false, false, false, true]]
finishing = { metric = "loss", at_most = [0.5, 0.25], every = 3 }
arriving = [0, 2]
"""


def test_jobs_and_schedulers_in_a_file_are_those_of_python():
    grid = grid_of(read(f"{JOBS}{A}local_steps = 1"))
    rule = scheduled(
        4, 2, demand=[3, 1], policy="venn", eligible=[[True] * 4, [*[False] * 3, True]]
    )
    expected = arriving(finishing(rule, "loss", at_most=[0.5, 0.25], every=3), [0, 2])
    assert parts_of(grid.setup(grid.points[0], 0).assignment) == parts_of(expected)
    turns = {"name": "mdh", "cohort_size": 4, "heterogeneous": [True, False]}
    found = validate(Experiment, tomllib.loads(f"{JOBS}{A}local_steps = 1") | {"assignment": turns})
    assert found.assignment.build(4, 2).call.arguments["heterogeneous"] == (True, False)


def parts_of(assignment):
    """The calls that made an assignment, as plain values."""
    if assignment.call is None:
        return assignment
    return assignment.call.factory.__name__, [
        parts_of(x) if isinstance(x, Assignment) else json.loads(json.dumps(x))
        for x in assignment.call.arguments.values()
    ]


def test_flips_and_test_fractions_reach_the_data():
    task = full().task
    data, expected = task.data(), cho_clients()
    for x, y in zip(jax.tree.leaves(data), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)
    assert data.name == "digits, labels of 4 of 12 clients flipped"
    module = task.build(data).module
    assert (module.dropout_rate, task.build(data).rngs) == (0.5, ("dropout",))
    plain = task.model_copy(update={"dropout_rate": 0.0})
    assert plain.build(data).rngs == ()
    others = [
        task.model_copy(update=change).data()
        for change in ({"data_seed": 8}, {"flipped": 0.5}, {"flipped": 0.0})
    ]
    labels = {np.asarray(each.train.examples[1]).tobytes() for each in (data, *others)}
    assert len(labels) == 4
    pooled = task.model_copy(update={"flipped": 0.0, "test_fraction": None}).data()
    assert pooled.test.num_clients == 1


def test_the_assignment_excludes_unseen_clients():
    text = QUADRATIC.replace("num_steps = 3", "num_unseen = 2") + f"{A}local_steps = 1"
    grid = grid_of(read(text))
    assignment = grid.setup(grid.points[0], 0).assignment
    assert assignment.num_clients == 4
    assert roll_out(assignment, jax.random.key(0), 20).max() == 3


DIGITS = {"name": "digits", "num_clients": 10}


OWN = DIGITS | {"test_fraction": 0.4}


NUMBERS = {"name": "npz", "file": "x.npz", "num_classes": 0, "loss": "squared_error"}


MAXFL = {"name": "maxfl"}


STAYING = {"name": "mfa_rand", "appealing": {"cohort_size": 2}}


ASKED = {"requirement": {}}


def settings(task=None, top=None, **algorithm):
    """An experiment as plain values, without entries that are `...`."""
    values = {"task": task or {"num_clients": 8}, "num_models": 1, "num_rounds": 2}
    values |= {"assignment": {"name": "mfa_rand"}} | (top or {})
    method = {"learning_rate": 0.1, "local_steps": 3} | algorithm
    values["algorithms"] = {"A": {key: x for key, x in method.items() if x is not ...}}
    return {key: value for key, value in values.items() if value is not ...}


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        (
            settings(top={"assignment": ...}),
            ["algorithms.A.assignment: missing", "a table assignment for all"],
        ),
        (
            settings(top={"assignment": {"name": "mfa_rand", "finishing": {"metric": "loss"}}}),
            ["algorithms.A: at_least is None", "give one of them"],
        ),
        (
            settings(top={"assignment": {"name": "mfa_rand", "arriving": [1, 2]}}),
            ["algorithms.A: rounds", "give one number, or 1"],
        ),
        (settings(**MAXFL), ["algorithms.A: maxfl asks", "add a table requirement"]),
        (settings(name="mwfed"), ["algorithms.A: mwfed asks", "add a table requirement"]),
        (
            settings(top={"assignment": STAYING}),
            ["algorithms.A: assignment.appealing asks", "add a table requirement"],
        ),
        (
            settings(top={"requirement": {"num_unseen": 8}}),
            ["requirement.num_unseen is 8", "8 clients", "at most 7"],
        ),
        (
            settings(top={"requirement": {"batch_size": 3}}),
            ["requirement.batch_size is 3", "no examples", "leave it out"],
        ),
        (settings(DIGITS, ASKED), ["requirement", "one pool", "give task.test_fraction"]),
        (
            settings(name="fedprox", mu=1.0, batch_size=3),
            ["algorithms.A: batch_size is 3", "the quadratic has no examples", "leave it out"],
        ),
        (
            settings(OWN, epochs=1, local_steps=..., name="prsgd"),
            ["algorithms.A: epochs is 1", "prsgd refuses", "Problem 1 counts iterations"],
        ),
        (
            settings(OWN, name="scaffold", optimizer={"name": "adam"}),
            ["algorithms.A: optimizer is", "scaffold, option II refuses", "a mean gradient"],
        ),
        (
            settings(top={"byzantine": {"fraction": 0.1, "attack": {"name": "alie", "z": 1.5}}}),
            ["alie(z=1.5) needs the updates of all clients", "rule may be mean()"],
        ),
        (
            settings(DIGITS | {"flipped": 0.3}),
            ["task: ", "flipped is 0.3", "one pool", "give a test_fraction"],
        ),
        (
            settings(DIGITS | {"dropout_rate": 0.5}),
            ["task: ", "dropout_rate is 0.5", "'logistic'", "only 'mlp'"],
        ),
        (
            settings(DIGITS | {"loss": "squared_error"}),
            ["task: loss is 'squared_error'", "have labels; give 'npz' and num_classes = 0"],
        ),
        (
            settings(NUMBERS | {"loss": "cross_entropy"}),
            ["task: loss is 'cross_entropy'", "have other targets; give loss = 'squared_error'"],
        ),
        (
            settings(NUMBERS | {"partition": {"name": "dirichlet", "alpha": 0.5}}),
            ["task: the partition needs labels", "choose iid, quantity_skew, shards"],
        ),
        (
            settings(DIGITS | {"metrics": ["f1", {"name": "f1", "average": "micro"}]}),
            ["task.metrics", "'f1' is there 2 times"],
        ),
        (settings(DIGITS | {"metrics": ["f2"]}), ["task.metrics", "'f2'", "'f1'"]),
        (
            settings(DIGITS | {"metrics": [{"name": "top_k_accuracy", "k": 0}]}),
            ["task.metrics", "k = 0", "greater than or equal to 1"],
        ),
        (settings(DIGITS | {"hidden": [8]}), ["hidden is (8,)", "only 'mlp' has hidden"]),
        (settings(DIGITS | {"dropout_rate": 1}), ["task.dropout_rate = 1", "less than 1"]),
        (
            settings(top={"assignment": {"name": "full_participation"}, "num_models": 2}),
            ["num_models is 2", "full_participation trains 1 model", "mfa_rand"],
        ),
    ],
)
def test_an_error_names_the_fault_and_the_remedy(values, fragments):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        validate(Experiment, values)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("axes", "fragments"),
    [
        ({"q": [0.0, 1.0]}, ["at q = 0.0: algorithms.A.q = 0.0: unknown key", "of fedavg are"]),
        ({"requirement.num_unseen": [0, 8]}, ["at requirement.num_unseen = 8", "at most 7"]),
        ({"byzantine.fraction": [0.1, 2]}, ["at byzantine.fraction = 2", "equal to 1"]),
    ],
)
def test_a_wrong_axis_is_named(axes, fragments):
    values = settings()
    values["algorithms"]["Q"] = {"learning_rate": 0.1, "local_steps": 3, "name": "qffl", "q": 0}
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        validate(Experiment, values | {"axes": axes})
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize("axis", ["task.dropout_rate", "task.model", "task.loss"])
def test_settings_that_change_the_network_are_no_axes(axis):
    values = settings(OWN | {"model": "mlp"})
    with pytest.raises(ValueError, match="run one for each"):
        validate(Experiment, values | {"axes": {axis: [0.1, 0.2]}})


@pytest.mark.parametrize("feedback", [True, False])
def test_error_feedback_of_a_table_is_used(feedback):
    rule = {"name": "random_k", "share": 0.9, "error_feedback": feedback}
    table = {"name": "fedavg", "learning_rate": 0.1, "local_steps": 1, "compression": rule}
    method = METHOD_TABLES["fedavg"].model_validate(table)
    algorithm = method.compression.wrap(fedjax_mm.fedavg(0.1, local_steps=1))
    task = quadratic(4, 2, mu=0.1)
    _, state = algorithm.init(task, task.init(jax.random.key(0)))
    assert isinstance(state.own, tuple) != feedback


def test_rules_and_attacks_of_a_table_are_those_of_python():
    rule = {"name": "trimmed_mean", "share": 0.1, "bucket_size": 2, "mixed_attackers": 1}
    table = {"name": "fedavg", "learning_rate": 0.1, "local_steps": 1, "robust": rule}
    algorithm = METHOD_TABLES["fedavg"].model_validate(table).build(1)
    attack = {"name": "ipm", "factor": 0.5}
    attacked = Byzantine.model_validate({"fraction": 0.5, "attack": attack}).wrap(algorithm, 4)
    trimmed = "trimmed_mean(num_trimmed=None, share=0.1)"
    mixed = f"nearest_neighbor_mixing(bucketing({trimmed}, 2), 1)"
    attacked, algorithm = (part.call.arguments for part in (attacked, algorithm))
    assert repr(algorithm["rule"]) == mixed
    assert repr(attacked["attack"]) == "ipm(factor=0.5)"
    assert attacked["clients"].sum() == 2
