"""Differences between results with the safe setting of XLA's fusions and with XLA's default.

`python -m benchmarks.fusions ITEM [OPTIONS]` runs `fedjax-mm reproduce ITEM OPTIONS` twice and
prints, for each variable that differs, the largest difference relative to its largest value.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from fedjax_mm import open_result

# The import sets the flag, and XLA reads it later, when JAX starts its first backend.
CODE = "import os\nfrom fedjax_mm import cli\n{}\ncli.main()"
SETTINGS = {
    "safe": CODE.format("assert 'INDIVIDUAL_DOT' in os.environ['XLA_FLAGS']"),
    "default": CODE.format("os.environ.pop('XLA_FLAGS')"),
}


def results(item, options):
    """The measured numbers by setting."""
    with tempfile.TemporaryDirectory() as place:
        for name, code in SETTINGS.items():
            words = ["--no-cache", "reproduce", item, "--out", str(Path(place, name)), *options]
            ended = subprocess.run([sys.executable, "-c", code, *words], check=False)
            if ended.returncode not in (0, 3):
                sys.exit(f"{item} with {name} fusions ended with exit code {ended.returncode}")
        return [open_result(Path(place, name, item)).load() for name in SETTINGS]


def difference(x, y):
    """The largest difference relative to the largest value; infinite if NaN are elsewhere."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    if (np.isnan(x) != np.isnan(y)).any():
        return np.inf
    return np.nanmax(np.abs(x - y), initial=0) / max(np.nanmax(np.abs(x), initial=0), 1e-300)


def main(item, *options):
    safe, default = results(item, options)
    numbers = {name: x for name, x in safe.data_vars.items() if x.dtype.kind in "fiu"}
    found = {name: difference(x, default[name]) for name, x in numbers.items()}
    for name, value in sorted(found.items(), key=lambda each: -each[1]):
        if value:
            print(f"{item} {name}: {value:.1e}")
    print(f"{item} {' '.join(options)}: {max(found.values()):.1e} of {len(found)} variables")


if __name__ == "__main__":
    main(*sys.argv[1:])
