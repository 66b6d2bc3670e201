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

from fedjax_mm.base import Assignment, Task
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.methods import (
    AssignmentConfig,
    Byzantine,
    Method,
    MethodConfig,
    Requiring,
)
from fedjax_mm.experiments.tasks import Config, Count, QuadraticConfig, Seed, TaskConfig
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.tasks.requirements import OwnModels
from fedjax_mm.until import Until

Precision = Literal["float32", "float64"]


class Target(Config):
    """Where a run ends before its last round; see `Until`."""

    metric: str
    at_least: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    at_most: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _has_one_bound(self) -> Self:
        self.build()
        return self

    def build(self) -> Until:
        """The target; `ValueError` unless there is one bound."""
        until = Until(self.metric, self.at_least, self.at_most)
        until.check()
        return until


class Experiment(Config):
    """One task, some algorithms, some seeds.

    `assignment` is for the algorithms that have none of their own. `byzantine` makes attackers of
    some clients, and `requiring` measures what clients ask of a model, with every algorithm alike;
    the assignment is for the clients that are seen.

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
    algorithms: Annotated[dict[str, MethodConfig], Field(min_length=1)]
    assignment: AssignmentConfig | None = None
    byzantine: Byzantine | None = None
    requiring: Requiring | None = None
    num_models: Count
    num_rounds: Count
    num_seeds: Count = 20
    seed: Seed = 0
    record_every: Count = 1
    client_map: Literal["auto", "vmap", "scan"] | Count = "auto"
    precision: Precision = "float32"
    until: Target | None = None

    @model_validator(mode="after")
    def _all_fits(self) -> Self:
        """Fails now on what would fail when building, so that nothing is compiled in vain."""
        self._check_requiring()
        for label, method in self.algorithms.items():
            if method.assignment is None and self.assignment is None:
                raise ValueError(
                    f"algorithms.{label}.assignment: missing; give one, or a table assignment for "
                    "all algorithms"
                )
            try:
                self._check_method(method)
            except ValueError as error:
                raise ValueError(f"algorithms.{label}: {error}") from error
        if self.precision == "float64" and not isinstance(self.task, QuadraticConfig):
            raise ValueError("precision is 'float64'; classifiers are trained in 'float32'")
        if self.num_rounds % self.record_every:
            raise ValueError(
                f"record_every is {self.record_every}; it must divide {self.num_rounds} rounds"
            )
        return self

    def _check_requiring(self) -> None:
        if self.requiring is None:
            return
        if isinstance(self.task, QuadraticConfig):
            if self.requiring.batch_size is not None:
                raise ValueError(
                    f"requiring.batch_size is {self.requiring.batch_size}; the quadratic has no "
                    "examples: leave it out"
                )
        elif not self.task.has_own_tests:
            raise ValueError(
                "requiring: clients are asked one by one, but one pool of test examples stands for "
                "all; give task.test_fraction, such as 0.4, so that each has its own"
            )
        if self.task.num_clients is not None:
            self._num_seen(self.task.num_clients)

    def _check_method(self, method: Method) -> None:
        assignment = self._assignment_of(method)
        if self.requiring is None:
            asking = "assignment.appealing asks" if assignment.appealing else f"{method.name} asks"
            if assignment.appealing or method.asks_for_thresholds():
                raise ValueError(
                    f"{asking} for clients with thresholds; add a table requiring, such as "
                    "requiring = { num_steps = 100 }"
                )
        if self.task.num_clients is not None:
            self._assigned(method, self.task.num_clients)
        if isinstance(self.task, QuadraticConfig):
            _check_on_quadratic(method)

    def _assignment_of(self, method: Method) -> AssignmentConfig:
        """The method's own, or that of all."""
        assignment = method.assignment or self.assignment
        assert assignment is not None
        return assignment

    def _num_seen(self, num_clients: int) -> int:
        """How many of the clients may train."""
        num_unseen = 0 if self.requiring is None else self.requiring.num_unseen
        if num_unseen >= num_clients:
            raise ValueError(
                f"requiring.num_unseen is {num_unseen}, but there are {num_clients} clients; at "
                f"most {num_clients - 1} may be unseen"
            )
        return num_clients - num_unseen

    def _assigned(self, method: Method, num_clients: int) -> Assignment:
        """Who trains what, among the clients that are seen."""
        num_seen = self._num_seen(num_clients)
        try:
            return self._assignment_of(method).build(num_seen, self.num_models)
        except ValueError as error:
            if num_seen == num_clients:
                raise
            unseen = f"requiring.num_unseen = {num_clients - num_seen}"
            raise ValueError(f"{error}, without those of {unseen}") from error

    def _setup(self, method: Method, task: Task, own: OwnModels | None) -> Setup:
        """One run: who trains what and how, with attackers and demands."""
        assignment = self._assigned(method, task.num_clients)
        algorithm, tasks = method.build(self.num_models), [task] * self.num_models
        if self.requiring is not None and own is not None:
            tasks = self.requiring.wrap(task, own, method)
        if self.byzantine is not None:
            tasks = [self.byzantine.wrap_task(each) for each in tasks]
            algorithm = self.byzantine.wrap(algorithm, assignment.num_clients)
        return Setup(tasks, algorithm, assignment, self.task.initial_params())

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

        def at(algorithm: str, values: Mapping[str, Any]) -> "Experiment":
            here = self._first
            for name, value in values.items():
                here = _replaced(here, _path_of(keys[name], here, algorithm), value)
            return here

        def prepare(rng_key: Any, algorithm: str, data: Any = None, **values: Any) -> OwnModels:
            here = at(algorithm, values)
            assert here.requiring is not None
            task, method = here.task.build(data), here.algorithms[algorithm]
            start = here.task.initial_params()
            return here.requiring.prepare(rng_key, task, here.num_models, method, start)

        def build(
            algorithm: str, data: Any = None, prepared: OwnModels | None = None, **values: Any
        ) -> Setup:
            here = at(algorithm, values)
            return here._setup(here.algorithms[algorithm], here.task.build(data), prepared)

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
            prepare=None if self.requiring is None else prepare,
            until=None if self.until is None else self.until.build(),
        )


def _check_on_quadratic(method: Method) -> None:
    """Raises `ValueError` if a method is to draw examples, of which the quadratic has none."""
    for key in ("epochs", "batch_size"):
        value = getattr(method, key, None)
        if value is not None:
            instead = ", and give local_steps" if key == "epochs" else ""
            raise ValueError(
                f"{key} is {value}; the quadratic has no examples: leave it out{instead}"
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
    algorithm's, such as `learning_rate` or `assignment.cohort_size`; ``algorithms.NAME.q`` is one
    algorithm's. Axes of numbers that are not counts cost no compilation. All points have the same
    data: what changes it cannot be an axis.

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
            # Results have a dimension "model" already; a module's rate of dropout is no argument.
            if key.partition(".")[0] in _NOT_SWEPT or name in ("model", "dropout_rate"):
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
        return {key: _value_at(experiment, _path_of(key, self, label)) for key in point}

    def _at(self, point: Mapping[str, Any]) -> Experiment:
        """The checked experiment at one point."""
        values = self.model_dump(exclude={"axes"})
        for key, value in point.items():
            for label in self.algorithms:
                values = _replaced(values, _path_of(key, self, label), value)
        where = ", ".join(f"{key} = {value}" for key, value in point.items())
        try:
            experiment = validate(Experiment, values)
        except ValueError as error:
            raise ValueError(f"at {where}: {error}") from None
        if experiment.task.source != self.task.source:
            raise ValueError(f"at {where}: it changes the data; run one for each")
        return experiment


_NOT_SWEPT = (
    *("num_rounds", "num_seeds", "seed", "record_every", "client_map", "precision", "axes"),
    "until",
)


def _dotted(axes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The axes by their full names: TOML reads ``task.mu = [...]`` as a table within a table."""
    for key, value in axes.items():
        if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
            yield from ((f"{key}.{name}", inner) for name, inner in _dotted(value))
        else:
            yield key, value


def _path_of(key: str, experiment: Experiment, algorithm: str) -> list[str]:
    """Where an axis is in an experiment: its own settings first, then the algorithm's.

    An assignment is the algorithm's if it has one.
    """
    path, own = key.split("."), ["algorithms", algorithm]
    if path[0] == "assignment" and experiment.algorithms[algorithm].assignment is not None:
        return [*own, *path]
    return path if path[0] in Experiment.model_fields else [*own, *path]


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
      >>> validate(Range, {"start": 1, "stop": 100, "num": 3}, ["scale=log"]).values()
      [1.0, 10.0, 100.0]
      >>> validate(Range, {"start": 1, "stpo": 100, "num": 3})
      Traceback (most recent call last):
      ValueError: stop: missing; stpo = 100: unknown key, did you mean 'stop'?
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
            key, (owner, keys) = str(problem["loc"][-1]), _table(kind, problem["loc"][:-1])
            close, everywhere = [], sorted(_keys(kind))
            if key not in everywhere:  # else it is spelt right, but belongs elsewhere
                close = [*_close(key, keys), *_close(key, everywhere)]
            known = f"known keys{owner} are {', '.join(keys)}"
            hint = f"did you mean {close[0]!r}?" if close else known
            return f"{path} = {value!r}: unknown key, {hint}"
        case "union_tag_invalid":
            context = problem["ctx"]
            return f"{path} = {context['tag']!r}: choose from {context['expected_tags']}"
        case "value_error" if isinstance(value, dict):  # the message names what is in the table
            return f"{path}: {message}" if path else message
    return f"{path} = {value!r}: {message[0].lower()}{message[1:]}" if path else message


def _table(kind: type[Config], location: Sequence[str | int]) -> tuple[str, list[str]]:
    """Whose table stands at a location of pydantic's, as " of NAME" if it has one; and its keys."""
    root = kind.model_json_schema()
    tables = _tables(root, root)
    for part in location:
        chosen = [table for table in tables if part in (table.get("title"), _name_of(table))]
        if chosen:  # among the types that may stand here, a step that is no key
            tables = chosen
            continue
        inner = [
            table.get("properties", {}).get(part, table.get("additionalProperties"))
            for table in tables
        ]
        tables = [each for value in inner if value for each in _tables(value, root)] or tables
    names = [name for name in map(_name_of, tables) if name is not None]
    keys = sorted({key for table in tables for key in table.get("properties", {})})
    return f" of {names[0]}" if len(tables) == len(names) == 1 else "", keys


def _close(key: str, keys: Sequence[str]) -> list[str]:
    """The key that is most like another one, if any is."""
    return difflib.get_close_matches(key, keys, n=1)


def _keys(kind: type[Config]) -> set[str]:
    """Every key that may stand somewhere in a configuration of this kind."""
    definitions = kind.model_json_schema()
    tables = [definitions, *definitions.get("$defs", {}).values()]
    return {key for table in tables for key in table.get("properties", {})}


def _tables(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON schemas of all tables that a value may be."""
    if not isinstance(schema, dict):
        return []
    if "$ref" in schema:
        return _tables(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    kinds = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    if kinds:
        return [table for each in kinds for table in _tables(each, root)]
    return [schema] if schema.get("type") == "object" else []


def _name_of(table: dict[str, Any]) -> str | None:
    """The `name` that tells a table from the others that may stand in its place."""
    name: str | None = table.get("properties", {}).get("name", {}).get("const")
    return name
