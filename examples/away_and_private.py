"""A fifth of the clients is away, and the others are protected by differential privacy."""

from fedjax_mm import fedavg, mfa_rand, simulate, to_dataset
from fedjax_mm.availability import available, bernoulli
from fedjax_mm.privacy import epsilon, private
from fedjax_mm.tasks import quadratic

NUM_CLIENTS, NUM_MODELS, NUM_ROUNDS = 1000, 2, 50
task = quadratic(NUM_CLIENTS, block_size=1, mu=0.1)
# Of 500 clients for each model 400 are there.
assignment = available(mfa_rand(NUM_CLIENTS, NUM_MODELS), bernoulli(0.8))
plain = fedavg(0.1, local_steps=5)

for noise in (4.0, 16.0):
    algorithm = private(plain, clip=1.0, noise_multiplier=noise, clients_per_round=400)
    result = to_dataset(simulate(0, task, algorithm, assignment, NUM_ROUNDS)[1])
    spent = epsilon(assignment, noise_multiplier=noise, num_rounds=NUM_ROUNDS, delta=1e-5)
    last = result.isel(round=-1)
    print(
        f"noise {noise}: epsilon {spent:.1f}, excess loss {last.excess_loss.mean().item():.3g}, "
        f"clients present {last.present.values}"
    )
