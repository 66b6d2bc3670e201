"""How often `settle` errs, and how many seeds it takes, for three laws of the samples.

    python -m benchmarks.settling --experiments 20000

Each experiment adds seeds until "the mean is above 0.5" is decided, for samples with a standard
deviation of 1 and a mean at the margin, 0.5, or at twice the margin, 1.0. Rows have the percentages
of experiments that were supported and contradicted, and the mean number of seeds. At the margin
both are errors. A fixed design is one look with the seeds that support 90 %.
"""

import argparse
from collections.abc import Callable

import numpy as np

from fedjax_mm.claims.evidence import quantile, unseen

LAWS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "normal": lambda rng, size: rng.normal(size=size),
    "exponential": lambda rng, size: rng.exponential(size=size) - 1,
    "mirrored exponential": lambda rng, size: 1 - rng.exponential(size=size),
    "two humps": lambda rng, size: (
        np.where(rng.random(size) < 0.3, 1.5, -0.45 / 0.7) + 0.1 * rng.normal(size=size)
    ),
}
MARGIN, BLOCK, MOST, LEVEL = 0.5, 16, 512, 0.05


def decided(samples: np.ndarray, level: float) -> np.ndarray:
    """The sides of the margin that one look decides, 1, -1 or 0, as `claims.more` does."""
    size, mean = samples.shape[1], samples.mean(1)
    if unseen(size) >= level:
        return np.zeros(len(samples), int)
    centred = samples - mean[:, None]
    variance = (centred**2).mean(1)
    skewness = (centred**3).mean(1) / variance**1.5
    t = (mean - MARGIN) / np.sqrt(variance / (size - 1))
    is_above = t > quantile(size, level, -skewness)
    is_below = -t > quantile(size, level, skewness)
    return is_above.astype(int) - is_below


def settled(samples: np.ndarray, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
    """The verdict of each experiment, and the seeds that it took."""
    found = np.zeros(len(samples), int)
    seeds = np.full(len(samples), samples.shape[1])
    look, size = 0, BLOCK
    while size <= samples.shape[1]:
        is_open = found == 0
        spent = level / 2 / ((look + 1) * (look + 2))
        found[is_open] = decided(samples[is_open, :size], spent)
        seeds[is_open & (found != 0)] = size
        look, size = look + 1, 2 * size
    return found, seeds


def fixed(samples: np.ndarray, share: float, level: float = LEVEL) -> int:
    """The smallest number of seeds, fixed before, that supports this share of experiments."""
    for size in range(BLOCK, samples.shape[1] + 1, 2):
        if np.mean(decided(samples[:, :size], level / 2) > 0) >= share:
            return size
    return samples.shape[1]


def table(experiments: int) -> list[tuple[str, float, float, float, float, float, int]]:
    """A row for each law: errors at the margin, then decisions and seeds at twice the margin."""
    rows = []
    for number, (law, draw) in enumerate(LAWS.items()):
        rng = np.random.default_rng(number)
        scale = 1.0 if law != "two humps" else 1 / np.sqrt(0.3 * 1.5**2 + 0.45**2 / 0.7 + 0.01)
        noise = scale * draw(rng, (experiments, MOST))
        at_margin, _ = settled(MARGIN + noise)
        beyond, seeds = settled(2 * MARGIN + noise)
        same = fixed(2 * MARGIN + noise[:2000], 0.9)
        shares = [np.mean(at_margin > 0), np.mean(at_margin < 0), np.mean(beyond > 0)]
        shares.append(np.mean(beyond < 0))
        rows.append((law, *(100 * float(x) for x in shares), float(seeds.mean()), same))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--experiments", type=int, default=20_000)
    print("| law | supported, contradicted at the margin | at twice the margin | seeds | fixed |")
    print("|---|---|---|---|---|")
    for law, above, below, right, wrong, seeds, same in table(parser.parse_args().experiments):
        errors = f"{above:.2f} %, {below:.2f} %"
        print(f"| {law} | {errors} | {right:.2f} %, {wrong:.2f} % | {seeds:.0f} | {same} |")
