"""Table of all methods, with their options and the NumPy loop that each must reproduce.

Tests of properties common to all methods are parametrized over this table.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from fedjax_mm import (
    afl,
    apfl,
    ditto,
    fedavg,
    feddyn,
    fednova,
    fedprox,
    gradient_tracking,
    local_sgd,
    maxfl,
    mifa,
    moon,
    mwfed,
    perfedavg,
    pfedme,
    prsgd,
    qffl,
    scaffold,
    stalevr,
)
from fedjax_mm.base import Algorithm
from fedjax_mm.local import LocalSGD
from fedjax_mm.simulator.stacks import StackState
from tests.oracles import maxfl as oracle
from tests.oracles import sampling


class Method(NamedTuple):
    """One row of the table.

    Attributes:
      factory: builds the algorithm.
      loop: the NumPy loop, called with the same options.
      numbers: options that may be traced.
      choices: all other options.
      num_gradients: gradients of a local training as a function of E, or None if clients differ.
      states: extracts the states that the loop returns after w.
      is_demanding: whether clients need thresholds.
      is_measured: whether clients must report losses.
      takes_steps: whether clients may take more than one local step.
      is_weighted: whether clients' weights count.
    """

    factory: Callable[..., Algorithm]
    loop: Callable[..., Any]
    numbers: Mapping[str, float] = {}
    choices: Mapping[str, Any] = {}
    num_gradients: Callable[[int], int] | None = lambda E: E
    states: Callable[[StackState], tuple[Any, ...]] = lambda models: ()
    is_demanding: bool = False
    is_measured: bool = False
    takes_steps: bool = True
    is_weighted: bool = True

    @property
    def remembers(self) -> bool:
        """Whether the server or the clients have states."""
        return self.states is not Method._field_defaults["states"]

    def local(self, learning_rate: Any, steps: int | None, batch_size: Any = None) -> LocalSGD:
        """Local SGD with `steps` steps, or with one step if the method allows no more."""
        steps = steps if self.takes_steps else None
        return local_sgd(learning_rate, steps=steps, batch_size=batch_size)

    def build(
        self, learning_rate: Any, steps: int | None, batch_size: Any = None, **options: Any
    ) -> Algorithm:
        """The algorithm with the row's options, updated by `options`."""
        given = {**self.numbers, **self.choices, **options}
        return self.factory(self.local(learning_rate, steps, batch_size), **given)


MAXFL = Method(
    maxfl,
    oracle.maxfl,
    {"server_rate": 0.7, "eps": 0.1, "slope": 1.0},
    {"weight": "derivative"},
    is_demanding=True,
    is_measured=True,
)
SCAFFOLD = Method(
    scaffold,
    oracle.scaffold,
    {"server_rate": 0.9},
    {"option": "II"},
    states=lambda models: (models.server, models.clients),
)
PERFEDAVG = Method(
    perfedavg,
    oracle.perfedavg,
    {"alpha": 0.05, "delta": 1e-3},
    {"variant": "FO"},
    num_gradients=lambda E: 2 * E,
)
APFL = Method(
    apfl,
    oracle.apfl,
    {"alpha": 0.3},
    {"adaptive": True},
    num_gradients=lambda E: 2 * E,
    states=lambda models: (models.clients["v"], models.clients["alpha"]),
)
PFEDME = Method(
    pfedme,
    oracle.pfedme,
    {"inner_rate": 0.05, "lam": 2.0, "server_rate": 0.8},
    {"inner_steps": 3},
    num_gradients=lambda E: 3 * E,
    states=lambda models: (models.clients,),
    is_weighted=False,
)
STALEVR = Method(
    stalevr,
    sampling.stalevr,
    choices={"beta": "estimated"},
    states=lambda models: (models.clients.update,),
)
METHODS = {
    "fedavg": Method(fedavg, oracle.fedavg, choices={"weighted": True}),
    "maxfl": MAXFL,
    "fedprox": Method(fedprox, oracle.fedprox, {"mu": 0.8}),
    "fednova": Method(fednova, oracle.fednova),
    "feddyn": Method(
        feddyn,
        oracle.feddyn,
        {"alpha": 0.6},
        states=lambda models: (models.server, models.clients),
    ),
    "scaffold": SCAFFOLD,
    "gradient_tracking": Method(
        gradient_tracking,
        oracle.gradient_tracking,
        choices={"weighted": True},
        states=lambda models: (models.server.tracked.value, models.server.gradient),
    ),
    "perfedavg": PERFEDAVG,
    "prsgd": Method(prsgd, oracle.prsgd, states=lambda models: (models.clients,)),
    "qffl": Method(qffl, oracle.qffl, {"q": 1.0}, is_measured=True),
    "afl": Method(
        afl,
        oracle.afl,
        {"mixture_rate": 0.05},
        states=lambda models: (models.server.iterate, models.server.mixture),
        is_measured=True,
        takes_steps=False,
        is_weighted=False,
    ),
    "mwfed": Method(
        mwfed,
        oracle.mwfed,
        {"growth": 4.0},
        num_gradients=None,
        states=lambda models: (jnp.exp(models.server),),
        is_demanding=True,
        is_measured=True,
    ),
    "ditto": Method(
        ditto,
        oracle.ditto,
        {"lam": 0.5},
        num_gradients=lambda E: 2 * E,
        states=lambda models: (models.clients,),
    ),
    "moon": Method(
        moon,
        oracle.moon,
        {"mu": 2.0, "temperature": 0.5},
        states=lambda models: (models.clients,),
    ),
    "apfl": APFL,
    "pfedme": PFEDME,
    "mifa": Method(mifa, sampling.mifa, states=lambda models: (models.clients,)),
    "stalevr": STALEVR,
}
"""One entry for each method."""

VARIANTS = METHODS | {
    "fedavg unweighted": METHODS["fedavg"]._replace(choices={"weighted": False}),
    "maxfl steep": MAXFL._replace(numbers={"server_rate": 0.7, "eps": 0.0, "slope": 2.5}),
    "maxfl sigmoid": MAXFL._replace(choices={"weight": "sigmoid"}),
    "maxfl tuned": MAXFL._replace(choices={"weight": "derivative", "tuning_steps": 2}),
    "scaffold I": SCAFFOLD._replace(choices={"option": "I"}, num_gradients=lambda E: E + 1),
    "perfedavg HF": PERFEDAVG._replace(choices={"variant": "HF"}, num_gradients=lambda E: 4 * E),
    "qffl 10": METHODS["qffl"]._replace(numbers={"q": 10.0}),
    "apfl fixed": APFL._replace(choices={"adaptive": False}),
    "stalevr one": STALEVR._replace(choices={"beta": "one"}),
    "mwfed 2": METHODS["mwfed"]._replace(numbers={"growth": 2.0}),
}
"""All methods, with all variants of each."""
