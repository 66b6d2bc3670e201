"""Experiments and sweeps as they are described in a file, run."""

import json
from pathlib import Path
from typing import Any, Literal

import jax
import xarray as xr

from fedjax_mm.experiments.draws import kind_of
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.fields import Config
from fedjax_mm.files import plain
from fedjax_mm.results.dataset import manifest
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.sweeps.execute import Execution, carry_out, plan_for
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import Plan, make_outline


def run(
    experiment: Experiment,
    execution: Execution | None = None,
    on_divergence: Literal["mark", "stop"] | None = None,
) -> xr.Dataset:
    """Runs every algorithm of an experiment with all its seeds, at every point if it is a sweep.

    Args:
      experiment: what to run.
      execution: how; what is reported, saved and continued.
      on_divergence: as in `sweep`; by default "mark" if there are several points, else "stop".

    Returns:
      A Dataset over ``(algorithm, *axes, seed, round, model)``, as `sweep` explains it.

    Raises:
      DivergenceError: if a model's loss or parameters stop being finite and that is to stop the
        run, naming the algorithm, the seed, the model and the round.
      ValueError, InterruptedRunError, OSError: as in `sweep`; or there is no such data.

    Example:
      >>> experiment = Experiment.model_validate({
      ...     "task": {"name": "quadratic"}, "num_models": 2, "num_rounds": 10, "num_seeds": 3,
      ...     "algorithms": {"MFA-RR": {
      ...         "assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 5}},
      ... })
      >>> dict(run(experiment).sizes)
      {'algorithm': 1, 'seed': 3, 'round': 11, 'model': 2}
    """
    how, config = execution or Execution(), experiment.model_dump()
    with jax.enable_x64(experiment.precision == "float64"):
        grid = _grid(experiment)
        plan = plan_for(grid, how, config)
        return carry_out(
            plan,
            how,
            data=kind_of(grid.shared["data"]),
            config=config,
            on_divergence=on_divergence or ("mark" if experiment.axes else "stop"),
        )


def finished(path: Path, config: Config) -> dict[str, Any] | None:
    """Returns the content of a file that this configuration and code have made, if there is one.

    Args:
      path: a manifest, or a summary that has one.
      config: all settings of the run.
    """
    if Checkpoints(path.parent).has_work or not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    about = content.get("manifest", content)
    now = plain(manifest(config.model_dump(mode="json"), seed=0, data=""))
    same = all(about.get(name) == now[name] for name in ("config", "versions", "git_revision"))
    return content if same and "stopped" not in about else None


def outline(experiment: Experiment, execution: Execution | None = None) -> Plan:
    """Returns what `run` would do, traced but not compiled: programs, batches and local trainings.

    Raises:
      ValueError, OSError: as `run`, but a batch that does not fit is found by compiling alone.
    """
    how = execution or Execution()
    with jax.enable_x64(experiment.precision == "float64"):
        return make_outline(_grid(experiment), split=how.split, limit=how.memory)


@refusing()
def _grid(experiment: Experiment) -> Grid:
    """The runs; data that cannot be had are wrong input."""
    return experiment.grid()
