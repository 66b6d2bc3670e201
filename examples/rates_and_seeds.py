"""Which learning rate suits each assignment? Eight rates and ten seeds share one program."""

import numpy as np

from fedjax_mm import fedavg, mfa_rand, mfa_rr, sweep
from fedjax_mm.sweeps import Setup
from fedjax_mm.tasks import quadratic

NUM_CLIENTS, NUM_MODELS = 24, 4
task = quadratic(NUM_CLIENTS, block_size=4, mu=2e-4)


def build(assignment, learning_rate):
    """Returns one point; an assignment has its own program, a learning rate is an argument."""
    algorithm = fedavg(learning_rate, local_steps=5)
    return Setup(task, algorithm, assignment(NUM_CLIENTS, NUM_MODELS))


axes = {"assignment": [mfa_rand, mfa_rr], "learning_rate": np.geomspace(0.05, 1, 8).round(2)}
result = sweep(build, axes, num_rounds=400, num_seeds=10, record_every=100)
last = result.excess_loss.isel(round=-1).mean("model")
mean, error = last.mean("seed"), last.std("seed", ddof=1) / np.sqrt(last.sizes["seed"])
for assignment in mean.assignment.values:
    rate = mean.sel(assignment=assignment).idxmin("learning_rate")
    best = {"assignment": assignment, "learning_rate": rate}
    print(
        f"{assignment}: best rate {rate.item():.2f}, "
        f"excess loss {mean.sel(best).item():.3g} +- {error.sel(best).item():.1g}"
    )
