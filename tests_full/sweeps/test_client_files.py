"""More runs with states of clients in files, and files that are damaged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    ditto,
    fedavg,
    full_participation,
    local_sgd,
    mfa_rand,
    mfa_rr,
    mifa,
    scaffold,
    simulate,
    sweep,
    variance_reduced,
)
from fedjax_mm.base import Assignment, Cohort
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.robust import median, robust
from fedjax_mm.sweeps import Checkpoints, Execution, Grid, Setup, Until
from fedjax_mm.sweeps.errors import RefusedError
from fedjax_mm.sweeps.plan import make_plan
from fedjax_mm.tasks import least_squares, quadratic
from tests.sweeps.test_client_files import (
    LOCAL,
    RUNS,
    TASK,
    N,
    check_same,
    in_memory,
    stopped_and_resumed,
)

KEPT = fedavg(local_sgd(0.1, steps=2, momentum=0.9, keeps="client"))
FEW = mfa_rand(N, 2, cohort_size=4)


def twice(clients, models, is_known):
    """The same slots in all rounds, some of which are a client twice, or padding."""
    clients, models = np.array(clients, np.int32), np.array(models, np.int32)

    def assign(rng_key, round, state, look):
        del rng_key, look
        moved = jnp.where(clients < 0, -1, (clients + round) % N)
        return Cohort(moved, models if is_known else jnp.asarray(models)), state

    return Assignment(N, 2, lambda rng_key, look: (), assign)


SETUPS = {
    "mifa": Setup(TASK, mifa(LOCAL, memory="clients"), FEW),
    "kept optimizers": Setup(TASK, KEPT, FEW),
    "known models": Setup(TASK, scaffold(LOCAL), mfa_rr(N, 3)),
    "two methods": Setup(TASK, [scaffold(LOCAL), KEPT], FEW),
    "one of two has states": Setup(TASK, [fedavg(LOCAL), KEPT], FEW),
    "everybody": Setup(TASK, scaffold(LOCAL), full_participation(N)),
    "padding and twice": Setup(
        TASK, scaffold(LOCAL), twice([1, -1, 3, 1, 3], [0, 0, 1, 1, -1], True)
    ),
    "traced models": Setup(TASK, scaffold(LOCAL), twice([1, -1, 3, 1, 3], [0, 0, 1, 1, -1], False)),
    "chunks": Setup(TASK, scaffold(LOCAL), FEW),
}


@pytest.mark.parametrize("name", SETUPS)
def test_stopped_and_in_files_is_in_memory(name, tmp_path):
    settings = {"client_map": 2} if name == "chunks" else {}
    found = stopped_and_resumed(SETUPS[name], tmp_path, **settings)
    check_same(found, in_memory(SETUPS[name], **settings))


def test_records_of_some_rounds_and_targets(tmp_path):
    setup = Setup(TASK, scaffold(LOCAL), FEW)
    for stop, settings in (
        (4, {"record_every": 3}),
        (3, {"until": Until("gradients", at_least=18)}),
    ):
        found = stopped_and_resumed(setup, tmp_path / str(stop), stop, **settings)
        check_same(found, sweep(setup, **RUNS, **settings))


def test_without_checkpoints_no_file_has_a_name(tmp_path):
    setup = Setup(TASK, scaffold(LOCAL), FEW)
    check_same(sweep(setup, execution=Execution(client_states=tmp_path), **RUNS), in_memory(setup))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("memory", ["server", "clients"])
def test_mifa_with_the_memory_of_clients_is_its_loop(memory):
    rng = np.random.default_rng(0)
    xs, ys = list(rng.normal(size=(6, 4, 3))), list(rng.normal(size=(6, 4)))
    task = least_squares(xs, ys, ridge=0.1)
    algorithm, rounds = mifa(local_sgd(0.1, steps=3), memory=memory), 40
    state, _ = simulate(0, task, algorithm, mfa_rand(6, 1, cohort_size=2), rounds)
    again, _ = simulate(
        0, task, mifa(local_sgd(0.1, steps=3)), mfa_rand(6, 1, cohort_size=2), rounds
    )
    np.testing.assert_allclose(state.models[0].params, again.models[0].params, rtol=1e-5, atol=1e-6)


def test_mifa_with_the_memory_of_clients_refuses_what_changes_updates():
    for wrapped in (
        compressed(mifa(LOCAL, memory="clients"), top_k(0.5)),
        robust(mifa(LOCAL, memory="clients"), median()),
    ):
        with pytest.raises(ValueError, match="states"):
            simulate(0, TASK, wrapped, mfa_rand(N, 1), 1)


REFUSED = {
    "mifa reads all": (
        lambda: Setup(TASK, mifa(LOCAL), FEW),
        "the server of the algorithm mifa reads the states of all clients in every round",
    ),
    "assignment reads all": (
        lambda: Setup(
            TASK, scaffold(LOCAL), variance_reduced(N, 2, expected_trainings=4, by="update")
        ),
        "looks at the updates of all clients",
    ),
    "personal models": (
        lambda: Setup(TASK, ditto(LOCAL, lam=0.1), FEW),
        "records evaluate the personal models of all clients",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_all_states_is_refused(name, tmp_path):
    make, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        sweep(make(), execution=Execution(client_states=tmp_path), num_rounds=2)
    assert not list(tmp_path.iterdir())


def cut(files):
    content = files[0].read_bytes()
    files[0].write_bytes(content[: len(content) // 3])


def flip(files):
    content = bytearray(files[0].read_bytes())
    for place in range(4096, len(content), 7):
        content[place] ^= 1
    files[0].write_bytes(content)


def remove(files):
    files[0].unlink()


def replace(files):
    files[0].write_bytes(b"mine")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (cut, (OSError, ValueError), "damaged|does not fit"),
        (flip, OSError, "is damaged at byte"),
        (remove, RefusedError, "is missing"),
        (replace, RefusedError, "is not of this run, or damaged"),
    ],
    ids=["cut", "flipped", "removed", "replaced"],
)
def test_a_damaged_file_is_refused_and_kept(change, error, words, tmp_path):
    setup, after = Setup(TASK, scaffold(LOCAL), FEW), []

    def spoil(files):
        change(files)
        after.extend((path, path.read_bytes()) for path in files if path.exists())

    with pytest.raises(error, match=words):
        stopped_and_resumed(setup, tmp_path, change=spoil)
    assert len(after) == (change is not remove)
    if change is replace:
        assert all(path.read_bytes() == content for path, content in after)


def test_a_run_does_not_change_between_files_and_memory(tmp_path):
    setup = Setup(TASK, scaffold(LOCAL), FEW)
    with Checkpoints(tmp_path / "out", resume=True) as saved:
        how = Execution(checkpoints=saved, save_every=0)
        sweep(setup, execution=how, **RUNS)  # saves the finished run, which nothing discards
        with pytest.raises(ValueError, match="client_states"):
            sweep(setup, execution=how._replace(client_states=tmp_path / "states"), **RUNS)


def test_the_plan_says_what_files_cost_and_when_they_are_needed(tmp_path):
    task = quadratic(20_000, 200, mu=0.05)
    grid = Grid(Setup(task, scaffold(LOCAL), mfa_rand(20_000, 1, cohort_size=100)), {}, 3)
    size = jax.eval_shape(task.init, jax.random.key(0)).size * 4
    plan = make_plan(grid, compiles=False, client_states=tmp_path)
    mebibytes = f"{100 * size / 2**20:,.1f} MiB"
    assert f"a round of a batch reads {mebibytes} and writes as much" in plan.lines[-1]
