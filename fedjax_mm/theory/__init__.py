"""Theorems as functions that check their hypotheses, exact moments, and bounds against runs.

problem          Problem and Rate, the symbols that the statements share
mfa, mfa_lemmas  Bhuyan, Moharir and Joshi: Theorems 1 to 3, Corollary 1, remarks; Lemmas 1 to 4
maxfl            Cho et al.: Theorem 3.1, Lemmas B.1 and B.2
mean_estimation  Cho et al.: Theorem A.1, Lemmas A.1 to A.4
cohorts          Pawlik: Theorem 1 and its corollary, eqs. (25) to (28), the completed bound
fairness         Pawlik: eqs. (1) to (8), costs of a trial
local_steps      bounds of our own: equal losses, unlike losses, an outer optimizer
constants        mu, L, Gamma, G, beta_1 and beta_2 of a task
rates            measured exponents, to compare with those of Theorems 1 and 2
moments, affine  exact moments and floors on quadratics, and proofs that methods are affine
validation       a bound against sweeps: violations, their size, and the tightest point
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
