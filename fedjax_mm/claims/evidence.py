"""Two one-sided tests of a comparison, from samples with one number per seed.

One test is for the comparison and one against it:

- A mean is tested by Student's t reduced by ``c 5 (g + 40 / n) / sqrt(n)`` with
  ``c = (1 + 2 z^2) / 19``. Here g is the skewness of the n samples towards the margin, if that is
  positive, and z is the normal quantile of the test's level. Student's t alone is exact for normal
  samples only: at 0.135 %, 20 exponential samples err with probability 1.9 %, and with the reduced
  t 0.09 %. The form in z is that of t's Cornish-Fisher expansion for skewed laws (Johnson,
  "Modified t tests and confidence intervals for asymmetrical populations", 1978), and the two
  numbers come from simulations of normal, exponential and two-humped laws, with 16 to 400 seeds and
  z from 2 to 3.6.
- Few samples may miss a whole hump. If it has 30 % of the mass, n - 1 samples miss it with
  probability 0.7^(n - 1), which must be below the level, too. At 0.135 % it takes 20 seeds.
- A median is decided by the sign test, which is exact for every law.
- Samples that are all equal decide without an error. If they lie exactly at the margin, "at least",
  "at most" and "within" hold and "more than" does not.

If a sample's mean and median are more than a standard error apart, the evidence has both. Samples
that include NaN or an infinite number, because a run diverged or missed a target, test nothing,
unless these samples cannot change the verdict on a median.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedjax_mm.claims.parts import FEWEST, Part, Verdict
from fedjax_mm.metrics import standard_error
from fedjax_mm.results.labels import number, places

LEVEL = math.erfc(3 / math.sqrt(2)) / 2
"""The error probability of one test of a statement: the tail beyond 3 standard errors."""

_ONE_ERROR = math.erfc(1 / math.sqrt(2)) / 2  # the tail beyond 1 standard error
_MOST_SEEDS = 10_000  # the largest number reported as needed to settle a statement
_ROUNDOFF = 1e-9  # relative difference of numbers that count as equal
_SEEN = 0.7  # the mass of the hump that few samples see alone

Interval = Callable[[float], tuple[float, float]]
Needed = Callable[[float], int | None]


class Evidence(NamedTuple):
    """Two one-sided tests of one comparison.

    Attributes:
      name: the name of the comparison, derived from its coordinates.
      text: the numbers, as text.
      supports: the p-value of the evidence for the comparison, or NaN if it is not tested.
      contradicts: the p-value of the evidence against the comparison.
      seeds: the number of samples, or None if nothing was random.
      needed: returns the number of seeds with which the smaller p-value would be below a level.
      margin: the limit of the comparison, as text.
      center: the mean or the median.
      interval: returns the limits beyond each of which the center is with a probability of at most
        a level.
      region: the limits between which the comparison holds.
      unseen: the probability that all samples are of one hump.
      form: the format of numbers.
      unit: the unit of the numbers, such as "points".
      is_paired: whether samples were subtracted seed by seed.
    """

    name: str
    text: str
    supports: float
    contradicts: float
    seeds: int | None = None
    needed: Needed | None = None
    margin: str = ""
    center: float = math.nan
    interval: Interval | None = None
    region: tuple[float, float] = (-math.inf, math.inf)
    unseen: float = 0.0
    form: str = ".2f"
    unit: str = ""
    is_paired: bool = False

    def verdict(self, levels: tuple[float, float], unseen: float) -> Verdict:
        """Decides between for and against.

        Args:
          levels: the probabilities of an error in favor of the comparison, and against it.
          unseen: the probability of having seen only one hump.
        """
        if math.isnan(self.supports) or math.isnan(self.contradicts):
            return "not tested"
        if self.unseen < unseen:
            if self.supports < levels[0]:
                return "supported"
            if self.contradicts < levels[1]:
                return "contradicted"
        return "not settled"

    def part(self, levels: tuple[float, float], unseen: float) -> Part:
        """The verdict as a file stores it, see `verdict`."""
        verdict, leans, needed = self.verdict(levels, unseen), "", None
        if verdict == "not settled":
            is_for = self.supports < self.contradicts
            if min(self.supports, self.contradicts) < _ONE_ERROR:
                leans = "for" if is_for else "against"
            if self.needed and (self.seeds or 0) >= FEWEST:
                needed = self.needed(levels[not is_for])
                if needed and self.unseen:
                    needed = max(needed, _fewest(unseen))
        about: Any = {"margin": self.margin, "seeds": self.seeds, "needed": needed, "leans": leans}
        return Part(name=self.name, verdict=verdict, evidence=self.text, **about)


def combined(verdicts: Iterable[str]) -> Verdict:
    """The verdict on a claim: supported if all parts are, contradicted if one is."""
    found = set(verdicts)
    order: tuple[Verdict, ...] = ("contradicted", "not tested", "not settled", "supported")
    return next((verdict for verdict in order if verdict in found), "not tested")


def rows_of(samples: xr.DataArray) -> list[tuple[str, np.ndarray]]:
    """The samples ``[seeds]`` of every comparison, with its coordinates as text.

    Raises:
      ValueError: if the samples have no seeds.
    """
    if "seed" not in samples.dims:
        raise ValueError(
            f"the samples are over {', '.join(map(str, samples.dims)) or 'nothing'}; give one for "
            "each seed, over the dimension seed, or use fact for what is not random"
        )
    dims = [str(dim) for dim in samples.dims if dim != "seed"]
    values = samples.transpose(*dims, "seed").values.astype(float)
    names = [", ".join(words) for _, words in places(samples, *dims)]
    return list(zip(names, values.reshape(len(names), -1), strict=True))


def each_of(samples: xr.DataArray, value: Any) -> np.ndarray:
    """A number, or an array of them, for every comparison in the order of `rows_of`."""
    one = samples.isel(seed=0, drop=True)
    found: np.ndarray = xr.DataArray(value).broadcast_like(one).transpose(*one.dims).values.ravel()
    return found


def mean_test(
    name: str, samples: np.ndarray, margin: float, form: str = ".2f", *, side: int, tie: bool
) -> Evidence:
    """Tests whether a mean is above (side 1) or below (-1) a margin, or `tie` if all are equal."""
    size, words = len(samples), {1: ("above", "at least"), -1: ("below", "at most")}
    beyond = f"{words[side][tie]} {margin + 0:.3g}"
    region = (margin, math.inf) if side > 0 else (-math.inf, margin)
    about: Any = {"seeds": size, "margin": beyond, "region": region, "form": form}
    if not np.isfinite(samples).all():
        lost = size - int(np.isfinite(samples).sum())
        text = f"{lost} of {size} seeds diverged, did not reach the target or were left out"
        text = "not run" if lost == size and np.isnan(samples).all() else text
        return Evidence(name, text, np.nan, np.nan, **about)
    mean, error, median = samples.mean(), float(standard_error(samples)), np.median(samples)
    evidence, room = number(mean, error if size > 2 else np.nan, form), side * (mean - margin)
    about["center"] = float(mean)
    if size == 1:
        return Evidence(name, evidence, 1.0, 1.0, **about)
    roundoff = _ROUNDOFF * max(abs(mean), abs(margin))
    if error <= roundoff:
        holds = tie if abs(room) <= roundoff else room > 0
        about["interval"] = lambda level: (float(mean), float(mean))
        return Evidence(name, evidence, float(not holds), float(holds), **about)
    evidence += f" (median {median:{form}})" * bool(size > 2 and abs(mean - median) > 1.01 * error)
    effect = room / (error * math.sqrt(size))
    skewness = float(np.mean((samples - mean) ** 3) / np.mean((samples - mean) ** 2) ** 1.5)
    # A tail that was not drawn can only be on the side of the margin if it is to change the answer.
    supports, contradicts = (
        partial(_p_value, effect=sign * effect, skewness=-sign * side * skewness)
        for sign in (1, -1)
    )

    def interval(level: float) -> tuple[float, float]:
        if unseen(size) >= level:
            return -math.inf, math.inf
        low, high = (error * quantile(size, level, sign * skewness) for sign in (-1, 1))
        return float(mean - low), float(mean + high)

    about["needed"] = partial(_least, supports if room > 0 else contradicts)
    about |= {"interval": interval, "unseen": unseen(size)}
    return Evidence(name, evidence, supports(size), contradicts(size), **about)


def unseen(size: int) -> float:
    """The probability that all samples are of the larger of two humps."""
    return float(_SEEN ** (size - 1))


def _fewest(level: float) -> int:
    """The fewest seeds that see more than one hump."""
    return next(size for size in range(2, _MOST_SEEDS) if unseen(size) < level)


def quantile(size: int, level: float, skewness: Any) -> Any:
    """The t beyond which a mean is decided.

    Args:
      size: n, the number of samples.
      level: the error probability of the test.
      skewness: the sample's skewness, positive if its longer tail is on the side of the margin.
    """
    from scipy.special import ndtri, stdtrit

    # The quantile of an exponential law's t, of skewness 2, is that of a normal one's plus about
    # 10 / sqrt(n) at z = 3. A sample without its tail looks less skewed, the more so the smaller.
    scale = 5 * (1 + 2 * float(ndtri(level)) ** 2) / 19
    return scale * np.maximum(skewness + 40 / size, 0) / size**0.5 - stdtrit(size - 1, level)


def _p_value(size: int, effect: float, skewness: float) -> float:
    """The level whose quantile is t.

    Args:
      size: n, the number of samples.
      effect: t / sqrt(n), positive for the conclusion.
      skewness: see `quantile`.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtr, stdtr

    t, room = size**0.5 * effect, 5 * max(skewness + 40 / size, 0) / size**0.5
    if t <= room / 19:  # the quantile at a level of one half
        return float(np.maximum(stdtr(size - 1, -t), 0.5))

    def excess(z: float) -> float:
        return float(ndtr(-z) - stdtr(size - 1, room * (1 + 2 * z**2) / 19 - t))

    most = min(t, 37.0)  # a normal tail beyond 37 is 0
    return float(ndtr(-most if excess(most) >= 0 else -brentq(excess, 0.0, most, xtol=1e-9)))


def sign_test(
    name: str, samples: np.ndarray, by: float, top: float, form: str = ".2f", *, side: int = 1
) -> Evidence:
    """Tests whether more than half of the samples are above (side 1) or below (-1) a margin."""
    from scipy.special import bdtr, bdtrc

    size, missing = len(samples), np.isnan(samples)
    samples, beyond = side * samples, f"{'above' if side > 0 else 'below'} {by:g}"
    region = (by, math.inf) if side > 0 else (-math.inf, by)
    by *= side
    # A censored sample counts as low if its upper limit is low, and otherwise for neither side.
    is_low = top <= by
    low = int((samples < by).sum()) + int(missing.sum()) * is_low
    high, unknown = int((samples > by).sum()), int(missing.sum()) * (not is_low)
    middle = side * float(np.median(np.where(missing, -np.inf, samples)))
    median = f"{middle:{form}}" if np.isfinite(middle) else "not reached"
    text = f"median {median}, {high} of {size} seeds {beyond}"
    text += f", {int(missing.sum())} did not reach the target" if missing.any() else ""
    # Use P(X >= k) for X ~ Binomial(size, 1/2). Ties and unknown samples count for neither side.
    supports, contradicts = (float(bdtrc(k - 1, size, 0.5)) if k else 1.0 for k in (high, low))
    if high == low == unknown == 0:  # all samples equal the margin, so none is above it
        supports, contradicts = 1.0, 0.0
    # Unknown samples matter only if one of the tests would decide with all of them on its side.
    best = float(bdtrc(max(high, low) + unknown - 1, size, 0.5))
    if unknown and min(supports, contradicts) >= LEVEL > best:
        supports = contradicts = np.nan
    share = max(high, low) / size
    needed = partial(_least, lambda sizes: bdtrc(np.floor(share * sizes) - 1, sizes, 0.5))
    lows, highs = (np.sort(np.where(missing, x, side * samples)) for x in (-np.inf, np.inf))

    def interval(level: float) -> tuple[float, float]:
        # The median is below the k-th smallest sample with probability P(X < k).
        k = int((bdtr(np.arange(size), size, 0.5) < level).sum())
        return (float(lows[k - 1]), float(highs[-k])) if k else (-math.inf, math.inf)

    about: Any = {"seeds": size, "needed": needed, "margin": f"median {beyond}", "form": form}
    about |= {"center": middle, "interval": interval, "region": region}
    return Evidence(name, text, supports, contradicts, **about)


def _least(p_value: Callable[[Any], Any], level: float) -> int | None:
    """The smallest number of seeds with a p-value below a level, or None if too large."""
    sizes = range(2, _MOST_SEEDS + 1)
    found = bisect_left(sizes, True, key=lambda size: bool(p_value(size) < level))
    return sizes[found] if found < len(sizes) else None
