"""Draws the picture of the front page: who trains what, beside the curves, for light and dark.

Run `python docs/front.py`; it writes `docs/images/front-light.svg` and `front-dark.svg`, the card
`card.png` that other sites show beside a link, and with the code of the page on plots `curves.png`.
"""

import re
from pathlib import Path

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from fedjax_mm import fedavg, mfa_rand, mfa_rr, sweep
from fedjax_mm.base import Look
from fedjax_mm.cli.page import shrunk
from fedjax_mm.plots import save_figure
from fedjax_mm.plots.drawing import STYLE
from fedjax_mm.sweeps import Setup
from fedjax_mm.tasks import quadratic

HERE = Path(__file__).parent
CLIENTS, MODELS, ROUNDS = 24, 12, 48
NAMES = {"MFA-Rand": mfa_rand, "MFA-RR": mfa_rr}
LOOKS = {  # text, and the colors of the two assignments
    "light": ("#1f2933", ("#d55e00", "#0072b2")),
    "dark": ("#d8dee6", ("#ff9a52", "#5cc0ff")),
}


def schedule(assignment):
    """Returns the model that each client trains in each round, ``[clients, rounds]``."""
    rng_key, state = jax.random.key(0), assignment.init(jax.random.key(0), Look())
    who = np.full((CLIENTS, ROUNDS), -1)
    for number in range(1, ROUNDS + 1):
        key = jax.random.fold_in(rng_key, number)
        cohort, state = assignment.assign(key, number, state, Look())
        who[np.asarray(cohort.clients), number - 1] = cohort.models
    return who


def build(assignment):
    """Returns one point of the sweep."""
    task = quadratic(CLIENTS, block_size=4, mu=2e-4)
    return Setup(task, fedavg(0.1, local_steps=5), NAMES[assignment](CLIENTS, MODELS))


def draw(result, look):
    """Returns the figure in the colors of a scheme."""
    text, colors = LOOKS[look]
    spread = result.excess_loss.std("seed").mean("model").rolling(round=MODELS).mean()
    shades = mpl.colormaps["twilight_shifted" if look == "light" else "twilight"]
    models = ListedColormap(shades(np.linspace(0.05, 0.95, MODELS)))
    style = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), text)
    with mpl.rc_context(STYLE | style | {"axes.edgecolor": text}):
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
        for place, (name, assignment) in enumerate(NAMES.items()):
            axes = figure.add_subplot(grid[place, 0])
            who = schedule(assignment(CLIENTS, MODELS))
            extent = (0, ROUNDS, 0, CLIENTS)
            axes.imshow(who, models, aspect="auto", extent=extent, interpolation="none")
            axes.set(ylabel="clients", xticks=[0, 12, 24, 36, 48], yticks=[0, 12, 24])
            axes.grid(visible=False)
            axes.set_title(f"{name}: who trains which model", fontsize=9, color=colors[place])
        axes.set_xlabel("round")
        axes = figure.add_subplot(grid[:, 1])
        for name, color in zip(NAMES, colors, strict=True):
            curve = spread.sel(assignment=name).isel(round=slice(MODELS, None, 6))
            axes.semilogy(curve["round"], curve, color=color, lw=1.8)
            end = (curve["round"].values[-1], curve.values[-1])
            axes.annotate(name, end, (-4, 8), textcoords="offset points", color=color, ha="right")
        axes.set_title("spread of the excess loss over 20 seeds", fontsize=9)
        axes.set_xlabel("round")
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    return figure


if __name__ == "__main__":
    result = sweep(build, {"assignment": list(NAMES)}, num_rounds=1000, num_seeds=20)
    for look in LOOKS:
        save_figure(draw(result, look), HERE / "images" / f"front-{look}.svg")
    card, path = draw(result, "light"), HERE / "images" / "card.png"
    card.set_size_inches(8, 4.2)
    card.patch.set(alpha=1, facecolor="white")
    card.suptitle("fedjax_mm: many models, one pool of clients", fontsize=14)
    card.savefig(path, dpi=150)
    path.write_bytes(shrunk(path.read_bytes(), 2**16))
    page = (HERE / "how-to" / "plots.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    path = HERE / "images" / "curves.png"
    exec(code.replace("curves.pdf", str(path)), {})
    path.write_bytes(shrunk(path.read_bytes(), 2**16))
