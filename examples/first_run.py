"""Twelve models share 24 clients: random assignment against round-robin, over 20 seeds."""

import matplotlib.pyplot as plt

from fedjax_mm import fedavg, mfa_rand, mfa_rr, sweep
from fedjax_mm.sweeps import Setup
from fedjax_mm.tasks import quadratic

NUM_CLIENTS, NUM_MODELS = 24, 12
task = quadratic(NUM_CLIENTS, block_size=4, mu=2e-4)


def build(assignment):
    """Returns one point of the grid; both assignments train by FedAvg."""
    algorithm = fedavg(0.1, local_steps=5)
    return Setup(task, algorithm, assignment(NUM_CLIENTS, NUM_MODELS))


result = sweep(build, {"assignment": [mfa_rand, mfa_rr]}, num_rounds=1000, num_seeds=20)
spread = result.excess_loss.std("seed").mean("model")
print(spread.isel(round=-1).to_pandas())

spread.plot(hue="assignment")
plt.ylabel("spread of the excess loss over seeds")
plt.savefig("first_run.png")
