"""The simulator against the NumPy float64 loops of `reference`, with the same assignments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import fedavg, local_sgd, mfa_rand, mfa_rr, simulate
from fedjax_mm.base import Batching
from fedjax_mm.data import client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.schedules import inverse_time
from fedjax_mm.tasks import quadratic
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import LogisticRegression
from tests.helpers import roll_out, slow_unless
from tests.oracles import multi_model as reference
from tests.simulator.test_oracle import N, P, drawn_rows, error, regression

LOCAL = {
    "closed form": (optax.sgd, reference.full_gradient_steps, 1e-12),
    "autodiff": (lambda rate: optax.sgd(rate), reference.full_gradient_steps, 1e-12),
    "adam": (optax.adam, reference.local_adam, 1e-7),  # divides round-off by sqrt(v) + 1e-8
}


pytestmark = pytest.mark.usefixtures("x64")


SAMPLINGS = {  # settings of local SGD, and the rows of a step
    "iid": ({"steps": 4, "batch_size": 3}, Batching(3)),
    "iid, large": ({"steps": 2, "batch_size": 20}, Batching(20)),
    "epochs": ({"epochs": 2, "batch_size": 4}, Batching(4, "epochs")),
    "steps of epochs": (
        {"steps": 5, "batch_size": 4, "order": "epochs"},
        Batching(4, "epochs"),
    ),
    "full": ({"epochs": 3}, Batching(None, "epochs")),
}


def labelled(num_clients=7, dim=4, num_classes=3, seed=0):
    """Features and labels of clients with 1 to 9 examples."""
    features, _ = regression(num_clients, dim, seed)
    rng = np.random.default_rng(seed)
    return features, [rng.integers(0, num_classes, len(x)) for x in features]


HEADS = (  # assignment, reduction, whether each class has a sigmoid
    (mfa_rand, "mean", False),
    (mfa_rr, "sum", True),
    (mfa_rand, "sum", False),
    (mfa_rr, "mean", True),
)


# Heads in quick tests, by sampling and client map.
QUICK_HEADS = {
    ("iid", "auto"): {0},
    ("iid, large", "scan"): {2},
    ("epochs", 2): {3},
    ("steps of epochs", "vmap"): {1},
    ("full", "auto"): {1},
    **dict.fromkeys([("iid, large", "auto"), ("epochs", "auto")], ()),
    **dict.fromkeys([("steps of epochs", "auto"), ("epochs", "vmap"), ("epochs", "scan")], ()),
}


@pytest.mark.parametrize(
    ("sampling", "client_map", "head"),
    [
        slow_unless(head in quick, *each, head)
        for each, quick in QUICK_HEADS.items()
        for head in range(len(HEADS))
    ],
)
def test_logistic_regression(sampling, client_map, head):
    """5 of 7 clients train 3 models, and the oracle uses the rows that the store draws."""
    make, reduction, sigmoid_head = HEADS[head]
    features, labels = labelled()
    counts = np.array([len(each) for each in labels])
    clients = client_data(list(zip(features, labels, strict=True)))
    data = FederatedData("seven", "synthetic", 3, clients, clients)
    task = classification(data, LogisticRegression(3, sigmoid_head), reduction=reduction)
    problem = reference.Softmax(features, labels, 3, sigmoid_head, reduction)
    options, how = SAMPLINGS[sampling]
    assignment, rng_key = make(7, 3, cohort_size=5), jax.random.key(5)
    rng = np.random.default_rng(2)
    params = {"classes": {"bias": rng.normal(size=(3, 3)), "kernel": rng.normal(size=(3, 3, 4))}}

    def flat(params):
        leaves = params["classes"]["bias"], params["classes"]["kernel"].reshape(3, -1)
        return np.concatenate(leaves, axis=1)

    def num_steps(k):
        per_epoch = 1 if how.size is None else -(-counts[k] // how.size)
        return options.get("steps") or options["epochs"] * per_epoch

    most_steps = max(num_steps(k) for k in range(7))
    numbered = dataclasses.replace(clients, examples=jnp.arange(counts.sum()))
    all_rows, all_weights = drawn_rows(numbered, how, most_steps)

    def gradient(m, k, w, t, e):
        if e >= num_steps(k):
            return np.zeros_like(w)
        rows, weights = all_rows[t, m, k, e], all_weights[t, m, k, e]
        rows = rows[weights > 0] - counts[:k].sum()
        assert (rows >= 0).all()
        assert (rows < counts[k]).all()
        return reference.softmax_gradient(problem, k, w, rows)

    algorithm, num_rounds = fedavg(local_sgd(0.1, **options)), 12

    @jax.jit
    def run(rng_key, task, params):
        how = {"params": params, "client_map": client_map}
        return simulate(rng_key, task, algorithm, assignment, num_rounds, **how)

    state, trace = run(rng_key, task, params)
    trace = jax.device_get(trace)
    groups = roll_out(assignment, rng_key, num_rounds)
    expected = reference.simulate(
        gradient,
        flat(params),
        groups,
        [0.1] * num_rounds,
        most_steps,
        weights=counts.astype(float),
    )
    assert error(flat(state.models[0].params), expected[-1]) < 1e-10
    for t in (0, 1, num_rounds):
        for m in range(3):
            loss, accuracy = reference.softmax_metrics(problem, expected[t, m], range(7))
            assert trace.metrics["loss"][t, m] == pytest.approx(loss, rel=1e-10)
            assert trace.metrics["train_accuracy"][t, m] == pytest.approx(accuracy)
    steps = [[sum(num_steps(k) for k in group if k >= 0) for group in row] for row in groups]
    np.testing.assert_array_equal(trace.gradients[1:], steps)


@pytest.mark.parametrize(
    ("local", "server_scale"),
    [
        *((local, "mean") for local in LOCAL),
        *(slow_unless(local == "closed form", local, "1/N") for local in LOCAL),
    ],
)
def test_local_optimizers_and_server_scale(local, server_scale):
    local_optimizer, local_steps_fn, tolerance = LOCAL[local]
    assignment, rng_key, num_rounds = mfa_rr(N, 5), jax.random.key(3), 20
    start = np.random.default_rng(1).normal(size=(5, N * P + 1))
    algorithm = fedavg(
        local_sgd(inverse_time(3.0, 20.0), steps=4, optimizer=local_optimizer),
        server_scale=server_scale,
    )
    task = quadratic(N, P, mu=0.05)

    @jax.jit
    def run(rng_key, task, start):
        return simulate(rng_key, task, algorithm, assignment, num_rounds, params=start)[0]

    state = run(rng_key, task, start)
    problem = reference.dense_quadratic(N, P, 0.05)
    expected = reference.simulate(
        lambda m, k, w, t, e: reference.client_gradient(problem, k, w),
        start,
        roll_out(assignment, rng_key, num_rounds),
        [3.0 / (t + 20.0) for t in range(1, num_rounds + 1)],
        4,
        weights=np.ones(N),
        server_scale="population" if server_scale == "1/N" else "mean",
        local_steps_fn=local_steps_fn,
    )
    assert error(state.models[0].params, expected[-1]) < tolerance
