"""Wrong wrappers: availability, compression and privacy."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm import fedavg, full_participation, local_sgd, mfa_rand, personal, simulate
from fedjax_mm.asynchrony import shifted_exponential
from fedjax_mm.availability import (
    available,
    bernoulli,
    cyclic,
    dropping,
    finishing,
    markov,
    share_of_examples,
    timetable,
)
from fedjax_mm.base import Contribution, Look
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.local import adding
from fedjax_mm.privacy import AdaptiveClip, epsilon, private
from fedjax_mm.robust import attacking, sign_flip, trimmed_mean
from fedjax_mm.tasks import quadratic
from fedjax_mm.wrap import wrap_algorithm, wrap_assignment

ALL, FEDAVG = full_participation(4), fedavg(0.1, local_steps=1)
DELAY = shifted_exponential(4)


def hidden(**change):
    given = {"clip": 1.0, "noise_multiplier": 0.5, "clients_per_round": 4} | change
    return lambda: private(FEDAVG, **given)


def spent(assignment=ALL, **change):
    given = {"noise_multiplier": 1.0, "num_rounds": 10, "delta": 1e-5} | change
    return lambda: epsilon(assignment, **given)


def run(algorithm=FEDAVG, assignment=ALL):
    return lambda: simulate(0, quadratic(4, 2, mu=0.1), algorithm, assignment, 1)


def changing(change, **how):
    return run(assignment=wrap_assignment(ALL, "mine", change, **how))


def scaled_by_tree_map(context):
    update = local_sgd(0.1, steps=1).train_or_solve(context).update
    return Contribution(jax.tree.map(lambda x: x * context.weight(), update), context.weight(), 1)


def sending(**how):
    given = {"send": lambda context, sent, server, own: (sent, own)} | how
    return run(wrap_algorithm(FEDAVG, "mine", **given))


def until(metric="loss", **target):
    return lambda: finishing(mfa_rand(4, 2), metric, **target)


def attacked(clients):
    return lambda: attacking(FEDAVG, clients, sign_flip())


CASES = {
    # Attackers.
    "attackers are a dict": (attacked({}), "clients are a dict of 0; give one bool for each"),
    "masked attackers": (
        attacked(np.ma.array([True] * 4, mask=[True, False, False, False])),
        "clients has 1 masked entries; fill them",
    ),
    "a trimmed mean of nothing": (lambda: trimmed_mean(), "neither num_trimmed nor share"),
    # Models that finish.
    "a target in words": (until(at_most="x"), "at_most is 'x'; it must be a number", TypeError),
    "a target of nan": (until(at_most=np.nan), "at_most is nan; it must be finite"),
    "a metric in a list": (until([], at_most=0.1), r"a metric is called a list of 0"),
    # Own parts.
    "own parts are None": (
        lambda: personal(FEDAVG, None),
        "where is None; give a name of the parameters, several, or a function of a path",
        TypeError,
    ),
    # Wrappers of one's own.
    "change returns a cohort alone": (
        changing(lambda key, t, own, cohort, look: cohort),
        "change of mine returns a Cohort; return two: a Cohort, and the wrapper's state",
        TypeError,
    ),
    "change returns a state without init": (
        changing(lambda key, t, own, cohort, look: (cohort, jnp.zeros(3))),
        "change of mine returns a state, but the wrapper has none; give init",
    ),
    "steps_idle is a function": (
        run(FEDAVG._replace(steps_idle=lambda task: True)),
        "the algorithm's steps_idle is the function <lambda>; it must be True or False",
        TypeError,
    ),
    "num_steps of all clients": (
        run(FEDAVG._replace(num_steps=lambda task, client, server: jnp.ones(4, jnp.int32))),
        r"the algorithm fedavg returns from num_steps an array of shape \(4,\); give one number",
        TypeError,
    ),
    "indices of a sparse update are scaled": (
        run(adding(lambda context, *states: (scaled_by_tree_map(context), states[1]))),
        "a SparseUpdate with indices of float32; scale it by sums.scale_update",
        TypeError,
    ),
    # Presence.
    "probability above 1": (lambda: bernoulli(1.2), "probability is 1.2; it must lie between 0"),
    "probability a word": (
        lambda: bernoulli("often"),
        "probability is 'often'; give a number, or one for each client",
        TypeError,
    ),
    "probability of pairs": (lambda: bernoulli(np.ones((2, 2))), "probability is of shape"),
    "masked probabilities": (
        lambda: bernoulli(np.ma.array(np.full(4, 0.5), mask=[True, False, False, False])),
        "probability has 1 masked entries; fill them",
    ),
    "presence of others": (
        lambda: available(ALL, bernoulli(np.full(3, 0.5))),
        "law is for 3 clients, and there are 4; give it one number for all, or one for each",
    ),
    "nobody changes": (lambda: markov(0.0, 0.0), "comes and leaves are both 0, so no client"),
    "comes and leaves of others": (
        lambda: markov(np.full(3, 0.5), np.full(4, 0.5)),
        "comes and leaves are for 3 and 4 clients; give both the same number",
    ),
    "more groups than clients": (
        lambda: available(ALL, cyclic(5)).init(jax.random.key(0), Look()),
        "num_groups is 5; there are 4 clients only",
    ),
    "interval backwards": (
        lambda: timetable([[(3, 2)]]),
        r"intervals\[0\] has \(3, 2\) after 0; give pairs of a start and a later end",
    ),
    "interval beyond the period": (
        lambda: timetable([[], [(0, 5)]], period=4),
        r"intervals\[1\] ends at 5, after the period of 4",
    ),
    "no timetable": (
        lambda: timetable(None),
        r"intervals is None, not a Collection; give the pairs \(start, end\) of each client",
        TypeError,
    ),
    "no timetable of a client": (
        lambda: timetable([[(0, 1)], None]),
        r"intervals\[1\] is None, not a Collection; give the pairs",
        TypeError,
    ),
    "presence of no assignment": (
        lambda: available(FEDAVG, bernoulli(0.5)),
        "assignment is an Algorithm, not an assignment",
        TypeError,
    ),
    "presence a number": (
        lambda: available(ALL, 0.5),
        "law is 0.5, not a Law; give one, such as availability.bernoulli",
        TypeError,
    ),
    "replaced and unbiased": (
        lambda: available(ALL, bernoulli(0.5), when_absent="replace", unbiased=True),
        "unbiased is for when_absent='skip'; replaced clients need no factors",
    ),
    "unbiased without shares": (
        lambda: available(ALL, timetable([[(0, 1)]] * 4), unbiased=True),
        "unbiased needs the shares of presence, which must be positive",
    ),
    "replaced with factors": (
        lambda: available(
            mfa_rand(4, 2, unbiased=True), bernoulli(0.5), when_absent="replace"
        ).assign(*start(), Look()),
        "when_absent is 'replace', but the assignment gives clients factors of their own",
    ),
    "no examples": (lambda: share_of_examples([1.0, 0.0]), "it must be positive"),
    # Lost and late messages.
    "lost of others": (
        lambda: dropping(ALL, [0.1, 0.2]),
        "probability is for 2 clients, and there are 4; give one number for all, or one for each",
    ),
    "lost of an algorithm": (
        lambda: dropping(FEDAVG, 0.1),
        "assignment is an Algorithm, not an assignment",
        TypeError,
    ),
    # Compression.
    "compressor not called": (
        lambda: compressed(FEDAVG, top_k),
        "compressor is .*, not a Compressor; give one, such as top_k",
        TypeError,
    ),
    "compressed assignment": (
        lambda: compressed(ALL, top_k(0.1)),
        "algorithm is an Assignment, not an algorithm",
        TypeError,
    ),
    # Privacy.
    "noise of the count too small": (
        hidden(adaptive=AdaptiveClip(count_noise=0.2)),
        "adaptive.count_noise is 0.2; it must exceed half of noise_multiplier = 0.5",
    ),
    "adaptive a dict": (
        hidden(adaptive={"quantile": 0.5}),
        r"adaptive is a dict of 1, not an AdaptiveClip; give AdaptiveClip\(quantile=0.5\)",
        TypeError,
    ),
    "epsilon with hardly any noise": (
        spent(noise_multiplier=1e-9),
        "noise_multiplier is 1e-09 for 10 rounds, too little or too long to compute epsilon; give",
    ),
    "private assignment": (
        lambda: private(ALL, clip=1.0, noise_multiplier=0.5, clients_per_round=4),
        "algorithm is an Assignment, not an algorithm",
        TypeError,
    ),
}


def start():
    """Key, round and state, as arguments of `assign`."""
    key = jax.random.key(0)
    assignment = available(mfa_rand(4, 2, unbiased=True), bernoulli(0.5))
    return key, jnp.int32(1), assignment.init(key, Look())
