"""MOON with own parts of clients, dropout and batch norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_mm import (
    fedavg,
    full_participation,
    local_sgd,
    mfa_rand,
    moon,
    personal,
    simulate,
)
from fedjax_mm.data import FederatedData, client_data
from fedjax_mm.tasks import MLP, classification

N, E, OWN_STEPS, ROUNDS, RATE, MU, T = 4, 3, 2, 3, 0.3, 2.0, 0.5
RNG = np.random.default_rng(0)
COUNTS = (6, 5, 8, 7)  # a batch of one example only would have no variance
X = [RNG.normal(k / 2, 1, size=(n, 4, 4, 1)) for k, n in enumerate(COUNTS)]
Y = [RNG.integers(0, 3, n) for n in COUNTS]


def task_of(network, rngs=()):
    clients = client_data(list(zip(X, Y, strict=True)))
    data = FederatedData("toy", "synthetic", 3, clients, clients)
    return classification(data, network, rngs=rngs)


class Normed(nn.Module):
    """A hidden layer with batch norm."""

    @nn.compact
    def __call__(self, x, weights=None):
        is_tested = not self.is_mutable_collection("batch_stats")
        mask = None if weights is None else (weights > 0)[:, None]
        x = nn.Dense(6, name="dense1")(x.reshape(len(x), -1))
        x = nn.relu(nn.BatchNorm(is_tested, momentum=0.0, name="norm")(x, mask=mask))
        self.sow("intermediates", "representation", x)
        return nn.Dense(3, name="classes")(x)


def head(f):
    return personal(f, where="classes", own_steps=OWN_STEPS)


def plain(f):
    return f


# A task, and a wrapper of the algorithm.
CASES = {
    "own steps": (lambda: task_of(MLP(3, (5,))), head),
    "dropout": (lambda: task_of(MLP(3, (8,), dropout_rate=0.4), ("dropout",)), plain),
    "dropout and own steps": (lambda: task_of(MLP(3, (8,), dropout_rate=0.4), ("dropout",)), head),
    "batch norm": (lambda: task_of(Normed()), plain),
    "FedBN": (lambda: task_of(Normed()), lambda f: personal(f, where="norm")),
}
SOME = mfa_rand(N, 2, cohort_size=3)  # models have different clients, and one is absent


def local(rate=RATE):
    return local_sgd(rate, steps=E, batch_size=4)


def close(a, b, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@pytest.mark.parametrize("name", ["dropout and own steps", "batch norm"])
def test_without_contrast_it_is_fedavg_and_with_it_another(name):
    """The contrast changes no draw of batches and of dropped units."""
    make, wrap = CASES[name]
    task = make()
    none, bare, full = (
        simulate(0, task, wrap(f), SOME, ROUNDS)[1].metrics
        for f in (moon(local(), mu=0.0), fedavg(local()), moon(local(), mu=MU))
    )
    close(none, bare)
    assert max(float(np.abs(full[key] - bare[key]).max()) for key in bare) > 1e-3


def outputs(p, x):
    """Features and logits of the network with one hidden layer."""
    z = jnp.maximum(x.reshape(len(x), -1) @ p["dense1"]["kernel"].T + p["dense1"]["bias"], 0)
    return z, z @ p["classes"]["kernel"].T + p["classes"]["bias"]


def objective(p, w, last, k):
    """The mean cross-entropy plus mu times the mean contrast of a client."""
    (z, logits), (near, _), (far, _) = (outputs(each, X[k]) for each in (p, w, last))

    def length(a):
        square = jnp.sum(a * a, 1)  # 0 if all units are off
        return jnp.sqrt(jnp.where(square > 0, square, 1))

    def cosine(a, b):
        return jnp.sum(a * b, 1) / (length(a) * length(b))

    losses = jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(len(Y[k])), Y[k]]
    up, down = (jnp.exp(cosine(z, other) / T) for other in (near, far))
    return jnp.mean(losses) + MU * jnp.mean(-jnp.log(up / (up + down)))


def by_hand(start):
    """FedRep with MOON: the first steps train a client's head, the others the shared body."""
    w, own, last = dict(start), [start["classes"]] * N, [start] * N
    for _ in range(ROUNDS):
        bodies = []
        for k in range(N):
            p = given = {"dense1": w["dense1"], "classes": own[k]}
            for e in range(E):
                gradient = jax.grad(objective)(p, given, last[k], k)
                part = "classes" if e < OWN_STEPS else "dense1"
                moved = jax.tree.map(lambda x, g: x - RATE * g, p[part], gradient[part])
                p = p | {part: moved}
            own[k], last[k] = p["classes"], p
            bodies.append(p["dense1"])
        w["dense1"] = jax.tree.map(lambda *x: np.average(x, 0, weights=COUNTS), *bodies)
    return w, own


def test_a_run_with_own_steps_matches_a_loop(x64):
    task = task_of(MLP(3, (5,)))
    draw = np.random.default_rng(3)
    start = jax.tree.map(
        lambda x: jnp.asarray(draw.normal(size=x.shape)), task.init(jax.random.key(0))
    )
    algorithm = head(moon(local_sgd(RATE, steps=E), mu=MU, temperature=T))
    state, _ = simulate(0, task, algorithm, full_participation(N), ROUNDS, params=start)
    models = jax.tree.map(lambda x: x[0], state.models[0])
    w, own = by_hand(start)
    close(models.params, w, rtol=1e-8, atol=1e-10)
    for k in range(N):
        mine = jax.tree.map(lambda x, k=k: x[k], models.clients)
        found = algorithm.personal(models.params, mine)["classes"]
        close(found, own[k], rtol=1e-8, atol=1e-10)
