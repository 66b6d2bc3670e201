"""Tables 3 and 5: GM-Appeal and preferred-model accuracy of locally tuned models."""

from collections.abc import Iterator, Mapping

import xarray as xr

from fedjax_mm.claims import Evidence, at_least, fact, more
from fedjax_mm.papers.cho2022 import comparison
from fedjax_mm.papers.cho2022.comparison import item, lead, preferred
from fedjax_mm.papers.cho2022.grid import OURS, Comparison, clustered
from fedjax_mm.papers.cho2022.table1 import APPEAL
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import Ruling, ruling, under
from fedjax_mm.papers.schema import Reading

BASELINES = ("FedAvg", "FedProx", "SCAFFOLD", "PerFedAvg", "MW-Fed")

_OTHERS = ("FedAvg", "FedProx", "PerFedAvg", "MW-Fed")  # the table omits SCAFFOLD
_SEEN, _UNSEEN = ("preferred-model accuracy, seen", "preferred-model accuracy, unseen")
_LEAST = 10.0
_UP_TO = {"fmnist": (27.0, 17.0), "sent140": (28.0, 4.0)}  # seen, unseen; section 5.1


def rules_of_appeal(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling | Reading]:
    """Judges MaxFL's leads, both measured and in the paper's table."""
    yield from leads(measured)
    if (other := comparison.selected(measured, "accuracy")) is not None:
        yield from under(comparison.BY_ACCURACY, "maxfl-table3", leads(other))
    papers = published("maxfl-table3")["values"]
    sent140 = _printed(papers["sent140"])
    yield ruling(
        "at-least-10-sent140",
        *(_least(each, f"printed, {who}") for who, each in sent140.items()),
    )
    yield ruling(
        "up-to",
        *(
            _largest(each, up_to, f"printed, {data}, {who}")
            for data, numbers in _UP_TO.items()
            for up_to, (who, each) in zip(numbers, _printed(papers[data]).items(), strict=True)
        ),
        about="over all methods except SCAFFOLD, as the authors seem to count",
    )


def leads(measured: xr.Dataset) -> Iterator[Ruling]:
    """Judges MaxFL's measured leads."""
    appeal = lead(measured, BASELINES, *APPEAL)
    yield ruling("at-least-10", at_least(appeal, _LEAST, form=".1f"))
    yield ruling("above-perfedavg", more(appeal.sel(algorithm=["PerFedAvg"]), form=".1f"))


def _printed(table: Mapping[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    """MaxFL's published leads over each baseline, for seen and unseen clients."""
    return {
        who: {name: table[OURS][i] - table[name][i] for name in BASELINES}
        for i, who in enumerate(("seen", "unseen"))
    }


def _least(leads: Mapping[str, float], name: str) -> list[Evidence]:
    nearest = min(leads, key=leads.__getitem__)
    text = f"least lead {leads[nearest]:g}, over {nearest}"
    return fact(leads[nearest] >= _LEAST, text, name)


def _largest(leads: Mapping[str, float], up_to: float, name: str) -> list[Evidence]:
    leads = {method: lead for method, lead in leads.items() if method != "SCAFFOLD"}
    farthest = max(leads, key=leads.__getitem__)
    text = f"largest lead {leads[farthest]:g}, over {farthest}, against {up_to:g}"
    return fact(abs(leads[farthest] - up_to) <= 1, text, name)


def rules_of_accuracy(measured: xr.Dataset, settings: Comparison) -> Iterator[Ruling]:
    """Judges preferred-model accuracies and the appeal to unseen clients."""
    unseen, appeal = (lead(measured, _OTHERS, name) for name in (_UNSEEN, APPEAL[1]))
    seen, hardly = (preferred(measured, _OTHERS, name, or_same=True) for name in (_SEEN, _UNSEEN))
    yield ruling("seen-same-or-higher", seen)
    behind = unseen.sel(algorithm=["FedProx"])
    yield ruling(
        "fedprox-slightly-higher",
        more((-behind).assign_coords(algorithm=["FedProx minus MaxFL"])),
        at_least(
            behind.assign_coords(algorithm=["MaxFL minus FedProx, slightly"]), -comparison.EQUAL
        ),
        more(appeal.sel(algorithm=["FedProx"]), form=".1f"),
        about="the appeal of 0.46 is PerFedAvg's in the paper's own Table 3; FedProx has 0.41",
    )
    yield ruling("loses-very-little", hardly, more(appeal, form=".1f"))


# The settings are equal, so that both tables show the same runs, which are computed once.
SETTINGS = clustered(*BASELINES, OURS, tuning_steps=5)
_ACCURACY = ("preferred_accuracy", "unseen_preferred_accuracy", "unseen_appeal")

ITEMS = (
    item("maxfl-table3", SETTINGS, ("appeal", "unseen_appeal"), rules_of_appeal),
    item("maxfl-table5", SETTINGS, _ACCURACY, rules_of_accuracy),
)
"""Tables 3 and 5."""
