"""Experiment files: accepted values, overrides, and errors."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from fedjax_mm import Experiment, fedcluster, mfa_rand, mfa_rr, sequential
from fedjax_mm.base import ClientContext, ServerContext
from fedjax_mm.experiments.axes import Range
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.methods import METHOD_TABLES
from fedjax_mm.experiments.optimizers import InverseTime
from fedjax_mm.experiments.overrides import load, validate
from fedjax_mm.experiments.tasks import QuadraticConfig
from fedjax_mm.sweeps.program import programs_of
from tests.helpers import roll_out

CONFIG = """\
num_models = 2
num_rounds = 12

[task]
num_clients = 8
block_size = 2
mu = 0.1

[algorithms.A]
assignment = { name = "mfa_rr", cohort_size = 6 }
learning_rate = { beta = 30, gamma = 100 }
local_steps = 3
"""


def values(**changes):
    """A small experiment as plain values, with changes to its algorithm or its top level."""
    algorithm = {"assignment": {"name": "mfa_rand"}, "learning_rate": 0.1, "local_steps": 3}
    top = {"task": {"num_clients": 8}, "num_models": 2, "num_rounds": 12}
    for key, value in changes.items():
        (algorithm if key in algorithm else top)[key] = value
    return top | {"algorithms": {"A": algorithm}}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


def test_load_reads_every_value(file):
    experiment = load(file, Experiment)
    assert (experiment.num_models, experiment.num_rounds) == (2, 12)
    assert experiment.task == QuadraticConfig(num_clients=8, block_size=2, mu=0.1)
    (algorithm,) = experiment.algorithms.values()
    assert algorithm.learning_rate == InverseTime(beta=30, gamma=100, per="round")
    assert algorithm.local_steps == 3
    assert algorithm.assignment.cohort_size == 6


def test_validate_inverts_model_dump(file):
    experiment = load(file, Experiment, ["task.start=normal", "client_map=3"])
    assert validate(Experiment, experiment.model_dump()) == experiment


def test_an_override_wins_over_the_file(file):
    for override, get, expected in [
        ("num_rounds=24", lambda e: e.num_rounds, 24),
        ("num_rounds = 24", lambda e: e.num_rounds, 24),
        ("task.mu=2e-4", lambda e: e.task.mu, 2e-4),
        ("task.start=normal", lambda e: e.task.start, "normal"),
        ('task.start="normal"', lambda e: e.task.start, "normal"),
        ("client_map=scan", lambda e: e.client_map, "scan"),
        ("client_map=4", lambda e: e.client_map, 4),
        ("algorithms.A.learning_rate=0.2", lambda e: e.algorithms["A"].learning_rate, 0.2),
        ("algorithms.A.learning_rate.beta=3", lambda e: e.algorithms["A"].learning_rate.beta, 3),
        (
            "algorithms.A.learning_rate.per=frame",
            lambda e: e.algorithms["A"].learning_rate,
            InverseTime(beta=30, gamma=100, per="frame"),
        ),
        (
            "algorithms.A.assignment.name=mfa_rand",
            lambda e: e.algorithms["A"].assignment.model_dump(exclude_none=True),
            {"name": "mfa_rand", "cohort_size": 6, "unbiased": False, "processors": 1},
        ),
        (
            'algorithms.A.assignment={name = "sequential", rounds_per_model = 2}',
            lambda e: e.algorithms["A"].assignment.model_dump(exclude_none=True),
            {"name": "sequential", "rounds_per_model": 2},
        ),
    ]:
        assert get(load(file, Experiment)) != expected
        assert get(load(file, Experiment, [override])) == expected


def test_overrides_keep_other_values_and_the_last_one_wins(file):
    experiment = load(file, Experiment, ["task.mu=0.5", "num_models=3", "num_models=4"])
    assert experiment == load(file, Experiment).model_copy(
        update={
            "num_models": 4,
            "task": QuadraticConfig(num_clients=8, block_size=2, mu=0.5),
        }
    )


def test_overrides_do_not_change_the_given_values():
    given = values()
    validate(Experiment, given, ["task.mu=0.5", "algorithms.A.local_steps=9"])
    assert given == values()


def test_an_override_may_make_a_table():
    plain = values(learning_rate=0.1)
    rate = ["algorithms.A.learning_rate.beta=30", "algorithms.A.learning_rate.gamma=99"]
    algorithm = validate(Experiment, plain, rate).algorithms["A"]
    assert algorithm.learning_rate == InverseTime(beta=30, gamma=99)

    del plain["task"]
    assert validate(Experiment, plain, ["task.num_clients=5"]).task.num_clients == 5


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (
            {"num_models": 9},
            ["num_models is 9", "more than the clients there are (8)", "at most 8 models"],
        ),
        ({"num_models": 0}, ["num_models = 0", "greater than or equal to 1"]),
        ({"num_rounds": 2.5}, ["num_rounds = 2.5", "integer"]),
        ({"record_every": 5}, ["record_every is 5", "divide 12 rounds"]),
        (
            {"until": {"metric": "loss"}},
            ["until has at_least = None, at_most = None and patience", "give one"],
        ),
        ({"client_map": "warp"}, ["client_map", "'warp'", "'vmap' or 'scan'"]),
        ({"client_map": 0}, ["client_map", "= 0"]),
        ({"precision": "half"}, ["precision = 'half'", "'float32' or 'float64'"]),
        ({"task": {"mu": 0}}, ["task.mu = 0", "greater than 0"]),
        ({"task": {"mu": float("inf")}}, ["task.mu = inf", "finite"]),
        ({"task": {"blok_size": 4}}, ["task.blok_size = 4", "did you mean 'block_size'"]),
        ({"learning_rate": -1}, ["algorithms.A.learning_rate", "= -1", "greater than 0"]),
        ({"learning_rate": float("nan")}, ["algorithms.A.learning_rate", "= nan", "finite"]),
        (
            {"learning_rate": {"beta": 30, "gamma": -1}},
            ["algorithms.A.learning_rate", "gamma = -1", "greater than or equal to 0"],
        ),
        ({"learning_rate": {"beta": 30}}, ["algorithms.A.learning_rate", "gamma: missing"]),
        ({"local_steps": None}, ["algorithms.A", "neither local steps nor epochs", "one of"]),
        ({"assignment": {"name": "mfa"}}, ["algorithms.A.assignment", "'mfa'", "'mfa_rand', "]),
        (
            {"assignment": {"name": "mfa_rr", "cohort_size": 9}},
            ["cohort_size is 9", "between 1 and num_clients = 8"],
        ),
        (
            {"assignment": {"name": "fedcluster", "num_clusters": 2}},
            ["num_models is 2", "fedcluster trains 1 model"],
        ),
        (
            {"assignment": {"name": "fedcluster", "num_clusters": 9}, "num_models": 1},
            ["num_clusters is 9", "at most 8 clusters"],
        ),
    ],
)
def test_an_error_names_the_key_the_value_and_the_remedy(change, fragments):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        validate(Experiment, values(**change))
    assert not isinstance(error.value, ValidationError)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_all_problems_are_reported_at_once(file):
    overrides = ["algorithms.A.local_steps=0", "num_models=0", "task.mu=-1"]
    with pytest.raises(ValueError, match="local_steps = 0") as error:
        load(file, Experiment, overrides)
    message = str(error.value)
    assert message.startswith(f"{file}: ")
    assert all(override.replace("=", " = ") in message for override in overrides)


def test_a_proposal_is_a_key_of_the_same_table():
    for key, fragment in [
        ("seeds", "did you mean 'num_seeds'?"),
        ("task.clients", "did you mean 'num_clients'?"),
        ("task.num_round", "known keys of quadratic are"),  # `num_rounds` is not a key of a task
        ("algorithms.A.num_model", "known keys of fedavg are"),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"{key} = 4: unknown key, {fragment}")):
            validate(Experiment, values(), [f"{key}=4"])


@pytest.mark.parametrize("key", ["learning_rate", "learning_rte"])
def test_a_key_at_the_top_is_proposed_for_the_tables_that_have_it(key):
    words = f"{key} = 4: unknown key, give algorithms.A.learning_rate"
    with pytest.raises(ValueError, match=re.escape(words)):
        validate(Experiment, values(), [f"{key}=4"])


def test_a_misspelt_name_gets_a_proposal():
    with pytest.raises(ValueError, match=r"'mfa_r': did you mean 'mfa_rr'\?"):
        validate(Experiment, values(assignment={"name": "mfa_r"}))


def test_private_functions_are_no_assignments():
    with pytest.raises(ValueError, match=r"choose from .*'fedcluster'"):
        validate(Experiment, values(assignment={"name": "_check_sizes"}))


def test_an_override_needs_a_key_and_a_value():
    for override in ["num_models", "=3", ""]:
        with pytest.raises(ValueError, match=f"--set {override}.*key=value"):
            validate(Experiment, values(), [override])


def test_load_names_a_file_that_is_not_toml(tmp_path):
    for text in [b"a = 1\nb = = 2\n", b"a = 1\na = 2\n", b"\xff\xfe"]:
        path = tmp_path / "broken.toml"
        path.write_bytes(text)
        where = "" if text.startswith(b"\xff") else ".*line 2"
        with pytest.raises(ValueError, match=f"broken.toml: not a TOML file{where}"):
            load(path, Experiment)


def test_load_names_a_missing_file(tmp_path):
    with pytest.raises((OSError, ValueError), match=r"missing\.toml"):
        load(tmp_path / "missing.toml", Experiment)


def test_a_configuration_is_frozen():
    experiment = validate(Experiment, values())
    for config, key in ((experiment, "num_models"), (experiment.task, "mu")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(config, key, 1)


def test_an_unknown_key_is_an_error_in_every_table():
    for path in ["extra", "task.extra", "algorithms.A.extra"]:
        with pytest.raises(ValueError, match=rf"{path} = 3: unknown key"):
            validate(Experiment, values(), [f"{path}=3"])


ASSIGNMENTS = {
    "mfa_rand": ({"name": "mfa_rand"}, mfa_rand(8, 2)),
    "mfa_rand cohort": (
        {"name": "mfa_rand", "cohort_size": 6},
        mfa_rand(8, 2, cohort_size=6),
    ),
    "mfa_rr": ({"name": "mfa_rr"}, mfa_rr(8, 2)),
    "mfa_rr redrawn": (
        {"name": "mfa_rr", "cohort_size": 6, "redraw": "round"},
        mfa_rr(8, 2, cohort_size=6, redraw="round"),
    ),
    "fedcluster": ({"name": "fedcluster", "num_clusters": 4}, fedcluster(8, 4)),
    "sequential": (
        {"name": "sequential", "rounds_per_model": 3},
        sequential(8, 2, rounds_per_model=3),
    ),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_an_assignment_is_built_with_all_its_settings(name):
    config, expected = ASSIGNMENTS[name]
    experiment = validate(Experiment, values(assignment=config, num_models=expected.num_models))
    built = experiment.algorithms["A"].assignment.build(8, expected.num_models)
    assert (built.num_clients, built.num_models) == (8, expected.num_models)
    key = jax.random.key(3)
    np.testing.assert_array_equal(roll_out(built, key, 7), roll_out(expected, key, 7))


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.1, lambda t: 0.1),
        ({"beta": 30, "gamma": 100}, lambda t: 30 / (100 + t)),
        ({"beta": 30, "gamma": 99, "per": "frame"}, lambda t: 30 / (99 + 1 + (t - 1) // 12)),
    ],
)
def test_the_learning_rate_of_every_round(rate, expected):
    config = validate(
        METHOD_TABLES["fedavg"], {"name": "fedavg", "learning_rate": rate, "local_steps": 1}
    )
    schedule = config.schedule(12)
    at = schedule if callable(schedule) else lambda t: schedule
    rounds = range(1, 50)
    assert [at(t) for t in rounds] == pytest.approx([expected(t) for t in rounds])
    if callable(schedule):  # inside the compiled loop t is a 32-bit integer array
        assert float(jax.jit(at)(jnp.int32(25))) == pytest.approx(expected(25), rel=1e-6)


@pytest.mark.parametrize(("scale", "expected"), [("mean", 1.0), ("1/N", 0.25)])
def test_the_server_scale_reaches_the_algorithm(scale, expected):
    """With 2 of 8 clients, division by the weight of all clients gives a quarter of the mean."""
    settings = {"learning_rate": 0.1, "local_steps": 1, "server_scale": scale}
    config = METHOD_TABLES["fedavg"](name="fedavg", **settings)
    task, algorithm = QuadraticConfig(num_clients=8).build(), config.build(2)
    params = jnp.ones(task.dim)
    server, _ = algorithm.init(task, params)
    key = jax.random.key(0)
    local = ClientContext(key, 1, task, jnp.int32(0), params)
    client, _ = algorithm.client(local, server, ())
    total = client._replace(update=jnp.full(task.dim, 3.0), weight=jnp.float32(2))
    moved, _ = algorithm.server(ServerContext(1, task, params, server, (), total, key))
    np.testing.assert_allclose(moved - params, expected * 3 / 2, rtol=1e-6)


def test_the_normal_start_is_one_draw_at_both_precisions():
    config = QuadraticConfig(start="normal", start_seed=5)
    draws = []
    for precision in (False, True):
        with jax.enable_x64(precision):
            draws.append(np.asarray(config.initial_params()))
    np.testing.assert_array_equal(*draws)
    assert draws[0].shape == (config.build().dim,)
    # 97 draws of N(0, 1): the mean and the mean square are within 4 standard errors.
    assert abs(draws[0].mean()) < 4 / np.sqrt(97)
    assert abs((draws[0] ** 2).mean() - 1) < 4 * np.sqrt(2 / 97)
    other = QuadraticConfig(start="normal", start_seed=6).initial_params()
    assert not np.any(draws[0] == other)


def test_the_default_start_is_at_zeros():
    config = QuadraticConfig(num_clients=3, block_size=2)
    np.testing.assert_array_equal(config.initial_params(), np.zeros(7))


def learning(task, **algorithm):
    """An experiment on a task with data, as plain values."""
    settings = {"assignment": {"name": "mfa_rand"}, "learning_rate": 0.1, "epochs": 1}
    top = {"task": task, "num_models": 2, "num_rounds": 4}
    return top | {"algorithms": {"A": settings | algorithm}}


TASKS = {
    "synthetic": {"name": "synthetic", "alpha": 0.5, "iid": True, "sigmoid_head": True},
    "leaf's generator": {"name": "synthetic", "generator": "leaf", "reduction": "sum"},
    "digits": {"name": "digits", "model": "cnn"},
    "dirichlet": {"name": "digits", "partition": {"name": "dirichlet", "alpha": 0.5}},
    "shards": {"name": "digits", "partition": {"name": "shards", "shards_per_client": 3}},
    "clusters": {"name": "digits", "partition": {"name": "label_clusters", "num_clusters": 2}},
    "share": {"name": "digits", "partition": {"name": "iid_share", "percent": 50}},
    "sizes": {"name": "digits", "partition": {"name": "quantity_skew", "law": "square"}},
    "few labels": {"name": "digits", "partition": {"name": "extended_dirichlet", "alpha": 9.0}},
    "IID clients": {"name": "digits", "partition": {"name": "iid_clients", "percent": 50}},
}


def test_the_data_seed_and_the_settings_reach_the_data():
    base = {"name": "synthetic", "num_clients": 5}
    changes = ({}, {"data_seed": 1}, {"beta": 0.5}, {"iid": True}, {"dim": 30}, {"num_classes": 3})
    draws = [validate(Experiment, learning(base | more)).task.data() for more in changes]
    stores = {np.asarray(data.train.examples[0]).tobytes() for data in draws}
    stores |= {np.asarray(data.train.examples[1]).tobytes() for data in draws}
    assert len(stores) >= len(changes) + 5


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"local_steps": 3, "epochs": None}, 3),
        ({"local_steps": 3, "epochs": None, "batch_size": 10, "order": "epochs"}, 3),
        ({"epochs": 2}, 2),
        ({"epochs": 2, "batch_size": 10}, 2 * 8),  # 72 of 1,438 digits
    ],
)
def test_epochs_and_batches_reach_the_algorithm(algorithm, expected):
    config = validate(Experiment, learning({"name": "digits", "num_clients": 20}, **algorithm))
    task = config.task.build(config.task.data())
    built = config.algorithms["A"].build(2)
    assert int(built.num_steps(task, jnp.int32(0), ())) == expected


@pytest.mark.parametrize("weighted", [True, False])
def test_weighted_reaches_the_algorithm(weighted):
    config = validate(Experiment, learning({"name": "synthetic"}, weighted=weighted))
    task, algorithm = config.task.build(config.task.data()), config.algorithms["A"].build(2)
    key, client = jax.random.key(0), jnp.int32(3)
    local = ClientContext(key, 1, task, client, task.init(key))
    sent, _ = jax.jit(algorithm.client)(local, algorithm.init(task, local.params)[0], ())
    assert sent.weight == (task.train.counts[client] if weighted else 1)


def image_files(directory):
    """Writes twenty images and labels in the format of MNIST."""
    for part in ("train", "t10k"):
        images = bytes([0, 0, 8, 3, 0, 0, 0, 20, 0, 0, 0, 4, 0, 0, 0, 4]) + bytes(range(160)) * 2
        (directory / f"{part}-images-idx3-ubyte").write_bytes(images)
        labels = bytes([0, 0, 8, 1, 0, 0, 0, 20]) + bytes(i % 10 for i in range(20))
        (directory / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def leaf_files(directory):
    """Writes LEAF files of three clients."""
    for split in ("train", "test"):
        (directory / split).mkdir()
        data = {user: {"x": [[1, 2], [3, 4]], "y": [0, 1]} for user in "abc"}
        content = {"users": list(data), "num_samples": [2] * 3, "user_data": data}
        (directory / split / "data.json").write_text(json.dumps(content))


def test_files_are_read_from_the_given_directory(tmp_path):
    idx, leaf = tmp_path / "idx", tmp_path / "leaf"
    idx.mkdir()
    leaf.mkdir()
    image_files(idx)
    leaf_files(leaf)
    for task, num_clients in (
        ({"name": "idx", "directory": str(idx), "num_clients": 4, "model": "cnn"}, 4),
        ({"name": "leaf", "directory": str(leaf), "model": "mlp"}, 3),
    ):
        config = validate(Experiment, learning(task)).task
        assert config.build(config.data()).num_clients == num_clients


def test_labels_of_leaf_clients_are_flipped(tmp_path):
    leaf_files(tmp_path)
    task = {"name": "leaf", "directory": str(tmp_path), "flipped": 0.67, "data_seed": 2}
    data = validate(Experiment, learning(task)).task.data()
    for split in (data.train, data.test):
        first = np.asarray(split.examples[1]).reshape(3, 2)[:, 0]
        assert first.sum() == 2  # the first labels of three clients, which were 0


DIGITS = {"name": "digits"}


@pytest.mark.parametrize(
    ("task", "algorithm", "fragments"),
    [
        (
            DIGITS,
            {"local_steps": 3},
            ["algorithms.A", "3 local steps and epochs = 1", "one of the two"],
        ),
        (DIGITS, {"order": "iid", "batch_size": 9}, ["algorithms.A", "epochs of iid draws"]),
        (DIGITS, {"order": "epochs"}, ["order is 'epochs'", "give a batch_size"]),
        (DIGITS, {"weighted": "no"}, ["algorithms.A.weighted = 'no'", "boolean"]),
        ({}, {}, ["algorithms.A", "the quadratic has no examples", "give local_steps"]),
        (DIGITS | {"num_clients": 1439}, {}, ["task.num_clients = 1439", "1438"]),
        (
            DIGITS | {"partition": {"name": "dirichlet"}},
            {},
            ["task.partition.alpha: missing"],
        ),
        (
            {"name": "synthetic", "generator": "leaf", "iid": True},
            {},
            ["task", "generator 'leaf' has no alpha, beta and iid"],
        ),
        ({"name": "idx", "directory": "no-such"}, {}, ["train-images-idx3-ubyte", "no-such"]),
        ({"name": "leaf", "directory": "no-such"}, {}, ["no-such/train", "no .json files"]),
    ],
)
def test_an_error_about_data_names_the_remedy(task, algorithm, fragments):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        validate(Experiment, learning(task, **algorithm))
    for fragment in fragments:
        assert fragment in str(error.value)


def test_classifiers_refuse_float64():
    with pytest.raises(ValueError, match="classifiers are trained in 'float32'"):
        validate(Experiment, learning(DIGITS) | {"precision": "float64"})


def test_a_network_for_images_refuses_vectors(tmp_path):
    leaf_files(tmp_path)
    task = validate(
        Experiment, learning({"name": "leaf", "directory": str(tmp_path), "model": "cnn"})
    ).task
    with pytest.raises(ValueError, match=r"takes images .* shape \[2\]; choose 'logistic'"):
        task.build(task.data())


def test_settings_that_do_not_change_the_data_may_be_axes():
    axes = {"task.sigmoid_head": [True, False], "learning_rate": [0.1, 0.2], "epochs": [1, 2]}
    task = {"name": "synthetic", "num_clients": 3}
    grid = grid_of(validate(Experiment, learning(task) | {"axes": axes}))
    assert grid.shape == (1, 2, 2, 2, 20)
    assert len(programs_of(grid)) == 4


def test_a_range_includes_both_ends_without_round_off():
    for settings, expected in [
        ({"start": 0, "stop": 1, "num": 5}, [0, 0.25, 0.5, 0.75, 1]),
        ({"start": 0.1, "stop": 0.3, "num": 3}, [0.1, 0.2, 0.3]),
        ({"start": 0.3, "stop": -0.1, "num": 3}, [0.3, 0.1, -0.1]),
        ({"start": 1e-3, "stop": 10, "num": 5, "scale": "log"}, [0.001, 0.01, 0.1, 1, 10]),
    ]:
        numbers = validate(Range, settings).values()
        assert numbers == expected
        assert all(type(number) is float for number in numbers)


def test_a_wrong_range_is_refused():
    for change, fragments in [
        ({"num": 1}, ["num = 1", "greater than or equal to 2"]),
        ({"num": 2.5}, ["num = 2.5", "integer"]),
        ({"stop": float("inf")}, ["stop = inf", "finite"]),
        ({"scale": "cubic"}, ["scale = 'cubic'", "'linear' or 'log'"]),
        ({"start": 0, "scale": "log"}, ["from 0 to 1 in factors", "positive"]),
        ({"step": 0.1}, ["step = 0.1", "unknown key"]),
    ]:
        with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
            validate(Range, {"start": 0.5, "stop": 1, "num": 3} | change)
        for fragment in fragments:
            assert fragment in str(error.value)


def swept(**axes):
    return validate(Experiment, values() | {"axes": axes})


RATE = {"beta": 3.0, "gamma": 20.0}


ONE_TO_3 = {"start": 1, "stop": 3, "num": 3}


@pytest.mark.parametrize(
    ("axes", "expected", "num_programs"),
    [
        ({"learning_rate": [0.1, 0.2]}, {"learning_rate": [0.1, 0.2]}, 1),
        ({"learning_rate": [1, 2]}, {"learning_rate": [1.0, 2.0]}, 1),
        (
            {"learning_rate": {"start": 1, "stop": 100, "num": 3, "scale": "log"}},
            {"learning_rate": [1, 10, 100]},
            1,
        ),
        (
            {"task": {"mu": [0.1, 1]}, "num_models": [2, 3]},
            {"mu": [0.1, 1], "num_models": [2, 3]},
            2,
        ),
        ({"task.mu": [0.1, 1]}, {"mu": [0.1, 1]}, 1),
        ({"task": {"start": ["zeros", "normal"]}}, {"start": ["zeros", "normal"]}, 1),
        (
            {"task": {"mu": {"start": 1, "stop": 2, "num": 2}}, "local_steps": [1, 2]},
            {"mu": [1, 2], "local_steps": [1, 2]},
            1,
        ),
        ({"learning_rate": [0.1, RATE]}, {"learning_rate": [0.1, InverseTime(**RATE)]}, 2),
        ({"learning_rate": {"beta": [1, 3], "gamma": [20]}}, {"beta": [1, 3], "gamma": [20]}, 1),
        ({"assignment.cohort_size": [4, 8]}, {"cohort_size": [4, 8]}, 2),
        ({"algorithms.A.learning_rate": [0.1]}, {"learning_rate": [0.1]}, 1),
        ({"num_models": {"start": 1, "stop": 3, "num": 3}}, {"num_models": [1, 2, 3]}, 3),
        (
            {"learning_rate": {"start": 1, "stop": 2, "num": 2}, "local_steps": ONE_TO_3},
            {"learning_rate": [1, 2], "local_steps": [1, 2, 3]},
            1,
        ),
    ],
)
def test_axes_become_values_and_programs(axes, expected, num_programs):
    """Real numbers share a program even if they are written as integers."""
    grid = grid_of(swept(**axes))
    assert grid.axes == {"algorithm": ["A"]} | expected
    assert [type(v) for x in list(grid.axes.values())[1:] for v in x] == [
        float
        if name in ("learning_rate", "mu", "beta", "gamma") and not isinstance(v, InverseTime)
        else type(v)
        for name, x in expected.items()
        for v in x
    ]
    assert len(programs_of(grid)) == num_programs


def test_assignments_on_an_axis_get_no_keys_of_other_assignments():
    """Full participation has no cohort_size, which the file does not give."""
    axes = {"assignment.name": ["mfa_rand", "full_participation"]}
    experiment = validate(Experiment, values(num_models=1) | {"axes": axes})
    assert experiment.points().values == axes


def test_an_axis_of_one_algorithm_does_not_change_others():
    two = values()
    two["algorithms"] = dict.fromkeys("AB", two["algorithms"]["A"])
    for key, expected in (("local_steps", [5, 5]), ("algorithms.B.local_steps", [3, 5])):
        grid = grid_of(validate(Experiment, two | {"axes": {key: [5]}}))
        params, client = jnp.ones(8 * 4 + 1), jnp.int32(0)
        steps = []
        for point in grid.points:
            (task, *_), algorithm, *_ = grid.setup(point, 0)
            server, _ = algorithm.init(task, params)
            key = jax.random.key(0)
            sent, _ = algorithm.client(ClientContext(key, 1, task, client, params), server, ())
            steps.append(int(sent.num_gradients))
        assert steps == expected


def test_a_sweep_survives_a_round_trip():
    sweep = swept(learning_rate=[0.1, RATE], task={"mu": {"start": 1, "stop": 2, "num": 2}})
    again = validate(Experiment, sweep.model_dump())
    assert again == sweep
    assert again.points().values == sweep.points().values


def test_overrides_reach_axes(file):
    overrides = ["axes.task.mu=[1, 2]", "axes.learning_rate={start=1, stop=2, num=5}"]
    sweep = load(file, Experiment, [*overrides, "axes.learning_rate.num=3"])
    assert sweep.points().values == {"task.mu": [1, 2], "learning_rate": [1, 1.5, 2]}


@pytest.mark.parametrize(
    ("axes", "fragments"),
    [
        ({"learning_rate": []}, ["axes.learning_rate = []", "at least 1 value"]),
        ({"learning_rate": 0.1}, ["axes.learning_rate = 0.1", "list"]),
        ({"learning_rat": [0.1]}, ["learning_rat", "did you mean 'learning_rate'"]),
        ({"task": {"muu": [0.1]}}, ["task.muu = 0.1", "did you mean 'mu'"]),
        ({"learning_rate": [0.1, -1]}, ["at learning_rate = -1", "greater than 0"]),
        ({"learning_rate": [0.1, float("nan")]}, ["at learning_rate = nan", "finite"]),
        ({"learning_rate": [0.1, "fast"]}, ["at learning_rate = fast", "number"]),
        ({"learning_rate": [0.1, {"beta": 3, "gama": 2}]}, ["gama = 2", "did you mean 'gamma'"]),
        (
            {"learning_rate": {"start": 0, "stop": 1, "num": 3, "scale": "log"}},
            ["axes.learning_rate", "from 0 to 1 in factors", "positive"],
        ),
        (
            {"learning_rate": {"start": 1, "stop": 2, "nmu": 3}},
            ["axes.learning_rate.num: missing", "nmu = 3"],
        ),
        ({"learning_rate": {"start": 0, "stop": 1, "num": 3}}, ["at learning_rate = 0", "than 0"]),
        ({"num_models": [2, 9]}, ["at num_models = 9", "at most 8 models"]),
        (
            {"num_models": [2, 5], "assignment.cohort_size": [8, 4]},
            ["at num_models = 5, assignment.cohort_size = 4", "at most 4 models"],
        ),
        ({"num_models": {"start": 2, "stop": 3, "num": 3}}, ["num_models = 2.0", "integer"]),
        ({"num_models": [2, 3, 2]}, ["'num_models' has 2 twice"]),
        ({"algorithms.Z.learning_rate": [0.1]}, ["unknown algorithm 'Z'; choose from A"]),
        ({"num_rounds": [12, 24]}, ["axes.num_rounds", "cannot vary within a sweep"]),
        (
            {"learning_rate": [0.1], "algorithms.A.learning_rate": [0.2]},
            ["two axes are called 'learning_rate'"],
        ),
        (
            {"assignment": [{"name": "mfa_rr"}], "assignment.cohort_size": [8]},
            ["axes.assignment.cohort_size", "a part of assignment"],
        ),
    ],
)
def test_wrong_axes_are_named_with_a_remedy(axes, fragments):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        swept(**axes)
    assert not isinstance(error.value, ValidationError)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_data_seeds_of_a_task_without_data_are_refused():
    with pytest.raises(ValueError, match=r"^task\.data_seed = 'seed': unknown key"):
        validate(Experiment, values() | {"axes": {"task.data_seed": "seed"}})


def test_a_changed_copy_has_other_points_and_parts():
    experiment = swept(learning_rate=[0.1, 0.2])
    assert experiment.points() is experiment.points()
    other = experiment.model_copy(update={"axes": {"learning_rate": [0.3]}})
    assert other.points().values == {"learning_rate": [0.3]}
    assert other == other.model_copy()
    more = (
        experiment.model_copy(update={"num_models": 3})
        .points()
        .at({"learning_rate": 0.2} | {"algorithm": "A"})
    )
    assert more.setup("A", [more.task.build()]).assignment.num_models == 3


def test_points_between_the_axes_are_validated_when_a_grid_is_built():
    absent = {"name": "markov", "comes": 0.5, "leaves": 0.5}
    file = values(assignment={"name": "mfa_rand", "available": absent})
    inner = {"comes": [0.5, 0.0], "leaves": [0.5, 0.0]}
    grid = grid_of(validate(Experiment, file | {"axes": {"assignment.available": inner}}))
    grid.setup(grid.points[1], 0)
    with pytest.raises(ValueError, match=r"^at .*comes = 0.0, .*leaves = 0.0: .*positive"):
        grid.setup(grid.points[3], 0)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_parts_are_made_in_the_precision_of_the_run(precision):
    present = {"name": "bernoulli", "probability": [1 / 3] * 8}
    file = values(assignment={"name": "mfa_rand", "available": present}, precision=precision)
    experiment = validate(Experiment, file)
    with jax.enable_x64(precision == "float64"):
        grid = grid_of(experiment)
        law = grid.setup(grid.points[0], 0).assignment.call.arguments["law"]
    assert law.share.dtype == precision
