"""Differential privacy of clients: clipped updates, and noise that the server adds once a round."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm.asking import contribute, serve, start_states
from fedjax_mm.base import (
    Algorithm,
    ClientContext,
    ClientState,
    Contribution,
    Metrics,
    Params,
    Scalar,
    ServerContext,
    ServerState,
    Task,
)
from fedjax_mm.checked import Fraction, NonNegative, Positive, check_argument, checked
from fedjax_mm.compression import is_made_by, of_weight_one
from fedjax_mm.parts import check_algorithm


class AdaptiveClip(NamedTuple):
    """Rule by which the clipping norm follows a quantile of the updates' norms.

    ``C <- C exp(-eta (b - gamma))``, where b is the noisy share of clients whose norm is at most C.

    Attributes:
      quantile: gamma, the share of updates that are not clipped.
      rate: eta.
      count_noise: s_b, the standard deviation of the noise on the number of these clients, of
        which half of the participants are subtracted; a twentieth of the clients of a round is
        usual. The pair of both releases has the noise multiplier of `private`, so that it must
        exceed half of that.
    """

    quantile: Fraction = 0.5
    rate: Positive = 0.2
    count_noise: NonNegative = 0.0


class Private(NamedTuple):
    """State of a server that adds noise: the algorithm's, and C, the clipping norm."""

    state: ServerState
    clip: Float[Array, ""]


class Hidden:
    """The clients' states, as a private server sees them: it may not look."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            "private: the server of this method reads the clients' states, which no noise covers; "
            "take a method whose server divides the sum by the weights, such as fedavg"
        )


@checked
def private(
    algorithm: Algorithm,
    *,
    clip: Positive,
    noise_multiplier: NonNegative,
    clients_per_round: Positive,
    adaptive: AdaptiveClip | None = None,
) -> Algorithm:
    """DP-FedAvg: returns the algorithm with clipped updates of clients, and Gaussian noise.

    A client sends ``D_k min(1, C / |D_k|)``, where D_k is its update divided by its weight, as one
    vector. The server replaces the mean by ``(sum_k D_k + N(0, (z C)^2 I)) / W``, also in rounds in
    which nobody takes part. All clients weigh 1, whatever factors the assignment gives them. W is
    public and fixed, because dividing by the number of participants would reveal it. `epsilon`
    accounts for the rounds.

    The server's step must divide the sum by the sum of the weights, as those of `fedavg`, `fedprox`
    and `perfedavg` do, but not with ``server_scale="1/N"``. Wrap `compressed` inside, so that
    clipping comes last. Reports of losses to assignments are not protected. An update that is not
    finite counts as 0. JAX's generator is not cryptographic: take this to study privacy, not to
    publish models of real people.

    Args:
      algorithm: the method whose updates are protected.
      clip: C, or its initial value if it is adaptive.
      noise_multiplier: z, the noise's standard deviation divided by C; 0 only clips.
      clients_per_round: W, the expected number of a model's participants in a round.
      adaptive: the rule by which C changes; None keeps it.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if a number is out of its range, or the count's noise is too small for z.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rand, simulate
      >>> from fedjax_mm.privacy import private
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = private(
      ...     fedavg(0.1, local_steps=5), clip=1.0, noise_multiplier=0.5, clients_per_round=12)
      >>> _, trace = simulate(0, quadratic(24, 4, mu=0.1), algorithm, mfa_rand(24, 2), 20)
      >>> trace.metrics["excess_loss"].shape
      (21, 2)

    Reference: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language
    Models" (2018); Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private Learning with
    Adaptive Clipping" (2021).
    """
    check_algorithm(algorithm)
    if is_made_by(algorithm, "private"):
        raise ValueError("private is around private; clip and add noise once")
    noise = noise_multiplier if adaptive is None else _noise_beside(noise_multiplier, adaptive)

    def init(task: Task, params: Params) -> tuple[Private, ClientState]:
        server, state = start_states(algorithm, task, params)
        return Private(server, jnp.asarray(clip, float)), state

    def client(
        context: ClientContext, server_state: Private, client_state: ClientState
    ) -> tuple[Contribution, ClientState]:
        sent, state = contribute(algorithm, context, server_state.state, client_state)
        is_there = jnp.asarray(context.takes_part) & (sent.weight > 0)
        update, is_short = _clipped(of_weight_one(sent, context.params), server_state.clip)
        # Select, because an absent client's update need not be 0.
        message = jax.tree.map(lambda x: jnp.where(is_there, x, jnp.zeros_like(x)), update)
        weight = is_there.astype(sent.weight.dtype)
        if adaptive is not None:
            # Centre the vote, so that a client changes the sum of votes by 1/2.
            message = {"update": message, "vote": weight * jnp.where(is_short, 0.5, -0.5)}
        return sent._replace(update=message, weight=weight), state

    def server(context: ServerContext) -> tuple[Params, Private]:
        (state, old), sent = context.server_state, context.total.update
        update_key, count_key = jax.random.split(context.rng_key)
        update = _with_noise(update_key, sent if adaptive is None else sent["update"], noise * old)
        weight = jnp.asarray(clients_per_round, context.total.weight.dtype)
        total = context.total._replace(update=update, weight=weight)
        # Hide the clients' states, because the server would otherwise learn what no noise covers.
        seen = context._replace(server_state=state, total=total, client_states=Hidden())
        params, state = serve(algorithm, seen)
        if adaptive is None:
            return params, Private(state, old)
        votes = _with_noise(count_key, sent["vote"], adaptive.count_noise)
        share = 0.5 + votes / clients_per_round
        new = old * jnp.exp(-adaptive.rate * (share - adaptive.quantile))
        return params, Private(state, new.astype(old.dtype))

    def metrics(task: Task, params: Params, server_state: Private) -> Metrics:
        inner = algorithm.metrics
        own = inner(task, params, server_state.state) if inner else {}
        return own if adaptive is None else own | {"clip": server_state.clip}

    def num_steps(task: Task, client: Any, server_state: Private) -> Any:
        inner: Any = algorithm.num_steps
        return inner(task, client, server_state.state)

    return algorithm._replace(
        init=init,
        client=client,
        server=server,
        num_steps=None if algorithm.num_steps is None else num_steps,
        steps_idle=True,
        metrics=metrics,
    )


def _clipped(update: Any, clip: Float[Array, ""]) -> tuple[Any, Bool[Array, ""]]:
    """Returns an update of at most a norm, and whether it was that short before.

    An update that is not finite becomes 0, because no factor makes it short.
    """
    norm = optax.tree.norm(update)
    is_finite, factor = jnp.isfinite(norm), jnp.minimum(1, clip / jnp.where(norm > 0, norm, 1))

    def shorten(x: Array) -> Array:
        return jnp.where(is_finite, x * factor.astype(x.dtype), jnp.zeros_like(x))

    return jax.tree.map(shorten, update), is_finite & (norm <= clip)


def _noise_beside(noise_multiplier: Scalar, adaptive: AdaptiveClip) -> Scalar:
    """Returns the noise multiplier of updates, so that with the counts' noise all have z.

    ``z_D = (z^-2 - (2 s_b)^-2)^-1/2``, because a client changes the count, centred, by 1/2.
    """
    for name, annotation in AdaptiveClip.__annotations__.items():
        check_argument(f"adaptive.{name}", getattr(adaptive, name), annotation)
    z, s = noise_multiplier, adaptive.count_noise
    if isinstance(z, jax.core.Tracer) or isinstance(s, jax.core.Tracer):
        return _beside(z, s)
    if z == 0:
        return 0.0
    if not z < 2 * s:
        raise ValueError(
            f"adaptive.count_noise is {s:g}; it must exceed half of noise_multiplier = {z:g}, such "
            "as a twentieth of the clients of a round"
        )
    return _beside(z, s)


def _beside(z: Any, s: Any) -> Any:
    # NaN, which marks the run, where the count's noise is too small for a traced z.
    ratio = jnp.where(z > 0, z, 0) / jnp.where(s > 0, 2 * s, 1)
    return jnp.where(z > 0, jnp.where(s > 0, z / jnp.sqrt(1 - ratio**2), jnp.nan), 0.0)


def _with_noise(rng_key: PRNGKeyArray, tree: Any, deviation: Scalar) -> Any:
    """Returns arrays with independent Gaussian noise added to all their numbers."""
    # Draw in float32, so that a seed gives equal noise with and without x64.
    drawn = optax.tree.random_like(rng_key, tree, jax.random.normal, jnp.float32)
    return jax.tree.map(lambda x, noise: x + (deviation * noise).astype(x.dtype), tree, drawn)
