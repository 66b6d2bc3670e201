# The package loads each of these names when it is first used: `__init__.py` reads this file.

from . import partition
from .celeba import load_celeba
from .clients import ClientData, client_data, flat_client_data
from .digits import digits
from .federate import federate, flip_labels
from .federated import FederatedData, Pool, stack_data
from .idx import load_idx
from .leaf import load_leaf
from .sent140 import load_sent140
from .surrogate import surrogate_faces, surrogate_tweets
from .synthetic import synthetic

__all__ = [
    "ClientData",
    "FederatedData",
    "Pool",
    "client_data",
    "digits",
    "federate",
    "flat_client_data",
    "flip_labels",
    "load_celeba",
    "load_idx",
    "load_leaf",
    "load_sent140",
    "partition",
    "stack_data",
    "surrogate_faces",
    "surrogate_tweets",
    "synthetic",
]
