"""An experiment as data, from a file for `run CONFIG.toml` or from the definition of a figure."""

from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedjax_mm.experiments.axes import Axes, Points, dotted
from fedjax_mm.experiments.claims import Claim
from fedjax_mm.experiments.executors import AnyExecutor
from fedjax_mm.experiments.overrides import replaced
from fedjax_mm.experiments.point import Point


class Experiment(Point):
    """Tasks, algorithms and seeds, at all points of the experiment's axes.

    An axis is a setting of the experiment, such as `num_models` or `task.mu`, or else a setting of
    every algorithm, such as `learning_rate` or `assignment.cohort_size`. The axis
    ``algorithms.NAME.q`` is a setting of one algorithm. Axes of real numbers need no further
    compilation, and neither do axes of the data, such as `task.partition.alpha` or
    `task.data_seed`. If `data_seed` is "seed", every seed has its own draw of the data.

    `num_models` may be omitted if it is an axis, or if the experiment has `tasks`. The axis
    `task.KEY` then applies to every task.

    Attributes:
      axes: values of settings, as lists or ranges; with this table the file is a sweep.
      executor: the executor that computes the parts if a command selects it. It is not one of the
        settings that identify a result.
      claims: claims about the result, by name; `run --until-settled` adds seeds for them. Like the
        executor, they do not identify a result.
      together: count axes whose values share a program, which plain FedAvg on the quadratic allows;
        defaults to `local_steps`. Adding `num_models`, for MFA-Rand and MFA-RR, saves compilation,
        but a round may take 2.7 times longer.

    Example:
      >>> experiment = Experiment.model_validate({
      ...     "task": {"name": "quadratic"},
      ...     "num_models": 2,
      ...     "num_rounds": 10,
      ...     "algorithms": {"MFA-RR": {
      ...         "assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 5}},
      ...     "axes": {"num_models": [2, 12], "learning_rate": [0.05, 0.1]},
      ... })
      >>> experiment.points().values
      {'num_models': [2, 12], 'learning_rate': [0.05, 0.1]}
    """

    axes: Axes = Field(default_factory=dict)
    executor: Annotated[AnyExecutor | None, Field(exclude=True)] = None
    claims: Annotated[dict[str, Claim], Field(exclude=True, default_factory=dict)]
    together: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _said_elsewhere(cls, values: Any) -> Any:
        """Fills in settings that axes imply."""
        if not isinstance(values, dict) or not isinstance(values.get("axes"), dict):
            return values
        axes = dict(dotted(values["axes"]))
        if axes.get("task.data_seed") == "seed":
            del axes["task.data_seed"]
            tasks = values.get("tasks")
            if isinstance(tasks, list):
                drawn = [replaced(each, ["data_seed"], "seed") for each in tasks]
                values = values | {"tasks": drawn}
            else:
                values = replaced(values, ["task", "data_seed"], "seed")
        if values.get("num_models") is None and "num_models" in axes:
            axis = axes["num_models"]
            is_list = isinstance(axis, list) and len(axis) > 0 and isinstance(axis[0], int)
            values = values | {"num_models": axis[0] if is_list else 1}
        return values | {"axes": axes}

    @model_validator(mode="after")
    def _points_fit(self) -> Self:
        """Raises `ValueError` if a point is invalid."""
        points = self.points()
        places = {name: points.values[key] for name, key in points.names.items()}
        for name, claim in self.claims.items():
            try:
                claim.check({"algorithm": list(self.algorithms), **places})
            except ValueError as error:
                raise ValueError(f"claims.{name}: {error}") from None
        return self

    @property
    def on_divergence(self) -> Literal["mark", "stop"]:
        """Whether a run that diverges is marked, if there are several points, or ends the sweep."""
        return "mark" if self.axes else "stop"

    def points(self) -> Points:
        """All checked points of the axes, without their data."""
        return self._points

    @cached_property
    def _points(self) -> Points:
        return Points(self, self.axes, self.together)
