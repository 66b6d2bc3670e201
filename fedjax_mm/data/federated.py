"""A dataset as a federation sees it: every client's training and test examples."""

from typing import Literal, NamedTuple

import numpy as np

from fedjax_mm.data.clients import ClientData

Kind = Literal["real", "synthetic", "surrogate"]
"""Where data comes from; a surrogate stands in for real data that is not there."""


class FederatedData(NamedTuple):
    """Every client's examples ``(features, labels)``; all sources return one.

    Attributes:
      name: of the source, for titles and manifests.
      kind: real, synthetic or surrogate.
      num_classes: C; labels are 0 ... C - 1. Of several binary attributes y has one column each,
        ``int32[examples, attributes]``, and C is 2.
      train: ``(x [examples, ...], y int32[examples])`` of N clients. Images are uint8 0 ... 255
        with channels last; other features are float32.
      test: the same of the same N clients, or of one pool that stands for all.
    """

    name: str
    kind: Kind
    num_classes: int
    train: ClientData
    test: ClientData


class Pool(NamedTuple):
    """A dataset not yet dealt to clients; `federate` deals it.

    Attributes:
      name: of the source.
      kind: real, synthetic or surrogate.
      num_classes: C; labels are 0 ... C - 1.
      train: ``(x [examples, ...], y int32[examples])``, NumPy arrays. Images are uint8 0 ... 255
        ``[examples, height, width, channels]``.
      test: the same.
    """

    name: str
    kind: Kind
    num_classes: int
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
