"""Every part of a file can be code of one's own, and wrong or changed code is refused."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft7Validator

from fedjax_mm import Experiment, open_result, run
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.overrides import load
from fedjax_mm.experiments.schema import schema
from fedjax_mm.sweeps import Execution
from fedjax_mm.sweeps.plan import make_plan
from tests.experiments.test_own_code import write
from tests.test_cli import call, words

PARTS = """
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from fedjax_mm import (asynchrony, availability, compression, fedavg, mfa_rand, part, robust, tasks,
                       topologies)

def spread(labels, num_clients, seed, *, power: float = 1.0):
    return np.array_split(np.random.default_rng(seed).permutation(len(labels)), num_clients)

class Net(nn.Module):
    num_classes: int
    width: int = 8

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1))))

def mean_logit(outputs, targets, weights, shift=0):
    return jnp.mean(outputs) + shift

def drawn(data_seed=0):
    return tasks.quadratic(10, 2, mu=0.1 + data_seed % 2)

def nothing():
    return 3

def wrong(kind):
    raise KeyError(kind)

half = compression.top_k
middle = robust.median
flip = robust.sign_flip
circle = topologies.ring
sometimes = availability.bernoulli
late = asynchrony.shifted_exponential

def plain(local):
    return fedavg(local)

def descent(learning_rate, momentum: float = 0.5):
    return optax.sgd(learning_rate, momentum)
"""
BASE = """
num_models = 2
num_rounds = 2
num_seeds = 2
assignment = { name = "mfa_rand" }
task = { name = "digits", num_clients = 10 }
[algorithms.A]
learning_rate = 0.1
local_steps = 2
batch_size = 4
"""
KINDS = {
    "a partition": ["task.partition={name='NAME:spread', power=0.5}"],
    "a network": ["task.model={name='NAME:Net', width=4}"],
    "a metric": ["task.metrics=['f1', {name='NAME:mean_logit', shift=-1}]"],
    "data by seed": ["task={name='NAME:drawn', data_seed='seed'}", "algorithms.A.batch_size=4"],
    "a compressor": ["algorithms.A.compression={name='NAME:half', share=0.5}"],
    "a rule": ["algorithms.A.robust={name='NAME:middle'}"],
    "an attack": ["byzantine={fraction=0.2, attack={name='NAME:flip'}}"],
    "mixing": ["assignment.mixing={name='NAME:circle'}"],
    "availability": ["assignment.available={name='NAME:sometimes', probability=0.5}"],
    "delays": ["assignment.delay={name='NAME:late', mean=2.0}"],
    "a client optimizer": ["algorithms.A.optimizer={name='NAME:descent', momentum=0.0}"],
    "a server optimizer": [
        "algorithms.A.server_optimizer={name='NAME:descent', learning_rate=1.0}"
    ],
    "wrappers of an own method": [
        "algorithms.A.name=NAME:plain",
        "algorithms.A.personal={where=['kernel']}",
    ],
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("base.toml").write_text(BASE)


def write_parts(module):
    """Writes a module of another name for each test, because Python imports each once."""
    Path(f"{module}.py").write_text(PARTS)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_can_be_own_code(kind):
    module = write_parts(f"parts_{kind.replace(' ', '_')}")
    changed = [each.replace("NAME", module) for each in KINDS[kind]]
    if kind == "data by seed":
        changed = [changed[0], "algorithms.A={learning_rate=0.1, local_steps=2}"]
    experiment = load(Path("base.toml"), Experiment, changed, allow_code=True)
    make_plan(grid_of(experiment), compiles=False)
    settings = experiment.model_dump(mode="json", exclude_unset=True)
    Draft7Validator(schema()).validate(settings)
    assert module in str(settings)


WRONG = {
    "no such module": ("no_such_module:make", "ModuleNotFoundError: No module named"),
    "no such function": ("NAME:missing", "has no attribute 'missing'"),
    "no name": ("NAME:", 'names no function; write "module:function"'),
    "spaces": ("a b:c", "names no function"),
    "no source": ("sys:intern", "'sys:intern' has no source file"),
    "no task": ("NAME:nothing", "NAME:nothing returned 3, which is no task"),
    "an error": ("NAME:wrong", "NAME:wrong raised KeyError: 'bad' ("),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_code_is_refused_in_words(name):
    module = write_parts(f"wrong_{name.replace(' ', '_')}")
    function, message = (text.replace("NAME", module) for text in WRONG[name])
    table = f"task={{name='{function}'{', kind=' + repr('bad') if name == 'an error' else ''}}}"
    plain = "algorithms.A={learning_rate=0.1, local_steps=2}"
    code, _, err = call(
        "run", "base.toml", "--allow-code", "--dry-run", "--set", table, "--set", plain
    )
    assert code == 2
    assert message in words(err)


def test_parts_and_workers_need_leave_and_agree(tmp_path):
    write(tmp_path, "shared_code")
    expected = run("own.toml", allow_code=True)
    for part in ("1/2", "2/2"):
        assert call("run", "own.toml", "--allow-code", "--part", part).code == 0
    code, _, err = call("merge", "results/own")
    assert (code, "is code, which is not run unless you allow it" in words(err)) == (2, True)
    assert call("merge", "results/own", "--allow-code").code == 0
    with ThreadPoolExecutor(1) as workers:
        by_workers = run("own.toml", Execution(executor=workers, num_parts=2), allow_code=True)
    for found in (open_result("results/own"), by_workers):
        np.testing.assert_array_equal(found.loss, expected.loss)


def test_changed_code_is_not_resumed(tmp_path):
    write(tmp_path, "changing_code")

    def outcome():
        command = ["-m", "fedjax_mm", "run", "own.toml", "--allow-code", "--resume"]
        return subprocess.run([sys.executable, *command], capture_output=True, text=True)

    assert outcome().returncode == 0
    assert "nothing to resume" in outcome().stdout
    with Path("changing_code.py").open("a") as file:
        file.write("# changed\n")
    refused = outcome()
    assert refused.returncode == 2
    assert "config.task.code was" in words(refused.stderr)
    load(Path("own.toml"), Experiment, allow_code=True)
    Path("changing_code.py").touch()
    with Path("changing_code.py").open("a") as file:
        file.write("# changed again\n")
    with pytest.raises(ValueError, match="has changed since it was imported; start Python again"):
        load(Path("own.toml"), Experiment, allow_code=True)
