"""Valid parts of small experiments. Each case makes one of them wrong."""

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from fedjax_mm import fedavg, full_participation, mfa_rr, sweep
from fedjax_mm.data import FederatedData, client_data, federate
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.tasks import LogisticRegression, classification, quadratic

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 4)).astype(np.float32), np.arange(24, dtype=np.int32) % 3
PARTS = np.split(np.arange(24), 4)
KEY = jax.random.key(0)
QUADRATIC, FEDAVG, EVERYBODY = quadratic(4, 2, mu=0.1), fedavg(0.1, local_steps=2), mfa_rr(4, 1)
ALL = full_participation(4)


def store(x=X, y=Y, parts=PARTS):
    """The clients' examples as a store."""
    return client_data([(np.asarray(x)[rows], np.asarray(y)[rows]) for rows in parts])


def clients_of(y=Y, num_classes=3, test=None, x=X):
    """Data of four clients, built by hand."""
    return FederatedData("own", "real", num_classes, store(x, y), store() if test is None else test)


DATA = federate((X, Y), PARTS)
TASK = classification(DATA, LogisticRegression(3))


def changed(values, row, value):
    """Numbers with one entry replaced."""
    values = np.array(values, float)
    values[row] = value
    return values


class Returning(nn.Module):
    """A network that returns a wrong function of three logits."""

    made: str

    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(3)(x)
        return {
            "[batch]": logits[:, 0],
            "[batch, 1]": logits[:, :1],
            "[1, classes]": logits[:1],
            "[classes]": logits[0],
            "[classes, batch]": logits.T,
            "[batch, classes, 1]": logits[..., None],
            "a tuple": (logits, logits),
            "a dict": {"logits": logits},
        }[self.made]


class Normed(nn.Module):
    """A network whose norm always uses the batch's statistics."""

    momentum: float = 0.99

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, momentum=self.momentum)(nn.Dense(3)(x))


class Asking(nn.Module):
    """A network whose code branches on its input."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(-x if x.sum() > 0 else x)


class Dropping(nn.Module):
    """A network that applies dropout in training and in evaluation."""

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(3)(x))


class Streaming(nn.Module):
    """A network that applies dropout if it has the stream."""

    stream: str
    rate: float = 0.5

    @nn.compact
    def __call__(self, x):
        is_tested = not self.has_rng(self.stream)
        drop = nn.Dropout(self.rate, deterministic=is_tested, rng_collection=self.stream)
        return drop(nn.Dense(3)(x))


class Net(nnx.Module):
    """A network of flax nnx with dropout."""

    def __init__(self, rate=0.5, *, rngs):
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x))))


def swept(build=None, axes=None, **options):
    """A sweep of the learning rate."""

    def usual(rate):
        return Setup(QUADRATIC, fedavg(rate, local_steps=2), EVERYBODY)

    return sweep(
        Grid(
            build or usual,
            {"rate": [0.1, 0.2]} if axes is None else axes,
            **{"num_rounds": 2, **options},
        )
    )
