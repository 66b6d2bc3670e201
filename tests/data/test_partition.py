"""Partitions, the datasets made from them, and flipped labels."""

import os

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mm.data.federate import federate, flip_labels, flipped_clients, split_parts
from fedjax_mm.data.federated import Pool
from fedjax_mm.data.idx import load_idx
from fedjax_mm.data.partition import (
    by_id,
    dirichlet,
    dirichlet_clients,
    extended_dirichlet,
    iid,
    iid_clients,
    iid_share,
    label_clusters,
    quantity_skew,
    shards,
    sizes,
)
from fedjax_mm.data.summary import partition_summary

PARTITIONERS = {
    "iid": iid,
    "dirichlet": lambda labels, n, seed=0: dirichlet(labels, n, alpha=1.0, seed=seed),
    "dirichlet_clients": lambda labels, n, seed=0: dirichlet_clients(labels, n, 1.0, seed=seed),
    "extended_dirichlet": lambda labels, n, seed=0: extended_dirichlet(
        labels, n, 5.0, labels_per_client=4, seed=seed
    ),
    "quantity_skew": lambda labels, n, seed=0: quantity_skew(labels, n, "linear", seed=seed),
    "shards": shards,
    "label_clusters": label_clusters,
    "iid_clients": lambda labels, n, seed=0: iid_clients(labels, n, percent=60, seed=seed),
    "iid_share": lambda labels, n, seed=0: iid_share(labels, n, percent=60, seed=seed),
    "by_id": lambda labels, n, seed=0: by_id(
        np.random.default_rng(seed).integers(0, n, len(labels))
    ),
}
COVERING = [name for name in PARTITIONERS if name != "iid_share"]
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), range(150, 250, 10)))
"""Label k occurs 150 + 10 k times."""


def histogram(rows, labels=LABELS):
    return np.bincount(labels[rows], minlength=10)


@pytest.mark.parametrize("name", COVERING)
@given(num_clients=st.integers(5, 40), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_every_example_has_one_client(name, num_clients, seed):
    parts = PARTITIONERS[name](LABELS, num_clients, seed=seed)
    assert len(parts) == num_clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert min(map(len, parts)) >= 1


def test_partitions_depend_on_the_seed():
    for name in PARTITIONERS:
        one, again, other = (PARTITIONERS[name](LABELS, 8, seed=seed) for seed in (1, 1, 2))
        assert all(map(np.array_equal, one, again))
        assert not all(map(np.array_equal, one, other))
        order = [int(rows[0]) for rows in one]
        assert name == "by_id" or order != sorted(order), "clients are not in the examples' order"


def test_iid_sizes_and_frequencies():
    parts = iid(LABELS, 7)
    assert {len(rows) for rows in parts} == {len(LABELS) // 7, len(LABELS) // 7 + 1}
    shares = np.array([histogram(iid(LABELS, 7, seed=s)[3])[9] for s in range(400)])
    expected = 240 / 7
    assert abs(shares.mean() - expected) < 4 * shares.std() / 20


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_expected_variance(alpha):
    """A client's share of a label is Beta(alpha, (N-1) alpha)."""
    num_clients, labels = 6, np.repeat([0, 1], 20_000)
    squares = []
    for seed in range(300):
        parts = dirichlet(labels, num_clients, alpha=alpha, seed=seed, min_examples=1)
        shares = np.array([np.bincount(labels[rows], minlength=2)[0] for rows in parts]) / 20_000
        assert shares.sum() == pytest.approx(1)
        squares.append(((shares - 1 / num_clients) ** 2).mean())
    p = 1 / num_clients
    expected = p * (1 - p) / (num_clients * alpha + 1)
    error = np.std(squares) / np.sqrt(len(squares))
    # Redrawing until every client has an example reduces the variance at the smallest alpha.
    slack = 0.15 * expected if alpha < 0.5 else 0
    assert abs(np.mean(squares) - expected) < 4 * error + slack


@given(alpha=st.floats(0.3, 100), seed=st.integers(0, 2**32 - 1), minimum=st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_dirichlet_keeps_the_minimum(alpha, seed, minimum):
    parts = dirichlet(LABELS, 8, alpha=alpha, min_examples=minimum, seed=seed)
    assert min(map(len, parts)) >= minimum


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_shares_of_dirichlet_clients_have_their_moments(alpha):
    """While no label runs out, counts are binomial with a share from Beta(alpha, (C-1) alpha)."""
    labels, size = np.repeat(np.arange(5), 4000), 100
    shares = np.concatenate(
        [
            [
                histogram(rows, labels)[2]
                for rows in dirichlet_clients(labels, 200, alpha, seed=s)[:20]
            ]
            for s in range(40)
        ]
    )
    p = 1 / 5
    variance = p * (1 - p) * (size + size * (size - 1) / (5 * alpha + 1))
    assert abs(shares.mean() - size * p) < 4 * np.sqrt(variance / len(shares))
    squares = (shares - size * p) ** 2
    assert abs(squares.mean() - variance) < 4 * squares.std() / np.sqrt(len(squares))


@pytest.mark.parametrize("alpha", [1e-4, 0.5, 1e3])
def test_dirichlet_clients_have_equal_sizes(alpha):
    """The last clients get the remaining labels."""
    parts = dirichlet_clients(LABELS, 9, alpha, seed=3)
    assert {len(rows) for rows in parts} == {len(LABELS) // 9, len(LABELS) // 9 + 1}
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


def test_clients_draw_in_random_order():
    """The last clients get fewer labels, and are not the same in every draw."""
    squares = [
        [(histogram(rows) ** 2).sum() for rows in dirichlet_clients(LABELS, 20, 0.5, seed=s)]
        for s in range(100)
    ]
    apart = np.subtract(*np.transpose(squares)[[0, -1]])
    assert abs(apart.mean()) < 4 * apart.std() / np.sqrt(len(apart))


def test_clusters_have_neighbouring_or_random_labels():
    """Both have the same clients in each cluster."""
    near, mixed = (label_clusters(LABELS, 10, shuffled=each, seed=1) for each in (False, True))
    held = [[np.flatnonzero(histogram(rows)).tolist() for rows in each] for each in (near, mixed)]
    assert {tuple(mine) for mine in held[0]} == {(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)}
    assert {tuple(mine) for mine in held[1]} != {tuple(mine) for mine in held[0]}
    groups = [{tuple(np.flatnonzero([x == y for y in each])) for x in each} for each in held]
    assert groups[0] == groups[1]


def test_shards_have_at_most_two_labels_per_client():
    labels = np.repeat(np.arange(10), 6000)
    parts = shards(labels, 100)
    assert {len(rows) for rows in parts} == {600}
    held = [set(labels[rows].tolist()) for rows in parts]
    assert {len(mine) for mine in held} <= {1, 2}
    counts = np.array([np.bincount(labels[rows], minlength=10) for rows in parts])
    assert set(np.unique(counts)) == {0, 300, 600}


def test_clusters_share_no_label_and_agree_between_training_and_test():
    parts, tested = label_clusters(LABELS, 20), label_clusters(LABELS[::3], 20)
    held = [tuple(np.flatnonzero(histogram(rows))) for rows in parts]
    assert len(set(held)) == 5
    assert sorted(label for mine in set(held) for label in mine) == list(range(10))
    assert all(held.count(mine) == 4 for mine in held)
    assert held == [tuple(np.flatnonzero(histogram(rows, LABELS[::3]))) for rows in tested]
    # Clusters are homogeneous, so each of 4 clients has a quarter of both labels.
    for rows, (label, _) in zip(parts, held, strict=True):
        total = (label == LABELS).sum()
        assert abs(histogram(rows)[label] - total / 4) < 4 * np.sqrt(total * 3 / 16)


def test_iid_share_mixes_iid_examples_with_two_labels():
    for percent in [0, 35, 80, 100]:
        size, num_clients = len(LABELS) // 20, 20
        parts = iid_share(LABELS, num_clients, percent=percent, seed=3)
        num_iid = -(-percent * size // 100)
        excess = []
        for rows in parts:
            assert len(rows) == len(set(rows.tolist())) == size
            tail = histogram(rows[num_iid:])
            assert np.count_nonzero(tail) == (2 if percent < 100 else 0)
            assert np.ptp(tail[tail > 0]) <= 1 if percent < 100 else not tail.any()
            excess.append(histogram(rows[:num_iid]))
        if percent:
            shares = np.sum(excess, axis=0) / (num_iid * num_clients)
            np.testing.assert_allclose(shares, np.bincount(LABELS) / len(LABELS), atol=0.01)


def test_shared_examples_have_the_least_overlap():
    parts = iid_share(LABELS, 20, percent=80)
    used = np.bincount(np.concatenate(parts), minlength=len(LABELS))
    num_iid = -(-80 * (len(LABELS) // 20) // 100)
    pool = np.unique(np.concatenate([rows[:num_iid] for rows in parts]))
    assert np.ptp(used[pool]) <= 1
    rest = np.setdiff1d(np.arange(len(LABELS)), pool)
    for label in range(10):
        assert np.ptp(used[rest[LABELS[rest] == label]]) <= 1


def test_without_overlap_examples_are_used_once_or_refused():
    labels = np.tile(np.arange(10), 100)
    parts = iid_share(labels, 10, percent=100, overlap=False)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    with pytest.raises(ValueError, match="allow overlap"):
        iid_share(labels, 10, percent=10, overlap=False)


@pytest.mark.parametrize("percent", [0, 30, 100])
def test_the_number_of_iid_clients(percent):
    labels = np.repeat(np.arange(10), 500)
    parts = iid_clients(labels, 20, percent=percent, seed=4)
    mixed = [np.count_nonzero(histogram(rows, labels)) == 10 for rows in parts]
    assert sum(mixed) == 20 * percent // 100
    assert {len(rows) for rows in parts} == {250}
    if percent == 30:
        assert mixed not in (sorted(mixed), sorted(mixed, reverse=True))


@pytest.mark.skipif("FEDJAX_MM_DATA" not in os.environ, reason="FEDJAX_MM_DATA names no folder")
def test_the_papers_partitions_of_mnist():
    """Every scheme of Pawlik, section 2.2, gives 100 clients with 600 images."""
    labels = load_idx(os.environ["FEDJAX_MM_DATA"]).train[1]
    sizes = np.bincount(labels)
    for percent in range(0, 101, 20):
        num_iid = 6 * percent
        parts = iid_share(labels, 100, percent=percent, seed=percent)
        mixed = np.array([histogram(rows[:num_iid], labels) for rows in parts])
        rest = np.array([histogram(rows[num_iid:], labels) for rows in parts])
        assert (mixed.sum(1) == num_iid).all()
        assert ((rest == (600 - num_iid) // 2).sum(1) == (2 if percent < 100 else 10)).all()
        assert (rest.sum(1) == 600 - num_iid).all()
        if percent:  # a label's share of the pool, within 4 standard errors of a mean of clients
            share = sizes / len(labels)
            error = np.sqrt(num_iid * share * (1 - share) / 100)
            assert (np.abs(mixed.mean(0) - num_iid * share) < 4 * error).all()
        # Images are reused only if a label has too few, which gives the least overlap.
        pool = np.round(percent / 100 * sizes).astype(int)
        asked, there = rest.sum(0), sizes - pool
        distinct = min(100 * num_iid, pool.sum()) + np.minimum(asked, there).sum()
        uses = np.bincount(np.concatenate(parts), minlength=len(labels))
        assert np.count_nonzero(uses) == distinct
        assert uses.max() <= max(2, np.max(-(-asked // np.maximum(there, 1))))
        assert all(len(set(rows.tolist())) == 600 for rows in parts)

        parts = iid_clients(labels, 100, percent=percent, seed=percent)
        kinds = np.array([np.count_nonzero(histogram(rows, labels)) for rows in parts])
        assert np.count_nonzero(kinds == 10) == percent
        assert (kinds[kinds < 10] <= 4).all()  # 2 shards, each of which may contain two labels
        assert {len(rows) for rows in parts} == {600}
        np.testing.assert_array_equal(np.bincount(np.concatenate(parts)), 1)
    parts = shards(labels, 100, seed=1)
    assert {len(rows) for rows in parts} == {600}
    np.testing.assert_array_equal(np.bincount(np.concatenate(parts)), 1)
    kinds = [np.count_nonzero(histogram(rows, labels)) for rows in parts]
    assert max(kinds) <= 4
    assert np.median(kinds) == 2


X = np.arange(len(LABELS), dtype=np.float32)[:, None]
POOL = Pool(
    "toy", "real", 10, (X, LABELS.astype(np.int32)), (-X[:90], LABELS[:90].astype(np.int32))
)


def test_federate_gives_every_client_its_rows():
    parts = dirichlet(LABELS, 5, alpha=1.0)
    data = federate(POOL, parts)
    np.testing.assert_array_equal(data.train.examples[0][:, 0], np.concatenate(parts))
    np.testing.assert_array_equal(data.train.examples[1], LABELS[np.concatenate(parts)])
    assert data.train.counts.tolist() == [len(rows) for rows in parts]
    assert data.test.counts.tolist() == [90]
    assert (data.name, data.kind, data.num_classes) == ("toy", "real", 10)
    own = federate(POOL, parts, iid(LABELS[:90], 5))
    assert own.test.counts.tolist() == [18] * 5
    assert own.test.examples[0].max() <= 0, "from the pool's test examples"


@given(
    sizes=st.lists(st.integers(2, 30), min_size=1, max_size=8),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40, deadline=None)
def test_split_parts_divides_every_client(sizes, fraction, seed):
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    train, test = split_parts(parts, test_fraction=fraction, seed=seed)
    for whole, mine, held in zip(parts, train, test, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([mine, held])), whole)
        assert abs(len(held) - fraction * len(whole)) <= 1
        assert min(len(mine), len(held)) >= 1


def test_the_split_of_a_client_is_random():
    firsts = [split_parts([np.arange(10)], test_fraction=0.3, seed=s)[1][0] for s in range(500)]
    counts = np.bincount(np.concatenate(firsts), minlength=10)
    assert np.abs(counts - 150).max() < 4 * np.sqrt(500 * 0.3 * 0.7)


def test_labels_of_flipped_clients_change_in_training_and_test():
    data = federate(POOL, iid(LABELS, 10), test_fraction=0.4, seed=1)
    flipped = flip_labels(data, fraction=0.3, seed=5)
    clients = flipped_clients(10, fraction=0.3, seed=5)
    assert len(set(clients.tolist())) == 3
    for before, after in ((data.train, flipped.train), (data.test, flipped.test)):
        np.testing.assert_array_equal(before.examples[0], after.examples[0])
        np.testing.assert_array_equal(before.counts, after.counts)
        owner = np.repeat(np.arange(10), before.counts)
        old, new = np.asarray(before.examples[1]), np.asarray(after.examples[1])
        mine = np.isin(owner, clients)
        np.testing.assert_array_equal(new[mine], 9 - old[mine])
        np.testing.assert_array_equal(new[~mine], old[~mine])
        assert new.dtype == np.int32


def test_only_training_labels_may_be_flipped():
    data = federate(POOL, iid(LABELS, 10), test_fraction=0.4, seed=1)
    both, alone = (flip_labels(data, fraction=0.3, test=each, seed=5) for each in (True, False))
    np.testing.assert_array_equal(alone.train.examples[1], both.train.examples[1])
    np.testing.assert_array_equal(alone.test.examples[1], data.test.examples[1])
    assert (both.test.examples[1] != data.test.examples[1]).any()
    assert "training labels of 3 of 10" in alone.name
    shared = federate(POOL, iid(LABELS, 10))
    assert flip_labels(shared, fraction=0.3, test=False).test is shared.test


def test_flipping_twice_is_the_identity():
    y = np.stack([LABELS % 2, LABELS % 3 == 0], axis=1).astype(np.int32)
    pool = Pool("attributes", "surrogate", 2, (X, y), (X, y))
    data = federate(pool, iid(LABELS, 4), iid(LABELS, 4))
    once = flip_labels(data, fraction=1)
    np.testing.assert_array_equal(once.train.examples[1], 1 - np.asarray(data.train.examples[1]))
    twice = flip_labels(once, fraction=1)
    np.testing.assert_array_equal(twice.test.examples[1], data.test.examples[1])


def test_flipped_clients_are_uniform():
    hits = np.bincount(
        np.concatenate([flipped_clients(10, fraction=0.3, seed=s) for s in range(1000)])
    )
    assert np.abs(hits - 300).max() < 4 * np.sqrt(1000 * 0.3 * 0.7)


@pytest.mark.parametrize("kind", ["str", "category", "Int64"])
def test_ids_may_be_a_pandas_series(kind):
    ids = pd.Series(["3", "1", "3"]).astype("int64" if kind == "Int64" else "str").astype(kind)
    assert [rows.tolist() for rows in by_id(ids)] == [[1], [0, 2]]


FLOWER = {  # n = 100 and N = 5: quotas rounded down, and the remainder to the last client
    "linear": (6, 13, 20, 26, 35),
    "square": (1, 7, 16, 29, 47),
    "exponential": (1, 3, 8, 23, 65),
}
LAWS = ["equal", *FLOWER, "lognormal", "dirichlet"]


@pytest.mark.parametrize("law", FLOWER)
def test_sizes_round_the_quotas_of_flower_by_the_largest_remainder(law):
    made = sizes(100, 5, law, shuffled=False)
    f = [{"linear": i, "square": i**2, "exponential": np.exp(i)}[law] for i in range(1, 6)]
    quotas = 100 * np.array(f) / sum(f)
    floors = np.floor(quotas + 1e-9)
    assert floors[:4].tolist() == [*FLOWER[law][:4]]
    gain = sorted(range(5), key=lambda i: floors[i] - quotas[i])[: 100 - int(floors.sum())]
    assert made.tolist() == [floors[i] + (i in gain) for i in range(5)]


@pytest.mark.parametrize("law", LAWS)
@given(
    n=st.integers(60, 3000),
    num_clients=st.integers(1, 20),
    minimum=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=20, deadline=None)
def test_sizes_have_their_sum_and_their_minimum(law, n, num_clients, minimum, seed):
    options = {"sigma": 3.0, "beta": 0.05, "min_examples": minimum, "seed": seed}
    made = sizes(n, num_clients, law, **options)
    assert made.sum() == n
    assert made.min() >= minimum
    ordered = sizes(n, num_clients, law, shuffled=False, **options)
    np.testing.assert_array_equal(np.sort(made), np.sort(ordered))


def test_sizes_of_thousands_of_clients_are_finite():
    made = sizes(10_000, 2000, "exponential", shuffled=False, min_examples=2)
    assert (made[0], made.sum()) == (2, 10_000)
    assert made[-1] == pytest.approx(6000 * (1 - np.exp(-1)), rel=0.01)


def test_it_is_random_who_is_large():
    largest = [np.argmax(sizes(100, 4, "square", seed=seed)) for seed in range(400)]
    shares = np.bincount(largest, minlength=4) / 400
    assert np.abs(shares - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / 400)


def test_random_sizes_have_their_moments():
    logs, squares = [], []
    for seed in range(300):
        made = sizes(10**6, 10, "lognormal", sigma=0.5, shuffled=False, seed=seed)
        logs.append(np.log(made).var(ddof=1))
        squares.append((sizes(10**6, 10, "dirichlet", beta=0.5, seed=seed) ** 2.0).sum() / 1e12)
    for drawn, expected in ((logs, 0.25), (squares, 1.5 / 6)):  # (beta + 1) / (N beta + 1)
        assert abs(np.mean(drawn) - expected) < 4 * np.std(drawn) / np.sqrt(300)


@pytest.mark.parametrize("law", ["square", "lognormal"])
def test_parts_of_quantity_skew_have_the_sizes_and_all_labels(law):
    parts = quantity_skew(LABELS, 6, law, seed=3)
    assert [*map(len, parts)] == sizes(len(LABELS), 6, law, seed=3).tolist()
    assert max(len(set(LABELS[rows].tolist())) for rows in parts) == 10


@pytest.mark.parametrize("labels_per_client", [1, 5])
@given(seed=st.integers(0, 2**32 - 1), alpha=st.sampled_from([1e-4, 0.5, 100.0]))
@settings(max_examples=9, deadline=None)
def test_clients_of_extended_dirichlet_have_few_labels(labels_per_client, seed, alpha):
    options = {"labels_per_client": labels_per_client, "seed": seed}
    if alpha < 0.1:
        with pytest.raises(ValueError, match="raise alpha, or lower"):
            extended_dirichlet(LABELS, 40, alpha, min_examples=20, **options)
        return
    parts = extended_dirichlet(LABELS, 40, alpha, **options)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    held = np.array([histogram(rows) > 0 for rows in parts])
    assert held.sum(1).max() <= labels_per_client
    assert held.sum(0).min() >= 1


def test_one_label_per_client_and_a_large_alpha_give_equal_shares_of_it():
    parts = extended_dirichlet(LABELS, 60, 1e8, labels_per_client=1, seed=2)
    for label in range(10):
        mine = [len(rows) for rows in parts if LABELS[rows[0]] == label]
        assert max(mine) - min(mine) <= len(mine)  # the last one has what rounding leaves


def test_large_clients_get_no_later_labels():
    """A client with n / N examples after label c has none of c + 1, ..., but for the remainder."""
    parts = extended_dirichlet(LABELS, 8, 0.5, labels_per_client=10, seed=1)
    before = np.cumsum([histogram(rows) for rows in parts], axis=1)[:, :-1]
    later = np.array([histogram(rows)[1:] for rows in parts])
    is_full = before >= len(LABELS) / 8
    assert is_full.any(), "the case is tested"
    assert later[:-1][is_full[:-1]].max() == 0


def test_a_summary_has_the_numbers_of_three_clients():
    """Counts (8, 2, 0), (0, 5, 5) and (4, 4, 2), and a client without examples."""
    labels = np.repeat([0, 1, 2], [12, 11, 7])
    parts = [np.r_[:8, 12:14], np.r_[14:19, 23:28], np.r_[8:12, 19:23, 28:30], np.array([], int)]
    found = partition_summary(labels, parts)
    assert found.counts.tolist() == [[8, 2, 0], [0, 5, 5], [4, 4, 2], [0, 0, 0]]
    assert found.num_examples.tolist() == [10, 10, 10, 0]
    assert found.present.tolist() == [2, 2, 3, 0]
    for name, want in {
        "distance": [0.4, 0.4, 0.033333],
        "effective": [1.649385, 2, 2.871746],
        "effective_squares": [1.470588, 2, 2.777778],
    }.items():
        np.testing.assert_allclose(getattr(found, name), [*want, np.nan], atol=1e-6)
    assert found.mean_distance == pytest.approx(0.277778, abs=1e-6)
    assert found.label_clients.tolist() == [2, 3, 2]
    np.testing.assert_allclose(found.label_share, [8 / 12, 5 / 11, 5 / 7])
    assert "4 clients, 1 of them empty, 3 labels" in repr(found)


@pytest.mark.parametrize(
    ("alpha", "squares", "entropy"),
    [(0.5, 0.25, 1.669628)],
)
def test_summaries_of_dirichlet_proportions_have_their_expectations(alpha, squares, entropy):
    """E sum p^2 = (alpha + 1) / (K alpha + 1) and E H = psi(K alpha + 1) - psi(alpha + 1)."""
    rng, size = np.random.default_rng(0), 20_000
    counts = rng.multinomial(size, rng.dirichlet(np.full(10, alpha), size=500))
    labels = np.repeat(np.tile(np.arange(10), 500), counts.ravel())
    found = partition_summary(labels, np.split(np.arange(len(labels)), 500))
    np.testing.assert_array_equal(found.counts, counts)
    for drawn, expected in (
        (1 / found.effective_squares, squares),
        (np.log(found.effective), entropy),
    ):
        # Rounding to examples changes both by less than 10 / size.
        assert abs(drawn.mean() - expected) < 4 * drawn.std() / np.sqrt(500) + 10 / size
