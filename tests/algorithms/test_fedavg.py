"""FedAvg's options and its checks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import fedavg, full_participation, local_sgd, simulate
from fedjax_mm.base import ClientContext, Cohort
from fedjax_mm.tasks import Quadratic, quadratic
from tests.helpers import Towards


class Heavy(Towards):
    """`Towards` in which client k has weight k + 1."""

    def weight(self, client):
        return (client + 1).astype(jnp.float32)


jax.tree_util.register_dataclass(Heavy, data_fields=["targets"], meta_fields=["dim"])


TARGETS = jnp.array([0.0, 4.0, 100.0, 8.0])


EVERY_AVERAGE = [{"weighted": w, "server_scale": s} for w in (True, False) for s in ("mean", "1/N")]


@functools.cache
def averages(client_map="vmap"):
    """One round from 0 in which every client ends at its target, for all ways to average.

    There is one model for each way. The clients and their scales are arguments.
    """
    algorithms = [fedavg(1.0, local_steps=1, **options) for options in EVERY_AVERAGE]

    def run(clients, scale):
        def assign(rng_key, round, state, look):
            groups = jnp.tile(clients, (4, 1)), None if scale is None else jnp.tile(scale, (4, 1))
            return Cohort.of_rows(*groups), state

        assignment = full_participation(4)._replace(num_models=4, assign=assign)
        start = [{"w": jnp.zeros(3)}] * 4
        task, how = Heavy(TARGETS), {"params": start, "client_map": client_map}
        state, _ = simulate(jax.random.key(0), task, algorithms, assignment, 1, **how)
        return jnp.stack([each.params["w"][0, 0] for each in state.models])

    program = jax.jit(run)
    return lambda clients, scale=None: program(
        jnp.array(clients), None if scale is None else jnp.array(scale)
    )


def expected_averages(clients, scale):
    """Averages from the definition. A weight is n_k or 1, times the scale. 1/N ignores scales."""
    values = []
    for options in EVERY_AVERAGE:
        n = np.arange(1.0, 5.0) if options["weighted"] else np.ones(4)
        weights = [n[k] * s for k, s in zip(clients, scale, strict=True)]
        total = sum(w * TARGETS[k] for k, w in zip(clients, weights, strict=True))
        values.append(total / (sum(weights) if options["server_scale"] == "mean" else n.sum()))
    return np.array(values, float)


def test_scales_of_one_over_p_make_sampling_unbiased():
    """Client k is drawn with probability p_k and scale 1/p_k."""
    p = np.array([0.1, 0.4, 0.2, 0.3])
    alone = [averages()([k, -1, -1], [1 / p[k], 0.0, 0.0]) for k in range(4)]
    everybody = expected_averages(range(4), np.ones(4))
    mean = p @ np.array(alone)
    is_exact = [options["server_scale"] == "1/N" for options in EVERY_AVERAGE]
    np.testing.assert_allclose(mean[is_exact], everybody[is_exact], rtol=1e-6)
    assert np.all(np.abs(mean / everybody - 1)[np.logical_not(is_exact)] > 0.01)


def test_closed_forms_report_the_loss_at_the_start():
    algorithm = fedavg(0.1, local_steps=1)
    task, params = quadratic(5, 2, mu=0.3), jnp.arange(11.0)

    @functools.partial(jax.jit, static_argnums=0)
    def reported(algorithm, task):
        local = ClientContext(jax.random.key(0), 1, task, jnp.int32(2), params)
        return algorithm.client(local, algorithm.init(task, params)[0], ())[0].report["loss"]

    by_steps = fedavg(local_sgd(0.1, steps=1, optimizer=lambda rate: optax.sgd(rate)))
    loss = float(task.client_loss(params, jnp.int32(2)))
    assert reported(algorithm, task) == pytest.approx(loss, rel=1e-6)
    assert reported(by_steps, task) == pytest.approx(loss, rel=1e-6)


class HeavyQuadratic(Quadratic):
    """A quadratic in which client k has weight k + 1 and an epoch is one step."""

    def weight(self, client):
        return (client + 1).astype(jnp.float32)

    def batch(self, rng_key, client, step, how):
        return client

    def num_batches(self, client, size):
        return 1


jax.tree_util.register_dataclass(
    HeavyQuadratic,
    data_fields=["mu", "minimizer", "optimum"],
    meta_fields=["num_clients", "block_size"],
)


def test_epochs_are_not_solved_in_closed_form():
    plain, key, params = quadratic(3, 1, mu=0.3), jax.random.key(0), jnp.arange(4.0)
    task = HeavyQuadratic(*(getattr(plain, field.name) for field in dataclasses.fields(plain)))
    context = ClientContext(key, 1, task, jnp.int32(2), params)
    by_epochs = local_sgd(0.1, epochs=2).train_or_solve(context).update
    np.testing.assert_array_equal(by_epochs, local_sgd(0.1, steps=2).train(context).update)


def test_local_training_without_a_number_of_steps_is_refused():
    with pytest.raises(ValueError, match="neither local steps nor epochs are given; give one"):
        local_sgd(0.1).num_steps(quadratic(2, 1, mu=0.3), jnp.int32(0))
