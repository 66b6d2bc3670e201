"""Labelled results, as Datasets from traces, with manifests and NetCDF files."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from fedjax_mm.base.contract import MESSAGES
from fedjax_mm.checks.annotations import brief
from fedjax_mm.checks.instances import check_instance
from fedjax_mm.results.labels import check_selectable, label
from fedjax_mm.results.manifest import Manifest, differences
from fedjax_mm.simulator.personal import PREFIX
from fedjax_mm.simulator.record import MESSAGE_BITS, Counts, Trace, own_dims
from fedjax_mm.tools.files import write_aside

_BITS = 32  # per uncompressed number

_LONG_NAMES = {
    "loss": "global loss F(w)",
    "excess_loss": "excess loss F(w) - F*",
    "distance": "distance to the minimizer |w - w*|",
    "personal_accuracy": "accuracy of the clients' models",
    "personal_loss": "loss of the clients' models",
    "appeal": "GM-Appeal, the fraction of satisfied clients",
    "client_updates": "local trainings so far",
    "gradients": "gradients computed so far",
    "idle_rounds": "rounds so far in which nobody trained the model",
    "parameters_up": "parameters sent to the server so far",
    "parameters_down": "parameters sent to clients so far",
    "parameters_mixed": "parameters sent to other models so far",
    "bits_up": "bits sent to the server so far",
    "diverged": "first recorded round whose loss is not finite, or -1",
}


@brief
def to_dataset(trace: Trace, dims: Mapping[str, Any] | Sequence[str] = ()) -> xr.Dataset:
    """Converts a trace to a Dataset with named dimensions.

    Counts are cumulative 64-bit integers.

    Args:
      trace: the trace from `simulate`, with extra leading axes if it was vmapped.
      dims: the names of those leading axes, outermost first, with or without coordinates. Random
        keys are numbered from 0.

    Returns:
      A Dataset over ``(*dims, "round", "model")`` with the task's metrics and ``client_updates``,
      ``gradients``, ``idle_rounds``, ``parameters_up``, ``parameters_down``, and ``diverged``, the
      first recorded round in which a model's loss is not finite, or -1. Models are numbered from 1,
      as in the papers. An array metric has further dimensions: ``client``, starting at 0,
      for the task's `per_client` metrics, and ``NAME_0`` and so on for others. If some algorithm
      has personal models, ``personal_accuracy``, ``personal_loss`` and the like say what clients
      get from every algorithm: without personal models they are those of the global model. Of
      tasks with requirements they stay NaN.

    Warns:
      UserWarning: if no client trained any model in a run, or if a single run diverged.

    Raises:
      ValueError: if `dims` do not fit the trace, or clash with an argument of `sel`.
      OverflowError: if more than 2^31 gradients were computed between two records.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, mfa_rand, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> def run(rng_key, learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=3)
      ...     return simulate(rng_key, quadratic(4, 2, mu=0.1), algorithm, mfa_rand(4, 2), 5)[1]
      >>> seeds, rates = jax.random.split(jax.random.key(0), 3), jax.numpy.array([0.05, 0.1])
      >>> traces = jax.jit(jax.vmap(jax.vmap(run, (0, None)), (None, 0)))(seeds, rates)
      >>> result = to_dataset(traces, {"learning_rate": rates, "seed": seeds})
      >>> dict(result.sizes)
      {'learning_rate': 2, 'seed': 3, 'round': 6, 'model': 2}
      >>> result.gradients.sel(learning_rate=0.1, seed=2, round=5, model=1).item()
      30
    """
    check_instance("trace", trace, Trace, "give the second of the two that simulate returns")
    dataset = labelled(trace, dims)
    if not dims and "diverged" in dataset and (rounds := dataset.diverged.values).max() >= 0:
        model = min(np.flatnonzero(rounds >= 0), key=rounds.__getitem__)
        remedy = "lower the learning rate" if rounds[model] else "check the data and the start"
        warnings.warn(
            f"the run diverged: the loss of model {model + 1} is not finite in round "
            f"{rounds[model]}; {remedy}",
            stacklevel=3,
        )
    if words := nobody(dataset):
        warnings.warn(words, stacklevel=3)
    return dataset


def labelled(trace: Trace, dims: Mapping[str, Any] | Sequence[str]) -> xr.Dataset:
    """The Dataset of a trace, as described in `to_dataset`, without its warnings."""
    check_counts(trace)
    *leading, _, num_models = np.shape(trace.client_updates)
    coords = _coordinates(dims, leading)
    axes = (*dims, "round", "model")
    # Counts between records are int32 on the device, but their sums may need 64 bits.
    counts = {name: _cumulative(getattr(trace, name)) for name in Counts._fields}
    updates = counts["client_updates"]
    sizes = {
        "parameters_up": updates * np.asarray(trace.upload_size, np.int64),
        "parameters_down": updates * np.asarray(trace.download_size, np.int64),
    }
    if (sent := trace.metrics.get(MESSAGES)) is not None:
        one = np.asarray(trace.mixed_size, np.int64)
        sizes["parameters_mixed"] = np.nan_to_num(np.asarray(sent)).astype(np.int64) * one
    if (bits := trace.metrics.get(MESSAGE_BITS)) is not None:
        # The metric is NaN for models with uncompressed updates.
        plain = _BITS * np.asarray(trace.upload_size, np.int64)
        sizes["bits_up"] = updates * np.where(np.isnan(bits), plain, bits)
    metrics = {
        name: ((*axes, *own_dims(name, np.ndim(x) - len(axes), name in trace.per_client)), x)
        for name, x in trace.metrics.items()
    }
    coords["round"] = _rounds(trace.round)
    coords["model"] = np.arange(1, num_models + 1)
    for metric in metrics.keys() & set(trace.per_client):
        coords["client"] = np.arange(np.shape(trace.metrics[metric])[len(axes)])
    dataset = xr.Dataset(
        {name: (dims, np.asarray(x)) for name, (dims, x) in metrics.items()}
        | {name: (axes, x) for name, x in (counts | sizes).items()},
        coords,
    )
    _share_personal(dataset)
    if (loss := trace.metrics.get("loss")) is not None:
        losses = np.moveaxis(np.asarray(loss), len(axes) - 2, 0)
        is_finite = np.isfinite(losses).all(axis=tuple(range(len(axes), losses.ndim)))
        first = first_not_finite(is_finite)
        rounds = np.where(first < 0, -1, coords["round"][first]).astype(np.int32)
        dataset["diverged"] = (*dims, "model"), rounds
    for name in dataset.data_vars:
        dataset[name].attrs["long_name"] = _LONG_NAMES.get(str(name), str(name))
    return dataset


def _share_personal(dataset: xr.Dataset) -> None:
    """Copies the metrics of the global model to the personal models of clients that use it."""
    if "train_appeal" in dataset:  # the losses of `requiring` are other means, over test examples
        return
    for name in [str(name) for name in dataset.data_vars if str(name).startswith(PREFIX)]:
        short = name.removeprefix(PREFIX)
        common = next((name for name in (short, f"test_{short}") if name in dataset), None)
        if common is not None:
            has_own = dataset[name].notnull().any("round")
            dataset[name] = dataset[name].where(has_own, dataset[common])


def first_not_finite(is_finite: np.ndarray) -> np.ndarray:
    """First non-finite record, or -1, from ``bool[records, ...]``."""
    return np.where(is_finite.all(0), -1, np.argmin(is_finite, axis=0))


def _cumulative(counts: Any) -> np.ndarray:
    """Cumulative sums over the records, which are the second-to-last axis."""
    # Sum in place, because the result then keeps the order of its axes in memory, which is faster.
    sums = np.asarray(counts).astype(np.int64)
    return np.cumsum(sums, axis=-2, out=sums)


def nobody(dataset: xr.Dataset) -> str | None:
    """Describes the runs in which no client trained any model, or returns None."""
    last = dataset[["client_updates", "idle_rounds"]].isel(round=-1).sum("model")
    # Runs that met their target at the start, or never began, have no idle rounds.
    is_idle = (last.client_updates == 0) & (last.idle_rounds > 0)
    if not is_idle.any():
        return None
    first = is_idle.values.argmax()
    at = dict(zip(is_idle.dims, np.unravel_index(first, is_idle.shape), strict=True))
    names = [dim for dim in is_idle.dims if dim in is_idle.coords]
    which = f"{int(is_idle.sum())} of {is_idle.size} runs" if is_idle.dims else "this trace"
    if names:
        point = [label(str(name), is_idle[name].values[at[name]]) for name in names]
        which += f", first in {', '.join(point)}"
    return (
        f"nobody trained in any round of {which}: the assignment chose no client. variance_reduced "
        "by losses chooses none whose loss is 0, appealing none that no model appeals to, and "
        "available none that is absent; change the start, thresholds or law"
    )


def _coordinates(
    dims: Mapping[str, Any] | Sequence[str], sizes: Sequence[int]
) -> dict[str, np.ndarray]:
    """Validates and returns the coordinates of the leading axes."""
    if isinstance(dims, str) or len(dims) != len(sizes):
        example = ", ".join(f'"name_{i}": range({size})' for i, size in enumerate(sizes))
        raise ValueError(
            f"the trace has {len(sizes)} leading axes, of sizes {tuple(sizes)}, and dims are "
            f"{_words(dims)}; name each, outermost first, as in to_dataset(trace, {{{example}}})"
        )
    coords = {}
    for name, size in zip(dims, sizes, strict=True):
        check_selectable(name)
        if not isinstance(dims, Mapping):
            continue
        values = dims[name]
        if jnp.issubdtype(getattr(values, "dtype", np.dtype(object)), jax.dtypes.prng_key):
            values = range(len(values))
        coords[name] = np.asarray(values)
        if coords[name].shape != (size,):
            raise ValueError(
                f"dims[{name!r}] has shape {coords[name].shape}, but the trace's axis has {size} "
                "entries; give one coordinate for each, outermost axis first"
            )
    return coords


def _rounds(rounds: Any) -> np.ndarray:
    """The rounds of the records, or raises `ValueError` if they are on another axis."""
    each = np.reshape(rounds, (-1, np.shape(rounds)[-1]))
    if (each != each[0]).any() or (np.diff(each[0]) <= 0).any():
        raise ValueError(
            f"the trace's rounds, of shape {np.shape(rounds)}, do not grow along the last axis "
            "alike in all runs; leave out out_axes of jax.vmap, so that axes of runs come first, "
            "and give traces of the same rounds"
        )
    return each[0]


def _words(dims: Mapping[str, Any] | Sequence[str]) -> str:
    return repr(dims) if isinstance(dims, str) else ", ".join(map(repr, dims)) or "not given"


def check_counts(counts: Any) -> None:
    """Raises `OverflowError` if a count between two records overflowed."""
    for name in Counts._fields:
        if np.min(np.asarray(getattr(counts, name)), initial=0) < 0:
            raise OverflowError(
                f"{name} between two records do not fit 32 bits; record more often (record_every)"
            )


def save_dataset(dataset: xr.Dataset, path: Path | str) -> None:
    """Writes a compressed NetCDF file atomically.

    Args:
      dataset: a result of `run`, `sweep` or `to_dataset`.
      path: the file's path; its directory must exist.

    Raises:
      OSError: if the file cannot be written, for example because the disk is full.

    Example:
      >>> import pathlib, tempfile
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     path = pathlib.Path(directory, "result.nc")
      ...     save_dataset(xr.Dataset({"loss": ("round", [1.0, 0.5])}), path)
      ...     xr.open_dataset(path).loss.values.tolist()
      [1.0, 0.5]
    """
    encoding = {name: {"zlib": True, "complevel": 1} for name in dataset.data_vars}

    def write(aside: Path) -> None:
        try:
            dataset.to_netcdf(aside, engine="netcdf4", encoding=encoding)
        except RuntimeError as error:  # NetCDF's error for a full disk
            raise OSError(str(error)) from error

    write_aside(Path(path), write)


_SAME = ("config", "seed", "data", "versions", "git_revision", "prng")  # of all seeds of a result


@brief
def join_seeds(first: xr.Dataset, *later: xr.Dataset) -> xr.Dataset:
    """Joins the results of consecutive seeds as if they had been computed in one run.

    Args:
      first: a result of `run` or `sweep`.
      later: results that differ from it in the seeds alone, in order, each with the `first_seed`
        that follows the last seed before it.

    Raises:
      ValueError: if seeds do not follow one another, or results differ in settings, versions, other
        coordinates, or values that all seeds share.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rr, sweep
      >>> from fedjax_mm.sweeps import Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> one = Setup(quadratic(6, 4, mu=0.1), fedavg(0.1, local_steps=5), mfa_rr(6, 2))
      >>> result = sweep(one, num_rounds=3, num_seeds=2)
      >>> both = join_seeds(result, sweep(one, num_rounds=3, num_seeds=4, first_seed=2))
      >>> both.seed.values.tolist(), both.attrs["manifest"]["seed"]
      ([0, 1, 2, 3, 4, 5], 0)
    """
    for each in (first, *later):
        check_instance("a result", each, xr.Dataset, "give one after another: join_seeds(a, b)")
    return reduce(_join_two, later, first)


def join_some(result: xr.Dataset, more: xr.Dataset) -> xr.Dataset:
    """Joins further seeds of some of a result's points, and NaN for the others."""
    dims = [dim for dim in result.dims if dim in result.coords and dim != "seed"]
    shared = {name: x for name, x in result.items() if "seed" not in x.dims}
    missing = {
        name: result[name].isel(seed=[0] * more.sizes["seed"]).drop_vars("seed") * np.nan
        for name in result.data_vars.keys() - more.data_vars.keys() - shared.keys()
    }
    about, others = map(_checked_manifest, (result, more))
    config = about["config"] | {k: v for k, v in others["config"].items() if k == "num_seeds"}
    more = more.reindex({dim: result[dim] for dim in dims}).assign(missing).assign(shared)
    return join_seeds(result, more.assign_attrs(manifest=others | {"config": config}))


def _join_two(result: xr.Dataset, more: xr.Dataset) -> xr.Dataset:
    about = joined_manifest(result, more)
    # Values shared by all seeds must not depend on the seeds, hence "equals".
    how: Any = {"data_vars": "minimal", "coords": "minimal", "compat": "equals", "join": "exact"}
    both = xr.concat([result, more], "seed", combine_attrs="override", **how)
    return both.assign_attrs(manifest=about)


def joined_manifest(result: xr.Dataset, more: xr.Dataset) -> Manifest:
    """The manifest of two joined results.

    Raises:
      ValueError: if the second does not continue the first.
    """
    about, others = map(_checked_manifest, (result, more))
    before, now = (_without_seeds(each) for each in (about, others))
    if changes := list(differences(before, now)):
        raise ValueError(f"the results are of different runs: {'; '.join(changes[:3])}")
    expected, found = int(result.seed[-1]) + 1, int(more.seed[0])
    if expected != found:
        raise ValueError(
            f"a result ends with seed {expected - 1}, and the next begins with seed {found}; give "
            f"that of first_seed={expected}"
        )
    seconds = {name: x + others["wall_seconds"][name] for name, x in about["wall_seconds"].items()}
    about = about | {"wall_seconds": seconds}
    if "num_seeds" in about["config"]:
        num_seeds = result.sizes["seed"] + more.sizes["seed"]
        about |= {"config": about["config"] | {"num_seeds": num_seeds}}
    if "draws" in about and about["data"] != "real":  # real data are shared by all seeds
        about |= {"draws": about["draws"] + others["draws"]}
    return about


def _without_seeds(about: Manifest) -> dict[str, Any]:
    """The entries that all seeds of a result share."""
    config = {name: x for name, x in about["config"].items() if name != "num_seeds"}
    return {name: about.get(name) for name in _SAME} | {"config": config}


def _checked_manifest(result: xr.Dataset) -> Manifest:
    """The manifest of a result with seeds."""
    check_instance("a result", result, xr.Dataset, "give one of `run` or `sweep`")
    made = result.attrs.get("manifest")
    if made is None or "seed" not in result.dims:
        raise ValueError("a result has no manifest or no seeds; give one of `run` or `sweep`")
    return Manifest(made) if type(made) is str else made


LARGE_BYTES = 2**30
"""The size from which a result is read lazily."""


def load_dataset(path: Path) -> xr.Dataset:
    """Loads a NetCDF file, with its manifest as a mapping in `attrs`.

    A Dataset larger than `LARGE_BYTES` is opened instead, and reads each selection until it is
    closed. Close it before the file is replaced, because NetCDF knows open files by name.
    """
    with ExitStack() as stack:
        dataset = stack.enter_context(xr.open_dataset(path, engine="netcdf4"))
        if dataset.nbytes > LARGE_BYTES:
            stack.pop_all()
        else:
            dataset = dataset.load().drop_encoding()
    if "manifest" in dataset.attrs:  # in place, because a copy could not be closed
        dataset.attrs["manifest"] = Manifest(str(dataset.attrs["manifest"]))
    return dataset
