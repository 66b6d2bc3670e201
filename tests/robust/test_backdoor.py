"""Backdoors against a plain loop over images, with every rule of robust aggregation."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    Experiment,
    fedavg,
    full_participation,
    local_sgd,
    run,
    simulate,
)
from fedjax_mm.base import Batching
from fedjax_mm.data import FederatedData, client_data, shared_client_data
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.robust import attacking, backdoored, robust, scaling
from fedjax_mm.tasks import classification, client_losses, drifting, quadratic, requiring
from fedjax_mm.tasks.networks import LogisticRegression
from tests.oracles import robust as oracle
from tests.robust.test_runs import EVIL, KEY, RULES, N

C, E, RATE, ROUNDS = 3, 2, 0.5, 2
RNG = np.random.default_rng(1)
COUNTS = [3, 5, 2, 7, 4, 6, 3, 5, 8, 2, 4]
IMAGES = [RNG.integers(0, 200, size=(n, 4, 3, 1), dtype=np.uint8) for n in COUNTS]
LABELS = [RNG.integers(0, C, n).astype(np.int32) for n in COUNTS]
BACKDOOR = {"target": 2, "size": 2, "value": 1.25, "share": 0.5}


def clean_task(layout="sorted"):
    """Softmax regression on the clients' bytes, scaled to [0, 1]."""
    if layout != "mixed":
        kind = np.uint8 if layout == "unsigned" else np.int32
        labels = [y.astype(kind) for y in LABELS]
        clients = client_data(list(zip(IMAGES, labels, strict=True)))
    else:  # examples in another order, of which clients have rows
        mixed = np.random.default_rng(2).permutation(sum(COUNTS))
        rows = np.split(np.argsort(mixed), np.cumsum(COUNTS)[:-1])
        examples = np.concatenate(IMAGES)[mixed], np.concatenate(LABELS)[mixed]
        clients = shared_client_data(examples, [rows]).select(0)
    data = FederatedData("toy", "synthetic", C, clients, clients)
    return classification(data, LogisticRegression(C), scale=1 / 255, block_size=7)


def task_of(layout="sorted", attacks=EVIL, **changes):
    return backdoored(clean_task(layout), attacks, **BACKDOOR | changes)


def clean(k):
    return [image[..., 0] / 255 for image in IMAGES[k]], LABELS[k].tolist()


def seen_by(k):
    return oracle.poisoned(*clean(k), **BACKDOOR) if EVIL[k] else clean(k)


def by_hand(rule, factor):
    """The model, and the success of the attack, after each round."""
    how = {name: x for name, x in BACKDOOR.items() if name != "share"}
    images, labels = ([x for k in range(N) for x in clean(k)[i]] for i in (0, 1))
    w, v = np.zeros(C + C * 12), np.zeros(C + C * 12)
    success = [oracle.attack_success(w, images, labels, C, **how)]
    for t in range(1, ROUNDS + 1):
        x = [oracle.softmax_update(w, *seen_by(k), C, RATE, E) for k in range(N)]
        sent = [factor * x[k] if EVIL[k] else x[k] for k in range(N)]
        v = rule(np.array(sent), np.array(COUNTS, float), t, v, None)
        w = w + v
        success.append(oracle.attack_success(w, images, labels, C, **how))
    return w, success


def check_rule(name, factors=(1.0, 8.0)):
    """Compares runs with their loops, without and with scaling."""
    make, rule = RULES[name]
    plain, everybody = robust(fedavg(local_sgd(RATE, steps=E)), make()), full_participation(N)
    start = {"classes": {"bias": jnp.zeros(C), "kernel": jnp.zeros((C, 12))}}

    @partial(jax.jit, static_argnums=2)
    def run(task, factor, client_map):
        algorithm = attacking(plain, EVIL, scaling(factor))
        how = {"client_map": client_map, "params": start}
        return simulate(KEY, task, algorithm, everybody, ROUNDS, **how)

    for layout, factor in zip(("sorted", "mixed"), factors, strict=True):
        state, trace = run(task_of(layout), factor, "vmap" if layout == "sorted" else 2)
        w, success = by_hand(rule, factor)
        params = jax.tree.map(lambda x: x[0], state.models[0].params["classes"])
        found = np.concatenate([params["bias"], np.ravel(params["kernel"])])
        np.testing.assert_allclose(found, w, rtol=1e-9, atol=1e-9, err_msg=f"{name}, {factor}")
        np.testing.assert_allclose(trace.metrics["attack_success"][:, 0], success, rtol=1e-12)


QUICK = ("median",)
ALL = [name for name in RULES if name != "fltrust"]  # whose server has another task


@pytest.mark.parametrize("name", QUICK)
def test_a_backdoor_reaches_a_rule(name, x64):
    check_rule(name)


def test_only_attackers_see_the_patch_and_blocks_are_batches():
    """Data are stamped when they are read: the store has the bytes that it was given."""
    for layout in ("sorted", "mixed"):
        task = task_of(layout)
        data = task.task.train
        np.testing.assert_array_equal(
            np.sort(np.ravel(data.examples[0])), np.sort(np.concatenate(IMAGES), axis=None)
        )
        x, y = data.block(jnp.int32(0), sum(COUNTS))
        for k in range(N):
            rows, _ = data.batch(KEY, jnp.int32(k), jnp.int32(0), Batching())
            images, labels = seen_by(k)
            places = slice(sum(COUNTS[:k]), sum(COUNTS[: k + 1]))
            for pixels, given in ((x[places], y[places]), data.take(rows[: COUNTS[k]])):
                np.testing.assert_allclose(pixels[..., 0] / 255, images, rtol=1e-6)
                np.testing.assert_array_equal(given, labels)
        clean_loss = client_losses(clean_task(layout), start_of(task))
        moved = np.abs(client_losses(task, start_of(task)) - clean_loss) > 1e-6
        np.testing.assert_array_equal(moved, EVIL)


def test_the_success_of_an_attack_is_that_of_a_loop():
    """It is neither 0 nor 1 for models with random parameters."""
    images, labels = ([x for k in range(N) for x in clean(k)[i]] for i in (0, 1))
    how = {name: x for name, x in BACKDOOR.items() if name != "share"}
    draws = np.random.default_rng(4).normal(size=(6, C + C * 12)).astype(np.float32)
    found = {"sorted": [], "mixed": [], "unsigned": []}
    for layout, values in found.items():
        measured = jax.jit(task_of(layout).metrics)
        for w in draws:
            params = {"classes": {"bias": w[:C], "kernel": w[C:].reshape(C, 12)}}
            values.append(measured(KEY, params)["attack_success"])
    wanted = [oracle.attack_success(w.astype(float), images, labels, C, **how) for w in draws]
    assert np.sum((np.array(wanted) > 0) & (np.array(wanted) < 1)) >= 3
    np.testing.assert_allclose(found["sorted"], wanted, rtol=1e-6)
    np.testing.assert_allclose(found["mixed"], wanted, rtol=1e-6)


def start_of(task):
    return jax.tree.map(lambda x: x + 0.1 * jnp.arange(x.size).reshape(x.shape), task.init(KEY))


def test_numbers_of_a_backdoor_are_leaves_and_views_keep_it():
    """Runs that differ in them share a program, also with label columns and drifting data."""
    one, other = task_of(), task_of(target=0, value=0.5, share=0.25)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    asked = requiring(clean_task(), jnp.zeros(N), num_unseen=3)
    seen = backdoored(asked, EVIL[:8], **BACKDOOR)
    assert seen.num_clients == 8
    np.testing.assert_array_equal(seen.task.task.train.attacks, EVIL & (np.arange(N) < 8))
    pairs = [np.stack([y, (y + 1) % C], axis=1) for y in LABELS]
    clients = client_data(list(zip(IMAGES, pairs, strict=True)))
    data = FederatedData("toy", "synthetic", C, clients, clients)
    of_column = classification(data, LogisticRegression(C), column=1)
    params = start_of(one)
    shifted = backdoored(of_column, EVIL, **BACKDOOR | {"value": 1.25 * 255})
    plain = dataclasses.replace(of_column, scale=None)
    drifted = backdoored(drifting(plain, [1, 2, 0]), EVIL, **BACKDOOR | {"value": 1.25 * 255})
    named = [task.metrics(KEY, params)["attack_success"] for task in (shifted, drifted)]
    assert np.isfinite(named).all()


TABLE = {"learning_rate": 0.1, "epochs": 1, "batch_size": 10}
FILE = {
    "task": {"name": "digits", "num_clients": 8},
    "num_models": 1,
    "num_rounds": 2,
    "num_seeds": 1,
    "assignment": {"name": "mfa_rand"},
    "algorithms": {"A": TABLE},
}


def attacked_file(**changes):
    attack = {"name": "backdoor", "target": 1, "size": 2, "factor": 3.0}
    return FILE | {"byzantine": {"fraction": 0.25, "attack": attack}} | changes


def test_refusals():
    for make, words in [
        (lambda: task_of(target=3), "target is 3, but labels are 0 to 2; give one of them"),
        (lambda: task_of(target=-1), "target is -1; it must be a whole number"),
        (lambda: task_of(size=4), "size is 4, but images have 4 x 3 pixels; give at most 3"),
        (lambda: task_of(share=1.5), "share is 1.5; it must lie between 0 and 1"),
        (lambda: task_of(attacks=EVIL[:4]), "clients has 4 entries"),
        (lambda: backdoored(task_of(), EVIL, **BACKDOOR), "the task has a backdoor already; give"),
        (
            lambda: backdoored(quadratic(4, 2, mu=0.1), np.arange(4) < 1, target=0),
            "Quadratic has no labelled images; give a task of images",
        ),
        (
            lambda: run(validate(Experiment, attacked_file(task={"name": "synthetic"}))),
            r"examples have the shape \[60\], which has no corner",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            make()
