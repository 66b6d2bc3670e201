"""Example-level privacy: clients that train by DP-SGD, and its accounting."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fedjax_mm.base import (
    Algorithm,
    Assignment,
    Batching,
    ClientContext,
    Contribution,
    Index,
    Metrics,
    Params,
    Scalar,
    ServerContext,
    keys,
    needs,
)
from fedjax_mm.base.calls import Call, in_short
from fedjax_mm.base.capabilities import ExamplesTask
from fedjax_mm.checks.annotations import Count, Fraction, checked
from fedjax_mm.checks.instances import check_assignment
from fedjax_mm.local import Epochs, LocalSGD, local_sgd, loss_and_gradient
from fedjax_mm.privacy.accounting import UncoveredError, sampling_of, spent_on
from fedjax_mm.privacy.gaussian import check_real, clipped, with_noise
from fedjax_mm.tasks.view import View
from fedjax_mm.wrap import layers, wrap_algorithm

_TWICE = "it computes several gradients of a batch, and would draw the same noise for them"
_LOSSES = "its weights depend on losses, which no noise covers"

COVERED = (
    *("fedavg", "fedprox", "feddyn", "gradient_tracking", "mifa", "prsgd", "scaffold", "stalevr"),
)
"""Methods whose clients send nothing but what follows from one gradient per local step."""

UNCOVERED = {
    **dict.fromkeys(["qffl", "afl", "maxfl", "mwfed"], _LOSSES),
    **dict.fromkeys(["apfl", "pfedme", "perfedavg", "ditto"], _TWICE),
    "moon": "it also descends a loss of features, which is not clipped",
    "fednova": "it sends two parts that the server multiplies",
}
"""Why `private` refuses methods with ``per="example"``."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrivateExamples(View):
    """A task whose gradients are those of DP-SGD, and whose other functions of data are hidden.

    Attributes:
      clip: C, the norm to which the gradients of examples are clipped.
      noise_multiplier: z, the deviation of the noise in their sum, divided by C.
    """

    clip: Scalar
    noise_multiplier: Scalar

    __repr__ = in_short

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Any:
        """The examples of a local step, and the key of its noise."""
        batch = self.task.batch(rng_key, client, step, how)
        return batch, keys.local_step_key(rng_key, step)

    def loss_and_gradient(self, params: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
        """Mean loss, and the mean of clipped gradients with noise."""
        check_real(params)
        batch, rng_key = batch
        ones, weights = needs(self.task, ExamplesTask).examples(params, batch)
        # Other weights would let an example move the sum by more than 2 C.
        weights = (weights > 0).astype(weights.dtype)
        both = jax.vmap(loss_and_gradient(self.task), in_axes=(None, 0))
        losses, gradients = both(params, ones)
        gradients, _ = jax.vmap(clipped, in_axes=(0, None))(gradients, self.clip)

        def total(gradient: Array) -> Array:
            return jnp.tensordot(weights.astype(gradient.dtype), gradient, 1)

        noisy = with_noise(
            rng_key, jax.tree.map(total, gradients), self.noise_multiplier * self.clip
        )
        number = jnp.sum(weights)
        gradient = jax.tree.map(lambda x: x / number.astype(x.dtype), noisy)
        return jnp.sum(weights * losses) / number, gradient

    def loss(self, params: Params, batch: Any) -> NoReturn:
        """Refuses, because no noise covers the result."""
        del params, batch
        _refuse("reads losses")

    def client_loss(self, params: Params, client: Index) -> NoReturn:
        """Refuses."""
        del params, client
        _refuse("reads losses")

    def client_losses(self, params: Params, num_clients: int) -> NoReturn:
        """Refuses."""
        del params, num_clients
        _refuse("reads losses")

    def features(self, params: Params, batch: Any) -> NoReturn:
        """Refuses."""
        del params, batch
        _refuse("reads features")

    def threshold(self, client: Index) -> NoReturn:
        """Refuses."""
        del client
        _refuse("reads thresholds")

    def appeals(self, params: Params) -> NoReturn:
        """Refuses."""
        del params
        _refuse("reads losses")

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> Metrics:
        """Refuses."""
        del rng_key, params
        _refuse("reads metrics")


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"private: with per='example', this method {what}, which no noise covers; take a method "
        "that reads gradients alone, such as fedavg"
    )


def with_private_examples(
    algorithm: Algorithm, clip: Scalar, noise_multiplier: Scalar, *of_clients: Any
) -> Algorithm:
    """Lets the clients of a method train by DP-SGD, see `private`."""
    _local_of(algorithm)
    if any(each is not None for each in of_clients):
        raise ValueError(
            "clients_per_round and adaptive are for per='client'; leave them out, because "
            "per='example' adds noise to local steps"
        )

    def private(task: Any) -> Any:
        return PrivateExamples(task, task.num_clients, clip, noise_multiplier)

    def receive(context: ClientContext, own: Any) -> ClientContext:
        del own
        return context._replace(task=private(context.task))

    def send(
        context: ClientContext, sent: Contribution, server: Any, own: Any
    ) -> tuple[Contribution, Any]:
        del context, server
        return sent, own

    def serve(context: ServerContext, own: Any) -> tuple[ServerContext, Any]:
        return context._replace(task=private(context.task)), own

    return wrap_algorithm(algorithm, "private", send=send, receive=receive, serve=serve)


def _local_of(algorithm: Algorithm) -> LocalSGD:
    """Settings of local training of a method that is covered.

    Raises:
      ValueError: if the method is not, or its batches are drawn with replacement.
    """
    *wrappers, inside = layers(algorithm)
    _check_wrappers(wrappers)
    call = inside.call
    name = "one that no part made" if call is None else call.factory.__name__
    if call is None or name not in COVERED:
        reason = UNCOVERED.get(name, "nothing is known about what its clients send")
        raise ValueError(
            f"the method is {name}, which private refuses with per='example': {reason}; take one "
            f"of {', '.join(COVERED)}"
        )
    given = call.arguments
    if given.get("option") == "I":
        raise ValueError(
            "option is 'I', which private refuses with per='example': clients also send a gradient "
            "over all examples; take option='II'"
        )
    local = given["local"]
    if not isinstance(local, LocalSGD):
        local = local_sgd(local, steps=given["local_steps"])
    size = local.batch_size
    if size is not None and not callable(size) and local.order != "epochs":
        raise ValueError(
            f"batches of {size} are drawn with replacement, so an example may be in one several "
            "times; give order='epochs', or a schedule, such as batch_size=lambda t: 8, whose "
            "batches are drawn without replacement"
        )
    return local


@checked
def example_epsilon(
    algorithm: Algorithm,
    assignment: Assignment,
    *,
    num_examples: Count,
    num_rounds: Count,
    delta: Fraction,
) -> float:
    """Returns the example-level epsilon of a client in a run with ``private(..., per="example")``.

    Two neighboring runs have the same assignment, clients and numbers of examples; one example of
    one client is replaced, which moves the sum of a step's clipped gradients by up to 2 C. All
    updates of the client are assumed to be published, and the client to train in every round, as
    many models as `Assignment.sampling` allows.

    - Without a batch size, a step is one Gaussian mechanism on all examples.
    - With ``order="epochs"``, an example is in one batch of an epoch, so that an epoch, also one
      that a round only begins, is one Gaussian mechanism. The order does not amplify privacy.
    - With a schedule of sample sizes m(t), a step draws m(t) of the examples without replacement,
      which amplifies privacy. If the clients' data drift, the examples are those of the window.

    Reported and recorded losses and metrics, and the round in which a target ends a run, are not
    covered.

    Args:
      algorithm: the private method, whose noise and local training are known from its call.
      assignment: chooses clients and models; it must not depend on their data.
      num_examples: n_k, the examples of the client. The fewer, the larger is epsilon.
      num_rounds: T, the number of rounds.
      delta: the delta of (epsilon, delta).

    Raises:
      UncoveredError: if the assignment reads losses, learns from reports or states no sampling, or
        the algorithm was not made by such a call.
      ValueError: if a number is out of its range, or epsilon is too large to compute.
      ImportError: if dp-accounting is not installed.

    Example:
      >>> from fedjax_mm import fedavg, local_sgd, mfa_rand
      >>> from fedjax_mm.privacy import private
      >>> local = local_sgd(0.1, steps=10, batch_size=lambda t: 20)
      >>> algorithm = private(fedavg(local), clip=1.0, noise_multiplier=2.0, per="example")
      >>> round(example_epsilon(
      ...     algorithm, mfa_rand(10, 2), num_examples=1000, num_rounds=50, delta=1e-5), 2)
      5.43

    Reference: Abadi et al., "Deep Learning with Differential Privacy" (2016); Wang, Balle,
    Kasiviswanathan, "Subsampled Renyi Differential Privacy and Analytical Moments Accountant"
    (2019).
    """
    call = _private_call(algorithm)
    local = _local_of(call.arguments["algorithm"])
    z, models = (
        float(call.arguments["noise_multiplier"]),
        sampling_of(check_assignment(assignment)).most_models,
    )
    if z == 0:
        raise ValueError("noise_multiplier is 0, so epsilon is infinite; give noise")
    steps: Counter[int] = Counter()
    for t in range(1, num_rounds + 1):
        size = local.batch_size(np.int32(t)) if callable(local.batch_size) else num_examples
        # At least one example is drawn, and one more for a fraction.
        drawn = min(max(math.ceil(size), 1), num_examples)
        steps[drawn] += models * _steps_with(local, num_examples)
    return spent_on(z, num_examples, steps, delta)


def _check_wrappers(wrappers: Sequence[Algorithm]) -> None:
    """Raises `UncoveredError` if others than the package's wrap an algorithm, or changed ones."""
    for each in wrappers:
        if each.call is None or not each.call.factory.__module__.startswith("fedjax_mm."):
            raise UncoveredError(
                f"epsilon is infinite: nothing is known about the wrapper {each.name!r}, or a "
                "function of it was replaced; use the package's wrappers as they are"
            )


def _private_call(algorithm: Algorithm) -> Call:
    for number, each in enumerate(layers(algorithm)):
        call = each.call
        if call and call.factory.__name__ == "private" and call.arguments["per"] == "example":
            _check_wrappers(layers(algorithm)[:number])
            return call
    raise UncoveredError(
        "epsilon is infinite: the algorithm does not print as private(..., per='example'), so its "
        "noise is not known; give the algorithm that this call returned"
    )


def _steps_with(local: LocalSGD, num_examples: int) -> int:
    """The number of a round's local steps that may read one example."""
    size = local.batch_size if isinstance(local.batch_size, int) else None
    per_epoch = 1 if size is None else -(-num_examples // size)
    if isinstance(local.steps, Epochs):
        return math.ceil(local.steps.number)
    return -(-int(local.steps or 1) // per_epoch)
