"""An experiment as data: what `run CONFIG.toml` reads and what a paper's figure is made of."""

import difflib
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from fedjax_mm import assignment
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.base import Algorithm, Assignment, Schedule
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.plan import Grid, Setup
from fedjax_mm.schedules import inverse_time, per_frame
from fedjax_mm.task_configs import Config, Count, Positive, QuadraticConfig, Seed, TaskConfig

Precision = Literal["float32", "float64"]


class InverseTime(Config):
    """The decaying rate beta / (t + gamma), per round t or per frame l = 1 + floor((t - 1) / M)."""

    beta: Positive
    gamma: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
    per: Literal["round", "frame"] = "round"


class MFARand(Config):
    """A fresh partition every round."""

    name: Literal["mfa_rand"]
    cohort_size: Count | None = None

    def build(self, num_clients: int, num_models: int) -> Assignment:
        """The assignment."""
        return assignment.mfa_rand(num_clients, num_models, cohort_size=self.cohort_size)


class MFARR(Config):
    """A partition per frame, rotated over the models."""

    name: Literal["mfa_rr"]
    cohort_size: Count | None = None
    redraw: Literal["frame", "round"] = "frame"

    def build(self, num_clients: int, num_models: int) -> Assignment:
        """The assignment."""
        return assignment.mfa_rr(
            num_clients, num_models, cohort_size=self.cohort_size, redraw=self.redraw
        )


class FedCluster(Config):
    """Fixed clusters visited in a reshuffled order, for one model."""

    name: Literal["fedcluster"]
    num_clusters: Count

    def build(self, num_clients: int, num_models: int) -> Assignment:
        """The assignment."""
        if num_models != 1:
            raise ValueError(f"num_models is {num_models}; fedcluster trains 1 model")
        return assignment.fedcluster(num_clients, self.num_clusters)


class Sequential(Config):
    """All clients train one model after the other."""

    name: Literal["sequential"]
    rounds_per_model: Count

    def build(self, num_clients: int, num_models: int) -> Assignment:
        """The assignment."""
        return assignment.sequential(
            num_clients, num_models, rounds_per_model=self.rounds_per_model
        )


AssignmentConfig = Annotated[MFARand | MFARR | FedCluster | Sequential, Field(discriminator="name")]


class FedAvgConfig(Config):
    """FedAvg under an assignment."""

    name: Literal["fedavg"] = "fedavg"
    assignment: AssignmentConfig
    learning_rate: Positive | InverseTime
    local_steps: Count | None = None
    epochs: Count | None = None
    batch_size: Count | None = None
    order: Literal["iid", "epochs"] | None = None
    weighted: Annotated[bool, Field(strict=True)] = True
    server_scale: Literal["mean", "1/N"] = "mean"

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.local_steps is None and self.epochs is None:
            raise ValueError("local_steps and epochs are missing; give one of the two")
        if self.order is not None and self.batch_size is None:
            raise ValueError(
                f"order is {self.order!r}, but steps take all examples; give a batch_size"
            )
        self.build(1)
        return self

    def schedule(self, num_models: int) -> float | Schedule:
        """The learning rate as `fedavg` takes it."""
        rate = self.learning_rate
        if not isinstance(rate, InverseTime):
            return rate
        schedule = inverse_time(rate.beta, rate.gamma)
        return per_frame(schedule, num_models) if rate.per == "frame" else schedule

    def build(self, num_models: int) -> Algorithm:
        """The algorithm."""
        return fedavg(
            self.schedule(num_models),
            local_steps=self.local_steps,
            epochs=self.epochs,
            batch_size=self.batch_size,
            order=self.order,
            server_scale=self.server_scale,
            weighted=self.weighted,
        )


class Experiment(Config):
    """One task, some algorithms, some seeds.

    Example:
      >>> experiment = Experiment.model_validate({
      ...     "task": {"name": "quadratic"},
      ...     "num_models": 2,
      ...     "num_rounds": 10,
      ...     "algorithms": {"MFA-RR": {
      ...         "assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 5}},
      ... })
      >>> experiment.num_seeds
      20
    """

    task: TaskConfig
    algorithms: Annotated[dict[str, FedAvgConfig], Field(min_length=1)]
    num_models: Count
    num_rounds: Count
    num_seeds: Count = 20
    seed: Seed = 0
    record_every: Count = 1
    client_map: Literal["auto", "vmap", "scan"] | Count = "auto"
    precision: Precision = "float32"

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        """Fails now on what would fail when building, so that nothing is compiled in vain."""
        for label, algorithm in self.algorithms.items():
            if self.task.num_clients is not None:
                algorithm.assignment.build(self.task.num_clients, self.num_models)
            if isinstance(self.task, QuadraticConfig) and (
                algorithm.epochs or algorithm.batch_size
            ):
                raise ValueError(
                    f"algorithms.{label}: the quadratic has no examples; give local_steps, and no "
                    "epochs or batch_size"
                )
        if self.precision == "float64" and not isinstance(self.task, QuadraticConfig):
            raise ValueError("precision is 'float64'; classifiers are trained in 'float32'")
        if self.num_rounds % self.record_every:
            raise ValueError(
                f"record_every is {self.record_every}; it must divide {self.num_rounds} rounds"
            )
        return self

    @property
    def points(self) -> dict[str, list[Any]]:
        """What varies beside the algorithm and the seed, by key: nothing."""
        return {}

    @property
    def _first(self) -> "Experiment":
        """The experiment at its first point."""
        return self

    def grid(self) -> Grid:
        """All runs, over the axes ``algorithm`` and those of `points`, with the data loaded.

        Raises:
          ValueError, OSError: if the data cannot be had.
        """
        return self._grid(self.task.data())

    def _grid(self, data: FederatedData | None) -> Grid:
        """All runs on some data, an argument of the compiled programs."""
        keys = {key.rpartition(".")[2]: key for key in self.points}

        def build(algorithm: str, data: Any = None, **values: Any) -> Setup:
            here = self._first
            for name, value in values.items():
                here = _replaced(here, _path_of(keys[name], algorithm), value)
            config, task = here.algorithms[algorithm], here.task.build(data)
            return Setup(
                task,
                config.build(here.num_models),
                config.assignment.build(task.num_clients, here.num_models),
                here.task.initial_params(),
            )

        axes = {name: self.points[key] for name, key in keys.items()}
        return Grid(
            build,
            {"algorithm": list(self.algorithms)} | axes,
            self.num_rounds,
            self.num_seeds,
            self.seed,
            shared={"data": data},
            record_every=self.record_every,
            client_map=self.client_map,
        )


class Range(Config):
    """`num` numbers from `start` to `stop`, both included, equally spaced or, with "log", factors.

    Example:
      >>> Range(start=0.01, stop=1.0, num=3, scale="log").values()
      [0.01, 0.1, 1.0]
    """

    start: Annotated[float, Field(strict=True, allow_inf_nan=False)]
    stop: Annotated[float, Field(strict=True, allow_inf_nan=False)]
    num: Annotated[int, Field(strict=True, ge=2, lt=2**31)]
    scale: Literal["linear", "log"] = "linear"

    @model_validator(mode="after")
    def _logarithms_exist(self) -> Self:
        if self.scale == "log" and min(self.start, self.stop) <= 0:
            raise ValueError(
                f"from {self.start:g} to {self.stop:g} in factors; both must be positive"
            )
        return self

    def values(self) -> list[float]:
        """The numbers, without digits that are round-off."""
        space = np.geomspace if self.scale == "log" else np.linspace
        return [float(f"{value:.12g}") for value in space(self.start, self.stop, self.num)]


class Sweep(Experiment):
    """An experiment at all points of a grid.

    An axis is a setting of the experiment, such as `num_models` or `task.mu`, or else one of every
    algorithm's, such as `learning_rate` or `assignment.cohort_size`. Axes of numbers that are not
    counts cost no compilation. All points have the same data: what changes it cannot be an axis.

    Example:
      >>> sweep = Sweep.model_validate({
      ...     "task": {"name": "quadratic"}, "num_models": 2, "num_rounds": 10, "num_seeds": 3,
      ...     "algorithms": {"MFA-RR": {
      ...         "assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 5}},
      ...     "axes": {"num_models": [2, 12], "learning_rate": [0.05, 0.1]},
      ... })
      >>> sweep.grid().shape  # algorithms, numbers of models, rates, seeds
      (1, 2, 2, 3)
    """

    axes: Annotated[
        dict[str, Annotated[list[Any], Field(min_length=1)] | Range],
        Field(min_length=1),
        BeforeValidator(lambda axes: dict(_dotted(axes)) if isinstance(axes, dict) else axes),
    ]

    @model_validator(mode="after")
    def _every_point_fits(self) -> Self:
        if not self.points:
            raise ValueError("axes: there are none; give at least one")
        self._grid(None)
        return self

    @cached_property
    def points(self) -> dict[str, list[Any]]:
        """What varies beside the algorithm and the seed, by key: the checked values."""
        names = [key.rpartition(".")[2] for key in self.axes]
        for key, name in zip(self.axes, names, strict=True):
            if names.count(name) > 1:
                raise ValueError(f"axes.{key}: two axes are called {name!r}; sweep one of them")
            if key.partition(".")[0] in _NOT_SWEPT or name == "model":  # a dimension of its own
                raise ValueError(f"axes.{key}: it cannot vary within a sweep; run one for each")
            for other in self.axes:
                if other.startswith(f"{key}."):
                    raise ValueError(f"axes.{other}: it is a part of {key}; sweep one of them")
        raw, first = self._raw, {key: values[0] for key, values in self._raw.items()}
        numeric = {
            key
            for key, value in self._values_at(first).items()
            if isinstance(value, float) and not any(isinstance(v, dict) for v in raw[key])
        }
        checked: dict[str, list[Any]] = {key: [] for key in raw}
        for key in numeric:
            checked[key] = [self._values_at(first | {key: value})[key] for value in raw[key]]
        others = [key for key in raw if key not in numeric]
        for choice in itertools.product(*(range(len(raw[key])) for key in others)):
            point = {key: raw[key][i] for key, i in zip(others, choice, strict=True)}
            values = self._values_at(first | point)
            for key, i in zip(others, choice, strict=True):
                if i == len(checked[key]):
                    checked[key].append(values[key])
        return checked

    @property
    def _raw(self) -> dict[str, list[Any]]:
        """The values of every axis, unchecked."""
        return {
            key: values.values() if isinstance(values, Range) else values
            for key, values in self.axes.items()
        }

    @cached_property
    def _first(self) -> Experiment:
        """As at every point, what is swept inside a table is in a table."""
        return self._at({key: values[0] for key, values in self._raw.items()})

    def _values_at(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The checked values of one point."""
        experiment, label = self._at(point), next(iter(self.algorithms))
        return {key: _value_at(experiment, _path_of(key, label)) for key in point}

    def _at(self, point: Mapping[str, Any]) -> Experiment:
        """The checked experiment at one point."""
        values = self.model_dump(exclude={"axes"})
        for key, value in point.items():
            for label in self.algorithms:
                values = _replaced(values, _path_of(key, label), value)
        where = ", ".join(f"{key} = {value}" for key, value in point.items())
        try:
            experiment = validate(Experiment, values)
        except ValueError as error:
            raise ValueError(f"at {where}: {error}") from None
        if experiment.task.source != self.task.source:
            raise ValueError(f"at {where}: it changes the data; run one for each")
        return experiment


_NOT_SWEPT = ("num_rounds", "num_seeds", "seed", "record_every", "client_map", "precision", "axes")


def _dotted(axes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The axes by their full names: TOML reads ``task.mu = [...]`` as a table within a table."""
    for key, value in axes.items():
        if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
            yield from ((f"{key}.{name}", inner) for name, inner in _dotted(value))
        else:
            yield key, value


def _path_of(key: str, algorithm: str) -> list[str]:
    """Where an axis is in an experiment: its own settings first, then the algorithm's."""
    path = key.split(".")
    return path if path[0] in Experiment.model_fields else ["algorithms", algorithm, *path]


def _replaced(config: Any, path: Sequence[str], value: Any) -> Any:
    """A copy with another value at the path, unchecked, so that it may be a traced number."""
    head, *rest = path
    inside = config if isinstance(config, dict) else dict(config)
    if rest:
        inner = inside.get(head)
        value = _replaced({} if not isinstance(inner, dict | Config) else inner, rest, value)
    changed = {head: value}
    return {**config, **changed} if isinstance(config, dict) else config.model_copy(update=changed)


def _value_at(config: Any, path: Sequence[str]) -> Any:
    for name in path:
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


SomeConfig = TypeVar("SomeConfig", bound=Config)


def load(path: Path, kind: type[SomeConfig], overrides: Sequence[str] = ()) -> SomeConfig:
    """Reads a configuration file.

    Args:
      path: a TOML file.
      kind: the configuration's class.
      overrides: ``key.path=value`` settings that win over the file.

    Raises:
      ValueError: in one line with the file, and the line or the key's path, what was wrong and what
        is allowed.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from error
    if "axes" in values and kind is Experiment:
        raise ValueError(f"{path}: it has axes; run it with `fedjax-mm sweep`")
    try:
        return validate(kind, values, overrides)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def validate(
    kind: type[SomeConfig], values: dict[str, Any], overrides: Sequence[str] = ()
) -> SomeConfig:
    """A configuration from plain values. Raises `ValueError` in one line.

    Example:
      >>> validate(InverseTime, {"beta": 30, "gamma": 100}, ["per=frame"]).per
      'frame'
      >>> validate(InverseTime, {"beta": 30, "gama": 100})
      Traceback (most recent call last):
      ValueError: gamma: missing; gama = 100: unknown key, did you mean 'gamma'?
    """
    for override in overrides:
        values = _with_override(values, override)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError("; ".join(_in_words(error, kind, values))) from None


def _with_override(values: dict[str, Any], override: str) -> dict[str, Any]:
    """The values with one ``key.path=value``, the value in TOML or else a plain word."""
    path, equals, text = override.partition("=")
    if not (path and equals):
        raise ValueError(f"--set {override}: write it as key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    key, _, rest = path.strip().partition(".")
    if rest:
        inner = values.get(key)
        value = _with_override(inner if isinstance(inner, dict) else {}, f"{rest}={text}")
    return {**values, key: value}


def _in_words(error: ValidationError, kind: type[Config], values: Any) -> list[str]:
    """What is wrong, once per key, as ``path = value: message``.

    Where a value may have several types pydantic reports on each: of a table only what is wrong
    inside it is kept, of a plain value only the first, or what we have to say ourselves.
    """
    problems: dict[str, Any] = {}
    for problem in error.errors():
        path = _path(problem, values)
        if path not in problems or problem["type"] == "value_error":
            problems[path] = problem
    return [
        _one_line(path, problem, kind)
        for path, problem in problems.items()
        if not path or not any(other.startswith(f"{path}.") for other in problems)
    ]


def _path(problem: Any, values: Any) -> str:
    """The keys that lead to a problem, without the names of types that pydantic puts between."""
    path = []
    for part in problem["loc"]:
        is_whole = isinstance(part, int) or not isinstance(values, dict) or part in values
        for key in [part] if is_whole else part.split("."):  # an axis may be a table in a table
            if isinstance(values, dict):
                inside = key in values
            else:  # a list may be too short
                is_item = isinstance(values, list | tuple) and isinstance(key, int)
                inside = is_item and key < len(values)
            if inside:
                path.append(str(key))
                values = values[key]
    if problem["type"] == "missing":
        path.append(str(problem["loc"][-1]))
    if problem["type"].startswith("union_tag"):
        path.append("name")
    return ".".join(path)


def _one_line(path: str, problem: Any, kind: type[Config]) -> str:
    """One problem as ``path = value: what is wrong``."""
    message = str(problem["msg"]).removeprefix("Value error, ").replace("tuple", "list")
    value = problem["input"]
    match problem["type"]:
        case "missing" | "union_tag_not_found":
            return f"{path}: missing"
        case "extra_forbidden":
            keys = _keys(kind)
            close = difflib.get_close_matches(str(problem["loc"][-1]), keys, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys are {', '.join(keys)}"
            return f"{path} = {value!r}: unknown key, {hint}"
        case "union_tag_invalid":
            context = problem["ctx"]
            return f"{path} = {context['tag']!r}: choose from {context['expected_tags']}"
    return f"{path} = {value!r}: {message[0].lower()}{message[1:]}" if path else message


def _keys(kind: type[Config]) -> list[str]:
    """Every key that may stand somewhere in a configuration of this kind."""
    definitions = kind.model_json_schema()
    tables = [definitions, *definitions.get("$defs", {}).values()]
    return sorted({key for table in tables for key in table.get("properties", {})})
