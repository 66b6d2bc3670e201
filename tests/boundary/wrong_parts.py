"""Wrong parts of experiments: name, call, error message and type of the error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from flax import nnx

from fedjax_mm import (
    advance,
    appealing,
    attacked,
    ditto,
    fedavg,
    fedcluster,
    feddyn,
    fednova,
    fedprox,
    full_participation,
    ifca,
    init,
    join_traces,
    local_sgd,
    maxfl,
    mfa_rand,
    mfa_rr,
    mifa,
    mwfed,
    noisy,
    oort,
    params_of,
    perfedavg,
    power_of_choice,
    prsgd,
    qffl,
    run,
    scaffold,
    sequential,
    simulate,
    stalevr,
    sweep,
    to_dataset,
    variance_reduced,
)
from fedjax_mm.asynchrony import (
    bods,
    device_time,
    fedast,
    on_clock,
    shifted_exponential,
)
from fedjax_mm.availability import dropping
from fedjax_mm.base import Cohort, Padded
from fedjax_mm.compression import message_bytes
from fedjax_mm.data import federate
from fedjax_mm.metrics import client_fairness
from fedjax_mm.metrics import fairness as over_clients
from fedjax_mm.plots import client_distribution, sweep_overview
from fedjax_mm.schedules import growing_sample_size, inverse_time, per_frame
from fedjax_mm.simulator.record import Trace
from fedjax_mm.sweeps import Grid, Setup, Until
from fedjax_mm.tasks import (
    LogisticRegression,
    Tuning,
    classification,
    draw_means,
    local_minimum,
    mean_estimation,
    own_models,
    quadratic,
    requiring,
    with_clients,
)
from fedjax_mm.theory import Problem, Rate, cohorts, fairness, mfa
from fedjax_mm.theory import maxfl as maxfl_theory
from tests.boundary.parts import (
    ALL,
    DATA,
    EVERYBODY,
    FEDAVG,
    KEY,
    QUADRATIC,
    TASK,
    X,
    Y,
    clients_of,
    store,
    swept,
)
from tests.helpers import Towards

LOSSES = xr.Dataset({"loss": (("round", "model"), np.ones((2, 1)))})


def simulated(key=KEY, tasks=QUADRATIC, algorithm=FEDAVG, assignment=EVERYBODY, rounds=2, **more):
    """A call of `simulate`."""
    return lambda: simulate(key, tasks, algorithm, assignment, rounds, **more)


def dispatched(num_models=1, **options):
    """A call of `fedast`."""
    return lambda: fedast(4, num_models, **{"at_work": 4, "ratio": 2} | options)


def asynchronous(algorithm=FEDAVG, dispatch=None, rounds=4, tasks=QUADRATIC, **more):
    """A call of `simulate` with a dispatch rule."""
    rule = dispatched()() if dispatch is None else dispatch
    return lambda: simulate(KEY, tasks, algorithm, rule, rounds, **more)


def started(assignment):
    """The state before round 1."""
    return init(KEY, QUADRATIC, FEDAVG, assignment)


def averaged(rate=0.1, server_optimizer=None, server_scale="mean", **local):
    """A call of `fedavg`."""
    own = {"server_optimizer": server_optimizer, "server_scale": server_scale}
    return lambda: fedavg(local_sgd(rate, **{"steps": 2} | local), **own)


class Net(nnx.Module):
    """A network of flax nnx."""

    def __init__(self):
        """Has no layers."""


@jax.tree_util.register_static
class Forwarding:
    """A wrapper that changes the loss but forwards all else, the closed form included."""

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)

    def loss(self, params, batch):
        return 2 * self.task.loss(params, batch)


@jax.tree_util.register_static
class Incomplete:
    """A task that lacks most methods."""

    num_clients = 4

    def init(self, rng_key):
        """Returns parameters."""


class Plain(Incomplete):
    """A task that is not registered with JAX."""

    def init(self, rng_key):
        return jnp.zeros(4)

    def weight(self, client):
        return jnp.ones(())

    def batch(self, rng_key, client, step, how):
        return client

    def loss(self, params, batch):
        return jnp.sum(params**2)

    def metrics(self, rng_key, params):
        return {}


def plain(**functions):
    """A registered task with some methods replaced."""
    return jax.tree_util.register_static(type("Own", (Plain,), functions))()


def bound(statement, **given):
    """A call of a theorem with changed symbols."""
    numbers = {"N": 4, "M": 2, "E": 2, "mu": 1.0, "L": 12.5, "Gamma": 0.0, "G": 1.0, "sigma": 0.0}
    return lambda: statement(1, Problem(**numbers | given), Rate(2.0, 100.0), D=1.0)


def sending(**changes):
    """FedAvg whose clients send changed contributions."""

    def client(context, server_state, client_state):
        sent, state = FEDAVG.client(context, server_state, client_state)
        return sent._replace(**changes), state

    return FEDAVG._replace(client=client)


def measuring(metrics):
    """FedAvg with additional metrics."""
    return FEDAVG._replace(metrics=lambda task, params, state: metrics)


def started_in_float64():
    """The state before round 1 in float64."""
    with jax.enable_x64(True):
        return init(0, quadratic(4, 2, mu=0.1), FEDAVG, EVERYBODY)


def swapped():
    """A trace of two runs and two records, with the axis of runs after that of records."""
    rounds, counts = np.array([[0, 0], [1, 1]]), np.zeros((2, 2, 1), np.int32)
    metrics = {"loss": np.zeros((2, 2, 1))}
    return Trace(rounds, metrics, counts, counts, counts, upload_size=(9,), download_size=(9,))


def traced(function):
    """A call of a function with a traced argument 4."""
    return lambda: jax.jit(lambda n: (function(n), n)[1])(4)


TRACED = {
    f"{name} traced": (traced(call), f"{words} is traced, but Python needs its value", TypeError)
    for name, words, call in (
        ("clients of MFA-RR", "num_clients", lambda n: mfa_rr(n, 2)),
        ("models of MFA-RR", "num_models", lambda n: mfa_rr(8, n)),
        ("cohort of MFA-RR", "cohort_size", lambda n: mfa_rr(8, 2, cohort_size=n)),
        ("clients of MFA-Rand", "num_clients", lambda n: mfa_rand(n, 2)),
        ("padded size", "num_models", lambda n: mfa_rand(8, Padded(n, 2))),
        ("processors", "processors", lambda n: mfa_rand(8, 2, processors=n)),
        ("a client's processors", r"processors\[1\]", lambda n: mfa_rand(2, 2, processors=[1, n])),
        ("clients of FedCluster", "num_clients", lambda n: fedcluster(n, 2)),
        ("clusters", "num_clusters", lambda n: fedcluster(8, n)),
        ("clients of all", "num_clients", full_participation),
        ("clients of a quadratic", "num_clients", lambda n: quadratic(n, 2, mu=0.1)),
        ("block of a quadratic", "block_size", lambda n: quadratic(4, n, mu=0.1)),
    )
}
RUN = QUADRATIC, FEDAVG, EVERYBODY
NOT_A_NUMBER = TypeError
UNEVEN = classification(
    federate((X, Y), np.split(np.arange(24), [5, 10, 12])), LogisticRegression(3)
)
LONG = fedavg(local_sgd(0.1, epochs=2**30, batch_size=2))
LOCAL = local_sgd(0.1, steps=2)


def devices(num_clients=4, **changes):
    how = {"steps": 5, "flops": 1e9, "bytes_down": 1e6, "bytes_up": 1e6, "speed": 1e9, "down": 1e7}
    return lambda: on_clock(mfa_rand(4, 2), device_time(num_clients, **how | changes))


ORDER = r"simulate takes \(rng_key, tasks, algorithm, assignment, num_rounds\)"

CASES = TRACED | {
    # Seeds.
    "no jobs": (dispatched(at_work=0), "at_work is 0; it must be a positive whole number"),
    "jobs of others": (dispatched(2, at_work=(3, 3, 3)), "at_work has 3 numbers; .* each of 2"),
    "half a job": (dispatched(at_work=2.5), "at_work is 2.5; it must be a positive whole"),
    "no arrivals": (
        dispatched(arrivals_per_round=0),
        "arrivals_per_round is 0; it must be a positive whole number",
    ),
    "ratio 0": (dispatched(ratio=0), "ratio is 0; it must be a positive whole number"),
    "ratio too large": (
        dispatched(2, at_work=2, ratio=3),
        "at_work is 4 in all, fewer than ratio = 3 for each of 2 models; give more jobs",
    ),
    "reallocate how": (dispatched(reallocate="variance"), "reallocate is 'variance'; it must be"),
    "delay a number": (dispatched(delay=1.5), "delay is 1.5; give a function of a key", TypeError),
    "mean delay negative": (lambda: shifted_exponential(4, -1.0), "mean is -1.0; it must not be"),
    "one mean delay of two": (
        lambda: shifted_exponential(4, np.array([1.0, np.nan])),
        "mean is nan; it must not be negative",
    ),
    "delays of fewer models": (
        dispatched(2, delay=shifted_exponential(4, np.array([1.0, 2.0, 3.0]))),
        "delay has means or shifts of 3 models, and there are 2; give one number for each",
    ),
    "delays of fewer clients": (
        dispatched(delay=shifted_exponential(3)),
        r"delay is for 3 clients, and there are 4; give shifted_exponential\(4\)",
    ),
    "a clock of other models": (
        lambda: on_clock(mfa_rand(4, 2), shifted_exponential(4, shift=np.ones(3))),
        "delay has means or shifts of 3 models, and there are 2; give one number for each",
    ),
    "delay of two arguments": (
        dispatched(delay=lambda rng_key, model: 1.0),
        r"delay\(rng_key, model, client\) cannot be called: too many positional arguments; give",
        TypeError,
    ),
    "delays of all models": (
        dispatched(delay=lambda rng_key, model, client: jnp.ones(3)),
        r"delay\(rng_key, model, client\) returns .*shape.*; give one time",
    ),
    "two means and three shifts": (
        lambda: shifted_exponential(4, np.ones(2), shift=np.ones(3)),
        "mean has 2 numbers and shift has 3; give one for each model, or one for all",
    ),
    "too many slow and fast": (
        lambda: shifted_exponential(4, slow=0.6, fast=0.6),
        r"slow \+ fast is 1.2; it must lie between 0 and 1",
    ),
    "devices of others": (
        devices(3),
        r"delay is for 3 clients, and there are 4; give device_time\(4, ...\)",
    ),
    "devices for three models": (
        devices(bytes_up=[1e6, 1e6, 1e6]),
        "delay has steps, flops or bytes of 3 models, and there are 2; give one number for each",
    ),
    "flops of two models, bytes of three": (
        devices(flops=[1e9, 1e9], bytes_up=np.ones(3)),
        "flops of 2 and bytes_up of 3 models differ; give one number for each model, or one for",
    ),
    "speeds of three clients": (
        devices(speed=[1e9, 1e9, 1e9]),
        r"speed is an array of shape \(3,\), and there are 4 clients; give one number for",
    ),
    "steps of three clients": (
        devices(steps=np.ones((2, 3))),
        r"steps is an array of shape \(2, 3\), and there are 4 clients; give one number for each",
    ),
    "bytes of clients": (
        devices(bytes_up=np.ones((2, 4))),
        r"bytes_up is of shape \(2, 4\); give one number, or one axis",
    ),
    "a device that stands still": (
        devices(speed=[1e9, 0.0, np.inf, 1e9]),
        r"speed is 0 at \[1\]; it must be positive; infinite takes no time",
    ),
    "bandwidth rounded to 0": (devices(down=1e-60), "down is 1e-60; it must be positive; infin"),
    "endless steps": (devices(steps=np.inf), "steps is inf; it must be finite and not negative"),
    "bytes to come": (devices(bytes_down=-1), "bytes_down is -1; it must be finite and not neg"),
    "latency unknown": (devices(latency=np.nan), "latency is nan; it must be finite and not neg"),
    "speed in words": (devices(speed="fast"), "speed is 'fast'; give a number, or an a", TypeError),
    "spread negative": (devices(speed_spread=-1.0), "speed_spread is -1.0; it must not be negat"),
    "bytes of no algorithm": (
        lambda: message_bytes(QUADRATIC, 0.1),
        "algorithm is 0.1, not an algorithm",
        TypeError,
    ),
    "clock of no assignment": (
        lambda: on_clock(FEDAVG, shifted_exponential(4)),
        "assignment is an Algorithm, not an assignment",
        TypeError,
    ),
    "clock without a delay": (lambda: on_clock(ALL, 2.0), "delay is 2.0; give a func", TypeError),
    "task for algorithm, asynchronous": (
        asynchronous(algorithm=QUADRATIC),
        "algorithm is a Quadratic, not an algorithm",
        TypeError,
    ),
    "two tasks for one model, asynchronous": (
        asynchronous(tasks=[QUADRATIC] * 2),
        "there are 2 tasks but the dispatch has 1 models",
    ),
    "other clients, asynchronous": (
        asynchronous(tasks=quadratic(5, 2, mu=0.1)),
        r"tasks have \[5\] clients to train but the dispatch draws from 4",
    ),
    "states of clients, asynchronous": (
        asynchronous(scaffold(local_sgd(0.1, steps=2))),
        "keeps client states, but asynchronous clients may run several jobs",
    ),
    "rounds 0, asynchronous": (asynchronous(rounds=0), "num_rounds is 0; it must be a positive wh"),
    "record_every, asynchronous": (
        asynchronous(record_every=3),
        "record_every is 3; it must be a divisor of num_rounds = 4",
    ),
    "client map, asynchronous": (asynchronous(client_map="all"), "client_map is 'all'; it must"),
    "state of rounds, asynchronous": (
        lambda: advance(started(EVERYBODY), QUADRATIC, FEDAVG, dispatched()(), 4),
        "state is of a run in rounds, but the assignment is a Dispatch; give the assignment that",
        TypeError,
    ),
    "state of arrivals, in rounds": (
        lambda: advance(started(dispatched()()), QUADRATIC, FEDAVG, EVERYBODY, 4),
        "state is of an asynchronous run, but the assignment is an Assignment; give the assignment",
        TypeError,
    ),
    "key None": (simulated(None), "rng_key is None; give a seed, such as 0, or a key", TypeError),
    "key text": (simulated("0"), "rng_key is '0'; give a seed", TypeError),
    "key fractional": (simulated(1.5), "rng_key is 1.5; give a seed", TypeError),
    "key True": (simulated(True), "rng_key is True; give a seed", TypeError),
    "key a generator": (simulated(np.random.default_rng(0)), "is a Generator; give", TypeError),
    "key a function": (simulated(jax.random.key), "is the function key; give", TypeError),
    "seed -1": (simulated(-1), "rng_key is -1; it must be a whole number, 0 ... 4294967295"),
    "seed 2^32": (simulated(2**32), "rng_key is 4294967296; it must be"),
    "several keys": (
        simulated(jax.random.split(KEY, 3)),
        r"has shape \(3,\); .* jax.vmap over sev",
    ),
    "several seeds": (
        simulated(np.arange(3)),
        "rng_key is an array of shape .3,.; give",
        TypeError,
    ),
    "init key None": (lambda: init(None, QUADRATIC, FEDAVG, EVERYBODY), "rng_key is N", TypeError),
    "own key None": (lambda: own_models(None, TASK, learning_rate=0.1), "rng_key is N", TypeError),
    "means key": (lambda: draw_means("0", [0.0, 1.0]), "rng_key is '0'; give a seed", TypeError),
    # Parts in the wrong place.
    "algorithm not called": (
        simulated(algorithm=fedavg),
        r"algorithm is the function fedavg, not an algorithm; call it, as in fedavg\(...\)",
        TypeError,
    ),
    "task not called": (simulated(tasks=quadratic), "tasks is the function quadratic", TypeError),
    "task's class": (simulated(tasks=type(QUADRATIC)), "tasks is the class Quadratic", TypeError),
    "assignment not called": (
        simulated(assignment=full_participation),
        r"assignment is the function full_participation, .* as in full_participation\(...\)",
        TypeError,
    ),
    "task and algorithm": (simulated(tasks=FEDAVG, algorithm=QUADRATIC), ORDER, TypeError),
    "algorithm and assignment": (
        simulated(algorithm=EVERYBODY, assignment=FEDAVG),
        ORDER,
        TypeError,
    ),
    "task and assignment": (simulated(tasks=EVERYBODY, assignment=QUADRATIC), ORDER, TypeError),
    "rounds for assignment": (simulated(assignment=10), "assignment is 10, not an assi", TypeError),
    "data as the task": (
        simulated(tasks=DATA),
        r"tasks is a FederatedData, not a task; .* tasks.classification\(data, module\)",
        TypeError,
    ),
    "store as the task": (simulated(tasks=DATA.train), "tasks is a ClientData, not a t", TypeError),
    "array as the task": (simulated(tasks=X), "tasks is an array of shape", TypeError),
    "arrays as tasks": (simulated(tasks=(X, Y)), r"tasks\[0\] is an array of shape", TypeError),
    "module as the task": (simulated(tasks=TASK.module), "is a LogisticRegression, n", TypeError),
    "None as the task": (
        simulated(tasks=None),
        "tasks is None, not a task; give one, such as",
        TypeError,
    ),
    "half a task": (
        simulated(tasks=Incomplete()),
        "tasks is an Incomplete, not a task; it lacks weight, batch, loss, metrics",
        TypeError,
    ),
    "wrapper by __getattr__": (
        simulated(tasks=Forwarding(QUADRATIC)),
        "it lacks num_clients, init, weight, batch, metrics; define them in its class, because",
        TypeError,
    ),
    "task of a plain class": (
        simulated(tasks=Plain()),
        "tasks is a Plain, whose class JAX does not know; register it, by @jax.tree_util.register",
        TypeError,
    ),
    "losses of a batch": (
        simulated(tasks=plain(loss=lambda self, params, batch: params)),
        r"Own.loss returns float32\[4\]; return one float, such as a jnp.mean",
        TypeError,
    ),
    "loss in an array": (
        simulated(
            tasks=plain(loss=lambda self, params, batch: params[:1]), algorithm=scaffold(LOCAL)
        ),
        r"Own.loss returns float32\[1\]; return one float",
        TypeError,
    ),
    "loss an int": (
        simulated(tasks=plain(loss=lambda self, params, batch: jnp.int32(3))),
        r"Own.loss returns int32\[\]; return one float",
        TypeError,
    ),
    "loss of Python": (
        simulated(tasks=plain(loss=lambda self, params, batch: 3.0)),
        "Own.loss returns 3.0; return one float",
        TypeError,
    ),
    "two weights": (
        simulated(tasks=plain(weight=lambda self, client: jnp.ones(2))),
        r"Own.weight returns an array of shape \(2,\); return one number, n_k",
        TypeError,
    ),
    "no weight": (
        simulated(tasks=plain(weight=lambda self, client: None)),
        "Own.weight returns None; return one number, n_k",
        TypeError,
    ),
    "parameters of ints": (
        simulated(tasks=plain(init=lambda self, rng_key: jnp.zeros(2, jnp.int32))),
        r"Own.init returns int32\[2\]; gradients need parameters of floats",
        TypeError,
    ),
    "a cohort in one row": (
        lambda: Cohort.of_rows(jnp.arange(4)),
        r"clients are of shape \(4,\); give .* as in clients\[None\] for one model",
    ),
    "a cohort in lists": (lambda: Cohort.of_rows([[0, 1]]), "clients are of type list; give an"),
    "axis of another name": (
        lambda: Grid(lambda learning_rate: None, {"lr": [0.1]}, num_rounds=2),
        "build cannot be called with lr: missing a required argument: 'learning_rate'; give axes",
        TypeError,
    ),
    "axis more than build takes": (
        lambda: Grid(lambda: None, {"lr": [0.1], "task": [QUADRATIC]}, num_rounds=2),
        "build cannot be called with lr, task: got an unexpected keyword argument",
        TypeError,
    ),
    "a function for a grid": (
        lambda: sweep(lambda rate: None, {"rate": [0.1]}),
        r"num_rounds is missing; give it, as in sweep\(build, axes, num_rounds=20\)",
        TypeError,
    ),
    "a grid and its rounds": (
        lambda: sweep(Grid(lambda rate: None, {"rate": [0.1]}, 2), num_rounds=2),
        "num_rounds cannot change a Grid; give its build and axes to sweep, instead",
        TypeError,
    ),
    "an unknown setting of a sweep": (
        lambda: sweep(lambda rate: None, {"rate": [0.1]}, num_rounds=2, num_seed=3),
        "Grid has no argument 'num_seed'; did you mean 'num_seeds'",
        TypeError,
    ),
    "a path in a setup": (
        lambda: swept(Setup(QUADRATIC, FEDAVG, EVERYBODY), {"algorithm.local_step": [1]}),
        r"fedavg\(0.1, local_steps=2\) has no 'local_step', but local, local_steps, server_opt",
    ),
    "two paths of one name": (
        lambda: swept(
            Setup(QUADRATIC, FEDAVG, EVERYBODY),
            {"algorithm.weighted": [True], "assignment.weighted": [True]},
        ),
        "two axes are called 'weighted'; give a function build, instead",
    ),
    "a number for a path": (
        lambda: swept(Setup(QUADRATIC, FEDAVG, EVERYBODY), {1: [0.1]}),
        "an axis is called 1; give the path of an argument, such as 'algorithm.local.learning_rate",
        TypeError,
    ),
    "a path that hides models": (
        lambda: swept(Setup(QUADRATIC, FEDAVG, mfa_rr(4, 2)), {"num_models": [1, 2]}),
        "'num_models' would hide models instead of training fewer; write 'assignment.num_models'",
    ),
    "a setup that hides models": (
        lambda: swept(
            lambda rate: Setup(QUADRATIC, FEDAVG, dropping(mfa_rr(4, 2), rate), num_models=1)
        ),
        r"num_models is 1, but dropping\(mfa_rr\(4, 2\), 0.1\) trains 2 models, some of which",
    ),
    "a path in a task": (
        lambda: swept(Setup(QUADRATIC, FEDAVG, EVERYBODY), {"tasks.mu": [0.1]}),
        "'mu' is an argument of a Quadratic, which no factory of the package has made; sweep all",
    ),
    "dict of tasks": (simulated(tasks={"a": QUADRATIC}), "tasks is a dict of 1", TypeError),
    "generator of tasks": (simulated(tasks=(t for t in [QUADRATIC])), "a generator", TypeError),
    "a wrong task among several": (
        simulated(tasks=[QUADRATIC, DATA]),
        r"tasks\[1\] is a FederatedData",
        TypeError,
    ),
    "a wrong algorithm among several": (
        simulated(algorithm=[FEDAVG, fedprox]),
        r"algorithm\[1\] is the function fedprox",
        TypeError,
    ),
    "optimizer as algorithm": (
        simulated(algorithm=optax.sgd(0.1)),
        "algorithm is an optax optimizer, not an algorithm; give one, .*server_optimizer=",
        TypeError,
    ),
    "algorithm's name": (simulated(algorithm="fedavg"), "algorithm is 'fedavg', not an", TypeError),
    "assignment's name": (simulated(assignment="mfa_rr"), "is 'mfa_rr', not an ass", TypeError),
    "too many tasks": (simulated(tasks=[QUADRATIC] * 2), "there are 2 tasks but .* has 1 models"),
    "too many algorithms": (simulated(algorithm=[FEDAVG] * 3), "there are 3 algorithms but"),
    "no tasks": (simulated(tasks=[]), "there are 0 tasks but the assignment has 1 models"),
    "clients of another number": (
        simulated(assignment=mfa_rr(5, 1)),
        r"the tasks have \[4\] clients",
    ),
    "requiring a function": (lambda: requiring(quadratic, X[0]), "task is the function", TypeError),
    "requiring data": (lambda: requiring(DATA, X[0]), "task is a FederatedData", TypeError),
    "requiring other sizes": (lambda: requiring(TASK, np.zeros(3)), r"has shape \(3,\); give one"),
    "unseen negative": (lambda: requiring(TASK, np.zeros(4), num_unseen=-1), "num_unseen is -1"),
    "unseen all": (lambda: requiring(TASK, np.zeros(4), num_unseen=4), "num_unseen is 4"),
    "own models of data": (
        lambda: own_models(0, DATA, learning_rate=1.0),
        "task is a F",
        TypeError,
    ),
    "attacked data": (lambda: attacked(DATA, np.zeros(4, bool)), "task is a FederatedD", TypeError),
    "attackers numbered": (lambda: attacked(TASK, [0, 1]), r"clients are int.*one bool for each"),
    "attackers too few": (lambda: attacked(TASK, [True]), "clients has 1 entries; give one for"),
    "attackers' factor": (lambda: attacked(TASK, [True] * 4, loss_factor=0), "loss_factor is 0"),
    "noisy task": (lambda: noisy(TASK, [True] * 4), "algorithm is a Supervised", TypeError),
    "noisy factory": (lambda: noisy(fedavg, [True]), "is the function fedavg, not", TypeError),
    "noise negative": (lambda: noisy(FEDAVG, [True] * 4, noise=-1), "noise is -1; it must not be"),
    "appealing task": (
        lambda: appealing(TASK, cohort_size=2),
        "assignment is a Supervised, not an assignment",
        TypeError,
    ),
    "appealing too many": (lambda: appealing(EVERYBODY, cohort_size=5), "lie between 1 and num_cl"),
    "appealing fractional": (lambda: appealing(EVERYBODY, cohort_size=1.5), "cohort_size is 1.5"),
    # Rounds and how they are computed.
    "rounds 0": (simulated(rounds=0), "num_rounds is 0; it must be a positive whole number"),
    "rounds negative": (simulated(rounds=-3), "num_rounds is -3; it must be a positive whole"),
    "rounds fractional": (simulated(rounds=2.0), "num_rounds is 2.0; it must be a positive whole"),
    "rounds text": (simulated(rounds="2"), "num_rounds is '2'; it must be a positive whole"),
    "rounds None": (simulated(rounds=None), "num_rounds is None; it must be a positive whole"),
    "rounds True": (simulated(rounds=True), "num_rounds is True; it must be a positive whole"),
    "rounds an array": (simulated(rounds=np.arange(3)), "num_rounds is an array of shape"),
    "record_every 0": (simulated(record_every=0), "record_every is 0; it must be a divisor of"),
    "record_every 3": (simulated(record_every=3), "is 3; it must be a divisor of num_rounds = 2"),
    "record_every 1.0": (simulated(record_every=1.0), "record_every is 1.0; it must be a divisor"),
    "client_map unknown": (
        simulated(client_map="pmap"),
        "'pmap'; it must be 'auto', 'vmap', 'scan'",
    ),
    "client_map 0": (simulated(client_map=0), "client_map is 0; it must be 'auto'"),
    "client_map True": (simulated(client_map=True), "client_map is True; it must be 'auto'"),
    "client_map None": (simulated(client_map=None), "client_map is None; it must be 'auto'"),
    "params of another shape": (simulated(params=np.ones(3)), r"have shape \(3,\); give \(9,\)"),
    "params of another structure": (simulated(params={"w": np.ones(9)}), "must have the structure"),
    "params of three models": (
        simulated(params=[np.ones(9)] * 3),
        "a list of 3 is not one for each of 1 models",
    ),
    "params NaN": (
        simulated(params=np.full(9, np.nan)),
        "initial parameters have entries that are not finite; give those of a run that did not div",
    ),
    "params infinite": (simulated(params=jnp.ones(9).at[3].set(jnp.inf)), "are not finite; give"),
    "params beyond float32": (simulated(params=np.full(9, 1e300)), "are not finite; give"),
    "params of one model NaN": (
        simulated(assignment=mfa_rr(4, 2), params=[np.ones(9), np.full(9, np.nan)]),
        "are not finite; give",
    ),
    "a trace for a state": (
        lambda: advance((None, None), QUADRATIC, FEDAVG, EVERYBODY, 2),
        "state is a tuple of 2, not a State; give the first of the two that simulate returns",
        TypeError,
    ),
    "params of a result": (lambda: params_of((None, None)), "state is a tuple of 2, n", TypeError),
    "a result for a trace": (
        lambda: to_dataset((None, None)),
        "trace is a tuple of 2, not a Trace; give the second of the two",
        TypeError,
    ),
    "results for traces": (lambda: join_traces((None, None)), "a trace is a tuple of 2", TypeError),
    # Rates and steps.
    "a number for the rate of a theorem": (
        lambda: mfa.theorem_2(1, Problem(M=2, E=2, mu=1, L=12.5, G=1), 0.1, V=0.0, Delta_1=1.0),
        r"Theorem 2 needs a Rate, not 0.1; give Rate\(beta=..., gamma=...\)",
        TypeError,
    ),
    "rate None": (averaged(None), "learning_rate is None; it must be a number", NOT_A_NUMBER),
    "rate text": (averaged("0.1"), "learning_rate is '0.1'; it must be a number", NOT_A_NUMBER),
    "rate True": (averaged(True), "learning_rate is True; it must be a number", NOT_A_NUMBER),
    "rate 0": (averaged(0), "learning_rate is 0; it must be positive"),
    "rate 0 in float32": (averaged(1e-320), "rate is 1e-320, which is 0.0 in float32; it must be"),
    "rate infinite in float32": (averaged(1e300), "which is inf in float32; it must be positive"),
    "rate negative": (averaged(-0.1), "learning_rate is -0.1; it must be positive"),
    "rate NaN": (averaged(float("nan")), "learning_rate is nan; it must be positive"),
    "rate infinite": (averaged(float("inf")), "learning_rate is inf; it must be positive"),
    "rate complex": (averaged(1j), "learning_rate is 1j; it must be a number", NOT_A_NUMBER),
    "rates": (
        averaged([0.1, 0.2]),
        r"is of shape \(2,\); give one number; vmap or sweep over several",
    ),
    "rates in an array": (averaged(jnp.ones(2)), r"is of shape \(2,\); give one number"),
    "rate in a dict": (averaged({"rate": 0.1}), "is a dict of 1; it must be a num", NOT_A_NUMBER),
    "rate an optimizer": (averaged(optax.sgd(0.1)), "is an optax optimizer; give a num", TypeError),
    "rate an optimizer, in short": (
        lambda: fedavg(optax.sgd(0.1)),
        r"is an optax optimizer; .* go to local_sgd, as in local_sgd\(0.1, steps=5, optimizer=",
        TypeError,
    ),
    "steps by position": (
        lambda: fedavg(0.1, 5),
        "fedavg takes only local by position; give the others by name: local_steps, server_opt",
        TypeError,
    ),
    "optimizer for fedprox": (
        lambda: fedprox(optax.sgd(0.1), mu=0.1),
        r"local is an optax optimizer; give .* as in fedprox\(local_sgd\(0.1, steps=5\)\)",
        TypeError,
    ),
    "rate a factory": (averaged(optax.sgd), "in round 1 is not a number; give a number", TypeError),
    "schedule that asks": (
        averaged(lambda t: 0.1 if t < 5 else 0.01),
        "in round 1 needs the value of the round, .* instead of `if` use jax.numpy.where",
        TypeError,
    ),
    "schedule negative": (
        averaged(lambda t: -0.1 / t),
        "learning_rate in round 1 is -0.1; it must",
    ),
    "schedule negative later": (averaged(lambda t: 0.15 - 0.1 * t), "in round 2 is -0.05"),
    "schedule infinite": (averaged(lambda t: jnp.inf), "in round 1 is inf; it must not be neg"),
    "schedule NaN": (averaged(lambda t: jnp.sqrt(1.0 - t)), "in round 2 is nan"),
    "schedule of optax": (averaged(optax.constant_schedule(-1.0)), "in round 1 is -1.0"),
    "schedule of nothing": (
        averaged(lambda t: None),
        "in round 1 is None; it must b",
        NOT_A_NUMBER,
    ),
    "schedule of two": (
        averaged(lambda t: jnp.ones(2)),
        r"in round 1 is of shape \(2,\); give one",
    ),
    "schedule without t": (
        averaged(lambda: 0.1),
        "in round 1 is not a number; .* function of the r",
        TypeError,
    ),
    "schedule not called": (averaged(inverse_time), "in round 1 is not a number; give", TypeError),
    "inverse time": (averaged(inverse_time(-1.0, 2.0)), "in round 1 is -0.33"),
    "inverse time, early": (averaged(inverse_time(1.0, -3.0)), "in round 1 is -0.5"),
    "per frame": (averaged(per_frame(lambda t: -1.0 * t, 2)), "in round 1 is -1"),
    "rate under jit": (
        lambda: jax.eval_shape(lambda x: (fedavg(-0.1, local_steps=2), x)[1], 0.0),
        "learning_rate is -0.1; it must be positive",
    ),
    "schedule under jit": (
        lambda: jax.eval_shape(lambda x: (fedavg(lambda t: -0.1, local_steps=2), x)[1], 0.0),
        "learning_rate in round 1 is -0.1",
    ),
    "no steps, in short": (lambda: fedavg(0.1), "local_steps is None; it must be a positive whole"),
    "steps and epochs": (
        averaged(epochs=1),
        "2 local steps and epochs = 1 are given; give one of the",
    ),
    "no steps": (averaged(steps=None), "neither local steps nor epochs are given; give one of the"),
    "steps 0": (averaged(steps=0), "steps is 0; it must be a positive whole number"),
    "steps fractional": (averaged(steps=1.5), "steps is 1.5; it must be a positive"),
    "steps text": (averaged(steps="5"), "steps is '5'; it must be a positive"),
    "steps True": (averaged(steps=True), "steps is True; it must be a positive"),
    "steps 2^31": (averaged(steps=2**31), "is 2147483648; it must be .*, at most 2147483647"),
    "rounds 2^31": (
        simulated(rounds=2**31),
        "num_rounds is 2147483648; it must be .*, at most 214",
    ),
    "epochs beyond int32": (
        simulated(tasks=TASK, algorithm=fedavg(local_sgd(0.1, epochs=2**30, batch_size=2))),
        "epochs = 1,073,741,824 of 3 batches are 3,221,225,472 local steps; at most 2,147,483,647",
    ),
    "epochs beyond int32, clients of several sizes": (
        simulated(tasks=UNEVEN, algorithm=LONG),
        "epochs = 1,073,741,824 of 5 batches are 5,368,709,120 local steps; at most 2,147,483,647",
    ),
    "epochs beyond int32, under jit": (
        lambda: jax.jit(lambda task: simulated(tasks=task, algorithm=LONG)())(UNEVEN),
        "epochs = 1,073,741,824 of 5 batches are 5,368,709,120 local steps; at most 2,147,483,647",
    ),
    "epochs beyond int32, in a sweep": (
        lambda: swept(lambda rate: Setup(requiring(UNEVEN, np.ones(4)), LONG, EVERYBODY)),
        "epochs = 1,073,741,824 of 5 batches are 5,368,709,120 local steps; at most 2,147,483,647",
    ),
    "epochs 0": (
        lambda: fedavg(local_sgd(0.1, epochs=0)),
        "epochs is 0; it must be a positive whole number",
    ),
    "batch 0": (averaged(batch_size=0), "batch_size is 0; it must be a positive whole number"),
    "batch fractional": (averaged(batch_size=0.5), "batch_size is 0.5; it must be a positive"),
    "batch schedule": (averaged(batch_size=lambda t: -t), "batch_size in round 1 is -1"),
    "order unknown": (
        averaged(batch_size=2, order="x"),
        "order is 'x'; it must be 'iid', 'epochs'",
    ),
    "order without a batch": (averaged(order="iid"), "order is 'iid', but steps take all examples"),
    "server scale": (averaged(server_scale="sum"), "server_scale is 'sum'; it must be 'mean' or"),
    # Optimizers.
    "local optimizer called": (
        averaged(optimizer=optax.sgd(0.1)),
        "optimizer is an optax optimizer; give a function of the round's rate, .* without c",
        TypeError,
    ),
    "local optimizer's name": (averaged(optimizer="sgd"), "'sgd'; give a function", TypeError),
    "local optimizer a rate": (averaged(optimizer=0.1), "is 0.1; give a function", TypeError),
    "local optimizer of rates": (
        averaged(optimizer=lambda rate: rate),
        "optimizer makes 0.1, not an optax optimizer",
        TypeError,
    ),
    "server optimizer not called": (
        averaged(server_optimizer=optax.sgd),
        r"server_optimizer is the function sgd, not an optax optimizer; call it, as in sgd\(0.1\)",
        TypeError,
    ),
    "server optimizer a rate": (averaged(server_optimizer=1.0), "is 1.0, not an optax", TypeError),
    "server optimizer's name": (averaged(server_optimizer="adam"), "is 'adam', not an", TypeError),
    # Numbers of other methods.
    "prox mu": (lambda: fedprox(LOCAL, mu=-1), "mu is -1; it must not be negative"),
    "prox mu None": (lambda: fedprox(LOCAL, mu=None), "mu is None; it must be", NOT_A_NUMBER),
    "prox rate": (
        lambda: fedprox(local_sgd(-1, steps=2), mu=1.0),
        "learning_rate is -1; it must be positive",
    ),
    "prox schedule": (
        lambda: fedprox(local_sgd(lambda t: -t, steps=2), mu=1.0),
        "in round 1 is -1",
    ),
    "q": (lambda: qffl(LOCAL, q=-1), "q is -1; it must not be negative"),
    "lam": (lambda: ditto(LOCAL, lam=-1), "lam is -1; it must not be negative"),
    "alpha": (lambda: perfedavg(LOCAL, alpha=-1), "alpha is -1; it must not be negative"),
    "delta": (lambda: perfedavg(LOCAL, delta=0), "delta is 0; it must be positive"),
    "variant": (lambda: perfedavg(LOCAL, variant="x"), "variant is 'x'; it must be 'FO' or"),
    "server_rate": (lambda: maxfl(LOCAL, server_rate=0), "server_rate is 0; it must be pos"),
    "eps": (lambda: maxfl(LOCAL, eps=-1), "eps is -1; it must not be negative"),
    "slope": (lambda: maxfl(LOCAL, slope=0), "slope is 0; it must be positive"),
    "weight": (lambda: maxfl(LOCAL, weight="x"), "weight is 'x'; it must be 'derivative' or"),
    "growth": (lambda: mwfed(LOCAL, growth=1), "growth is 1; it must be greater than 1"),
    "option": (lambda: scaffold(LOCAL, option=2), "option is 2; it must be 'I' or 'II'"),
    "scaffold rate": (lambda: scaffold(LOCAL, server_rate="1"), "server_rate is '1'", NOT_A_NUMBER),
    "settings None": (lambda: prsgd(None), "local is None; give the settings of", TypeError),
    "settings a rate": (
        lambda: fedprox(0.1, mu=1.0),
        r"local is 0.1; give the settings of local_sgd, as in fedprox\(local_sgd\(0.1, steps=5\)\)",
        TypeError,
    ),
    "settings a dict": (lambda: fedavg({"steps": 2}, local_steps=2), "is a dict of 1", TypeError),
    "steps twice": (
        lambda: fedavg(LOCAL, local_steps=2),
        "local_steps is 2; give it to local_sgd, as steps",
    ),
    "no steps of SCAFFOLD": (
        lambda: scaffold(local_sgd(0.1)),
        "neither local steps nor epochs are given; give one of the two",
    ),
    "epochs of PR-SGD": (
        lambda: prsgd(local_sgd(0.1, epochs=2)),
        "epochs is 2, which prsgd refuses: Problem 1 counts iterations, .* give their number as st",
    ),
    "optimizer of SCAFFOLD": (
        lambda: scaffold(local_sgd(0.1, steps=2, optimizer=optax.adam)),
        "optimizer is the function adam, which scaffold, option II refuses: .* or take option I",
    ),
    "momentum of another optimizer": (
        lambda: local_sgd(0.1, steps=2, momentum=0.9, optimizer=optax.adam),
        "momentum is that of SGD, but optimizer is the function adam; leave out one of the two",
    ),
    "momentum 1": (lambda: local_sgd(0.1, steps=2, momentum=1.0), "momentum is 1.0; it must be in"),
    "epochs negative": (lambda: local_sgd(0.1, epochs=-0.5), "epochs is -0.5; it must be positive"),
    "epochs traced": (
        lambda: jax.jit(lambda x: local_sgd(0.1, epochs=x).steps.number)(0.5),
        "epochs is traced, but Python needs its value",
        TypeError,
    ),
    # Assignments.
    "clients 0": (lambda: mfa_rr(0, 1), "num_clients is 0; it must be a positive whole number"),
    "clients fractional": (lambda: mfa_rr(4.0, 1), "num_clients is 4.0; it must be a positive"),
    "clients None": (
        lambda: full_participation(None),
        "num_clients is None; it must be a positive",
    ),
    "clients a task": (
        lambda: full_participation(TASK),
        "num_clients is a Supervised; it must",
    ),
    "models 0": (lambda: mfa_rand(4, 0), "num_models is 0; it must be a positive whole number"),
    "models too many": (lambda: mfa_rand(4, 5), "num_models is 5, more than the clients there are"),
    "cohort too large": (
        lambda: mfa_rr(4, 2, cohort_size=5),
        "cohort_size is 5; it must lie between",
    ),
    "cohort fractional": (
        lambda: mfa_rr(4, 2, cohort_size=2.5),
        "cohort_size is 2.5; it must be a",
    ),
    "cohort too small": (lambda: mfa_rr(4, 3, cohort_size=2), "more than the clients a cohort has"),
    "redraw": (
        lambda: mfa_rr(4, 2, redraw="x"),
        "redraw is 'x'; it must be 'frame', 'round' or 'never'",
    ),
    "clusters 0": (lambda: fedcluster(4, 0), "num_clusters is 0; it must be a positive whole"),
    "expected trainings": (
        lambda: variance_reduced(4, 2, expected_trainings=5),
        "expected_trainings is 5; it must be positive and at most the number of processors, 4",
    ),
    "expected trainings text": (
        lambda: variance_reduced(4, 2, expected_trainings="half"),
        "expected_trainings is 'half'; it must be a number",
        NOT_A_NUMBER,
    ),
    "processors": (
        lambda: variance_reduced(4, 2, expected_trainings=2, processors=[1, 2]),
        "processors are 2; give one number, or 4, one each",
    ),
    "processors text": (
        lambda: variance_reduced(4, 2, expected_trainings=2, processors="all"),
        "processors is 'all'; it must be a positive whole number",
    ),
    "processors of MFA-Rand 0": (
        lambda: mfa_rand(4, 2, processors=0),
        "processors is 0; it must be a positive whole number",
    ),
    "processors of MFA-Rand negative": (
        lambda: mfa_rand(4, 2, processors=-1),
        "processors is -1; it must be a positive whole number",
    ),
    "processors of MFA-Rand fractional": (
        lambda: mfa_rand(4, 2, processors=1.5),
        "processors is 1.5; it must be a positive whole number",
    ),
    "processors of MFA-Rand NaN": (
        lambda: mfa_rand(4, 2, processors=[1, np.nan, 1, 1]),
        r"processors\[1\] is nan; it must be a positive whole number",
    ),
    "processors of MFA-Rand None": (
        lambda: mfa_rand(4, 2, processors=None),
        "processors is None; it must be a positive whole number",
    ),
    "processors of MFA-Rand too few": (
        lambda: mfa_rand(4, 2, processors=[2, 2, 2]),
        "processors are 3; give one number, or 4, one each",
    ),
    "processors of MFA-Rand too many": (
        lambda: mfa_rand(4, 2, processors=np.ones(5, int)),
        "processors are 5; give one number, or 4, one each",
    ),
    "processors of MFA-Rand by model": (
        lambda: mfa_rand(2, 2, processors=[[1, 2], [1, 2]]),
        r"processors\[0\] is a list of 2; it must be a positive whole number",
    ),
    "processors of MFA-Rand large": (
        lambda: mfa_rand(4, 2, processors=2**31),
        "processors is 2147483648; it must be a positive whole number, at most",
    ),
    "BODS clients": (
        lambda: bods(7, 2, cohort_size=4),
        "cohort_size is 4, 8 clients for 2 models, more than num_clients = 7; every model has",
    ),
    "BODS cohort 0": (lambda: bods(4, 2, cohort_size=0), "cohort_size is 0; it must be a positive"),
    "BODS models 0": (lambda: bods(4, 0, cohort_size=1), "num_models is 0; it must be a positive"),
    "BODS alpha": (
        lambda: bods(4, 2, cohort_size=1, alpha=1.5),
        "alpha is 1.5; it must lie between 0 and 1",
    ),
    "BODS alpha NaN": (
        lambda: bods(4, 2, cohort_size=1, alpha=np.nan),
        "alpha is nan; it must lie between 0 and 1",
    ),
    "BODS learn": (
        lambda: bods(4, 2, cohort_size=1, learn="fairness"),
        "learn is 'fairness'; it must be 'cost' or 'time'",
    ),
    "BODS delay": (
        lambda: bods(4, 2, cohort_size=1, delay=1.0),
        "delay is 1.0; give a function of a key, a model and a client",
        TypeError,
    ),
    "BODS delays of others": (
        lambda: bods(4, 2, cohort_size=1, delay=shifted_exponential(5)),
        "delay is for 5 clients, and there are 4; give shifted_exponential",
    ),
    "IFCA clients 0": (lambda: ifca(0, 2), "num_clients is 0; it must be a positive whole number"),
    "IFCA models 0": (lambda: ifca(4, 0), "num_models is 0; it must be a positive whole number"),
    "IFCA models fractional": (lambda: ifca(4, 2.5), "num_models is 2.5; it must be a positive"),
    "IFCA cohort 0": (lambda: ifca(4, 2, cohort_size=0), "cohort_size is 0; it must be a positive"),
    "IFCA cohort too large": (
        lambda: ifca(4, 2, cohort_size=5),
        "cohort_size is 5; it must lie between 1 and num_clients = 4",
    ),
    "IFCA average": (
        lambda: ifca(4, 2, average="losses"),
        "average is 'losses'; it must be 'models' or 'gradients'",
    ),
    "IFCA of tasks without losses": (
        simulated(tasks=Towards(jnp.zeros(4)), assignment=ifca(4, 2)),
        "Towards is not a task with client_loss",
    ),
    "by": (
        lambda: variance_reduced(4, 2, expected_trainings=2, by="x"),
        "by is 'x'; it must be 'loss' or 'update'",
    ),
    "beta": (lambda: stalevr(LOCAL, beta=1), "beta is 1; it must be 'estimated', 'exact'"),
    "mifa rate": (lambda: mifa(local_sgd(None)), "learning_rate is None; it must", NOT_A_NUMBER),
    "rounds_per_model 0": (lambda: sequential(4, 2, rounds_per_model=0), "rounds_per_model is 0"),
    # Tasks.
    "quadratic clients": (
        lambda: quadratic(0, 2, mu=0.1),
        "num_clients is 0; it must be a positive",
    ),
    "quadratic block": (lambda: quadratic(4, 2.5, mu=0.1), "block_size is 2.5; it must be a posit"),
    "quadratic mu": (lambda: quadratic(4, 2, mu=0), "mu is 0; it must be positive"),
    "quadratic mu None": (lambda: quadratic(4, 2, mu=None), "mu is None; it must", NOT_A_NUMBER),
    "quadratic mus": (lambda: quadratic(4, 2, mu=[0.1, 0.2]), r"mu is of shape \(2,\); give one"),
    "means of other lengths": (
        lambda: mean_estimation([0.0], [0.0, 1.0]),
        "have the shapes .1,. and",
    ),
    "means NaN": (
        lambda: mean_estimation([0.0], [np.nan]),
        "empirical_means is .nan.; it must be f",
    ),
    "means text": (
        lambda: mean_estimation(["a"], [0.0]),
        "true_means is a list of 1",
        NOT_A_NUMBER,
    ),
    "gamma": (lambda: draw_means(KEY, [0.0], -1.0), "gamma is -1.0; it must be positive"),
    "tuning rate": (lambda: Tuning(-0.1, 2), "learning_rate is -0.1; it must be positive"),
    "tuning steps": (lambda: Tuning(0.1, 0), "num_steps is 0; it must be a positive whole number"),
    "max_steps": (lambda: local_minimum(jnp.sin, 0.0, max_steps=0), "max_steps is 0; it must be"),
    "tolerance": (lambda: local_minimum(jnp.sin, 0.0, tolerance=0), "tolerance is 0; it must be p"),
    "an nnx module": (
        lambda: classification(DATA, Net()),
        r"module is an nnx module; give flax.nnx.bridge.to_linen\(Net, ...\)",
        TypeError,
    ),
    "sample sizes": (
        lambda: growing_sample_size(
            inverse_time(1.0, 1.0),
            num_examples=0,
            local_steps=1,
            gradient_bound=1.0,
            noise=(0.0, 1.0),
            growth=1.0,
        ),
        "num_examples is 0; it must be a positive whole number",
    ),
    # Sweeps.
    "axis negative": (
        lambda: swept(axes={"rate": [0.1, -0.1]}),
        "learning_rate is -0.1; it must be",
    ),
    "axis 0": (
        lambda: swept(axes={"rate": [0.0, 0.1]}),
        "learning_rate is 0.0; it must be positive",
    ),
    "axis schedule": (
        lambda: swept(
            lambda rate: Setup(
                QUADRATIC, fedavg(local_sgd(inverse_time(rate, 0.0), steps=2)), EVERYBODY
            ),
            {"rate": [0.1, -0.1]},
        ),
        "learning_rate in round 1 is -0.1; it must not be negative",
    ),
    "axis mu": (
        lambda: swept(
            lambda mu: Setup(quadratic(4, 2, mu=mu), FEDAVG, EVERYBODY), {"mu": [0.1, -0.1]}
        ),
        "mu is -0.1; it must be positive",
    ),
    "axis NaN": (
        lambda: swept(axes={"rate": [0.1, np.nan]}),
        "the axis 'rate' is .*nan.*must be finite",
    ),
    "axis in float32": (lambda: swept(axes={"rate": [0.1, 1e300]}), "inf.* in float32; it must be"),
    "axis a number": (
        lambda: swept(axes={"rate": 0.1}),
        "the axis 'rate' is 0.1; give a list of v",
    ),
    "axis empty": (lambda: swept(axes={"rate": []}), "the axis 'rate' has no values"),
    "axis twice": (lambda: swept(axes={"rate": [0.1, 0.1]}), "has 0.1 twice; drop one"),
    "axis seed": (lambda: swept(axes={"seed": [0.1]}), "an axis is called 'seed'"),
    **{
        f"axis {name}": (
            lambda name=name: swept(lambda **rate: None, axes={name: [0.1]}),
            f"an axis is called '{name}', like an argument of sel and isel, .*; rename it, for exa",
        )
        for name in ("indexers", "method", "tolerance", "drop", "missing_dims")
    },
    "axes a list": (lambda: swept(axes=[0.1, 0.2]), "axes is a list of 2; give a dict", TypeError),
    "build a Setup": (
        lambda: swept(Setup(QUADRATIC, FEDAVG, EVERYBODY)),
        "a Setup has no 'rate', but tasks, algorithm, assignment, params",
    ),
    "build returns nothing": (
        lambda: swept(lambda rate: None),
        "build returned None; return Setup",
    ),
    "build returns a tuple": (
        lambda: swept(lambda rate: (QUADRATIC, FEDAVG, EVERYBODY)),
        "build returned a tuple of 3; return Setup",
    ),
    "build returns data": (
        lambda: swept(lambda rate: Setup(DATA, FEDAVG, EVERYBODY)),
        "tasks is a FederatedData, not a task",
        TypeError,
    ),
    "build returns factories": (
        lambda: swept(lambda rate: Setup(QUADRATIC, fedavg, EVERYBODY)),
        "algorithm is the function fedavg, not an algorithm",
        TypeError,
    ),
    "sweep seed 2^32": (lambda: swept(seed=2**32), "seed is 4294967296; it must be a whole number"),
    "sweep seed -1": (lambda: swept(seed=-1), "seed is -1; it must be a whole number, 0 ..."),
    "sweep seed fractional": (lambda: swept(seed=0.5), "seed is 0.5; it must be a whole number"),
    "sweep seed a key": (lambda: swept(seed=KEY), "seed is an array of shape .*; it must be a who"),
    "sweep first_seed": (lambda: swept(first_seed=-1), "first_seed is -1; seeds are numbered"),
    "sweep first_seed 2^31": (lambda: swept(first_seed=2**31), "first_seed is 2147483648; seeds"),
    "sweep seeds 0": (lambda: swept(num_seeds=0), "num_seeds is 0; it must be a positive whole"),
    "sweep rounds": (lambda: swept(num_rounds=0.5), "num_rounds is 0.5; it must be a positive"),
    "sweep record_every": (lambda: swept(record_every=3), "record_every is 3; it must divide 2"),
    "sweep client_map": (lambda: swept(client_map="x"), "client_map is 'x'; it must be"),
    "sweep keep": (lambda: swept(keep="all"), "keep is 'all'; it must be None or 'params'"),
    "sweep together": (lambda: swept(together=["x"]), "together has 'x'; give names of"),
    "until NaN": (
        lambda: Until("loss", at_most=float("nan")),
        "until.at_most is nan; it must be finite",
    ),
    "until infinite": (
        lambda: Until("accuracy", at_least=np.inf),
        "until.at_least is inf; it must be finite",
    ),
    "until text": (
        lambda: Until("accuracy", at_least="0.9"),
        "until.at_least is '0.9'; it must be a number",
        NOT_A_NUMBER,
    ),
    "until two bounds": (
        lambda: Until("loss", at_least=0.1, at_most=0.2),
        "until has at_least = 0.1, at_most = 0.2 and patience = None; give one",
    ),
    "until a dict": (
        lambda: swept(until={"metric": "loss", "at_most": 0.1}),
        "until is a dict of 2, not an Until; give one, as in Until",
        TypeError,
    ),
    "axis with a slash": (
        lambda: swept(axes={"rate": [0.1], "test/acc": [1, 2]}),
        "an axis is called 'test/acc', a name that NetCDF files .* for example to 'test_acc'",
    ),
    "axis with a space at the end": (
        lambda: swept(axes={"rate ": [0.1]}),
        "an axis is called 'rate ', a name that NetCDF files cannot have; .* to 'rate'",
    ),
    "metric with a slash": (
        simulated(algorithm=measuring({"test/acc": jnp.float32(1)})),
        "a metric is called 'test/acc', a name that NetCDF files .* for example to 'test_acc'",
    ),
    "metric in brackets": (
        simulated(assignment=EVERYBODY._replace(metrics=lambda _: {"(a)": jnp.zeros(1)})),
        r"a metric is called '\(a\)', a name that NetCDF files cannot have; .* to 'a'",
    ),
    "metric complex": (
        simulated(algorithm=measuring({"spectrum": jnp.complex64(1 + 2j)})),
        "the metric 'spectrum' is of type complex64; give real numbers, such as the real and",
        TypeError,
    ),
    "metric text": (
        simulated(algorithm=measuring({"mood": "good"})),
        "the metric 'mood' is 'good'; give a number or an array",
        TypeError,
    ),
    "metrics in a list": (
        simulated(algorithm=measuring([1.0])),
        "metrics of the algorithm fedavg returns a list of 1; return a dict of names and num",
        TypeError,
    ),
    "weight for each example": (
        simulated(algorithm=sending(weight=jnp.ones(3))),
        r"returns from client as weight an array of shape \(3,\); give one number",
        TypeError,
    ),
    "weight text": (
        simulated(algorithm=sending(weight="1")),
        "returns from client as weight '1'; give one number",
        TypeError,
    ),
    "several numbers of gradients": (
        simulated(algorithm=sending(num_gradients=jnp.ones(3))),
        r"as num_gradients an array of shape \(3,\); give one number",
        TypeError,
    ),
    "update None": (
        simulated(algorithm=sending(update=None)),
        "returns from client as update None; give a pytree of arrays",
        TypeError,
    ),
    "update text": (
        simulated(algorithm=sending(update="w")),
        "returns from client as update 'w'; give a pytree of arrays",
        TypeError,
    ),
    "report text": (
        simulated(algorithm=sending(report="done")),
        "returns from client as report 'done'; give a pytree of arrays",
        TypeError,
    ),
    "client None": (
        simulated(algorithm=FEDAVG._replace(client=None)),
        "the algorithm's client is None; give a function",
        TypeError,
    ),
    "num_steps a number": (
        simulated(algorithm=FEDAVG._replace(num_steps=3)),
        "the algorithm's num_steps is 3; give a function",
        TypeError,
    ),
    "server state text": (
        simulated(algorithm=FEDAVG._replace(init=lambda task, params: ("a", ()))),
        "returns from init as the server's state 'a'; give a pytree of arrays",
        TypeError,
    ),
    "client_axis without a mesh": (
        simulated(client_axis="devices"),
        "client_axis is 'devices', but no such axis is bound here; call this inside jax.shard_map",
    ),
    "rounds traced": (
        lambda: jax.jit(lambda n: simulate(KEY, QUADRATIC, FEDAVG, EVERYBODY, n))(2),
        "num_rounds is traced, but it sets the length of the trace; .* static_argnames",
        TypeError,
    ),
    "record_every traced": (
        lambda: jax.jit(lambda n: advance(started(EVERYBODY), *RUN, 2, record_every=n))(2),
        "record_every is traced, but it sets the length of the trace",
        TypeError,
    ),
    "advance with more clients": (
        lambda: advance(started(EVERYBODY), quadratic(6, 2, mu=0.1), FEDAVG, mfa_rr(6, 1), 2),
        r"state has float32\[1,9\] in its models where runs of these tasks have float32\[1,13\]",
    ),
    "advance with more models": (
        lambda: advance(started(EVERYBODY), QUADRATIC, FEDAVG, mfa_rr(4, 2), 2),
        "state has 1 models, but the assignment has 2; give the tasks, algorithm, assignment and",
    ),
    "advance with a state of float64": (
        lambda: advance(started_in_float64(), *RUN, 2),
        r"state has float64\[1,9\] in its models where runs of these tasks have float32\[1,9\]",
    ),
    "optimizer for fedavg": (
        lambda: fedavg(0.1, local_steps=2, optimizer=optax.adam),
        "fedavg has no argument 'optimizer'; its arguments are local, .* are for local_sgd, as in",
        TypeError,
    ),
    "local_steps for scaffold": (
        lambda: scaffold(0.1, local_steps=2),
        "scaffold has no argument 'local_steps'; its arguments are .* are for local_sgd, as in",
        TypeError,
    ),
    "a misspelt argument": (
        lambda: mfa_rr(4, num_model=2),
        "mfa_rr has no argument 'num_model'; did you mean 'num_models'",
        TypeError,
    ),
    "dataset of swapped axes": (
        lambda: to_dataset(swapped(), {"seed": range(2)}),
        r"rounds, of shape \(2, 2\), do not grow along the last axis alike .* leave out out_axes",
    ),
    "overview of a trace": (
        lambda: sweep_overview(swapped()),
        "dataset is a Trace, not a Dataset; give the result of sweep or run",
        TypeError,
    ),
    "a misspelt argument of a sweep": (
        lambda: swept(num_round=3),
        "Grid has no argument 'num_round'; did you mean 'num_rounds'",
        TypeError,
    ),
    "a misspelt argument of a target": (
        lambda: Until("loss", at_last=3),
        "Until has no argument 'at_last'; did you mean 'at_least'",
        TypeError,
    ),
    "until nothing": (
        lambda: swept(until=Until("loss")),
        "until has at_least = None, at_most = None and patience = None; give one",
    ),
    "until a bound and a plateau": (
        lambda: swept(until=Until("loss", at_most=1.0, patience=2, mode="min")),
        "at_least = None, at_most = 1.0 and patience = 2; give one",
    ),
    "plateau without mode": (
        lambda: swept(until=Until("loss", patience=2)),
        'until has patience, but no mode; give "min" if smaller values are better',
    ),
    "plateau auto": (
        lambda: swept(until=Until("loss", patience=2, mode="auto")),
        "mode is 'auto'; it must be 'min' or 'max'",
    ),
    "plateau patience 0": (
        lambda: swept(until=Until("loss", patience=0, mode="min")),
        "patience is 0; it must be a positive whole number",
    ),
    "plateau patience fractional": (
        lambda: swept(until=Until("loss", patience=2.5, mode="min")),
        "patience is 2.5; it must be a positive whole number",
    ),
    "plateau patience 2^31": (
        lambda: swept(until=Until("loss", patience=2**31, mode="min")),
        "patience is 2147483648; it must be a positive whole number, at most 2147483647",
    ),
    "plateau min_delta negative": (
        lambda: swept(until=Until("loss", patience=2, mode="min", min_delta=-0.1)),
        "min_delta is -0.1; it must not be negative",
    ),
    "plateau min_delta NaN": (
        lambda: swept(until=Until("loss", patience=2, mode="min", min_delta=np.nan)),
        "min_delta is nan; it must not be negative",
    ),
    "plateau min_delta text": (
        lambda: swept(until=Until("loss", patience=2, mode="min", min_delta="0.1")),
        "min_delta is '0.1'; it must be a number",
        NOT_A_NUMBER,
    ),
    "plateau warmup -1": (
        lambda: swept(until=Until("loss", patience=2, mode="min", warmup=-1)),
        "warmup is -1; it must be a whole number, 0 or more",
    ),
    "plateau warmup fractional": (
        lambda: swept(until=Until("loss", patience=2, mode="min", warmup=1.5)),
        "warmup is 1.5; it must be a whole number, 0 or more",
    ),
    "a bound with warmup": (
        lambda: swept(until=Until("loss", at_most=1.0, warmup=2)),
        "until has warmup = 2, which is for a plateau; give patience, or leave it out",
    ),
    "a bound with mode": (
        lambda: swept(until=Until("loss", at_most=1.0, mode="min")),
        "until has mode = min, which is for a plateau",
    ),
    "a bound with min_delta": (
        lambda: swept(until=Until("loss", at_most=1.0, min_delta=0.1)),
        "until has min_delta = 0.1, which is for a plateau",
    ),
    "plateau of a count": (
        lambda: swept(until=Until("gradients", patience=2, mode="max")),
        "until has patience for gradients, which grows; give at_least",
    ),
    "plateau of nothing": (
        lambda: swept(until=Until("accuracy", patience=2, mode="max")),
        "until.metric is 'accuracy'; the recorded metrics are",
    ),
    # Experiments.
    "run a file that is not there": (lambda: run("no.toml"), "no.toml: No such file or directory"),
    "run a dict": (lambda: run({"task": {}}), "experiment is a dict of 1, not an Exp", TypeError),
    "run a task": (lambda: run(TASK), "experiment is a Supervised, not an E", TypeError),
    # Theory.
    "M 2.5": (bound(mfa.theorem_1, M=2.5), "Theorem 1 needs M = 1, 2, ...; given M = 2.5"),
    "M 0": (bound(mfa.theorem_1, M=0), "Problem needs M >= 1; given M = 0"),
    "M more than N": (bound(mfa.theorem_1, M=5), "Theorem 1 needs M <= N; given M = 5, N = 4"),
    "N 4.5": (bound(mfa.theorem_1, N=4.5), "Theorem 1 needs N = 1, 2, ...; given N = 4.5"),
    "E 1.5": (bound(mfa.theorem_1, E=1.5), "Theorem 1 needs E = 1, 2, ...; given E = 1.5"),
    "E 0": (bound(mfa.theorem_1, E=0), "Problem needs E >= 1; given E = 0"),
    "mu missing": (
        bound(mfa.theorem_1, mu=None),
        r"Theorem 1 needs mu; give Problem\(..., mu=...\)",
    ),
    "mu NaN": (bound(mfa.theorem_1, mu=np.nan), "Problem needs mu > 0; given mu = nan"),
    "a symbol that is not there": (
        lambda: Problem(K=5),
        "Problem has no symbol K; give any of N, M, E, C, S, mu",
        TypeError,
    ),
    "a symbol of another paper": (
        lambda: Problem(tau=5),
        "Problem has no symbol tau; did you mean E?",
        TypeError,
    ),
    "a symbol misspelt": (
        lambda: Problem(sigmas=5),
        "Problem has no symbol sigmas; did you mean sigma?",
        TypeError,
    ),
    "a symbol of the rate": (
        lambda: Problem(gamma=5),
        "Problem has no symbol gamma; it is an argument of statements, or of Rate",
        TypeError,
    ),
    "rates for each round": (
        lambda: mfa.theorem_2_rate(np.arange(1, 9), Problem(M=2), Rate([6.0, 7.0, 8.0], 1.0)),
        r"given t of shape \(8,\), beta of the rate of shape \(3,\)",
    ),
    "beta for each gamma": (
        lambda: Rate([6.0, 7.0, 8.0], [1.0, 2.0]),
        r"Rate needs arrays that broadcast; given beta of shape \(3,\), gamma of shape \(2,\)",
    ),
    "M for each round": (
        lambda: mfa.theorem_2_rate(np.arange(1, 9), Problem(M=[1, 2, 5]), Rate(6.0, 1.0)),
        r"t of shape \(8,\), M of shape \(3,\); .* a column, M=\[\[1\], \[2\], \[5\]\]",
    ),
    "M for each N": (
        lambda: Problem(N=[4, 8], M=[1, 2, 5]),
        r"Problem needs arrays that broadcast; given N of shape \(2,\), M of shape \(3,\)",
    ),
    "M 2.5, Theorem 2": (
        lambda: mfa.theorem_2_rate(1, Problem(M=2.5), Rate(6.0, 1.0)),
        "Theorem 2 needs M = 1, 2, ...; given M = 2.5",
    ),
    "S 10.5": (
        lambda: mfa.least_sample_size(0.1, Problem(S=10.5, E=1, G=1.0, beta_1=0, beta_2=1), V=3.0),
        "The sample-size condition needs S = 1, 2, ...; given S = 10.5",
    ),
    "C 2.5": (
        lambda: fairness.costs(2, Problem(N=10, C=2.5, S=6), B=2, epochs=1),
        "A trial needs C = 1, 2, ...; given C = 2.5",
    ),
    "C more than N": (
        lambda: fairness.costs(2, Problem(N=10, C=11, S=6), B=2, epochs=1),
        "A trial needs C <= N; given C = 11, N = 10",
    ),
    "N 2.5, MaxFL": (
        lambda: maxfl_theory.optimal_epsilon(Problem(N=2.5, L_c=1.0, L=1.0)),
        "needs N = 1, 2, ...; given N = 2.5",
    ),
    "E 2.5, cohorts": (
        lambda: cohorts.optimal_cohort_size(1e3, Problem(N=50, E=2.5, L=2, Z=1, gap=1), gamma=0.01),
        "The optimal cohort size needs E = 1, 2, ...; given E = 2.5",
    ),
    "beta 0": (lambda: Rate(0.0, 1.0), "Rate needs beta > 0; given beta = 0"),
    "share of clients": (lambda: over_clients(np.ones(3), share=0.0), "share is 0.0; it must be"),
    "weights of clients": (
        lambda: over_clients(np.ones(3), weights=np.ones(2)),
        r"weights has shape \(2,\); give one number for each of 3 clients",
    ),
    "weights of 0": (
        lambda: over_clients(np.ones(3), weights=np.array([0, 1, 1])),
        r"weights is \[0 1 1\]; it must be positive",
    ),
    "a metric without clients": (
        lambda: client_fairness(LOSSES, "loss"),
        "metric is 'loss', and the metrics with a number for each client are none; record some",
    ),
    "a plot without clients": (
        lambda: client_distribution(LOSSES, "loss"),
        "metric is 'loss', and the metrics with a number for each client are none; record some",
    ),
    "a number for metrics of clients": (
        lambda: with_clients(QUADRATIC, 5),
        r"metrics is 5; give a list of names, such as \['loss'\]",
        TypeError,
    ),
    "a name for metrics of clients": (
        lambda: with_clients(QUADRATIC, "loss"),
        "metrics is 'loss'; give a list of names",
        TypeError,
    ),
    "no metrics of clients": (lambda: with_clients(QUADRATIC, []), "metrics are empty; give some"),
    "an unknown metric of clients": (
        lambda: with_clients(QUADRATIC, ["accuracy"]),
        r"metrics\[0\] is 'accuracy'; it must be 'loss'",
    ),
    "accuracy without examples": (
        lambda: with_clients(QUADRATIC, ["test_accuracy"]),
        "Quadratic has no 'test_accuracy' of clients, because it has no labelled examples",
    ),
    "accuracy on a pool": (
        lambda: with_clients(
            classification(clients_of(test=store(parts=[np.arange(24)])), LogisticRegression(3)),
            ["test_accuracy"],
        ),
        "clients have no 'test_accuracy', because one pool of test examples stands for all",
    ),
    "candidates": (
        lambda: power_of_choice(8, 2, cohort_size=6, candidates=2),
        "candidates is 2; it must lie between 3 and 8",
    ),
    "power-of-choice of nobody": (
        lambda: power_of_choice(8, 2, cohort_size=1, candidates=2),
        r"num_models is 2, more than the clients a cohort has \(1\)",
    ),
    "oort without T": (
        lambda: oort(2, cohort_size=1, durations=(1.0, 2.0)),
        r"durations are \(1.0, 2.0\) and preferred_duration is None; give both, or none",
    ),
    "oort's durations": (
        lambda: oort(3, cohort_size=1, durations=(1.0, 2.0), preferred_duration=1.0),
        r"durations has shape \(2,\); give one for each of 3 clients",
    ),
    "oort's exploration": (
        lambda: oort(3, cohort_size=1, exploration=1.5),
        "exploration is 1.5; it must",
    ),
    "feddyn's alpha": (lambda: feddyn(LOCAL, alpha=0.0), "alpha is 0.0; it must be positive"),
    "fednova without steps": (
        lambda: fednova(local_sgd(0.1)),
        "neither local steps nor epochs are given; give one of the two",
    ),
    "fednova's local": (
        lambda: fednova(0.1),
        r"local is 0.1; give the settings of local_sgd, as in fednova\(local_sgd",
        TypeError,
    ),
}
