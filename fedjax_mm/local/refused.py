"""The settings to which the papers of methods give no meaning."""

from typing import Any

from fedjax_mm.base import Steps
from fedjax_mm.checks.values import described
from fedjax_mm.local.settings import Epochs, LocalSGD

_SUMS = "leave out optimizer, or give local_sgd momentum, weight_decay or clip instead"
_MEAN = "keeps='mean'"

REFUSED = {
    ("prsgd", "epochs"): "Problem 1 counts iterations, and all clients take I of them between "
    "averages: give their number as steps",
    ("prsgd", "optimizer"): f"its step is x - gamma G: {_SUMS}",
    ("prsgd", "keeps"): "its clients start each round from the mean and one stale gradient alone",
    ("scaffold, option II", "optimizer"): "the control variate is a mean gradient, which only a "
    f"sum of gradients gives: {_SUMS}, or take option I",
    ("scaffold, option II", "keeps"): "the control variate is a mean gradient of this round, and a "
    "kept state adds those of earlier rounds: take option I",
    ("fednova", "optimizer"): "it divides updates by a_k, the sum of the weights of their "
    f"gradients: {_SUMS}",
    ("fednova", "keeps"): "a_k counts the gradients of this round, and a kept state adds those of "
    "earlier ones",
    **dict.fromkeys(
        [("qffl", _MEAN), ("afl", _MEAN)], "its step is no mean of the updates: take 'client'"
    ),
    **dict.fromkeys(
        [("mifa", _MEAN), ("stalevr", _MEAN)],
        "its step averages the updates of different rounds: take 'client'",
    ),
    ("apfl", _MEAN): "the clients also train models of their own: take 'client'",
}
"""Why the paper of a method gives a setting of `local_sgd` no meaning, by method and setting, which
may be one value of it."""


def check_local(method: str, local: Any, *, default: Steps | None = None) -> LocalSGD:
    """Returns a method's first argument.

    Args:
      method: the method's name, as in `REFUSED`.
      local: the argument.
      default: E if `local` has no number of steps; None if the method needs one.

    Raises:
      TypeError: if the argument is not from `local_sgd`.
      ValueError: if it has no number of steps, or the method's paper gives it no meaning.
    """
    if not isinstance(local, LocalSGD):
        name, _, _ = method.partition(",")
        raise TypeError(
            f"local is {described(local)}; give the settings of local_sgd, as in "
            f"{name}(local_sgd(0.1, steps=5))"
        )
    if local.steps is None:
        if default is None:
            raise ValueError("neither local steps nor epochs are given; give one of the two")
        local = local._replace(steps=default)
    given = {
        "epochs": local.steps.number if isinstance(local.steps, Epochs) else None,
        "optimizer": None if local.is_linear else local.optimizer,
        "keeps": local.keeps,
    }
    for setting, value in given.items():
        one = method, f"{setting}={value!r}"
        reason = REFUSED.get(one, REFUSED.get((method, setting)))
        if reason is not None and value is not None:
            raise ValueError(f"{setting} is {described(value)}, which {method} refuses: {reason}")
    return local
