"""Error rates of `settle`, its compilations, and how it goes on after an interruption."""

import jax
import numpy as np
import pytest
import xarray as xr

from benchmarks.settling import LAWS, LEVEL, MARGIN, decided, table
from fedjax_mm import claims, settle
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.sweeps import Callback, Checkpoints, Execution
from tests.sweeps.test_settle import AXES, build, is_open, rates_differ


def test_looking_repeatedly_errs_at_most_at_the_level():
    """At the margin and at twice the margin, at 4 standard errors above the level of 5 %."""
    experiments = 2000
    most = 100 * (LEVEL + 4 * np.sqrt(LEVEL * (1 - LEVEL) / experiments))
    for law, above, below, right, wrong, seeds, fixed in table(experiments):
        assert above + below <= most, law
        assert wrong <= most, law
        assert right > 95, law
        assert seeds < 2 * fixed, law


@pytest.mark.parametrize("law", LAWS)
def test_the_simulated_rule_is_that_of_claims(law):
    drawn = MARGIN + 0.3 + LAWS[law](np.random.default_rng(3), (200, 32))
    rows = xr.DataArray(drawn, {"row": range(200)}, dims=("row", "seed"))
    words = {"supported": 1, "contradicted": -1, "not settled": 0}
    found = [words[x.verdict((0.01, 0.01), 0.01)] for x in claims.more(rows, by=MARGIN)]
    assert found == decided(drawn, 0.01).tolist()
    assert len(set(found)) > 1


def test_blocks_of_equal_size_are_compiled_once():
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: events.append(name) if "backend_compile" in name else None
    )
    counts = []
    for most in (32, 64):
        events.clear()
        settle(build, AXES, is_open, num_rounds=5, max_seeds=most)
        counts.append(len(events))
    assert counts[0] > 0  # all points, and from the second block on those of one rate
    assert counts[1] == 0


def test_an_interrupted_run_repeats_no_block(tmp_path):
    how = {"num_rounds": 4, "max_seeds": 64}
    whole, verdicts = settle(build, AXES, [rates_differ, is_open], **how)
    runs = []

    def stop(plan):
        runs.append(plan.grid.first_seed)
        if plan.grid.first_seed == 32:
            raise KeyboardInterrupt

    with Checkpoints(tmp_path) as saved:
        watched = Execution(callbacks=[Callback(on_start=stop)], checkpoints=saved, save_every=0.0)
        with pytest.raises(KeyboardInterrupt):
            settle(build, AXES, [rates_differ, is_open], execution=watched, **how)
    rounds = []
    watch = Callback(on_batch=lambda segment: rounds.append(segment.plan.grid.first_seed))
    with Checkpoints(tmp_path, resume=True) as saved:
        again = Execution(callbacks=[watch], checkpoints=saved)
        result, found = settle(build, AXES, [rates_differ, is_open], execution=again, **how)
    assert set(rounds) == {32, 48}  # the first blocks were loaded
    xr.testing.assert_equal(result, whole)
    assert str(found) == str(verdicts)


def test_claims_of_files_name_runs_that_there_are():
    method = {"assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 5}
    about = {"task": {"name": "quadratic"}, "num_models": 2, "num_rounds": 10}
    for more, words in (
        ({"algorithm": "C"}, "claims.better: algorithm is 'C', and the runs have A, B"),
        ({"learning_rate": 0.1}, "claims.better: 'learning_rate' is no axis, but algorithm"),
    ):
        claim = {"metric": "loss", "more": more, "than": {"algorithm": "B"}}
        given = about | {"algorithms": {"A": method, "B": method}, "claims": {"better": claim}}
        with pytest.raises(ValueError, match=words):
            Experiment.model_validate(given)
