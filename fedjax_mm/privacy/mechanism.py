"""Client-level differential privacy: clipped updates, and noise added by the server each round."""

import importlib.util
import warnings
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval

from fedjax_mm.base import (
    Algorithm,
    ClientContext,
    Contribution,
    Params,
    Scalar,
    ServerContext,
    Task,
)
from fedjax_mm.checks.annotations import NonNegative, Positive, check_argument, part
from fedjax_mm.checks.instances import check_algorithm, check_instance
from fedjax_mm.compression import of_weight_one
from fedjax_mm.privacy.examples import with_private_examples
from fedjax_mm.privacy.gaussian import check_real, clipped, with_noise
from fedjax_mm.wrap import Hidden, names_of, wrap_algorithm


class AdaptiveClip(NamedTuple):
    """Adaptive clipping, in which the clipping norm tracks a quantile of the update norms.

    ``C <- C exp(-eta (b - gamma))``, where b is the noisy fraction of clients whose norm is at most
    C.

    Attributes:
      quantile: gamma, the target fraction of updates that are not clipped.
      rate: eta, the learning rate of log C.
      count_noise: s_b, the standard deviation of the noise on the number of unclipped clients minus
        half the participants; a twentieth of the clients per round is usual. It must exceed half
        the noise multiplier of `private`, which covers the updates and the number together.
    """

    quantile: Annotated[Scalar, Interval(gt=0, lt=1)] = 0.5
    rate: Positive = 0.2
    count_noise: NonNegative = 0.0


_NO_NOISE = (
    "private: the server of this method reads the clients' {}, which no noise covers; take a "
    "method whose server divides the sum by the weights, such as fedavg"
)


@part
def private(
    algorithm: Algorithm,
    *,
    clip: Positive,
    noise_multiplier: NonNegative,
    clients_per_round: Positive | None = None,
    adaptive: AdaptiveClip | None = None,
    per: Literal["client", "example"] = "client",
) -> Algorithm:
    """DP-FedAvg: clips the clients' updates and adds Gaussian noise to their sum.

    A client sends ``D_k min(1, C / |D_k|)``, where D_k is its update divided by its weight, as one
    vector. The server replaces the mean with ``(sum_k D_k + N(0, (z C)^2 I)) / W``, even in rounds
    without participants. All clients have weight 1, and factors from the assignment are ignored. W
    is public and fixed, because dividing by the number of participants would reveal it. Use
    `epsilon` for the accounting.

    The server step must divide the sum of updates by the sum of weights, as `fedavg`, `fedprox` and
    `perfedavg` do. It must not read the clients' states or data, such as their numbers of examples
    in ``server_scale="1/N"``. Parameters must be real. Apply `compressed` first, so that clipping
    comes last. Loss reports to assignments are not protected, nor are the attackers in
    ``noisy(private(algorithm), ...)``, whose noise is not clipped. A non-finite update counts as 0.
    JAX's random number generator is not cryptographically secure, so use this to study privacy,
    not to release models trained on personal data.

    Args:
      algorithm: the algorithm whose updates are protected.
      clip: C, or its initial value if clipping is adaptive.
      noise_multiplier: z, the standard deviation of the noise divided by C; 0 only clips.
      clients_per_round: W, the expected number of participants per model and round.
      adaptive: how C adapts; None keeps it fixed.
      per: "client", as above, or "example": every client trains by DP-SGD, which clips the gradient
        of each example to C and adds noise of deviation z C to their sum in each local step. Give
        neither W nor `adaptive`, and use `example_epsilon` for the accounting. It holds for any
        server, if one example of a client is replaced. The algorithm must compute one gradient per
        step and send nothing else that depends on data, as `fedavg` and `scaffold` do; batches
        must be drawn without replacement, see `example_epsilon`.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if a number is out of range, `count_noise` is too small for z, or the algorithm is
        private already; in a run, if parameters are complex or the server reads hidden values.

    Warns:
      UserWarning: if dp-accounting is not installed, so that there will be no epsilon.

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
    Adaptive Clipping" (2021); Abadi et al., "Deep Learning with Differential Privacy" (2016).
    """
    check_algorithm(algorithm)
    if "private" in names_of(algorithm):
        raise ValueError("private is around private; clip and add noise once")
    if "robust" in names_of(algorithm):
        raise ValueError(
            "private is around robust; clip before the rule: robust(private(algorithm, ...), rule)"
        )
    if importlib.util.find_spec("dp_accounting") is None:
        # Warn before the training. `epsilon` is usually called after it.
        warnings.warn(
            "epsilon cannot be computed without dp-accounting; pip install 'fedjax-mm[privacy]'",
            stacklevel=3,
        )
    if per == "example":
        return with_private_examples(algorithm, clip, noise_multiplier, clients_per_round, adaptive)
    if clients_per_round is None:
        raise ValueError("clients_per_round is missing; give the expected number of participants")
    if adaptive is not None:
        check_instance("adaptive", adaptive, AdaptiveClip, "give AdaptiveClip(quantile=0.5)")
    noise = noise_multiplier if adaptive is None else _noise_of_updates(noise_multiplier, adaptive)

    def init(task: Task, params: Params, server: Any, state: Any) -> tuple[Any, Any]:
        del task, server, state
        check_real(params)
        return jnp.asarray(clip, float), ()

    def send(
        context: ClientContext, sent: Contribution, norm: Any, own: Any
    ) -> tuple[Contribution, Any]:
        is_there = jnp.asarray(context.takes_part) & (sent.weight > 0)
        update, is_short = clipped(of_weight_one(sent, context.params), norm)
        # Select with `where`, because an absent client's update need not be 0.
        message = jax.tree.map(lambda x: jnp.where(is_there, x, jnp.zeros_like(x)), update)
        weight = is_there.astype(sent.weight.dtype)
        if adaptive is not None:
            # With centered votes, a client changes their sum by at most 1/2.
            message = {"update": message, "vote": weight * jnp.where(is_short, 0.5, -0.5)}
        return sent._replace(update=message, weight=weight), own

    def serve(context: ServerContext, old: Any) -> tuple[ServerContext, Any]:
        sent = context.total.update
        update_key, count_key = jax.random.split(context.rng_key)
        update = with_noise(update_key, sent if adaptive is None else sent["update"], noise * old)
        weight = jnp.asarray(clients_per_round, context.total.weight.dtype)
        total = context.total._replace(update=update, weight=weight)
        # The clients' states and data get no noise. Hide them.
        task: Any = Hidden(_NO_NOISE.format("data"), num_clients=context.task.num_clients)
        states = Hidden(_NO_NOISE.format("states"))
        seen = context._replace(total=total, task=task, client_states=states)
        if adaptive is None:
            return seen, old
        votes = with_noise(count_key, sent["vote"], adaptive.count_noise)
        share = 0.5 + votes / clients_per_round
        new = old * jnp.exp(-adaptive.rate * (share - adaptive.quantile))
        return seen, new.astype(old.dtype)

    return wrap_algorithm(
        algorithm,
        "private",
        send=send,
        serve=serve,
        init=init,
        metrics=lambda *given: {} if adaptive is None else {"clip": given[-1]},
        steps_idle=True,
    )


def _noise_of_updates(noise_multiplier: Scalar, adaptive: AdaptiveClip) -> Scalar:
    """Noise multiplier of the updates for which updates and count together have z.

    ``z_D = (z^-2 - (2 s_b)^-2)^-1/2``, because a client changes the centered count by 1/2.
    """
    for name, annotation in AdaptiveClip.__annotations__.items():
        check_argument(f"adaptive.{name}", getattr(adaptive, name), annotation)
    z, s = noise_multiplier, adaptive.count_noise
    if isinstance(z, jax.core.Tracer) or isinstance(s, jax.core.Tracer):
        return _solve_noise(z, s)
    if z == 0:
        return 0.0
    if not z < 2 * s:
        raise ValueError(
            f"adaptive.count_noise is {s:g}; it must exceed half of noise_multiplier = {z:g}, such "
            "as a twentieth of the clients of a round"
        )
    return _solve_noise(z, s)


def _solve_noise(z: Any, s: Any) -> Any:
    # If the count's noise is too small for a traced z, NaN makes the run diverge.
    ratio = jnp.where(z > 0, z, 0) / jnp.where(s > 0, 2 * s, 1)
    return jnp.where(z > 0, jnp.where(s > 0, z / jnp.sqrt(1 - ratio**2), jnp.nan), 0.0)
