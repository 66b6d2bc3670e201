"""States of clients in files give the bits of a run in memory, also after a stop."""

import numpy as np
import pytest
import xarray as xr

from fedjax_mm import local_sgd, mfa_rand, scaffold, sweep
from fedjax_mm.availability import dropping
from fedjax_mm.sweeps import Callback, Checkpoints, Execution, Setup, execute
from fedjax_mm.tasks import quadratic

N, ROUNDS, STOPPED = 12, 6, 4
TASK, LOCAL = quadratic(N, 2, mu=0.05), local_sgd(0.1, steps=2)
RUNS = {"num_rounds": ROUNDS, "num_seeds": 2, "keep": "params"}


class StoppedError(Exception):
    """Raised by a callback, before the state is saved."""


def in_memory(setup, **settings):
    return sweep(setup, **{**RUNS, **settings})


def stopped_and_resumed(setup, directory, stop=STOPPED, change=lambda files: None, **settings):
    """Stops a run after some rounds, of which the last is not saved, and resumes it."""

    def watch(segment):
        if segment.rounds == stop:
            raise StoppedError

    how = Execution(client_states=directory / "states", save_every=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "_SEGMENT_SECONDS", 0)
        with Checkpoints(directory / "out", resume=True) as saved:
            stopping = how._replace(checkpoints=saved, callbacks=[Callback(on_segment=watch)])
            with pytest.raises(StoppedError):
                sweep(setup, execution=stopping, **{**RUNS, **settings})
        change(sorted((directory / "states").iterdir()))
        with Checkpoints(directory / "out", resume=True) as saved:
            found = sweep(setup, execution=how._replace(checkpoints=saved), **{**RUNS, **settings})
            saved.discard()
    assert not list((directory / "states").iterdir())
    return found


def check_same(found, expected):
    (dataset, params), (wanted, models) = found, expected
    xr.testing.assert_identical(dataset.drop_attrs(), wanted.drop_attrs())
    for one, other in zip(params, models, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stopped_run_whose_client_states_are_in_files_ends_as_one_in_memory(tmp_path):
    """Two models with random cohorts, whose clients may drop out."""
    setup = Setup(TASK, scaffold(LOCAL), dropping(mfa_rand(N, 2, cohort_size=4), 0.3))
    check_same(stopped_and_resumed(setup, tmp_path), in_memory(setup))
