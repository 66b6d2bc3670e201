"""Schedulers of jobs: more of their cohorts, and runs of events without training."""

import numpy as np
import pytest

from tests.oracles.scheduling import completion_times
from tests.simulator.test_scheduling import CASES, QUICK
from tests.simulator.test_scheduling import test_clients_are_served_as_one_after_another as check


@pytest.mark.parametrize(
    ("policy", "supply", "demand"), [case for case in CASES if case not in QUICK], ids=str
)
def test_more_clients_are_served_as_one_after_another(policy, supply, demand):
    check(policy, supply, demand)


@pytest.mark.parametrize("seed", range(3))
def test_mean_completion_times_have_the_published_order(seed):
    """Venn's paper has 3.13 million seconds for Venn, 3.45 for SRSF and 4.23 for FIFO."""
    venn, srsf, fifo = (
        float(np.mean(completion_times(policy, seed))) for policy in ("venn", "srsf", "fifo")
    )
    assert venn < srsf < fifo
