"""A stand-in for CelebA, which may not be redistributed: invented images of the same shape."""

import numpy as np
from jaxtyping import Float, Float32, Int, Int32, UInt8

from fedjax_mm.checks import check_count, check_positive
from fedjax_mm.data.clients import ClientData, flat_client_data
from fedjax_mm.data.federated import FederatedData

_GRID = 6  # smooth fields are drawn on so many points a side
_FIELD = _GRID * _GRID * 3
_CONTRAST = 32.0  # grey levels of a field's standard deviation
_TINT = 24.0
_PIXEL_NOISE = 12.0
_CLIENT_SHARE = 0.3  # of the background's variance
_BLOCK_IMAGES = 256  # drawn at once; the data do not depend on it


def surrogate_faces(
    num_clients: int,
    *,
    num_attributes: int = 9,
    image_size: int = 84,
    examples_per_client: tuple[int, int] = (20, 40),
    test_fraction: float = 0.2,
    signal: float = 1.5,
    label_skew: float = 0.5,
    seed: int = 0,
) -> FederatedData:
    """Images with binary attributes, in the shape of CelebA: the same pipeline, invented data.

    An image is a smooth random background, partly its client's, in its client's tint, with noise in
    each pixel, plus for every attribute a smooth pattern or its negative. The patterns are
    orthonormal and the background is white in their space, so the best linear classifier is right
    with probability about ``Phi(signal)``: 0.93 at 1.5, which takes a network many examples.

    Each attribute is balanced over all training and over all test examples (up to one example), not
    over a client's.

    Args:
      num_clients: N.
      num_attributes: the columns of y, ``int32[examples, attributes]`` of 0 and 1.
      image_size: pixels a side.
      examples_per_client: the smallest and the largest n_k, training and test together.
      test_fraction: of each client's examples.
      signal: of an attribute's pattern, in standard deviations of the background along it.
      label_skew: how much the clients' label frequencies differ; 0 is not at all.
      seed: of all draws.

    Raises:
      ValueError: if an argument is out of its range.

    Example:
      >>> data = surrogate_faces(3, num_attributes=2, image_size=16)
      >>> data.kind, data.train.examples[0].shape[1:], data.train.examples[1].shape[1:]
      ('surrogate', (16, 16, 3), (2,))
    """
    _check(num_clients, num_attributes, image_size, examples_per_client, test_fraction)
    check_positive("signal", signal)
    if not label_skew >= 0:
        raise ValueError(f"label_skew is {label_skew}; it must be 0 or more")
    streams = np.random.SeedSequence(seed).spawn(5)
    rng, *split_rngs = (np.random.Generator(np.random.PCG64(stream)) for stream in streams)
    low, high = examples_per_client
    counts = rng.integers(low, high, num_clients, endpoint=True)
    test_counts = np.clip(np.rint(test_fraction * counts).astype(np.int64), 1, counts - 1)
    patterns = np.linalg.qr(rng.standard_normal((_FIELD, num_attributes)))[0].T
    clients = rng.standard_normal((num_clients, _FIELD + 3 + num_attributes))

    def split(
        counts: Int[np.ndarray, " clients"], rng: np.random.Generator, pixels: np.random.Generator
    ) -> ClientData:
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


def _labels(
    skew: Float[np.ndarray, "examples attributes"], rng: np.random.Generator
) -> Int32[np.ndarray, "examples attributes"]:
    """The examples of the larger half of scores have the attribute."""
    score = skew + rng.standard_normal(skew.shape)
    rank = score.argsort(axis=0).argsort(axis=0)
    return (rank >= len(score) // 2).astype(np.int32)


def _render(
    field: Float[np.ndarray, "images field"],
    tint: Float[np.ndarray, "images 3"],
    image_size: int,
    rng: np.random.Generator,
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
    """Linear interpolation of the grid's points, which span the image."""
    at = np.linspace(0, _GRID - 1, image_size)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(_GRID))).astype(np.float32)


def _check(
    num_clients: int,
    num_attributes: int,
    image_size: int,
    examples_per_client: tuple[int, int],
    test_fraction: float,
) -> None:
    check_count("num_clients", num_clients)
    check_count("num_attributes", num_attributes)
    check_count("image_size", image_size)
    if num_attributes > _FIELD:
        raise ValueError(f"num_attributes is {num_attributes}; there are {_FIELD} patterns")
    if not 2 <= examples_per_client[0] <= examples_per_client[1]:
        raise ValueError(
            f"examples_per_client is {examples_per_client}; give the smallest and the largest "
            "number, 2 or more: one example for training, one for test"
        )
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction is {test_fraction}; it must lie between 0 and 1")
