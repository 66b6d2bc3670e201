"""Our bounds on local training, against loops over all cohorts, and a small `theory-later`."""

import itertools

import numpy as np
import pytest

from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS
from fedjax_mm.theory import HypothesisError, Problem
from fedjax_mm.theory.local_steps import equal_losses, outer_optimizer, unlike_losses

N, DIM = 4, 3


def clients(seed):
    """Hessians with eigenvalues between mu and L, and minimizers."""
    rng = np.random.default_rng(seed)
    turned = np.linalg.qr(rng.normal(size=(N, DIM, DIM)))[0]
    sizes = rng.uniform(0.1, 1.5, (N, DIM))
    A = np.einsum("kij,kj,klj->kil", turned, sizes, turned)
    b = np.einsum("kij,kj->ki", A, rng.normal(size=(N, DIM)))
    return A, b, sizes.min(), sizes.max()


@pytest.mark.parametrize(
    ("eta", "E", "C"), list(itertools.product((0.02, 0.3, 0.9), (1, 3, 10), (1, 2, 4)))
)
def test_the_bound_holds_for_all_cohorts_of_unlike_clients(eta, E, C):
    """The expectation is over all sequences of cohorts of three rounds."""
    for seed in range(5):
        A, b, mu, L = clients(seed)
        best = np.linalg.solve(A.mean(0), b.mean(0))
        zeta = np.sqrt(np.mean(np.sum((np.einsum("kij,j->ki", A, best) - b) ** 2, 1)))
        start = best + np.array([1.0, -2.0, 0.5])

        def local(w, A=A, b=b):
            each = np.repeat(w[None], N, 0)
            for _ in range(E):
                each = each - eta * (np.einsum("kij,kj->ki", A, each) - b)
            return each

        models, errors = [start], [np.sum((start - best) ** 2)]
        for _ in range(3):
            cohorts = [list(x) for x in itertools.combinations(range(N), C)]
            models = [local(w)[x].mean(0) for w in models for x in cohorts]
            errors.append(np.mean([np.sum((w - best) ** 2) for w in models]))
        problem = Problem(N=N, C=C, E=E, mu=mu, L=L, zeta=zeta)
        bound = unlike_losses([0, 1, 2, 3], problem, eta, errors[0])
        assert (errors <= bound * (1 + 1e-9)).all()
        if C == N and E == 1:
            assert bound[1] == pytest.approx((1 - eta * mu) ** 2 * errors[0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_some_start_attains_the_outer_optimizers_factor(nesterov):
    A, _, _, _ = clients(0)
    how = {"outer": 1.3, "momentum": 0.7, "nesterov": nesterov}
    factor, rate = outer_optimizer(range(61), A, 0.1, 4, **how)
    P = np.mean([np.linalg.matrix_power(np.eye(DIM) - 0.1 * each, 4) for each in A], 0)

    def errors(w):
        m, found = np.zeros(DIM), [1.0]
        for _ in range(60):
            gradient = w - P @ w
            m = 0.7 * m + gradient
            w = w - 1.3 * (gradient + 0.7 * m if nesterov else m)
            found.append(np.linalg.norm(w))
        return found

    worst = np.max([errors(x) for x in np.linalg.eigh(P)[1].T], 0)
    np.testing.assert_allclose(worst, factor, rtol=1e-9)
    assert (factor[30] / factor[0]) ** (1 / 30) == pytest.approx(rate, rel=0.1)
    random = errors(np.array([1.0, 2.0, -2.0]) / 3)
    assert (random <= factor * (1 + 1e-9)).all()


def test_hypotheses_are_named():
    problem = Problem(N=4, C=4, E=2, mu=0.1, L=1.0, sigma=1.0, zeta=0.5, delta=0.0)
    with pytest.raises(HypothesisError, match=r"needs zeta = 0; given zeta = 0\.5"):
        equal_losses(1, problem, 0.1, 1.0)
    with pytest.raises(HypothesisError, match=r"eta <= 2/\(mu \+ L\)"):
        unlike_losses(1, problem, 1.9, 1.0)


def test_every_bound_holds_in_a_small_run():
    item = ITEMS["theory-later"]
    small = {"rates": (0.02, 0.2, 1.0), "local_steps": (1, 4), "outer": (1.0,)}
    sizes = {"momenta": (0.0, 0.5), "num_rounds": 10, "num_seeds": 20, "cohorts": (2,)}
    config = validate(type(item.settings), item.settings.model_dump() | small | sizes)
    result = item.make(config)
    found = item.findings(result, config)
    outcomes = {each.text: each.outcome for each in found.checks}
    assert [x for text, x in outcomes.items() if "at all points" in text] == ["passed"] * 3
    assert outcomes["momentum of the server has the smallest rate on a quadratic"] == "holds"
    assert [len(table.rows) for table in found.tables] == [6, 6, 4]
    assert sum(result.outside.values != "") == 2  # noise at the largest rate
    assert item.figure(result, found.measured, config).axes
