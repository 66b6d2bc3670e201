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
    dma_fl,
    fedavg,
    fedcluster,
    fedfair,
    fedprox,
    full_participation,
    ifca,
    init,
    join_traces,
    local_sgd,
    mdh,
    mfa_rand,
    mfa_rr,
    noisy,
    oort,
    params_of,
    power_of_choice,
    prsgd,
    run,
    scaffold,
    scheduled,
    simulate,
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
from fedjax_mm.base import Cohort
from fedjax_mm.compression import message_bytes
from fedjax_mm.data import federate
from fedjax_mm.metrics import client_fairness
from fedjax_mm.metrics import fairness as over_clients
from fedjax_mm.optimizers import fedadam
from fedjax_mm.plots import client_distribution, sweep_overview
from fedjax_mm.simulator.record import Trace
from fedjax_mm.sweeps import Grid, Setup, Until
from fedjax_mm.tasks import (
    LogisticRegression,
    classification,
    draw_means,
    mean_estimation,
    own_models,
    quadratic,
    requiring,
    with_clients,
)
from fedjax_mm.theory import Problem, Rate, mfa
from tests.boundary.parts import (
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

CASES = {
    "clients traced": (
        traced(lambda n: mfa_rr(n, 2)),
        "num_clients is traced, but Python needs its value",
        TypeError,
    ),
    "a client's processors traced": (
        traced(lambda n: mfa_rand(2, 2, processors=[1, n])),
        r"processors\[1\] is traced, but Python needs its value",
        TypeError,
    ),
    "no jobs": (dispatched(at_work=0), "at_work is 0; it must be a positive whole number"),
    "jobs of others": (dispatched(2, at_work=(3, 3, 3)), "at_work has 3 numbers; .* each of 2"),
    "ratio too large": (
        dispatched(2, at_work=2, ratio=3),
        "at_work is 4 in all, fewer than ratio = 3 for each of 2 models; give more jobs",
    ),
    "reallocate how": (dispatched(reallocate="variance"), "reallocate is 'variance'; it must be"),
    "delay a number": (dispatched(delay=1.5), "delay is 1.5; give a function of a key", TypeError),
    "mean delay negative": (lambda: shifted_exponential(4, -1.0), "mean is -1.0; it must not be"),
    "delays of fewer models": (
        dispatched(2, delay=shifted_exponential(4, np.array([1.0, 2.0, 3.0]))),
        "delay has means or shifts of 3 models, and there are 2; give one number for each",
    ),
    "delays of fewer clients": (
        dispatched(delay=shifted_exponential(3)),
        r"delay is for 3 clients, and there are 4; give shifted_exponential\(4\)",
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
    "flops of two models, bytes of three": (
        devices(flops=[1e9, 1e9], bytes_up=np.ones(3)),
        "flops of 2 and bytes_up of 3 models differ; give one number for each model, or one for",
    ),
    "speeds of three clients": (
        devices(speed=[1e9, 1e9, 1e9]),
        r"speed is an array of shape \(3,\), and there are 4 clients; give one number for",
    ),
    "bytes of clients": (
        devices(bytes_up=np.ones((2, 4))),
        r"bytes_up is of shape \(2, 4\); give one number, or one axis",
    ),
    "a device that stands still": (
        devices(speed=[1e9, 0.0, np.inf, 1e9]),
        r"speed is 0 at \[1\]; it must be positive; infinite takes no time",
    ),
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
    "key None": (simulated(None), "rng_key is None; give a seed, such as 0, or a key", TypeError),
    "seed -1": (simulated(-1), "rng_key is -1; it must be a whole number, 0 ... 4294967295"),
    "several keys": (
        simulated(jax.random.split(KEY, 3)),
        r"has shape \(3,\); .* jax.vmap over sev",
    ),
    "own key None": (lambda: own_models(None, TASK, learning_rate=0.1), "rng_key is N", TypeError),
    "means key": (lambda: draw_means("0", [0.0, 1.0]), "rng_key is '0'; give a seed", TypeError),
    # Parts in the wrong place.
    "assignment not called": (
        simulated(assignment=full_participation),
        r"assignment is the function full_participation, .* as in full_participation\(...\)",
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
    "two weights": (
        simulated(tasks=plain(weight=lambda self, client: jnp.ones(2))),
        r"Own.weight returns an array of shape \(2,\); return one number, n_k",
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
    "axis of another name": (
        lambda: Grid(lambda learning_rate: None, {"lr": [0.1]}, num_rounds=2),
        "build cannot be called with lr: missing a required argument: 'learning_rate'; give axes",
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
    "too many algorithms": (simulated(algorithm=[FEDAVG] * 3), "there are 3 algorithms but"),
    "requiring a function": (lambda: requiring(quadratic, X[0]), "task is the function", TypeError),
    "requiring other sizes": (lambda: requiring(TASK, np.zeros(3)), r"has shape \(3,\); give one"),
    "unseen all": (lambda: requiring(TASK, np.zeros(4), num_unseen=4), "num_unseen is 4"),
    "own models of data": (
        lambda: own_models(0, DATA, learning_rate=1.0),
        "task is a F",
        TypeError,
    ),
    "attacked data": (lambda: attacked(DATA, np.zeros(4, bool)), "task is a FederatedD", TypeError),
    "attackers numbered": (lambda: attacked(TASK, [0, 1]), r"clients are int.*one bool for each"),
    "attackers too few": (lambda: attacked(TASK, [True]), "clients has 1 entries; give one for"),
    "noisy task": (lambda: noisy(TASK, [True] * 4), "algorithm is a Supervised", TypeError),
    "appealing task": (
        lambda: appealing(TASK, cohort_size=2),
        "assignment is a Supervised, not an assignment",
        TypeError,
    ),
    "appealing too many": (lambda: appealing(EVERYBODY, cohort_size=5), "lie between 1 and num_cl"),
    # Rounds and how they are computed.
    "params of another shape": (simulated(params=np.ones(3)), r"have shape \(3,\); give \(9,\)"),
    "params of another structure": (simulated(params={"w": np.ones(9)}), "must have the structure"),
    "params NaN": (
        simulated(params=np.full(9, np.nan)),
        "initial parameters have entries that are not finite; give those of a run that did not div",
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
    "rate 0": (averaged(0), "learning_rate is 0; it must be positive"),
    "rate 0 in float32": (averaged(1e-320), "rate is 1e-320, which is 0.0 in float32; it must be"),
    "rates": (
        averaged([0.1, 0.2]),
        r"is of shape \(2,\); give one number; vmap or sweep over several",
    ),
    "rate an optimizer": (averaged(optax.sgd(0.1)), "is an optax optimizer; give a num", TypeError),
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
    "steps and epochs": (
        averaged(epochs=1),
        "2 local steps and epochs = 1 are given; give one of the",
    ),
    "no steps": (averaged(steps=None), "neither local steps nor epochs are given; give one of the"),
    "steps 0": (averaged(steps=0), "steps is 0; it must be a positive whole number"),
    "epochs beyond int32": (
        simulated(tasks=TASK, algorithm=fedavg(local_sgd(0.1, epochs=2**30, batch_size=2))),
        "epochs = 1,073,741,824 of 3 batches are 3,221,225,472 local steps; at most 2,147,483,647",
    ),
    "epochs 0": (
        lambda: fedavg(local_sgd(0.1, epochs=0)),
        "epochs is 0; it must be a positive whole number",
    ),
    "batch 0": (averaged(batch_size=0), "batch_size is 0; it must be a positive whole number"),
    "batch schedule": (averaged(batch_size=lambda t: -t), "batch_size in round 1 is -1"),
    "order without a batch": (averaged(order="iid"), "order is 'iid', but steps take all examples"),
    # Optimizers.
    "local optimizer called": (
        averaged(optimizer=optax.sgd(0.1)),
        "optimizer is an optax optimizer; give a function of the round's rate, .* without c",
        TypeError,
    ),
    "local optimizer's name": (averaged(optimizer="sgd"), "'sgd'; give a function", TypeError),
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
    # Numbers of other methods.
    "steps twice": (
        lambda: fedavg(LOCAL, local_steps=2),
        "local_steps is 2; give it to local_sgd, as steps",
    ),
    "epochs of PR-SGD": (
        lambda: prsgd(local_sgd(0.1, epochs=2)),
        "epochs is 2, which prsgd refuses: Problem 1 counts iterations, .* give their number as st",
    ),
    "momentum of another optimizer": (
        lambda: local_sgd(0.1, steps=2, momentum=0.9, optimizer=optax.adam),
        "momentum is that of SGD, but optimizer is the function adam; leave out one of the two",
    ),
    "epochs negative": (lambda: local_sgd(0.1, epochs=-0.5), "epochs is -0.5; it must be positive"),
    "epochs traced": (
        lambda: jax.jit(lambda x: local_sgd(0.1, epochs=x).steps.number)(0.5),
        "epochs is traced, but Python needs its value",
        TypeError,
    ),
    # Assignments.
    "clients 0": (lambda: mfa_rr(0, 1), "num_clients is 0; it must be a positive whole number"),
    "models too many": (lambda: mfa_rand(4, 5), "num_models is 5, more than the clients there are"),
    "cohort too large": (
        lambda: mfa_rr(4, 2, cohort_size=5),
        "cohort_size is 5; it must lie between",
    ),
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
    "BODS clients": (
        lambda: bods(7, 2, cohort_size=4),
        "cohort_size is 4, 8 clients for 2 models, more than num_clients = 7; every model has",
    ),
    "IFCA cohort too large": (
        lambda: ifca(4, 2, cohort_size=5),
        "cohort_size is 5; it must lie between 1 and num_clients = 4",
    ),
    "IFCA of tasks without losses": (
        simulated(tasks=Towards(jnp.zeros(4)), assignment=ifca(4, 2)),
        "Towards is not a task with client_loss",
    ),
    # Tasks.
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
    "an nnx module": (
        lambda: classification(DATA, Net()),
        r"module is an nnx module; give flax.nnx.bridge.to_linen\(Net, ...\)",
        TypeError,
    ),
    # Sweeps.
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
    "axis method": (
        lambda: swept(lambda **rate: None, axes={"method": [0.1]}),
        "an axis is called 'method', like an argument of sel and isel, .*; rename it, for example",
    ),
    "axes a list": (lambda: swept(axes=[0.1, 0.2]), "axes is a list of 2; give a dict", TypeError),
    "sweep seed 2^32": (lambda: swept(seed=2**32), "seed is 4294967296; it must be a whole number"),
    "sweep first_seed": (lambda: swept(first_seed=-1), "first_seed is -1; seeds are numbered"),
    "sweep seeds 0": (lambda: swept(num_seeds=0), "num_seeds is 0; it must be a positive whole"),
    "sweep record_every": (lambda: swept(record_every=3), "record_every is 3; it must divide 2"),
    "sweep client_map": (lambda: swept(client_map="x"), "client_map is 'x'; it must be"),
    "sweep keep": (lambda: swept(keep="all"), "keep is 'all'; it must be None or 'params'"),
    "sweep together": (lambda: swept(together=["x"]), "together has 'x'; give names of"),
    "until NaN": (
        lambda: Until("loss", at_most=float("nan")),
        "until.at_most is nan; it must be finite",
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
    "metric with a slash": (
        simulated(algorithm=measuring({"test/acc": jnp.float32(1)})),
        "a metric is called 'test/acc', a name that NetCDF files .* for example to 'test_acc'",
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
    "client None": (
        simulated(algorithm=FEDAVG._replace(client=None)),
        "the algorithm's client is None; give a function",
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
    "optimizer for fedavg": (
        lambda: fedavg(0.1, local_steps=2, optimizer=optax.adam),
        "fedavg has no argument 'optimizer'; its arguments are local, .* are for local_sgd, as in",
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
    "plateau without mode": (
        lambda: swept(until=Until("loss", patience=2)),
        'until has patience, but no mode; give "min" if smaller values are better',
    ),
    "a bound with warmup": (
        lambda: swept(until=Until("loss", at_most=1.0, warmup=2)),
        "until has warmup = 2, which is for a plateau; give patience, or leave it out",
    ),
    # Experiments.
    "run a file that is not there": (lambda: run("no.toml"), "no.toml: No such file or directory"),
    "run a dict": (lambda: run({"task": {}}), "experiment is a dict of 1, not an Exp", TypeError),
    # Theory.
    "M 2.5": (bound(mfa.theorem_1, M=2.5), "Theorem 1 needs M = 1, 2, ...; given M = 2.5"),
    "M 0": (bound(mfa.theorem_1, M=0), "Problem needs M >= 1; given M = 0"),
    "M more than N": (bound(mfa.theorem_1, M=5), "Theorem 1 needs M <= N; given M = 5, N = 4"),
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
    "rates for each round": (
        lambda: mfa.theorem_2_rate(np.arange(1, 9), Problem(M=2), Rate([6.0, 7.0, 8.0], 1.0)),
        r"given t of shape \(8,\), beta of the rate of shape \(3,\)",
    ),
    "beta 0": (lambda: Rate(0.0, 1.0), "Rate needs beta > 0; given beta = 0"),
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
    "no metrics of clients": (lambda: with_clients(QUADRATIC, []), "metrics are empty; give some"),
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
    "demand of one of two models": (
        lambda: scheduled(4, 2, demand=[1]),
        "demand has 1 numbers; give one, or 2, one each",
    ),
    "eligible transposed": (
        lambda: scheduled(4, 2, demand=1, eligible=np.ones((4, 2), bool)),
        "bool.models",
    ),
    "cohort of MDH too large": (
        lambda: mdh(4, 2, cohort_size=5, heterogeneous=[True, False]),
        "cohort_size is 5",
    ),
    "heterogeneous of one of two models": (
        lambda: mdh(4, 2, cohort_size=4, heterogeneous=[True]),
        "give a bool for each of the 2",
    ),
    "more models than the cohort of DMA-FL": (
        lambda: dma_fl(4, 3, cohort_size=2),
        "num_models is 3, more than the clients",
    ),
    "memory of one model": (
        lambda: fedfair(4, 1, memory=0.5),
        "memory is given, but there is one model",
    ),
    "clusters of FedCluster": (lambda: fedcluster(4, 5), "num_clusters is 5"),
    "one start for two structures": (
        lambda: simulate(
            0,
            tasks=[quadratic(4, 2, mu=1.0), quadratic(4, 3, mu=1.0)],
            algorithm=fedavg(0.1, local_steps=1),
            assignment=mfa_rand(4, 2),
            num_rounds=4,
            params=jnp.zeros(9),
        ),
        "the models differ in structure; give a list of 2 initial parameters",
    ),
    "rate of FedAdam 0": (lambda: fedadam(0.0), "learning_rate is 0.0; it must be positive"),
}
