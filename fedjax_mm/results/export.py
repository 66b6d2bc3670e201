"""Exports results to the experiment trackers MLflow, TensorBoard and Weights & Biases."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import quote

import numpy as np

from fedjax_mm.checks.annotations import checked
from fedjax_mm.results.tracked import Run, Tracked
from fedjax_mm.tools.files import load_json, save_json

_RESULT_TAG = "fedjax_mm.result"  # tags every MLflow run with the digest of the result
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # values per MLflow request

To = Literal["mlflow", "tensorboard", "wandb"]
"""The trackers."""


class Exported(NamedTuple):
    """Summary of an export.

    Attributes:
      place: the location of the runs.
      runs: the number of the result's runs.
      new: the number of newly exported runs.
      left_out: the names of array metrics, which trackers cannot plot, and ``figure.png`` if it is
        a link to another directory.
    """

    place: str
    runs: int
    new: int
    left_out: list[str]


@checked
def export_result(
    path: Path | str,
    to: To,
    store: str | None = None,
    report: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> Exported:
    """Exports a result to a tracker, as one run per point and seed, in one group.

    Each run has the settings and coordinates of its point, and a curve over rounds for each metric
    and model, up to the round that met a target. The figure and the manifest are exported once for
    all runs. The tracker stores the digest of ``result.nc``, so exporting the same result again
    only completes an interrupted export.

    Args:
      path: the directory of a result, or its ``result.nc``.
      to: the tracker. In MLflow, the experiment is named after the result's directory, and the runs
        are children of a parent run. TensorBoard gets one directory per point, with one
        subdirectory per seed. wandb gets offline runs of a project, which `wandb sync` uploads.
      store: MLflow's tracking URI, which defaults to the environment's, TensorBoard's directory,
        which defaults to ``runs``, or the directory of wandb's folder ``wandb``, which defaults to
        the current one.
      report: called with a label, the number of finished runs, and the number of all runs.

    Raises:
      ValueError: if the result or the store is invalid, or the tracker's library is not installed.
      OSError: if the result does not exist, or the store is not writable.

    Example:
      >>> import tempfile
      >>> import xarray as xr
      >>> from fedjax_mm import save_dataset
      >>> curves = xr.Dataset({"loss": (("algorithm", "round"), [[2.0, 1.0], [2.0, 0.5]])},
      ...                     {"algorithm": ["A", "B"], "round": [0, 10]})
      >>> with tempfile.TemporaryDirectory() as place:
      ...     save_dataset(curves, Path(place, "mine.nc"))
      ...     first = export_result(Path(place, "mine.nc"), "tensorboard", place)
      ...     again = export_result(Path(place, "mine.nc"), "tensorboard", place)
      ...     print(*sorted(each.name for each in Path(place, "mine").iterdir()))
      about algorithm=A algorithm=B export.json
      >>> first.new, again.new
      (2, 0)
    """
    result = Tracked.read(Path(path))
    tracked = {"mlflow": _in_mlflow, "tensorboard": _in_tensorboard, "wandb": _in_wandb}[to]
    new = 0
    with tracked(result, store) as tracker:
        for number, run in enumerate(result.runs()):
            report(f"exporting {run.name}", number, result.num_runs)
            if not tracker.has(run):
                tracker.write(run)
                new += 1
    return Exported(tracker.place, result.num_runs, new, result.left_out)


class _Tracker(Protocol):
    """A tracker that holds a result's figure and manifest and receives its runs.

    Attributes:
      place: the location of the runs.
    """

    place: str

    def has(self, run: Run) -> bool:
        """Whether an earlier export wrote the complete run."""

    def write(self, run: Run) -> None:
        """Writes a run such that `has` ignores interrupted writes."""


@contextmanager
def _in_mlflow(result: Tracked, store: str | None) -> Iterator[_Tracker]:
    """Yields the experiment of a result, and finishes its parent run on exit."""
    _check_installed("mlflow", "sqlalchemy", "alembic")
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        made = _MLflow(result, store)
        if len(made.whole) < result.num_runs:
            made.write_about()
        yield made
        made.end(made.parent)
    except (MlflowException, SQLAlchemyError) as error:
        words = " ".join(str(error).split())[:160]
        raise ValueError(f"MLflow refuses --store {store or '(not given)'}: {words}") from error


@contextmanager
def _in_tensorboard(result: Tracked, store: str | None) -> Iterator[_Tracker]:
    """Yields the directory of a result, with its figure and its manifest."""
    _check_installed("tensorboardX")
    made = _TensorBoard(result, store)
    if not (made.root / "about").exists():
        made.write_about()
    yield made


@contextmanager
def _in_wandb(result: Tracked, store: str | None) -> Iterator[_Tracker]:
    """Yields the offline runs of a result, with its figure and its manifest."""
    _check_installed("wandb", package="wandb")
    made = _WandB(result, store)
    if not made.find("about"):
        made.write_about()
    yield made


def _check_installed(*libraries: str, package: str = "'fedjax-mm[tracking]'") -> None:
    """Raises `ValueError` if a library is not installed."""
    for library in libraries:
        if find_spec(library) is None:
            raise ValueError(f"{library} is not installed; pip install {package}")


@contextmanager
def _writing_to(place: Path) -> Iterator[None]:
    """Adds the remedy to errors of a directory."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write to {place}: {error.strerror}; give another --store"
        ) from error


class _MLflow:
    """An MLflow experiment with a parent run for the result."""

    def __init__(self, result: Tracked, store: str | None) -> None:
        from mlflow import MlflowClient, get_tracking_uri

        self.place = store or get_tracking_uri()
        self.client = MlflowClient(store)
        self.result, self.milliseconds = result, int(1000 * result.seconds)
        found = self.client.get_experiment_by_name(result.name)
        if found is not None and found.lifecycle_stage == "deleted":
            raise ValueError(
                f"the MLflow experiment {result.name!r} is deleted; restore it, or rename the "
                "directory of the result"
            )
        made = self.client.create_experiment(result.name) if found is None else found.experiment_id
        self.experiment: str = made
        known = list(self._known())
        parents = [each for each in known if "mlflow.parentRunId" not in each.data.tags]
        self.parent: str = parents[0].info.run_id if parents else self._begin(result.name, {})
        self.whole = set[tuple[str, str]]()
        for each in known:
            if each.data.tags.get("mlflow.parentRunId") != self.parent:
                continue
            if each.info.status == "FINISHED":
                self.whole.add((each.data.tags["point"], each.data.tags["seed"]))
            else:  # the export of this run was interrupted
                self.client.delete_run(each.info.run_id)

    def _known(self) -> Iterator[Any]:
        """Yields previously exported runs of this result."""
        where, token = f"tags.`{_RESULT_TAG}` = '{self.result.digest}'", None
        while True:
            page = self.client.search_runs([self.experiment], where, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _begin(self, name: str, tags: Mapping[str, str]) -> str:
        own = {_RESULT_TAG: self.result.digest, **tags}
        when, client = self.milliseconds, self.client
        run = client.create_run(self.experiment, start_time=when, tags=own, run_name=name)
        made: str = run.info.run_id
        return made

    def end(self, run_id: str) -> None:
        """Marks a run as finished."""
        self.client.set_terminated(run_id, end_time=self.milliseconds)

    def write_about(self) -> None:
        """Writes the figure and the manifest."""
        text = json.dumps(dict(self.result.manifest), indent=2)
        self.client.log_text(self.parent, text, "manifest.json")
        if self.result.figure:
            self.client.log_artifact(self.parent, str(self.result.figure))

    def has(self, run: Run) -> bool:
        """Whether a child run for this point and seed has finished."""
        return (run.point, str(run.seed)) in self.whole

    def write(self, run: Run) -> None:
        """Writes a child run."""
        from mlflow.entities import Metric, Param

        tags = {"mlflow.parentRunId": self.parent, "point": run.point, "seed": str(run.seed)}
        made = self._begin(run.name, tags)
        params = [Param(_allowed(name), str(value)) for name, value in run.params.items()]
        metrics = [
            Metric(_allowed(name), float(value), self.milliseconds, int(step))
            for name, curve in run.curves.items()
            for step, value in zip(*curve, strict=True)
        ]
        for first in range(0, len(params), _MOST_PARAMS):
            self.client.log_batch(made, params=params[first : first + _MOST_PARAMS])
        for first in range(0, len(metrics), _MOST_METRICS):
            self.client.log_batch(made, metrics=metrics[first : first + _MOST_METRICS])
        self.end(made)


def _allowed(name: str) -> str:
    """Replaces characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. :/]", "_", name)


class _TensorBoard:
    """A TensorBoard directory for the result."""

    def __init__(self, result: Tracked, store: str | None) -> None:
        self.result, self.root = result, Path(store or "runs") / result.name
        self.place = str(self.root)
        about = self.root / "export.json"
        if self.root.is_dir() and any(self.root.iterdir()):
            try:
                is_same = load_json(about)["result"] == result.digest
            except (OSError, ValueError, KeyError, TypeError):
                is_same = False
            if not is_same:
                raise ValueError(
                    f"{self.root} is of another result; give another --store, or remove it"
                )
        self.aside = self.root / ".part"
        with _writing_to(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            if not about.exists():
                save_json({"result": result.digest}, about)
            if self.aside.exists():  # left by an interrupted export
                shutil.rmtree(self.aside)

    @contextmanager
    def _events(self, folder: Path) -> Iterator[Any]:
        """Yields an event writer, and renames its folder once it is complete."""
        from tensorboardX import SummaryWriter

        with SummaryWriter(str(self.aside)) as writer:
            yield writer
        folder.parent.mkdir(exist_ok=True)
        self.aside.rename(folder)

    def write_about(self) -> None:
        """Writes the figure and the manifest as events."""
        from PIL import Image

        when = self.result.seconds
        text = json.dumps(dict(self.result.manifest), indent=2)
        with self._events(self.root / "about") as writer:
            code = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown
            writer.add_text("manifest", code, walltime=when)
            if self.result.figure:
                pixels = np.asarray(Image.open(self.result.figure).convert("RGB"))
                writer.add_image("figure", pixels, walltime=when, dataformats="HWC")

    def _folder(self, run: Run) -> Path:
        point, seed = (quote(text, safe=" =,+") for text in (run.point, f"seed={run.seed}"))
        return self.root / point / seed

    def has(self, run: Run) -> bool:
        """Whether the folder of the run exists."""
        return self._folder(run).exists()

    def write(self, run: Run) -> None:
        """Writes a folder with the settings and the curves of the run."""
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import hparams

        with self._events(self._folder(run)) as writer:
            # Write summaries directly, because `add_scalar` warns about every NaN.
            for summary in hparams(run.params, dict.fromkeys(run.curves)):
                writer.file_writer.add_summary(summary, walltime=self.result.seconds)
            for step, values in run.by_round.items():
                scalars = [Summary.Value(tag=k, simple_value=x) for k, x in values.items()]
                one = Summary(value=scalars)
                writer.file_writer.add_summary(one, step, self.result.seconds)


class _WandB:
    """A folder of offline runs of wandb, in one project."""

    def __init__(self, result: Tracked, store: str | None) -> None:
        self.result, self.root = result, Path(store or ".") / "wandb"
        self.place, self.aside = str(self.root), self.root / ".part"
        with _writing_to(self.root):
            shutil.rmtree(self.aside, ignore_errors=True)  # left by an interrupted export
            self.aside.mkdir(parents=True)

    def _id(self, name: str) -> str:
        return hashlib.sha256(f"{self.result.digest} {name}".encode()).hexdigest()[:32]

    def find(self, name: str) -> list[Path]:
        """The folders of a complete run."""
        return list(self.root.glob(f"offline-run-*-{self._id(name)}"))

    @contextmanager
    def _run(self, name: str, config: dict[str, Any]) -> Iterator[Any]:
        """Yields a new run, and moves its folder to the others once it is complete."""
        import wandb

        quiet: Any = {
            "silent": True,
            "console": "off",
            "x_disable_stats": True,
            "x_disable_meta": True,
        }
        where: Any = {"dir": str(self.aside), "mode": "offline", "reinit": "create_new"}
        where["project"] = re.sub(r"[/\\#?%:]", "_", self.result.name)[:128]
        settings = wandb.Settings(**quiet, disable_git=True, save_code=False)
        with wandb.init(
            id=self._id(name), name=name, config=config, settings=settings, **where
        ) as x:
            yield x
        (folder,) = self.aside.glob("wandb/offline-run-*")
        folder.rename(self.root / folder.name)

    def write_about(self) -> None:
        """Writes a run with the manifest as its settings, and the figure."""
        import wandb

        with self._run("about", dict(self.result.manifest)) as writer:
            if self.result.figure:
                writer.log({"figure": wandb.Image(str(self.result.figure))})

    def has(self, run: Run) -> bool:
        """Whether the folder of the run exists."""
        return bool(self.find(run.name))

    def write(self, run: Run) -> None:
        """Writes a run with its settings and curves."""
        with self._run(run.name, run.params) as writer:
            for step, values in run.by_round.items():
                writer.log(values, step=step)
