"""Models that mix: how fast peers agree, what that is worth, and how often edges meet in a cloud.

Clients with the losses ``a_k (x - b_k)^2 / 2`` and noisy gradients are computed in double precision
beside exact values, because their rounds are affine. Logistic regression on the digits shows the
loss against rounds and against bytes.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.peers import edges, peers
from fedjax_mm.base import Assignment
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.claims import within
from fedjax_mm.data.federate import federate
from fedjax_mm.data.federated import FederatedData, stack_data
from fedjax_mm.data.partition import shards
from fedjax_mm.experiments.fields import Count, Positive, Seeded
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.cho2022.clients import all_digits
from fedjax_mm.papers.compute import compute
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.multi_problems import deal
from fedjax_mm.papers.rulings import check, compare
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.training import described, stages, train
from fedjax_mm.plots.drawing import GRAY
from fedjax_mm.simulator.simulate import simulate
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.least_squares import least_squares
from fedjax_mm.tasks.mean_estimation import mean_estimation
from fedjax_mm.tasks.networks import LogisticRegression
from fedjax_mm.theory.gossip import spectral_gap
from fedjax_mm.topologies import (
    Network,
    cloud,
    matching,
    mixing,
    mixing_matrix,
    network,
    random_regular,
    ring,
    torus,
)

Grouping = Literal["alike", "mixed"]

FEDAVG, PAIRS = "FedAvg", "random pairs"
FIXED = {"ring": ring(), "torus": torus(), "4-regular": random_regular(4)}
"""Graphs that stay the same in all rounds."""

_MARGIN = 0.02  # of the loss
_NEAR = 0.1  # relative difference of a measured floor and the exact one


class Mixed(Seeded):
    """Settings that both items share."""

    num_clients: Count = 16
    learning_rate: Positive = 0.5
    batch_size: Count = 10
    num_seeds: Count = 20
    quadratic_rate: Positive = 0.05
    quadratic_rounds: Count = 6400
    """The number of rounds on quadratics, of which the first tenth is not averaged."""

    @property
    def quadratics(self) -> tuple[np.ndarray, np.ndarray]:
        """Curvatures a_k and minimizers b_k."""
        place = np.linspace(0, 1, self.num_clients)
        return 1 + 3 * place, 4 * place

    def affine(self, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """P, q and the variance of noise of each client's local training, ``x -> P x + q``."""
        (a, b), rate = self.quadratics, self.quadratic_rate
        each, P = 1 - rate * a, (1 - rate * a) ** steps
        return P, (1 - P) * b, (rate * a) ** 2 * (1 - P**2) / (1 - each**2)

    def floor(self, name: str, steps: int, mixed: Assignment, key: Any, every: int) -> Array:
        """The mean over models and rounds of a metric on the quadratics."""
        # The two examples of a client have the minimizers b_k - 1 and b_k + 1.
        pairs = [np.sqrt(a) * np.array([b - 1, b + 1]) for a, b in np.transpose(self.quadratics)]
        roots = [np.full((2, 1), np.sqrt(a)) for a in self.quadratics[0]]
        task, rounds = least_squares(roots, pairs, ridge=1e-15), self.quadratic_rounds
        sgd = fedavg(local_sgd(self.quadratic_rate, steps=steps, batch_size=1))
        _, trace = simulate(key, task, sgd, mixed, rounds, record_every=every)
        return jnp.mean(trace.metrics[name][rounds // every // 10 :])

    def compute(self, program: Callable[..., Any], coords: Mapping[str, Any], **dims: str) -> Any:
        """Runs a program for each seed's key, in double precision."""
        seeds = self.first_seed + np.arange(self.num_seeds)
        keys = seed_keys(self.seed, seeds)
        found = compute(jax.vmap(program), [keys], {"seed": seeds, **coords}, "seed", dims)
        found.attrs["manifest"] |= {"datasets": ["quadratics"]}
        return found

    def setup(self, data: FederatedData, seed: int, steps: int, mixed: Assignment) -> Setup:
        """Logistic regression on one draw of the data."""
        task = classification(
            data.select(seed - self.first_seed), LogisticRegression(10), scale=1 / 255
        )
        local = local_sgd(self.learning_rate, steps=steps, batch_size=self.batch_size)
        return Setup(task, fedavg(local), mixed)


class Gossip(Mixed):
    """Settings of peers on networks."""

    alphas: tuple[Positive, ...] = (0.1, 100.0)
    local_steps: tuple[Count, ...] = (1, 5)
    gossip_rounds: Count = 24
    num_rounds: Count = 200
    record_every: Count = 10

    def matrix(self, name: str) -> np.ndarray:
        """The mixing matrix of a graph of `FIXED`."""
        return mixing_matrix(FIXED[name], self.num_clients)

    def build(self, topology: str, local_steps: int, data: FederatedData, seed: int) -> Setup:
        """Sets up peers. Those on graphs of `FIXED` have matrices, so that they share a program."""
        if topology in FIXED:
            net = network(jnp.asarray(self.matrix(topology), jnp.float32))
        else:
            net = matching() if topology == PAIRS else cloud("models")
        return self.setup(data, seed, local_steps, mixing(peers(self.num_clients), net))

    def rates(self) -> dict[str, float]:
        """The factors by which the consensus error falls in a round without training.

        That of random pairs is the expectation, which is the same in every round.
        """
        of = {name: (1 - spectral_gap(self.matrix(name))) ** 2 for name in FIXED}
        return of | {PAIRS: 0.5 - 0.5 / (self.num_clients - 1)}

    def exact(self, name: str, steps: int) -> float:
        """The consensus error of ``x <- W (P x + q + noise)`` after many rounds."""
        (P, q, variance), W, size = self.affine(steps), self.matrix(name), self.num_clients
        H, noise = W * P, (W * variance) @ W.T
        mean = np.linalg.solve(np.eye(size) - H, W @ q)
        covariance = np.linalg.solve(np.eye(size**2) - np.kron(H, H), noise.ravel())
        own = np.trace(covariance.reshape(size, size)) - covariance.sum() / size
        return float(np.var(mean) + own / size)

    def program(self, key: Any) -> dict[str, Array]:
        """Consensus errors without training, and with it in the end, of one seed."""
        size = self.num_clients
        fixed = jnp.stack([jnp.asarray(self.matrix(name)) for name in FIXED])

        def error(net: Network) -> Float[Array, " gossip_round"]:
            zeros, idle = np.zeros(size), fedavg(lambda t: 0.0, local_steps=1)
            level = mean_estimation(zeros, zeros)
            start, mixed = jax.random.normal(key, (size,)), mixing(peers(size), net)
            _, trace = simulate(key, level, idle, mixed, self.gossip_rounds, params=start)
            return trace.metrics["consensus_error"].mean(1)

        def floor(W: Array, steps: int) -> Array:
            return self.floor("consensus_error", steps, mixing(peers(size), network(W)), key, 10)

        errors = jax.vmap(lambda W: error(network(W)))(fixed)
        floors = [jax.vmap(partial(floor, steps=steps))(fixed) for steps in self.local_steps]
        whole = jnp.concatenate([errors, error(matching())[None]])
        return {"error": whole, "floor": jnp.stack(floors, 1)}


def run_gossip(config: Gossip, execution: Execution | None = None) -> xr.Dataset:
    """Gossip and floors on quadratics, and training on two partitions of the digits per seed."""
    coords = {"network": [*FIXED, PAIRS], "graph": [*FIXED], "local_steps": [*config.local_steps]}
    dims = {"error": "seed network gossip_round", "floor": "seed graph local_steps"}
    exact = config.compute(config.program, coords, **dims)
    axes: dict[str, Sequence[Any]] = {
        "topology": [*FIXED, PAIRS, FEDAVG],
        "local_steps": [*config.local_steps],
    }

    def trained(alone: Any, saving: Execution) -> xr.Dataset:
        data = deal(all_digits(), config.num_clients, alone.alphas[0], config.data_seeds)
        found = train([data], partial(alone.build, data=data), axes, alone, saving)
        return found[["loss", "parameters_mixed"]].mean("model", keep_attrs=True)

    each = {alpha: config.model_copy(update={"alphas": (alpha,)}) for alpha in config.alphas}
    parts = list(stages("alpha", each, execution or Execution(), trained).values())
    found = xr.concat(parts, xr.IndexVariable("alpha", [*each]), combine_attrs="override")
    return described(found.merge(exact, combine_attrs="override"), [*parts, exact])


def measure_gossip(result: xr.Dataset, config: Gossip) -> xr.Dataset:
    """Measures rates, floors and losses, and computes exact rates and floors."""
    error, rates = result["error"], xr.DataArray([*config.rates().values()], dims="network")
    falls = error.isel(gossip_round=slice(1, None)) / error.isel(gossip_round=slice(-1)).values
    # The mean over rounds is unbiased for random pairs. Others approach their rate in the end.
    rate = falls.isel(gossip_round=-1).where(error["network"] != PAIRS, falls.mean("gossip_round"))
    floors = [[config.exact(x, steps) for steps in config.local_steps] for x in FIXED]
    exact = xr.DataArray(floors, dims=("graph", "local_steps"))
    kilobytes = 4e-3 * result["parameters_mixed"].isel(seed=0, alpha=0, local_steps=0, drop=True)
    loss = result["loss"]
    axis, budget = loss["topology"].values, kilobytes.isel(round=-1).min("topology")
    at = {x: abs(kilobytes.sel(topology=x) - budget).values.argmin() for x in axis.tolist()}
    spent = [loss.sel(topology=x).isel(round=int(i), drop=True) for x, i in at.items()]
    mean, standard_error = estimate(loss)
    measured = {"rate": rate, "exact rate": rates, "floor": result["floor"], "exact floor": exact}
    measured |= {"gossip": error.mean("seed"), "kilobytes": kilobytes, "loss": mean}
    measured |= {"loss error": standard_error, "last": loss.isel(round=-1, drop=True)}
    return xr.Dataset(measured | {"spent": xr.concat(spent, "topology")})


def judge_gossip(measured: xr.Dataset, config: Gossip) -> Iterator[Check]:
    """Holds rates and floors to the exact ones, and compares losses with FedAvg's."""
    rate, floor = (measured[name] / measured[f"exact {name}"] - 1 for name in ("rate", "floor"))
    for text, apart, margin in (
        (
            "the consensus error falls at the second eigenvalue's rate",
            rate.sel(network=[*FIXED]),
            0.01,
        ),
        ("on random pairs it falls at the expected rate", rate.sel(network=PAIRS), _NEAR),
        ("the consensus error of local SGD ends at its exact floor", floor, _NEAR),
    ):
        yield check(f"{text} (relative difference)", within(apart, margin=margin, form=".4f"))
    for name, alpha in itertools.product(("last", "spent"), config.alphas):
        loss = measured[name].sel(alpha=alpha, drop=True).transpose(..., "seed")
        how = {"last": "rounds", "spent": "bytes"}[name]
        for other in (*FIXED, PAIRS):
            lead = loss.sel(topology=other, drop=True) - loss.sel(topology=FEDAVG, drop=True)
            text = f"alpha = {alpha:g}, equal {how}: FedAvg's lead in loss over {other}"
            yield compare(text, lead, _MARGIN, ".3f")


def table_gossip(measured: xr.Dataset, config: Gossip) -> Sequence[Table]:
    """Rates, floors and losses."""
    dims = ("graph", "local_steps")
    tables = []
    for name, over, title in (
        ("rate", ("network",), "Factor of the consensus error in a round without training"),
        ("floor", dims, "Consensus error of local SGD in the end"),
    ):
        contents = {"measured": cells(*estimate(measured[name]), form=".4f")}
        contents["exact"] = cells(measured[f"exact {name}"], form=".4f")
        tables.append(rows(contents, over, title))
    for name, title in (("last", "after all rounds"), ("spent", "after as many bytes")):
        text = columns(cells(*estimate(measured[name]), form=".3f"), "topology")
        tables.append(rows(text, ("alpha", "local_steps"), f"Loss of a peer's model {title}"))
    return tables


def figure_gossip(result: xr.Dataset, measured: xr.Dataset, config: Gossip) -> Figure:
    """Draws consensus errors and floors with the exact ones, and losses by rounds and bytes."""
    x, errors = np.arange(config.gossip_rounds + 1), measured["gossip"]
    gossip, floors = [], []
    for number, name in enumerate(errors["network"].values):
        gossip.append(plots.Line(name, x, errors.sel(network=name).values, None, "-?", number))
    for number, name in enumerate(FIXED):
        mean, bars = estimate(measured["floor"].sel(graph=name))
        at = np.asarray(config.local_steps)
        floors.append(plots.Line(name, at, mean.values, bars.values, "-?", number))
    exact: dict[str, Any] = {"style": "--", "color": GRAY}
    for name, rate in zip(errors["network"].values, measured["exact rate"].values, strict=True):
        # Draw it through the last point, because only the end falls at this rate.
        end = float(errors.sel(network=name)[-1])
        gossip.append(plots.Line("", x, end * rate ** (x - x[-1]), **exact))
    floors += [plots.Line("", at, y.values, **exact) for y in measured["exact floor"]]
    ticks = {str(each): float(each) for each in config.local_steps}
    how: dict[str, Any] = {"scale": "log"}
    top = [
        plots.Panel("Quadratics, without training", "round", "consensus error", gossip, **how),
        plots.Panel("Quadratics, in the end", "local steps", "", floors, ticks=ticks, **how),
    ]
    below = [_curves(measured, alpha, E) for alpha in config.alphas for E in config.local_steps]
    return plots.draw(
        [top, *below],
        title=f"{config.num_clients} peers on quadratics and on the digits",
        caption=f"Means and standard errors of {config.num_seeds} seeds. Dashed lines are exact. "
        "The loss is that of a peer's model on all data, and kilobytes are those that a peer "
        "sends, or that a client of FedAvg sends and receives.",
    )


def _curves(measured: xr.Dataset, alpha: float, steps: int) -> list[plots.Panel]:
    """The loss against rounds and bytes."""
    title = rf"$\alpha$ = {alpha:g}, {steps} local step" + "s" * (steps > 1)
    found = measured.sel(alpha=alpha, local_steps=steps).isel(round=slice(1, None))
    panels = []
    for x in ("round", "kilobytes"):
        drawn = [
            plots.Line(name, one[x].values, one["loss"].values, one["loss error"].values, "-?", i)
            for i, name in enumerate(found["topology"].values)
            for one in [found.sel(topology=name)]
        ]
        panels.append(plots.Panel(title, x, "loss", drawn))
    return panels


class Edges(Mixed):
    """Settings of edge servers whose models a cloud averages."""

    num_edges: Count = 4
    periods: tuple[Count, ...] = (1, 4, 16)
    groupings: tuple[Grouping, ...] = ("alike", "mixed")
    local_steps: Count = 5
    num_rounds: Count = 192
    record_every: Count = 16

    def edge_of(self, grouping: str) -> np.ndarray:
        """The edge of each client: neighbours, or clients from all places."""
        places, size = np.arange(self.num_clients), self.num_clients // self.num_edges
        return places // size if grouping == "alike" else places % self.num_edges

    def mixed(self, grouping: str, period: Any) -> Assignment:
        """Edges that a cloud averages every `period` rounds."""
        own = edges(self.num_clients, self.num_edges, edge_of=self.edge_of(grouping))
        return mixing(own, cloud("clients"), every=period)

    def build(self, grouping: str, period: int, data: FederatedData, seed: int) -> Setup:
        """Sets up edges on the digits."""
        return self.setup(data, seed, self.local_steps, self.mixed(grouping, period))

    def data(self) -> FederatedData:
        """The digits in order of their labels, cut into clients, with one draw per seed."""
        pool = all_digits()
        draws = []
        for seed in self.data_seeds:
            parts = shards(pool.train[1], self.num_clients, shards_per_client=1, seed=seed)
            order = np.argsort([pool.train[1][part].mean() for part in parts])
            draws.append(federate(pool, [parts[i] for i in order], test_fraction=0.2, seed=seed))
        return stack_data(draws)

    def exact(self, grouping: str, period: int) -> float:
        """The expected excess loss of the cloud's model after many rounds."""
        P, q, variance = self.affine(self.local_steps)
        groups = [self.edge_of(grouping) == edge for edge in range(self.num_edges)]
        p, pull = (np.array([x[each].mean() for each in groups]) for x in (P, q))
        noise = np.array([variance[each].sum() / each.sum() ** 2 for each in groups])
        powers = p[:, None] ** np.arange(period)
        slope = np.mean(p**period)
        limit = np.mean(pull * powers.sum(1)) / (1 - slope)
        spread = np.sum(noise * (powers**2).sum(1)) / self.num_edges**2 / (1 - slope**2)
        a, b = self.quadratics
        return float(np.mean(a) / 2 * ((limit - np.average(b, weights=a)) ** 2 + spread))

    def program(self, key: Any) -> dict[str, Array]:
        """The excess loss of the cloud's model in the end, of one seed."""
        a, b = self.quadratics
        optimum = np.mean(a * ((b - np.average(b, weights=a)) ** 2 + 1)) / 2
        every = int(np.lcm.reduce(self.periods))

        def loss(period: Array, grouping: str) -> Array:
            mixed = self.mixed(grouping, period)
            return self.floor("mean_model_loss", self.local_steps, mixed, key, every) - optimum

        periods = jnp.asarray(self.periods)
        found = [jax.vmap(partial(loss, grouping=name))(periods) for name in self.groupings]
        return {"floor": jnp.stack(found)}


def run_edges(config: Edges, execution: Execution | None = None) -> xr.Dataset:
    """Floors on quadratics, and training on the digits."""
    axes: dict[str, Sequence[Any]] = {"grouping": [*config.groupings], "period": [*config.periods]}
    exact = config.compute(config.program, axes, floor="seed grouping period")
    data = config.data()
    found = train([data], partial(config.build, data=data), axes, config, execution)
    kept = found[["loss", "parameters_mixed"]].mean("model", keep_attrs=True)
    return described(kept.merge(exact, combine_attrs="override"), [found, exact])


def measure_edges(result: xr.Dataset, config: Edges) -> xr.Dataset:
    """Measures floors and losses, and computes exact floors and the bytes to the cloud."""
    floors = [[config.exact(x, period) for period in config.periods] for x in config.groupings]
    exact = xr.DataArray(floors, dims=("grouping", "period"))
    kilobytes = 4e-3 * result["parameters_mixed"].isel(seed=0, grouping=0, drop=True)
    mean, error = estimate(result["loss"])
    measured = {"floor": result["floor"], "exact floor": exact, "kilobytes": kilobytes}
    measured |= {"loss": mean, "loss error": error}
    return xr.Dataset(measured | {"last": result["loss"].isel(round=-1, drop=True)})


def judge_edges(measured: xr.Dataset, config: Edges) -> Iterator[Check]:
    """Holds floors to the exact ones, and compares periods with averaging in every round."""
    apart = measured["floor"] / measured["exact floor"] - 1
    text = "the cloud's excess loss ends at its exact floor (relative difference)"
    yield check(text, within(apart, margin=_NEAR, form=".4f"))
    last = measured["last"]
    for period in config.periods[1:]:
        lead = last.isel(period=0, drop=True) - last.sel(period=period, drop=True)
        text = f"the lead in loss of a cloud in every {period} rounds over one in every round"
        yield compare(text, lead.transpose(..., "seed"), _MARGIN, ".3f")


def table_edges(measured: xr.Dataset, config: Edges) -> Sequence[Table]:
    """Floors, losses and bytes."""
    contents = {"floor": cells(*estimate(measured["floor"]), form=".4f")}
    contents["exact floor"] = cells(measured["exact floor"], form=".4f")
    contents["loss on digits"] = cells(*estimate(measured["last"]), form=".3f")
    kilobytes = measured["kilobytes"].isel(round=-1, drop=True)
    return [
        rows(contents | {"kB of an edge": cells(kilobytes, form=",.0f")}, ("grouping", "period"))
    ]


def figure_edges(result: xr.Dataset, measured: xr.Dataset, config: Edges) -> Figure:
    """Draws losses by rounds and by bytes, and floors with the exact ones."""
    panels: list[list[plots.Panel]] = []
    drawn = measured["loss"].isel(round=slice(1, None))
    limits, floors = (0.9 * float(drawn.min()), 3 * float(drawn.max())), []  # room for legends
    for number, name in enumerate(config.groupings):
        found = measured.sel(grouping=name).isel(round=slice(1, None))
        loss, error = (found[key].transpose("period", "round") for key in ("loss", "loss error"))
        title = f"Edges with {name} clients"
        by_round = plots.lines(loss, error)
        by_bytes = [
            line._replace(x=found["kilobytes"].sel(period=period).values)
            for line, period in zip(by_round, config.periods, strict=True)
        ]
        how: dict[str, Any] = {"scale": "log", "limits": limits}
        panels.append(
            [
                plots.Panel(title, "round", "loss", by_round, **how),
                plots.Panel(title, "kilobytes of an edge", "loss", by_bytes, xscale="log", **how),
            ]
        )
        mean, bars = estimate(measured["floor"].sel(grouping=name))
        x = np.array(config.periods)
        floors.append(plots.Line(name, x, mean.values, bars.values, "?", number + 4))
        exact = measured["exact floor"].sel(grouping=name).values
        floors.append(plots.Line("", x, exact, style="--", color=number + 4))
    ticks = {str(period): float(period) for period in config.periods}
    how = {"scale": "log", "xscale": "log", "ticks": ticks}
    end = plots.Panel("Quadratics", "period", "excess loss in the end", floors, **how)
    return plots.draw(
        [*panels, [end]],
        share=False,
        title=f"{config.num_edges} edges with {config.num_clients} clients",
        caption=f"Means and standard errors of {config.num_seeds} seeds, by the number of rounds "
        "between two averages of the cloud, after which losses are recorded. Dashed lines are "
        "exact.",
    )


ITEMS = (
    Item(
        *("topology-edges", Edges(), run_edges, measure_edges),
        *(judge_edges, table_edges, figure_edges),
    ),
    Item(
        *("topology-gossip", Gossip(), run_gossip, measure_gossip),
        *(judge_gossip, table_gossip, figure_gossip),
    ),
)
"""Edges and a cloud, and peers."""
