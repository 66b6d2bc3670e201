"""NumPy float64 oracle of the algorithms as the paper prints them, in plain loops.

Bhuyan, Moharir, Joshi, "Multi-Model Federated Learning with Provable Guarantees"; equation,
algorithm and table numbers are theirs. Nothing here is shared with the library under test.

Counting: `m` (model), `k` (client) and `e` (local step) are array indices, from 0; `t` (round),
`j` (group) and `l` (frame) are the paper's, from 1. N clients, M models, E local steps, T rounds,
d parameters, n_k examples of client k. A negative id or row number is padding and is skipped.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Group = Sequence[int] | NDArray[np.integer]  # client ids
Groups = Sequence[Group] | NDArray[np.integer]  # one group per model
Gradient = Callable[[Array, int], Array]  # (w, e) -> gradient
GradientFn = Callable[[int, int, Array, int, int], Array]  # (m, k, w, t, e) -> gradient
LocalStepsFn = Callable[[Gradient, Array, float, int], Array]


def _present(ids: Iterable[int]) -> list[int]:
    return [int(i) for i in ids if i >= 0]


# Quadratic problem (section 6.1)


class DenseQuadratic(NamedTuple):
    """F_k(w) = 1/2 (w' A_k w - 2 b_k' w) + mu/2 |w|^2 (eq. 9)."""

    A: Array  # [N, d, d]
    b: Array  # [N, d]
    mu: float


def dense_quadratic(num_clients: int, block_size: int, mu: float) -> DenseQuadratic:
    """The clients' (A_k, b_k) of eqs. (7) and (8), with d = N p + 1 and p = block_size."""
    N, p = num_clients, block_size
    d = N * p + 1
    B = 2.0 * np.eye(p + 1) - np.eye(p + 1, k=1) - np.eye(p + 1, k=-1)
    B[0, 0] = B[p, p] = 1.0
    A = np.zeros((N, d, d))
    b = np.zeros((N, d))
    for k in range(1, N + 1):  # k counted from 1, as printed
        offset = (k - 1) * p  # rows of zeros above the block B_k
        A[k - 1, offset : offset + p + 1, offset : offset + p + 1] = B
        if k == 1:
            A[k - 1, 0, 0] += 1.0  # E_{1,1}
            b[k - 1, 0] = 1.0  # e_1
        if k == N:
            A[k - 1, d - 1, d - 1] += 1.0  # E_{Np+1,Np+1}
    return DenseQuadratic(A, b, mu)


def client_loss(problem: DenseQuadratic, k: int, w: Array) -> float:
    """F_k(w) (eq. 9)."""
    A_k, b_k = problem.A[k], problem.b[k]
    return float(0.5 * (w @ A_k @ w - 2.0 * b_k @ w) + 0.5 * problem.mu * w @ w)


def client_gradient(problem: DenseQuadratic, k: int, w: Array) -> Array:
    """Gradient of F_k (eq. 9): A_k w - b_k + mu w."""
    gradient: Array = problem.A[k] @ w - problem.b[k] + problem.mu * w
    return gradient


def global_loss(problem: DenseQuadratic, w: Array) -> float:
    """F(w) (eqs. 4 to 6), with the sums A = sum A_k and b = sum b_k."""
    N = len(problem.A)
    A, b = problem.A.sum(axis=0), problem.b.sum(axis=0)
    return float((w @ A @ w - 2.0 * b @ w) / (2.0 * N) + 0.5 * problem.mu * w @ w)


def minimizer(problem: DenseQuadratic) -> Array:
    """w* [d], the zero of the gradient of eq. (4): (A/N + mu I) w = b/N."""
    N, d = problem.b.shape
    A, b = problem.A.sum(axis=0), problem.b.sum(axis=0)
    return np.linalg.solve(A / N + problem.mu * np.eye(d), b / N)


def constants(problem: DenseQuadratic) -> tuple[float, float, float]:
    """(mu, L, Gamma) of section 2: client curvatures, and Gamma = F* - mean of F_k*."""
    N, d = problem.b.shape
    smallest, largest, client_minima = [], [], []
    for k in range(N):
        hessian = problem.A[k] + problem.mu * np.eye(d)
        eigenvalues = np.linalg.eigvalsh(hessian)
        smallest.append(eigenvalues.min())
        largest.append(eigenvalues.max())
        client_minima.append(client_loss(problem, k, np.linalg.solve(hessian, problem.b[k])))
    gamma = global_loss(problem, minimizer(problem)) - np.mean(client_minima)
    return float(min(smallest)), float(max(largest)), float(gamma)


# Training (Algorithm 1)


def full_gradient_steps(
    gradient: Gradient, w: Array, learning_rate: float, num_steps: int
) -> Array:
    """E steps w <- w - eta g(w, e) (eq. 17)."""
    for e in range(num_steps):
        w = w - learning_rate * gradient(w, e)
    return w


def local_adam(gradient: Gradient, w: Array, learning_rate: float, num_steps: int) -> Array:
    """E steps of Adam (Kingma and Ba, Algorithm 1), with moments that start at zero."""
    b1, b2, eps = 0.9, 0.999, 1e-8
    first, second = np.zeros_like(w), np.zeros_like(w)
    for e in range(num_steps):
        g = gradient(w, e)
        first = b1 * first + (1.0 - b1) * g
        second = b2 * second + (1.0 - b2) * g**2
        first_unbiased = first / (1.0 - b1 ** (e + 1))
        second_unbiased = second / (1.0 - b2 ** (e + 1))
        w = w - learning_rate * first_unbiased / (np.sqrt(second_unbiased) + eps)
    return w


def simulate(
    gradient_fn: GradientFn,
    start: Array,
    groups: Sequence[Groups] | NDArray[np.integer],
    learning_rates: Sequence[float] | Array,
    num_steps: int,
    weights: Sequence[float] | Array | None = None,
    server_scale: str = "mean",
    local_steps_fn: LocalStepsFn = full_gradient_steps,
) -> Array:
    """Algorithm 1: in every round group m trains model m locally, and the server averages.

    Args:
        gradient_fn: maps `(m, k, w, t, e)` to the gradient [d] of client k for model m in round t
            (from 1) at local step e (from 0).
        start: [M, d], the global models before round 1.
        groups: `groups[t - 1][m]` lists the clients that train model m in round t. An empty group
            leaves its model unchanged.
        learning_rates: [T]. Round t uses `learning_rates[t - 1]` for all its local steps.
        num_steps: E.
        weights: [N], or None for all 1.
        server_scale: "mean" divides the sum of weighted updates by the participants' weights,
            "population" by the weights of all N clients (eq. 19 when all are 1).
        local_steps_fn: the local optimizer.

    Returns:
        [T + 1, M, d], the global models. Row 0 is `start`, and row t is the result of round t.
    """
    if server_scale not in ("mean", "population"):
        raise ValueError(f'server_scale is "mean" or "population", not {server_scale!r}')
    if server_scale == "population" and weights is None:
        raise ValueError('server_scale="population" needs N: pass weights=np.ones(N)')

    def train(m: int, k: int, t: int, w: Array) -> Array:
        rate = float(learning_rates[t - 1])
        return local_steps_fn(lambda v, e: gradient_fn(m, k, v, t, e), w, rate, num_steps)

    all_clients_weight = math.nan if weights is None else float(np.sum(weights))
    params = [np.array(start, dtype=np.float64)]
    num_models = len(start)
    for t in range(1, len(groups) + 1):  # line 3
        models = params[-1].copy()
        for m, group in zip(range(num_models), groups[t - 1], strict=True):
            update, participants_weight = np.zeros_like(models[m]), 0.0
            for k in _present(group):  # lines 7 to 11
                weight = 1.0 if weights is None else float(weights[k])
                update += weight * (train(m, k, t, models[m]) - models[m])
                participants_weight += weight
            divisor = participants_weight if server_scale == "mean" else all_clients_weight
            if participants_weight > 0.0:  # lines 13 and 14
                models[m] = models[m] + update / divisor
        params.append(models)
    return np.stack(params)


# Assignments (Algorithms 2 and 3)


def frame(t: int, num_models: int) -> int:
    """Frame l of round t, both from 1 (Algorithm 3, line 3, held for the M rounds of a frame)."""
    return (t - 1) // num_models + 1


def is_frame_start(t: int, num_models: int) -> bool:
    """Whether round t draws a partition (Algorithm 3, line 2, so that M = 1 always does)."""
    return (t - 1) % num_models == 0


def mfa_rr_groups(partition: Sequence[Group], t: int) -> list[Group]:
    """The groups by model in round t: group j trains model ((j + t - 2) mod M) + 1 (line 8)."""
    M = len(partition)
    by_model: dict[int, Group] = {}
    for j in range(1, M + 1):
        by_model[((j + t - 2) % M) + 1] = partition[j - 1]
    return [by_model[model] for model in range(1, M + 1)]


def check_partition(groups: Groups, cohort_size: int, num_clients: int) -> None:
    """Asserts that the groups of a round split `cohort_size` clients near-equally."""
    members = [_present(group) for group in groups]
    clients = [k for group in members for k in group]
    sizes = [len(group) for group in members]
    outside = sorted(k for k in clients if k >= num_clients)
    repeated = sorted(k for k, count in Counter(clients).items() if count > 1)
    assert not outside, f"client ids {outside} are not below num_clients={num_clients}"
    assert not repeated, f"clients {repeated} have more than one place in the round"
    assert len(clients) == cohort_size, f"{len(clients)} clients take part, not {cohort_size}"
    assert max(sizes) - min(sizes) <= 1, f"group sizes {sizes} differ by more than 1"


def check_frame(rounds_of_groups: Sequence[Groups], num_models: int) -> None:
    """Asserts that every client of the cohort trains every model exactly once (Remark 1).

    `rounds_of_groups[u - 1][m]` lists the clients of model m in the frame's round u.
    """
    num_rounds = len(rounds_of_groups)
    assert num_rounds == num_models, f"a frame has M={num_models} rounds, not {num_rounds}"
    cohort = sorted(k for group in rounds_of_groups[0] for k in _present(group))
    pairs: Counter[tuple[int, int]] = Counter()
    for u, groups in enumerate(rounds_of_groups, start=1):
        num_groups = len(groups)
        assert num_groups == num_models, f"round {u} has {num_groups} groups, not {num_models}"
        clients = sorted(k for group in groups for k in _present(group))
        assert clients == cohort, f"round {u} of the frame uses {clients}, round 1 {cohort}"
        pairs.update((k, m) for m, group in enumerate(groups) for k in _present(group))
    for k in cohort:
        for m in range(num_models):
            count = pairs[k, m]
            assert count == 1, f"client {k} trains model {m} {count} times in the frame"


def check_fedcluster(
    rounds_of_groups: Sequence[Groups], clusters: Sequence[Group]
) -> list[list[int]]:
    """Asserts that each learning round visits every fixed cluster once (Remark 2, one model).

    `rounds_of_groups[t - 1][0]` lists the clients of round t. `len(clusters)` rounds make one
    learning round, and the last one may be incomplete.

    Returns:
        The order of the visits in each learning round, for tests of the reshuffling.
    """
    members = [sorted(_present(cluster)) for cluster in clusters]
    orders: list[list[int]] = []
    for t, groups in enumerate(rounds_of_groups, start=1):
        assert len(groups) == 1, f"FedCluster trains one model, round {t} has {len(groups)} groups"
        clients = sorted(_present(groups[0]))
        assert clients in members, f"the clients {clients} of round {t} are no cluster"
        if is_frame_start(t, len(clusters)):
            orders.append([])
        cluster = members.index(clients)
        assert cluster not in orders[-1], (
            f"round {t} visits cluster {cluster} again in learning round {len(orders)}"
        )
        orders[-1].append(cluster)
    return orders


# Gain (section 5)


def first_round_below(errors: Iterable[float], threshold: float) -> float:
    """First t with errors[t] <= threshold (row 0 is the start), or NaN."""
    for t, error in enumerate(errors):
        if error <= threshold:
            return t
    return math.nan


def gain(num_models: int, rounds_single: float, rounds_multi: float) -> float:
    """Gain g = M T_1 / T_M (eq. 3), NaN if either number of rounds is NaN (not reached)."""
    if math.isnan(rounds_single) or math.isnan(rounds_multi):
        return math.nan
    return num_models * float(rounds_single) / float(rounds_multi)


# Least squares on clients of unequal size


class LeastSquares(NamedTuple):
    """F_k(w) = mean over client k's examples of 1/2 (x'w - y)^2, plus ridge/2 |w|^2."""

    features: list[Array]  # N arrays [n_k, d]
    targets: list[Array]  # N arrays [n_k]
    ridge: float


def least_squares_client_loss(problem: LeastSquares, k: int, w: Array) -> float:
    """F_k(w)."""
    residuals = problem.features[k] @ w - problem.targets[k]
    return float(0.5 * np.mean(residuals**2) + 0.5 * problem.ridge * w @ w)


def least_squares_gradient(
    problem: LeastSquares, k: int, w: Array, rows: Iterable[int] | None = None
) -> Array:
    """Gradient of F_k on the `rows` of client k, or on all its examples."""
    batch = list(range(len(problem.targets[k]))) if rows is None else _present(rows)
    total = np.zeros_like(w)
    for row in batch:
        x, y = problem.features[k][row], problem.targets[k][row]
        total = total + (x @ w - y) * x
    return total / len(batch) + problem.ridge * w


def least_squares_loss(problem: LeastSquares, w: Array) -> float:
    """F(w), the mean of F_k(w) weighted by n_k."""
    total, num_examples = 0.0, 0
    for k in range(len(problem.targets)):
        n_k = len(problem.targets[k])
        total += n_k * least_squares_client_loss(problem, k, w)
        num_examples += n_k
    return total / num_examples


def least_squares_minimizer(problem: LeastSquares) -> Array:
    """w* [d] of the pooled examples: (X'X/n + ridge I) w = X'y/n."""
    X, y = np.concatenate(problem.features), np.concatenate(problem.targets)
    n, d = X.shape
    return np.linalg.solve(X.T @ X / n + problem.ridge * np.eye(d), X.T @ y / n)


# Multinomial logistic regression on clients of unequal size (section 7)


class Softmax(NamedTuple):
    """Cross-entropy of softmax(z) with z = W x + b, or sigmoid(W x + b) for LEAF's head.

    A model is one vector: b [C], then the rows of W [C, d].
    """

    features: list[Array]  # N arrays [n_k, d]
    labels: list[NDArray[np.integer]]  # N arrays [n_k]
    num_classes: int
    sigmoid_head: bool
    reduction: str  # "mean" or "sum" over the rows of a minibatch


def softmax_logits(problem: Softmax, w: Array, x: Array) -> Array:
    """z of one example."""
    C = problem.num_classes
    logits: Array = w[C:].reshape(C, -1) @ x + w[:C]
    return 1.0 / (1.0 + np.exp(-logits)) if problem.sigmoid_head else logits


def softmax_loss(problem: Softmax, w: Array, x: Array, y: int) -> float:
    """-log softmax(z)_y of one example."""
    z = softmax_logits(problem, w, x)
    return float(np.log(np.sum(np.exp(z - z.max()))) + z.max() - z[y])


def softmax_gradient(problem: Softmax, k: int, w: Array, rows: Iterable[int]) -> Array:
    """Gradient of the loss over some examples of client k, in a plain loop."""
    batch = _present(rows)
    total = np.zeros_like(w)
    for row in batch:
        x, y = problem.features[k][row], problem.labels[k][row]
        z = softmax_logits(problem, w, x)
        p = np.exp(z - z.max()) / np.sum(np.exp(z - z.max()))
        delta = p - (np.arange(problem.num_classes) == y)
        if problem.sigmoid_head:
            delta = delta * z * (1.0 - z)
        total += np.concatenate([delta, np.outer(delta, x).ravel()])
    return total / len(batch) if problem.reduction == "mean" else total


def softmax_metrics(problem: Softmax, w: Array, clients: Iterable[int]) -> tuple[float, float]:
    """Mean loss and accuracy over all examples. Ties go to the first logit."""
    losses, right = [], []
    for k in clients:
        for x, y in zip(problem.features[k], problem.labels[k], strict=True):
            z = softmax_logits(problem, w, x)
            losses.append(softmax_loss(problem, w, x, int(y)))
            right.append(int(np.flatnonzero(z == z.max())[0]) == int(y))
    return float(np.mean(losses)), float(np.mean(right))


# Mean estimation (Cho et al., "Maximizing Global Model Appeal in Federated Learning", appendix A)


def sigmoid(x: Array) -> Array:
    """exp(x) / (1 + exp(x)) for x >= 0."""
    value: Array = 1.0 / (1.0 + np.exp(-x))
    return value


def mean_estimation_losses(w: float, theta: Array, theta_hat: Array) -> Array:
    """F_k(w) = (w - hat theta_k)^2 + (hat theta_k - theta_k)^2 (appendix A.1)."""
    losses: Array = (w - theta_hat) ** 2 + (theta_hat - theta) ** 2
    return losses


def mean_estimation_weights(x: Array, objective: str) -> Array:
    """h'(x) of the objective, the weight of client k's gradient, with x = F_k(w) - rho_k."""
    if objective == "MaxFL":  # q_k of eq. (4), written without 1 - sigma, which is 0 for large x
        weights: Array = np.exp(-x) / (1.0 + np.exp(-x)) ** 2
        return weights
    if objective == "MaxFL (log loss)":
        return sigmoid(x)
    return np.ones_like(x)


def mean_estimation_gradient(w: Array | float, theta_hat: Array, objective: str) -> Array:
    """Mean over clients of h'(F_k(w) - rho_k) * 2 (w - hat theta_k), at every w."""
    difference = np.asarray(w)[..., None] - theta_hat
    weights = mean_estimation_weights(difference**2, objective)  # F_k(w) - rho_k
    gradient: Array = np.mean(weights * 2.0 * difference, axis=-1)
    return gradient


def valley(theta_hat: Array, objective: str, start: float, step: float = 1e-3) -> float:
    """The local minimum downhill from the start, by a walk on a fine grid and bisection."""
    is_falling = mean_estimation_gradient(start, theta_hat, objective) < 0
    direction = 1.0 if is_falling else -1.0
    grid = start + direction * step * np.arange(1 + np.ptp(theta_hat) / step + 2.0 / step)
    rises = direction * mean_estimation_gradient(grid, theta_hat, objective) > 0
    first = int(np.argmax(rises))
    low, high = sorted((grid[first - 1], grid[first]))
    return _sign_change(theta_hat, objective, low, high, 60)


def displacement(theta_hat: Array, objective: str, w: float, j: int) -> float:
    """The minimum near w minus hat theta_j, precise even if it is far smaller than w."""
    u = w - theta_hat[j]
    return _sign_change(theta_hat - theta_hat[j], objective, u - 1e-7, u + 1e-7, 250)


def _sign_change(theta_hat: Array, objective: str, low: float, high: float, times: int) -> float:
    """Root of the gradient, by bisection."""
    for _ in range(times):
        middle = (low + high) / 2.0
        is_rising = mean_estimation_gradient(middle, theta_hat, objective) > 0
        low, high = (low, middle) if is_rising else (middle, high)
    return (low + high) / 2.0


def satisfied_near(u: float, j: int, theta: Array, theta_hat: Array) -> list[bool]:
    """Whether f_k(w) < rho_k at w = hat theta_j + u, for each client.

    (w - theta_k)^2 - (hat theta_k - theta_k)^2 = d (d + 2 (hat theta_k - theta_k)) with
    d = w - hat theta_k. The sign of the product is right even if u is too small to change w.
    """
    satisfied = []
    for t, t_hat in zip(theta, theta_hat, strict=True):
        d = u + (theta_hat[j] - t_hat)
        e = d + 2.0 * (t_hat - t)
        satisfied.append(bool((d < 0 < e) or (e < 0 < d)))
    return satisfied


def satisfied_clients(w: float, theta: Array, theta_hat: Array) -> list[bool]:
    """Whether f_k(w) < rho_k, for each client (definition 1)."""
    return [
        bool((w - t) ** 2 < (t_hat - t) ** 2) for t, t_hat in zip(theta, theta_hat, strict=True)
    ]


def probability_satisfied_by_the_mean(gamma_G: float) -> float:
    """P(|w - theta_1| < |hat theta_1 - theta_1|) for the mean w of two clients with gamma = 1.

    Integrates the indicator over the densities of both empirical means on a fine grid.
    """
    a = np.linspace(-8.0, 8.0, 4001)  # hat theta_1 - theta_1
    b = 2.0 * gamma_G + np.linspace(-8.0, 8.0, 4001)  # hat theta_2 - theta_1
    density_a = np.exp(-(a**2) / 2.0) / math.sqrt(2.0 * math.pi)
    density_b = np.exp(-((b - 2.0 * gamma_G) ** 2) / 2.0) / math.sqrt(2.0 * math.pi)
    cell = (a[1] - a[0]) * (b[1] - b[0])
    total = 0.0
    for one, density in zip(a, density_a, strict=True):
        w = (one + b) / 2.0
        total += density * float(np.sum(density_b[np.abs(w) < abs(one)]))
    return total * cell
