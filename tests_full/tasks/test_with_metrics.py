"""Custom metrics: names, numbers and arrays, and unchanged training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import fedavg, mfa_rr, params_of, simulate, sweep
from fedjax_mm import to_dataset as labelled
from fedjax_mm.base.capabilities import AnalyticTask
from fedjax_mm.sweeps import Grid, Setup, Until
from fedjax_mm.tasks import quadratic
from fedjax_mm.tasks.view import client_losses
from fedjax_mm.tasks.with_metrics import with_metrics
from tests.helpers import Towards

N, MODELS, ROUNDS = 4, 2, 3
HOW = fedavg(0.1, local_steps=2), mfa_rr(N, MODELS), ROUNDS


def arrays(task, params):
    """Per-client losses, a pair, and a matrix with the shape of a confusion matrix."""
    own = {"client_loss": client_losses(task, params), "pair": jnp.stack([params[0], params[1]])}
    return own | {"confusion": jnp.zeros((N, N))}


def with_arrays(task):
    return with_metrics(task, arrays, per_client=["client_loss"])


@functools.cache
def runs():
    """Final parameters and traces of the task, with a norm, and with arrays as well."""

    @jax.jit
    def program(rng_key, task):
        norm = with_metrics(task, {"norm": optax.tree.norm})
        tasks = task, norm, with_arrays(norm)
        return [
            (params_of(state), trace)
            for state, trace in (simulate(rng_key, each, *HOW) for each in tasks)
        ]

    return program(jax.random.key(0), quadratic(N, 2, mu=0.05))


def test_training_is_bit_for_bit_unchanged():
    (params, plain), *others = runs()
    assert isinstance(with_metrics(quadratic(N, 2, mu=0.05), {}), AnalyticTask)
    assert not isinstance(with_metrics(Towards(jnp.zeros(N)), {}), AnalyticTask)
    for own, trace in others:
        for one, other in zip(own, params, strict=True):
            np.testing.assert_array_equal(one, other)
        for name, values in plain.metrics.items():
            np.testing.assert_array_equal(trace.metrics[name], values)


def test_numbers_and_arrays_are_recorded_by_name():
    (params, _), _, (_, trace) = runs()
    norms = [np.linalg.norm(each) for each in params]
    np.testing.assert_allclose(trace.metrics["norm"][-1], norms, rtol=1e-6)
    assert trace.metrics["client_loss"].shape == (ROUNDS + 1, MODELS, N)
    losses = [client_losses(quadratic(N, 2, mu=0.05), each) for each in params]
    np.testing.assert_allclose(trace.metrics["client_loss"][-1], losses, rtol=1e-5)
    result = labelled(trace)
    assert result.client_loss.dims == ("round", "model", "client")
    assert result.client.values.tolist() == list(range(N))
    assert result.pair.dims == ("round", "model", "pair_0")
    assert result.confusion.dims == ("round", "model", "confusion_0", "confusion_1")
    mean = result.client_loss.mean("client")
    np.testing.assert_allclose(mean, result.loss, rtol=1e-5, atol=1e-6)


def build(num_clients, learning_rate):
    task = with_arrays(quadratic(num_clients, 2, mu=0.05))
    return Setup(task, fedavg(learning_rate, local_steps=2), mfa_rr(num_clients, MODELS))


AXES = {"num_clients": [N, 3], "learning_rate": [0.05, 0.1]}


def test_a_sweep_has_a_dimension_of_clients():
    """Missing clients are NaN."""
    result = sweep(Grid(build, AXES, num_rounds=ROUNDS, num_seeds=2))
    dims = ("num_clients", "learning_rate", "seed", "round", "model")
    assert result.client_loss.dims == (*dims, "client")
    assert result.pair.dims == (*dims, "pair_0")
    assert result.confusion.dims == (*dims, "confusion_0", "confusion_1")
    mean = result.client_loss.mean("client")
    np.testing.assert_allclose(mean, result.loss, rtol=1e-5, atol=1e-6)
    counts = np.isfinite(result.client_loss).sum("client")
    np.testing.assert_array_equal(counts.sel(num_clients=N), N)
    np.testing.assert_array_equal(counts.sel(num_clients=3), 3)


def test_records_after_a_target_are_nan_in_arrays():
    until = Until("client_updates", at_least=2)
    only = {name: values[:1] for name, values in AXES.items()}
    result = sweep(Grid(build, only, num_rounds=ROUNDS, until=until))
    is_there = np.isfinite(result.client_loss).all(("model", "client")).squeeze()
    assert is_there.values.tolist() == [True, True, False, False]


def test_array_metrics_cannot_be_targets():
    with pytest.raises(ValueError, match=r"until.metric is 'pair', an array \[2\] for each model"):
        sweep(Grid(build, AXES, num_rounds=1, until=Until("pair", at_least=1)))


def test_models_without_a_metric_have_nan_in_its_shape():
    task = Towards(jnp.arange(4.0))
    own = with_metrics(task, {"entries": lambda params: params["w"]})
    metrics = jax.jit(lambda key: simulate(key, [task, own], *HOW)[1].metrics)(jax.random.key(0))
    assert np.isnan(metrics["entries"][:, 0]).all()
    assert np.isfinite(metrics["entries"][:, 1]).all()
    assert metrics["entries"].shape == (ROUNDS + 1, MODELS, 3)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"norm": 3}, r"metrics\['norm'\] is 3; give a function of the parameters"),
        (["norm"], r"metrics are \['norm'\]; give functions of the parameters by name"),
        ({"norm": optax.tree.norm}, "the task has a metric 'norm' already; give yours another"),
        *(
            ({name: optax.tree.norm}, f"metric is called {name!r}, like a part of every result; re")
            for name in ("seed", "bits_up", "message_bits")
        ),
        (
            {"a": lambda params: params["w"], "a_0": optax.tree.norm},
            "a metric is called 'a_0', like a dimension of the metric 'a'; rename it",
        ),
    ],
)
def test_wrong_metrics_are_refused(metrics, message):
    with pytest.raises(ValueError, match=message):
        simulate(jax.random.key(0), with_metrics(Towards(jnp.zeros(N)), metrics), *HOW)


@pytest.mark.parametrize("length", [N + 1, None])
def test_a_per_client_metric_has_one_number_per_client(length):
    own = {"share": lambda params: jnp.ones(length) if length else jnp.float32(1)}
    task = with_metrics(Towards(jnp.zeros(N)), own, per_client=["share"])
    shape = rf"\({length},\)" if length else r"\(\)"
    with pytest.raises(ValueError, match=f"'share' has shape {shape} .* for each of 4 clients"):
        simulate(jax.random.key(0), task, *HOW)


def test_an_axis_named_like_a_dimension_of_a_metric_is_refused():
    def build(entries_0):
        own = {"entries": lambda params: params["w"]}
        return Setup(with_metrics(Towards(jnp.zeros(N)), own), HOW[0], HOW[1])

    words = "an axis is called 'entries_0', like a dimension of the metric 'entries'; rename it"
    with pytest.raises(ValueError, match=words):
        sweep(Grid(build, {"entries_0": [1, 2]}, num_rounds=1))


def test_per_client_must_be_a_tuple():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Named(Towards):
        per_client = "norm"

    with pytest.raises(ValueError, match=r"per_client is 'norm'; give a tuple of names, \('norm'"):
        simulate(jax.random.key(0), Named(jnp.zeros(N)), *HOW)


def test_per_client_must_name_metrics():
    task = with_metrics(Towards(jnp.zeros(N)), {}, per_client=["share"])
    with pytest.raises(ValueError, match="per_client has 'share', which is not a task metric"):
        simulate(jax.random.key(0), task, *HOW)


def test_one_name_for_arrays_of_different_shapes_is_refused():
    task = Towards(jnp.zeros(N))
    wide = with_metrics(task, {"entries": lambda params: params["w"]})
    thin = with_metrics(task, {"entries": lambda params: params["w"][:2]})
    with pytest.raises(ValueError, match=r"'entries' has shapes \[\(2,\), \(3,\)\] in different"):
        simulate(jax.random.key(0), [wide, thin], *HOW)
