"""Wrong data: name, call and error message."""

from functools import partial

import jax.numpy as jnp
import numpy as np

from fedjax_mm import plots
from fedjax_mm.data import (
    FederatedData,
    Pool,
    client_data,
    federate,
    flat_client_data,
    flip_labels,
    partition,
    stack_data,
    synthetic,
)
from fedjax_mm.data.partition import (
    by_id,
    dirichlet,
    extended_dirichlet,
    iid_share,
    label_clusters,
    sizes,
)
from fedjax_mm.data.summary import partition_summary
from fedjax_mm.tasks import (
    MLP,
    LogisticRegression,
    accuracy,
    classification,
    least_squares,
    squared_error,
    supervised,
    top_k_accuracy,
    with_clients,
)
from tests.boundary.parts import (
    DATA,
    PARTS,
    Asking,
    Dropping,
    Normed,
    Returning,
    X,
    Y,
    changed,
    clients_of,
    store,
)

LINEAR = LogisticRegression(3)
NAN, INF = changed(X, (3, 1), np.nan), changed(X, (3, 1), np.inf)
NUMBERS = federate((X, X[:, 0]), PARTS, num_classes=0)
TEXT = np.array(["cat", "dog", "cow"])[Y]


def learn(data, module=LINEAR, **options):
    """A call of `classification`."""
    return lambda: classification(data(), module, **options)


def scored(loss, metrics=None):
    """A call of `supervised`."""
    return lambda: supervised(DATA, LINEAR, loss=loss, metrics=metrics)


def squared_loss(outputs, targets):
    """A loss of each example."""
    return (outputs[:, 0] - targets) ** 2


def init(rng_key, x):
    """Initial parameters of the pair (init, apply)."""
    return {"kernel": jnp.zeros((x.shape[1], 3))}


def apply(params, x):
    """Its logits."""
    return x @ params["kernel"]


class Unhashable:
    """A callable object with an equality alone."""

    __hash__ = None

    def __call__(self, params, x):
        return apply(params, x)


def images(shape):
    """Clients' images of a shape."""
    return federate((np.ones((24, *shape), np.float32), Y), PARTS)


LABELS = np.repeat(np.arange(10), range(150, 250, 10))
POOL = Pool(
    "toy", "real", 10, (LABELS[:, None] * 1.0, LABELS), (LABELS[:90, None] * 1.0, LABELS[:90])
)

CASES = {
    "no labels": (learn(lambda: NUMBERS), "num_classes 0, so their targets are no labels; take"),
    "flipped numbers": (lambda: flip_labels(NUMBERS, fraction=0.5), "have no classes, so no labe"),
    "a picture of numbers": (lambda: plots.partition(NUMBERS), "have no classes, so no labels to"),
    "targets of fewer rows": (
        lambda: federate((X, {"a": Y, "b": Y[:5]}), PARTS, num_classes=0),
        r"X has shape \(24, 4\) and y \(24,\), \(5,\)",
    ),
    "a scalar loss": (
        scored(lambda x, y: jnp.mean((x[:, 0] - y) ** 2)),
        r"loss returns one number for outputs \[batch, 3\] and targets \[batch\]; .*out the mean",
    ),
    "a loss that broadcasts": (
        scored(lambda x, y: (x[:, :1] - y) ** 2),
        r"loss returns \[batch, batch\] for outputs \[batch, 3\] and targets \[batch\]; give one",
    ),
    "a loss of other sizes": (
        scored(squared_error),
        r"loss does not take outputs \[batch, 3\] and targets \[batch\]: outputs have shape",
    ),
    "a loss without gradients": (scored(lambda x, y: y), "loss returns int32; give floats"),
    "a name as loss": (scored("squared_error"), "loss is 'squared_error'; give a func", TypeError),
    "a scalar metric": (
        scored(accuracy, {"mean": lambda x, y: jnp.mean(y)}),
        r"metrics\['mean'\] returns one number .* by an argument weights",
    ),
    "a metric of clients that the task lacks": (
        lambda: with_clients(scored(squared_loss)(), ["train_accuracy"]),
        "the task has no accuracy, so clients have no 'train_accuracy'; record 'test_loss'",
    ),
    "a metric called loss": (
        scored(accuracy, {"loss": accuracy}),
        "metrics has 'loss', which is",
    ),
    "a metric's array of options": (
        scored(accuracy, {"most": partial(top_k_accuracy, k=np.arange(2))}),
        "metrics.'most'. has options that cannot be hashed",
        TypeError,
    ),
    "labels from 1": (
        learn(lambda: clients_of(Y + 1)),
        "train labels has 3 in row 2; .* 0 ... 2, as by subtracting 1",
    ),
    "labels one-hot": (learn(lambda: clients_of(np.eye(4)[Y])), "their labels .4,. and"),
    "test labels negative": (
        learn(lambda: clients_of(test=store(y=Y - 1))),
        "test labels has -1 in row 0; .* 0 ... 2",
    ),
    "num_classes too small": (learn(lambda: clients_of(num_classes=2)), "or num_classes=3"),
    "num_classes 0": (learn(lambda: clients_of(num_classes=0)), "num_classes 0, so .* no labels"),
    "NaN in features": (lambda: store(NAN), "not finite in 1 of 24 examples, first in row 3"),
    "numbers beyond int32": (lambda: store(y=np.full(24, 2**32)), "do not fit int32"),
    "texts as features": (lambda: store(TEXT), "type <U3; give numbers"),
    "ragged lists": (lambda: client_data([([[1, 2], [3]], [0, 1])]), "rows of different lengths"),
    "x longer than y": (lambda: client_data([(X, Y[:-1])]), r"client 0 has \[23, 24\] examples"),
    "no clients": (lambda: client_data([]), "examples_per_client is empty; give at least one"),
    "clients in a dict": (
        lambda: client_data({"ann": (X, Y)}),
        "is a dict of 1; give a list with one entry per client",
        TypeError,
    ),
    "clients of other shapes": (
        lambda: client_data([(X, Y), (X[:, :2], Y)]),
        r"of client 1 has shape \(2,\), but one of client 0 \(4,\)",
    ),
    "clients of other arrays": (lambda: client_data([(X, Y), {"x": X}]), "client 1 has examples"),
    "counts do not add up": (lambda: flat_client_data((X, Y), [20]), "counts add up to 20"),
    "count 0": (
        lambda: flat_client_data((X, Y), [24, 0]),
        "give at least one client, and each 1 or more",
    ),
    "test images of another size": (
        learn(lambda: clients_of(test=store(X[:, :2]))),
        r"training has shape \(4,\) and one for testing \(2,\)",
    ),
    "test examples without labels": (
        learn(lambda: clients_of(test=client_data([X]))),
        "the test examples are an array of shape .*; give .features, labels.",
    ),
    "test data of 2 clients for 4": (
        learn(lambda: clients_of(test=store(parts=np.split(np.arange(24), 2)))),
        "2 clients have test examples and 4 for training",
    ),
    "arrays as a store": (
        learn(lambda: FederatedData("x", "real", 3, (X, Y), (X, Y))),
        "data.train is a tuple of 2, not a ClientData",
        TypeError,
    ),
    "arrays as data": (
        learn(lambda: (X, Y)),
        "data is a tuple of 2, not a FederatedData; deal examples",
        TypeError,
    ),
    "an unselected stack": (
        learn(lambda: stack_data([DATA, DATA])),
        "data is a stack of 2 draws; choose one",
    ),
    "draws of other clients": (
        lambda: stack_data([synthetic(2, dim=2), synthetic(3, dim=2)]),
        r"the stores have \[2, 3\] clients",
    ),
    # The module.
    "a class": (
        learn(lambda: DATA, LogisticRegression),
        r"module is the class LogisticRegression; give an instance, such as LogisticRegression\(",
        TypeError,
    ),
    "a function as module": (learn(lambda: DATA, lambda x: x), "is the function <lamb", TypeError),
    "a list as an attribute": (
        learn(lambda: DATA, MLP(3, hidden=[8, 4])),
        "MLP has an attribute that cannot be hashed; give tuples instead of lists",
        TypeError,
    ),
    **{
        f"logits {made}": (learn(lambda: DATA, Returning(made)), words)
        for made, words in {
            "[batch]": r"returns logits of shape \[batch\]; give .* \[batch, 3\]",
            "[batch, 1]": r"returns logits of shape \[batch, 1\]; give one output for each class",
            "[1, classes]": r"returns logits of shape \[1, 3\]",
            "[classes]": r"returns logits of shape \[3\]",
            "[classes, batch]": r"returns logits of shape \[3, batch\]",
            "[batch, classes, 1]": r"returns logits of shape \[batch, 3, 1\]",
            "a tuple": "returns a tuple of 2; return logits alone",
            "a dict": "returns a dict of 1; return logits alone",
        }.items()
    },
    "fewer outputs than classes": (learn(lambda: DATA, MLP(2)), r"shape \[batch, 2\]; give one"),
    "a module that asks": (
        learn(lambda: DATA, Asking()),
        "module Asking needs the value of an array, .* instead of `if` use jax.numpy.where",
    ),
    "batch norm with momentum": (
        learn(lambda: DATA, Normed()),
        "module Normed has a BatchNorm of momentum 0.99; give momentum=0.0",
    ),
    "batch norm of batches in evaluation": (
        learn(lambda: DATA, Normed(0.0)),
        "module Normed changes its batch_stats in evaluation; give BatchNorm use_running_average=",
    ),
    "drawing in evaluation": (
        learn(lambda: DATA, Dropping(), rngs=("dropout",)),
        r'needs PRNG for "dropout"; where it is tested there is none',
    ),
    "stream misspelt": (
        learn(lambda: DATA, MLP(3, dropout_rate=0.5), rngs=("dropuot",)),
        r"rngs is .'dropuot',., but module MLP draws from 'dropout' in .* give rngs=.'dropout',.$",
    ),
    # Pairs of functions.
    "a pair of three": (learn(lambda: DATA, (init, apply, apply)), "a tuple of 3; give", TypeError),
    "params in a pair": (
        learn(lambda: DATA, ({"w": X}, apply)),
        r"init of the pair is a dict of 1; give .* or a pair of functions \(init, apply\)",
        TypeError,
    ),
    "a function that cannot be hashed": (
        learn(lambda: DATA, (init, Unhashable())),
        "apply of the pair is a Unhashable, which cannot be hashed; give a function",
        TypeError,
    ),
    "init of a key alone": (
        learn(lambda: DATA, (lambda rng_key: X, apply)),
        r"init of the pair has the arguments \(rng_key\); give a function of \(rng_key, x\)$",
        TypeError,
    ),
    "streams of a pair": (
        learn(lambda: DATA, (init, apply), rngs="dropout"),
        "rngs is .'dropout',., but streams .*; give apply an argument rng_key instead",
    ),
    "features of another shape for a pair": (
        learn(lambda: DATA, (init, lambda params, x: params["kernel"] @ x)),
        r"module \(init, <lambda>\) does not take features of shape \[batch, 4\]",
    ),
    "reduction": (learn(lambda: DATA, reduction="max"), "'max'; it must be 'mean' or 'sum'"),
    "scale 0": (learn(lambda: DATA, scale=0), "scale is 0; it must be positive"),
    "scale text": (learn(lambda: DATA, scale="1/255"), "scale is '1/255'; it must be", TypeError),
    "a column without columns": (learn(lambda: DATA, column=0), "give a column if and only"),
    "a column that is not there": (
        learn(
            lambda: clients_of(np.eye(3, dtype=int)[Y], 2, store(y=np.eye(3, dtype=int)[Y])),
            LogisticRegression(2),
            column=3,
        ),
        "column is 3; it must lie between 0 and 2",
    ),
    # Dealing.
    "data as a list": (lambda: federate([X, Y], PARTS), "data is a list of 2; give a tuple"),
    "labels from 1 dealt": (
        lambda: federate((X, Y + 1), PARTS),
        "labels go up to 3, but none is 0",
    ),
    "labels one-hot dealt": (lambda: federate((X, np.eye(3)[Y]), PARTS), r"y \(24, 3\); give"),
    "num_classes too small dealt": (
        lambda: federate((X, Y), PARTS, num_classes=2),
        "a label is 2, but num_classes is 2",
    ),
    "test images of another size dealt": (
        lambda: federate(((X, Y), (X[:, :2], Y)), PARTS),
        r"of X has shape \(4,\), but one of X_test \(2,\)",
    ),
    "no test labels": (lambda: federate(((X, Y), X), PARTS), r"give the tuple \(X_test, y_test\)"),
    "a number of clients": (
        lambda: federate((X, Y), 4),
        r"clients is 4; give each client's rows, such as partition.iid\(y, num_clients\)",
        TypeError,
    ),
    "owners of the rows": (
        lambda: federate((X, Y), np.arange(24) % 4),
        r"clients\[0\] is an array",
    ),
    "rows negative": (
        lambda: federate((X, Y), [[0, -1]]),
        "have row -1, but there are 24 training",
    ),
    "a client without rows": (lambda: federate((X, Y), [[0, 1], []]), "client 1 has no training"),
    "no client": (lambda: federate((X, Y), []), "clients is empty"),
    "one row to divide": (lambda: federate((X, Y), [[0, 1], [2]]), "client 1 has 1 examples"),
    "parts that overlap": (
        lambda: federate((X, Y), [[0, 1, 2], [2, 3, 4]]),
        "the parts have row 2 2 times, .* give parts that do not overlap, or test examples",
    ),
    "test rows of fewer clients": (
        lambda: federate(((X, Y), (X, Y)), PARTS, PARTS[:2]),
        "rows of 4 clients, but test rows of 2",
    ),
    "test rows and a fraction": (
        lambda: federate(((X, Y), (X, Y)), PARTS, PARTS, test_fraction=0.5),
        "give clients_test or test_fraction, not both",
    ),
    "test rows without tests": (lambda: federate((X, Y), PARTS, PARTS), "needs test examples"),
    "a pool with masked features": (
        lambda: federate(Pool("x", "real", 3, (np.ma.masked_less(X, -2), Y), (X, Y)), PARTS),
        "the train features has .* masked entries; drop or fill them",
    ),
    "a pool of arrays alone": (
        lambda: federate(Pool("x", "real", 3, X, (X, Y)), PARTS),
        r"train of the Pool is an array of shape \(24, 4\); give the tuple",
    ),
    "ids NaN": (
        lambda: partition.by_id(np.array([1.0, np.nan, 2.0, np.nan])),
        "ids lack 2 of 4 examples, first that in row 1; drop these examples",
    ),
    "ids of several types": (
        lambda: partition.by_id(np.array(["a", 1], object)),
        "ids are of types int, str; give numbers, or text",
    ),
    "flips of one pool": (
        lambda: flip_labels(federate(((X, Y), (X, Y)), PARTS), fraction=0.5),
        "the test set is one pool",
    ),
    # Partitions and invented data.
    "more clients than examples": (lambda: partition.iid(Y, 25), "24 examples"),
    "clients 0": (lambda: partition.iid(Y, 0), "num_clients is 0; it must be a positive"),
    "labels as a matrix": (lambda: partition.iid(X, 2), r"labels has shape \(24, 4\)"),
    # Regression.
    "targets of fewer clients": (
        lambda: least_squares([X], [], ridge=1.0),
        "features of 1 clients",
    ),
    "alpha too small for the minimum": (
        lambda: dirichlet(LABELS, 40, alpha=0.01, min_examples=30),
        "raise alpha, or lower min",
    ),
    "clusters of unequal numbers of labels": (
        lambda: label_clusters(LABELS, 9, num_clusters=3),
        "10 labels do not make 3 equal",
    ),
    "more clusters than clients": (
        lambda: label_clusters(LABELS, 3),
        "num_clusters is 5, but num_clients is 3; give every",
    ),
    "cluster of fewer examples than clients": (
        lambda: label_clusters(np.repeat([0, 1], [1, 9]), 8, num_clusters=2),
        "lower num_clients or num_clusters",
    ),
    "a client with more than there are of its labels": (
        lambda: iid_share(LABELS, 2, percent=0),
        "a client needs",
    ),
    "labels of an iid share": (
        lambda: iid_share(LABELS, 4, percent=5, labels_per_client=11),
        "labels_per_client is 11",
    ),
    "no ids": (lambda: by_id(np.zeros(0)), "give one id"),
    "sizes above the number of examples": (
        lambda: sizes(10, 4, "equal", min_examples=3),
        "10 examples are too few for 4 clients",
    ),
    "labels of a client": (
        lambda: extended_dirichlet(LABELS, 4, 1.0, labels_per_client=11),
        "labels_per_client is",
    ),
    "labels that no client has": (
        lambda: extended_dirichlet(LABELS, 4, 1.0),
        "cannot have all 10 labels; raise labels_per",
    ),
    "a summary of no examples": (
        lambda: partition_summary(LABELS, [[]]),
        "no client has an example",
    ),
    "a summary of labels as a matrix": (
        lambda: partition_summary(LABELS[None], [[0]]),
        r"labels has shape \(1, 1950\)",
    ),
}
