"""Wrong wrappers: availability, compression and privacy."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm import fedavg, full_participation, local_sgd, mfa_rand, personal, simulate
from fedjax_mm.asynchrony import on_clock, shifted_exponential
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
from fedjax_mm.base import Contribution, Look, Sampling
from fedjax_mm.compression import compressed, qsgd, random_k, top_k
from fedjax_mm.local import adding
from fedjax_mm.privacy import AdaptiveClip, epsilon, noise_for, private
from fedjax_mm.robust import attacking, scaling, sign_flip
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
    **{
        f"attackers are {what}": (attacked(clients), f"clients are {words}; give one bool for each")
        for what, clients, words in [
            ("a large number", 2**40, r"int64\[\]"),
            ("none", None, "None"),
            ("a word", "x", "'x'"),
            ("a dict", {}, "a dict of 0"),
            ("large numbers", [0, 2**70, 1], "a list of 3"),
            ("pairs", np.ones((2, 2), bool), r"bool\[2, 2\]"),
        ]
    },
    "masked attackers": (
        attacked(np.ma.array([True] * 4, mask=[True, False, False, False])),
        "clients has 1 masked entries; fill them",
    ),
    **{
        f"attackers scale by {what}": (lambda f=factor: scaling(f), f"factor is {words}", kind)
        for what, factor, words, kind in [
            ("none", None, "None; it must be a number, and be finite", TypeError),
            ("a word", "x", "'x'; it must be a number, and be finite", TypeError),
            ("a list", [2.0], r"of shape \(1,\); give one number", ValueError),
            ("nan", np.nan, "nan; it must be finite", ValueError),
            ("infinity", np.inf, "inf; it must be finite", ValueError),
            ("a complex number", 1j, "1j; it must be a number, and be finite", TypeError),
        ]
    },
    # Models that finish.
    "a target in words": (until(at_most="x"), "at_most is 'x'; it must be a number", TypeError),
    "a target of nan": (until(at_most=np.nan), "at_most is nan; it must be finite"),
    "a target of nan for one": (until(at_least=[0.1, np.nan]), r"at_least is \[0.1 nan\]; it must"),
    "a complex target": (until(at_most=1j), "at_most is 1j; it must be a number", TypeError),
    "a metric in a list": (until([], at_most=0.1), r"a metric is called a list of 0"),
    # Own parts.
    **{
        f"own parts are {words}": (
            lambda where=where: personal(FEDAVG, where),
            f"where is {words}; give a name of the parameters, several, or a function of a path",
            TypeError,
        )
        for where, words in [(None, "None"), (5, "5"), (["norm", 5], "a list of 2")]
    },
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
    "change returns another state": (
        changing(lambda *given: (given[3], jnp.zeros(3)), init=lambda key: jnp.zeros(2)),
        r"the assignment mine returns float\d+\[3\] in its state where init returned float\d+\[2\]",
    ),
    "send returns a contribution alone": (
        sending(send=lambda context, sent, server, own: sent),
        "send of mine returns a Contribution; return two",
        TypeError,
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
    "serve returns a context alone": (
        sending(serve=lambda context, own: context),
        "serve of mine returns a ServerContext; return two",
        TypeError,
    ),
    "indices of a sparse update are scaled": (
        run(adding(lambda context, *states: (scaled_by_tree_map(context), states[1]))),
        "a SparseUpdate with indices of float32; scale it by sums.scale_update",
        TypeError,
    ),
    # Presence.
    "probability above 1": (lambda: bernoulli(1.2), "probability is 1.2; it must lie between 0"),
    "probability below 0": (lambda: bernoulli(-0.1), "probability is -0.1; it must lie between"),
    "probability nan": (lambda: bernoulli(np.nan), "probability is nan; it must lie between 0"),
    "probability a word": (
        lambda: bernoulli("often"),
        "probability is 'often'; give a number, or one for each client",
        TypeError,
    ),
    "probability none": (lambda: bernoulli(None), "probability is None; give a number", TypeError),
    "probability of pairs": (lambda: bernoulli(np.ones((2, 2))), "probability is of shape"),
    "masked probabilities": (
        lambda: bernoulli(np.ma.array(np.full(4, 0.5), mask=[True, False, False, False])),
        "probability has 1 masked entries; fill them",
    ),
    "one of the probabilities": (lambda: bernoulli([0.5, 2.0]), "it must lie between 0 and 1"),
    "presence of others": (
        lambda: available(ALL, bernoulli(np.full(3, 0.5))),
        "law is for 3 clients, and there are 4; give it one number for all, or one for each",
    ),
    "nobody changes": (lambda: markov(0.0, 0.0), "comes and leaves are both 0, so no client"),
    "comes above 1": (lambda: markov(1.5, 0.1), "comes is 1.5; it must lie between 0 and 1"),
    "leaves below 0": (lambda: markov(0.5, -0.1), "leaves is -0.1; it must lie between 0 and 1"),
    "comes and leaves of others": (
        lambda: markov(np.full(3, 0.5), np.full(4, 0.5)),
        "comes and leaves are for 3 and 4 clients; give both the same number",
    ),
    "no groups": (lambda: cyclic(0), "num_groups is 0; it must be a positive whole number"),
    "half a group": (lambda: cyclic(1.5), "num_groups is 1.5; it must be a positive whole number"),
    "more groups than clients": (
        lambda: available(ALL, cyclic(5)).init(jax.random.key(0), Look()),
        "num_groups is 5; there are 4 clients only",
    ),
    "interval backwards": (
        lambda: timetable([[(3, 2)]]),
        r"intervals\[0\] has \(3, 2\) after 0; give pairs of a start and a later end",
    ),
    "intervals overlap": (lambda: timetable([[(0, 2), (1, 3)]]), r"\(1, 3\) after 2; give pairs"),
    "interval before the start": (lambda: timetable([[(-1, 2)]]), r"\(-1, 2\) after 0; give pairs"),
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
    "no period": (lambda: timetable([[(0, 1)]], period=0), "period is 0; it must be positive"),
    "timetable of others": (
        lambda: available(ALL, timetable([[(0, 1)]])),
        "law is for 1 clients, and there are 4",
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
    "absent how": (
        lambda: available(ALL, bernoulli(0.5), when_absent="wait"),
        "when_absent is 'wait'; it must be 'skip' or 'replace'",
    ),
    "replaced and unbiased": (
        lambda: available(ALL, bernoulli(0.5), when_absent="replace", unbiased=True),
        "unbiased is for when_absent='skip'; replaced clients need no factors",
    ),
    "unbiased without shares": (
        lambda: available(ALL, timetable([[(0, 1)]] * 4), unbiased=True),
        "unbiased needs the shares of presence, which must be positive",
    ),
    "unbiased, never there": (
        lambda: available(ALL, bernoulli(0.0), unbiased=True),
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
    "lost above 1": (lambda: dropping(ALL, 1.01), "probability is 1.01; it must lie between 0"),
    "lost of others": (
        lambda: dropping(ALL, [0.1, 0.2]),
        "probability is for 2 clients, and there are 4; give one number for all, or one for each",
    ),
    "lost of an algorithm": (
        lambda: dropping(FEDAVG, 0.1),
        "assignment is an Algorithm, not an assignment",
        TypeError,
    ),
    "first nobody": (lambda: on_clock(ALL, DELAY, first=0), "first is 0; it must be a positive"),
    "first and a half": (lambda: on_clock(ALL, DELAY, first=1.5), "first is 1.5; it must be a"),
    "deadline at once": (lambda: on_clock(ALL, DELAY, deadline=0), "deadline is 0; it must be pos"),
    "deadline nan": (lambda: on_clock(ALL, DELAY, deadline=np.nan), "deadline is nan; it must be"),
    # Compression.
    "share 0": (lambda: top_k(0.0), r"share is 0.0; it must be in \(0, 1\]"),
    "share above 1": (lambda: random_k(1.5), r"share is 1.5; it must be in \(0, 1\]"),
    "share a word": (lambda: top_k("all"), "share is 'all'; it must be a number", TypeError),
    "no levels": (lambda: qsgd(0), "levels is 0; it must be a positive whole number"),
    "half a level": (lambda: qsgd(2.5), "levels is 2.5; it must be a positive whole number"),
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
    "feedback a number": (
        lambda: compressed(FEDAVG, top_k(0.1), error_feedback=0.5),
        "error_feedback is 0.5; it must be True or False",
    ),
    # Privacy.
    "clip 0": (hidden(clip=0.0), "clip is 0.0; it must be positive"),
    "clip infinite": (hidden(clip=np.inf), "clip is inf; it must be positive"),
    "noise negative": (hidden(noise_multiplier=-1.0), "noise_multiplier is -1.0; it must not be"),
    "noise a word": (
        hidden(noise_multiplier="much"),
        "noise_multiplier is 'much'; it must be a number",
        TypeError,
    ),
    "no clients a round": (hidden(clients_per_round=0), "clients_per_round is 0; it must be pos"),
    "noise of the count too small": (
        hidden(adaptive=AdaptiveClip(count_noise=0.2)),
        "adaptive.count_noise is 0.2; it must exceed half of noise_multiplier = 0.5",
    ),
    "quantile 1": (
        hidden(adaptive=AdaptiveClip(quantile=1.0)),
        "adaptive.quantile is 1.0; it must lie between 0 and 1",
    ),
    "rate of the clip 0": (
        hidden(adaptive=AdaptiveClip(rate=0.0)),
        "adaptive.rate is 0.0; it must be positive",
    ),
    "adaptive a dict": (
        hidden(adaptive={"quantile": 0.5}),
        r"adaptive is a dict of 1, not an AdaptiveClip; give AdaptiveClip\(quantile=0.5\)",
        TypeError,
    ),
    "epsilon of rounds that are traced": (
        lambda: jax.jit(lambda n: spent(num_rounds=n)())(2),
        "num_rounds is traced, but Python needs its value; close over it, give it to jax.jit in",
        TypeError,
    ),
    "epsilon of noise that is traced": (
        lambda: jax.jit(lambda z: spent(noise_multiplier=z)())(2.0),
        "noise_multiplier is traced, but Python needs its value; close over it",
        TypeError,
    ),
    "epsilon with hardly any noise": (
        spent(noise_multiplier=1e-9),
        "noise_multiplier is 1e-09 for 10 rounds, too little or too long to compute epsilon; give",
    ),
    "epsilon of a billion rounds": (spent(num_rounds=10**9), "is 1 for 1,000,000,000 rounds, too"),
    "epsilon of a billion rounds, sampled": (
        spent(available(ALL, bernoulli(0.1)), num_rounds=10**9),
        "noise_multiplier is 1 for 1,000,000,000 rounds, too little",
    ),
    "sampling no models": (
        spent(ALL.sampled(Sampling(0))),
        "sampling.most_models is 0; it must be a positive whole number",
    ),
    "sampling at a negative rate": (
        spent(ALL.sampled(Sampling(1, rate=-1.0))),
        r"sampling.rate is -1.0; it must be in \(0, 1\]",
    ),
    "noise for any epsilon": (
        lambda: noise_for(ALL, epsilon=1e9, num_rounds=10, delta=1e-5),
        r"epsilon is 1000000000.0; it must be in \(0, 10000\]",
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
