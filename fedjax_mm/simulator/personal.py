"""Metrics of personal models, with which an algorithm's clients evaluate."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fedjax_mm.base import Algorithm, ClientState, Index, Metrics, Params, Task
from fedjax_mm.base.chunks import chunk_size_of
from fedjax_mm.simulator.rows import all_rows, own_clients
from fedjax_mm.simulator.train import Options
from fedjax_mm.tasks.with_clients import (
    ClientMetric,
    client_examples,
    examples_of,
    has_own_tests,
    measures_clients,
    record_of,
)

PREFIX = "personal_"


def personal_metrics(
    algorithm: Algorithm, task: Task, params: Params, states: ClientState, options: Options
) -> Metrics:
    """Metrics of all clients' personal models, if the algorithm has some and the task losses.

    ``personal_loss`` is the mean of F_k(v_k) weighted by n_k, like the task's loss. If clients have
    test examples of their own, ``personal_accuracy`` is the mean accuracy on these, weighted by
    their number, and likewise for all metrics of the task that are means over examples. With equal
    models for all clients they are those of the global model.

    Args:
      algorithm: the algorithm.
      task: the learning problem of one model.
      params: w, of one model.
      states: the states of all N clients, or of this device's own.
      options: the options of the run.
    """
    personal = algorithm.personal
    if personal is None or not measures_clients(task):
        return {}
    record = record_of(task)
    names: tuple[ClientMetric, ...] = record.metrics if record else ()

    def of_client(given: tuple[Index, ClientState]) -> dict[str, Array]:
        client, state = given
        return _values(task, personal(params, state), client, names)

    one = jax.tree.map(lambda x: x[None], params)
    clients = own_clients(task.num_clients, options.client_axis)
    at_once = chunk_size_of(options.client_map, task, one, len(clients)) or len(clients)
    values = lax.map(of_client, (clients, states), batch_size=min(at_once, len(clients)))
    values = all_rows(values, task.num_clients, options.client_axis)
    made: Metrics = {}
    tested = [name for name in values if name.startswith("test_")] * has_own_tests(task)
    for name in ("loss", *(each for each in tested if each != "test_loss")):
        weights = client_examples(task, name)
        mean = jnp.sum(weights * values[name]) / jnp.sum(weights)
        made[PREFIX + name.removeprefix("test_")] = mean
    if record is None:
        return made
    for name in record.metrics:
        made |= record.summary(task, name, values[name], PREFIX)
        if record.each:
            made[f"{PREFIX}client_{name}"] = values[name]
    return made


def personal_per_client(algorithm: Algorithm, task: Task) -> tuple[str, ...]:
    """Names of the metrics of personal models with one number per client."""
    record = record_of(task)
    if algorithm.personal is None or record is None or not measures_clients(task):
        return ()
    return tuple(PREFIX + name for name in record.of_clients)


def _values(
    task: Any, params: Params, client: Index, names: Sequence[ClientMetric]
) -> dict[str, Array]:
    """A client's loss, its metrics on its own test examples, and those of the given names."""
    inside: Any = examples_of(task)
    found = {"loss": task.client_loss(params, client)}
    parts = {name.partition("_")[0] for name in names if name != "loss"}
    for part in ("test", "train"):
        if part in parts or (part == "test" and has_own_tests(task)):
            of_part = inside.client_metrics(params, client, getattr(inside, part))
            found |= {f"{part}_{name}": value for name, value in of_part.items()}
    return found
