"""The JSON schema of experiment files, and the settings in manifests."""

import copy
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft7Validator
from pydantic import ValidationError

import fedjax_mm
from fedjax_mm import Experiment
from fedjax_mm.experiments.fields import Config
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.overrides import replaced, validate
from fedjax_mm.experiments.schema import schema
from fedjax_mm.tools.files import plain
from tests.experiments import test_experiment, test_method_tables
from tests.experiments.test_experiment import TASKS, learning, values
from tests.experiments.test_method_tables import DOCUMENTED, settings

SCHEMA = schema()
CHECK = Draft7Validator(SCHEMA)
TEMPLATE = Path(fedjax_mm.__file__).parent / "cli/templates/experiment.toml"

EVERYTHING = tomllib.loads("""
num_rounds = 20
num_seeds = 2
seed = 3
record_every = 4
client_map = 3
precision = "float32"
until = { metric = "loss", at_most = 0.1 }

[[tasks]]
name = "digits"
num_clients = 20
test_fraction = 0.4
data_seed = "seed"
partition = { name = "dirichlet", alpha = 0.5 }
[[tasks]]
name = "digits"
num_clients = 20
test_fraction = 0.5
partition = { name = "dirichlet_clients", alpha = 0.5 }
model = "mlp"

[assignment]
name = "mfa_rand"
processors = 1
appealing = { cohort_size = 3 }
available = { name = "bernoulli", probability = 0.9 }
dropping = 0.1
delay = { mean = 2.0 }
first = 2

[requirement]
num_steps = 2
[byzantine]
fraction = 0.1
attack = { name = "gaussian", deviation = 0.1 }
[executor]
name = "submitit"
parameters = { timeout_min = 3 }

[algorithms.A]
learning_rate = { schedule = "cosine", start = 0.1, warmup_steps = 2 }
local_steps = 2
batch_size = 4
optimizer = { name = "adam", b1 = 0.8 }
server_optimizer = { name = "sgd", momentum = 0.9 }
compression = { name = "top_k", share = 0.1 }

[algorithms.A.privacy]
clip = 1.0
noise_multiplier = 0.1
clients_per_round = 10
adaptive = { count_noise = 1.0 }

[algorithms.B]
name = "perfedavg"
alpha = 0.1
learning_rate = { beta = 3, gamma = 20, per = "frame" }
local_steps = 2
robust = { name = "multi_krum", num_attackers = 1, bucket_size = 2 }

[axes]
learning_rate = [0.1, { beta = 3, gamma = 20 }]
byzantine.fraction = { start = 0.1, stop = 0.2, num = 2 }
task.partition.alpha = [0.1, 1.0]
algorithms.A.server_optimizer.momentum = [0.0, 0.9]
assignment.available = { probability = [0.5, 0.9] }
"task.num_clients" = [20, 30]
""")


def cases(test):
    """The cases of a parametrized test."""
    (marked,) = test.pytestmark
    return marked.args[1]


def tables(value, path=()):
    """Yields the paths of all tables inside a table."""
    if isinstance(value, dict):
        yield path
        for key, inner in value.items():
            yield from tables(inner, (*path, key))


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


def changed(path, value):
    return replaced(copy.deepcopy(EVERYTHING), list(path), value)


def test_it_is_a_schema_of_draft_7_and_accepts_a_file_with_everything():
    Draft7Validator.check_schema(SCHEMA)
    validate(Experiment, EVERYTHING)
    CHECK.validate(EVERYTHING)
    CHECK.validate(tomllib.loads(DOCUMENTED))
    CHECK.validate(tomllib.loads(TEMPLATE.read_text()))


AXES = (
    {"assignment.name": ["mfa_rand", "full_participation"]},
    {"task.data_seed": "seed"},
    {"task": {"data_seed": "seed", "partition": {"alpha": [0.1]}}},
    {"algorithms.A.local_steps": [5]},
    {"algorithms": {"A": {"learning_rate": {"beta": [3.0], "gamma": [20]}}}},
    {"assignment": [{"name": "mfa_rand"}, {"name": "mfa_rr", "cohort_size": 4}]},
    {"optimizer": {"b1": [0.8]}, "learning_rate": {"start": [0.1, 0.2]}},
)


def test_all_ways_to_write_axes_are_accepted():
    for axes, *_ in cases(test_experiment.test_axes_become_values_and_programs):
        CHECK.validate(values() | {"axes": axes})
    for axes in AXES:
        CHECK.validate(learning({"name": "digits"}) | {"axes": axes})


def test_valid_tasks_are_accepted():
    for task in TASKS.values():
        CHECK.validate(learning(task))


def test_num_models_may_be_given_by_tasks_or_by_an_axis_alone():
    file = values()
    del file["num_models"]
    assert not CHECK.is_valid(file)
    CHECK.validate(file | {"axes": {"num_models": [1, 2]}})
    CHECK.validate({key: x for key, x in file.items() if key != "task"} | {"tasks": [{}, {}]})
    assert not CHECK.is_valid(file | {"tasks": [{}, {}]})


def test_unknown_keys_are_rejected():
    accepted = {path for path in tables(EVERYTHING) if CHECK.is_valid(changed((*path, "x"), {}))}
    assert accepted == {("axes", "algorithms"), ("executor", "parameters")}
    assert not CHECK.is_valid(changed(("algorithms", "C"), 3))


def test_wrong_values_are_rejected():
    """Flags are refused, and so are negative numbers of bounded settings."""
    paths = [*leaves(EVERYTHING)]
    free = ("executor", "parameters", "timeout_min")
    assert [path for path in paths if CHECK.is_valid(changed(path, True))] == [free]
    unbounded = {
        path
        for path in paths
        if path[-1] in ("at_most", "mean", "start", "stop") and path[0] != "algorithms"
    }
    assert {path for path in paths if CHECK.is_valid(changed(path, -1))} == unbounded | {free}


REFUSED = (
    *(
        values(**change)
        for change, _ in cases(test_experiment.test_an_error_names_the_key_the_value_and_the_remedy)
    ),
    *(
        learning(task, **more)
        for task, more, _ in cases(test_experiment.test_an_error_about_data_names_the_remedy)
    ),
    *(file for file, _ in cases(test_method_tables.test_an_error_names_the_fault_and_the_remedy)),
    *(
        values() | {"axes": axes}
        for axes, _ in cases(test_experiment.test_wrong_axes_are_named_with_a_remedy)
    ),
    *(
        settings() | {"axes": axes}
        for axes, _ in cases(test_method_tables.test_a_wrong_axis_is_named)
    ),
)


def test_what_a_table_refuses_by_itself_is_rejected():
    """Several keys at once are checked only when a file is read, and JSON has no infinity."""
    for file in REFUSED:
        with pytest.raises(ValidationError) as refused:
            Experiment.model_validate(file)
        kinds = {each["type"] for each in refused.value.errors()}
        if "value_error" not in kinds and "finite_number" not in kinds:
            assert not CHECK.is_valid(file), file


def test_the_settings_in_a_manifest_have_all_defaults():
    """Every table is complete, and the settings alone give the same experiment again."""

    def check(table, saved):
        if isinstance(table, Config):
            fields = type(table).model_fields
            assert saved.keys() == {key for key, field in fields.items() if not field.exclude}
            table = dict(table)
        if isinstance(table, dict):
            for key in saved:
                check(table[key], saved[key])
        elif isinstance(table, list | tuple):
            for each in zip(table, saved, strict=True):
                check(*each)

    experiment = validate(Experiment, EVERYTHING)
    saved = plain(experiment.model_dump())
    check(experiment, saved)
    assert saved["byzantine"]["loss_factor"] == 10.0
    assert saved["algorithms"]["A"]["optimizer"]["b2"] == 0.999
    again = validate(Experiment, saved)
    assert again == experiment.model_copy(update={"executor": None})
    small = validate(Experiment, values())
    assert grid_of(small).config == small.model_dump()
