"""Every method against its NumPy float64 loop, and what it must reduce to; SCAFFOLD's promises."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedjax_mm.algorithms.views import client_losses

from fedjax_mm import (
    afl,
    ditto,
    fedavg,
    fedprox,
    full_participation,
    inverse_time,
    least_squares,
    maxfl,
    mfa_rand,
    mwfed,
    perfedavg,
    qffl,
    quadratic,
    requiring,
    scaffold,
    simulate,
)
from tests import reference_maxfl as oracle
from tests.helpers import Measured, roll_out
from tests.method_problems import BATCH, MODELS, PROBLEMS, ROUNDS, SEED, N

pytestmark = pytest.mark.usefixtures("x64")

M, E = MODELS, 3
ASSIGNMENT = mfa_rand(N, M, cohort_size=5)
RATE, RATES = inverse_time(2.0, 30.0), [2.0 / (t + 30.0) for t in range(ROUNDS + 1)]
# Some clients are content from the start, some become so, some never are.
THRESHOLDS = {
    "least squares": np.array([0.4, 4.0, 1.5, 3.0, 0.9, 2.0, 6.0]),
    "softmax": np.array([0.2, 1.5, 0.9, 1.1, 0.6, 1.0, 2.0]),
}


class Method(NamedTuple):
    """A method's factory and loop, and the options of both."""

    factory: Any
    loop: Any
    options: dict[str, Any]


MAXFL = {"server_rate": 0.7, "eps": 0.1, "weight": "derivative", "slope": 1.0}
METHODS = {
    "maxfl": Method(maxfl, oracle.maxfl, MAXFL),
    "maxfl steep": Method(maxfl, oracle.maxfl, MAXFL | {"slope": 2.5, "eps": 0.0}),
    "maxfl sigmoid": Method(maxfl, oracle.maxfl, MAXFL | {"weight": "sigmoid"}),
    "fedprox": Method(fedprox, oracle.fedprox, {"mu": 0.8}),
    "scaffold II": Method(scaffold, oracle.scaffold, {"server_rate": 0.9, "option": "II"}),
    "scaffold I": Method(scaffold, oracle.scaffold, {"server_rate": 1.0, "option": "I"}),
    "perfedavg FO": Method(
        perfedavg, oracle.perfedavg, {"alpha": 0.05, "variant": "FO", "delta": 1e-3}
    ),
    "perfedavg HF": Method(
        perfedavg, oracle.perfedavg, {"alpha": 0.05, "variant": "HF", "delta": 1e-3}
    ),
    "qffl 1": Method(qffl, oracle.qffl, {"q": 1.0}),
    "qffl 10": Method(qffl, oracle.qffl, {"q": 10.0}),
    "afl": Method(afl, oracle.afl, {"mixture_rate": 0.05}),
    "mwfed": Method(mwfed, oracle.mwfed, {"growth": 4.0}),
    "mwfed 2": Method(mwfed, oracle.mwfed, {"growth": 2.0}),
    "ditto": Method(ditto, oracle.ditto, {"lam": 0.5}),
}


@functools.cache
def all_groups():
    """Who trains what."""
    return roll_out(ASSIGNMENT, jax.random.key(SEED), ROUNDS)


def error(actual, expected):
    """The largest difference relative to the largest entry."""
    return np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()


def steps_of(factory):
    """AFL takes one step, and has no option for it."""
    return {} if factory is afl else {"local_steps": E}


def run(factory, options, compared, thresholds, rng_key, start, **how):
    """The compiled run; options that are numbers are its arguments."""
    fixed = {name: value for name, value in options.items() if isinstance(value, str)}
    if factory is mwfed:
        fixed = options
    numbers = {name: value for name, value in options.items() if name not in fixed}

    def program(task, thresholds, numbers):
        algorithm = factory(RATE, **steps_of(factory), batch_size=BATCH, **fixed, **numbers)
        algorithm = requiring(algorithm, thresholds=thresholds)
        return simulate(rng_key, task, algorithm, ASSIGNMENT, ROUNDS, params=start, **how)

    return jax.jit(program)(compared.task, jnp.asarray(thresholds), numbers)


@pytest.mark.parametrize(("name", "client_map"), [("least squares", 2), ("softmax", "vmap")])
@pytest.mark.parametrize("method", METHODS)
def test_equals_its_loop(method, name, client_map):
    """20 rounds of two models, each trained by 2 or 3 of 7 clients of 1 to 9 examples."""
    factory, loop, options = METHODS[method]
    compared, thresholds, rng_key = PROBLEMS[name](), THRESHOLDS[name], jax.random.key(SEED)
    start = np.random.default_rng(2).normal(size=(M, compared.size))
    state, trace = run(
        factory,
        options,
        compared,
        thresholds,
        rng_key,
        compared.start(start),
        client_map=client_map,
    )
    groups = all_groups()
    models = state.models
    for m in range(M):
        problem = compared.problem(m, thresholds)
        rounds = [[int(k) for k in group if k >= 0] for group in groups[:, m]]
        num_steps = 1 if factory is afl else E
        result = loop(problem, start[m], rounds, RATES.__getitem__, num_steps, **options)
        w, *rest = result if isinstance(result, tuple) else (result,)
        assert error(compared.flat(models.params)[m], w) < 1e-10
        if factory is scaffold:
            assert error(compared.flat(models.server)[m], rest[0]) < 1e-10
            assert error(compared.flat(models.clients.state)[m], rest[1]) < 1e-10
        if factory is ditto:
            assert error(compared.flat(models.clients.state)[m], rest[0]) < 1e-10
        if factory is afl:
            assert error(compared.flat(models.server.average)[m], rest[0]) < 1e-10
            appeal = np.mean([problem.loss(k, rest[0]) < thresholds[k] for k in range(N)])
            assert trace.metrics["train_appeal"][-1, m] == pytest.approx(appeal)
        if factory is mwfed:
            assert error(np.exp(models.server.log_weights[m]), rest[0]) < 1e-10
            assert len(set(rest[1])) > 3, "the weights do not change the numbers of steps"
            np.testing.assert_array_equal(trace.gradients[1:, m], rest[1])


def gradients(trace):
    """Of one local training."""
    return int(trace.gradients[-1, 0] / trace.client_updates[-1, 0])


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        *(("maxfl", E), ("fedprox", E), ("scaffold II", E), ("scaffold I", E + 1)),
        *(("perfedavg FO", 2 * E), ("perfedavg HF", 4 * E), ("qffl 1", E), ("afl", 1)),
        ("ditto", 2 * E),
    ],
)
def test_gradients_are_counted(method, expected):
    factory, _, options = METHODS[method]
    compared, thresholds = PROBLEMS["least squares"](), THRESHOLDS["least squares"]
    algorithm = requiring(factory(0.1, **steps_of(factory), **options), thresholds=thresholds)
    _, trace = simulate(jax.random.key(0), compared.task, algorithm, ASSIGNMENT, 1)
    assert gradients(trace) == expected


def test_equal_gaps_make_maxfl_unweighted_fedavg():
    """Every client has the same examples, so that all losses are equal; n_k are too."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 3)), rng.normal(size=5)
    task = least_squares([x] * N, [y] * N, ridge=0.1)
    options = {"local_steps": E, "batch_size": 2}
    both = [
        simulate(jax.random.key(1), task, algorithm, ASSIGNMENT, ROUNDS)[0].models.params
        for algorithm in (
            requiring(maxfl(0.1, **options, eps=0.0), thresholds=np.full(N, 0.5)),
            fedavg(0.1, **options, weighted=False),
        )
    ]
    assert error(both[0], both[1]) < 1e-12


def test_equal_gaps_of_different_clients_make_maxfl_unweighted_fedavg():
    """In one round, whatever their losses and n_k are, if thresholds are as far below."""
    compared = PROBLEMS["least squares"]()
    start = compared.start(np.random.default_rng(2).normal(size=(1, compared.size)))
    losses = client_losses(compared.task, jnp.asarray(start[0]))
    options = {"local_steps": E, "batch_size": BATCH}
    assignment, ends = mfa_rand(N, 1, cohort_size=5), {}
    for name, algorithm in {
        "maxfl": requiring(maxfl(0.1, **options, eps=0.0), thresholds=losses - 0.3),
        "unweighted": fedavg(0.1, **options, weighted=False),
        "weighted": fedavg(0.1, **options),
    }.items():
        state, _ = simulate(
            jax.random.key(1), compared.task, algorithm, assignment, 1, params=start
        )
        ends[name] = state.models.params
    assert error(ends["maxfl"], ends["unweighted"]) < 1e-12
    assert error(ends["maxfl"], ends["weighted"]) > 1e-3


@pytest.mark.parametrize(
    ("algorithm", "weighted"),
    [
        (lambda **options: qffl(RATE, q=0.0, **options), False),
        (lambda **options: fedprox(RATE, mu=0.0, **options), True),
        (lambda **options: ditto(RATE, lam=1.0, **options), True),
    ],
    ids=["qffl", "fedprox", "ditto"],
)
def test_reduces_to_fedavg(algorithm, weighted):
    options = {"local_steps": E, "batch_size": BATCH}
    compared = PROBLEMS["least squares"]()
    start = compared.start(np.random.default_rng(2).normal(size=(M, compared.size)))
    both = [
        simulate(jax.random.key(5), compared.task, each, ASSIGNMENT, ROUNDS, params=start)
        for each in (algorithm(**options), fedavg(RATE, weighted=weighted, **options))
    ]
    assert error(both[0][0].models.params, both[1][0].models.params) < 1e-12


@pytest.mark.parametrize("variant", ["FO", "HF"])
def test_perfedavg_without_inner_step_is_unweighted_fedavg(variant):
    """On full gradients, since the outer batch is the second one of each step."""
    task = PROBLEMS["least squares"]().task
    both = [
        simulate(jax.random.key(5), task, each, ASSIGNMENT, ROUNDS)[0].models.params
        for each in (
            perfedavg(RATE, local_steps=E, alpha=0.0, variant=variant),
            fedavg(RATE, local_steps=E, weighted=False),
        )
    ]
    assert error(both[0], both[1]) < 1e-12
    moved = simulate(
        jax.random.key(5),
        task,
        perfedavg(RATE, local_steps=E, alpha=0.05, variant=variant),
        ASSIGNMENT,
        ROUNDS,
    )[0].models.params
    assert error(moved, both[0]) > 1e-4


def test_scaffold_keeps_the_mean_of_control_variates():
    """sum of c_k / N = c, with 2 or 3 of 7 clients a round and a changing rate."""
    compared = PROBLEMS["least squares"]()
    algorithm = scaffold(RATE, local_steps=E, batch_size=BATCH)
    state, _ = simulate(jax.random.key(0), compared.task, algorithm, ASSIGNMENT, ROUNDS)
    c, c_k = state.models.server, state.models.clients
    np.testing.assert_allclose(c_k.mean(axis=1), c, rtol=0, atol=1e-13 * np.abs(c_k).max())
    assert np.abs(c).max() > 0.1
    assert np.abs(c_k - c[:, None]).max() > 0.1


def test_scaffold_finds_the_minimizer_where_fedavg_stalls():
    """The quadratic with E = 5 full-gradient steps of a constant rate."""
    task, assignment = quadratic(8, 2, mu=0.1), full_participation(8)
    gaps = {}
    for name, algorithm in (
        ("FedAvg", fedavg(0.2, local_steps=5)),
        ("SCAFFOLD", scaffold(0.2, local_steps=5)),
    ):
        program = jax.jit(
            lambda task, algorithm=algorithm: simulate(
                jax.random.key(0), task, algorithm, assignment, 600, record_every=300
            )[1]
        )
        gaps[name] = program(task).metrics["excess_loss"][:, 0]
    print({name: [f"{gap:.3e}" for gap in each] for name, each in gaps.items()})
    fedavg_gaps, scaffold_gaps = gaps["FedAvg"], gaps["SCAFFOLD"]
    assert fedavg_gaps[-1] > 1e-5
    assert fedavg_gaps[-1] == pytest.approx(float(fedavg_gaps[-2]), rel=1e-6), "it stalls"
    assert scaffold_gaps[-1] < 1e-20


def test_scaffold_options_agree_on_one_full_gradient_step():
    """The gradient at w is then the mean gradient of the local steps."""
    task = quadratic(8, 2, mu=0.1)
    ends = [
        simulate(
            jax.random.key(0),
            task,
            scaffold(0.2, local_steps=1, option=each),
            mfa_rand(8, 1, cohort_size=3),
            10,
        )[0].models.clients
        for each in ("I", "II")
    ]
    assert error(ends[0], ends[1]) < 1e-12


def test_mwfed_outlives_long_contentment():
    """After hundreds of rounds the content weigh nothing in 32 bits, but the model is a number.

    The other one takes 4 tau steps, not N tau.
    """
    with jax.enable_x64(False):
        task = quadratic(8, 1, mu=0.5)
        rho = np.array([-1e3] + 7 * [1e3], np.float32)
        algorithm = requiring(mwfed(0.1, local_steps=2), thresholds=rho)
        state, trace = simulate(
            jax.random.key(0), task, algorithm, mfa_rand(8, 1, cohort_size=1), 300
        )
        assert np.isfinite(state.models.params).all()
        assert np.exp(state.models.server.log_weights[0, 0]) == pytest.approx(1.0)
        assert set(np.unique(trace.gradients[50:])) == {1, 8}


def test_qffl_of_vanishing_losses_stays_a_number():
    """F^q underflows in 32 bits, F being 0.015 and 0.06: nothing is added."""
    with jax.enable_x64(False):
        task, start = Measured(jnp.array([0.1, 0.2])), {"w": jnp.zeros(3)}
        algorithm, everybody = qffl(0.1, q=500.0, local_steps=1), full_participation(2)
        state, _ = simulate(jax.random.key(0), task, algorithm, everybody, 2, params=start)
        np.testing.assert_array_equal(state.models.params["w"], 0)


def test_qffl_of_a_loss_of_zero_stays_a_number():
    """Of which a negative power is taken where q < 1; it hardly counts beside 3/2."""
    task, start = Measured(jnp.array([0.0, 1.0])), {"w": jnp.zeros(3)}
    algorithm = qffl(0.1, q=0.5, local_steps=2)
    state, _ = simulate(jax.random.key(0), task, algorithm, full_participation(2), 1, params=start)
    loss, dw = 1.5, (1 - 0.9**2) / 0.1
    h = 0.5 * loss**-0.5 * 3 * dw**2 + (loss**0.5 + 1e-5) / 0.1
    np.testing.assert_allclose(state.models.params["w"][0], loss**0.5 * dw / h, rtol=1e-6)


def test_maxfl_ignores_the_hopeless():
    """Weights that underflow, without eps: nothing is added."""
    task = quadratic(4, 1, mu=0.5)
    algorithm = requiring(maxfl(0.1, local_steps=1, eps=0.0), thresholds=np.full(4, -1e9))
    state, _ = simulate(jax.random.key(0), task, algorithm, mfa_rand(4, 1), 2)
    np.testing.assert_array_equal(state.models.params, 0)


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        (maxfl, {"eps": -0.1}, "eps is -0.1; it must not be negative"),
        (maxfl, {"slope": 0.0}, "slope is 0.0; it must be positive"),
        (maxfl, {"slope": -1.0}, "slope is -1.0"),
        (maxfl, {"server_rate": 0.0}, "server_rate is 0.0"),
        (maxfl, {"weight": "relu"}, "weight is 'relu'; it must be 'derivative' or 'sigmoid'"),
        (fedprox, {"mu": -1.0}, "mu is -1.0; it must not be negative"),
        (scaffold, {"option": "III"}, "option is 'III'; it must be 'I' or 'II'"),
        (scaffold, {"server_rate": float("nan")}, "server_rate is nan"),
        (perfedavg, {"alpha": -0.1}, "alpha is -0.1"),
        (perfedavg, {"delta": 0.0}, "delta is 0.0"),
        (perfedavg, {"variant": "SO"}, "variant is 'SO'; it must be 'FO' or 'HF'"),
        (qffl, {"q": -1.0}, "q is -1.0; it must not be negative"),
        (afl, {"mixture_rate": 0.0}, "mixture_rate is 0.0"),
        (mwfed, {"growth": 1.0}, "growth is 1.0; it must be greater than 1"),
        (ditto, {"lam": -0.5}, "lam is -0.5"),
    ],
)
def test_wrong_options_are_refused_before_compilation(factory, arguments, message):
    required = {fedprox: {"mu": 1.0}, qffl: {"q": 1.0}, ditto: {"lam": 1.0}}
    required[afl] = {"mixture_rate": 1.0}
    with pytest.raises(ValueError, match=message):
        factory(0.1, **steps_of(factory), **(required.get(factory, {}) | arguments))


@pytest.mark.parametrize("factory", [maxfl, fedprox, scaffold, perfedavg, qffl, mwfed, ditto])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be positive"),
        ({"local_steps": 0}, "local_steps is 0; it must be a positive whole number"),
        ({"local_steps": None}, "local_steps is None; give a positive whole number"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_wrong_sizes_are_refused_before_compilation(factory, arguments, message):
    required = {fedprox: {"mu": 1.0}, qffl: {"q": 1.0}, ditto: {"lam": 1.0}}.get(factory, {})
    with pytest.raises(ValueError, match=message):
        factory(**({"learning_rate": 0.1, "local_steps": 2} | required | arguments))


@pytest.mark.parametrize("factory", [maxfl, mwfed])
def test_thresholds_must_come_from_somewhere(factory):
    task = quadratic(4, 2, mu=0.1)
    with pytest.raises(ValueError, match=r"Quadratic have no thresholds; wrap the .* `requiring`"):
        simulate(jax.random.key(0), task, factory(0.1, local_steps=1), full_participation(4), 1)
