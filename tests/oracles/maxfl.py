"""NumPy float64 oracle of MaxFL and the methods compared with it, in plain loops.

Cho et al., "Maximizing Global Model Appeal in Federated Learning", and the papers that each
function names. Nothing here is shared with the library under test. One model is one vector w [d].

Counting as in `multi_model`: `k` (client), `e` (local step) and `i` (batch of a client's round) are
array indices, from 0; `t` (round) is from 1. A negative client id is padding and is skipped. A
round without clients leaves the model unchanged.

The problem gives every loop its number of steps, its momentum (`Heavy`), and the server's step from
the method's change of w (`Problem.server`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rate = Callable[[int], float]  # t -> learning rate
Rounds = Sequence[list[int]]  # Rounds[t - 1]: the clients of round t, without padding


class Problem(NamedTuple):
    """Losses, gradients and thresholds of the N clients."""

    gradient: Callable[[int, Array, int, int], Array]  # (k, w, t, i): on batch i of round t
    full_gradient: Callable[[int, Array], Array]  # (k, w)
    loss: Callable[[int, Array], float]  # (k, w): F_k(w), over all the client's examples
    num_examples: Array  # [N]
    thresholds: Array  # [N], rho_k
    # (k, t, i): matrices A [z, d] of the examples of batch i, whose features are A w
    features: Callable[[int, int, int], list[Array]] = lambda k, t, i: []
    steps: Sequence[int] | None = None  # K_k of every client, instead of `num_steps`
    momentum: float = 0.0
    stepper_of: Callable[[int, str], Callable[..., Array]] | None = None  # (k, which model)
    server: Callable[[Array, Array], Array] = lambda w, step: w + step  # keeps its own state

    def num_steps(self, k: int, num_steps: int) -> int:
        """K_k."""
        return num_steps if self.steps is None else self.steps[k]

    def stepper(self, k: int, model: str = "w") -> Callable[..., Array]:
        """The steps of a local training."""
        return self.stepper_of(k, model) if self.stepper_of else Heavy(self.momentum)

    def normalizer(self, k: int, num_steps: int) -> float:
        """a_k = sum (1 - beta^j) / (1 - beta) over j = 1 ... K_k (Wang et al., section 4)."""
        beta, K = self.momentum, self.num_steps(k, num_steps)
        return float(sum((1 - beta**j) / (1 - beta) for j in range(1, K + 1)))

    def weights(self, clients: Sequence[int], weighted: bool) -> list[float]:
        """n_k, or 1, of several clients."""
        return [float(self.num_examples[k]) if weighted else 1.0 for k in clients]


class Heavy:
    """Steps with momentum: m <- beta m + g and x <- x - rate m, from m = 0."""

    def __init__(self, beta: float) -> None:
        self.beta, self.m = beta, np.zeros(())

    def __call__(self, x: Array, rate: float, g: Array) -> Array:
        self.m = self.beta * self.m + g
        return np.asarray(x - rate * self.m)


def sigmoid(x: float) -> float:
    """sigma(x) = 1 / (1 + exp(-x))."""
    return float(1.0 / (1.0 + np.exp(-x)))


def sgd(problem: Problem, k: int, w: Array, t: int, rate: float, num_steps: int) -> Array:
    """w_k after E local steps, or K_k."""
    return descend(problem, k, w, t, rate, problem.num_steps(k, num_steps))


def descend(problem: Problem, k: int, w: Array, t: int, rate: float, num_steps: int) -> Array:
    """w_k after exactly that number of local steps."""
    step = problem.stepper(k)
    for e in range(num_steps):
        w = step(w, rate, problem.gradient(k, w, t, e))
    return w


def mean(changes: list[Array], weights: list[float]) -> Array:
    total = np.zeros_like(changes[0])
    for change, weight in zip(changes, weights, strict=True):
        total = total + weight * change
    return np.asarray(total / sum(weights))


def fedavg(
    problem: Problem, w: Array, rounds: Rounds, rate: Rate, num_steps: int, *, weighted: bool
) -> Array:
    """FedAvg, weighted by n_k or unweighted. All other methods reduce to one of these."""
    for t, clients in enumerate(rounds, start=1):
        if clients:
            changes = [sgd(problem, k, w, t, rate(t), num_steps) - w for k in clients]
            w = problem.server(w, mean(changes, problem.weights(clients, weighted)))
    return w


def gradient_tracking(
    problem: Problem, w: Array, rounds: Rounds, rate: Rate, num_steps: int, *, weighted: bool
) -> tuple[Array, Array, Array]:
    """DIGing of one model, which has nobody to mix with: w, the tracked and the last gradient.

    (w - w_k) / eta is the gradient of a client with several steps.
    """
    g, last = np.zeros_like(w), np.zeros_like(w)
    for t, clients in enumerate(rounds, start=1):
        if clients:
            changes = [w - sgd(problem, k, w, t, rate(t), num_steps) for k in clients]
            new = mean(changes, problem.weights(clients, weighted)) / rate(t)
            g, last = g + new - last, new
            w = problem.server(w, -rate(t) * g)
    return w, g, last


def maxfl(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    server_rate: float,
    eps: float,
    weight: str,
    slope: float,
    tuning_steps: int | None = None,
) -> Array:
    """MaxFL: w <- w - eta_g / (sum q + eps) sum q_k Delta_k, Delta_k = w - w_k (eq. 6).

    Clients may fine-tune w on their first batches before q_k is computed (section 5.1).
    """
    for t, clients in enumerate(rounds, start=1):
        if not clients:
            continue
        sum_q, sum_q_delta = 0.0, np.zeros_like(w)
        for k in clients:
            tuned = descend(problem, k, w, t, rate(t), tuning_steps or 0)
            s = sigmoid(slope * (problem.loss(k, tuned) - problem.thresholds[k]))
            q = s * (1.0 - s) if weight == "derivative" else s
            sum_q += q
            sum_q_delta += q * (w - sgd(problem, k, w, t, rate(t), num_steps))
        w = problem.server(w, -server_rate / (sum_q + eps) * sum_q_delta)
    return w


def fedprox(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    mu: float,
    weighted: bool = True,
) -> Array:
    """FedProx, with local steps along g + mu (w_k - w) and an n_k-weighted mean."""
    for t, clients in enumerate(rounds, start=1):
        changes = []
        for k in clients:
            own, step = w, problem.stepper(k)
            for e in range(problem.num_steps(k, num_steps)):
                own = step(own, rate(t), problem.gradient(k, own, t, e) + mu * (own - w))
            changes.append(own - w)
        if clients:
            w = problem.server(w, mean(changes, problem.weights(clients, weighted)))
    return w


def prsgd(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    weighted: bool = False,
) -> tuple[Array, Array]:
    """Pawlik's Algorithm 1 in rounds that end with the mean: w and the last -rate G_k [N, d].

    Absent clients keep their gradient. With all clients this is `cohorts.algorithm_1`.
    """
    last = np.zeros((len(problem.num_examples), len(w)))
    for t, clients in enumerate(rounds, start=1):
        points = []
        for k in clients:
            x, step = w + last[k], problem.stepper(k)
            for e in range(num_steps - 1):
                x = step(x, rate(t), problem.gradient(k, x, t, e))
            last[k] = step(x, rate(t), problem.gradient(k, x, t, num_steps - 1)) - x
            points.append(x - w)
        if clients:
            w = problem.server(w, mean(points, problem.weights(clients, weighted)))
    return w, last


def scaffold(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    server_rate: float,
    option: str,
    weighted: bool = False,
) -> tuple[Array, Array, Array]:
    """SCAFFOLD: w, c [d] and c_k [N, d] after the last round."""
    N = len(problem.num_examples)
    c, c_k = np.zeros_like(w), np.zeros((N, len(w)))
    for t, clients in enumerate(rounds, start=1):
        changes, c_changes = [], []
        for k in clients:
            y, step = w, problem.stepper(k)
            for e in range(problem.num_steps(k, num_steps)):
                y = step(y, rate(t), problem.gradient(k, y, t, e) - c_k[k] + c)
            if option == "II":
                new = c_k[k] - c + (w - y) / (problem.normalizer(k, num_steps) * rate(t))
            else:
                new = problem.full_gradient(k, w)
            changes.append(y - w)
            c_changes.append(new - c_k[k])
            c_k[k] = new
        if clients:
            step_w = server_rate * mean(changes, problem.weights(clients, weighted))
            w = problem.server(w, step_w)
            c = c + np.sum(c_changes, axis=0) / N
    return w, c, c_k


def perfedavg(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    alpha: float,
    variant: str,
    delta: float,
    weighted: bool = False,
) -> Array:
    """Per-FedAvg with 2 (FO) or 3 (HF) batches per step and an unweighted mean."""
    num_batches = 2 if variant == "FO" else 3
    for t, clients in enumerate(rounds, start=1):
        changes = []
        for k in clients:
            own, step = w, problem.stepper(k)
            for e in range(problem.num_steps(k, num_steps)):
                i = num_batches * e
                u = own - alpha * problem.gradient(k, own, t, i)
                g = problem.gradient(k, u, t, i + 1)
                if variant == "HF":
                    ahead = problem.gradient(k, own + delta * g, t, i + 2)
                    behind = problem.gradient(k, own - delta * g, t, i + 2)
                    g = g - alpha * (ahead - behind) / (2 * delta)
                own = step(own, rate(t), g)
            changes.append(own - w)
        if clients:
            w = problem.server(w, mean(changes, problem.weights(clients, weighted)))
    return w


def qffl(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    q: float,
    weighted: bool = False,
) -> Array:
    """q-FedAvg: w <- w - sum Delta_k / sum h_k."""
    for t, clients in enumerate(rounds, start=1):
        if not clients:
            continue
        sum_delta, sum_h = np.zeros_like(w), 0.0
        for k, weight in zip(clients, problem.weights(clients, weighted), strict=True):
            F = problem.loss(k, w) + 1e-10
            dw = (w - sgd(problem, k, w, t, rate(t), num_steps)) / rate(t)
            sum_delta += weight * F**q * dw
            sum_h += weight * (q * F ** (q - 1) * float(dw @ dw) + F**q / rate(t))
        w = problem.server(w, -sum_delta / sum_h)
    return w


def onto_simplex(x: Array) -> Array:
    """The nearest point of the probability simplex, by bisection of the shift."""
    low, high = x.min() - 1.0, x.max()
    for _ in range(200):
        shift = (low + high) / 2
        if np.maximum(x - shift, 0.0).sum() > 1.0:
            low = shift
        else:
            high = shift
    return np.maximum(x - (low + high) / 2, 0.0)


def afl(
    problem: Problem, w: Array, rounds: Rounds, rate: Rate, num_steps: int, *, mixture_rate: float
) -> tuple[Array, Array, Array]:
    """AFL: the mean of w over rounds with participants, the last w, and lambda [N]."""
    N = len(problem.num_examples)
    mixture, all_w = np.full(N, 1.0 / N), []
    for t, clients in enumerate(rounds, start=1):
        step, gain = np.zeros_like(w), np.zeros(N)
        for k in clients:
            step += mixture[k] * (sgd(problem, k, w, t, rate(t), num_steps) - w)
            gain[k] = problem.loss(k, w)
        if clients:
            w = problem.server(w, step)
            mixture = onto_simplex(mixture + mixture_rate * gain)
            all_w.append(w)
    return np.mean(all_w, axis=0), w, mixture


def mwfed_steps(v: Array, taus: Sequence[int]) -> list[int]:
    """tau_k = clip(round(tau N v_k), 1, 4 tau) for every client."""
    pairs = zip(v, taus, strict=True)
    return [int(np.clip(np.round(tau * len(v) * x), 1, 4 * tau)) for x, tau in pairs]


def mwfed(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    growth: float,
    factors: Array | None = None,
    lengths: list[int] | None = None,
) -> tuple[Array, Array]:
    """MW-Fed: w and the weights v [N] after the last round.

    Client k reports `factors[k]` times its loss. The local steps of each round are appended to
    `lengths`.
    """
    N = len(problem.num_examples)
    factors = np.ones(N) if factors is None else factors

    def grown(v: Array, w: Array) -> Array:
        larger = v.copy()
        for k in range(N):
            if factors[k] * problem.loss(k, w) >= problem.thresholds[k]:
                larger[k] *= growth
        return np.asarray(larger / larger.sum())

    v = grown(np.full(N, 1.0 / N), w)
    for t, clients in enumerate(rounds, start=1):
        steps = mwfed_steps(v, [problem.num_steps(k, num_steps) for k in range(N)])
        if lengths is not None:
            lengths.append(sum(steps[k] for k in clients))
        if clients:
            changes = [descend(problem, k, w, t, rate(t), steps[k]) - w for k in clients]
            w = problem.server(w, mean(changes, [v[k] for k in clients]))
            v = grown(v, w)
    return w, v


def ditto(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    lam: float,
    weighted: bool = True,
) -> tuple[Array, Array]:
    """Ditto: w and the personal models v_k [N, d]."""
    v = np.tile(w, (len(problem.num_examples), 1))
    for t, clients in enumerate(rounds, start=1):
        changes = []
        for k in clients:
            changes.append(sgd(problem, k, w, t, rate(t), num_steps) - w)
            step = problem.stepper(k, "personal")
            for e in range(problem.num_steps(k, num_steps)):
                v[k] = step(v[k], rate(t), problem.gradient(k, v[k], t, e) + lam * (v[k] - w))
        if clients:
            w = problem.server(w, mean(changes, problem.weights(clients, weighted)))
    return w, v


def fednova(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    weighted: bool = True,
) -> Array:
    """FedNova: w <- w + a_eff sum p_k Delta_k / a_k with a_eff = sum p_k a_k."""
    for t, clients in enumerate(rounds, start=1):
        weights = problem.weights(clients, weighted)
        a_eff, direction = 0.0, np.zeros_like(w)
        for k, weight in zip(clients, weights, strict=True):
            p, a = weight / sum(weights), problem.normalizer(k, num_steps)
            a_eff += p * a
            direction += p / a * (sgd(problem, k, w, t, rate(t), num_steps) - w)
        if clients:
            w = problem.server(w, a_eff * direction)
    return w


def feddyn(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    alpha: float,
    weighted: bool = False,
) -> tuple[Array, Array, Array]:
    """FedDyn: w, h [d] and g_k [N, d].

    For the sum of n_k F_k, client k has the strength alpha / (N p_k), p_k = n_k / sum n.
    """
    n, N = problem.num_examples, len(problem.num_examples)
    strength = [alpha * sum(n) / (N * n[k]) if weighted else alpha for k in range(N)]
    h, g = np.zeros_like(w), np.zeros((N, len(w)))
    for t, clients in enumerate(rounds, start=1):
        points = []
        for k in clients:
            x, step = w, problem.stepper(k)
            for e in range(problem.num_steps(k, num_steps)):
                slope = problem.gradient(k, x, t, e) - g[k] + strength[k] * (x - w)
                x = step(x, rate(t), slope)
            points.append(x)
        if clients:
            for k, x in zip(clients, points, strict=True):
                g[k] = g[k] - strength[k] * (x - w)
            h = h - alpha / N * sum(x - w for x in points)
            w = problem.server(w, sum(points) / len(points) - w - h / alpha)
    return w, h, g


def apfl(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    alpha: float,
    adaptive: bool,
    weighted: bool = True,
) -> tuple[Array, Array, Array]:
    """APFL as in FedJAX, with one alpha per client: w, v_k [N, d] and alpha_k [N]."""
    N = len(problem.num_examples)
    v, mix = np.tile(w, (N, 1)), np.full(N, alpha)
    for t, clients in enumerate(rounds, start=1):
        changes = []
        for k in clients:
            own, steps = w, [problem.stepper(k, "w"), problem.stepper(k, "v")]
            for e in range(problem.num_steps(k, num_steps)):
                bar = mix[k] * v[k] + (1 - mix[k]) * own
                g, g_bar = problem.gradient(k, own, t, e), problem.gradient(k, bar, t, e)
                slope = (v[k] - own) @ g_bar
                own, v[k] = steps[0](own, rate(t), g), steps[1](v[k], rate(t), g_bar)
                if adaptive:
                    mix[k] = min(1.0, max(0.0, mix[k] - rate(t) * slope))
            changes.append(own - w)
        if clients:
            w = problem.server(w, mean(changes, problem.weights(clients, weighted)))
    return w, v, mix


def contrast_gradient(z: Array, near: Array, far: Array, temperature: float) -> Array:
    """Gradient in z of -log(e^(s_g/T) / (e^(s_g/T) + e^(s_p/T))), s the cosines with near, far."""
    size = np.sqrt(z @ z)
    slopes, cosines = [], []
    for y in (near, far):
        cosine = (z @ y) / (size * np.sqrt(y @ y))
        cosines.append(cosine)
        slopes.append(y / (size * np.sqrt(y @ y)) - cosine * z / size**2)
    share = sigmoid((cosines[1] - cosines[0]) / temperature)
    return np.asarray(share * (slopes[1] - slopes[0]) / temperature)


def moon(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    mu: float,
    temperature: float,
    weighted: bool = True,
) -> tuple[Array, Array]:
    """MOON: w and the previous local models [N, d], at first the initial model."""
    last = np.tile(w, (len(problem.num_examples), 1))
    for t, clients in enumerate(rounds, start=1):
        changes = []
        for k in clients:
            own, step = w, problem.stepper(k)
            for e in range(problem.num_steps(k, num_steps)):
                gradient, batch = problem.gradient(k, own, t, e), problem.features(k, t, e)
                for A in batch:
                    slope = contrast_gradient(A @ own, A @ w, A @ last[k], temperature)
                    gradient = gradient + mu / len(batch) * (A.T @ slope)
                own = step(own, rate(t), gradient)
            last[k] = own
            changes.append(own - w)
        if clients:
            w = problem.server(w, mean(changes, problem.weights(clients, weighted)))
    return w, last


def pfedme(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    inner_rate: float,
    inner_steps: int,
    lam: float,
    server_rate: float,
    weighted: bool = False,
) -> tuple[Array, Array]:
    """pFedMe: w and theta_k [N, d]."""
    theta = np.tile(w, (len(problem.num_examples), 1))
    for t, clients in enumerate(rounds, start=1):
        changes = []
        for k in clients:
            own, step = w, problem.stepper(k)
            for e in range(problem.num_steps(k, num_steps)):
                for _ in range(inner_steps):
                    gradient = problem.gradient(k, theta[k], t, e)
                    theta[k] = theta[k] - inner_rate * (gradient + lam * (theta[k] - own))
                own = step(own, rate(t), lam * (own - theta[k]))
            changes.append(own - w)
        if clients:
            step_w = server_rate * mean(changes, problem.weights(clients, weighted))
            w = problem.server(w, step_w)
    return w, theta


def partial_sharing(
    problem: Problem,
    w: Array,
    rounds: Rounds,
    rate: Rate,
    num_steps: int,
    *,
    own: Array,
    own_steps: int | None = None,
) -> tuple[Array, Array]:
    """FedAvg in which entries with `own` = 1 stay with clients: w and the clients' models [N, d].

    With `own_steps` as in FedRep, the first steps train own entries, and the others the rest.
    """
    start, N = w, len(problem.num_examples)
    v = np.tile(w, (N, 1))
    for t, clients in enumerate(rounds, start=1):
        changes = []
        for k in clients:
            x = np.where(own == 1, v[k], w)
            for e in range(num_steps):
                live = np.ones_like(own)
                if own_steps is not None:
                    live = own if e < own_steps else 1 - own
                x = x - rate(t) * live * problem.gradient(k, x, t, e)
            v[k] = x
            changes.append(x - w)
        if clients:
            w = w + mean(changes, [problem.num_examples[k] for k in clients])
            w = np.where(own == 1, start, w)
    return w, np.where(own == 1, v, w)
