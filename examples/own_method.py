"""A method of one's own: FedAvg in which each client clips its update to a norm of at most C."""

import jax
import jax.numpy as jnp
import optax

from fedjax_mm import averaging, local_sgd, mfa_rr, part, simulate, to_dataset
from fedjax_mm.data import digits, federate, partition
from fedjax_mm.local import LocalUpdate
from fedjax_mm.tasks import MLP, classification

NUM_CLIENTS, NUM_ROUNDS = 30, 60


@part
def clipped(local, largest):
    """Clients send ``change * min(1, C / |change|)``, and the server adds the weighted mean."""

    def train(context):
        change, report = local.train(context)
        factor = jnp.minimum(1, largest / optax.tree.norm(change))
        return LocalUpdate(jax.tree.map(lambda x: factor * x, change), report)

    return averaging(train, num_gradients=local.num_steps)


pool = digits()
clients = partition.dirichlet(pool.train[1], NUM_CLIENTS, alpha=0.3, min_examples=8)
task = classification(federate(pool, clients), MLP(10, hidden=(32,)), scale=1 / 255)
local, assignment = local_sgd(0.1, steps=10, batch_size=16), mfa_rr(NUM_CLIENTS, 2)
for largest in (0.1, 1.0):
    algorithm = clipped(local, largest)
    _, trace = simulate(0, task, algorithm, assignment, NUM_ROUNDS)
    accuracy = to_dataset(trace).test_accuracy.isel(round=-1)
    print(f"C = {largest}: accuracy {accuracy.values.round(2)}")
