"""Synthetic surrogates for CelebA and Sentiment140, whose data must not be redistributed."""

from typing import Annotated, TypeAlias

import numpy as np
from annotated_types import Ge, Gt
from jaxtyping import Float, Float32, Int, Int32, Int64, UInt8

from fedjax_mm.checks.annotations import Count, Fraction, checked
from fedjax_mm.checks.values import check_between
from fedjax_mm.data.clients import ClientData, flat_client_data
from fedjax_mm.data.federate import check_min_examples, federate, split_parts
from fedjax_mm.data.federated import FederatedData, Pool
from fedjax_mm.data.partition import consecutive, generator, seed_sequence

Rng: TypeAlias = np.random.Generator
PerTweet: TypeAlias = Int64[np.ndarray, " tweets"]

_GRID = 6  # points per side of the grid for drawing smooth fields
_FIELD = _GRID * _GRID * 3
_CONTRAST = 32.0  # standard deviation of a field, in gray levels
_TINT = 24.0
_PIXEL_NOISE = 12.0
_CLIENT_SHARE = 0.3  # fraction of the background's variance that a client's images share
_BLOCK_IMAGES = 256  # images to draw at a time, which does not affect the data

_TOPICS = 20
_WORDS = 100  # words per list
_SENTIMENT, _SHARED = 2, 1  # numbers of word lists, negative and positive, and neutral
_TELLING = (0.05, 0.5)  # range of the fraction of a client's words with sentiment
_CLARITY = 0.75
_BLOCK_TWEETS = 2048  # tweets to average at a time, which does not affect the data


@checked
def surrogate_faces(
    num_clients: Count,
    *,
    num_attributes: Count = 9,
    image_size: Count = 84,
    examples_per_client: tuple[int, int] = (20, 40),
    test_fraction: Fraction = 0.2,
    signal: Annotated[float, Gt(0)] = 1.5,
    label_skew: Annotated[float, Ge(0)] = 0.5,
    seed: int = 0,
) -> FederatedData:
    """Draws images with binary attributes, shaped like CelebA.

    An image is the sum of a smooth random background, partly shared within its client, the client's
    tint, pixel noise and, for each attribute, a smooth pattern or its negative. The patterns are
    orthonormal and the background is white in their span, so the best linear classifier has an
    accuracy of about ``Phi(signal)`` (0.93 for a signal of 1.5). A network needs many examples to
    reach it.

    Each attribute is balanced over all training examples and over all test examples (up to one
    example), but not within a client.

    Args:
      num_clients: N, the number of clients.
      num_attributes: the number of columns of y, ``int32[examples, attributes]`` of 0 and 1.
      image_size: the number of pixels per side.
      examples_per_client: the smallest and the largest n_k, training and test together.
      test_fraction: the fraction of each client's examples for testing.
      signal: the amplitude of an attribute's pattern, in standard deviations of the background
        along the pattern.
      label_skew: how much the clients' label frequencies differ; at 0 they are equal.
      seed: the seed of all draws.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> data = surrogate_faces(3, num_attributes=2, image_size=16)
      >>> data.kind, data.train.examples[0].shape[1:], data.train.examples[1].shape[1:]
      ('surrogate', (16, 16, 3), (2,))
    """
    check_between("num_attributes", num_attributes, 1, _FIELD, "the number of patterns")
    if not 2 <= examples_per_client[0] <= examples_per_client[1]:
        raise ValueError(
            f"examples_per_client is {examples_per_client}; give the smallest and the largest "
            "number, 2 or more: one example for training, one for test"
        )
    rng, *split_rngs = map(generator, seed_sequence(seed).spawn(5))
    low, high = examples_per_client
    counts = rng.integers(low, high, num_clients, endpoint=True)
    test_counts = np.clip(np.rint(test_fraction * counts).astype(np.int64), 1, counts - 1)
    patterns = np.linalg.qr(rng.standard_normal((_FIELD, num_attributes)))[0].T
    clients = rng.standard_normal((num_clients, _FIELD + 3 + num_attributes))

    def split(counts: Int[np.ndarray, " clients"], rng: Rng, pixels: Rng) -> ClientData:
        owner = np.repeat(np.arange(num_clients), counts)
        y = _labels(label_skew * clients[owner, _FIELD + 3 :], rng)
        images = np.empty((len(y), image_size, image_size, 3), np.uint8)
        for start in range(0, len(y), _BLOCK_IMAGES):
            rows = slice(start, start + _BLOCK_IMAGES)
            mine = clients[owner[rows]]
            field = np.sqrt(1 - _CLIENT_SHARE) * rng.standard_normal((len(mine), _FIELD))
            field += np.sqrt(_CLIENT_SHARE) * mine[:, :_FIELD]
            field += signal * (2 * y[rows] - 1) @ patterns
            images[rows] = _render(field, mine[:, _FIELD : _FIELD + 3], image_size, pixels)
        return flat_client_data((images, y), counts)

    train = split(counts - test_counts, *split_rngs[:2])
    test = split(test_counts, *split_rngs[2:])
    return FederatedData("surrogate faces", "surrogate", 2, train, test)


@checked
def surrogate_tweets(
    num_clients: Count,
    *,
    dim: Count = 200,
    min_examples: Count = 50,
    test_fraction: Fraction = 0.4,
    seed: int = 0,
) -> FederatedData:
    """Draws tweets as mean vectors of invented words, shaped like Sentiment140.

    Each client draws its own probability of a positive tweet from Beta(2, 2), its own probabilities
    of 20 topics from Dirichlet(0.3), and its own probability, between 0.05 and 0.5, that a word
    carries a sentiment. A tweet has 4 to 24 words and one topic. A word with a sentiment agrees
    with the tweet's sentiment with probability 0.75. Other words belong to the topic or are
    neutral. There are 2,300 words, in lists of 100 with frequencies proportional to ``1 / rank``,
    and each has a Gaussian vector. A tweet's features, ``float32[dim]``, are the mean of its words'
    vectors. A linear classifier of all clients' tweets reaches an accuracy of about 73 % if `dim`
    is 200.

    The first clients do not change when `num_clients` grows.

    Args:
      num_clients: N, the number of clients.
      dim: d, the length of a word's vector.
      min_examples: the minimum number of tweets per client, to which a draw from LogNormal(3, 1),
        rounded down, is added.
      test_fraction: the fraction of each client's tweets for testing.
      seed: the seed of all draws.

    Raises:
      ValueError: if an argument is out of range.

    Example:
      >>> data = surrogate_tweets(3, dim=10, min_examples=20)
      >>> data.name, data.kind, data.train.examples[0].shape[1:], data.train.min_count >= 12
      ('invented tweets', 'surrogate', (10,), True)
    """
    check_min_examples("min_examples", min_examples)
    rngs = map(generator, seed_sequence(seed).spawn(9))
    counts = min_examples + next(rngs).lognormal(3, 1, num_clients).astype(np.int64)
    train, test = split_parts(consecutive(counts), test_fraction=test_fraction, seed=seed)
    owner = np.repeat(np.arange(num_clients), counts)
    positive = next(rngs).beta(2, 2, num_clients)
    topics = next(rngs).dirichlet(np.full(_TOPICS, 0.3), num_clients).cumsum(axis=1)
    telling = next(rngs).uniform(*_TELLING, num_clients)
    y = (next(rngs).random(len(owner)) < positive[owner]).astype(np.int32)
    topic = (next(rngs).random((len(owner), 1)) > topics[owner, :-1]).sum(axis=1)
    table = next(rngs).standard_normal(((_SENTIMENT + _SHARED + _TOPICS) * _WORDS, dim))
    lengths = next(rngs).integers(4, 24, len(owner), endpoint=True)
    words = _invented_words(y, topic, telling[owner], lengths, next(rngs))
    x = _means(table.astype(np.float32), words, lengths)
    pool = Pool("invented tweets", "surrogate", 2, (x, y), (x, y))
    return federate(pool, train, test)


def _labels(
    skew: Float[np.ndarray, "examples attributes"], rng: Rng
) -> Int32[np.ndarray, "examples attributes"]:
    # Threshold ranks rather than values, so that exactly half of the examples have the attribute.
    score = skew + rng.standard_normal(skew.shape)
    rank = score.argsort(axis=0).argsort(axis=0)
    return (rank >= len(score) // 2).astype(np.int32)


def _render(
    field: Float[np.ndarray, "images field"],
    tint: Float[np.ndarray, "images 3"],
    image_size: int,
    rng: Rng,
) -> UInt8[np.ndarray, "images size size 3"]:
    up = _upsampling(image_size)
    rows = np.tensordot(field.astype(np.float32).reshape(-1, _GRID, _GRID, 3), up, (1, 1))
    shape = (len(field), image_size, image_size, 3)
    pixels = rng.standard_normal(shape, dtype=np.float32)
    pixels *= _PIXEL_NOISE
    pixels += _CONTRAST * np.tensordot(rows, up, (1, 1)).transpose(0, 2, 3, 1)
    pixels += (127.5 + _TINT * tint).astype(np.float32)[:, None, None]
    return np.rint(np.clip(pixels, 0, 255, out=pixels), out=pixels).astype(np.uint8)


def _upsampling(image_size: int) -> Float32[np.ndarray, "size grid"]:
    # Interpolate linearly between the grid points, which span the image.
    at = np.linspace(0, _GRID - 1, image_size)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(_GRID))).astype(np.float32)


def _invented_words(
    y: np.ndarray, topic: PerTweet, telling: np.ndarray, lengths: PerTweet, rng: Rng
) -> Int64[np.ndarray, " words"]:
    # Return word indices, tweet by tweet. The first two lists carry sentiment, and the third is
    # neutral.
    tweet = np.repeat(np.arange(len(lengths)), lengths)
    kind, which, place = rng.random((len(tweet), 3)).T
    lists = np.where(which < 0.5, _SENTIMENT, _SENTIMENT + _SHARED + topic[tweet])
    lists = np.where(
        kind < telling[tweet], np.where(which < _CLARITY, y[tweet], 1 - y[tweet]), lists
    )
    frequency = (1 / np.arange(1, _WORDS + 1)).cumsum()
    rank = np.searchsorted(frequency / frequency[-1], place, side="right")
    return lists * _WORDS + rank


def _means(
    table: Float32[np.ndarray, "vocabulary dim"],
    words: Int64[np.ndarray, " words"],
    lengths: PerTweet,
) -> Float32[np.ndarray, "tweets dim"]:
    # Add in word order, so that results are bitwise identical on every machine.
    x = np.zeros((len(lengths), table.shape[1]), np.float32)
    starts = np.cumsum(lengths) - lengths
    for first in range(0, len(lengths), _BLOCK_TWEETS):
        block = slice(first, first + _BLOCK_TWEETS)
        for place in range(lengths[block].max()):
            longer = np.flatnonzero(lengths[block] > place)
            x[first + longer] += table[words[starts[first + longer] + place]]
        x[block] /= lengths[block, None].astype(np.float32)
    return x
