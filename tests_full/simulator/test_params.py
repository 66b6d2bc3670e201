"""Final parameters, which can start another run, and joined traces of continued runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import advance, fedavg, join_traces, mfa_rr, params_of, simulate, to_dataset
from tests.helpers import Towards, slow_unless

TARGETS = jnp.arange(4.0)
ABA = [Towards(TARGETS, dim=3), Towards(TARGETS, dim=2), Towards(TARGETS, dim=3)]
SAME = [Towards(TARGETS, dim=3)] * 3


@functools.cache
def program(is_same):
    """Four rounds of three models, at once and in parts of 2, 1 and 1 rounds, for two seeds."""
    how = (SAME if is_same else ABA), fedavg(0.3, local_steps=1), mfa_rr(4, 3)

    def run(rng_key, params):
        whole = simulate(rng_key, *how, 4, params=params)
        state, first = simulate(rng_key, *how, 2, params=params)
        state, second = advance(state, *how, 1)
        state, third = advance(state, *how, 1)
        return whole, (state, join_traces(first, second, third)), (first, second, third)

    return jax.jit(jax.vmap(run))


@functools.cache
def ended(is_same):
    return program(is_same)(jax.random.split(jax.random.key(0), 2), None)


@pytest.mark.parametrize("is_same", [slow_unless(False, True), False])
def test_parameters_come_in_the_order_of_the_tasks_and_can_start_a_run(is_same):
    (state, trace), *_ = ended(is_same)
    each = params_of(state)
    assert [x["w"].shape for x in each] == [(2, 3), (2, 3 if is_same else 2), (2, 3)]
    norms = np.stack([jnp.linalg.norm(x["w"], axis=-1) for x in each], axis=-1)
    np.testing.assert_allclose(norms, trace.metrics["norm"][:, -1], rtol=1e-6)
    assert len(np.unique(norms)) == norms.size, "models and seeds differ"
    for model, params in enumerate(each):
        np.testing.assert_array_equal(params_of(state, model)["w"], params["w"])
    # Every seed starts from its own parameters, because `vmap` maps over their first axis.
    again, *_ = program(is_same)(jax.random.split(jax.random.key(1), 2), each)
    np.testing.assert_allclose(again[1].metrics["norm"][:, 0], norms, rtol=1e-6)


def test_parameters_of_one_model_may_be_a_list():
    """The list has one array per model by chance, but is one pytree for all models."""

    class Pair(Towards):
        def init(self, rng_key):
            return [jnp.zeros(2), jnp.zeros(2)]

        def loss(self, params, batch):
            return jnp.sum((params[0] - batch) ** 2)

        def metrics(self, rng_key, params):
            return {"first": params[0][0], "second": params[1][0]}

    jax.tree_util.register_dataclass(Pair)
    one = [jnp.ones(2), jnp.full(2, 2.0)]

    @jax.jit
    def start(rng_key):
        how = Pair(TARGETS), fedavg(0.3, local_steps=1), mfa_rr(4, 2)
        each = [one, [x + 5 for x in one]]
        return [simulate(rng_key, *how, 1, params=given)[1].metrics for given in (one, each)]

    shared, own = start(jax.random.key(0))
    assert (shared["first"][0].tolist(), shared["second"][0].tolist()) == ([1, 1], [2, 2])
    assert (own["first"][0].tolist(), own["second"][0].tolist()) == ([1, 6], [2, 7])


def test_wrong_models_and_lists_are_refused():
    (state, _), *_ = ended(False)
    for model in (3, -1):
        with pytest.raises(ValueError, match=rf"model is {model}; the models' numbers are 0 ... 2"):
            params_of(state, model)
    how = SAME, fedavg(0.3, local_steps=1), mfa_rr(4, 3), 1
    wrong = {"w": np.zeros(2, np.float32)}
    for params, message in (
        ([wrong] * 2, "a list of 2 is not one for each of 3 models"),
        ([wrong] * 3, r"initial parameters have shape \(2,\); give \(3,\) \(of one model\)"),
        ([{}] * 3, "initial parameters must have the structure of the task's"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(jax.random.key(0), *how, params=params)


@pytest.mark.parametrize("is_same", [slow_unless(False, True), False])
def test_a_continued_run_has_the_trace_of_the_whole(is_same):
    """No record is repeated, and counts continue. The axis of seeds comes first."""
    (whole_state, whole), (state, joined), parts = ended(is_same)
    assert joined.round.tolist() == [[0, 1, 2, 3, 4]] * 2
    expected, given = (to_dataset(trace, ("seed",)) for trace in (whole, joined))
    for name in expected.data_vars:
        np.testing.assert_array_equal(given[name], expected[name], err_msg=str(name))
    assert (given.client_updates.isel(round=-1) > given.client_updates.isel(round=2)).all()
    for one, other in zip(*map(jax.tree.leaves, (join_traces(*parts), joined)), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(params_of(state), params_of(whole_state), strict=True):
        np.testing.assert_array_equal(one["w"], other["w"])


def test_traces_of_different_runs_are_not_joined():
    _, _, (first, _, third) = ended(False)
    assert join_traces(first) is first
    with pytest.raises(ValueError, match="ends in round 2, but the next begins in round 3"):
        join_traces(first, third)
    with pytest.raises(ValueError, match="the traces are of different runs"):
        join_traces(first, dataclasses.replace(third, upload_size=(1, 1, 1)))
