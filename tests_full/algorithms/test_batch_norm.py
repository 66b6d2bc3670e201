"""FedBN in an experiment file."""

import jax
import numpy as np

from fedjax_mm import Experiment, fedavg, local_sgd, mfa_rand, personal, run, simulate
from fedjax_mm.data import digits, federate, partition
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.tasks import BatchNormCNN, classification
from tests.algorithms.test_batch_norm import FILE


def test_fedbn_in_a_file_is_that_of_python_and_trains():
    experiment = validate(Experiment, FILE)
    result = run(experiment).squeeze()
    loss = result.personal_loss.values
    assert loss[-1] < 0.9 * loss[0]
    assert result.parameters_up[1] == 5 * (9 * 16 + 9 * 16 * 32 + 4 * 32 * 10 + 10)
    pool = digits()
    parts = partition.iid(pool.train[1], 5)
    data = federate(pool, parts, test_fraction=0.3)
    task = classification(data, BatchNormCNN(10), scale=1 / 255)
    algorithm = personal(fedavg(local_sgd(0.1, steps=5, batch_size=8)), where="norm")
    mine = experiment.points().at({}).setup("FedBN", [experiment.task.build(data)])
    _, found = simulate(0, mine.tasks, mine.algorithm, mine.assignment, 3)
    _, expected = simulate(0, task, algorithm, mfa_rand(5, 1), 3)
    jax.tree.map(np.testing.assert_array_equal, found.metrics, expected.metrics)
