"""All multi-model methods by name, with a shared clock."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import optax

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.algorithms.mifa import mifa
from fedjax_mm.algorithms.stalevr import stalevr
from fedjax_mm.assignments.bandits import bandit
from fedjax_mm.assignments.fairness import fedfair
from fedjax_mm.assignments.partitions import mfa_rand, mfa_rr, sequential
from fedjax_mm.assignments.variance_reduced import variance_reduced
from fedjax_mm.asynchrony.clock import on_clock
from fedjax_mm.asynchrony.delays import Delay, shifted_exponential
from fedjax_mm.asynchrony.dispatch import Dispatch, fedast
from fedjax_mm.asynchrony.planning import bods
from fedjax_mm.base import Algorithm, Assignment, Scalar
from fedjax_mm.local.settings import LocalSGD


class Sizes(NamedTuple):
    """Sizes that assignments depend on."""

    num_clients: int
    num_models: int
    cohort_size: int
    num_rounds: int


class Way(NamedTuple):
    """A method, given by its assignment and its client and server algorithm.

    Attributes:
      assign: returns the assignment on the shared clock, given the sizes.
      algorithm: a factory that takes the local training settings.
      rounds: the number of rounds with as many local trainings as one round of MFA-Rand.
      has_server_rate: whether the factory also takes `server_rate`, which is then tuned as well.
    """

    assign: Callable[[Sizes], Assignment | Dispatch]
    algorithm: Callable[..., Algorithm] = fedavg
    rounds: int = 1
    has_server_rate: bool = False


def _delay(sizes: Sizes) -> Delay:
    """The delays of local trainings, with mean 1.5 and longer delays for slow clients."""
    return shifted_exponential(sizes.num_clients, mean=1.0)


def _of(factory: Callable[..., Assignment], *, rounds: int = 1, **options: Any) -> Way:
    def assign(sizes: Sizes) -> Assignment:
        how = {"cohort_size": sizes.cohort_size} | options
        rule = factory(sizes.num_clients, sizes.num_models, **how)
        return on_clock(rule, _delay(sizes))

    return Way(assign, rounds=rounds)


def _unequal(algorithm: Callable[..., Algorithm], **options: Any) -> Way:
    def assign(sizes: Sizes) -> Assignment:
        # Match the expected number of trainings per round of the other methods.
        how = {"expected_trainings": float(sizes.cohort_size)} | options
        rule = variance_reduced(sizes.num_clients, sizes.num_models, **how)
        return on_clock(rule, _delay(sizes))

    return Way(assign, algorithm)


def _one_by_one(sizes: Sizes) -> Assignment:
    *three, num_rounds = sizes
    turn = max(1, num_rounds // sizes.num_models)
    rule = sequential(*three[:2], cohort_size=three[2], rounds_per_model=turn)
    return on_clock(rule, _delay(sizes))


def _with_two_processors(sizes: Sizes) -> Assignment:
    """MFA-Rand with half of the clients, each of which trains two models at once."""
    num_clients, num_models, cohort_size, _ = sizes
    few = max(num_models, cohort_size // 2)
    rule = mfa_rand(num_clients, num_models, cohort_size=few, processors=2)
    return on_clock(rule, _delay(sizes))


def _planned(sizes: Sizes) -> Assignment:
    """BODS, which plans cohorts of an equal part of K for each model."""
    each = max(1, sizes.cohort_size // sizes.num_models)
    return bods(sizes.num_clients, sizes.num_models, cohort_size=each, delay=_delay(sizes))


def _at_once(sizes: Sizes) -> Dispatch:
    """FedAST with K jobs in progress and buffers of half of each model's jobs, rounded up.

    Every model has at least one job. If any model has only one, each update triggers a server step.
    """
    N, M, K, _ = sizes
    each = [max(1, len(part)) for part in np.array_split(np.arange(K), M)]
    ratio, delay = min(2, *each), _delay(sizes)
    return fedast(N, M, at_work=each, ratio=ratio, delay=delay, arrivals_per_round=K)


def _stepping(local: LocalSGD, *, server_rate: Scalar) -> Algorithm:
    """FedAvg with a server rate eta_g, which must be small if updates are stale."""
    return fedavg(local, server_optimizer=optax.sgd(server_rate))


METHODS: Mapping[str, Way] = {
    "FedAvg, one by one": Way(_one_by_one),
    "MFA-Rand": _of(mfa_rand),
    "MFA-RR": _of(mfa_rr),
    "bandit: random": _of(bandit, policy="random"),
    "bandit: weighted sum": _of(bandit, policy="weighted-sum"),
    "bandit: Pareto": _of(bandit, policy="pareto", rounds=4),  # its Pareto sets are small
    "bandit: rank list": _of(bandit, policy="rank-list"),
    "FedFairMMFL": _of(fedfair),
    "LVR": _unequal(partial(fedavg, server_scale="1/N"), by="loss"),
    "GVR": _unequal(partial(fedavg, server_scale="1/N"), by="update"),
    "StaleVR": _unequal(partial(stalevr, beta="exact"), by="update", inactive="train"),
    "StaleVRE": _unequal(partial(stalevr, beta="estimated"), by="loss"),
    "MIFA": _of(mfa_rand)._replace(algorithm=mifa),
    "FedAST": Way(_at_once, _stepping, has_server_rate=True),
    "BODS": Way(_planned),
    "MFA-Rand, 2 processors": Way(_with_two_processors),
}
"""All methods by name. To add a method, add a line."""
