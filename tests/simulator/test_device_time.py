"""Delays of devices by hand, the bytes of messages, and the seconds that compression saves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, local_sgd, mfa_rand, personal, scaffold, simulate, to_dataset
from fedjax_mm.asynchrony import device_time, fedast, on_clock
from fedjax_mm.compression import compressed, message_bytes, qsgd, top_k
from fedjax_mm.data import FederatedData, client_data
from fedjax_mm.robust import median, robust
from fedjax_mm.tasks import MLP, classification, quadratic

M, N = 2, 4
FED, TASK = fedavg(0.1, local_steps=2), quadratic(N, 4, mu=0.1)
PLAIN = {"speed_spread": 0.0, "bandwidth_spread": 0.0}
W5 = {
    "steps": 5,
    "flops": 3 * 10 * 33.67e6,
    "bytes_down": 6_505_768,
    "bytes_up": 6_505_768,
    "speed": 10e9,
    "down": 20e6,
    "up": 5e6,
}


def seconds(num_clients=N, num_models=M, **how):
    """All delays, ``[models, clients]``."""
    delay = device_time(num_clients, **how)
    one = jax.vmap(delay, (None, None, 0))
    both = jax.vmap(one, (None, 0, None))
    return np.asarray(both(jax.random.key(3), jnp.arange(num_models), jnp.arange(num_clients)))


@pytest.mark.parametrize("per_client", [False, True], ids=["steps of models", "steps of clients"])
def test_delays_are_those_of_the_formula(per_client):
    steps = np.array([[1, 2, 3, 4], [5, 6, 7, 8]] if per_client else [3, 5])
    flops, down_bytes, up_bytes = [1e9, 3e9], [4e6, 1e6], [2e6, 5e5]
    speed, down = [1e9, 2e9, 5e8, np.inf], [1e7, 2e7, np.inf, 4e7]
    up, latency = [2e6, 8e6, 1e6, 4e6], [0.0, 0.5, 1.0, 2.0]
    expected = np.zeros((M, N))
    for m in range(M):
        for k in range(N):
            s = steps[m, k] if per_client else steps[m]
            expected[m, k] = latency[k] + s * flops[m] / speed[k]
            expected[m, k] += down_bytes[m] * 8 / down[k] + up_bytes[m] * 8 / up[k]
    sizes = {"steps": steps, "flops": flops, "bytes_down": down_bytes, "bytes_up": up_bytes}
    found = seconds(**sizes, speed=speed, down=down, up=up, latency=latency)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_cnn_of_w5_takes_13_and_a_half_seconds():
    np.testing.assert_allclose(seconds(**W5, **PLAIN), 13.517, atol=5e-4)
    a_quarter = {key: x for key, x in W5.items() if key != "up"}
    np.testing.assert_array_equal(seconds(**a_quarter, **PLAIN), seconds(**W5, **PLAIN))


def test_twice_the_bytes_take_twice_the_transfer():
    compute = seconds(**W5 | {"bytes_down": 0, "bytes_up": 0})
    once, doubled = W5, {key: 2 * W5[key] for key in ("bytes_down", "bytes_up")}
    once, twice = seconds(**once) - compute, seconds(**once | doubled) - compute
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-5)


def test_what_is_infinitely_fast_takes_no_time():
    np.testing.assert_allclose(seconds(**W5 | {"down": np.inf, "up": None}, **PLAIN), 0.50505)
    transfers = seconds(**W5 | {"speed": np.inf}, **PLAIN)
    np.testing.assert_allclose(transfers, 8 * 6_505_768 * (1 / 20e6 + 1 / 5e6), rtol=1e-6)


def test_clients_spread_around_the_medians():
    """Normals of 4,000 clients, at four standard errors."""
    n, one = 4000, {"steps": 1, "flops": 0, "bytes_down": 0, "bytes_up": 0}
    how = {"num_models": 1, "speed": 8.0, "down": 64.0}
    speeds = np.log(1 / seconds(n, **one | {"flops": 1}, **how)[0])
    downs = np.log(8 / seconds(n, **one | {"bytes_down": 1}, **how)[0])
    ups = np.log(8 / seconds(n, **one | {"bytes_up": 1}, **how)[0])
    for logs, median_, spread in ((speeds, 8, 0.5), (downs, 64, 1), (ups, 16, 1)):
        assert abs(logs.mean() - np.log(median_)) < 4 * spread / np.sqrt(n)
        assert abs(logs.std() / spread - 1) < 4 / np.sqrt(2 * n)
    np.testing.assert_allclose(downs - ups, np.log(4), atol=1e-5)
    assert abs(np.corrcoef(speeds, downs)[0, 1]) < 4 / np.sqrt(n)


def network():
    clients = client_data([(np.eye(2), np.arange(2))] * N)
    return classification(FederatedData("eyes", "synthetic", 2, clients, clients), MLP(2, (3,)))


MESSAGES = {
    "plain": FED,
    "scaffold": scaffold(local_sgd(0.1, steps=2)),
    "top_k": compressed(FED, top_k(0.2)),
    "qsgd": compressed(FED, qsgd(3)),
    "personal": personal(FED, "classes"),
    "robust": robust(FED, median()),
    "robust top_k": robust(compressed(FED, top_k(0.2)), median()),
}


@pytest.mark.parametrize("name", ["scaffold", "personal", "robust top_k"])
def test_bytes_are_those_that_a_run_counts(name):
    task, algorithm = network(), MESSAGES[name]
    result = to_dataset(simulate(0, task, algorithm, mfa_rand(N, M), 2)[1]).isel(round=-1)
    bits = result.bits_up if "bits_up" in result else 32 * result.parameters_up
    sizes = message_bytes(task, algorithm)
    np.testing.assert_array_equal(bits / 8, sizes.up * result.client_updates)
    np.testing.assert_array_equal(4 * result.parameters_down, sizes.down * result.client_updates)


def timed(share, rounds):
    algorithm = compressed(FED, top_k(share), error_feedback=False)
    sizes = message_bytes(TASK, algorithm)
    how = {"steps": 2, "flops": 1e3, "speed": 1e6, "down": 1e5, "up": 1e4}
    delay = device_time(N, bytes_down=sizes.down, bytes_up=sizes.up, **how)
    rule = (
        on_clock(mfa_rand(N, M), delay) if rounds else fedast(N, M, at_work=2, ratio=1, delay=delay)
    )
    return simulate(0, TASK, algorithm, rule, 3)[1].metrics["time"][-1, 0]


@pytest.mark.parametrize("rounds", [True, False], ids=["rounds", "jobs"])
def test_compressed_uploads_save_seconds(rounds):
    assert 0 < timed(0.1, rounds) < 0.5 * timed(1.0, rounds)


def test_a_traced_share_has_a_traced_time():
    shares = jnp.array([0.1, 1.0])
    found = jax.jit(jax.vmap(lambda share: timed(share, rounds=True)))(shares)
    np.testing.assert_allclose(found, [timed(0.1, rounds=True), timed(1.0, rounds=True)], rtol=1e-5)
