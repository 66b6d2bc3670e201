"""More wrong data and tasks for rules of refusal that `tests/boundary` tests once."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from fedjax_mm.data import (
    FederatedData,
    Pool,
    client_data,
    digits,
    federate,
    flat_client_data,
    flip_labels,
    partition,
    synthetic,
)
from fedjax_mm.data.federate import federate, flipped_clients, split_parts
from fedjax_mm.data.partition import (
    dirichlet,
    iid,
    iid_clients,
    iid_share,
    quantity_skew,
    shards,
    sizes,
)
from fedjax_mm.tasks import MLP, CelebACNN, McMahanCNN, classification, least_squares
from tests.boundary.parts import (
    DATA,
    FEDAVG,
    PARTS,
    TASK,
    Dropping,
    Net,
    Streaming,
    X,
    Y,
    changed,
    clients_of,
    store,
)
from tests.boundary.wrong_data import (
    INF,
    LABELS,
    LINEAR,
    NAN,
    POOL,
    TEXT,
    apply,
    images,
    init,
    learn,
)

WRONG_LABELS = {
    "from 1": (Y + 1, "train labels has 3 in row 2; .* 0 ... 2, as by subtracting 1"),
    "negative": (Y - 1, "train labels has -1 in row 0; .* 0 ... 2"),
    "one too large": (changed(Y, 5, 3).astype(int), "has 3 in row 5; .* or num_classes=4"),
    "fractional": (Y + 0.5, "has 0.5 in row 0"),
    "of 10^6": (changed(Y, 2, 10**6).astype(int), "has 1000000 in row 2"),
    "-1 for unknown": (changed(Y, 7, -1).astype(int), "has -1 in row 7"),
    "float, from 1": (Y + 1.0, "has 3.0 in row 2"),
    "int8, negative": ((Y - 1).astype(np.int8), "has -1 in row 0"),
    "uint8, too large": ((Y + 200).astype(np.uint8), "has 200 in row 0"),
}

CASES = {
    **{f"labels {k}": (learn(lambda y=y: clients_of(y)), w) for k, (y, w) in WRONG_LABELS.items()},
    **{
        f"test labels {k}": (
            learn(lambda y=y: clients_of(test=store(y=y))),
            w.replace("train", "test"),
        )
        for k, (y, w) in WRONG_LABELS.items()
    },
    "num_classes fractional": (learn(lambda: clients_of(num_classes=3.0)), "num_classes is 3.0"),
    "infinite features": (lambda: store(INF), "not finite in 1 of 24 examples, first in row 3"),
    "features beyond float32": (lambda: store(changed(X, (3, 1), 1e300)), "not finite in 1 of 24"),
    "float16 NaN": (lambda: store(NAN.astype(np.float16)), "first in row 3"),
    "bfloat16 NaN": (
        lambda: flat_client_data((jnp.asarray(NAN, jnp.bfloat16), Y), [24]),
        "first in row 3",
    ),
    "complex features": (lambda: store(X * 1j), "type complex64; give numbers"),
    "dates": (lambda: store(np.arange(24).astype("datetime64[s]")), "give numbers"),
    "objects": (lambda: client_data([(np.array([{}]), [0])]), "type object; give numbers"),
    "no examples": (lambda: client_data([(X, Y), (X[:0], Y[:0])]), r"client 1 has \[0\] examples"),
    "a number as examples": (lambda: client_data([(X, 3)]), r"client 0 has \[0, 24\] examples"),
    "an array of clients": (lambda: client_data(X), "is an array of shape", TypeError),
    "count negative": (
        lambda: flat_client_data((X, Y), [25, -1]),
        "give at least one client, and each 1 or more",
    ),
    "counts fractional": (lambda: flat_client_data((X, Y), [24.0]), "give at least one client"),
    "counts a number": (lambda: flat_client_data((X, Y), 24), "give at least one client"),
    "features alone": (
        learn(lambda: FederatedData("x", "real", 3, client_data([X]), store())),
        "t",
    ),
    "a dict of examples": (
        learn(lambda: clients_of(test=client_data([{"x": X, "y": Y}]))),
        "the test examples are a dict of 2; give .features, labels.",
    ),
    "test data of 5 clients for 4": (
        learn(lambda: clients_of(test=store(parts=np.array_split(np.arange(24), 5)))),
        "5 clients have test examples and 4 for training",
    ),
    "a store as data": (learn(store), "data is a ClientData, not a FederatedData", TypeError),
    "a pool as data": (
        learn(lambda: Pool("x", "real", 3, (X, Y), (X, Y))),
        "data is a Pool, not a FederatedData; deal examples to clients",
        TypeError,
    ),
    "a task as data": (learn(lambda: TASK), "data is a Supervised, not", TypeError),
    "None as data": (learn(lambda: None), "data is None, not a FederatedData", TypeError),
    "None as module": (learn(lambda: DATA, None), "module is None; give a flax.linen", TypeError),
    "a task as module": (learn(lambda: DATA, TASK), "module is a Supervised; give", TypeError),
    "an algorithm as module": (learn(lambda: DATA, FEDAVG), "module is an Algorithm", TypeError),
    "params as module": (learn(lambda: DATA, {"w": X}), "module is a dict of 1; give", TypeError),
    "swapped with the data": (
        lambda: classification(LINEAR, DATA),
        "module is a FederatedData; give a flax.linen module",
        TypeError,
    ),
    "more outputs than classes": (learn(lambda: DATA, MLP(4)), r"shape \[batch, 4\]; give one"),
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
    "apply with a third argument": (
        learn(lambda: DATA, (init, lambda params, x, train: x)),
        r"\(params, x, train\); give a function of \(params, x\) and, if it needs them, weights",
        TypeError,
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
    "a pair with too few outputs": (
        learn(lambda: DATA, (init, lambda params, x: x[:, :2])),
        r"module \(init, <lambda>\) returns logits of shape \[batch, 2\]; give one output for each",
    ),
    "block_size 0": (learn(lambda: DATA, block_size=0), "block_size is 0; it must be a positive"),
    "data as an array": (lambda: federate(X, PARTS), "data is an array of shape .* give a tuple"),
    "data as clients' data": (lambda: federate(DATA, PARTS), "data is a FederatedData; give"),
    "three arrays": (lambda: federate((X, Y, Y), PARTS), "data is a tuple of 3; give a tuple"),
    "labels text dealt": (lambda: federate((X, TEXT), PARTS), "y has type <U3; give labels as int"),
    "labels fractional dealt": (lambda: federate((X, Y / 2), PARTS), "y has 0.5 in row 1"),
    "NaN dealt": (lambda: federate((NAN, Y), PARTS), "X is not finite in 1 of 24 examples"),
    "x longer than y dealt": (lambda: federate((X, Y[:-1]), PARTS), r"X has shape \(24, 4\) and y"),
    "whole numbers beyond int32 dealt": (
        lambda: federate((np.full((24, 1), 2**31, np.uint32), Y), PARTS),
        "X has numbers from 2147483648 to 2147483648, which do not fit int32",
    ),
    "nothing dealt": (lambda: federate((X[:0], Y[:0]), PARTS), r"X has shape \(0, 4\) and y"),
    "num_classes -1 dealt": (lambda: federate((X, Y), PARTS, num_classes=-1), "num_classes is -1"),
    "test labels shorter dealt": (lambda: federate(((X, Y), (X, Y[:3])), PARTS), "X_test has sh"),
    "a partition not called": (
        lambda: federate((X, Y), partition.iid),
        "clients is the function iid; give each client's rows",
        TypeError,
    ),
    "masks for rows": (lambda: federate((X, Y), [Y == 0, Y > 0]), "as np.flatnonzero makes them"),
    "rows fractional": (lambda: federate((X, Y), [[0.0, 1.0]]), r"clients\[0\] is an .* float64"),
    "rows beyond": (lambda: federate((X, Y), [[0, 24]]), "have row 24, but there are 24 training"),
    "a row twice": (lambda: federate((X, Y), [[0, 1, 1]]), "the parts have row 1 2 times"),
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
    "masked features": (
        lambda: federate((np.ma.masked_less(X, -1), Y), PARTS),
        "X has .* masked entries; drop or fill them",
    ),
    "masked examples of a client": (
        lambda: client_data([(np.ma.masked_less(X, -1), Y)]),
        "client 0 has .* masked entries; drop or fill them",
    ),
    "ids None": (
        lambda: partition.by_id(["a", None, "b"]),
        "ids lack 1 of 3 examples, first that in row 1",
    ),
    "ids masked": (
        lambda: partition.by_id(np.ma.masked_equal([1, 2, 3], 3)),
        "ids lack 1 of 3 examples, first that in row 2",
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
    "flips of too many": (lambda: flip_labels(DATA, fraction=2), "fraction is 2; it must lie"),
    "clients 2.5": (lambda: partition.iid(Y, 2.5), "num_clients is 2.5; it must be a positive"),
    "clients True": (lambda: partition.iid(Y, True), "num_clients is True; it must be a positive"),
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
    "NaN targets": (lambda: least_squares([X], [NAN[:, 1]], ridge=1.0), "is not finite in 1 of 24"),
    "targets longer": (lambda: least_squares([X[:3]], [Y], ridge=1.0), r"has \[3, 24\] examples"),
    "ridge 0": (lambda: least_squares([X], [Y], ridge=0), "ridge is 0; it must be positive"),
    "ridge None": (
        lambda: least_squares([X], [Y], ridge=None),
        "ridge is None; it must",
        TypeError,
    ),
    "iid of too few examples": (
        lambda: iid(np.zeros(3), 4),
        "3 examples are too few for 4 clients",
    ),
    "iid of labels as a matrix": (lambda: iid(np.zeros((3, 1)), 2), r"labels has shape \(3, 1\)"),
    "alpha is 0": (lambda: dirichlet(LABELS, 4, alpha=0), "alpha is 0"),
    "minimum too large": (
        lambda: dirichlet(LABELS, 40, alpha=1, min_examples=60),
        "are too few for 40 clients",
    ),
    "shards of too few examples": (
        lambda: shards(np.zeros(5), 3),
        "5 examples are too few for 3 clients with 2",
    ),
    "percent is 101": (lambda: iid_share(LABELS, 4, percent=101), "percent is 101"),
    "percent is -1": (lambda: iid_clients(LABELS, 4, percent=-1), "percent is -1"),
    "split of one example": (
        lambda: split_parts([np.arange(1)], test_fraction=0.5),
        "client 0 has 1 examples",
    ),
    "fraction is 1.5": (lambda: flipped_clients(4, fraction=1.5), "fraction is 1.5"),
    "row 2000": (
        lambda: federate(POOL, [np.array([2000])]),
        "row 2000, but there are 1950 training",
    ),
    "row -1 among others": (
        lambda: federate(POOL, [np.array([3, -1])]),
        "row -1, but there are 1950 training",
    ),
    "test rows of two clients": (
        lambda: federate(POOL, [np.arange(2)], [np.arange(2)] * 2),
        "rows of 1 clients, but",
    ),
    "law is cubic": (lambda: sizes(10, 4, "cubic"), "law is 'cubic'; it must be 'equal', 'linear'"),
    "sigma is 0": (lambda: sizes(10, 4, "lognormal", sigma=0), "sigma is 0; it must be positive"),
    "beta is -1": (lambda: quantity_skew(LABELS, 4, "dirichlet", beta=-1), "beta is -1"),
}
