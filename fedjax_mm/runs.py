"""Running an experiment: one compiled program per algorithm, all seeds at once, with progress."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from fedjax_mm.devices import layout
from fedjax_mm.experiment import Experiment, FedAvgConfig
from fedjax_mm.results import manifest, to_dataset
from fedjax_mm.simulate import State, Trace, advance, init

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how much of how much is done."""

_NUM_SEGMENTS = 20  # progress reports of one algorithm


def run(experiment: Experiment, progress: Progress | None = None) -> xr.Dataset:
    """Runs every algorithm of an experiment with all its seeds.

    Args:
      experiment: what to run.
      progress: called before and during every algorithm with a label, and the rounds done and to
        do.

    Returns:
      A Dataset over ``(algorithm, seed, round, model)``; its attribute ``manifest`` holds versions,
      device, seed, configuration and the wall seconds of compiling and running.

    Raises:
      FloatingPointError: if a model's parameters or loss stop being finite, naming the algorithm,
        the seed, the model and the round.

    Example:
      >>> experiment = Experiment.model_validate({
      ...     "task": {"name": "quadratic"}, "num_models": 2, "num_rounds": 10, "num_seeds": 3,
      ...     "algorithms": {"MFA-RR": {
      ...         "assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 5}},
      ... })
      >>> dict(run(experiment).sizes)
      {'algorithm': 1, 'seed': 3, 'round': 11, 'model': 2}
    """
    wall = {"compile": 0.0, "run": 0.0}
    results: list[xr.Dataset] = []
    total = experiment.num_rounds * len(experiment.algorithms)
    with jax.enable_x64(experiment.precision == "float64"):
        for label, config in experiment.algorithms.items():
            before = len(results) * experiment.num_rounds

            def report(what: str, done: int, before: int = before) -> None:
                if progress:
                    progress(what, before + done, total)

            trace = _run_algorithm(experiment, config, label, report, wall)
            results.append(to_dataset(trace, ("seed",)))
        about = manifest(experiment.model_dump(), seed=experiment.seed, data="synthetic")
    dataset = xr.concat(results, xr.Variable("algorithm", list(experiment.algorithms)))
    dataset = dataset.assign_coords(seed=np.arange(experiment.num_seeds))
    dataset.attrs["manifest"] = about | {"wall_seconds": wall}
    return dataset


def _run_algorithm(
    experiment: Experiment,
    config: FedAvgConfig,
    label: str,
    report: Callable[[str, int], None],
    wall: dict[str, float],
) -> Trace:
    """One algorithm with all seeds, in segments, so that progress can be shown between them."""
    task = experiment.task.build()
    algorithm = config.build(experiment.num_models)
    assignment = config.assignment.build(experiment.task.num_clients, experiment.num_models)

    where = layout(experiment.num_seeds)

    def start(rng_key: Any, shared: Any) -> State:
        task, params = shared
        return init(rng_key, task, algorithm, assignment, params)

    def program(num_rounds: int) -> Any:
        def segment(state: State, task: Any) -> tuple[State, Trace]:
            return advance(
                state,
                task,
                algorithm,
                assignment,
                num_rounds,
                client_map=experiment.client_map,
                record_every=experiment.record_every,
                client_axis=where.client_axis,
            )

        return jax.jit(where.over(segment), donate_argnums=0).lower(state, task).compile()

    report(f"{label}: compiling", 0)
    clock = time.perf_counter()
    keys = seed_keys(experiment.seed, where.padded(experiment.num_seeds))
    state = jax.jit(where.over(start))(keys, (task, experiment.task.initial_params()))
    segments = _segments(experiment.num_rounds, experiment.record_every)
    programs = {num_rounds: program(num_rounds) for num_rounds in set(segments)}
    wall["compile"] += time.perf_counter() - clock

    clock = time.perf_counter()
    done, traces = 0, []
    for num_rounds in segments:
        report(label, done)
        state, trace = programs[num_rounds](state, task)
        traces.append(jax.tree.map(lambda x: x[: experiment.num_seeds], jax.device_get(trace)))
        _check_finite(traces[-1], label)
        done += num_rounds
    report(label, done)
    wall["run"] += time.perf_counter() - clock
    return _join(traces)


def seed_keys(seed: int, num_seeds: int) -> jax.Array:
    """One key per replica; replica i has the same key however many there are."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(num_seeds))


def _segments(num_rounds: int, record_every: int) -> list[int]:
    """The rounds of each segment: equal but for a shorter last one."""
    length = -(-num_rounds // (record_every * _NUM_SEGMENTS)) * record_every
    return [min(length, num_rounds - done) for done in range(0, num_rounds, length)]


def _check_finite(trace: Trace, label: str) -> None:
    """Raises `FloatingPointError` that names the first round in which a model diverged."""
    for name, values in trace.metrics.items():
        seeds, records, models = np.nonzero(~np.isfinite(values))
        if len(records):
            first = np.argmin(records)
            raise FloatingPointError(
                f"{label} diverged: {name} of model {models[first] + 1}, seed {seeds[first]}, is "
                f"not finite in round {trace.round[0, records[first]]}; lower the learning rate"
            )


def _join(traces: list[Trace]) -> Trace:
    """Consecutive segments as one trace; a segment's first record repeats the one before it."""
    first, *later = traces
    return jax.tree.map(
        lambda start, *rest: np.concatenate([start, *(part[:, 1:] for part in rest)], axis=1),
        first,
        *later,
    )
