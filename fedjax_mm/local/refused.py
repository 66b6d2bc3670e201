"""The settings to which the papers of methods give no meaning."""

from typing import Any

from fedjax_mm.base import Steps
from fedjax_mm.checks.values import described
from fedjax_mm.local.settings import Epochs, LocalSGD

_SUMS = "leave out optimizer, or give local_sgd momentum, weight_decay or clip instead"

REFUSED = {
    ("prsgd", "epochs"): "Problem 1 counts iterations, and all clients take I of them between "
    "averages: give their number as steps",
    ("prsgd", "optimizer"): f"its step is x - gamma G: {_SUMS}",
    ("scaffold, option II", "optimizer"): "the control variate is a mean gradient, which only a "
    f"sum of gradients gives: {_SUMS}, or take option I",
    ("fednova", "optimizer"): "it divides updates by a_k, the sum of the weights of their "
    f"gradients: {_SUMS}",
}
"""Why the paper of a method gives a setting of `local_sgd` no meaning, by method and setting."""


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
    }
    for setting, value in given.items():
        reason = REFUSED.get((method, setting))
        if reason is not None and value is not None:
            raise ValueError(f"{setting} is {described(value)}, which {method} refuses: {reason}")
    return local
