"""Remarks 1 and 2 and Lemmas 1 to 4, compared with assignments and runs of MFA-RR."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import fedcluster, mfa_rand, mfa_rr
from fedjax_mm.base import Assignment, Batching, Index, Look, Metrics, Task
from fedjax_mm.claims import at_least, fact, more, within
from fedjax_mm.experiments.fields import Count, TwoOrMore
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.bhuyan2022.bounds import NAMES, ratios
from fedjax_mm.papers.bhuyan2022.gains import ASSIGNMENTS
from fedjax_mm.papers.bhuyan2022.regression import (
    Growing,
    Sample,
    growing_fedavg,
    known,
    learning_rate,
    run_growing,
    sample_size,
    theorem_2,
)
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, check, finding, ruling
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.papers.training import train
from fedjax_mm.papers.values import Several
from fedjax_mm.results.labels import describe, places
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.least_squares import LeastSquares
from fedjax_mm.tasks.view import View
from fedjax_mm.tasks.with_metrics import with_metrics
from fedjax_mm.theory import mfa, mfa_lemmas
from fedjax_mm.theory.problem import FloatArray
from fedjax_mm.theory.validation import ROUND_OFF, tightest

_WHAT = {
    "lemma-1": "variance of the sampled gradients",
    "lemma-2": "distance after E centralized steps",
    "lemma-3": "error e of local gradients",
    "lemma-4": "error d of sampled gradients",
}
_RECURSION = "equation-32"
_TABLE_3 = ((1, 2, 3), (3, 1, 2), (2, 3, 1))
"""Cohorts of models 1 to 3 in the rounds of a frame, from the paper's example of MFA-RR."""
_NOTHING = 1e-12  # round-off in float64
_MARGIN = 0.01  # allowed difference of probabilities
_FASTER = 0.1  # least difference of exponents that counts as considerably faster
_ALIKE = 0.05  # relative difference of errors that count as equal


class Remarks(Growing):
    """Settings of the lemmas' runs and of the drawn assignments."""

    num_examples: TwoOrMore = 40
    samples: tuple[Sample] = ("growing",)
    left_out: tuple[float] = (0.95,)
    num_rounds: Count = 200
    record_every: Annotated[Count, Field(le=1)] = 1
    matched: Several[Count] = (2, 3, 4, 6, 12)
    """The values of M in Remark 1."""
    num_frames: Count = 100
    """The number of frames per seed in Remark 1."""


class _Sums(NamedTuple):
    """A model and its accumulated errors from sampling examples.

    Attributes:
      w: the model.
      noise: minus the sum of sampled-gradient errors, weighted by the learning rates and 1/N.
      squares: the sum of each client's squared errors, weighted in the same way.
    """

    w: Float[Array, " dim"]
    noise: Float[Array, " dim"]
    squares: Float[Array, " clients"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Watched(View):
    """Ridge regression with `_Sums` as parameters, where FedAvg trains w and sums up the rest."""

    def init(self, rng_key: PRNGKeyArray) -> _Sums:
        w = self.task.init(rng_key)
        return _Sums(w, jnp.zeros_like(w), jnp.zeros(self.num_clients, w.dtype))

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Any:
        return self.task.batch(rng_key, client, step, how), client

    def loss(self, params: _Sums, batch: Any) -> Float[Array, ""]:
        (taken, weights), client = batch
        # Samples without replacement permute all of the client's examples and give omitted examples
        # a weight of 0.
        everything = taken, jnp.ones_like(weights)
        gradient = jax.grad(self.task.loss)
        wrong = gradient(params.w, (taken, weights)) - gradient(params.w, everything)
        wrong = lax.stop_gradient(wrong)
        # The gradients of these terms make a local step add to the noise and the squares.
        added = wrong @ params.noise + wrong @ wrong * params.squares[client]
        return self.task.loss(params.w, (taken, weights)) + added

    def metrics(self, rng_key: PRNGKeyArray, params: _Sums) -> Metrics:
        sums = {"w": params.w, "noise": params.noise, "squares": params.squares}
        return self.task.metrics(rng_key, params.w) | sums


def watched(task: LeastSquares) -> _Watched:
    """A task whose runs record the quantities bounded by the lemmas."""
    return _Watched(task, task.num_clients)


def run(config: Remarks, execution: Execution | None = None) -> xr.Dataset:
    """The lemmas' quantities in every frame, FedCluster's errors, and shares of pairs."""
    result = run_growing(config, watched, execution=execution).isel(sample=0, left_out=0, drop=True)
    cases = [(M, E) for M in config.num_models for E in config.local_steps]
    frames = [_frames(result.sel(num_models=M, local_steps=E), M, E, config) for M, E in cases]
    # Each case has rounds / M frames. Pad the shorter ones with NaN.
    lemmas = xr.combine_by_coords(frames, data_vars="minimal", join="outer")
    return xr.merge(
        [
            lemmas,
            *(part(config) for part in (_fedcluster, _fixed_subsets, _one_model, _assignments)),
        ],
        join="exact",
        combine_attrs="drop",
    ).assign_attrs(result.attrs)


class _Errors(NamedTuple):
    """Error vectors of all frames, ``[seeds, frames, models, ...]``.

    Attributes:
      start: w_1^l - w*.
      end: w_1^{l+1} - w*.
      central: u_{E+1} - w*, after E steps of centralized descent from w_1^l.
      e: the error of eq. (24), computed by eq. (28).
      d: the error of eq. (27).
      variance: the variance of every client's sampled gradients.
    """

    start: FloatArray
    end: FloatArray
    central: FloatArray
    e: FloatArray
    d: FloatArray
    variance: FloatArray


def _errors(ends: xr.Dataset, alpha: FloatArray, E: int, config: Remarks) -> _Errors:
    """Computes the errors of the frames from the sums at their ends."""
    w, noise, squares = (ends[name].values for name in _Sums._fields)
    constants, step = known(config), alpha[:, None, None]
    best = constants.minimizer
    descent = np.linalg.matrix_power(np.eye(len(best)) - step * constants.hessian, E)
    start, end = w[:, :-1] - best, w[:, 1:] - best
    central = np.einsum("fij,sfmj->sfmi", descent, start)
    d = -np.diff(noise, axis=1) / step
    variance = -np.diff(squares, axis=1) * config.num_clients / (step * E)
    return _Errors(start, end, central, (end - central) / step + d, d, variance)


def _frames(result: xr.Dataset, M: int, E: int, config: Remarks) -> xr.Dataset:
    """The lemmas' quantities and bounds in every frame of a case, averaged over models."""
    constants, problem = known(config), dataclasses.replace(known(config).problem, M=M, E=E)
    # Frames end at records 0, M, 2 M, ...
    ends = result.isel(round=slice(None, None, M), model=slice(M))
    frame = np.arange(1, ends.sizes["round"])
    alpha = constants.rate.at(frame)
    errors = _errors(ends, alpha, E, config)
    with jax.enable_x64(True):
        size = sample_size(config, M, E, config.left_out[0])
        N_s = np.asarray(jax.vmap(size)(jnp.asarray(M * (frame - 1) + 1)))
    start, end, central, e, d = (np.linalg.norm(x, axis=-1) for x in errors[:-1])
    each = mfa_lemmas.lemma_2(start, problem, alpha[:, None])
    V, mean = constants.variance(config.left_out[0], E), start.mean((0, 2))
    bounds = [
        mfa_lemmas.lemma_1(N_s, problem),
        each.mean((0, 2)),
        mfa_lemmas.lemma_3(alpha, problem),
        mfa_lemmas.lemma_4(N_s, problem),
        mfa_lemmas.recursion(mean, problem, alpha, V),
    ]
    # Use the client with the largest variance, because Lemma 1 must hold for every client.
    variance = errors.variance.mean(2)
    worst = variance.mean(0).argmax(-1)[None, :, None]
    values = [np.take_along_axis(variance, worst, -1)[..., 0]]
    values += [x.mean(-1) for x in (central, e, d, end)]
    # Average over w_{jM}, j = 0, ..., T - 1, as in Remark 2.
    average, half = start.mean(2).cumsum(1) / frame, len(frame) // 2
    fall = np.log(average[:, half - 1] / average[:, -1]) / np.log(len(frame) / half)
    proven = np.stack([np.broadcast_to(x, alpha.shape) for x in bounds])
    variables = {
        "value": (("lemma", "seed", "frame"), np.stack(values)),
        "lemma_bound": (("lemma", "frame"), proven),
        "average_exponent": ("seed", fall),
        "every_start": ("seed", (1 - central / each).min((1, 2))),
    }
    found = xr.Dataset(variables, {"lemma": [*_WHAT, _RECURSION], "frame": frame})
    return found.expand_dims(num_models=[M], local_steps=[E])


def _norms(task: LeastSquares, params: Array) -> Metrics:
    return {"gradient": jnp.linalg.norm(task.hessian @ (params - task.minimizer))}


def _fedcluster(config: Remarks) -> xr.Dataset:
    """FedCluster's mean squared gradients and errors over T learning rounds."""
    clusters, steps = max(config.num_models), max(config.local_steps)

    def build(task: Task, local_steps: int) -> Setup:
        size = sample_size(config, clusters, local_steps, config.left_out[0])
        algorithm = fedavg(
            local_sgd(
                learning_rate(config, clusters),
                steps=local_steps,
                batch_size=lambda t: size(jnp.ones_like(t)),
            )
        )
        return Setup(task, algorithm, fedcluster(config.num_clients, clusters))

    result = _short_sweep(config, build, clusters, local_steps=[steps])
    # Select w_{jM} for j = 0, ..., T - 1.
    result = result.isel(local_steps=0, model=0, round=slice(-1), drop=True)
    count = np.arange(1, result.sizes["round"] + 1)
    found = {
        "cluster_gradient": (result.gradient**2).cumsum("round") / count,
        "cluster_error": result.distance.cumsum("round") / count,
    }
    result = xr.Dataset(found).drop_vars("round").rename(round="T").assign_coords(T=count)
    return result.transpose("seed", "T")


def _fixed_subsets(config: Remarks) -> xr.Dataset:
    """The errors of a model that fixed subsets train in turn, like one of MFA-RR's.

    The samples grow, or keep their first size.
    """

    def build(task: Task, sample: Sample, num_models: int, local_steps: int) -> Setup:
        algorithm = growing_fedavg(config, num_models, local_steps, config.left_out[0], sample)
        return Setup(task, algorithm, fedcluster(config.num_clients, num_models))

    axes = {"num_models": config.num_models, "local_steps": config.local_steps}
    result = _short_sweep(config, build, 1, sample=["growing", "fixed"], **axes).isel(model=0)
    return xr.Dataset({"fixed_subsets": result.distance.rename(round="subset_round")})


def _one_model(config: Remarks) -> xr.Dataset:
    """The errors of MFA-Rand with M models and with one, relative to the former's mean."""
    M, E = max(config.num_models), max(config.local_steps)

    def build(task: Task, simulated: int) -> Setup:
        algorithm = growing_fedavg(config, M, E, config.left_out[0])
        size = config.num_clients // M
        return Setup(
            task, algorithm, mfa_rand(config.num_clients, simulated, cohort_size=size * simulated)
        )

    found = _short_sweep(config, build, M, simulated=[M, 1]).distance
    found = found.isel(round=slice(found.sizes["round"] // 2, None)).mean(("model", "round"))
    found = found / found.sel(simulated=M).mean("seed", skipna=False).drop_vars("simulated")
    return xr.Dataset({"one_model": found.sel(simulated=1, drop=True)})


def _short_sweep(
    config: Remarks, build: Callable[..., Setup], record_every: int, **axes: Sequence[Any]
) -> xr.Dataset:
    """Sweeps ridge regression for whole frames of the largest M.

    Nothing is saved, because checkpoints hold a single sweep.
    """
    rounds = config.num_rounds // max(config.num_models) * max(config.num_models)
    with jax.enable_x64(True):
        build = partial(build, with_metrics(config.task(), _norms))
        return train([], build, axes, config, num_rounds=rounds, record_every=record_every)


def _assignments(config: Remarks) -> xr.Dataset:
    """The shares of client-model pairs that occur never or once in a frame, for every M."""
    keys = jax.random.split(jax.random.key(config.seed), config.num_seeds)
    shares = [
        [_left_out(make(config.num_clients, M), M, config.num_frames, keys) for M in config.matched]
        for make in ASSIGNMENTS.values()
    ]
    coords = {"algorithm": list(ASSIGNMENTS), "matched": list(config.matched)}
    over = ("algorithm", "matched", "pairs", "seed")
    dataset = xr.Dataset({"pairs_share": (over, np.array(shares))}, coords)
    return dataset.assign_coords(pairs=["never", "once"])


def _left_out(
    assignment: Assignment, M: int, num_frames: int, keys: PRNGKeyArray
) -> Float[np.ndarray, "2 seeds"]:
    """The shares of pairs that occur never and exactly once in frames of M rounds."""
    assign: Callable[..., Any] = assignment.assign  # both methods ignore the models

    def of_seed(key: PRNGKeyArray) -> Float[Array, "2"]:
        def one_round(state: Any, t: Array) -> tuple[Any, Array]:
            cohort, state = assign(jax.random.fold_in(key, t), t, state, Look())
            pairs = jnp.zeros((assignment.num_clients, M), int)
            # Do not count empty slots, because their number -1 would index the last client.
            return state, pairs.at[cohort.clients, cohort.models].add(cohort.clients >= 0)

        rounds = jnp.arange(1, M * num_frames + 1)
        _, pairs = lax.scan(one_round, assignment.init(key, Look()), rounds)
        counts = pairs.reshape(num_frames, M, *pairs.shape[1:]).sum(1)
        return jnp.stack([(counts == times).mean() for times in (0, 1)])

    return np.asarray(jax.jit(jax.vmap(of_seed))(keys)).T


def follows_table_3(assignment: Assignment) -> bool:
    """Whether an assignment of three models follows Table 3 for two frames."""
    key = jax.random.key(0)
    assign: Callable[..., Any] = assignment.assign  # the assignment ignores the models
    state, first, follows = assignment.init(key, Look()), np.empty((0, 0)), []
    for t in range(1, 1 + 2 * len(_TABLE_3)):
        cohort, state = assign(jax.random.fold_in(key, t), t, state, Look())
        trained, place = np.asarray(cohort.clients).reshape(3, -1), (t - 1) % len(_TABLE_3)
        first = trained if place == 0 else first
        follows.append((trained == first[np.array(_TABLE_3[place]) - 1]).all())
    return bool(np.all(follows))


def _averages(config: Remarks, T: np.ndarray) -> xr.DataArray:
    """Theorem 2's bound, averaged over the rounds up to T, for every M and E."""
    t = xr.DataArray(np.arange(1, T.max() + 1), dims="t")
    means = theorem_2(t, config, _cases(config)).cumsum("t") / t
    return means.isel(t=T - 1).rename(t="T").rename(NAMES)


def _exponent(average: xr.DataArray) -> xr.DataArray:
    """Minus the slope of the logarithms over the second half of the frames."""
    frames = average.sizes["subset_round"]
    before, after = (average.isel(subset_round=end, drop=True) for end in (frames // 2 - 1, -1))
    found: xr.DataArray = np.log(before / after) / np.log(frames / (frames // 2))
    return found


def _cases(config: Remarks) -> xr.Dataset:
    axes = {"num_models": config.num_models, "local_steps": config.local_steps}
    cases = xr.Dataset(coords={name: list(values) for name, values in axes.items()})
    return cases.assign_coords(left_out=config.left_out[0])


def measure(result: xr.Dataset, config: Remarks) -> xr.Dataset:
    """The slack in the lemmas' bounds, the shares of pairs, and exponents of averages."""
    result = result.rename(NAMES)
    bound, value = result.lemma_bound, result.value
    # For M = E = 1 and for complete samples, the bounds and the measured values are both 0.
    room = xr.where(bound > 0, 1 - value / bound.where(bound > 0, 1), -value)
    room = tightest(room.where(value.notnull()), "frame")
    room = xr.where(room.lemma == "lemma-2", result.every_start, room)
    ratio = (bound / value.mean("seed")).where(bound > 0)
    ends = np.array([10**5, 10**6])
    first, last = _averages(config, ends).transpose("T", ...)
    # Find the smallest c for which FedCluster's own bound, on gradients, holds in these runs.
    T, problem = result["T"], known(config).problem
    constant = (np.sqrt(T) * result.cluster_gradient.mean("seed")).max()
    cases = {"M": result.M.max(), "E": result.E.max()}
    # Select w_{jM} and average over j, as for MFA-RR.
    starts = result.fixed_subsets.sel(cases).isel(subset_round=slice(0, -1, int(cases["M"])))
    fall = _exponent(starts.cumsum("subset_round") / np.arange(1, starts.sizes["subset_round"] + 1))
    rounds, subsets = result.subset_round + 1, result.fixed_subsets.sel(sample="growing", drop=True)
    everywhere = theorem_2(rounds, config, _cases(config)).rename(NAMES)
    proven = T.copy(data=mfa.remark_2(T.values, np.asarray(problem.mu), constant.item()))
    return xr.Dataset(
        {
            "room": room,
            "least_ratio": ratio.min("frame"),
            "largest_ratio": ratio.max("frame"),
            "pairs_share": result.pairs_share,
            "remark_1": ("matched", mfa.remark_1(result.matched.values)),
            "bound_exponent": -np.log(last / first) / np.log(ends[1] / ends[0]),
            "average_exponent": result.average_exponent,
            "faster": result.average_exponent.sel(cases, drop=True) - fall.drop_vars(["M", "E"]),
            "subsets_room": tightest(1 - subsets / everywhere, "subset_round"),
            "subsets_ratio": (everywhere / subsets.mean("seed")).min(),
            "one_model": result.one_model,
            "cluster_constant": constant,
            "cluster_room": tightest(1 - result.cluster_error / proven, "T"),
        }
    )


def judge(measured: xr.Dataset, config: Remarks) -> Iterator[Ruling | Check]:
    """Rules on both remarks and the four lemmas."""
    random, robin = (measured.pairs_share.sel(algorithm=name, drop=True) for name in ASSIGNMENTS)
    apart = random.sel(pairs="never", drop=True) - measured.remark_1
    once = bool((robin.sel(pairs="once") == 1).all())
    yield ruling(
        "remark-1",
        within(apart.rename(matched="M"), margin=_MARGIN, form=".4f"),
        fact(once, f"{config.num_frames} frames of each seed", "MFA-RR: every pair once a frame"),
        about="the share of pairs that MFA-Rand left out of M rounds, minus (1 - 1/M)^M",
    )
    yield ruling("table-3", fact(follows_table_3(mfa_rr(6, 3)), "6 clients, 6 rounds"))
    exponent = measured.bound_exponent
    about = "a comparison of two upper bounds, not of errors: "
    about += f"minus the exponents from T = 10^5 to 10^6: {describe(exponent)}"
    yield ruling("remark-2", fact(exponent > 0.25, "above 0.25"), about=about)
    equal, faster = (measured.faster.sel(sample=name, drop=True) for name in ("growing", "fixed"))
    about = "MFA-RR's exponent minus FedCluster's; with equal samples the difference is "
    about += describe(*estimate(equal))
    yield ruling("faster-than-fedcluster", more(faster, by=_FASTER), about=about)
    rooms = at_least(measured.subsets_room, -ROUND_OFF, form=".3g")
    yield ruling("any-subsets", rooms, looseness=measured.subsets_ratio)
    yield ruling("remark-3", within(measured.one_model - 1, margin=_ALIKE, form=".3f"))
    averages = more(measured.average_exponent, by=0.25)
    yield finding(
        "MFA-RR's measured errors, averaged over frames, fall faster than T^-1/4", averages
    )
    text = "FedCluster: errors are below c^(1/2) / (mu T^(1/4)) of Remark 2, with c measured"
    room = at_least(measured.cluster_room, -ROUND_OFF)
    yield finding(text, room, f"c = {measured.cluster_constant:.3g}")
    recursion = measured.room.sel(lemma=_RECURSION, drop=True)
    text = "the recursion (32), which combines the lemmas, holds in every frame"
    yield check(text, at_least(recursion, -ROUND_OFF, form=".3g"))
    for name in _WHAT:
        here = measured.sel(lemma=name)
        ratios = f"{here.least_ratio.min():.3g} to {here.largest_ratio.max():.3g}"
        about = f"1 - value / bound at the tightest point; bound / mean {ratios}"
        tests = at_least(here.room.drop_vars("lemma"), -ROUND_OFF, form=".3g")
        # The ratio is 0 / 0 if all local models are equal.
        equal = here.least_ratio.drop_vars("lemma").isnull()
        names = [
            ", ".join(words) for at, words in places(equal, *map(str, equal.dims)) if equal.sel(at)
        ]
        tests = [
            fact(True, "0 = 0", each.name)[0] if each.name in names else each for each in tests
        ]
        yield ruling(name, tests, about=about, looseness=here.least_ratio.min())


def table(measured: xr.Dataset, config: Remarks) -> Sequence[Table]:
    """The slack in the lemmas' bounds, and the shares of pairs."""
    lemmas = rows({"bound / mean": ratios(measured, "0 / 0")}, ("lemma", "M", "E"))
    never = estimate(measured.pairs_share.sel(pairs="never", drop=True))
    once = measured.pairs_share.sel(pairs="once", drop=True).mean("seed")
    shares = {
        "(1 - 1/M)^M": cells(measured.remark_1, form=".4f"),
        "never in M rounds": cells(*never, form=".4f"),
        "once in M rounds": cells(once, form=".4f"),
    }
    title = "Remark 1: shares of client-model pairs in frames of M rounds"
    return [lemmas, rows(shares, ("algorithm", "matched"), title)]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Remarks) -> Figure:
    """Draws each lemma's quantity and its bound over frames."""
    result = result.rename(NAMES)
    panels = []
    for at, (name, models) in places(result.value.sel(lemma=list(_WHAT)), "lemma", "M"):
        # Mask zeros, which have no logarithm, and round-off, which has no meaning.
        value, bound = (
            each.where(each > _NOTHING).transpose("E", "frame")
            for each in (result.value.sel(at).mean("seed"), result.lemma_bound.sel(at))
        )
        drawn = plots.lines(value, style="-") + plots.lines(bound, style="--", label="bound, ")
        title = f"{name.capitalize().replace('-', ' ')}, {models}"
        panels.append(plots.Panel(title, "frame", _WHAT[name], drawn, scale="log"))
    width = result.sizes["M"]
    return plots.draw(
        [panels[i : i + width] for i in range(0, len(panels), width)],
        title=f"Lemmas 1 to 4, MFA-RR on ridge regression, N = {config.num_clients}, "
        f"{config.num_seeds} seeds",
        caption="Solid: measured means over seeds, where the first samples leave out "
        f"{config.left_out[0]:.0%} of the examples; dashed: the bound.",
    )


ITEMS = (Item("theory-remarks", Remarks(), run, measure, judge, table, figure),)
"""Remarks 1 and 2, and the lemmas behind Theorem 2."""
