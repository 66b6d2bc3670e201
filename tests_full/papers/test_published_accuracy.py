"""McMahan's CNN under FedAvg: 100 IID clients, 10 per round, one epoch, B = 10, eta = 0.1."""

import os

import jax
import numpy as np
import pytest

from fedjax_mm import fedavg, local_sgd, mfa_rand, simulate
from fedjax_mm.data import digits, federate, load_idx, partition
from fedjax_mm.sweeps import layout
from fedjax_mm.tasks import McMahanCNN, classification
from tests.compiling import optimised


def accuracies_of(pool, num_clients, num_rounds, record_every=1):
    """Test accuracies at every record, with the clients of a round split over devices."""
    data = federate(pool, partition.iid(pool.train[1], num_clients))
    task = classification(data, McMahanCNN(10), scale=1 / 255, block_size=200)
    assignment = mfa_rand(num_clients, 1, cohort_size=10)
    algorithm = fedavg(local_sgd(0.1, epochs=1, batch_size=10))
    where = layout(1, jax.devices()[:2])

    def run(words, task):
        trace = simulate(
            jax.random.wrap_key_data(words),
            task,
            algorithm,
            assignment,
            num_rounds,
            record_every=record_every,
            client_axis=where.client_axis,
        )[1]
        return trace.metrics["test_accuracy"][:, 0]

    program = jax.jit(where.over(run, (None, None), None))
    words = jax.random.key_data(jax.random.key(0))
    with optimised():  # the run takes longer than its compilation
        return np.asarray(program(*where.put((words, task), None)))


@pytest.mark.slow
@pytest.mark.parametrize(("num_rounds", "least"), [(4, 0.6), (24, 0.85)])
def test_digits_are_learned(num_rounds, least):
    """A smaller instance has 1,437 images of 8 x 8 and 20 clients, and reaches 0.68 in 4 rounds."""
    accuracies = accuracies_of(digits(), 20, num_rounds, record_every=4)
    assert accuracies[-1] > least, accuracies


@pytest.mark.slow
def test_mnist_reaches_97_percent_within_20_rounds():
    directory = os.environ.get("FEDJAX_MM_DATA")
    if not directory:
        pytest.skip("FEDJAX_MM_DATA is not set to the directory of the IDX files")
    accuracies = accuracies_of(load_idx(directory, dataset="mnist"), 100, 20)
    assert accuracies.max() >= 0.97, accuracies
