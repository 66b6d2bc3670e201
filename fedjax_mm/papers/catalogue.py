"""Every reproduction by its id: its title, and its module, which is not imported.

`fedjax-mm list` reads no more than this; the papers' modules import all that they compute with.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    """A title for `fedjax-mm list`, and the module of `papers` that has the item."""

    title: str
    module: str


CATALOGUE: dict[str, Entry] = {
    "mfa-fig1": Entry(
        "MFA-Rand against MFA-RR, quadratic, M = 2, constant rate", "bhuyan2022.rand_and_rr"
    ),
    "mfa-fig2": Entry(
        "MFA-Rand against MFA-RR, quadratic, M = 2, decaying rate", "bhuyan2022.rand_and_rr"
    ),
    "mfa-fig3": Entry(
        "MFA-Rand against MFA-RR, quadratic, M = 12, constant rate", "bhuyan2022.rand_and_rr"
    ),
    "mfa-fig4": Entry(
        "MFA-Rand against MFA-RR, quadratic, M = 12, decaying rate", "bhuyan2022.rand_and_rr"
    ),
    "mfa-fig5": Entry(
        "Gain over sequential FedAvg against M for E = 1, 5, 10", "bhuyan2022.rand_and_rr"
    ),
    "mfa-fig6a": Entry("Gain against M, Synthetic(1,1)-A, all 100 clients", "bhuyan2022.gain"),
    "mfa-fig6b": Entry("Gain against M, Synthetic(1,1)-B, all 100 clients", "bhuyan2022.gain"),
    "mfa-fig6c": Entry("Gain against M, CNN on CelebA, all 96 clients", "bhuyan2022.gain"),
    "mfa-fig7a": Entry("Gain against M, Synthetic(1,1)-A, 32 of 200 clients", "bhuyan2022.gain"),
    "mfa-fig7b": Entry("Gain against M, Synthetic(1,1)-B, 32 of 200 clients", "bhuyan2022.gain"),
    "mfa-fig7c": Entry("Gain against M, CNN on CelebA, 24 of 96 clients", "bhuyan2022.gain"),
    "mfa-table4": Entry(
        "MFA-RR on nine CNNs, one for each facial attribute", "bhuyan2022.together"
    ),
    "mfa-table5": Entry(
        "MFA-RR on a logistic regression and a CNN together", "bhuyan2022.together"
    ),
    "maxfl-table1": Entry("MaxFL and six baselines where clients may leave", "cho2022.tables"),
    "maxfl-table2": Entry("MaxFL and MW-Fed under attack", "cho2022.tables"),
    "maxfl-fig3": Entry("Appeal and preferred-model accuracy over the rounds", "cho2022.tables"),
    "maxfl-fig4": Entry("Appeal and preferred-model accuracy of unseen clients", "cho2022.tables"),
    "maxfl-table3": Entry("Appeal after five local steps of tuning", "cho2022.tables"),
    "maxfl-table4": Entry("Appeal with 50, 100 and 150 steps of warm-up", "cho2022.tables"),
    "maxfl-table5": Entry("Preferred-model accuracy after local tuning", "cho2022.tables"),
    "maxfl-table6": Entry("MaxFL and q-FFL, which is fair", "cho2022.tables"),
    "maxfl-fig7": Entry("Mean test and training losses over the rounds", "cho2022.tables"),
    "maxfl-fig5a": Entry("GM-Appeal of two clients, with both bounds", "cho2022.appeal"),
    "maxfl-fig5b": Entry("MaxFL's objective of two clients and its local minima", "cho2022.shape"),
    "maxfl-fig6": Entry(
        "How many of three clients are satisfied, mean estimation", "cho2022.appeal"
    ),
    "maxfl-fig8": Entry("MaxFL's adaptive learning rate against a constant one", "cho2022.shape"),
    "cb-table1": Entry("What trials with cohorts of different sizes cost", "pawlik2020.costs"),
    "cb-fig1": Entry("Rounds to an accuracy against the size of cohorts", "pawlik2020.rounds"),
    "cb-fig2": Entry("Best accuracy of every run, by cohort size", "pawlik2020.accuracy"),
    "cb-fig3": Entry("Mean best accuracy at constant cost, by cohort size", "pawlik2020.accuracy"),
    "cb-optimal-cohort": Entry(
        "The best cohort size at constant cost, beside C*", "pawlik2020.optimum"
    ),
    "theory-mfa-rand": Entry("Theorem 1's bound beside MFA-Rand's error", "bhuyan2022.bounds"),
    "theory-mfa-rr": Entry("Corollary 1's bound beside MFA-RR's error", "bhuyan2022.bounds"),
    "theory-gain": Entry("Theorem 3's gain beside measured gains", "bhuyan2022.theorem_3"),
    "theory-cohort-noise": Entry(
        "The excess noise of cohorts beside measured cohorts", "pawlik2020.noise"
    ),
    "multi-maxfl": Entry("Three models at once, each of which wants to appeal", "multi_maxfl"),
    "bounds-mfa": Entry("bounds and errors of MFA-Rand and MFA-RR", "bhuyan2022.bounds"),
}
"""In the papers' order; then what no paper has, and what only `fedjax-mm bounds` shows."""

BOUNDS: dict[str, str] = {"mfa": "bounds-mfa"}
"""What `fedjax-mm bounds` shows: an id, by paper."""
