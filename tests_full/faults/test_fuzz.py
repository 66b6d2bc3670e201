"""Thousands of wrong inputs are either read or refused in one line."""

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import tempfile
import time
import traceback
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedjax_mm import cli
from fedjax_mm.cli import reproductions, runs, timing
from fedjax_mm.data.celeba import load_celeba
from fedjax_mm.data.cifar import load_cifar
from fedjax_mm.data.idx import load_idx, read_idx
from fedjax_mm.data.leaf import load_leaf
from fedjax_mm.data.npz import load_npz
from fedjax_mm.data.sent140 import load_sent140
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.overrides import _in_toml, load
from fedjax_mm.papers import ITEMS
from fedjax_mm.results.dataset import save_dataset
from fedjax_mm.results.finished import find_finished
from fedjax_mm.results.params import load_params, save_params
from fedjax_mm.sweeps.checkpoint import Checkpoints
from tests_full.cli.test_page import put
from tests_full.data.test_sent140 import ANN, BOB, CAT, leaf_file, write_csv, write_glove
from tests_full.data.test_sources import idx
from tests_full.faults.children import FILES
from tests_full.faults.inputs import LEAVES, VALUES, WORDS, changed, of_schema, spoilt

FEW, MANY = 12, int(os.environ.get("FEDJAX_MM_FUZZ", "10000"))
pytestmark = pytest.mark.filterwarnings("ignore")  # about damaged files that are skipped


class Target(NamedTuple):
    """A reader to fuzz.

    `use` reads an input in an empty directory, and returns True if it was refused.
    """

    right: object  # a valid input, from which wrong ones are made
    inputs: st.SearchStrategy
    use: object


def check_line(text):
    assert text.strip()
    assert "\n" not in text.strip(), text
    assert len(text) < 5000, text[:500]


def refusing(use):
    """Wraps `use` so that errors about wrong input count as refusals if they are one line."""

    def used(directory, given):
        try:
            return use(directory, given)
        except (ValueError, OSError) as error:
            check_line(str(error))
            return True

    return used


def written(name, read):
    """A `use` that writes an input, bytes or text, to a file and reads it."""

    def use(directory, content):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        path.write_bytes(data)
        read(path)

    return refusing(use)


def among(make, name, read):
    """A `use` that replaces one of several valid files in a directory."""

    def use(directory, content):
        make(directory)
        return written(name, lambda path: read(directory))(directory, content)

    return refusing(use)


def command(*words):
    """Runs a command that computes nothing. Errors are one line and leave no file."""
    before = set(Path().rglob("*"))
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main(["--no-cache", *words])
        except SystemExit as ended:
            code = ended.code
    assert code in (0, 1, 2, 3), code
    assert "Traceback" not in err.getvalue()
    if code in (1, 2):
        check_line(err.getvalue())
        assert set(Path().rglob("*")) == before, words
    return code in (1, 2)


# Experiments

EXPERIMENT = {
    "num_models": 2,
    "num_rounds": 4,
    "num_seeds": 2,
    "task": {"name": "quadratic", "num_clients": 4, "block_size": 2, "mu": 0.1},
    "algorithms": {
        "A": {"assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 2},
        "B": {"assignment": {"name": "mfa_rand"}, "learning_rate": 0.1, "local_steps": 1},
    },
    "axes": {"task.mu": [0.1, 0.2], "learning_rate": {"start": 0.1, "stop": 0.2, "num": 2}},
}


def in_toml(table):
    with contextlib.suppress(TypeError):
        lines = [f"{json.dumps(key)} = {_in_toml(x)}" for key, x in table.items() if x is not None]
        return "\n".join(lines)
    return ""


@cache
def tables():
    schema = Experiment.model_json_schema()
    return of_schema(schema, schema, 5)


def read_experiment(path):
    load(path, Experiment)


def outline(directory, text):
    with contextlib.chdir(directory):
        Path("x.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
        is_refused = [command(kind, "x.toml", "--dry-run") for kind in ("run", "sweep")]
    return all(is_refused)


# Commands

OPTIONS = ["--out", "--seeds", "--rounds", "--clients", "--data", "--dataset", "--set", "--resume"]
OPTIONS += ["--overwrite", "--save-every", "--memory", "--split", "--dry-run", "--max-seeds"]
OPTIONS += ["--max-minutes", "--format", "--models", "--steps", "--mu", "--rate", "--save-params"]
OPTIONS += ["--help", "--repeats", "--devices", "--verbose", "--version", "--sseeds"]
PLAIN = ["run", "sweep", "reproduce", "bounds", "report", "show", "init", "list", "bench", "mfa"]
PLAIN += ["small.toml", "grid.toml", "missing.toml", ".", "file", "nowhere/x", "auto", "W1", "W9"]
PLAIN += ["num_seeds=2", "task.mu=x", "=", "a.b.c=1", "seed=[", "task=3", "algorithms={}"]
PLAIN += ["1", "0", "-1", "nan", "1e9", "html", *[x for x in WORDS if "\ud83d" not in x]]
ARGUMENTS = st.tuples(
    st.sampled_from(
        ["run small.toml", "sweep grid.toml", "reproduce mfa-fig3", "show", "report"]
    ).map(str.split)
    | st.lists(st.sampled_from(PLAIN), max_size=1),
    st.lists(st.sampled_from(OPTIONS + PLAIN + list(ITEMS)), max_size=5),
)


def call_words(directory, words):
    with contextlib.chdir(directory), pytest.MonkeyPatch.context() as patch:
        for name, content in FILES.items():
            Path(f"{name}.toml").write_text(content)
        Path("file").touch()
        patch.setattr(reproductions, "_make", lambda *given: True)
        patch.setattr(runs, "run", lambda *given, **_: runs._read(*given[:3]))
        patch.setattr(timing, "bench", lambda *given: None)
        return command(*words[0], *words[1])


# Data


def write_images(directory):
    for part, count in (("train", 3), ("t10k", 2)):
        images, labels = (
            idx(8, (count, 2, 2), bytes(4 * count)),
            idx(8, (count,), bytes(range(count))),
        )
        (directory / f"{part}-images-idx3-ubyte").write_bytes(images)
        (directory / f"{part}-labels-idx1-ubyte").write_bytes(labels)


CIFAR = (bytes([19, 99]) + bytes(3072)) * 2


def write_cifar(directory):
    for part in ("train", "test"):
        (directory / f"{part}.bin").write_bytes(CIFAR)


@cache
def npz():
    content, x, y = io.BytesIO(), np.zeros((6, 4)), np.arange(6) % 3
    np.savez(content, x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    return content.getvalue()


LEAF = {
    "users": ["a", "b"],
    "num_samples": [2, 1],
    "user_data": {"a": {"x": [[1, 2], [3, 4]], "y": [0, 1]}, "b": {"x": [[5, 6]], "y": [1]}},
}


PLAYS = {
    **LEAF,
    "user_data": {
        "a": {"x": [" " * 80, "a" * 80], "y": ["a", "b"]},
        "b": {"x": ["[" * 80], "y": ["]"]},
    },
}


def write_leaf(directory, content=LEAF):
    for split in ("train", "test"):
        (directory / split).mkdir()
        (directory / split / "data.json").write_text(json.dumps(content))


IDENTITIES = "".join(f"{i:06}.jpg {1 + i % 2}\n" for i in range(1, 5))
ATTRIBUTES = "4\nBald Smiling\n" + "".join(f"{i:06}.jpg 1 -1\n" for i in range(1, 5))


def write_celeba(directory):
    (directory / "identity_CelebA.txt").write_text(IDENTITIES)
    (directory / "list_attr_celeba.txt").write_text(ATTRIBUTES)
    (directory / "img_align_celeba").mkdir()
    for i in range(1, 5):
        Image.new("RGB", (8, 8)).save(directory / "img_align_celeba" / f"{i:06}.jpg")


def read_celeba(directory):
    load_celeba(directory, attributes=["Smiling"], image_size=4, min_images=2)


def write_tweets(directory):
    write_csv(directory)
    write_glove(directory / "glove.twitter.27B.25d.txt")


def read_tweets(directory):
    load_sent140(
        directory, num_clients=2, dim=2, min_examples=2, glove=next(directory.glob("glove*"))
    )


# Results

RESULT = xr.Dataset(
    {"loss": (("algorithm", "seed", "round", "model"), np.ones((1, 2, 2, 1)))},
    {"algorithm": ["A"], "seed": [0, 1], "round": [0, 4], "model": [1]},
)
MANIFEST = {
    "versions": {"jax": "0.10"},
    "device": {"kind": "cpu", "count": 2},
    "wall_seconds": {"run": 1.0},
}


@cache
def files():
    """Valid files by name."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_dataset(RESULT.assign_attrs(manifest=json.dumps(MANIFEST)), place / "shown.nc")
        save_params([{"w": np.ones((1, 2, 3))}], RESULT, place / "params.npz")
        with Checkpoints(place) as checkpoints:
            checkpoints.claim({"config": {"seed": 1, "axes": [1, 2]}})
            checkpoints.begin({"batch_sizes": [8]})
            checkpoints.save(0, 1, [np.arange(4), np.ones((2, 2), np.float32)])
        put(place / "mfa-fig3", "mfa-fig3")
        write_tweets(place)
        return {path.name: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def shown(directory, content):
    (directory / "result.nc").write_bytes(content)
    with contextlib.chdir(directory):
        return command("show", ".")


def show_manifest(directory, about):
    save = RESULT.assign_attrs(manifest=json.dumps(about))
    save.to_netcdf(directory / "result.nc")
    with contextlib.chdir(directory):
        return command("show", ".")


def reported(name, directory, content):
    folder = directory / "mfa-fig3"
    folder.mkdir()
    for each in ("summary.json", "figure.png", "result.nc"):
        (folder / each).write_bytes(files()[each])
    if name == "manifest.json":
        (folder / "summary.json").unlink()
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / name).write_bytes(data)
    with contextlib.chdir(directory):
        return command("report", ".")


def resumed(name, directory, content):
    place = directory / "unfinished" / "part-0000"
    place.mkdir(parents=True)
    (place / "1.npz").write_bytes(files()["1.npz"])
    (place.parent / "run.json").write_bytes(files()["run.json"])
    path = place / name if name.endswith("npz") else place.parent / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with Checkpoints(directory, resume=True) as checkpoints:
        choices = checkpoints.claim({"config": {"seed": 1, "axes": [1, 2]}})
        assert choices == {"batch_sizes": [8]}
        found = checkpoints.load(0)
        assert found is None or found.arrays[0].tolist() == [0, 1, 2, 3]


def finished(directory, content):
    (directory / "summary.json").write_text(json.dumps(content))
    versions = json.loads(files()["summary.json"])["manifest"]["versions"]
    now = {"config": {"num_seeds": 3}, "versions": versions, "git_revision": None}
    found = find_finished(directory / "summary.json", now)
    assert found is None or isinstance(found.content, dict)


@cache
def targets():
    read, whole = files(), partial(among, write_images)
    summary, record = json.loads(read["summary.json"]), json.loads(read["run.json"])
    leaf, tweets = json.dumps(LEAF), leaf_file(ann=ANN, bob=BOB, cat=CAT)
    images = idx(8, (3, 2, 2), bytes(12))
    csv = "training.1600000.processed.noemoticon.csv"

    def spoiling(content, use):
        return Target(content, spoilt(content), use)

    def changing(value, use, text=lambda x: x, others=VALUES):
        return Target(text(value), changed(value, others).map(text), use)

    def both(one, *others):
        return one._replace(inputs=st.one_of(one.inputs, *(each.inputs for each in others)))

    def toml(value):
        return in_toml(value) if isinstance(value, dict) else "x"

    def in_leaf(read, content=LEAF):
        return among(partial(write_leaf, content=content), "train/data.json", read)

    in_texts = in_leaf(partial(load_leaf, dataset="shakespeare"), PLAYS)

    def in_celeba(name):
        return among(write_celeba, name, read_celeba)

    def in_tweets(name):
        return among(write_tweets, name, read_tweets)

    experiment = written("x.toml", read_experiment)
    resume, report = partial(partial, resumed), partial(partial, reported)
    return {
        "toml, spoilt": spoiling(FILES["grid"].encode(), experiment),
        "toml, changed": changing(EXPERIMENT, experiment, toml),
        "toml, all tables": Target(toml(EXPERIMENT), tables().map(in_toml), experiment),
        "outline": changing(EXPERIMENT, outline, toml, LEAVES),
        "commands": Target((["list"], []), ARGUMENTS, call_words),
        "idx": both(
            spoiling(images, written("x", read_idx)),
            spoiling(gzip.compress(images, mtime=0), None),
        ),
        "idx, one of four": spoiling(images, whole("train-images-idx3-ubyte", load_idx)),
        "leaf": both(changing(LEAF, in_leaf(load_leaf), json.dumps), spoiling(leaf.encode(), None)),
        "leaf, texts": changing(PLAYS, in_texts, json.dumps),
        "cifar": spoiling(
            CIFAR, among(write_cifar, "train.bin", partial(load_cifar, dataset="cifar-100"))
        ),
        "npz": spoiling(npz(), written("x.npz", load_npz)),
        "celeba, identities": spoiling(IDENTITIES.encode(), in_celeba("identity_CelebA.txt")),
        "celeba, attributes": spoiling(ATTRIBUTES.encode(), in_celeba("list_attr_celeba.txt")),
        "sent140": spoiling(read[csv], in_tweets(csv)),
        "sent140, leaf": changing(
            tweets,
            among(
                lambda place: write_glove(place / "glove.twitter.27B.25d.txt"),
                "all_data.json",
                read_tweets,
            ),
            json.dumps,
        ),
        "glove": spoiling(
            read["glove.twitter.27B.25d.txt"], in_tweets("glove.twitter.27B.25d.txt")
        ),
        "params.npz": spoiling(read["params.npz"], written("params.npz", load_params)),
        "result.nc": spoiling(read["shown.nc"], shown),
        "result.nc, manifest": changing(MANIFEST, show_manifest),
        "run.json": both(
            changing(record, refusing(resume("run.json"))), spoiling(read["run.json"], None)
        ),
        "checkpoint": spoiling(read["1.npz"], refusing(resume("1.npz"))),
        "summary.json": both(
            changing(summary, report("summary.json")), spoiling(read["summary.json"], None)
        ),
        "manifest.json": changing(summary["manifest"], report("manifest.json")),
        "summary.json, finished": changing({**summary, "files": {}}, refusing(finished)),
        "figure.png": spoiling(read["figure.png"], report("figure.png")),
    }


NAMES = ("toml, spoilt", "toml, changed", "toml, all tables", "outline", "commands", "idx")
NAMES += ("idx, one of four", "leaf", "celeba, identities", "celeba, attributes", "sent140")
NAMES += ("sent140, leaf", "glove", "params.npz", "result.nc", "result.nc, manifest", "run.json")
NAMES += ("leaf, texts", "cifar", "npz")
NAMES += ("checkpoint", "summary.json", "manifest.json", "summary.json, finished", "figure.png")


class Fuzzed(NamedTuple):
    """Statistics of a fuzzed target."""

    inputs: int
    refusals: int
    seconds: float  # of the slowest input
    mebibytes: int  # peak above the memory before
    half_written: int  # files
    tracebacks: dict[tuple, list]  # inputs by error and lines that raised it

    def report(self):
        tracebacks = sum(map(len, self.tracebacks.values()))
        return (
            f"{self.inputs} inputs, {self.refusals} refusals, {tracebacks} "
            f"tracebacks, {self.half_written} half-written files, longest {self.seconds:.1f} s, "
            f"at most {self.mebibytes} MiB more memory"
        )

    def check(self):
        each = [
            f"{len(x)} times {error}, of {x[0]!r:.2000}" for error, x in self.tracebacks.items()
        ]
        assert not each, "\n\n".join(each)
        assert not self.half_written
        assert self.seconds < 60
        assert self.mebibytes < 1024


def most_memory(*, forget=False):
    """Peak memory of the process in MiB since the last reset (`forget`)."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) // 2**10


def fuzz(name, directory, count):
    """Uses `count` inputs of a target."""
    target, tracebacks = targets()[name], defaultdict(list)
    inputs = refusals = half_written = 0
    longest = 0.0

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def use(given):
        nonlocal inputs, refusals, longest, half_written
        place = directory / "one"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        clock = time.monotonic()
        try:
            refusals += target.use(place, given) is True
        except Exception as error:  # report all errors instead of the first
            where = [f"{x.filename}:{x.lineno}" for x in traceback.extract_tb(error.__traceback__)]
            text = "".join(traceback.format_exception_only(error))[:500]
            tracebacks[text, *where[-8:]].append(given)
        inputs += 1
        longest = max(longest, time.monotonic() - clock)
        half_written += len(list(place.rglob("*.part")))

    before = most_memory(forget=True)
    use()
    more = most_memory() - before
    return Fuzzed(inputs, refusals, longest, more, half_written, tracebacks)


@pytest.mark.parametrize("name", NAMES)
def test_some_wrong_inputs_are_read_or_refused(name, tmp_path):
    assert {*targets()} == {*NAMES}
    place = tmp_path / "right"
    place.mkdir()
    assert not targets()[name].use(place, targets()[name].right)
    fuzz(name, tmp_path, FEW).check()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_wrong_inputs_are_read_or_refused(name, tmp_path, record_property):
    """FEDJAX_MM_FUZZ is the number of inputs of all targets together."""
    fuzzed = fuzz(name, tmp_path, -(-MANY // len(NAMES)))
    record_property(f"faults: {name}", fuzzed.report())
    fuzzed.check()
