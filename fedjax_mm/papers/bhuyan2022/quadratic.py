"""MFA-Rand and MFA-RR on the quadratic: settings shared by Figures 1 to 5."""

from typing import Any

from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.fields import Count, Positive, Seeded, TwoOrMore
from fedjax_mm.experiments.optimizers import InverseTime
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.experiments.point import Precision
from fedjax_mm.experiments.tasks import QuadraticConfig

_ASSIGNMENTS = {"MFA-Rand": "mfa_rand", "MFA-RR": "mfa_rr"}


class BothOnQuadratic(Seeded):
    """Settings of MFA-Rand and MFA-RR on the quadratic."""

    learning_rate: Positive | InverseTime
    task: QuadraticConfig = QuadraticConfig(start="normal")
    num_rounds: Count = 1000
    num_seeds: TwoOrMore = 20
    precision: Precision = "float32"

    def at(self, num_models: int, local_steps: int, **more: Any) -> Experiment:
        """The experiment of both algorithms with M models, E local steps, and more."""
        values = self.model_dump()
        local = {"learning_rate": values.pop("learning_rate"), "local_steps": local_steps}
        algorithms = {
            label: {"assignment": {"name": name}} | local for label, name in _ASSIGNMENTS.items()
        }
        shared = {name: values[name] for name in Experiment.model_fields.keys() & values.keys()}
        point = {"num_models": num_models, "algorithms": algorithms}
        experiment = validate(Experiment, shared | point | more)
        return experiment.with_seeds(self.first_seed, self.num_seeds)


def rate_text(rate: float | InverseTime) -> str:
    """Formats a learning rate as an equation."""
    if not isinstance(rate, InverseTime):
        return rf"$\eta = {rate:g}$"
    if rate.per == "round":
        return rf"$\eta_t = {rate.beta:g} / ({rate.gamma:g} + t)$"
    return rf"$\eta_t = {rate.beta:g} / ({rate.gamma:g} + l)$, $l = 1 + \lfloor (t-1)/M \rfloor$"
