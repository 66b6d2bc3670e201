"""The code of docs/extending.md as it stands there: its size, and that all ways to run it agree."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import Execution, Setup, layout, simulate, sweep, to_dataset
from fedjax_mm.plan import seed_keys
from tests.helpers import roll_out
from tests.test_docs import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
NAMES = ("Logistic", "scaffold", "least_trained")


@pytest.fixture(scope="module")
def page():
    """What the page defines; nothing that it runs at its end."""
    names = {"__name__": "extending"}
    for block in BLOCKS[:4]:
        exec(compile(block.partition("state, trace =")[0], "extending.md", "exec"), names)
    return names


def problems(page):
    keys = jax.random.split(jax.random.key(1), 3)
    return [page["problem"](key, num_clients=13, num_examples=12, dim=3) for key in keys]


@pytest.fixture(scope="module")
def tasks(page):
    """Three small problems, one per model."""
    return problems(page)


def replicas(page, client_map, client_axis=None):
    """The three parts of the page together, for several seeds."""

    def one(rng_key, tasks):
        return simulate(
            rng_key,
            tasks,
            page["scaffold"](0.1, local_steps=3, batch_size=4),
            page["least_trained"](13, 3, 0.6),
            20,
            client_map=client_map,
            client_axis=client_axis,
        )

    return jax.vmap(one, (0, None))


@pytest.fixture(scope="module")
def expected(page, tasks):
    """All clients at once, on one device."""
    result = jax.jit(replicas(page, "vmap"))(seed_keys(0, 4), tasks)
    (controls,) = jax.tree.leaves(result[0].models.clients)
    assert np.all(np.abs(controls).max((0, 2, 3)) > 0.1)  # every model has moved clients' states
    return result


def close(actual, expected):
    """Equal to 1e-6 of the largest number in an array; counts exactly."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())
        elif not jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


def ruff(*arguments, code):
    command = [sys.executable, "-m", "ruff", *arguments, "--isolated", "--line-length=100", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", range(3), ids=NAMES)
def test_each_part_is_complete_in_at_most_40_lines(number):
    code = BLOCKS[number]
    assert len(code.splitlines()) <= 40
    undefined_or_unused = ruff("check", "--select=F", code=code)
    assert undefined_or_unused.returncode == 0, undefined_or_unused.stdout
    names = {"__name__": "extending"}
    exec(compile(code, "extending.md", "exec"), names)
    assert NAMES[number] in names


def test_the_code_is_formatted():
    for code in BLOCKS:
        assert ruff("format", code=code).stdout == code


def test_the_page_runs_and_prints(capsys):
    names = {"__name__": "extending"}
    for block in BLOCKS:
        exec(compile(block, "extending.md", "exec"), names)
    assert "availability" in capsys.readouterr().out
    loss = names["result"].loss
    assert loss.sizes["algorithm"] == 2
    assert (loss.isel(round=-1) < loss.isel(round=0)).all()
    end = loss.isel(round=-1).sel(learning_rate=0.1).mean(("seed", "model"))
    few, all_there = end.sel(algorithm="fedavg") - end.sel(algorithm="scaffold")
    assert few > all_there > 0


@pytest.mark.parametrize("client_map", ["scan", 2])
def test_client_maps_agree(page, tasks, expected, client_map):
    """Parameters, server states, client states and traces."""
    close(jax.jit(replicas(page, client_map))(seed_keys(0, 4), tasks), expected)


@pytest.mark.parametrize(
    ("axis", "client_map"), [("replicas", "vmap"), ("clients", "vmap"), ("clients", 2)]
)
def test_two_devices_agree_with_one(page, tasks, expected, axis, client_map):
    where = layout(4, jax.devices()[:2], axis)
    program = where.over(replicas(page, client_map, where.client_axis), (0, None))
    close(jax.jit(program)(seed_keys(0, 4), tasks), expected)


@pytest.mark.parametrize(("split", "client_map"), [("replicas", 2), ("clients", "scan")])
def test_sweeps_on_two_devices_agree_with_one(
    page, tasks, expected, split, client_map, monkeypatch
):
    def build(learning_rate, availability, tasks):
        algorithm = page["scaffold"](learning_rate, local_steps=3, batch_size=4)
        return Setup(tasks, algorithm, page["least_trained"](13, 3, availability))

    devices = jax.devices()[:2]
    monkeypatch.setattr("fedjax_mm.plan.layout", lambda n, axis: layout(n, devices, axis))
    swept = sweep(
        build,
        {"learning_rate": [0.05, 0.1], "availability": [0.6, 1.0]},
        num_rounds=20,
        num_seeds=4,
        client_map=client_map,
        shared={"tasks": tasks},
        execution=Execution(split=split),
    )
    same = swept.sel(learning_rate=0.1, availability=0.6)
    alone = to_dataset(expected[1], ["seed"])
    close([same[name].values for name in alone], [alone[name].values for name in alone])


def test_a_seed_means_the_same_clients_and_data_in_both_precisions(page, tasks):
    def groups():
        return roll_out(page["least_trained"](13, 3, 0.6), jax.random.key(5), 10)

    single = groups()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(groups(), single)
        for a, b in zip(tasks, problems(page), strict=True):
            assert b.x.dtype == jnp.float64
            np.testing.assert_array_equal(a.x, b.x)
            np.testing.assert_array_equal(a.y, b.y)


def test_everybody_trains_what_they_trained_least(page):
    groups = roll_out(page["least_trained"](40, 3, 0.5), jax.random.key(6), 300)
    trained = np.stack([(groups == client).any(-1) for client in range(40)], 1)  # [T, N, M]
    assert trained.sum(-1).max() == 1
    counts = trained.cumsum(0)
    assert (counts.max(-1) - counts.min(-1)).max() == 1
    share, error = trained.any(-1).mean(), np.sqrt(0.25 / (300 * 40))
    assert abs(share - 0.5) < 4 * error


def test_scaffold_is_the_papers_loop(page):
    """Full batches, all clients, one model: option II, written out."""
    rate, steps = 0.1, 3
    algorithm = page["scaffold"](rate, local_steps=steps)
    with jax.enable_x64(True):
        task = problems(page)[0]
        everybody = page["least_trained"](13, 1, 1.1)
        actual = simulate(jax.random.key(0), task, algorithm, everybody, 8)[0].models
        x, mean = np.zeros(3), np.zeros(3)
        own = np.zeros((13, 3))
        gradient = jax.jit(jax.grad(task.loss))
        for _ in range(8):
            new_own, changes = own.copy(), []
            for k in range(13):
                y = x.copy()
                for _ in range(steps):
                    y = y - rate * (np.asarray(gradient(y, (task.x[k], task.y[k]))) - own[k] + mean)
                new_own[k] = own[k] - mean + (x - y) / (steps * rate)
                changes.append(y - x)
            x, mean = x + np.mean(changes, 0), mean + (new_own - own).mean(0)
            own = new_own
        np.testing.assert_allclose(actual.params[0], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(actual.clients[0], own, rtol=0, atol=1e-12)
        np.testing.assert_allclose(actual.server[1][0], mean, rtol=0, atol=1e-12)
