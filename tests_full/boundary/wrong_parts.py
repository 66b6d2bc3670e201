"""More wrong parts of experiments for rules of refusal that `tests/boundary` tests once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_mm import (
    advance,
    afl,
    apfl,
    appealing,
    attacked,
    ditto,
    dma_fl,
    fedavg,
    fedcluster,
    feddyn,
    fedfair,
    fednova,
    fedprox,
    full_participation,
    ifca,
    init,
    local_sgd,
    maxfl,
    mfa_rand,
    mfa_rr,
    mifa,
    moon,
    mwfed,
    noisy,
    oort,
    perfedavg,
    pfedme,
    prsgd,
    qffl,
    run,
    scaffold,
    scheduled,
    sequential,
    simulate,
    stalevr,
    variance_reduced,
)
from fedjax_mm.asynchrony import bods, on_clock, shifted_exponential
from fedjax_mm.base import Cohort, Padded
from fedjax_mm.metrics import fairness as over_clients
from fedjax_mm.optimizers import fedadagrad, fedadam, fedyogi
from fedjax_mm.schedules import growing_sample_size, inverse_time, per_frame
from fedjax_mm.sweeps import Grid, Setup, Until
from fedjax_mm.tasks import Tuning, draw_means, local_minimum, quadratic, requiring, with_clients
from fedjax_mm.theory import Problem, Rate, cohorts, fairness, mfa
from fedjax_mm.theory import maxfl as maxfl_theory
from tests.boundary.parts import ALL, DATA, EVERYBODY, FEDAVG, KEY, QUADRATIC, TASK, X, Y, swept
from tests.boundary.wrong_parts import (
    LOCAL,
    LONG,
    NOT_A_NUMBER,
    ORDER,
    RUN,
    UNEVEN,
    Forwarding,
    Incomplete,
    averaged,
    bound,
    devices,
    dispatched,
    plain,
    sending,
    simulated,
    started,
    started_in_float64,
    traced,
)

TRACED = {
    f"{name} traced": (traced(call), f"{words} is traced, but Python needs its value", TypeError)
    for name, words, call in (
        ("models of MFA-RR", "num_models", lambda n: mfa_rr(8, n)),
        ("cohort of MFA-RR", "cohort_size", lambda n: mfa_rr(8, 2, cohort_size=n)),
        ("clients of MFA-Rand", "num_clients", lambda n: mfa_rand(n, 2)),
        ("padded size", "num_models", lambda n: mfa_rand(8, Padded(n, 2))),
        ("processors", "processors", lambda n: mfa_rand(8, 2, processors=n)),
        ("clients of FedCluster", "num_clients", lambda n: fedcluster(n, 2)),
        ("clusters", "num_clusters", lambda n: fedcluster(8, n)),
        ("clients of all", "num_clients", full_participation),
        ("clients of a quadratic", "num_clients", lambda n: quadratic(n, 2, mu=0.1)),
        ("block of a quadratic", "block_size", lambda n: quadratic(4, n, mu=0.1)),
    )
}

CASES = TRACED | {
    **{
        f"axis {name}": (
            lambda name=name: swept(lambda **rate: None, axes={name: [0.1]}),
            f"an axis is called '{name}', like an argument of sel and isel, .*; rename it, for exa",
        )
        for name in ("indexers", "tolerance", "drop", "missing_dims")
    },
    "half a job": (dispatched(at_work=2.5), "at_work is 2.5; it must be a positive whole"),
    "no arrivals": (
        dispatched(arrivals_per_round=0),
        "arrivals_per_round is 0; it must be a positive whole number",
    ),
    "ratio 0": (dispatched(ratio=0), "ratio is 0; it must be a positive whole number"),
    "one mean delay of two": (
        lambda: shifted_exponential(4, np.array([1.0, np.nan])),
        "mean is nan; it must not be negative",
    ),
    "a clock of other models": (
        lambda: on_clock(mfa_rand(4, 2), shifted_exponential(4, shift=np.ones(3))),
        "delay has means or shifts of 3 models, and there are 2; give one number for each",
    ),
    "devices of others": (
        devices(3),
        r"delay is for 3 clients, and there are 4; give device_time\(4, ...\)",
    ),
    "devices for three models": (
        devices(bytes_up=[1e6, 1e6, 1e6]),
        "delay has steps, flops or bytes of 3 models, and there are 2; give one number for each",
    ),
    "steps of three clients": (
        devices(steps=np.ones((2, 3))),
        r"steps is an array of shape \(2, 3\), and there are 4 clients; give one number for each",
    ),
    "bandwidth rounded to 0": (devices(down=1e-60), "down is 1e-60; it must be positive; infin"),
    "endless steps": (devices(steps=np.inf), "steps is inf; it must be finite and not negative"),
    "bytes to come": (devices(bytes_down=-1), "bytes_down is -1; it must be finite and not neg"),
    "latency unknown": (devices(latency=np.nan), "latency is nan; it must be finite and not neg"),
    "clock without a delay": (lambda: on_clock(ALL, 2.0), "delay is 2.0; give a func", TypeError),
    "state of arrivals, in rounds": (
        lambda: advance(started(dispatched()()), QUADRATIC, FEDAVG, EVERYBODY, 4),
        "state is of an asynchronous run, but the assignment is an Assignment; give the assignment",
        TypeError,
    ),
    "key text": (simulated("0"), "rng_key is '0'; give a seed", TypeError),
    "key fractional": (simulated(1.5), "rng_key is 1.5; give a seed", TypeError),
    "key True": (simulated(True), "rng_key is True; give a seed", TypeError),
    "key a generator": (simulated(np.random.default_rng(0)), "is a Generator; give", TypeError),
    "key a function": (simulated(jax.random.key), "is the function key; give", TypeError),
    "seed 2^32": (simulated(2**32), "rng_key is 4294967296; it must be"),
    "several seeds": (
        simulated(np.arange(3)),
        "rng_key is an array of shape .3,.; give",
        TypeError,
    ),
    "init key None": (lambda: init(None, QUADRATIC, FEDAVG, EVERYBODY), "rng_key is N", TypeError),
    "algorithm not called": (
        simulated(algorithm=fedavg),
        r"algorithm is the function fedavg, not an algorithm; call it, as in fedavg\(...\)",
        TypeError,
    ),
    "task not called": (simulated(tasks=quadratic), "tasks is the function quadratic", TypeError),
    "task's class": (simulated(tasks=type(QUADRATIC)), "tasks is the class Quadratic", TypeError),
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
    "no weight": (
        simulated(tasks=plain(weight=lambda self, client: None)),
        "Own.weight returns None; return one number, n_k",
        TypeError,
    ),
    "a cohort in lists": (lambda: Cohort.of_rows([[0, 1]]), "clients are of type list; give an"),
    "axis more than build takes": (
        lambda: Grid(lambda: None, {"lr": [0.1], "task": [QUADRATIC]}, num_rounds=2),
        "build cannot be called with lr, task: got an unexpected keyword argument",
        TypeError,
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
    "no tasks": (simulated(tasks=[]), "there are 0 tasks but the assignment has 1 models"),
    "clients of another number": (
        simulated(assignment=mfa_rr(5, 1)),
        r"the tasks have \[4\] clients",
    ),
    "requiring data": (lambda: requiring(DATA, X[0]), "task is a FederatedData", TypeError),
    "unseen negative": (lambda: requiring(TASK, np.zeros(4), num_unseen=-1), "num_unseen is -1"),
    "attackers' factor": (lambda: attacked(TASK, [True] * 4, loss_factor=0), "loss_factor is 0"),
    "noisy factory": (lambda: noisy(fedavg, [True]), "is the function fedavg, not", TypeError),
    "noise negative": (lambda: noisy(FEDAVG, [True] * 4, noise=-1), "noise is -1; it must not be"),
    "appealing fractional": (lambda: appealing(EVERYBODY, cohort_size=1.5), "cohort_size is 1.5"),
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
    "params of three models": (
        simulated(params=[np.ones(9)] * 3),
        "a list of 3 is not one for each of 1 models",
    ),
    "params infinite": (simulated(params=jnp.ones(9).at[3].set(jnp.inf)), "are not finite; give"),
    "params beyond float32": (simulated(params=np.full(9, 1e300)), "are not finite; give"),
    "params of one model NaN": (
        simulated(assignment=mfa_rr(4, 2), params=[np.ones(9), np.full(9, np.nan)]),
        "are not finite; give",
    ),
    "rate text": (averaged("0.1"), "learning_rate is '0.1'; it must be a number", NOT_A_NUMBER),
    "rate True": (averaged(True), "learning_rate is True; it must be a number", NOT_A_NUMBER),
    "rate infinite in float32": (averaged(1e300), "which is inf in float32; it must be positive"),
    "rate negative": (averaged(-0.1), "learning_rate is -0.1; it must be positive"),
    "rate NaN": (averaged(float("nan")), "learning_rate is nan; it must be positive"),
    "rate infinite": (averaged(float("inf")), "learning_rate is inf; it must be positive"),
    "rate complex": (averaged(1j), "learning_rate is 1j; it must be a number", NOT_A_NUMBER),
    "rates in an array": (averaged(jnp.ones(2)), r"is of shape \(2,\); give one number"),
    "rate in a dict": (averaged({"rate": 0.1}), "is a dict of 1; it must be a num", NOT_A_NUMBER),
    "rate an optimizer, in short": (
        lambda: fedavg(optax.sgd(0.1)),
        r"is an optax optimizer; .* go to local_sgd, as in local_sgd\(0.1, steps=5, optimizer=",
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
    "steps fractional": (averaged(steps=1.5), "steps is 1.5; it must be a positive"),
    "steps text": (averaged(steps="5"), "steps is '5'; it must be a positive"),
    "steps True": (averaged(steps=True), "steps is True; it must be a positive"),
    "steps 2^31": (averaged(steps=2**31), "is 2147483648; it must be .*, at most 2147483647"),
    "rounds 2^31": (
        simulated(rounds=2**31),
        "num_rounds is 2147483648; it must be .*, at most 214",
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
    "batch fractional": (averaged(batch_size=0.5), "batch_size is 0.5; it must be a positive"),
    "order unknown": (
        averaged(batch_size=2, order="x"),
        "order is 'x'; it must be 'iid', 'epochs'",
    ),
    "server scale": (averaged(server_scale="sum"), "server_scale is 'sum'; it must be 'mean' or"),
    "local optimizer a rate": (averaged(optimizer=0.1), "is 0.1; give a function", TypeError),
    "server optimizer a rate": (averaged(server_optimizer=1.0), "is 1.0, not an optax", TypeError),
    "server optimizer's name": (averaged(server_optimizer="adam"), "is 'adam', not an", TypeError),
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
    "no steps of SCAFFOLD": (
        lambda: scaffold(local_sgd(0.1)),
        "neither local steps nor epochs are given; give one of the two",
    ),
    "optimizer of SCAFFOLD": (
        lambda: scaffold(local_sgd(0.1, steps=2, optimizer=optax.adam)),
        "optimizer is the function adam, which scaffold, option II refuses: .* or take option I",
    ),
    "momentum 1": (lambda: local_sgd(0.1, steps=2, momentum=1.0), "momentum is 1.0; it must be in"),
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
    "IFCA average": (
        lambda: ifca(4, 2, average="losses"),
        "average is 'losses'; it must be 'models' or 'gradients'",
    ),
    "by": (
        lambda: variance_reduced(4, 2, expected_trainings=2, by="x"),
        "by is 'x'; it must be 'loss' or 'update'",
    ),
    "beta": (lambda: stalevr(LOCAL, beta=1), "beta is 1; it must be 'estimated', 'exact'"),
    "mifa rate": (lambda: mifa(local_sgd(None)), "learning_rate is None; it must", NOT_A_NUMBER),
    "rounds_per_model 0": (lambda: sequential(4, 2, rounds_per_model=0), "rounds_per_model is 0"),
    "quadratic clients": (
        lambda: quadratic(0, 2, mu=0.1),
        "num_clients is 0; it must be a positive",
    ),
    "quadratic block": (lambda: quadratic(4, 2.5, mu=0.1), "block_size is 2.5; it must be a posit"),
    "quadratic mu": (lambda: quadratic(4, 2, mu=0), "mu is 0; it must be positive"),
    "quadratic mu None": (lambda: quadratic(4, 2, mu=None), "mu is None; it must", NOT_A_NUMBER),
    "gamma": (lambda: draw_means(KEY, [0.0], -1.0), "gamma is -1.0; it must be positive"),
    "tuning rate": (lambda: Tuning(-0.1, 2), "learning_rate is -0.1; it must be positive"),
    "tuning steps": (lambda: Tuning(0.1, 0), "num_steps is 0; it must be a positive whole number"),
    "max_steps": (lambda: local_minimum(jnp.sin, 0.0, max_steps=0), "max_steps is 0; it must be"),
    "tolerance": (lambda: local_minimum(jnp.sin, 0.0, tolerance=0), "tolerance is 0; it must be p"),
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
    "sweep seed -1": (lambda: swept(seed=-1), "seed is -1; it must be a whole number, 0 ..."),
    "sweep seed fractional": (lambda: swept(seed=0.5), "seed is 0.5; it must be a whole number"),
    "sweep seed a key": (lambda: swept(seed=KEY), "seed is an array of shape .*; it must be a who"),
    "sweep first_seed 2^31": (lambda: swept(first_seed=2**31), "first_seed is 2147483648; seeds"),
    "sweep rounds": (lambda: swept(num_rounds=0.5), "num_rounds is 0.5; it must be a positive"),
    "until infinite": (
        lambda: Until("accuracy", at_least=np.inf),
        "until.at_least is inf; it must be finite",
    ),
    "axis with a space at the end": (
        lambda: swept(axes={"rate ": [0.1]}),
        "an axis is called 'rate ', a name that NetCDF files cannot have; .* to 'rate'",
    ),
    "metric in brackets": (
        simulated(assignment=EVERYBODY._replace(metrics=lambda _: {"(a)": jnp.zeros(1)})),
        r"a metric is called '\(a\)', a name that NetCDF files cannot have; .* to 'a'",
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
    "report text": (
        simulated(algorithm=sending(report="done")),
        "returns from client as report 'done'; give a pytree of arrays",
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
    "advance with a state of float64": (
        lambda: advance(started_in_float64(), *RUN, 2),
        r"state has float64\[1,9\] in its models where runs of these tasks have float32\[1,9\]",
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
    "run a task": (lambda: run(TASK), "experiment is a Supervised, not an E", TypeError),
    "N 4.5": (bound(mfa.theorem_1, N=4.5), "Theorem 1 needs N = 1, 2, ...; given N = 4.5"),
    "E 1.5": (bound(mfa.theorem_1, E=1.5), "Theorem 1 needs E = 1, 2, ...; given E = 1.5"),
    "E 0": (bound(mfa.theorem_1, E=0), "Problem needs E >= 1; given E = 0"),
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
    "share of clients": (lambda: over_clients(np.ones(3), share=0.0), "share is 0.0; it must be"),
    "a name for metrics of clients": (
        lambda: with_clients(QUADRATIC, "loss"),
        "metrics is 'loss'; give a list of names",
        TypeError,
    ),
    "an unknown metric of clients": (
        lambda: with_clients(QUADRATIC, ["accuracy"]),
        r"metrics\[0\] is 'accuracy'; it must be 'loss'",
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
    "demand is 0": (
        lambda: scheduled(4, 2, demand=0),
        "demand is 0; it must be a positive whole number",
    ),
    "demand[1] is 0": (lambda: scheduled(4, 2, demand=[1, 0]), r"demand\[1\] is 0"),
    "policy is irs": (lambda: scheduled(4, 2, demand=1, policy="irs"), "policy is 'irs'"),
    "eligible in floats": (
        lambda: scheduled(4, 2, demand=1, eligible=np.ones((2, 4))),
        "type float64; give",
    ),
    "weight is 0.0": (
        lambda: dma_fl(4, 2, cohort_size=2, weight=0.0),
        "weight is 0.0; it must be positive",
    ),
    "memory is 0.0": (lambda: fedfair(4, 2, memory=0.0), "memory is 0.0"),
    "num_models is 4": (
        lambda: mfa_rr(9, 4, cohort_size=3),
        r"more than the clients a cohort has \(3\)",
    ),
    "redraw is always": (lambda: mfa_rr(4, 2, redraw="always"), "redraw is 'always'"),
    "local_steps is 0": (lambda: fedavg(0.1, local_steps=0), "local_steps is 0"),
    "local_steps is 2.5": (
        lambda: fedavg(0.1, local_steps=2.5),
        "local_steps is 2.5; it must be a positive whole number",
    ),
    "local_steps is 5": (
        lambda: fedavg(local_sgd(0.1, steps=5), local_steps=5),
        "local_steps is 5; give it to local_sgd, as steps",
    ),
    "eps is -0.1": (lambda: maxfl(LOCAL, eps=-0.1), "eps is -0.1; it must not be negative"),
    "slope is 0.0": (lambda: maxfl(LOCAL, slope=0.0), "slope is 0.0; it must be positive"),
    "slope is -1.0": (lambda: maxfl(LOCAL, slope=-1.0), "slope is -1.0"),
    "server_rate is 0.0": (lambda: maxfl(LOCAL, server_rate=0.0), "server_rate is 0.0"),
    "weight is relu": (
        lambda: maxfl(LOCAL, weight="relu"),
        "weight is 'relu'; it must be 'derivative' or 'sigmoid'",
    ),
    "mu of FedProx -1": (lambda: fedprox(LOCAL, mu=-1.0), "mu is -1.0; it must not be negative"),
    "option is III": (
        lambda: scaffold(LOCAL, option="III"),
        "option is 'III'; it must be 'I' or 'II'",
    ),
    "server_rate is nan": (lambda: scaffold(LOCAL, server_rate=float("nan")), "server_rate is nan"),
    "alpha is -0.1": (lambda: perfedavg(LOCAL, alpha=-0.1), "alpha is -0.1"),
    "delta is 0.0": (lambda: perfedavg(LOCAL, delta=0.0), "delta is 0.0"),
    "variant is SO": (
        lambda: perfedavg(LOCAL, variant="SO"),
        "variant is 'SO'; it must be 'FO' or 'HF'",
    ),
    "q is -1.0": (lambda: qffl(LOCAL, q=-1.0), "q is -1.0; it must not be negative"),
    "mixture_rate is 0.0": (lambda: afl(LOCAL, mixture_rate=0.0), "mixture_rate is 0.0"),
    "growth is 1.0": (lambda: mwfed(LOCAL, growth=1.0), "growth is 1.0; it must be greater than 1"),
    "lam is -0.5": (lambda: ditto(LOCAL, lam=-0.5), "lam is -0.5"),
    "adaptive is 1": (lambda: apfl(LOCAL, adaptive=1), "adaptive is 1; it must be True or False"),
    "lam is 0.0": (lambda: pfedme(LOCAL, lam=0.0), "lam is 0.0; it must be positive"),
    "inner_rate is -1.0": (
        lambda: pfedme(LOCAL, inner_rate=-1.0),
        "inner_rate is -1.0; it must be positive",
    ),
    "inner_steps is 0": (
        lambda: pfedme(LOCAL, inner_steps=0),
        "inner_steps is 0; it must be a positive whole number",
    ),
    "temperature is 0.0": (
        lambda: moon(LOCAL, temperature=0.0),
        "temperature is 0.0; it must be positive",
    ),
    "expected_trainings is 0": (
        lambda: variance_reduced(4, 2, expected_trainings=0),
        "expected_trainings is 0; it must be positive and at most",
    ),
    "expected_trainings is 4.5": (
        lambda: variance_reduced(4, 2, expected_trainings=4.5),
        "at most the number of processors, 4",
    ),
    "expected_trainings is nan": (
        lambda: variance_reduced(4, 2, expected_trainings=float("nan")),
        "expected_trainings is nan",
    ),
    "expected_trainings is 11": (
        lambda: variance_reduced(4, 2, expected_trainings=11, processors=(1, 2, 3, 4)),
        "the number of processors, 10",
    ),
    "by is norm": (
        lambda: variance_reduced(4, 2, expected_trainings=2, by="norm"),
        "by is 'norm'; it must be 'loss' or 'update'",
    ),
    "inactive is sleep": (
        lambda: variance_reduced(4, 2, expected_trainings=2, inactive="sleep"),
        "inactive is 'sleep'; it must be 'rest' or 'train'",
    ),
    "processors[2] is 0": (
        lambda: variance_reduced(4, 2, expected_trainings=2, processors=(1, 2, 0, 1)),
        r"processors\[2\] is 0",
    ),
    "one task in a list for two models": (
        lambda: simulate(
            0,
            tasks=[quadratic(4, 2, mu=1.0)],
            algorithm=fedavg(0.1, local_steps=1),
            assignment=mfa_rand(4, 2),
            num_rounds=4,
        ),
        "there are 1 tasks but the assignment has 2 models",
    ),
    "tasks of 4 and 5 clients": (
        lambda: simulate(
            0,
            tasks=[quadratic(4, 2, mu=1.0), quadratic(5, 2, mu=1.0)],
            algorithm=fedavg(0.1, local_steps=1),
            assignment=mfa_rand(4, 2),
            num_rounds=4,
        ),
        r"the tasks have \[4, 5\] clients",
    ),
    "three algorithms for two models": (
        lambda: simulate(
            0,
            tasks=quadratic(4, 2, mu=1.0),
            algorithm=[fedavg(0.1, local_steps=1)] * 3,
            assignment=mfa_rand(4, 2),
            num_rounds=4,
        ),
        "there are 3 algorithms but the assignment has 2 models",
    ),
    "parameters of four numbers": (
        lambda: simulate(
            0,
            tasks=quadratic(4, 2, mu=1.0),
            algorithm=fedavg(0.1, local_steps=1),
            assignment=mfa_rand(4, 2),
            num_rounds=4,
            params=jnp.zeros(4),
        ),
        r"initial parameters have shape \(4,\); give \(9,\)",
    ),
    "mu of a quadratic 0": (lambda: quadratic(4, 4, mu=0.0), "mu is 0.0"),
    "mu of a quadratic -1": (lambda: quadratic(4, 4, mu=-1.0), "mu is -1.0"),
    "mu of a quadratic NaN": (lambda: quadratic(4, 4, mu=float("nan")), "mu is nan"),
    "b1 is 1.0": (lambda: fedadam(0.1, b1=1.0), "b1 is 1.0; it must be"),
    "b2 is -0.1": (lambda: fedyogi(0.1, b2=-0.1), "b2 is -0.1; it must be"),
    "tau is 0.0": (lambda: fedadagrad(0.1, tau=0.0), "tau is 0.0; it must be positive"),
    "initial_accumulator_value is -1.0": (
        lambda: fedadagrad(0.1, initial_accumulator_value=-1.0),
        "initial_accumulator_value is -1.0; it must not be negative",
    ),
    "fedadagrad has no argument b2": (
        lambda: fedadagrad(0.1, b2=0.9),
        "fedadagrad has no argument 'b2'",
        TypeError,
    ),
}
