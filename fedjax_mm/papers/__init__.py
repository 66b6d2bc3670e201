"""One module per paper: its figures and tables as data, and the claims to check."""

from fedjax_mm.papers import (
    cohort_theory,
    maxfl_appeal,
    maxfl_shape,
    maxfl_tables,
    mfa,
    mfa_gain,
    mfa_tables,
    mfa_theory,
    mfa_theory_gain,
)
from fedjax_mm.papers.reproduction import Claim, Judgement, Reproduction

REPRODUCTIONS: dict[str, Reproduction] = {
    item.id: item
    for item in (
        *mfa.REPRODUCTIONS,
        *mfa_gain.REPRODUCTIONS,
        *mfa_tables.REPRODUCTIONS,
        *maxfl_tables.REPRODUCTIONS,
        *(maxfl_appeal.FIGURE_5A, maxfl_shape.FIGURE_5B),
        *(maxfl_appeal.FIGURE_6, maxfl_shape.FIGURE_8),
        *mfa_theory.REPRODUCTIONS,
        *mfa_theory_gain.REPRODUCTIONS,
        *cohort_theory.REPRODUCTIONS,
    )
}
"""Every reproduction by its id, in the papers' order."""

BOUNDS: dict[str, Reproduction] = {"mfa": mfa_theory.BOUNDS}
"""What `fedjax-mm bounds` shows, by paper."""

__all__ = ["BOUNDS", "REPRODUCTIONS", "Claim", "Judgement", "Reproduction"]
