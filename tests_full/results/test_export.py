"""Results are exported to a real MLflow store and real event files, and read back."""

import io
import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from fedjax_mm import save_dataset
from fedjax_mm.results import export
from fedjax_mm.results.export import export_result
from fedjax_mm.results.manifest import Manifest
from fedjax_mm.results.tracked import settings_at
from tests.cli.test_results import dataset
from tests.test_cli import CONFIG, call, check_refusal

# raised by MLflow's use of SQLAlchemy
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

SETTINGS = {
    "task": {"name": "quadratic", "mu": 0.1},
    "num_models": 2,
    "seed": 7,
    "params": None,
    "axes": {"learning_rate": [0.1, 0.2]},
    "algorithms": {
        "A": {"name": "fedavg", "learning_rate": 1.0, "cohorts": [1, 2]},
        "B": {"name": "fedprox", "learning_rate": 1.0, "mu": 0.5},
    },
}
POINTS = [f"algorithm={name},learning_rate={rate}" for name in "AB" for rate in (0.1, 0.2)]


def saved(folder, seed=7):
    """Saves a result with a diverged run, a run that ended early, and an array."""
    made = dataset()
    made["loss"] = made.loss.where(made.diverged < 0)
    ended = np.full((2, 2, 3), -1)
    ended[0, 1, 2] = 0
    made["ended"] = ("algorithm", "learning_rate", "seed"), ended
    made["gradients"] = made.loss.fillna(0).astype(np.int64) + 2**40
    made["pair"] = made.loss.expand_dims(pair_0=2, axis=-1)
    about = made.attrs["manifest"] | {"config": SETTINGS, "seed": seed}
    folder.mkdir(parents=True)
    save_dataset(made.assign_attrs(manifest=Manifest(dict(about))), folder / "result.nc")
    Image.new("RGB", (4, 3), (255, 0, 0)).save(folder / "figure.png")
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The working directory of the tests, with an MLflow store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        folder = tmp_path_factory.mktemp("mlflow")
        patch.chdir(folder)
        yield folder


STORE = "sqlite:///mlflow.db"


def runs_of(name):
    """The parent runs of an experiment, and its child runs by point and seed."""
    client = MlflowClient(STORE)
    experiment = client.get_experiment_by_name(name)
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    by_place = {(x.data.tags["point"], int(x.data.tags["seed"])): x for x in children}
    assert len(by_place) == len(children)
    return parents, by_place


def history(run, key):
    """The steps and values of a curve in MLflow."""
    found = MlflowClient(STORE).get_metric_history(run.info.run_id, key)
    return [(each.step, each.value) for each in found]


def expected(made):
    """Yields point, seed, name, and steps and values of all curves, as selected by xarray."""
    for algorithm in "AB":
        for rate in (0.1, 0.2):
            for seed in range(3):
                at = {"algorithm": algorithm, "learning_rate": rate, "seed": seed}
                rounds = [0] if (algorithm, rate, seed) == ("A", 0.2, 2) else [0, 10]
                place = f"algorithm={algorithm},learning_rate={rate}", seed
                for name in ("loss", "test_accuracy", "gradients"):
                    for model in (1, 2):
                        values = made[name].sel(at, drop=True).sel(model=model, round=rounds)
                        curve = list(zip(rounds, values.values.tolist(), strict=True))
                        yield *place, f"{name}/model_{model}", curve


def test_mlflow_has_a_run_for_each_point_and_seed(place):
    made = saved(place / "grid")
    told = []
    done = export_result("grid", "mlflow", STORE, lambda *words: told.append(words))
    assert (done.runs, done.new, done.place, done.left_out) == (12, 12, STORE, ["pair"])
    assert told[3] == ("exporting algorithm=A,learning_rate=0.2,seed=0", 3, 12)
    (parent,), children = runs_of("grid")
    assert {*children} == {(point, seed) for point in POINTS for seed in range(3)}
    for run in (parent, *children.values()):
        assert run.info.status == "FINISHED"
        assert run is parent or run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    for point, seed, name, curve in expected(made):
        np.testing.assert_array_equal(history(children[point, seed], name), curve, err_msg=name)
    assert np.isnan(history(children[POINTS[3], 0], "loss/model_2")[1][1])
    assert history(children[POINTS[3], 0], "diverged/model_2") == [(10, 10.0)]
    assert history(children[POINTS[1], 2], "ended") == [(0, 0.0)]
    assert children[POINTS[2], 1].data.params == {
        "algorithm": "B",
        "learning_rate": "0.1",
        "seed": "1",
        "root_seed": "7",
        "num_models": "2",
        "task.name": "quadratic",
        "task.mu": "0.1",
        "algorithm.name": "fedprox",
        "algorithm.learning_rate": "0.1",
        "algorithm.mu": "0.5",
    }
    folder = Path(MlflowClient(STORE).download_artifacts(parent.info.run_id, ""))
    about = json.loads((folder / "manifest.json").read_text())
    assert about["config"]["axes"] == SETTINGS["axes"]
    assert (folder / "figure.png").read_bytes() == (place / "grid" / "figure.png").read_bytes()

    # A second export adds nothing.
    again = export_result(place / "grid" / "result.nc", "mlflow", STORE)
    assert (again.runs, again.new) == (12, 0)
    (same,), rest = runs_of("grid")
    assert same.info.run_id == parent.info.run_id
    assert {x.info.run_id for x in rest.values()} == {x.info.run_id for x in children.values()}
    for point, seed, name, curve in expected(made):
        assert len(history(rest[point, seed], name)) == len(curve)


def test_an_interrupted_export_to_mlflow_is_completed(place, monkeypatch):
    saved(place / "broken")
    end, ended = export._MLflow.end, []

    def fail(self, run_id):
        ended.append(run_id)
        if len(ended) == 3:
            raise KeyboardInterrupt
        end(self, run_id)

    monkeypatch.setattr(export._MLflow, "end", fail)
    with pytest.raises(KeyboardInterrupt):
        export_result("broken", "mlflow", STORE)
    (parent,), children = runs_of("broken")
    assert parent.info.status == "RUNNING"
    assert sorted(run.info.status for run in children.values()) == ["FINISHED"] * 2 + ["RUNNING"]
    monkeypatch.setattr(export._MLflow, "end", end)
    assert export_result("broken", "mlflow", STORE).new == 10
    (same,), children = runs_of("broken")
    assert same.info.run_id == parent.info.run_id
    assert {run.info.status for run in (same, *children.values())} == {"FINISHED"}
    assert len(children) == 12


def test_mlflow_has_a_parent_run_for_each_result(place):
    saved(place / "a" / "twice")
    saved(place / "b" / "twice", seed=8)
    for folder in "ab":
        assert export_result(f"{folder}/twice", "mlflow", STORE).new == 12
    client = MlflowClient(STORE)
    experiment = client.get_experiment_by_name("twice")
    runs = client.search_runs([experiment.experiment_id])
    parents = [run.data.tags.get("mlflow.parentRunId") for run in runs]
    assert sorted(map(parents.count, {*parents})) == [2, 12, 12]
    client.delete_experiment(experiment.experiment_id)
    with pytest.raises(ValueError, match="'twice' is deleted; restore it, or rename"):
        export_result("a/twice", "mlflow", STORE)


def test_mlflow_takes_many_values_and_strange_names(place):
    """Values and parameters exceed one request, and names have characters that MLflow refuses."""
    made = dataset().isel(algorithm=0, learning_rate=0, seed=[0], drop=True)
    made = made.isel(round=np.zeros(700, int)).assign_coords(round=np.arange(700))
    config = {f"C (%) {number}": number for number in range(150)}
    (place / "long").mkdir()
    about = Manifest({"config": config})
    save_dataset(made.assign_attrs(manifest=about), place / "long" / "result.nc")
    assert export_result("long", "mlflow", STORE).new == 1
    _, children = runs_of("long")
    (run,) = children.values()
    assert len(history(run, "test_accuracy/model_2")) == 700
    assert run.data.params["C ___ 149"] == "149"
    assert len(run.data.params) == 151
    assert export_result("long", "mlflow", STORE).new == 0


def events_in(folder):
    """The events of a folder's only event file."""
    (path,) = folder.glob("events*")
    content, events = path.read_bytes(), []
    while content:  # length, its checksum, the event, its checksum
        (length,) = struct.unpack("<Q", content[:8])
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return events


def values_in(folder):
    """Maps tags to the steps and numbers in a folder's event file."""
    found = {}
    for event in events_in(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def hparams_in(folder):
    """The settings in a folder's event file."""
    tags = {value.tag: value for event in events_in(folder) for value in event.summary.value}
    content = tags["_hparams_/session_start_info"].metadata.plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(x, x.WhichOneof("kind")) for name, x in found.items()}


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_tensorboard_has_a_folder_for_each_point_and_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = saved(tmp_path / "grid")
    done = export_result("grid", "tensorboard")
    assert (done.runs, done.new, done.place, done.left_out) == (12, 12, "runs/grid", ["pair"])
    root = tmp_path / "runs" / "grid"
    assert {path.name for path in root.iterdir()} == {*POINTS, "about", "export.json"}
    found = {
        (point, seed): values_in(root / point / f"seed={seed}")
        for point in POINTS
        for seed in range(3)
    }
    for point, seed, name, curve in expected(made):
        np.testing.assert_array_equal(found[point, seed][name], np.float32(curve), err_msg=name)
    assert np.isnan(found[POINTS[3], 0]["loss/model_2"][1][1])
    assert found[POINTS[1], 2]["ended"] == [(0, 0.0)]
    settings = hparams_in(root / POINTS[2] / "seed=1")
    assert (settings["algorithm"], settings["learning_rate"]) == ("B", 0.1)
    assert (settings["seed"], settings["root_seed"], settings["algorithm.mu"]) == (1, 7, 0.5)
    about = {x.tag: x for event in events_in(root / "about") for x in event.summary.value}
    with Image.open(io.BytesIO(about["figure"].image.encoded_image_string)) as image:
        assert (image.size, image.getpixel((0, 0))) == ((4, 3), (255, 0, 0))
    assert b'"root_seed"' not in about["manifest/text_summary"].tensor.string_val[0]
    assert b'"seed": 7' in about["manifest/text_summary"].tensor.string_val[0]

    # A second export adds nothing.
    before = contents(tmp_path / "runs")
    assert export_result("grid", "tensorboard").new == 0
    assert contents(tmp_path / "runs") == before


def test_an_interrupted_export_to_tensorboard_is_completed(tmp_path, monkeypatch):
    saved(tmp_path / "broken")
    renamed, rename = [], Path.rename

    def fail(self, target):
        renamed.append(target)
        if len(renamed) == 4:  # the first is `about`
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt):
        export_result(tmp_path / "broken", "tensorboard", str(tmp_path / "to"))
    assert (tmp_path / "to" / "broken" / ".part").exists()
    monkeypatch.setattr(Path, "rename", rename)
    assert export_result(tmp_path / "broken", "tensorboard", str(tmp_path / "to")).new == 10
    assert not (tmp_path / "to" / "broken" / ".part").exists()
    folders = [path.parent for path in (tmp_path / "to").rglob("events*")]
    assert len(folders) == len({*folders}) == 13


def test_slashes_in_names_create_no_folders(tmp_path):
    made = dataset().assign_coords(algorithm=["../A", "A/B"])
    (tmp_path / "odd").mkdir()
    save_dataset(made, tmp_path / "odd" / "result.nc")
    export_result(tmp_path / "odd", "tensorboard", str(tmp_path / "to"))
    names = {path.name for path in (tmp_path / "to" / "odd").iterdir()}
    assert "algorithm=..%2FA,learning_rate=0.1" in names
    assert len(names) == 6
    assert {path.name for path in tmp_path.iterdir()} == {"odd", "to"}


@pytest.mark.parametrize(
    ("rates", "names"),
    [
        ((0.0341995189335, 0.1), {"0.0341995", "0.1"}),
        ((0.1, 0.10000000001), {"0.1", "0.10000000001"}),
    ],
)
def test_names_have_six_digits_if_these_distinguish_the_points(tmp_path, rates, names):
    made = dataset().isel(algorithm=0, drop=True).assign_coords(learning_rate=[*rates])
    save_dataset(made, tmp_path / "many.nc")
    export_result(tmp_path / "many.nc", "tensorboard", str(tmp_path / "to"))
    found = {path.name for path in (tmp_path / "to" / "many").glob("learning_rate=*")}
    assert found == {f"learning_rate={name}" for name in names}
    rate = hparams_in(tmp_path / "to" / "many" / sorted(found)[0] / "seed=0")["learning_rate"]
    assert rate == rates[0]


def test_a_trace_without_seeds_is_one_run(tmp_path):
    made = dataset().isel(algorithm=0, learning_rate=0, seed=0, model=0, drop=True)
    save_dataset(made.drop_vars("diverged"), tmp_path / "mine.nc")
    done = export_result(tmp_path / "mine.nc", "tensorboard", str(tmp_path / "to"))
    assert (done.runs, done.new) == (1, 1)
    assert values_in(tmp_path / "to" / "mine" / "seed=0")["loss"] == [(0, 0.0), (10, 0.5)]


def test_settings_on_axes_have_the_values_of_the_point():
    config = {
        "num_models": 2,
        "assignment": None,
        "task": {"mu": 0.1, "sizes": [3, 4]},
        "axes": {
            "num_models": [2, 3],
            "task.mu": [0.1, 0.2],
            "algorithms.A.q": [1.0, 2.0],
            "assignment.cohort_size": [4, 5],
            "learning_rate": [0.1, 0.2],
        },
        "algorithms": {
            "A": {"q": 0.0, "assignment": {"cohort_size": 1}, "learning_rate": {"beta": 1.0}},
            "B": {"q": 0.0, "learning_rate": 0.3},
        },
    }
    at = {"num_models": 3, "mu": 0.2, "q": 2.0, "cohort_size": 5, "learning_rate": 0.2}
    assert settings_at(config, at | {"algorithm": "A"}) == {
        "task.mu": 0.2,
        "task.sizes": "[3, 4]",
        "algorithm.q": 2.0,
        "algorithm.assignment.cohort_size": 5,
        "algorithm.learning_rate": 0.2,
    }
    shared = config | {"assignment": {"cohort_size": 1}}
    assert settings_at(shared, at | {"algorithm": "B"}) == {
        "task.mu": 0.2,
        "task.sizes": "[3, 4]",
        "algorithm.q": 0.0,
        "assignment.cohort_size": 5,
        "algorithm.learning_rate": 0.2,
    }
    assert settings_at({"axes": {"rate": [1.0]}}, {"rate": 1.0}) == {}


def test_the_command_exports_the_result_of_a_sweep(place):
    Path("small.toml").write_text(f"{CONFIG}\n[axes]\nlearning_rate = [0.1, 0.2]\n")
    assert call("sweep", "small.toml", "--set", "num_seeds=2").code == 0
    for _ in range(2):
        code, out, err = call("export", "results/small", "--to", "tensorboard")
        assert (code, err) == (0, "")
    assert "runs: 4, new: 0; in runs/small" in " ".join(out.split())
    assert len(list(Path("runs/small").rglob("events*"))) == 5
    code, out, _ = call("export", "results/small", "--to", "mlflow", "--store", STORE)
    assert code == 0
    assert f"runs: 4, new: 4; in {STORE}" in " ".join(out.split())
    _, children = runs_of("small")
    (run, *_) = children.values()
    assert run.data.params["algorithm.learning_rate"] == run.data.params["learning_rate"]
    assert run.data.params["root_seed"] == "0"


@pytest.mark.parametrize("to", ["mlflow", "tensorboard"])
def test_links_to_other_directories_are_not_followed(place, tmp_path, to):
    """The directory may be somebody else's, and the tracker is often shared."""
    store = {"mlflow": STORE, "tensorboard": str(tmp_path / "runs")}[to]
    folder, secret = tmp_path / f"linked-{to}", tmp_path / "secret.png"
    saved(folder)
    (folder / "figure.png").rename(secret)
    (folder / "figure.png").symlink_to(secret)
    code, out, _ = call("export", str(folder), "--to", to, "--store", store)
    assert code == 0
    assert "arrays and links are not exported: pair, figure.png" in " ".join(out.split())
    if to == "mlflow":
        [parent], _ = runs_of(folder.name)
        paths = {each.path for each in MlflowClient(STORE).list_artifacts(parent.info.run_id)}
        assert paths == {"manifest.json"}
    else:
        events = events_in(tmp_path / "runs" / folder.name / "about")
        assert "figure" not in {x.tag for event in events for x in event.summary.value}
    (folder / "figure.png").unlink()
    secret.rename(folder / "mine.png")
    (folder / "figure.png").symlink_to("mine.png")
    assert export_result(folder, "tensorboard", str(tmp_path / "more")).left_out == ["pair"]

    # The result itself may be a link, too.
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "result.nc").symlink_to(folder / "result.nc")
    words = ("all/result.nc is a link; if it is yours, export", str(folder / "result.nc"))
    check_refusal(tmp_path, ("export", tmp_path / "all", "--to", to, "--store", store), words)


def png(width, height):
    """A PNG file of a size with no pixels."""

    def chunk(kind, content):
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (png(60_000, 60_000), "has too many pixels; remove it, or make it again"),
        (png(12_000, 12_000), "has too many pixels; remove it, or make it again"),
        (png(3, 3), "is no image or damaged; remove it, or make it again"),
        (b"root:x:0:0", "is no image or damaged; remove it, or make it again"),
    ],
    ids=["a bomb", "large", "no pixels", "text"],
)
def test_wrong_figures_are_refused_in_one_line(tmp_path, content, words):
    saved(tmp_path / "grid")
    (tmp_path / "grid" / "figure.png").write_bytes(content)
    command = ("export", tmp_path / "grid", "--to", "tensorboard", "--store", tmp_path / "runs")
    check_refusal(tmp_path, command, (f"grid/figure.png {words}",))


WRONG = {
    "no result": (
        ("none", "--to", "mlflow"),
        ("does not exist", "give a directory that run, sweep"),
    ),
    "an empty folder": (("empty", "--to", "mlflow"), ("does not exist", "result.nc")),
    "a damaged file": (("damaged.nc", "--to", "tensorboard"), ("this is not a result; give a",)),
    "no curves": (("table.nc", "--to", "tensorboard"), ("table.nc has no curves by round",)),
    "no tracker": (("mine.nc",), ("missing option '--to'",)),
    "another tracker": (("mine.nc", "--to", "aim"), ("'aim' is not one of 'mlflow'",)),
    "another result": (
        ("mine.nc", "--to", "tensorboard", "--store", "full"),
        ("full/mine is of another result; give another --store, or remove it",),
    ),
    "a file for a folder": (
        ("mine.nc", "--to", "tensorboard", "--store", "table.nc"),
        ("cannot write to table.nc/mine: Not a directory; give another --store",),
    ),
    "no store": (
        ("mine.nc", "--to", "mlflow", "--store", "nowhere:/x"),
        ("MLflow refuses --store nowhere:/x",),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_exports_are_refused_in_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("damaged.nc").write_text("no NetCDF")
    save_dataset(dataset(), "mine.nc")
    save_dataset(dataset().isel(round=0, drop=True), "table.nc")
    Path("full/mine").mkdir(parents=True)
    Path("full/mine/export.json").write_text('{"result": "another"}')
    arguments, fragments = WRONG[name]
    check_refusal(tmp_path, ("export", *arguments), fragments)


@pytest.mark.parametrize(
    ("to", "library"),
    [("mlflow", "mlflow"), ("mlflow", "alembic"), ("tensorboard", "tensorboardX"), ("wandb", "")],
)
def test_a_library_that_is_not_installed_is_named(tmp_path, monkeypatch, to, library):
    save_dataset(dataset(), tmp_path / "mine.nc")
    monkeypatch.setitem(sys.modules, library or "wandb", None)
    words = f"{library} is not installed; pip install 'fedjax-mm[tracking]'"
    words = words if library else "wandb is not installed; pip install wandb"
    check_refusal(tmp_path, ("export", tmp_path / "mine.nc", "--to", to), (words,))


def test_python_refuses_another_tracker():
    with pytest.raises(ValueError, match="to is 'aim'; it must be 'mlflow', 'tensorboard' or"):
        export_result("results/mine", "aim")


def records(file):
    """Yields the records of an offline run, which are in LevelDB's log format after 7 bytes."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, place, whole = file.read_bytes(), 7, b""
    while place < len(data):
        if 32768 - place % 32768 < 7:  # a block ends
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = pb.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_has_an_offline_run_for_each_point_and_seed(tmp_path):
    pytest.importorskip("wandb")
    made = saved(tmp_path / "grid")
    done = export_result(tmp_path / "grid", "wandb", str(tmp_path))
    assert (done.runs, done.new, done.left_out) == (12, 12, ["pair"])
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 13  # one has the figure and the manifest
    found, settings, places = {}, {}, {}
    for folder in folders:
        (file,) = folder.glob("*.wandb")
        everything = list(records(file))
        (run,) = (x.run for x in everything if x.WhichOneof("record_type") == "run")
        assert run.project == "grid"
        places[run.display_name] = folder
        settings[run.display_name] = {x.key: json.loads(x.value_json) for x in run.config.update}
        for record in everything:
            if record.WhichOneof("record_type") == "history":
                items = {
                    x.key or x.nested_key[0]: json.loads(x.value_json) for x in record.history.item
                }
                step = record.history.step.num
                for key, value in items.items():
                    found.setdefault((run.display_name, key), []).append((step, value))
    for point, seed, name, curve in expected(made):
        values = found[f"{point},seed={seed}", name]
        np.testing.assert_equal([(x, float(y)) for x, y in values], curve)
    assert settings["algorithm=B,learning_rate=0.1,seed=0"]["algorithm.mu"] == 0.5
    assert ("about", "figure") in found
    places["algorithm=B,learning_rate=0.1,seed=0"].rename(tmp_path / "lost")
    assert export_result(tmp_path / "grid", "wandb", str(tmp_path)).new == 1
    assert export_result(tmp_path / "grid", "wandb", str(tmp_path)).new == 0
