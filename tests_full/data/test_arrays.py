"""Custom arrays: partitions, inferred classes, and refusals."""

import jax
import numpy as np
import pytest

from fedjax_mm.data import FederatedData, Pool, federate, partition, stack_data, synthetic

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(300, 4, 4, 1)), RNG.integers(5, size=300)
PARTS = partition.iid(Y, 6)


def test_arrays_are_split_into_training_and_test_data_of_each_client():
    data = federate((X, Y), clients=PARTS)
    assert repr(data) == "6 clients, 240 + 60 examples of (4, 4, 1), 5 classes"
    x, y = data.train.examples
    assert (x.dtype, y.dtype, data.kind) == (np.float32, np.int32, "real")
    # Every row belongs to one client, for training or for testing, and keeps its label.
    both = [np.concatenate(each) for each in zip((x, y), data.test.examples, strict=True)]
    order, wanted = np.argsort(both[0][:, 0, 0, 0]), np.argsort(X[:, 0, 0, 0])
    np.testing.assert_array_equal(both[0][order], X[wanted].astype(np.float32))
    np.testing.assert_array_equal(both[1][order], Y[wanted])
    fifth = federate((X, Y), PARTS, test_fraction=0.5)
    assert fifth.train.num_examples == 150


def test_given_test_examples_are_shared_or_partitioned():
    tests = X[:50], Y[:50].astype(float)  # labels may have a float type
    shared = federate(((X, Y), tests), clients=PARTS)
    assert repr(shared) == "6 clients, 300 + 50 examples of (4, 4, 1), 5 classes"
    assert shared.test.num_clients == 1
    dealt = federate(((X, Y), tests), PARTS, partition.iid(Y[:50], 6))
    assert dealt.test.counts.tolist() == [9, 9, 8, 8, 8, 8]
    same = federate(Pool("own", "real", 5, (X, Y), tests), PARTS)
    np.testing.assert_array_equal(same.train.examples[1], shared.train.examples[1])


def test_types_are_converted_to_those_of_tasks():
    pixels = federate(((X * 10).astype(np.uint8), Y), PARTS).train.examples[0]
    assert pixels.dtype == np.uint8
    tokens = federate((np.ones((300, 2), np.int64), Y), PARTS).train.examples[0]
    assert tokens.dtype == np.int32
    assert federate((X, Y), PARTS, num_classes=9).num_classes == 9
    assert federate((jax.numpy.asarray(X), jax.numpy.asarray(Y)), PARTS).num_classes == 5


def test_a_pool_is_shown_in_one_line():
    pool = Pool("digits", "real", 5, (X, Y), (X[:50], Y[:50]))
    assert repr(pool) == "digits, real: 300 + 50 examples of (4, 4, 1), 5 classes"


def test_repr_has_shapes_of_stacks_and_of_traced_data():
    draws = stack_data([synthetic(3, dim=4, seed=seed) for seed in (0, 1)])
    assert repr(draws).startswith("2 draws of 3 clients, at most ")
    assert repr(draws.select(0)).startswith("3 clients, ")
    seen = []
    jax.eval_shape(lambda data: seen.append(repr(data)), draws)
    assert seen == [repr(draws)]
    assert "FederatedData" in repr(jax.tree.structure(draws))
    assert isinstance(repr(jax.tree.map(lambda x: None, draws)), str)
    assert isinstance(draws, FederatedData)


def with_(values, row, value):
    changed = np.array(values, float)
    changed[row] = value
    return changed


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((X, with_(Y, 7, -1)), {}, r"y has -1.0 in row 7; give labels as integers 0 ... C - 1"),
        ((X, with_(Y, 7, 0.5)), {}, r"y has 0.5 in row 7; give labels as integers"),
        ((X, with_(Y, 7, np.nan)), {}, r"y has nan in row 7; give labels as integers"),
        ((X, Y), {"num_classes": 4}, r"a label is 4, but num_classes is 4: labels are 0 ... 3"),
        ((X, Y + 1), {}, r"labels go up to 5, but none is 0; .* or give num_classes=6"),
        ((X, Y.astype(str)), {}, r"y has type <U21; give labels as integers"),
        ((X, np.eye(5)[Y]), {}, r"X has shape \(300, 4, 4, 1\) and y \(300, 5\); give"),
        (
            (X, Y[:-1]),
            {},
            r"X has shape \(300, 4, 4, 1\) and y \(299,\); give .* one label for each",
        ),
        ((with_(X, 3, np.nan), Y), {}, r"X is not finite in 1 of 300 examples, first in row 3"),
        ((with_(X, 3, 1e300), Y), {}, r"X is not finite in 1 of 300 examples, first in row 3"),
        ((X.astype(str), Y), {}, r"X has type <U32; give numbers"),
        (((X, Y), (X[:, :2], Y)), {}, r"of X has shape \(4, 4, 1\), but one of X_test \(2, 4, 1\)"),
        (((X, Y), (X, Y[:3])), {}, r"X_test has shape \(300, 4, 4, 1\) and y_test \(3,\)"),
        ([X, Y], {}, r"data is a list of 2; give a tuple \(X, y\)"),
        (X, {}, r"data is an array of shape .*; give a tuple \(X, y\)"),
        ((X, Y), {"clients_test": PARTS}, r"clients_test needs test examples; give"),
        (
            Pool("own", "real", 5, (X, Y), (X, Y)),
            {"num_classes": 5},
            r"num_classes is 5, but a Pool has its own; leave it out",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        federate(data, PARTS, **options)


def test_a_client_with_one_example_gets_a_remedy():
    with pytest.raises(ValueError, match=r"client 1 has 1 examples; .* give test examples"):
        federate((X, Y), clients=[np.arange(5), np.arange(5, 6)])
