"""More wrong wrappers for rules of refusal that `tests/boundary` tests once."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm import personal
from fedjax_mm.asynchrony import on_clock
from fedjax_mm.availability import available, bernoulli, cyclic, dropping, markov, timetable
from fedjax_mm.base import Sampling
from fedjax_mm.compression import compressed, qsgd, random_k, top_k
from fedjax_mm.privacy import AdaptiveClip, noise_for
from fedjax_mm.robust import (
    bucketing,
    centered_clipping,
    geometric_median,
    krum,
    median,
    scaling,
    trimmed_mean,
)
from tests.boundary.wrong_wrappers import (
    ALL,
    DELAY,
    FEDAVG,
    attacked,
    changing,
    hidden,
    sending,
    spent,
    until,
)

CASES = {
    **{
        f"attackers are {what}": (attacked(clients), f"clients are {words}; give one bool for each")
        for what, clients, words in [
            ("a large number", 2**40, r"int64\[\]"),
            ("none", None, "None"),
            ("a word", "x", "'x'"),
            ("large numbers", [0, 2**70, 1], "a list of 3"),
            ("pairs", np.ones((2, 2), bool), r"bool\[2, 2\]"),
        ]
    },
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
    **{
        f"own parts are {words}": (
            lambda where=where: personal(FEDAVG, where),
            f"where is {words}; give a name of the parameters, several, or a function of a path",
            TypeError,
        )
        for where, words in [(5, "5"), (["norm", 5], "a list of 2")]
    },
    "a target of nan for one": (until(at_least=[0.1, np.nan]), r"at_least is \[0.1 nan\]; it must"),
    "a complex target": (until(at_most=1j), "at_most is 1j; it must be a number", TypeError),
    "change returns another state": (
        changing(lambda *given: (given[3], jnp.zeros(3)), init=lambda key: jnp.zeros(2)),
        r"the assignment mine returns float\d+\[3\] in its state where init returned float\d+\[2\]",
    ),
    "send returns a contribution alone": (
        sending(send=lambda context, sent, server, own: sent),
        "send of mine returns a Contribution; return two",
        TypeError,
    ),
    "serve returns a context alone": (
        sending(serve=lambda context, own: context),
        "serve of mine returns a ServerContext; return two",
        TypeError,
    ),
    "probability below 0": (lambda: bernoulli(-0.1), "probability is -0.1; it must lie between"),
    "probability nan": (lambda: bernoulli(np.nan), "probability is nan; it must lie between 0"),
    "probability none": (lambda: bernoulli(None), "probability is None; give a number", TypeError),
    "one of the probabilities": (lambda: bernoulli([0.5, 2.0]), "it must lie between 0 and 1"),
    "comes above 1": (lambda: markov(1.5, 0.1), "comes is 1.5; it must lie between 0 and 1"),
    "leaves below 0": (lambda: markov(0.5, -0.1), "leaves is -0.1; it must lie between 0 and 1"),
    "no groups": (lambda: cyclic(0), "num_groups is 0; it must be a positive whole number"),
    "half a group": (lambda: cyclic(1.5), "num_groups is 1.5; it must be a positive whole number"),
    "intervals overlap": (lambda: timetable([[(0, 2), (1, 3)]]), r"\(1, 3\) after 2; give pairs"),
    "interval before the start": (lambda: timetable([[(-1, 2)]]), r"\(-1, 2\) after 0; give pairs"),
    "no period": (lambda: timetable([[(0, 1)]], period=0), "period is 0; it must be positive"),
    "timetable of others": (
        lambda: available(ALL, timetable([[(0, 1)]])),
        "law is for 1 clients, and there are 4",
    ),
    "absent how": (
        lambda: available(ALL, bernoulli(0.5), when_absent="wait"),
        "when_absent is 'wait'; it must be 'skip' or 'replace'",
    ),
    "unbiased, never there": (
        lambda: available(ALL, bernoulli(0.0), unbiased=True),
        "unbiased needs the shares of presence, which must be positive",
    ),
    "lost above 1": (lambda: dropping(ALL, 1.01), "probability is 1.01; it must lie between 0"),
    "first nobody": (lambda: on_clock(ALL, DELAY, first=0), "first is 0; it must be a positive"),
    "first and a half": (lambda: on_clock(ALL, DELAY, first=1.5), "first is 1.5; it must be a"),
    "deadline at once": (lambda: on_clock(ALL, DELAY, deadline=0), "deadline is 0; it must be pos"),
    "deadline nan": (lambda: on_clock(ALL, DELAY, deadline=np.nan), "deadline is nan; it must be"),
    "share 0": (lambda: top_k(0.0), r"share is 0.0; it must be in \(0, 1\]"),
    "share above 1": (lambda: random_k(1.5), r"share is 1.5; it must be in \(0, 1\]"),
    "share a word": (lambda: top_k("all"), "share is 'all'; it must be a number", TypeError),
    "no levels": (lambda: qsgd(0), "levels is 0; it must be a positive whole number"),
    "half a level": (lambda: qsgd(2.5), "levels is 2.5; it must be a positive whole number"),
    "feedback a number": (
        lambda: compressed(FEDAVG, top_k(0.1), error_feedback=0.5),
        "error_feedback is 0.5; it must be True or False",
    ),
    "clip 0": (hidden(clip=0.0), "clip is 0.0; it must be positive"),
    "clip infinite": (hidden(clip=np.inf), "clip is inf; it must be positive"),
    "noise negative": (hidden(noise_multiplier=-1.0), "noise_multiplier is -1.0; it must not be"),
    "noise a word": (
        hidden(noise_multiplier="much"),
        "noise_multiplier is 'much'; it must be a number",
        TypeError,
    ),
    "no clients a round": (hidden(clients_per_round=0), "clients_per_round is 0; it must be pos"),
    "quantile 1": (
        hidden(adaptive=AdaptiveClip(quantile=1.0)),
        "adaptive.quantile is 1.0; it must lie between 0 and 1",
    ),
    "rate of the clip 0": (
        hidden(adaptive=AdaptiveClip(rate=0.0)),
        "adaptive.rate is 0.0; it must be positive",
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
    "num_attackers is -1": (lambda: krum(-1), "num_attackers is -1"),
    "num_trimmed and share are given": (
        lambda: trimmed_mean(1, share=0.1),
        "num_trimmed and share",
    ),
    "share is 0.5": (lambda: trimmed_mean(share=0.5), "share is 0.5"),
    "smoothing is 0.0": (lambda: geometric_median(smoothing=0.0), "smoothing is 0.0"),
    "radius is 0.0": (lambda: centered_clipping(0.0), "radius is 0.0"),
    "size is 0": (lambda: bucketing(median(), 0), "size is 0"),
}
