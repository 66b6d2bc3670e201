"""Table 3 with the weights of Algorithm 1, line 8: what a client's weight decides.

Under ``q = s (1 - s)`` a client far above its threshold weighs next to nothing, as one far below it
does. Where labels are clustered such clients are given up, and the appeal falls. Under ``q = s``
they weigh most.
"""

from functools import partial

from fedjax_mm.papers.cho2022.comparison import exceeds, item
from fedjax_mm.papers.cho2022.grid import METHODS, Comparison, methods

_SIGMOID = "MaxFL with q = s"

ITEMS = (
    item(
        id="maxfl-weights",
        title="Table 3 with MaxFL's weights q = s beside q = s (1 - s)",
        metrics=("appeal", "unseen_appeal"),
        settings=Comparison(
            tuning_steps=5,
            methods=methods("FedAvg", "MaxFL")
            | {_SIGMOID: {**METHODS["MaxFL"], "weight": "sigmoid"}},
        ),
        claims=partial(exceeds, ours=_SIGMOID),
    ),
)
"""How Table 3 depends on the clients' weights."""
