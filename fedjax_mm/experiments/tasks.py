"""Tasks in an experiment file, and their data."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from fedjax_mm.base import Params, Task
from fedjax_mm.checks.values import described
from fedjax_mm.data import partition
from fedjax_mm.data.cifar import check_cifar, load_cifar
from fedjax_mm.data.digits import digits
from fedjax_mm.data.federate import federate, flip_labels
from fedjax_mm.data.federated import FederatedData, Pool
from fedjax_mm.data.idx import check_idx, load_idx
from fedjax_mm.data.leaf import check_leaf, load_leaf
from fedjax_mm.data.npz import check_npz, load_npz
from fedjax_mm.data.synthetic import sample_counts, synthetic
from fedjax_mm.experiments.fields import (
    Config,
    Count,
    Flag,
    Fraction,
    FromFactory,
    OneOf,
    Positive,
    Seed,
    Share,
    WithFiles,
    keys_of,
    named,
    one_of,
    parameters_of,
    table_of,
    tables_of,
)
from fedjax_mm.tasks import scores
from fedjax_mm.tasks.quadratic import quadratic

Model = Literal["logistic", "mlp", "cnn", "batch_norm_cnn", "gru"]
Loss = Literal["cross_entropy", "squared_error", "absolute_error"]
MetricName = Literal[
    "accuracy",
    "top_k_accuracy",
    "class_accuracy",
    "f1",
    "auc",
    "calibration_error",
    "r2",
    "squared_error",
    "absolute_error",
]


class Metric(Config):
    """A metric of a network's outputs, selected by name."""

    name: str


METRIC_TABLES = tables_of(
    Metric,
    (getattr(scores, name) for name in get_args(MetricName)),
    *("outputs", "targets", "weights"),
)
"""The tables of all metrics in a file, by `name`."""


def _different(metrics: tuple[str | Metric, ...]) -> tuple[str | Metric, ...]:
    names = [each if isinstance(each, str) else each.name for each in metrics]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is there {names.count(name)} times; name a metric once")
    return metrics


Metrics = Annotated[
    tuple[MetricName | Annotated[Metric, one_of(METRIC_TABLES)], ...], AfterValidator(_different)
]


class _Task(Config):
    has_closed_form: ClassVar[bool] = False
    """Whether full-gradient local SGD has a closed form."""

    @property
    def is_drawn_by_seed(self) -> bool:
        """Whether every seed has its own data draw."""
        return getattr(self, "data_seed", None) == "seed"

    def drawn(self, seed: int) -> Self:
        """The settings of one draw of the data, with the seed if every seed has its own."""
        return self.model_copy(update={"data_seed": seed}) if self.is_drawn_by_seed else self

    @property
    def num_bytes(self) -> float:
        """A lower bound on the memory of one data draw, from the settings alone."""
        return 0.0

    @property
    def source(self) -> Any:
        """The settings of the data, or None if the task has its own."""
        return None

    @property
    def has_own_tests(self) -> bool:
        """Whether every client has its own test examples."""
        return True

    def data(self) -> Any:
        """Loads or draws the data of `source`."""

    def build(self, data: Any) -> Task:
        """Builds the task."""
        del data
        made: Task = self.call()
        return made

    def initial_params(self) -> Params:
        """Initial parameters of all models and seeds, or None if each draws its own."""
        return None


class QuadraticConfig(_Task):
    """The federated quadratic, and the initial parameters of the models.

    Attributes:
      start: "zeros", or one "normal" draw for all models, seeds and algorithms.
      start_seed: the seed of that draw.
    """

    factory = quadratic
    has_closed_form = True
    name: Literal["quadratic"] = "quadratic"
    num_clients: Count = 24
    block_size: Count = 4
    mu: Positive = 2e-4
    start: Literal["zeros", "normal"] = "zeros"
    start_seed: Seed = 0

    def build(self, data: Any = None) -> Task:
        """Builds the task."""
        return super().build(data)

    def initial_params(self) -> Params:
        """Zeros or a fixed normal draw, the same for all models, seeds and algorithms."""
        shape = (self.num_clients * self.block_size + 1,)
        if self.start == "zeros":
            return jnp.zeros(shape)
        # Draw in float32 even with x64, so that both precisions start from the same point.
        return jax.random.normal(jax.random.key(self.start_seed), shape, jnp.float32)


def _seed_or_word(value: Any) -> Any:
    if isinstance(value, str) and value != "seed":
        raise ValueError('give a whole number, or "seed" for a draw of its own for every seed')
    return value


DataSeed = Annotated[Seed | Literal["seed"], BeforeValidator(_seed_or_word)]
"""The seed of a data draw, or "seed" to draw different data for every seed of the experiment."""


class _Learning(_Task):
    """A network trained on clients' examples.

    Attributes:
      data_seed: the seed of all draws of the data, or "seed" for different data for every seed.
      metrics: the metrics to record, besides the loss, and the accuracy of labels: names, or tables
        with settings.
    """

    data_seed: DataSeed = 0
    metrics: Metrics = ()

    @property
    def _seed(self) -> int:
        """The seed of one draw, as returned by `drawn`."""
        return int(self.data_seed)

    @property
    def source(self) -> dict[str, Any]:
        """The settings of the data."""
        # Exclude the network, because points with different networks share data.
        own = {"model", "hidden", "dropout_rate", "sigmoid_head", "reduction", "loss", "metrics"}
        return self.model_dump(exclude=own)

    @property
    def _scores(self) -> dict[str, Any]:
        """The metrics by name."""
        tables = [METRIC_TABLES[x](name=x) if isinstance(x, str) else x for x in self.metrics]
        functions = [type(each).factory for each in tables]
        pairs = zip(tables, functions, strict=True)
        return {
            each.name.rpartition(":")[2]: partial(score, **each.arguments(score))
            for each, score in pairs
        }


class Network(Config):
    """A network of your own: a function of the number of classes or targets, or a flax module."""

    name: str

    def build(self, size: int) -> Any:
        """Builds the network."""
        given = self.arguments(type(self).factory)
        given.pop("name", None)  # of flax modules
        return type(self).factory(size, **given)


def _network_table(factory: Callable[..., Any], **types: Any) -> type[Network]:
    first, *_ = inspect.signature(factory).parameters
    return table_of(Network, factory, first, "parent", "name", **types)


class _Network(_Learning, WithFiles):
    """A network trained on clients' data, some with labels flipped by `flip_labels`.

    Attributes:
      model: the network; "gru" is for texts, "cnn" and "batch_norm_cnn" are for images. A table
        names one of your own.
      hidden: the width of each hidden layer of the MLP; defaults to 64 and 30.
      dropout_rate: the probability that the MLP drops a unit during training.
      loss: the loss; labels have the cross-entropy, and other targets another.
      flipped: the fraction of clients with flipped labels.
    """

    model: Annotated[Model | Network, OneOf([], Model, _network_table)] = "logistic"
    hidden: tuple[Count, ...] | None = None
    dropout_rate: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    loss: Loss = "cross_entropy"
    flipped: Share = 0.0

    @model_validator(mode="after")
    def _network_fits(self, info: ValidationInfo) -> Self:
        for key, given in {"dropout_rate": self.dropout_rate, "hidden": self.hidden}.items():
            if given not in (None, 0.0) and self.model != "mlp":
                raise ValueError(
                    f"{key} is {given}, but model is {self.model!r}; only 'mlp' has {key}"
                )
        if self.has_labels != (self.loss == "cross_entropy"):
            kind, remedy = "other targets", "give loss = 'squared_error' or 'absolute_error'"
            if self.has_labels:
                kind, remedy = "labels", "give 'npz' and num_classes = 0 for other targets"
            raise ValueError(f"loss is {self.loss!r}, but examples have {kind}; {remedy}")
        if self.is_dealt_by_label and not self.has_labels:
            raise ValueError(
                "the partition needs labels, but examples have other targets; choose "
                f"{', '.join(_WITHOUT_LABELS)}"
            )
        if (self.model == "gru") != self.has_characters:
            kind, remedy = ("texts", "'gru'") if self.has_characters else ("no texts", "another")
            raise ValueError(f"model is {self.model!r}, but examples are {kind}; choose {remedy}")
        if self.flipped and not self.has_own_tests:
            raise ValueError(
                f"flipped is {self.flipped:g}, but one pool of test examples stands for all "
                "clients; give a test_fraction, so that each has its own"
            )
        return self.with_files(info)

    @property
    def has_characters(self) -> bool:
        """Whether examples are texts."""
        return False

    @property
    def has_labels(self) -> bool:
        """Whether examples have labels, and not other targets."""
        return getattr(self, "num_classes", None) != 0

    @property
    def is_dealt_by_label(self) -> bool:
        """Whether clients get examples by their labels."""
        return False

    def _learner(self, data: FederatedData, scale: float | None) -> Task:
        how: Any = {"dropout_rate": self.dropout_rate, "hidden": self.hidden, "loss": self.loss}
        return _learner(data, self.model, scale=scale, metrics=self._scores, **how)

    def _with_flips(self, data: FederatedData) -> FederatedData:
        if not self.flipped:
            return data
        return flip_labels(data, fraction=self.flipped, seed=self._seed)


@keys_of(synthetic, "seed", "test_fraction")
class SyntheticConfig(_Learning):
    """Multinomial logistic regression on Synthetic(alpha, beta), drawn by `synthetic`.

    Attributes:
      sigmoid_head: whether to apply a sigmoid to the logits before the softmax, as in LEAF.
      reduction: how a local step reduces the loss over its batch: "mean", or "sum" as in LEAF.
    """

    name: Literal["synthetic"]
    num_clients: Count = 100
    alpha: FromFactory
    beta: FromFactory
    dim: FromFactory
    num_classes: FromFactory
    generator: FromFactory
    iid: FromFactory
    sigmoid_head: Flag = False
    reduction: Literal["mean", "sum"] = "mean"

    @model_validator(mode="after")
    def _generator_has_them(self) -> Self:
        if self.generator == "leaf" and (self.alpha != 1 or self.beta != 1 or self.iid):
            raise ValueError(
                "generator 'leaf' has no alpha, beta and iid; leave them at their defaults"
            )
        return self

    @property
    def num_bytes(self) -> float:
        """A lower bound on the memory of one draw, for its examples and one client's weights."""
        # Estimate the number of examples from at most a million clients, a representative sample.
        seed = 0 if self.data_seed == "seed" else self.data_seed
        counts = sample_counts(min(self.num_clients, 2**20), generator=self.generator, seed=seed)
        examples = float(counts.sum()) / len(counts) * self.num_clients
        return 4 * examples * (self.dim + 1) + 8 * self.dim * self.num_classes

    def data(self) -> FederatedData:
        """Draws the clients' examples with `data_seed`."""
        return self.call(seed=self._seed)

    def build(self, data: FederatedData) -> Task:
        """Builds the task."""
        how: Any = {"sigmoid_head": self.sigmoid_head, "reduction": self.reduction}
        return _learner(data, "logistic", metrics=self._scores, **how)


class Partition(Config):
    """A partitioner, selected by name, and its settings."""

    name: str

    def deal(self, labels: np.ndarray, num_clients: int, seed: int) -> partition.Parts:
        """The rows of each client."""
        return self.call(labels=labels, num_clients=num_clients, seed=seed)


PARTITION_TABLES = {
    name: table_of(Partition, function, "labels", "num_clients", "seed", "overlap")
    for name, function in inspect.getmembers(partition, inspect.isfunction)
    if {"labels", "num_clients"} <= {*parameters_of(function)} and not name.startswith("_")
}
"""The tables of all partitions in a file, by `name`."""

PartitionConfig = Annotated[Partition, one_of(PARTITION_TABLES)]
"""The table of any partition."""

_WITHOUT_LABELS = ("iid", "quantity_skew", "shards")  # `shards` sorts any numbers
IIDShare: Any = PARTITION_TABLES["iid_share"]


class _Images(_Network):
    """Images of one pool, distributed among the clients.

    Attributes:
      num_clients: N, the number of clients.
      partition: how the images are distributed among the clients.
      test_fraction: the fraction of its own images on which a client tests; if omitted, all clients
        share the pool's test images.
    """

    num_clients: Count = 100
    partition: PartitionConfig = PARTITION_TABLES["iid"](name="iid")
    test_fraction: Fraction | None = None

    @property
    def has_own_tests(self) -> bool:
        """Whether every client has its own test examples."""
        return self.test_fraction is not None

    @property
    def is_dealt_by_label(self) -> bool:
        """Whether the partition reads the labels."""
        return self.partition.name not in _WITHOUT_LABELS

    def _pool(self) -> Pool:
        pool: Pool = self.call()
        return pool

    def data(self) -> FederatedData:
        """Loads the images and distributes them among the clients."""
        pool, seed = self._pool(), self._seed
        x, y = pool.train
        if not (self.has_labels or self.partition.name == "shards"):
            y = np.zeros(len(x))  # these partitions only count examples
        parts = self.partition.deal(y, self.num_clients, seed)
        return self._with_flips(federate(pool, parts, test_fraction=self.test_fraction, seed=seed))

    def build(self, data: FederatedData) -> Task:
        """Builds the task, scaling bytes to pixels between 0 and 1."""
        scale = 1 / 255 if data.train.examples[0].dtype == np.uint8 else None
        return self._learner(data, scale)


class DigitsConfig(_Images):
    """scikit-learn's digits, 1,438 for training and 359 for testing, split by `data_seed`."""

    name: Literal["digits"]
    num_clients: Annotated[Count, Field(le=1438)] = 100

    def _pool(self) -> Pool:
        return digits(seed=self._seed)


_SPLITS = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]


@keys_of(load_idx, split=_SPLITS)
class IDXConfig(_Images):
    """MNIST, Fashion-MNIST or EMNIST from a directory of the official files."""

    checker = check_idx
    name: Literal["idx"]


@keys_of(load_cifar)
class CIFARConfig(_Images):
    """CIFAR-10 or CIFAR-100 from a directory of the binary version."""

    checker = check_cifar
    name: Literal["cifar"]


@keys_of(load_npz)
class NPZConfig(_Images):
    """Arrays x_train, y_train, x_test and y_test from an ``.npz`` file."""

    checker = check_npz
    name: Literal["npz"]


@keys_of(load_leaf, "num_classes")
class LeafConfig(_Network):
    """The clients of a LEAF directory, some of them, chosen by `data_seed`, with flipped labels."""

    checker = check_leaf
    name: Literal["leaf"]
    directory: FromFactory
    dataset: FromFactory

    @property
    def has_characters(self) -> bool:
        """Whether examples are texts."""
        return self.dataset == "shakespeare"

    @model_validator(mode="after")
    def _draws_differ(self) -> Self:
        if self.is_drawn_by_seed and not self.flipped:
            raise ValueError(
                'data_seed is "seed", which draws clients with flipped labels, but flipped is 0; '
                "leave data_seed out, or give flipped"
            )
        return self

    def data(self) -> FederatedData:
        """Reads the files."""
        return self._with_flips(self.call(name=None))

    def build(self, data: FederatedData) -> Task:
        """Builds the task, scaling FEMNIST's pixels to values between 0 and 1."""
        scale = 1 / 255 if self.dataset == "femnist" else None
        return self._learner(data, scale)


class OwnTask(_Task):
    """A task that a function of your own makes, with its data."""

    name: str

    def build(self, data: Any) -> Task:
        """Builds the task."""
        made = super().build(data)
        if not isinstance(made, Task):
            raise ValueError(f"{self.name} returned {described(made)}, which is no task")
        return made


_FromFiles = IDXConfig | CIFARConfig | NPZConfig | LeafConfig
AnyTask = QuadraticConfig | SyntheticConfig | DigitsConfig | _FromFiles | OwnTask
"""Any of the tasks, after validation."""

_TASKS = {
    "quadratic": QuadraticConfig,
    "synthetic": SyntheticConfig,
    "digits": DigitsConfig,
    "idx": IDXConfig,
    "cifar": CIFARConfig,
    "npz": NPZConfig,
    "leaf": LeafConfig,
}

TaskConfig = Annotated[
    AnyTask,
    one_of(_TASKS, partial(table_of, OwnTask, data_seed=DataSeed)),
    named("quadratic"),
]
"""The table of any task, which defaults to the quadratic."""


def _learner(
    data: FederatedData,
    model: Model | Network,
    *,
    loss: Loss = "cross_entropy",
    sigmoid_head: bool = False,
    hidden: tuple[int, ...] | None = None,
    dropout_rate: float = 0.0,
    **settings: Any,
) -> Task:
    """Builds a task with a network by name."""
    # Import flax here, because it takes a fifth of a second and quadratics do not need it.
    from fedjax_mm.tasks.classification import classification
    from fedjax_mm.tasks.networks import (
        MLP,
        BatchNormCNN,
        CharacterGRU,
        LogisticRegression,
        McMahanCNN,
    )
    from fedjax_mm.tasks.supervised import supervised

    learn: Callable[..., Task] = classification
    if loss != "cross_entropy":
        learn = partial(supervised, loss=getattr(scores, loss))
    size = data.num_classes or math.prod(data.train.examples[1].shape[1:])
    if isinstance(model, Network):
        return learn(data, model.build(size), **settings)
    if model == "logistic":
        return learn(data, LogisticRegression(size, sigmoid_head), **settings)
    if model == "mlp":
        how: Any = {} if hidden is None else {"hidden": hidden}
        module = MLP(size, dropout_rate=dropout_rate, **how)
        return learn(data, module, rngs=("dropout",) if dropout_rate else (), **settings)
    if model == "gru":
        return learn(data, CharacterGRU(size), **settings)
    shape = data.train.examples[0].shape[1:]
    if len(shape) != 3:
        raise ValueError(
            f"task.model is {model!r}, which takes images [height, width, channels], but examples "
            f"have the shape {list(shape)}; choose 'logistic' or 'mlp'"
        )
    network = McMahanCNN if model == "cnn" else BatchNormCNN
    return learn(data, network(size), **settings)
