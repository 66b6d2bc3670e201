"""Cache of compiled programs: location, size limit, and entries that cannot be loaded."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import jaxlib
import pytest
import xarray as xr
from jax._src import compilation_cache

from fedjax_mm import cli
from fedjax_mm.cli.machine import tell_of_accelerators, watched
from fedjax_mm.sweeps import devices
from fedjax_mm.tools.compiler import _compression, cache_directory, use_compilation_cache

FOLDER = f"jaxlib-{jaxlib.__version__}-cpu-{_compression()}"

ONE = """
num_models = 3
num_rounds = 20
[task]
name = "quadratic"
num_clients = 13
[algorithms.A]
learning_rate = 0.1
local_steps = 3
assignment = { name = "mfa_rr", cohort_size = 11 }
"""


def command_line(code, *arguments, cache):
    """Runs Python code in a process without the compilation cache of the tests."""
    of_tests = ("JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE")
    usual = {name: x for name, x in os.environ.items() if name not in of_tests}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=usual | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


BRIEF = """
import jax
from fedjax_mm.tools.compiler import keep_programs
keep_programs()
assert jax.jit(lambda x: x + 1)(1.0) == 2
"""

WITHOUT_A_CACHE = """
import os
import sys
from types import ModuleType
from fedjax_mm import cli

try:
    cli.main(["--devices", "2", "--no-cache", "--verbose", "bench", "W9"])
except SystemExit as end:
    assert end.code == 2
assert not os.path.exists(os.path.join(os.environ["XDG_CACHE_HOME"], "fedjax_mm"))
print("end of the first", file=sys.stderr)
cli.main()
"""
"""The command line, after a command with --no-cache."""


def test_the_command_line_uses_devices_and_caches_programs(tmp_path):
    """A second process adds no entry to the cache, and --no-cache writes none."""
    (tmp_path / "one.toml").write_text(ONE)
    small = ("run", tmp_path / "one.toml", "--set", "num_rounds=4", "--out", tmp_path / "out")
    entries, results = [], []
    for code in (WITHOUT_A_CACHE, "from fedjax_mm import cli; cli.start()"):
        done = command_line(code, "--verbose", "--devices", 2, *small, cache=tmp_path)
        assert done.returncode == 0, done.stderr
        without, _, said = done.stderr.rpartition("end of the first")
        assert ("compilation cache: off" in without) == (code is WITHOUT_A_CACHE)
        assert "devices: cpu:0, cpu:1" in said
        [place] = (tmp_path / "fedjax_mm" / "xla").glob(f"jaxlib-{jaxlib.__version__}-cpu-*")
        assert str(place) in said
        assert {path.parent for path in tmp_path.rglob("*-cache")} == {place}
        entries.append(sorted(p.name for p in place.glob("*-cache")))
        with xr.open_dataset(tmp_path / "out" / "one" / "result.nc") as result:
            results.append(result.load().drop_attrs(deep=False))
    assert entries[0]
    assert entries[0] == entries[1]
    xr.testing.assert_identical(*results)


IN_PYTHON = """
import sys
import jax
from fedjax_mm import fedavg, mfa_rr, simulate
from fedjax_mm.tasks import quadratic

if sys.argv[1:]:
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
task, algorithm = quadratic(4, 2, mu=0.1), fedavg(0.1, local_steps=2)
simulate(0, task, algorithm, mfa_rr(4, 2), 5)
print(jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.parametrize("case", ["default", "off", "not writable", "of others", "of the user"])
def test_python_caches_programs_unless_the_user_decides_otherwise(case, tmp_path, monkeypatch):
    places = {"off": "off", "not writable": tmp_path / "file" / "cache", "of others": "shared"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "shared" / FOLDER).mkdir(parents=True)
    (tmp_path / "shared" / FOLDER).chmod(0o777)
    monkeypatch.setenv("FEDJAX_MM_CACHE", str(places.get(case, "")))
    own = [tmp_path / "own"] if case == "of the user" else []
    done = command_line(IN_PYTHON, *own, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is not writable") == (case == "not writable")
    assert done.stderr.count("other users may write to") == (case == "of others")
    place = Path(done.stdout.strip())
    if case in places:
        assert place == Path("None")
        assert not [*tmp_path.rglob("*-cache")]
    else:
        assert tmp_path in place.parents
        assert {path.parent for path in tmp_path.rglob("*-cache")} == {place}
        assert (place == tmp_path / "own") == bool(own)


@pytest.mark.parametrize("spelling", ["off", "OFF", "0", "no", "False"])
@pytest.mark.parametrize("by", ["environment", "option"])
def test_the_cache_has_a_switch(spelling, by, monkeypatch, tmp_path):
    """Other values are directories."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    asked = [
        (spelling, None),
        *((word, tmp_path / "fedjax_mm" / "xla") for word in ("on", "ON", "1", "yes", "true", "")),
        ("~/programs", tmp_path / "home" / "programs"),
        ("2", Path("2").absolute()),
    ]
    for given, place in asked:
        monkeypatch.setenv("FEDJAX_MM_CACHE", given)
        assert cache_directory() == place
    monkeypatch.setenv("FEDJAX_MM_CACHE", spelling if by == "environment" else "on")
    option = ["--cache", spelling] * (by == "option")
    with pytest.raises(SystemExit) as end:
        cli.main([*option, "cache"])
    assert end.value.code == 2  # no programs are kept


@pytest.fixture
def unchanged(monkeypatch):
    """Leaves the cache of the tests as it is."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(compilation_cache, "_cache", compilation_cache._cache)
    monkeypatch.setattr(compilation_cache, "reset_cache", lambda: None)


@pytest.mark.usefixtures("unchanged")
def test_each_compression_format_has_its_own_folder(tmp_path, monkeypatch):
    """Otherwise JAX would warn at each program that it cannot read."""
    monkeypatch.setitem(sys.modules, "compression.zstd", None)  # in Python since 3.14
    names = []
    for package in (None, ModuleType("zstandard")):
        monkeypatch.setitem(sys.modules, "zstandard", package)
        names.append(use_compilation_cache(tmp_path).name)
    assert names == [f"jaxlib-{jaxlib.__version__}-cpu-{kind}" for kind in ("zlib", "zstd")]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("case", ["owner", 0o770, 0o702, 0o1777])
def test_a_folder_into_which_others_can_write_is_not_used(case, tmp_path, monkeypatch):
    place = use_compilation_cache(tmp_path)
    assert place.stat().st_mode & 0o777 == 0o700
    if case == "owner":
        monkeypatch.setattr(os, "getuid", lambda: place.stat().st_uid + 1)
    else:
        place.chmod(case)
    words = "of another user" if case == "owner" else f"`chmod go-w {place}`"
    with pytest.warns(UserWarning, match="FEDJAX_MM_CACHE to another directory") as caught:
        assert use_compilation_cache(tmp_path) is None
    assert words in str(caught[0].message)


def entry(number, kind="cache"):
    return f"jit_f-{number:064x}-{kind}"


def test_the_cache_command_lists_and_clears_programs(tmp_path, capsys):
    """Other files in the directory are left alone."""
    (tmp_path / "mine").touch()
    (tmp_path / "jaxlib-1.whl").touch()
    (tmp_path / "jaxlib-source" / "src").mkdir(parents=True)
    (tmp_path / "jaxlib-source" / "precious.c").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / entry(0)).touch()
    (tmp_path / "jaxlib-link").symlink_to(tmp_path / "elsewhere")
    for name in ("my-cache", "jit_f-0123-cache", "notes-atime", f"{entry(1)}.old", ".lockfile"):
        (tmp_path / "jaxlib-source" / name).touch()
    (tmp_path / "jaxlib-source" / entry(2)).symlink_to(tmp_path / "elsewhere" / entry(0))
    mine = set(tmp_path.rglob("*"))
    for version, sizes in {"jaxlib-1-cpu": [2**20, 2**21], "jaxlib-2-cuda": [2**22]}.items():
        (tmp_path / version).mkdir()
        for number, size in enumerate(sizes):
            (tmp_path / version / entry(number)).write_bytes(bytes(size))
            (tmp_path / version / entry(number, "atime")).touch()
    (tmp_path / "jaxlib-2-cuda" / ".lockfile").touch()
    (tmp_path / "jaxlib-source" / entry(0)).touch()

    def shown(*words):
        with pytest.raises(SystemExit) as end:
            cli.main(["--cache", str(tmp_path), "cache", *words])
        assert end.value.code == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    rows = shown()
    assert ["jaxlib-1-cpu", "2", "3"] in rows
    assert ["jaxlib-2-cuda", "1", "4"] in rows
    assert shown("--clear")[-1][0] == "removed;"
    assert set(tmp_path.rglob("*")) == mine
    assert shown()[-1] == ["version", "programs", "MiB"]


SMALL_CACHE = """
import sys
from types import ModuleType
from contextlib import suppress
from pathlib import Path
from fedjax_mm.tools import compiler

compiler._LIMITS["jax_compilation_cache_max_size"] = 40_000
place = compiler.use_compilation_cache(Path(sys.argv[1]))
import jax

for number in range(12):
    jax.jit(lambda x: x + number + int(sys.argv[2])).lower(1.0).compile()
    sizes = []
    for path in place.glob("*-cache"):
        with suppress(FileNotFoundError):  # the other process removed it
            sizes.append(path.stat().st_size)
    assert sum(sizes) <= 40_000, sizes
print(len(sizes))
"""


def test_the_cache_stays_below_its_limit(tmp_path, monkeypatch):
    """Two processes write into the cache at once."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_MAX_SIZE")
    command = [sys.executable, "-c", SMALL_CACHE, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*command, first], **pipes) for first in ("0", "100")]
    for process in both:
        out, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        assert 0 < int(out) < 24


def spoil(path, how):
    content = path.read_bytes()
    if how == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_bytes(content[:100] + b"poison")
    if how == "cut":
        path.with_name(path.name.removesuffix("-cache") + "-atime").unlink()


@pytest.mark.parametrize("how", ["poisoned", "cut", "pipe"])
def test_a_broken_program_is_compiled_again_and_replaced(how, tmp_path):
    """A cut one is known before JAX reads it."""
    said = []
    for is_spoilt in (False, True, False):
        for path in tmp_path.rglob("*-cache") if is_spoilt else ():
            spoil(path, how)
        done = command_line(BRIEF, cache=tmp_path)
        assert done.returncode == 0, done.stderr
        said.append("Error reading persistent compilation cache" in done.stderr)
    assert said == [False, how == "poisoned", False]


def test_the_command_line_says_once_that_programs_are_replaced(tmp_path):
    (tmp_path / "one.toml").write_text(ONE)
    small = ("run", tmp_path / "one.toml", "--set", "num_rounds=4", "--overwrite")
    code = "from fedjax_mm import cli; cli.start()"
    for is_spoilt in (False, True, False):
        for path in tmp_path.rglob("*-cache") if is_spoilt else ():
            spoil(path, "poisoned")
        done = command_line(code, *small, "--out", tmp_path / "out", cache=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("cannot be loaded") == is_spoilt
        assert done.stderr.count("replaced") == is_spoilt


EVENTS = ("compile_time_saved_sec", "cache_retrieval_time_sec")


@pytest.mark.parametrize(
    ("seconds", "is_vain"),
    [
        ([(3.5, 0.5)], False),
        ([(0.5, 3.5)], True),
        ([(-1.0, 4.0)], True),
        ([(3.5, 0.5), *[(-0.2, 0.2)] * 100], False),  # most took less than a second to compile
        ([(0.5, 0.6)], False),  # too few seconds to judge
        ([(3.5, 0.5), (1.0, 3.0)], False),
        ([], False),
    ],
)
def test_loading_that_takes_as_long_as_compiling_gives_a_warning(capsys, seconds, is_vain):
    with watched():
        for pair in seconds:
            for name, each in zip(EVENTS, pair, strict=True):
                jax.monitoring.record_event_duration_secs(f"/jax/compilation_cache/{name}", each)
    assert ("seems to reject them" in capsys.readouterr().err) == is_vain


@pytest.mark.parametrize("extra", ["cuda12", "tpu"])
def test_an_accelerator_without_a_plugin_gives_an_install_hint(
    capsys, tmp_path, monkeypatch, extra
):
    driver = tmp_path / "version"
    monkeypatch.setitem(devices._ACCELERATORS, extra, (str(driver), "jax_plugins"))
    for other in devices._ACCELERATORS.keys() - {extra}:
        monkeypatch.delitem(devices._ACCELERATORS, other)
    tell_of_accelerators()
    assert not capsys.readouterr().err
    driver.touch()
    tell_of_accelerators()
    assert f"pip install 'fedjax-mm[{extra}]'" in capsys.readouterr().err
    monkeypatch.setitem(devices._ACCELERATORS, extra, (str(driver), "jax"))  # is installed
    tell_of_accelerators()
    assert not capsys.readouterr().err
