"""Schedulers of jobs in a run of events without training."""

import numpy as np
import pytest

from tests.oracles.scheduling import completion_times


@pytest.mark.parametrize("seed", range(3))
def test_mean_completion_times_have_the_published_order(seed):
    """Venn's paper has 3.13 million seconds for Venn, 3.45 for SRSF and 4.23 for FIFO."""
    venn, srsf, fifo = (
        float(np.mean(completion_times(policy, seed))) for policy in ("venn", "srsf", "fifo")
    )
    assert venn < srsf < fifo
