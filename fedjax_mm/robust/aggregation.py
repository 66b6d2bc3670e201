"""Robust aggregation: a wrapper whose server applies a rule to the updates of all participants."""

from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from fedjax_mm.base import (
    Algorithm,
    ClientContext,
    Contribution,
    Metrics,
    Params,
    ServerContext,
    Stacked,
    Task,
    keys,
)
from fedjax_mm.checks.annotations import part
from fedjax_mm.checks.instances import check_algorithm, check_instance
from fedjax_mm.compression import of_weight_one
from fedjax_mm.robust.rules import Rule
from fedjax_mm.wrap import Hidden, names_of, sent_by, wrap_algorithm, zero_message

_NOT_AGGREGATED = (
    "robust: the server of this method reads the clients' states, to which no rule is applied; "
    "take a method whose server needs only the messages, such as fedavg"
)


class _State(NamedTuple):
    """State of the wrapper.

    Attributes:
      rule: the state of the rule.
      too_few: the number of rounds in which the model kept its parameters.
      not_finite: the number of updates that were left out because they were not finite.
      is_enough: whether there were enough participants in the last round.
    """

    rule: Any
    too_few: Int[Array, ""]
    not_finite: Int[Array, ""]
    is_enough: Bool[Array, ""]


@part
def robust(algorithm: Algorithm, rule: Rule) -> Algorithm:
    """Wraps an algorithm so that its server aggregates the updates by a rule instead of their sum.

    The rule gets the updates x_i of a model's participants, divided by their weights n_k, each as
    one vector. The server gets ``sum_i n_i`` times the aggregate instead of ``sum_i n_i x_i``, so
    `fedavg` takes the step ``w <- w + rule(x_1, ..., x_n)``, and a median of updates is one of
    models. An update that is not finite counts as absent. With fewer participants than the rule
    needs, the model keeps its parameters. The metric ``too_few`` is the number of such rounds so
    far, and ``not_finite`` that of updates that were left out.

    All updates are in memory at once, in two or three copies: each is cohort size times the size of
    an update, for each model and replica. If cohorts have traced models, as with `ifca`, each model
    has room for all slots. A run that is split over devices gathers the updates on each.

    Attackers, compression and clipping act before the rule, so `robust` comes after them, as in
    ``robust(compressed(algorithm, compressor), median())``. Only attackers may also be around it,
    and attacks that need all updates must be; see `attacking`. `private` adds its noise to the
    aggregate, but `epsilon` does not hold, because one client can change an aggregate by more than
    it can change a mean.

    Args:
      algorithm: any algorithm whose messages are proportional to the clients' weights.
      rule: the rule, such as ``trimmed_mean(2)``.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if there is a rule already. When a run starts: if the server reads the clients'
        states, as that of `mifa`; if a cohort has fewer slots than the rule needs; if the
        assignment scales the clients' weights, as for unbiased sampling; if parameters are
        complex; in asynchronous runs.

    Example: one of ten clients sends -100 times its update.
      >>> import numpy as np
      >>> from fedjax_mm import fedavg, full_participation, simulate
      >>> from fedjax_mm.robust import attacking, median, robust, scaling
      >>> from fedjax_mm.tasks import least_squares
      >>> task = least_squares([np.eye(3)] * 10, [np.ones(3)] * 10, ridge=0.1)
      >>> plain, attackers = fedavg(0.1, local_steps=5), np.arange(10) < 1
      >>> for algorithm in (plain, robust(plain, median())):
      ...     algorithm = attacking(algorithm, attackers, scaling(-100.0))
      ...     _, trace = simulate(0, task, algorithm, full_participation(10), 20)
      ...     print(bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0]))
      False
      True
    """
    check_algorithm(algorithm)
    check_instance("rule", rule, Rule, "give one, such as median()")
    inside = {"attacking", "noisy"} & {*names_of(algorithm)}
    if rule.root is not None and inside:
        raise ValueError(
            f"{' and '.join(inside)} is inside robust with a rule whose server trains, too, and "
            "would be attacked; put attackers around robust"
        )
    if "robust" in names_of(algorithm):
        raise ValueError(
            "robust is around robust; apply one rule, or join two, as in bucketing(median(), 2)"
        )

    def init(task: Task, params: Params, server: Any, state: Any) -> tuple[Any, Any]:
        zero, _ = ravel_pytree(zero_message(algorithm, task, params, server, state).update)
        if jnp.iscomplexobj(zero):
            raise ValueError(
                "robust: the updates are complex, and have no order; use real parameters, such as "
                "real and imaginary parts"
            )
        number = jnp.int32(0)
        return _State(rule.init(zero), number, number, jnp.bool_(True)), ()

    def send(
        context: ClientContext, sent: Contribution, server: Any, own: Any
    ) -> tuple[Contribution, Any]:
        del server
        if context.factor is not None:
            raise ValueError(
                "robust: the assignment multiplies the clients' weights, as for unbiased sampling, "
                "but a rule does not weigh updates; use one that does not, such as mfa_rand"
            )
        vector, _ = ravel_pytree(of_weight_one(sent, context.params))
        takes_part = jnp.asarray(context.takes_part) & (sent.weight > 0)
        client = jnp.where(takes_part, jnp.asarray(context.client, jnp.int32), -1)
        return sent._replace(update=Stacked(vector, sent.weight, client)), own

    def serve(context: ServerContext, old: Any) -> tuple[ServerContext, Any]:
        updates, weights, here, not_finite = _participants(context.total.update)
        _check_slots(rule, len(here))
        state = old.rule if rule.root is None else _own_update(algorithm, rule.root, context)
        rule_key = keys.rule_key(context.rng_key)
        update, new = rule.aggregate(rule_key, updates, weights, here, state)
        is_enough = jnp.sum(here) >= jnp.maximum(1, rule.least)
        new = jax.tree.map(lambda x, y: jnp.where(is_enough, x, y), new, old.rule)
        # Numbers of a step that is not taken must be finite, too, for gradients.
        weight = jnp.where(is_enough, jnp.sum(weights), 1)
        vector = jnp.where(is_enough, update, 0) * weight.astype(update.dtype)
        # Ask for the shapes alone, because rows of other devices would have to travel.
        one = jax.eval_shape(partial(jax.tree.map, itemgetter(0)), context.client_states)
        given = context.task, context.params, context.server_state, one
        _, unravel = ravel_pytree(zero_message(algorithm, *given).update)
        total = context.total._replace(update=unravel(vector), weight=weight)
        seen = context._replace(total=total, client_states=Hidden(_NOT_AGGREGATED))
        return seen, _State(new, old.too_few + ~is_enough, old.not_finite + not_finite, is_enough)

    def metrics(task: Task, params: Params, server: Any, own: Any) -> Metrics:
        del task, params, server
        return {"too_few": own.too_few.astype(float), "not_finite": own.not_finite.astype(float)}

    return wrap_algorithm(
        algorithm,
        "robust",
        send=send,
        serve=serve,
        init=init,
        metrics=metrics,
        steps=lambda own: own.is_enough,
    )


def _participants(sent: Stacked) -> tuple[Array, Array, Array, Array]:
    """Updates, weights and presence, with zeros elsewhere, and the number that is not finite."""
    is_there = sent.client >= 0
    is_finite = jnp.all(jnp.isfinite(sent.update), axis=1) & jnp.isfinite(sent.weight)
    here, not_finite = is_there & is_finite, jnp.sum(is_there & ~is_finite, dtype=jnp.int32)
    updates = jnp.where(here[:, None], sent.update, 0)
    return updates, jnp.where(here, sent.weight, 0), here, not_finite


def _check_slots(rule: Rule, slots: int) -> None:
    """Raises `ValueError` if even a full cohort is too small for a rule."""
    if not isinstance(rule.least, jax.core.Tracer) and slots < rule.least:
        raise ValueError(
            f"robust: {rule} needs {rule.least} participants of a model, but a cohort has at most "
            f"{slots}; choose more clients, fewer models, or another rule such as median()"
        )


def _own_update(algorithm: Algorithm, root: Task, context: ServerContext) -> Float[Array, " d"]:
    """Update of the server, which trains on its own data."""
    rng_key = keys.noise_key(keys.rule_key(context.rng_key))  # a key of its own
    local = ClientContext(
        *(rng_key, context.round, root, jnp.int32(0), context.params), factor=None
    )
    _, state = algorithm.init(root, context.params)
    sent = sent_by(algorithm, local, context.server_state, state)
    return ravel_pytree(of_weight_one(sent, context.params))[0]
