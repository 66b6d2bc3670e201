"""Writes the tables and the picture of the page about capabilities from `capabilities.json`.

Run `python docs/capabilities.py`, after `fedjax-mm --no-cache bench capabilities W2 W3 --out
docs/images/capabilities.json` has measured them anew.
"""

from pathlib import Path

from fedjax_mm.cli.costs import Costs, draw, markdown
from fedjax_mm.plots import save_figure
from fedjax_mm.tools.files import load_json

HERE = Path(__file__).parent
PAGE = HERE / "concepts" / "capabilities.md"
FIRST, LAST = "<!-- made by docs/capabilities.py -->\n", "<!-- end -->\n"


def page(costs):
    """Returns the page with these tables instead of its own."""
    before, _, rest = PAGE.read_text().partition(FIRST)
    _, _, after = rest.partition(LAST)
    return f"{before}{FIRST}\n{markdown(costs)}\n{LAST}{after}"


def saved():
    """Returns the costs of the page."""
    return Costs.from_json(load_json(HERE / "images" / "capabilities.json"))


if __name__ == "__main__":
    PAGE.write_text(page(saved()))
    save_figure(draw(saved()), HERE / "images" / "capabilities.png")
