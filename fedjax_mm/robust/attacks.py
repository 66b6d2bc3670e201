"""Attacks: what Byzantine clients send instead of their updates.

Attacks on training data are `fedjax_mm.data.flip_labels` and `backdoored`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from scipy.stats import norm

from fedjax_mm.base import (
    Algorithm,
    ClientContext,
    Contribution,
    Metrics,
    Params,
    Scalar,
    ServerContext,
    Stacked,
    Task,
    keys,
)
from fedjax_mm.base.calls import Part
from fedjax_mm.base.sums import is_stacked, root, with_update
from fedjax_mm.checks.annotations import Count, NonNegative, Positive, checked, part
from fedjax_mm.checks.instances import check_algorithm, check_instance
from fedjax_mm.checks.values import check_flags, check_numbers
from fedjax_mm.wrap import names_of, wrap_algorithm


class Honest(NamedTuple):
    """Mean and deviation of the honest participants' updates, which attackers may know.

    Attributes:
      mean: of each coordinate.
      deviation: the sample standard deviation of each coordinate, with ``q - 1`` for q updates; 0
        for one.
    """

    mean: Float[Array, " d"]
    deviation: Float[Array, " d"]


@dataclasses.dataclass(frozen=True, repr=False)
class Attack(Part):
    """An attack, for `attacking`.

    Attributes:
      forge: ``(rng_key, update, honest) -> update``, what an attacker sends instead of its own
        update, which is divided by its weight.
      sees_others: whether it needs `Honest`, which is None otherwise.
    """

    forge: Callable[[PRNGKeyArray, Float[Array, " d"], Any], Float[Array, " d"]]
    sees_others: bool = False


@part
def sign_flip(factor: Positive = 1.0) -> Attack:
    """Attackers send ``-c x``, where x is their update.

    Args:
      factor: c.

    Raises:
      ValueError: if `factor` is not positive.

    Example:
      >>> sign_flip(2.0).forge(None, jnp.array([1.0, -3.0]), None).tolist()
      [-2.0, 6.0]
    """
    return Attack(lambda rng_key, update, honest: -factor * update)


@part
def scaling(factor: Scalar) -> Attack:
    """Attackers send ``gamma x``, where x is their update.

    With n participants of equal weight and a server step of size eta, ``gamma = n / eta`` replaces
    the model by that of the attacker, if honest updates are small.

    Args:
      factor: gamma, of any sign.

    Raises:
      TypeError, ValueError: if `factor` is not a finite number.

    Example:
      >>> scaling(10.0).forge(None, jnp.array([1.0, -3.0]), None).tolist()
      [10.0, -30.0]

    Reference: Bagdasaryan, Veit, Hua, Estrin, Shmatikov, "How To Backdoor Federated Learning"
    (2020).
    """
    check_numbers("factor", factor, np.isfinite, "be finite")
    return Attack(lambda rng_key, update, honest: factor * update)


@part
def gaussian(deviation: NonNegative, *, adds: bool = False) -> Attack:
    """Attackers send independent N(0, s^2) numbers, or add them to their update.

    `noisy` adds noise relative to the update instead.

    Args:
      deviation: s, in the units of the updates.
      adds: whether to add the numbers to the update, rather than to replace it.

    Raises:
      ValueError: if `deviation` is negative.

    Example:
      >>> gaussian(0.0, adds=True).forge(jax.random.key(0), jnp.array([1.0, -3.0]), None).tolist()
      [1.0, -3.0]
    """

    def forge(rng_key: PRNGKeyArray, update: Array, honest: Any) -> Array:
        del honest
        # Drawn in float32, the noise of a seed is the same with and without x64.
        drawn = deviation * jax.random.normal(rng_key, update.shape, jnp.float32)
        return drawn.astype(update.dtype) + (update if adds else 0)

    return Attack(forge)


@part
def alie(z: NonNegative) -> Attack:
    """A little is enough: attackers send ``mean(h) - z sd(h)`` of the honest updates h.

    If all participants are attackers, they send their own updates.

    Args:
      z: the number of standard deviations, such as that of `alie_factor`.

    Raises:
      ValueError: if `z` is negative.

    Example:
      >>> honest = Honest(jnp.array([1.5, 1.75]), jnp.array([0.5, 1.0]))
      >>> alie(1.5).forge(None, jnp.zeros(2), honest).tolist()
      [0.75, 0.25]

    Reference: Baruch, Baruch, Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed
    Learning" (2019).
    """
    return Attack(lambda rng_key, update, honest: honest.mean - z * honest.deviation, True)


@checked
def alie_factor(num_clients: Count, num_attackers: Count) -> float:
    """Number z of standard deviations within which the forged update finds enough supporters.

    ``z = Phi^-1((n - f - s) / (n - f))`` with ``s = floor(n / 2 + 1) - f``.

    Args:
      num_clients: n, the number of participants, attackers included.
      num_attackers: f.

    Raises:
      ValueError: if z is 0 or less, which is no attack, or attackers are a majority.

    Example:
      >>> round(alie_factor(50, 12), 6)
      0.336038

    Reference: Baruch, Baruch, Goldberg (2019).
    """
    honest, supporters = num_clients - num_attackers, num_clients // 2 + 1 - num_attackers
    share = (honest - supporters) / honest if honest > 0 else 1.0
    if not 0.5 < share < 1:
        raise ValueError(
            f"num_attackers is {num_attackers} of {num_clients} clients, for which the formula "
            "gives no attack; give z itself, such as alie(1.5)"
        )
    return float(norm.ppf(share))


@part
def ipm(factor: Positive) -> Attack:
    """Inner product manipulation: attackers send ``-eps mean(h)`` of the honest updates h.

    If all participants are attackers, they send their own updates.

    Args:
      factor: eps; with a factor above ``(n - f) / f`` the mean of all n updates changes its sign.

    Raises:
      ValueError: if `factor` is not positive.

    Example:
      >>> honest = Honest(jnp.array([1.5, 1.75]), jnp.array([0.5, 1.0]))
      >>> ipm(2.0).forge(None, jnp.zeros(2), honest).tolist()
      [-3.0, -3.5]

    Reference: Xie, Koyejo, Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner
    Product Manipulation" (2020).
    """
    return Attack(lambda rng_key, update, honest: -factor * honest.mean, True)


@part
def attacking(algorithm: Algorithm, clients: Any, attack: Attack) -> Algorithm:
    """Wraps an algorithm so that attackers send forged updates.

    Around `robust`, attackers change the rule's input, and the metric ``attackers`` is the number
    of attackers among the participants of the last round. `alie` and `ipm` need all updates, so
    they must be around `robust`, as in ``attacking(robust(algorithm, rule), clients, ipm(2.0))``;
    the rule `mean` has no other effect. Other attacks may also be inside, or without a rule. An
    update that is 0 because of its weight is not attacked. Client states do not change.

    Args:
      algorithm: any algorithm whose messages are proportional to the clients' weights.
      clients: ``bool[clients]``, True for attackers; it may be traced.
      attack: the attack.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if `clients` are not ``bool[clients]``, or an attack needs all updates, but the
        server gets their sum.

    Example:
      >>> from fedjax_mm import fedavg, full_participation, simulate
      >>> from fedjax_mm.robust import alie, attacking, median, robust
      >>> from fedjax_mm.tasks import quadratic
      >>> task, plain = quadratic(10, 4, mu=0.1), fedavg(0.1, local_steps=5)
      >>> algorithm = attacking(robust(plain, median()), jnp.arange(10) < 2, alie(1.5))
      >>> _, trace = simulate(0, task, algorithm, full_participation(10), 3)
      >>> trace.metrics["attackers"][:, 0].tolist()
      [0.0, 2.0, 2.0, 2.0]
    """
    check_algorithm(algorithm)
    check_instance("attack", attack, Attack, "give one, such as sign_flip()")
    if "attacking" in names_of(algorithm):
        raise ValueError(
            "attacking is around attacking, whose attackers would count as honest; give all "
            "attackers at once"
        )
    attacks, sees_all = check_flags("clients", clients), "robust" in names_of(algorithm)
    if attack.sees_others and not sees_all:
        raise ValueError(
            f"{attack} needs the updates of all clients, but the server gets their sum; write "
            "attacking(robust(algorithm, rule), clients, attack), where rule may be mean()"
        )

    def init(task: Task, params: Params, server: Any, state: Any) -> tuple[Any, Any]:
        del task, params, server, state
        return jnp.int32(0), ()

    def send(
        context: ClientContext, sent: Contribution, server: Any, own: Any
    ) -> tuple[Contribution, Any]:
        del server
        check_flags("clients", attacks, context.task.num_clients)
        if attack.sees_others:
            return sent, own
        key, is_mine = keys.noise_key(context.rng_key), attacks[context.client]
        # What `robust` has stacked is divided by the weight already.
        weight = 1 if is_stacked(sent.update) else sent.weight

        def change(update: Any) -> Any:
            total, unravel = ravel_pytree(update)
            vector = total / jnp.where(weight > 0, weight, 1).astype(total.dtype)
            forged = jnp.where(weight > 0, weight, 0) * attack.forge(key, vector, None)
            return unravel(jnp.where(is_mine, forged.astype(total.dtype), total))

        return with_update(sent, context.params, change), own

    def serve(context: ServerContext, own: Any) -> tuple[ServerContext, Any]:
        sent = context.total.update
        if not sees_all:
            return context, own
        mine = _attackers(attacks, sent)
        if attack.sees_others:
            key = keys.noise_key(context.rng_key)
            sent = sent._replace(update=_forged(attack, key, sent, mine))
            context = context._replace(total=context.total._replace(update=sent))
        return context, jnp.sum(mine, dtype=jnp.int32)

    def metrics(task: Task, params: Params, server: Any, own: Any) -> Metrics:
        del task, params, server
        return {"attackers": own.astype(float)} if sees_all else {}

    return wrap_algorithm(
        algorithm, "attacking", send=send, serve=serve, init=init, metrics=metrics
    )


def _attackers(attacks: Bool[Array, " clients"], sent: Stacked) -> Bool[Array, " slots"]:
    return (sent.client >= 0) & attacks[jnp.maximum(sent.client, 0)]


def _forged(
    attack: Attack, rng_key: PRNGKeyArray, sent: Stacked, mine: Bool[Array, " slots"]
) -> Float[Array, "slots d"]:
    """Updates of all slots, with those of attackers forged, if anybody is honest."""
    x = sent.update
    is_honest = ((sent.client >= 0) & ~mine)[:, None] & jnp.isfinite(x)
    q = jnp.sum(is_honest, axis=0)
    mean = jnp.sum(jnp.where(is_honest, x, 0), axis=0) / jnp.maximum(q, 1)
    squares = jnp.sum(jnp.where(is_honest, x - mean, 0) ** 2, axis=0)
    honest = Honest(mean, root(squares / jnp.maximum(q - 1, 1)))
    slots = jnp.arange(len(mine))
    each = jax.vmap(jax.random.fold_in, (None, 0))(rng_key, slots)
    forged = jax.vmap(attack.forge, (0, 0, None))(each, x, honest)
    return jnp.where(mine[:, None] & (q > 0), forged, x)
