"""A dataset as a federation sees it: every client's training and test examples."""

from typing import Literal, NamedTuple

from fedjax_mm.data.clients import ClientData

Kind = Literal["real", "synthetic", "surrogate"]
"""Where data comes from; a surrogate stands in for real data that is not there."""


class FederatedData(NamedTuple):
    """Every client's examples ``(features, labels)``; all sources return one.

    Attributes:
      name: of the source, for titles and manifests.
      kind: real, synthetic or surrogate.
      num_classes: C; labels are 0 ... C - 1.
      train: ``(x [examples, ...], y int32[examples])`` of N clients. Images are uint8 0 ... 255 with
        channels last; other features are float32.
      test: the same of the same N clients, or of one pool that stands for all.
    """

    name: str
    kind: Kind
    num_classes: int
    train: ClientData
    test: ClientData
