"""The quadratic of more sizes compared with dense linear algebra."""

import pytest

from tests.tasks import test_quadratic as quick

SIZES = [(5, 4, 2e-4), (2, 1, 0.5), (3, 5, 100.0)]
CHECKS = (
    quick.test_losses_gradients_and_metrics,
    quick.test_minimizer_and_optimum,
    quick.test_minimizer_solves_the_tridiagonal_system,
    quick.test_constants,
    lambda *size: quick.test_closed_form_of_local_steps(*size, 0.1),
    lambda *size: quick.test_closed_form_of_local_steps(*size, 30.0),
)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_other_sizes_agree_with_dense_linear_algebra(size):
    for check in CHECKS:
        check(*size)
