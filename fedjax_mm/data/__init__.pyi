# The package loads each of these names when it is first used: `__init__.py` reads this file.

from . import partition
from .celeba import check_celeba, load_celeba
from .cifar import check_cifar, load_cifar
from .clients import ClientData, client_data, flat_client_data, shared_client_data
from .digits import digits
from .federate import federate, flip_labels, flipped_clients, pooled
from .federated import FederatedData, Pool, stack_data
from .idx import check_idx, load_idx
from .leaf import load_leaf
from .npz import check_npz, load_npz
from .rows import from_rows
from .sent140 import check_sent140, load_sent140
from .shifts import noisy_features, rotated
from .summary import PartitionSummary, partition_summary
from .surrogate import surrogate_faces, surrogate_tweets
from .synthetic import synthetic

__all__ = [
    "ClientData",
    "FederatedData",
    "PartitionSummary",
    "Pool",
    "check_celeba",
    "check_cifar",
    "check_idx",
    "check_npz",
    "check_sent140",
    "client_data",
    "digits",
    "federate",
    "flat_client_data",
    "flip_labels",
    "flipped_clients",
    "from_rows",
    "load_celeba",
    "load_cifar",
    "load_idx",
    "load_leaf",
    "load_npz",
    "load_sent140",
    "noisy_features",
    "partition",
    "partition_summary",
    "pooled",
    "rotated",
    "shared_client_data",
    "stack_data",
    "surrogate_faces",
    "surrogate_tweets",
    "synthetic",
]
