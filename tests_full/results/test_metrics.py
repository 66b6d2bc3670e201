"""Estimates of times, some of which were never reached."""

import numpy as np
import xarray as xr

from fedjax_mm.metrics import estimate

TIMES = xr.DataArray(
    [[[1.0, 2.0, 4.0, 5.0], [3.0, np.nan, 5.0, np.nan]]],
    dims=("rate", "method", "seed"),
    coords={"rate": [0.1], "method": ["FedAvg", "MFA-RR"]},
)


def test_runs_that_never_arrive_count_as_the_end_and_are_named():
    mean, error = found = estimate(TIMES, censored_at=10)
    np.testing.assert_allclose(mean, [[3.0, 7.0]])
    counted = [3.0, 10.0, 5.0, 10.0]
    np.testing.assert_allclose(error[0, 1], np.std(counted, ddof=1) / 2)
    np.testing.assert_array_equal(found.share, [[1.0, 0.5]])
    rows = str(found).split("\n")
    assert rows[-1].split()[:2] == ["0.1", "3"]
    assert rows[-1].endswith(">= 7 ± 1.8 (50% of samples)")
    for html in (found._repr_html_(), estimate(TIMES[0])._repr_html_()):
        assert html.count("<td>") == 2
    assert np.isnan(estimate(TIMES).mean[0, 1])
    assert str(estimate(TIMES[0, 0])) == estimate(TIMES[0, 0])._repr_html_() == "3 ± 0.91"
