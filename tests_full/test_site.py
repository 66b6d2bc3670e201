"""The built site: its search, its pages on phones, and its links to sources.

`SITE_DIR` names a site that was built before. Otherwise the site is built here, if mkdocs is
installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORDS = {  # what somebody types, and the page that says how
    "install": "install/",
    "cuda": "install/",
    "multi-gpu": "how-to/devices/",
    "multi-model": "",
    "custom dataset": "how-to/data/",
    "huggingface": "how-to/data/",
    "dirichlet": "how-to/data/",
    "femnist": "how-to/data/",
    "custom model": "how-to/network/",
    "fedbn": "how-to/network/",
    "custom algorithm": "extending/",
    "choose a method": "how-to/methods/",
    "client sampling": "how-to/methods/",
    "fairness": "how-to/methods/",
    "fedadam": "literature/",
    "feddyn": "literature/",
    "fednova": "literature/",
    "moon": "literature/",
    "ditto": "literature/",
    "power of choice": "literature/",
    "maxfl": "how-to/appeal/",
    "stragglers": "how-to/away/",
    "differential privacy": "how-to/privacy/",
    "quantization": "how-to/compression/",
    "krum": "how-to/robust/",
    "backdoor": "how-to/robust/",
    "byzantine": "how-to/robust/",
    "robust aggregation": "how-to/robust/",
    "label flip": "how-to/robust/",
    "fedbuff": "how-to/asynchronous/",
    "checkpoint": "how-to/resuming/",
    "job array": "how-to/clusters/",
    "slurm": "how-to/clusters/",
    "sweep": "how-to/sweeps/",
    "nan": "how-to/sweeps/",
    "optuna": "how-to/tuning/",
    "error bars": "how-to/plots/",
    "tensorboard": "how-to/tracking/",
    "learning rate schedule": "experiments/",
    "local epochs": "experiments/",
    "save model": "experiments/",
    "concept drift": "how-to/drift/",
    "clustered": "how-to/groups/",
    "decentralized": "how-to/edges/",
    "gossip": "how-to/edges/",
    "hierarchical federated": "how-to/edges/",
    "out of memory": "concepts/memory/",
    "compile time": "concepts/compiling/",
    "reproduce": "results/",
    "time to target": "how-to/results/",
    "rounds to target": "how-to/results/",
    "latex table": "how-to/results/",
    "label skew": "how-to/data/",
    "jupyter": "how-to/starting/",
    "continue training": "how-to/resuming/",
    "more seeds": "how-to/resuming/",
    "local only": "how-to/methods/",
    "rotated mnist": "how-to/data/",
    "feature shift": "how-to/data/",
    "profiler": "how-to/devices/",
    "orbax": "how-to/network/",
    "safetensors": "how-to/network/",
    "early stopping": "how-to/sweeps/",
    "wandb": "how-to/tracking/",
    "hydra": "how-to/own-code/",
    "custom task": "extending/",
    "lora": "how-to/network/",
}
SEARCH = """
const fs = require("fs"), vm = require("vm");
const [worker, index, ...queries] = process.argv.slice(2);
let listener;
const answers = [];
const place = {
  console, URL, setTimeout, location: { href: "http://localhost/" }, importScripts: () => {},
  addEventListener: (_, listen) => { listener = listen; },
  postMessage: message => answers.push(message),
};
place.self = place;
vm.runInNewContext(fs.readFileSync(worker, "utf8"), place);
const wait = async () => { for (let i = 0; i < 50; i++) await new Promise(r => setTimeout(r, 5)); };
(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(index, "utf8"));
  const options = { suggest: true };
  listener({ data: { type: 0, data: { config, docs, options } } }); await wait();
  const found = {};
  for (const query of queries) {
    answers.length = 0;
    listener({ data: { type: 2, data: query } }); await wait();
    const items = answers.at(-1).data.items;
    found[query] = items.slice(0, 3).map(group => group[0].location);
  }
  console.log(JSON.stringify(found));
})();
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if made := os.environ.get("SITE_DIR"):
        return Path(made)
    pytest.importorskip("material")
    out = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", str(out))
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return out


@pytest.mark.skipif(shutil.which("node") is None, reason="the site's own search needs node")
def test_the_first_hit_of_a_word_is_the_page_that_says_how(site, tmp_path):
    """The search is that of the site: its own worker on its own index."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    script = tmp_path / "search.js"
    script.write_text(SEARCH)
    index = site / "search" / "search_index.json"
    done = subprocess.run(
        ("node", script, worker, index, *WORDS), check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    first = {word: hits[0].partition("#")[0] if hits else "" for word, hits in found.items()}
    assert first == WORDS


def test_formulas_are_formulas(site):
    text = (site / "how-to" / "asynchronous" / "index.html").read_text()
    assert text.count("<math") >= 5
    assert "arithmatex" not in text


def test_cells_of_statements_name_their_columns(site):
    text = (site / "results" / "mfa-fig3" / "index.html").read_text()
    labels = re.findall(r'<td data-label="(.*?)"', text)
    assert labels[:4] == ["statement", "measure", "value", "verdict"]


def test_a_published_page_names_its_picture(site):
    """The picture has an absolute address, so a site without one has none."""
    jinja2 = pytest.importorskip("jinja2")
    pages = {"base.html": "{% block extrahead %}{% endblock %}"}
    pages["main.html"] = (ROOT / "docs" / "theme" / "main.html").read_text()
    template = jinja2.Environment(loader=jinja2.DictLoader(pages)).get_template("main.html")
    config = {"site_url": "https://example.org/", "site_name": "A", "site_description": "B"}
    page = {"title": "Install", "canonical_url": "https://example.org/install/", "meta": {}}
    text = template.render(config=config, page=page)
    named = dict(re.findall(r'<meta (?:property|name)="(.*?)" content="(.*?)">', text))
    assert (named["og:title"], named["og:description"]) == ("Install", "B")
    assert named["og:url"] == page["canonical_url"]
    assert (site / named["og:image"].removeprefix(config["site_url"])).is_file()
    assert not template.render(config=config | {"site_url": ""}, page=page).strip()
    if not os.environ.get("SITE_URL"):
        assert "og:image" not in (site / "index.html").read_text()


def test_pages_without_an_address_have_no_link_to_their_source(site):
    if not os.environ.get("REPO_URL"):
        assert "edit/main" not in (site / "install" / "index.html").read_text()
