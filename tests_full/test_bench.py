"""Step counts and training of benchmark workloads."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, full_participation, local_sgd
from fedjax_mm.cli import speed as bench
from fedjax_mm.cli import workloads
from fedjax_mm.data.clients import client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import LogisticRegression


def task_with(*counts):
    """A classification task whose clients have these numbers of examples."""
    clients = client_data([(np.ones((n, 2), np.float32), np.zeros(n, np.int32)) for n in counts])
    return classification(
        FederatedData("ones", "synthetic", 2, clients, clients), LogisticRegression(2)
    )


@pytest.mark.parametrize(
    ("counts", "client_map", "num_devices", "computed"),
    [
        # Each slot of a chunk, padding included, takes the steps of its first client.
        ((7, 2, 5), 1, 1, 7 + 5 + 2),
        ((7, 2, 5), 2, 1, 7 + 5 + 2 * 2),
        ((7, 2, 5, 4, 1), 2, 1, 7 + 5 + 2 * 4 + 2 * 1),
        ((7, 2, 5), "vmap", 1, 7 + 5 + 2),
        ((7, 2, 5, 4), "vmap", 2, (7 + 4) + (5 + 2)),
        ((3, 3, 3), 2, 1, 4 * 3),
    ],
)
def test_computed_and_useful_steps(counts, client_map, num_devices, computed):
    algorithm = fedavg(local_sgd(0.1, epochs=1, batch_size=1))
    assignment = full_participation(len(counts))
    actual = bench.count_steps(
        range(len(counts)),
        task_with(*counts),
        algorithm,
        assignment,
        client_map=client_map,
        num_devices=num_devices,
    )
    assert actual == (computed, sum(counts))


def test_a_learning_workload_moves_every_parameter():
    workload = workloads.LearningWorkload("W", workloads.LOGISTIC, 4, 10, 2, 3, 5, num_rounds=2)
    zeros = {"classes": {"kernel": jnp.zeros((5, 60)), "bias": jnp.zeros(5)}}
    moved = bench.build(workload, "FedAvg", params=zeros).run()
    assert np.all(moved["classes"]["kernel"] != 0)
    assert np.all(moved["classes"]["bias"] != 0)
