"""Robust aggregation in whole runs: attacks reach the rules, and what runs must keep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    fedavg,
    full_participation,
    ifca,
    local_sgd,
    mfa_rand,
    mifa,
    noisy,
    scaffold,
    simulate,
    to_dataset,
)
from fedjax_mm.asynchrony import fedast
from fedjax_mm.availability import available, bernoulli, dropping
from fedjax_mm.base import Cohort, keys
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.data import flip_labels, flipped_clients, synthetic
from fedjax_mm.privacy import private
from fedjax_mm.robust import (
    Attack,
    Rule,
    alie,
    alie_factor,
    attacking,
    bucketing,
    bulyan,
    centered_clipping,
    fltrust,
    gaussian,
    geometric_median,
    ipm,
    krum,
    mean,
    median,
    multi_krum,
    nearest_neighbor_mixing,
    robust,
    scaling,
    sign_flip,
    trimmed_mean,
)
from fedjax_mm.tasks import classification, quadratic
from fedjax_mm.tasks.networks import LogisticRegression
from fedjax_mm.wrap import wrap_assignment
from tests.helpers import Measured, Precise
from tests.oracles import robust as oracle
from tests.oracles.wrappers import train

N, DIM, ROUNDS, STEPS = 11, 4, 2, 2
KEY = jax.random.key(5)
TARGETS = np.random.default_rng(0).normal(size=(N, DIM)) + 1
ROOT = np.full((1, DIM), 0.9)
EVIL = np.isin(np.arange(N), (3, 8))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted(Precise):
    """`Precise`, with clients of weights 1, 2, 3, 1, 2, ..."""

    def weight(self, client):
        return 1 + (client % 3).astype(self.targets.dtype)


WEIGHTS = 1.0 + np.arange(N) % 3


def task_of(targets, kind=Weighted):
    return kind(jnp.asarray(targets), dim=DIM)


def server_key(t):
    return keys.server_key(model_key(t))


def model_key(t):
    return keys.model_keys(keys.round_key(KEY, t), [0])[0]


def permutation(t):
    """The order of a bucketing's draws in a round."""
    order_key, _ = jax.random.split(keys.rule_key(server_key(t)))
    return np.argsort(jax.random.uniform(order_key, (N,), jnp.float32)).tolist()


def noise(t, client):
    key = keys.noise_key(keys.client_key(model_key(t), jnp.int32(client)))
    return np.asarray(jax.random.normal(key, (DIM,), jnp.float32), float)


# Loops get the updates, the weights, the round and the model of the last round's aggregate.
RULES = {
    "mean": (mean, lambda x, a, t, v, g: oracle.mean(x, a)),
    "median": (median, lambda x, a, t, v, g: oracle.median(x)),
    "trimmed mean": (lambda: trimmed_mean(2), lambda x, a, t, v, g: oracle.trimmed_mean(x, 2)),
    "krum": (lambda: krum(2), lambda x, a, t, v, g: oracle.multi_krum(x, 2, 1)),
    "multi-krum": (
        lambda: multi_krum(2, weighted=True),
        lambda x, a, t, v, g: oracle.multi_krum(x, 2, N - 2, a),
    ),
    "bulyan": (lambda: bulyan(2), lambda x, a, t, v, g: oracle.bulyan(x, 2)),
    "geometric median": (
        lambda: geometric_median(weighted=True),
        lambda x, a, t, v, g: oracle.geometric_median(x, 8, 1e-6, a),
    ),
    "centered clipping": (
        lambda: centered_clipping(0.2, num_iterations=2),
        lambda x, a, t, v, g: oracle.centered_clipping(x, v, 0.2, 2),
    ),
    "bucketing": (
        lambda: bucketing(median(), 2),
        lambda x, a, t, v, g: oracle.median(oracle.buckets(x, permutation(t), 2)),
    ),
    "mixing": (
        lambda: nearest_neighbor_mixing(trimmed_mean(2), 2),
        lambda x, a, t, v, g: oracle.trimmed_mean(oracle.mixed(x, 2), 2),
    ),
    "fltrust": (
        lambda: fltrust(task_of(ROOT)),
        lambda x, a, t, v, g: oracle.fltrust(x, g),
    ),
}
# Loops get the attacker's update, those of honest clients, the round and the client.
ATTACKS = {
    "none": (None, lambda x, h, t, k: x),
    "sign flip": (sign_flip(2.0), lambda x, h, t, k: -2 * x),
    "gaussian": (gaussian(0.5), lambda x, h, t, k: 0.5 * noise(t, k)),
    "added": (gaussian(0.5, adds=True), lambda x, h, t, k: x + 0.5 * noise(t, k)),
    "scaling": (scaling(30.0), lambda x, h, t, k: 30 * x),
    "alie": (alie(1.5), lambda x, h, t, k: oracle.mean(h) - 1.5 * oracle.deviation(h)),
    "ipm": (ipm(0.5), lambda x, h, t, k: -0.5 * oracle.mean(h)),
}


def by_hand(rule, attack):
    """The models after each round, in NumPy."""
    w, v, models = np.ones(DIM), np.zeros(DIM), []
    for t in range(1, ROUNDS + 1):
        x = [train(w, target, 0.1, STEPS) for target in TARGETS]
        honest = [x[k] for k in range(N) if not EVIL[k]]
        sent = [attack(x[k], honest, t, k) if EVIL[k] else x[k] for k in range(N)]
        v = rule(np.array(sent), WEIGHTS, t, v, train(w, ROOT[0], 0.1, STEPS))
        w = w + v
        models.append(w)
    return models[-1]


def check_attacks(name):
    """Compares runs under every attack with their loops."""
    make, rule = RULES[name]
    task, plain = task_of(TARGETS), fedavg(0.1, local_steps=STEPS)

    @jax.jit
    def run():
        each = {}
        for label, (attack, _) in ATTACKS.items():
            algorithm = robust(plain, make())
            algorithm = algorithm if attack is None else attacking(algorithm, EVIL, attack)
            state, _ = simulate(KEY, task, algorithm, full_participation(N), ROUNDS)
            each[label] = state.models[0].params["w"][0]
        return each

    for label, found in run().items():
        wanted = by_hand(rule, ATTACKS[label][1])
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9, err_msg=label)


QUICK = ("multi-krum", "fltrust")


@pytest.mark.parametrize("name", QUICK)
def test_every_attack_reaches_a_rule(name, x64):
    check_attacks(name)


def check_places(labels):
    task, plain = task_of(TARGETS), fedavg(0.1, local_steps=STEPS)

    @jax.jit
    def run():
        each = {}
        for label in labels:
            attack = ATTACKS[label][0]
            each[label] = [
                simulate(KEY, task, algorithm, full_participation(N), ROUNDS)[0].models[0].params
                for algorithm in (
                    robust(attacking(plain, EVIL, attack), trimmed_mean(2)),
                    attacking(robust(plain, trimmed_mean(2)), EVIL, attack),
                    attacking(robust(plain, mean()), EVIL, attack),
                    attacking(plain, EVIL, attack),
                )
            ]
        return each

    for inside, outside, alone, bare in run().values():
        np.testing.assert_allclose(inside["w"], outside["w"], rtol=1e-9)
        np.testing.assert_allclose(alone["w"], bare["w"], rtol=1e-9)


def test_attackers_inside_or_without_a_rule_are_those_outside(x64):
    check_places(["gaussian"])


def test_numbers_of_the_attacks(x64):
    honest = np.array([[1.0, 1], [2, 1], [1, 3], [2, 2]])
    np.testing.assert_allclose(oracle.deviation(honest), (0.57735, 0.957427), atol=1e-6)
    # With the deviation over q instead of q - 1, as some implementations have it:
    np.testing.assert_allclose(honest.mean(0) - 1.5 * honest.std(0), (0.75, 0.506266), atol=1e-6)
    for numbers, wanted in (((50, 12), 0.336038), ((25, 5), 0.253347)):
        assert abs(alie_factor(*numbers) - wanted) < 1e-6
    with pytest.raises(ValueError, match=r"num_attackers is 1 of 5 clients.*give z itself"):
        alie_factor(5, 1)


def trained(algorithm, assignment, task=None, rounds=3, **how):
    task = task_of(TARGETS.astype(np.float32), Measured) if task is None else task
    return simulate(KEY, task, algorithm, assignment, rounds, **how)


def same(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


CHUNKS = ("vmap", "scan", 3)


ASSIGNMENTS = (mfa_rand(N, 3), ifca(N, 2), dropping(mfa_rand(N, 2), 0.3))


@pytest.mark.parametrize("assignment", ASSIGNMENTS[2:], ids=repr)
def test_results_depend_neither_on_chunks_nor_on_how_models_are_given(assignment):
    """Static and traced models, and clients that are absent."""
    algorithm = attacking(robust(fedavg(0.1, local_steps=2), trimmed_mean(1)), EVIL, ipm(0.5))
    tasks = [task_of(TARGETS.astype(np.float32) + i, Measured) for i in range(3)]
    run = functools.partial(trained, algorithm, assignment)

    @jax.jit
    def every():
        return [run(client_map=each)[0].models for each in CHUNKS]

    first, *others = every()
    for other in others:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), other, first
        )
    if assignment.num_models == 3:  # models with their own data are rows, others one list
        apart = run(task=[dataclasses.replace(tasks[0]) for _ in range(3)])[0].models[0].params
        np.testing.assert_allclose(apart["w"], first[0].params["w"], rtol=1e-5, atol=1e-6)


def test_absent_clients_and_updates_that_are_not_finite_do_not_count():
    """A model with too few participants keeps its parameters, and both are counted."""
    bad = Attack(lambda key, update, honest: update * jnp.nan)
    alone = np.arange(N) == 4
    here = np.array([[True] * N, [*[True] * 5, *[False] * 6], [*[True] * 4, *[False] * 7]])

    def change(rng_key, t, own, cohort, look):
        present = jnp.asarray(here)[t - 1][cohort.clients]
        return dataclasses.replace(cohort, takes_part=cohort.participates() & present), own

    assignment = wrap_assignment(full_participation(N), "some", change)
    algorithm = attacking(robust(fedavg(0.1, local_steps=2), trimmed_mean(2)), alone, bad)
    task = task_of(TARGETS.astype(np.float32), Precise)
    state, trace = trained(algorithm, assignment, task)
    assert trace.metrics["not_finite"][:, 0].tolist() == [0, 1, 2, 2]
    assert trace.metrics["too_few"][:, 0].tolist() == [0, 0, 1, 2]
    assert trace.metrics["attackers"][:, 0].tolist() == [0, 1, 1, 0]
    w = np.ones(DIM)
    x = [train(w, target, 0.1, 2) for target in np.delete(TARGETS, 4, axis=0)]
    w = w + oracle.trimmed_mean(x, 2)
    np.testing.assert_allclose(state.models[0].params["w"][0], w, rtol=1e-5)


def test_messages_have_the_same_size_and_updates_of_all_kinds_are_aggregated():
    """A quadratic's updates are sparse, SCAFFOLD's have two parts, and momentum has a state."""
    sizes = [
        to_dataset(trained(algorithm, full_participation(N))[1])
        for algorithm in (fedavg(0.1, local_steps=2), robust(fedavg(0.1, local_steps=2), median()))
    ]
    assert float(sizes[0].parameters_up[-1, 0]) == float(sizes[1].parameters_up[-1, 0])
    for plain, task in (
        (fedavg(0.1, local_steps=2), quadratic(N, 2, mu=0.1)),
        (scaffold(local_sgd(0.1, steps=2)), None),
        (compressed(fedavg(0.1, local_steps=2), top_k(0.5)), None),
    ):
        one, other = (
            trained(algorithm, full_participation(N), task)[0].models[0].params
            for algorithm in (plain, robust(plain, mean()))
        )
        jax.tree.map(same, other, one)


def test_flipped_labels_reach_a_rule():
    """The rule gets the updates of clients with flipped labels like any others."""
    honest = synthetic(6, dim=3, seed=1, test_fraction=0.3)
    flipped = flip_labels(honest, fraction=0.4, test=False)

    def updates(data):
        task = classification(data, LogisticRegression(data.num_classes))
        none = Rule(lambda key, x, weights, here, state: (jnp.zeros(x.shape[1]), x), init=stack)
        return trained(robust(PLAIN, none), full_participation(6), task, 1)[0].models[0].server

    def stack(zero):
        return jnp.zeros((6, zero.size))

    each = [np.asarray(updates(data).own.rule[0]) for data in (honest, flipped)]
    moved = np.abs(each[0] - each[1]).max(axis=1) > 1e-3
    np.testing.assert_array_equal(np.flatnonzero(moved), flipped_clients(6, fraction=0.4, seed=0))


def scaled(assignment):
    return available(assignment, bernoulli(0.5), unbiased=True)


PLAIN = fedavg(0.1, local_steps=1)
ALL = full_participation(N)
REFUSALS = {
    "two rules": (lambda: robust(robust(PLAIN, median()), median()), "robust is around robust"),
    "compressed outside": (
        lambda: compressed(robust(PLAIN, median()), top_k(0.1)),
        r"robust\(compressed\(algorithm, compressor\), rule\)",
    ),
    "private outside": (
        lambda: private(robust(PLAIN, mean()), clip=1.0, noise_multiplier=0.0, clients_per_round=4),
        r"robust\(private\(algorithm, ...\), rule\)",
    ),
    "no rule": (lambda: robust(PLAIN, median), "rule is the function median"),
    "all updates without a rule": (
        lambda: attacking(PLAIN, EVIL, ipm(0.5)),
        r"ipm\(0.5\) needs the updates of all clients.*rule may be mean\(\)",
    ),
    "too few slots": (
        lambda: trained(robust(PLAIN, krum(5)), ALL),
        r"krum\(5\) needs 13 participants of a model, but a cohort has at most 11",
    ),
    "server reads states": (
        lambda: trained(robust(mifa(local_sgd(0.1, steps=1)), median()), ALL),
        "robust: the server of this method reads the clients' states",
    ),
    "scaled weights": (
        lambda: trained(robust(PLAIN, median()), scaled(ALL)),
        "robust: the assignment multiplies the clients' weights",
    ),
    "asynchronous": (
        lambda: trained(robust(PLAIN, median()), fedast(N, 1, at_work=2, ratio=1)),
        "the server of the algorithm robust needs the updates of all participants at once",
    ),
    "attackers of other clients": (
        lambda: trained(attacking(robust(PLAIN, median()), EVIL[:4], sign_flip()), ALL),
        "clients has 4 entries",
    ),
}


def test_refusals():
    for name in REFUSALS:
        make, words = REFUSALS[name]
        with pytest.raises((TypeError, ValueError), match=words):
            make()


def test_a_rule_of_ones_own():
    """The nearest update to the mean, as a function of five arguments."""

    def aggregate(rng_key, updates, weights, participates, state):
        away = jnp.sum((updates - jnp.mean(updates, 0)) ** 2, 1)
        return updates[jnp.argmin(jnp.where(participates, away, jnp.inf))], state + 1

    algorithm = robust(PLAIN, Rule(aggregate, init=lambda zero: jnp.int32(0)))
    state, _ = trained(noisy(algorithm, EVIL), ALL)
    assert int(state.models[0].server.own.rule[0]) == 3


def test_clients_without_a_slot_are_no_participants():
    """Padding in the middle of a cohort changes nothing."""
    clients = jnp.arange(N).at[jnp.array([0, 5])].set(-1)

    def change(rng_key, t, own, cohort, look):
        return Cohort(clients, cohort.models), own

    assignment = wrap_assignment(ALL, "some", change)
    task = task_of(TARGETS.astype(np.float32), Precise)
    state, _ = trained(robust(PLAIN, median()), assignment, task, rounds=1)
    x = [train(np.ones(DIM), target, 0.1, 1) for target in np.delete(TARGETS, [0, 5], axis=0)]
    wanted = 1 + oracle.median(x)
    np.testing.assert_allclose(state.models[0].params["w"][0], wanted, rtol=1e-5)
