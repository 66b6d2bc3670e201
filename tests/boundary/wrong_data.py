"""Wrong data: name, call and error message."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx

from fedjax_mm import plots
from fedjax_mm.data import (
    FederatedData,
    Pool,
    client_data,
    digits,
    federate,
    flat_client_data,
    flip_labels,
    partition,
    stack_data,
    synthetic,
)
from fedjax_mm.tasks import (
    MLP,
    CelebACNN,
    LogisticRegression,
    McMahanCNN,
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
    FEDAVG,
    PARTS,
    TASK,
    Asking,
    Dropping,
    Net,
    Normed,
    Returning,
    Streaming,
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


LABELS = {
    "from 1": (Y + 1, "train labels has 3 in row 2; .* 0 ... 2, as by subtracting 1"),
    "negative": (Y - 1, "train labels has -1 in row 0; .* 0 ... 2"),
    "one too large": (changed(Y, 5, 3).astype(int), "has 3 in row 5; .* or num_classes=4"),
    "fractional": (Y + 0.5, "has 0.5 in row 0"),
    "of 10^6": (changed(Y, 2, 10**6).astype(int), "has 1000000 in row 2"),
    "-1 for unknown": (changed(Y, 7, -1).astype(int), "has -1 in row 7"),
    "float, from 1": (Y + 1.0, "has 3.0 in row 2"),
    "int8, negative": ((Y - 1).astype(np.int8), "has -1 in row 0"),
    "uint8, too large": ((Y + 200).astype(np.uint8), "has 200 in row 0"),
    "one-hot": (np.eye(4)[Y], "their labels .4,. and"),
}

CASES = {
    **{f"labels {k}": (learn(lambda y=y: clients_of(y)), w) for k, (y, w) in LABELS.items()},
    **{
        f"test labels {k}": (
            learn(lambda y=y: clients_of(test=store(y=y))),
            w.replace("train", "test"),
        )
        for k, (y, w) in LABELS.items()
        if k != "one-hot"
    },
    "num_classes too small": (learn(lambda: clients_of(num_classes=2)), "or num_classes=3"),
    "num_classes 0": (learn(lambda: clients_of(num_classes=0)), "num_classes 0, so .* no labels"),
    "num_classes fractional": (learn(lambda: clients_of(num_classes=3.0)), "num_classes is 3.0"),
    "NaN in features": (lambda: store(NAN), "not finite in 1 of 24 examples, first in row 3"),
    "infinite features": (lambda: store(INF), "not finite in 1 of 24 examples, first in row 3"),
    "features beyond float32": (lambda: store(changed(X, (3, 1), 1e300)), "not finite in 1 of 24"),
    "numbers beyond int32": (lambda: store(y=np.full(24, 2**32)), "do not fit int32"),
    "float16 NaN": (lambda: store(NAN.astype(np.float16)), "first in row 3"),
    "bfloat16 NaN": (
        lambda: flat_client_data((jnp.asarray(NAN, jnp.bfloat16), Y), [24]),
        "first in row 3",
    ),
    "texts as features": (lambda: store(TEXT), "type <U3; give numbers"),
    "complex features": (lambda: store(X * 1j), "type complex64; give numbers"),
    "dates": (lambda: store(np.arange(24).astype("datetime64[s]")), "give numbers"),
    "objects": (lambda: client_data([(np.array([{}]), [0])]), "type object; give numbers"),
    "ragged lists": (lambda: client_data([([[1, 2], [3]], [0, 1])]), "rows of different lengths"),
    "x longer than y": (lambda: client_data([(X, Y[:-1])]), r"client 0 has \[23, 24\] examples"),
    "no examples": (lambda: client_data([(X, Y), (X[:0], Y[:0])]), r"client 1 has \[0\] examples"),
    "no clients": (lambda: client_data([]), "examples_per_client is empty; give at least one"),
    "a number as examples": (lambda: client_data([(X, 3)]), r"client 0 has \[0, 24\] examples"),
    "clients in a dict": (
        lambda: client_data({"ann": (X, Y)}),
        "is a dict of 1; give a list with one entry per client",
        TypeError,
    ),
    "an array of clients": (lambda: client_data(X), "is an array of shape", TypeError),
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
    "count negative": (
        lambda: flat_client_data((X, Y), [25, -1]),
        "give at least one client, and each 1 or more",
    ),
    "counts fractional": (lambda: flat_client_data((X, Y), [24.0]), "give at least one client"),
    "counts a number": (lambda: flat_client_data((X, Y), 24), "give at least one client"),
    "test images of another size": (
        learn(lambda: clients_of(test=store(X[:, :2]))),
        r"training has shape \(4,\) and one for testing \(2,\)",
    ),
    "test examples without labels": (
        learn(lambda: clients_of(test=client_data([X]))),
        "the test examples are an array of shape .*; give .features, labels.",
    ),
    "features alone": (
        learn(lambda: FederatedData("x", "real", 3, client_data([X]), store())),
        "t",
    ),
    "a dict of examples": (
        learn(lambda: clients_of(test=client_data([{"x": X, "y": Y}]))),
        "the test examples are a dict of 2; give .features, labels.",
    ),
    "test data of 2 clients for 4": (
        learn(lambda: clients_of(test=store(parts=np.split(np.arange(24), 2)))),
        "2 clients have test examples and 4 for training",
    ),
    "test data of 5 clients for 4": (
        learn(lambda: clients_of(test=store(parts=np.array_split(np.arange(24), 5)))),
        "5 clients have test examples and 4 for training",
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
    "a store as data": (learn(store), "data is a ClientData, not a FederatedData", TypeError),
    "a pool as data": (
        learn(lambda: Pool("x", "real", 3, (X, Y), (X, Y))),
        "data is a Pool, not a FederatedData; deal examples to clients",
        TypeError,
    ),
    "a task as data": (learn(lambda: TASK), "data is a Supervised, not", TypeError),
    "None as data": (learn(lambda: None), "data is None, not a FederatedData", TypeError),
    "an unselected stack": (
        learn(lambda: stack_data([DATA, DATA])),
        "data is a stack of 2 draws; choose one",
    ),
    "draws of other clients": (
        lambda: stack_data([synthetic(2, dim=2), synthetic(3, dim=2)]),
        r"the stores have \[2, 3\] clients",
    ),
    "no labels": (learn(lambda: NUMBERS), "num_classes 0, so their targets are no labels; take"),
    "flipped numbers": (lambda: flip_labels(NUMBERS, fraction=0.5), "have no classes, so no labe"),
    "a picture of numbers": (lambda: plots.partition(NUMBERS), "have no classes, so no labels to"),
    "targets of fewer rows": (
        lambda: federate((X, {"a": Y, "b": Y[:5]}), PARTS, num_classes=0),
        r"X has shape \(24, 4\) and y \(24,\), \(5,\)",
    ),
    # The loss and the metrics.
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
    "a loss of one argument": (
        scored(lambda x: x[:, 0]),
        "loss does not take outputs .*: <lambda>",
    ),
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
        "metrics has 'loss', which is reco",
    ),
    "a metric's array of options": (
        scored(accuracy, {"most": partial(top_k_accuracy, k=np.arange(2))}),
        "metrics.'most'. has options that cannot be hashed",
        TypeError,
    ),
    # The module.
    "a class": (
        learn(lambda: DATA, LogisticRegression),
        r"module is the class LogisticRegression; give an instance, such as LogisticRegression\(",
        TypeError,
    ),
    "a function as module": (learn(lambda: DATA, lambda x: x), "is the function <lamb", TypeError),
    "None as module": (learn(lambda: DATA, None), "module is None; give a flax.linen", TypeError),
    "a task as module": (learn(lambda: DATA, TASK), "module is a Supervised; give", TypeError),
    "an algorithm as module": (learn(lambda: DATA, FEDAVG), "module is an Algorithm", TypeError),
    "params as module": (learn(lambda: DATA, {"w": X}), "module is a dict of 1; give", TypeError),
    "a list as an attribute": (
        learn(lambda: DATA, MLP(3, hidden=[8, 4])),
        "MLP has an attribute that cannot be hashed; give tuples instead of lists",
        TypeError,
    ),
    "swapped with the data": (
        lambda: classification(LINEAR, DATA),
        "module is a FederatedData; give a flax.linen module",
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
    "more outputs than classes": (learn(lambda: DATA, MLP(4)), r"shape \[batch, 4\]; give one"),
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
    "batch norm of nnx": (
        learn(lambda: DATA, nnx.bridge.to_linen(nnx.BatchNorm, 4)),
        "module BatchNorm keeps batch_stats",
    ),
    "a stream without a name": (
        learn(lambda: DATA, Dropping()),
        r"module Dropping draws from a stream: .*; name it, as in classification\(..., rngs=",
    ),
    "a stream of nnx without a name": (
        learn(lambda: DATA, nnx.bridge.to_linen(nnx.Dropout, 0.5)),
        r"module Dropout draws from a stream: .*; name it, as in classification\(..., rngs=",
    ),
    "stream misspelt": (
        learn(lambda: DATA, MLP(3, dropout_rate=0.5), rngs=("dropuot",)),
        r"rngs is .'dropuot',., but module MLP draws from 'dropout' in .* give rngs=.'dropout',.$",
    ),
    "stream missing": (
        learn(lambda: DATA, MLP(3, dropout_rate=0.5)),
        r"rngs is .., but module MLP draws from 'dropout' in training; give rngs=.'dropout',.$",
    ),
    "stream of another name": (
        learn(lambda: DATA, Streaming("noise"), rngs=("dropout",)),
        "draws from 'noise' in training; give",
    ),
    "stream too many": (
        learn(lambda: DATA, Streaming("noise"), rngs=("dropout", "noise")),
        r"draws from 'noise' in training; give rngs=.'noise',.$",
    ),
    "stream of a network that draws nothing": (
        learn(lambda: DATA, rngs=("dropout",)),
        r"LogisticRegression draws nothing in training; give rngs=..$",
    ),
    "stream of an nnx module missing": (
        learn(lambda: DATA, nnx.bridge.to_linen(Net)),
        "No RngStream named 'dropout' found in Rngs.*; name it, as in class",
    ),
    "stream of an nnx module misspelt": (
        learn(lambda: DATA, nnx.bridge.to_linen(Net), rngs=("dropuot",)),
        "No RngStream named 'dropout' found in Rngs.*; name it, as in class",
    ),
    "stream of an nnx module too many": (
        learn(lambda: DATA, nnx.bridge.to_linen(Net), rngs=("dropout", "noise")),
        r"draws from 'dropout' in training; give rngs=.'dropout',.$",
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
    "apply with a third argument": (
        learn(lambda: DATA, (init, lambda params, x, train: x)),
        r"\(params, x, train\); give a function of \(params, x\) and, if it needs them, weights",
        TypeError,
    ),
    "streams of a pair": (
        learn(lambda: DATA, (init, apply), rngs="dropout"),
        "rngs is .'dropout',., but streams .*; give apply an argument rng_key instead",
    ),
    "parameters of a pair that are no floats": (
        learn(lambda: DATA, (lambda rng_key, x: {"steps": np.arange(3)}, apply)),
        r"has the parameter params\['steps'\], which is .*; parameters are arrays of floats: keep",
    ),
    "a pair swapped": (
        learn(lambda: DATA, (apply, init)),
        r"apply of the pair has the arguments \(rng_key, x\); give a function of \(params, x\)",
        TypeError,
    ),
    "features of another shape for a pair": (
        learn(lambda: DATA, (init, lambda params, x: params["kernel"] @ x)),
        r"module \(init, <lambda>\) does not take features of shape \[batch, 4\]",
    ),
    "a pair with too few outputs": (
        learn(lambda: DATA, (init, lambda params, x: x[:, :2])),
        r"module \(init, <lambda>\) returns logits of shape \[batch, 2\]; give one output for each",
    ),
    "reduction": (learn(lambda: DATA, reduction="max"), "'max'; it must be 'mean' or 'sum'"),
    "scale 0": (learn(lambda: DATA, scale=0), "scale is 0; it must be positive"),
    "scale text": (learn(lambda: DATA, scale="1/255"), "scale is '1/255'; it must be", TypeError),
    "block_size 0": (learn(lambda: DATA, block_size=0), "block_size is 0; it must be a positive"),
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
    "data as an array": (lambda: federate(X, PARTS), "data is an array of shape .* give a tuple"),
    "data as clients' data": (lambda: federate(DATA, PARTS), "data is a FederatedData; give"),
    "three arrays": (lambda: federate((X, Y, Y), PARTS), "data is a tuple of 3; give a tuple"),
    "labels from 1 dealt": (
        lambda: federate((X, Y + 1), PARTS),
        "labels go up to 3, but none is 0",
    ),
    "labels text dealt": (lambda: federate((X, TEXT), PARTS), "y has type <U3; give labels as int"),
    "labels one-hot dealt": (lambda: federate((X, np.eye(3)[Y]), PARTS), r"y \(24, 3\); give"),
    "labels fractional dealt": (lambda: federate((X, Y / 2), PARTS), "y has 0.5 in row 1"),
    "NaN dealt": (lambda: federate((NAN, Y), PARTS), "X is not finite in 1 of 24 examples"),
    "x longer than y dealt": (lambda: federate((X, Y[:-1]), PARTS), r"X has shape \(24, 4\) and y"),
    "whole numbers beyond int32 dealt": (
        lambda: federate((np.full((24, 1), 2**31, np.uint32), Y), PARTS),
        "X has numbers from 2147483648 to 2147483648, which do not fit int32",
    ),
    "nothing dealt": (lambda: federate((X[:0], Y[:0]), PARTS), r"X has shape \(0, 4\) and y"),
    "num_classes too small dealt": (
        lambda: federate((X, Y), PARTS, num_classes=2),
        "a label is 2, but num_classes is 2",
    ),
    "num_classes -1 dealt": (lambda: federate((X, Y), PARTS, num_classes=-1), "num_classes is -1"),
    "test images of another size dealt": (
        lambda: federate(((X, Y), (X[:, :2], Y)), PARTS),
        r"of X has shape \(4,\), but one of X_test \(2,\)",
    ),
    "test labels shorter dealt": (lambda: federate(((X, Y), (X, Y[:3])), PARTS), "X_test has sh"),
    "no test labels": (lambda: federate(((X, Y), X), PARTS), r"give the tuple \(X_test, y_test\)"),
    "a number of clients": (
        lambda: federate((X, Y), 4),
        r"clients is 4; give each client's rows, such as partition.iid\(y, num_clients\)",
        TypeError,
    ),
    "a partition not called": (
        lambda: federate((X, Y), partition.iid),
        "clients is the function iid; give each client's rows",
        TypeError,
    ),
    "owners of the rows": (
        lambda: federate((X, Y), np.arange(24) % 4),
        r"clients\[0\] is an array",
    ),
    "masks for rows": (lambda: federate((X, Y), [Y == 0, Y > 0]), "as np.flatnonzero makes them"),
    "rows fractional": (lambda: federate((X, Y), [[0.0, 1.0]]), r"clients\[0\] is an .* float64"),
    "rows negative": (
        lambda: federate((X, Y), [[0, -1]]),
        "have row -1, but there are 24 training",
    ),
    "rows beyond": (lambda: federate((X, Y), [[0, 24]]), "have row 24, but there are 24 training"),
    "a client without rows": (lambda: federate((X, Y), [[0, 1], []]), "client 1 has no training"),
    "no client": (lambda: federate((X, Y), []), "clients is empty"),
    "one row to divide": (lambda: federate((X, Y), [[0, 1], [2]]), "client 1 has 1 examples"),
    "parts that overlap": (
        lambda: federate((X, Y), [[0, 1, 2], [2, 3, 4]]),
        "the parts have row 2 2 times, .* give parts that do not overlap, or test examples",
    ),
    "a row twice": (lambda: federate((X, Y), [[0, 1, 1]]), "the parts have row 1 2 times"),
    "test rows of fewer clients": (
        lambda: federate(((X, Y), (X, Y)), PARTS, PARTS[:2]),
        "rows of 4 clients, but test rows of 2",
    ),
    "test rows and a fraction": (
        lambda: federate(((X, Y), (X, Y)), PARTS, PARTS, test_fraction=0.5),
        "give clients_test or test_fraction, not both",
    ),
    "test rows without tests": (lambda: federate((X, Y), PARTS, PARTS), "needs test examples"),
    "fraction 0": (lambda: federate((X, Y), PARTS, test_fraction=0), "lie between 0 and 1"),
    "fraction 1": (lambda: federate((X, Y), PARTS, test_fraction=1.0), "lie between 0 and 1"),
    "fraction in percent": (lambda: federate((X, Y), PARTS, test_fraction=20), "lie between 0 and"),
    "fraction text": (lambda: federate((X, Y), PARTS, test_fraction="20%"), "'20%'", TypeError),
    "a pool with labels from 1": (
        lambda: federate(Pool("x", "real", 3, (X, Y + 1), (X, Y)), PARTS),
        "the train labels has 3 in row 2; .* subtracting 1",
    ),
    "a pool with NaN": (
        lambda: federate(Pool("x", "real", 3, (NAN, Y), (X, Y)), PARTS),
        "the train features is not finite in 1 of 24",
    ),
    "a pool beyond float32": (
        lambda: federate(Pool("x", "real", 3, (X * np.float64(1e300), Y), (X, Y)), PARTS),
        "the train features is not finite in 24 of 24 examples",
    ),
    "a pool with masked features": (
        lambda: federate(Pool("x", "real", 3, (np.ma.masked_less(X, -2), Y), (X, Y)), PARTS),
        "the train features has .* masked entries; drop or fill them",
    ),
    "masked features": (
        lambda: federate((np.ma.masked_less(X, -1), Y), PARTS),
        "X has .* masked entries; drop or fill them",
    ),
    "masked examples of a client": (
        lambda: client_data([(np.ma.masked_less(X, -1), Y)]),
        "client 0 has .* masked entries; drop or fill them",
    ),
    "a pool of arrays alone": (
        lambda: federate(Pool("x", "real", 3, X, (X, Y)), PARTS),
        r"train of the Pool is an array of shape \(24, 4\); give the tuple",
    ),
    "ids NaN": (
        lambda: partition.by_id(np.array([1.0, np.nan, 2.0, np.nan])),
        "ids lack 2 of 4 examples, first that in row 1; drop these examples",
    ),
    "ids None": (
        lambda: partition.by_id(["a", None, "b"]),
        "ids lack 1 of 3 examples, first that in row 1",
    ),
    "ids masked": (
        lambda: partition.by_id(np.ma.masked_equal([1, 2, 3], 3)),
        "ids lack 1 of 3 examples, first that in row 2",
    ),
    "ids of several types": (
        lambda: partition.by_id(np.array(["a", 1], object)),
        "ids are of types int, str; give numbers, or text",
    ),
    "seed -1 of a division": (
        lambda: federate((X, Y), PARTS, seed=-1),
        "seed is -1; it must be a whole number, 0 or more",
    ),
    "seed 1.5 of a partition": (
        lambda: partition.iid(Y, 2, seed=1.5),
        "seed is 1.5; it must be a whole number, 0 or more",
    ),
    "seed -1 of invented data": (
        lambda: synthetic(3, seed=-1),
        "seed is -1; it must be a whole number, 0 or more",
    ),
    "channels first": (
        learn(lambda: images((3, 8, 8)), McMahanCNN(3, features=(2, 2), width=4)),
        r"features of shape \[batch, 3, 8, 8\]: give channels last, as np.moveaxis\(X, 1, -1\)",
    ),
    "channels first, of one colour": (
        learn(lambda: images((1, 8, 8)), CelebACNN(3)),
        r"features of shape \[batch, 1, 8, 8\]: give channels last, as np.moveaxis\(X, 1, -1\)",
    ),
    "a pool of unequal lengths": (
        lambda: federate(Pool("x", "real", 3, (X, Y), (X, Y[:2])), PARTS),
        r"the test features has shape \(24, 4\) and the test labels \(2,\)",
    ),
    "flips of one pool": (
        lambda: flip_labels(federate(((X, Y), (X, Y)), PARTS), fraction=0.5),
        "the test set is one pool",
    ),
    "flips of too many": (lambda: flip_labels(DATA, fraction=2), "fraction is 2; it must lie"),
    # Partitions and invented data.
    "more clients than examples": (lambda: partition.iid(Y, 25), "24 examples"),
    "clients 2.5": (lambda: partition.iid(Y, 2.5), "num_clients is 2.5; it must be a positive"),
    "clients 0": (lambda: partition.iid(Y, 0), "num_clients is 0; it must be a positive"),
    "clients True": (lambda: partition.iid(Y, True), "num_clients is True; it must be a positive"),
    "labels as a matrix": (lambda: partition.iid(X, 2), r"labels has shape \(24, 4\)"),
    "alpha 0": (lambda: partition.dirichlet(Y, 2, 0.0), "alpha is 0.0; it must be positive"),
    "alpha negative": (lambda: partition.dirichlet(Y, 2, -1), "alpha is -1; it must be positive"),
    "alpha None": (lambda: partition.dirichlet(Y, 2, None), "alpha is None; it must", TypeError),
    "shards 0": (lambda: partition.shards(Y, 2, shards_per_client=0), "shards_per_client is 0"),
    "synthetic dim 0": (lambda: synthetic(3, dim=0), "dim is 0; it must be a positive whole"),
    "synthetic one class": (lambda: synthetic(3, num_classes=1), "num_classes is 1; .* 2 or more"),
    "synthetic alpha": (lambda: synthetic(3, alpha=-1.0), "alpha is -1.0; it must not be negative"),
    "synthetic alpha text": (lambda: synthetic(3, alpha="1"), "alpha is '1'; it", TypeError),
    "synthetic generator": (lambda: synthetic(3, generator="x"), "'x'; it must be 'fedprox' or"),
    "digits fraction": (lambda: digits(test_fraction=1.5), "test_fraction is 1.5; it must lie"),
    # Regression.
    "targets of fewer clients": (
        lambda: least_squares([X], [], ridge=1.0),
        "features of 1 clients",
    ),
    "NaN targets": (lambda: least_squares([X], [NAN[:, 1]], ridge=1.0), "is not finite in 1 of 24"),
    "targets longer": (lambda: least_squares([X[:3]], [Y], ridge=1.0), r"has \[3, 24\] examples"),
    "ridge 0": (lambda: least_squares([X], [Y], ridge=0), "ridge is 0; it must be positive"),
    "ridge None": (
        lambda: least_squares([X], [Y], ridge=None),
        "ridge is None; it must",
        TypeError,
    ),
}
