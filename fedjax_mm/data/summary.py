"""Statistics of a partition: sizes, and the labels of clients."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from fedjax_mm.checks.annotations import checked


class PartitionSummary(NamedTuple):
    """Statistics of a partition, with p_k the label proportions of client k.

    Attributes:
      labels: the labels, in order.
      counts: the number of examples of each client and label.
      num_examples: n_k, the number of examples of each client.
      present: the number of labels that a client has.
      effective: exp(H_k), the effective number of labels, with the entropy H_k of p_k in nats.
      effective_squares: 1 / sum_c p_kc^2, the effective number by squares.
      distance: TV_k = 1/2 sum_c |p_kc - p_c|, the total variation distance from the proportions p
        of all clients together; sum_c |p_kc - p_c|, which Zhao et al. call EMD, is twice this.
      mean_distance: sum_k n_k TV_k / n, from 0 (alike) to less than 1.
      label_clients: the number of clients that have a label.
      label_share: the largest share of a label's examples that one client has.

    Clients without examples have NaN for ratios.
    """

    labels: np.ndarray
    counts: Int64[np.ndarray, "clients labels"]
    num_examples: Int64[np.ndarray, " clients"]
    present: Int64[np.ndarray, " clients"]
    effective: Float[np.ndarray, " clients"]
    effective_squares: Float[np.ndarray, " clients"]
    distance: Float[np.ndarray, " clients"]
    mean_distance: float
    label_clients: Int64[np.ndarray, " labels"]
    label_share: Float[np.ndarray, " labels"]

    def __repr__(self) -> str:
        """The summary in a line of text for each idea."""
        least, middle, most = np.percentile(self.num_examples, [0, 50, 100])
        holders = self.label_clients
        return (
            f"{len(self.num_examples)} clients, {(self.num_examples == 0).sum()} of them empty, "
            f"{len(self.labels)} labels\n"
            f"examples per client: {least:g} to {most:g}, median {middle:g}\n"
            f"effective labels per client (exp of the entropy): median "
            f"{np.nanmedian(self.effective):.3g}\n"
            f"distance of labels from all (total variation): {np.nanmin(self.distance):.3g} to "
            f"{np.nanmax(self.distance):.3g}, mean {self.mean_distance:.3g}\n"
            f"clients per label: {holders.min()} to {holders.max()}; largest share of a label: "
            f"{self.label_share.max():.3g}"
        )


@checked
def partition_summary(labels: np.ndarray, parts: Sequence[np.ndarray]) -> PartitionSummary:
    """Measures how unequal the clients of a partition are in size and in labels.

    Args:
      labels: ``[examples]``.
      parts: each client's rows; a client may be empty, and clients may share rows.

    Raises:
      ValueError: if labels have several axes, or no client has an example.

    Example:
      >>> labels = np.repeat([0, 1, 2], [12, 11, 7])
      >>> parts = [np.r_[:8, 12:14], np.r_[14:19, 23:28], np.r_[8:12, 19:23, 28:30]]
      >>> partition_summary(labels, parts)
      3 clients, 0 of them empty, 3 labels
      examples per client: 10 to 10, median 10
      effective labels per client (exp of the entropy): median 2
      distance of labels from all (total variation): 0.0333 to 0.4, mean 0.278
      clients per label: 2 to 3; largest share of a label: 0.714

    Reference:
      Zhao et al., "Federated learning with non-IID data", 2018, for twice the distance.
    """
    if np.ndim(labels) != 1:
        raise ValueError(f"labels has shape {np.shape(labels)}; give one label for each example")
    if not sum(map(len, parts)):
        raise ValueError("no client has an example; give each client's rows")
    names, codes = np.unique(labels, return_inverse=True)
    counts = np.stack(
        [np.bincount(codes[np.asarray(rows, np.int64)], minlength=len(names)) for rows in parts]
    )
    sizes_of, total = counts.sum(1), counts.sum()
    of_label = counts.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = counts / sizes_of[:, None]
        entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0 * p).sum(1)
        distance = np.abs(p - of_label / total).sum(1) / 2
        squares = 1 / (p**2).sum(1)
        share = counts.max(0) / of_label
    return PartitionSummary(
        labels=names,
        counts=counts,
        num_examples=sizes_of,
        present=(counts > 0).sum(1),
        effective=np.exp(entropy),
        effective_squares=squares,
        distance=distance,
        mean_distance=float(np.nansum(sizes_of * distance) / total),
        label_clients=(counts > 0).sum(0),
        label_share=share,
    )
