"""MFA-RR with growing samples on ridge regression: the runs of Theorem 2 and its lemmas."""

import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from pydantic import Field, model_validator

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import mfa_rr
from fedjax_mm.base import Algorithm, Task
from fedjax_mm.experiments.fields import Count, Positive, Recorded, Seed, TwoOrMore
from fedjax_mm.local import local_sgd
from fedjax_mm.papers.training import train
from fedjax_mm.papers.values import Several
from fedjax_mm.schedules import Schedule, growing_sample_size, inverse_time, per_frame
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.least_squares import LeastSquares, least_squares
from fedjax_mm.theory import mfa
from fedjax_mm.theory.problem import FloatArray, Problem, Rate
from fedjax_mm.theory.validation import over

Sample = Literal["growing", "fixed"]
"""The sample size N_s(t) of Theorem 2, or its initial value in all rounds."""

_NOISE = 0.3  # standard deviation of the noise in the targets and in the clients' solutions


class Growing(Recorded):
    """Settings of MFA-RR with eq. (19) on ridge regression, starting from zeros."""

    num_clients: TwoOrMore = 12
    num_examples: TwoOrMore = 100
    """S, the number of examples per client. With a larger S, samples are complete later."""
    dim: Count = 4
    ridge: Positive = 0.5
    samples: Several[Sample] = ("growing", "fixed")
    num_models: Several[Count] = (1, 4)
    local_steps: Several[Count] = (1, 5)
    left_out: Several[Annotated[float, Field(gt=0, lt=1)]] = (0.5, 0.95)
    """Shares of the examples omitted from the first round's sample, one for each V."""
    rate: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """The initial rate in units of 1/L, the largest that Theorem 2 allows."""
    contraction: Annotated[float, Field(gt=1)] = 2.0
    """The product beta mu."""
    num_rounds: Count = 400
    num_seeds: TwoOrMore = 50
    seed: Seed = 0
    record_every: Count = 5

    @model_validator(mode="after")
    def _theorem_applies(self) -> Self:
        for num_models in self.num_models:
            mfa_rr(self.num_clients, num_models)  # raises if there are more models than clients
        known(self)  # raises if the rate is too large
        return self

    def task(self) -> LeastSquares:
        """Ridge regression on the examples, in JAX's default precision."""
        x, y = self.examples()
        return least_squares(list(x), list(y), ridge=self.ridge)

    def examples(self) -> tuple[FloatArray, FloatArray]:
        """Features of length 1 and targets, ``[clients, examples, ...]``.

        Each client has a different solution, so that clients are heterogeneous.
        """
        random = np.random.default_rng(self.seed)
        shape = self.num_clients, self.num_examples, self.dim
        x = random.standard_normal(shape)
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        solutions = 1 + _NOISE * random.standard_normal((self.num_clients, self.dim, 1))
        return x, (x @ solutions)[..., 0] + _NOISE * random.standard_normal(shape[:2])


class Known(NamedTuple):
    """Constants of the regression in Assumptions 1 to 4, and the learning rate.

    G, beta_1 and beta_2 hold on a ball around w* that contains all iterates.

    Attributes:
      problem: exact N, S, mu and L, and upper bounds G, beta_1 and beta_2.
      rate: the rate's beta and gamma.
      minimizer: w*.
      hessian: the Hessian of F.
      radius: the radius of the ball.
    """

    problem: Problem
    rate: Rate
    minimizer: FloatArray
    hessian: FloatArray
    radius: float

    @property
    def distance(self) -> float:
        """|w_1 - w*| for w_1 = 0."""
        return float(np.linalg.norm(self.minimizer))

    def numbers(self) -> dict[str, float]:
        """All constants by name."""
        names = "N", "S", "mu", "L", "G", "beta_1", "beta_2"
        values = self.problem.symbols("Theorem 2", " ".join(names))
        named = {name: float(value) for name, value in zip(names, values, strict=True)}
        beta, gamma = map(float, self.rate.symbols())
        rest = {"beta": beta, "gamma": gamma, "distance": self.distance, "radius": self.radius}
        return named | rest

    def variance(self, left_out: Any, local_steps: Any) -> Any:
        """The smallest V of eq. (31) at which the first sample may omit this share."""
        G, beta_1, beta_2 = self.problem.symbols("Theorem 2", "G beta_1 beta_2")
        return left_out * 2 * local_steps * np.sqrt(beta_1 + beta_2 * G**2) / self.rate.at(1)


@functools.cache
def known(config: Growing) -> Known:
    """Computes the constants of Theorem 2's hypotheses.

    Raises:
      ValueError: if the initial rate exceeds 2 / (largest + smallest curvature of an example).
    """
    x, y = config.examples()
    ridge, identity = config.ridge, np.eye(config.dim)
    each = np.einsum("ksi,ksj->ksij", x, x) + ridge * identity  # one per example
    clients = each.mean(1)
    hessian = clients.mean(0)
    minimizer = np.linalg.solve(hessian, np.einsum("ksi,ks->i", x, y) / y.size)
    curvature = np.linalg.eigvalsh(clients)
    mu, L = curvature.min(), curvature.max()
    beta = config.contraction / mu
    rate = Rate(beta, beta * L / config.rate - 1)
    gradients = x * (x @ minimizer - y)[..., None] + ridge * minimizer  # at w*
    # A step on any examples scales |w - w*| by 1 - eta ridge and adds at most eta times the norm of
    # their gradient at w*. An invariant ball exists, because the server takes convex averages.
    if rate.at(1) > 2 / (1 + 2 * ridge):
        raise ValueError(f"rate is {config.rate}; steps on single examples need a smaller one")
    steepest = np.linalg.norm(gradients, axis=-1).max()
    radius = max(np.linalg.norm(minimizer), steepest / ridge)

    def largest(of: FloatArray, linear: FloatArray, quadratic: FloatArray) -> float:
        """A bound on ``of + 2 linear'r + r'quadratic r`` over the ball |r| <= radius."""
        curved = np.linalg.eigvalsh(quadratic)[..., -1]
        ends = of + 2 * np.linalg.norm(linear, axis=-1) * radius + np.maximum(curved, 0) * radius**2
        return float(ends.max())

    # Write |gradient|^2 at w* + r, for all examples and all clients, as quadratic functions of r.
    of_examples = _square(gradients, each)
    of_clients = _square(gradients.mean(1), clients)
    # The expected norm of a sample's mean gradient is at most the root mean square over examples.
    G = np.sqrt(largest(*(part.mean(1) for part in of_examples)))
    # Take the smallest beta_2, which is 1, so that beta_1 is the excess of an example's squared
    # gradient over that of its client.
    pairs = zip(of_examples, of_clients, strict=True)
    beta_1 = max(largest(*(one - whole[:, None] for one, whole in pairs)), 0.0)
    problem = Problem(
        N=config.num_clients, S=config.num_examples, mu=mu, L=L, G=G, beta_1=beta_1, beta_2=1.0
    )
    return Known(problem, rate, minimizer, hessian, float(radius))


def _square(gradient: FloatArray, hessian: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """``a, b, A`` such that ``|gradient + hessian r|^2 = a + 2 b'r + r'A r``."""
    linear = np.einsum("...ij,...j->...i", hessian, gradient)
    return (gradient**2).sum(-1), linear, hessian @ hessian


def sample_size(config: Growing, num_models: int, local_steps: int, left_out: float) -> Schedule:
    """Theorem 2's smallest N_s(t) for the V at which the first sample omits this share."""
    constants = known(config)
    G, beta_1, beta_2 = constants.problem.symbols("Theorem 2", "G beta_1 beta_2")
    return growing_sample_size(
        learning_rate(config, num_models),
        num_examples=config.num_examples,
        local_steps=local_steps,
        gradient_bound=G,
        noise=(beta_1, beta_2),
        growth=left_out * constants.variance(1.0, local_steps),
    )


def learning_rate(config: Growing, num_models: int) -> Schedule:
    """The learning rate of Theorem 2."""
    beta, gamma = known(config).rate.symbols()
    return per_frame(inverse_time(beta, gamma), num_models)


def growing_fedavg(
    config: Growing, num_models: int, local_steps: int, left_out: float, sample: Sample = "growing"
) -> Algorithm:
    """FedAvg according to eq. (19), with local steps that sample without replacement."""
    size = sample_size(config, num_models, local_steps, left_out)
    return fedavg(
        local_sgd(
            learning_rate(config, num_models),
            steps=local_steps,
            batch_size=size if sample == "growing" else lambda t: size(jnp.ones_like(t)),
        ),
        server_scale="1/N",
    )


def run_growing(
    config: Growing,
    wrap: Callable[[LeastSquares], Task],
    execution: Execution | None = None,
) -> xr.Dataset:
    """The runs over ``(sample, num_models, local_steps, left_out, "seed", "round", ...)``.

    Args:
      config: the settings.
      wrap: turns ridge regression into the task to train.
      execution: the execution of the sweep.
    """

    def build(sample: Sample, num_models: int, local_steps: int, left_out: float) -> Setup:
        algorithm = growing_fedavg(config, num_models, local_steps, left_out, sample)
        return Setup(task, algorithm, mfa_rr(config.num_clients, num_models))

    with jax.enable_x64(True):
        task = wrap(config.task())
        axes = config.model_dump(include={"num_models", "local_steps", "left_out"})
        axes = {"sample": config.samples, **axes}
        return train([], build, axes, config, execution, on_divergence="stop")


def theorem_2(t: xr.DataArray, config: Growing, cases: xr.Dataset) -> xr.DataArray:
    """Evaluates the bound over rounds t and the cases' num_models, local_steps and left_out."""
    constants = known(config)
    V = constants.variance(cases.left_out, cases.local_steps)

    def bound(t: FloatArray, problem: Problem, V: FloatArray) -> FloatArray:
        return mfa.theorem_2(t, problem, constants.rate, V, constants.distance)

    at = {"t": t, "M": cases.num_models, "E": cases.local_steps, "V": V}
    found: xr.DataArray = over(bound, at | constants.problem.given())
    return found
