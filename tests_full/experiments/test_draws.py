"""Different tasks for the models, and axes over data and their draws, in an experiment file."""

import numpy as np
import pytest

from fedjax_mm import Experiment, run
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.sweeps.program import programs_of

DIGITS = {
    "name": "digits",
    "num_clients": 6,
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "test_fraction": 0.4,
}
SYNTHETIC = {"name": "synthetic", "num_clients": 6, "dim": 4}
QUADRATIC = {"num_clients": 6, "block_size": 2}
ALPHAS = [0.1, 1.0]


def values(**changes):
    """A small experiment as plain values, without keys that are changed to `...`."""
    algorithm = {"learning_rate": 0.2, "local_steps": 3, "batch_size": 8}
    base = {
        "task": DIGITS,
        "assignment": {"name": "mfa_rand"},
        "num_models": 2,
        "num_rounds": 3,
        "num_seeds": 2,
        "seed": 1,
        "algorithms": {"A": algorithm},
    }
    return {key: value for key, value in (base | changes).items() if value is not ...}


# Axes of the data


def test_a_point_on_axes_of_the_data_equals_that_experiment():
    """Heterogeneity and draws per seed vary in one program."""
    axes = {"task": {"partition": {"alpha": ALPHAS}, "data_seed": "seed"}}
    experiment = validate(Experiment, values(axes=axes))
    assert validate(Experiment, experiment.model_dump()) == experiment
    grid = grid_of(experiment)
    assert (grid.shape, len(programs_of(grid))) == ((1, 2, 2), 1)
    result = run(experiment)
    assert result.attrs["manifest"]["data"] == "real"
    last = result.loss.isel(round=-1)
    assert len(np.unique(last)) == 2 * 2 * 2
    of_seed_1 = {"data_seed": experiment.data_seeds[1]}
    here = of_seed_1 | {"partition": {"name": "dirichlet", "alpha": 0.1}}
    single = run(validate(Experiment, values(task=DIGITS | here))).isel(seed=1)
    found = result.sel(alpha=0.1).isel(seed=1)
    np.testing.assert_allclose(found.loss, single.loss, rtol=1e-5)
    np.testing.assert_array_equal(found.gradients, single.gradients)


def test_every_seed_may_have_its_own_draw_without_axes():
    for text in ({"task": DIGITS | {"data_seed": "seed"}}, {"axes": {"task.data_seed": "seed"}}):
        experiment = validate(Experiment, values(**text))
        assert (experiment.axes, experiment.task.data_seed) == ({}, "seed")
    more = experiment.with_seeds(1, 3)  # seeds 1, 2 and 3, of which seed 1 is the second one above
    first, later = (grid_of(each) for each in (experiment, more))
    counts = [
        [grid.setup((0,), seed).tasks[0].train.counts for seed in range(grid.num_seeds)]
        for grid in (first, later)
    ]
    assert list(map(len, counts)) == [2, 3]
    np.testing.assert_array_equal(counts[0][1], counts[1][0])
    assert not np.array_equal(counts[0][0], counts[0][1])


@pytest.mark.parametrize(
    ("axes", "num_programs", "num_draws"),
    [
        ({"task.partition.alpha": ALPHAS, "task.test_fraction": [0.2, 0.4]}, 1, [4]),
        ({"task.flipped": [0.0, 0.5]}, 1, [2]),
        ({"task.data_seed": [3, 5, 8]}, 1, [3]),
        ({"task.num_clients": [6, 8]}, 2, [1, 1]),
        ({"task.num_clients": [6, 8], "task.partition.alpha": ALPHAS}, 2, [2, 2]),
        ({"task.dropout_rate": [0.0]}, None, None),
    ],
)
def test_numbers_of_the_data_share_a_program(axes, num_programs, num_draws):
    text = values(axes=axes)
    if num_programs is None:
        with pytest.raises(ValueError, match="run one for each"):
            validate(Experiment, text)
        return
    grid = grid_of(validate(Experiment, text))
    assert len(programs_of(grid)) == num_programs
    found = [
        len({grid.setup(grid.points[i], 0).tasks[0].train.offsets.tobytes() for i in points})
        for points in (each.stacked.runs[0][:, 0] for each in programs_of(grid))
    ]
    assert found == num_draws


def test_each_value_of_an_axis_has_its_own_draw():
    grid = grid_of(validate(Experiment, values(axes={"task.num_clients": [6, 8]})))
    for point, expected in zip(grid.points, [6, 8], strict=True):
        assert {task.num_clients for task in grid.setup(point, 0).tasks} == {expected}


# Different tasks


def test_models_may_have_different_tasks():
    tasks = [DIGITS, DIGITS | {"model": "mlp"}, SYNTHETIC]
    experiment = validate(Experiment, values(task=..., num_models=..., tasks=tasks))
    assert validate(Experiment, experiment.model_dump()) == experiment
    assert experiment.num_models == 3
    grid = grid_of(experiment)
    assert grid.data == "real and synthetic"
    result = run(experiment)
    assert result.attrs["manifest"]["data"] == "real and synthetic"
    assert np.isfinite(result.test_accuracy).all()
    sizes = result.parameters_up.isel(round=-1, seed=0, algorithm=0)
    updates = result.client_updates.isel(round=-1, seed=0, algorithm=0)
    one, two, three = (sizes / updates).values
    assert (one, three) == ((64 + 1) * 10, (4 + 1) * 5)
    assert two > one


def test_quadratics_differ_and_share_an_axis():
    tasks = [QUADRATIC | {"mu": 0.1}, QUADRATIC | {"mu": 0.5}]
    algorithms = {"A": {"learning_rate": 0.1, "local_steps": 2}}
    text = values(task=..., num_models=..., tasks=tasks, algorithms=algorithms)
    both = run(validate(Experiment, text))
    assert len(np.unique(both.loss.isel(round=-1, seed=0))) == 2
    swept = validate(Experiment, text | {"axes": {"task.block_size": [2, 3]}})
    grid = grid_of(swept)
    assert [task.block_size for task in grid.setup(grid.points[1], 0).tasks] == [3, 3]
    starts = [each | {"start": "normal", "block_size": size} for size, each in enumerate(tasks, 1)]
    result = run(validate(Experiment, text | {"tasks": starts}))
    assert (result.distance.isel(round=0, seed=0) > 1).all()  # the start is not at zeros


def test_requirements_apply_to_different_tasks():
    text = values(
        task=...,
        num_models=...,
        tasks=[DIGITS, DIGITS | {"model": "mlp"}],
        requirement={"num_steps": 4, "num_unseen": 1},
        assignment={"name": "mfa_rand", "appealing": {"cohort_size": 2, "from_round": 2}},
        algorithms={"A": {"name": "maxfl", "learning_rate": 0.2, "local_steps": 2}},
    )
    result = run(validate(Experiment, text))
    assert np.isfinite(result.unseen_accuracy).all()


# The number of models


def test_the_number_of_models_may_be_only_an_axis():
    experiment = validate(Experiment, values(num_models=..., axes={"num_models": [2, 3]}))
    assert (experiment.num_models, experiment.points().values) == (2, {"num_models": [2, 3]})
    assert len(programs_of(grid_of(experiment))) == 2


# Errors


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"num_models": ...}, ["num_models: missing"]),
        ({"task": ...}, ["task: missing", "give a table [task]", "[[tasks]]"]),
        ({"tasks": [DIGITS] * 2}, ["task: there are tasks, too", "give a table [task]"]),
        (
            {"task": ..., "tasks": [DIGITS] * 3},
            ["num_models is 2, but there are 3 tables [[tasks]]", "leave num_models out"],
        ),
        (
            {"task": ..., "tasks": [DIGITS, SYNTHETIC | {"num_clients": 7}]},
            ["tasks of 6 and 7 clients", "give every task the same number of clients"],
        ),
        ({"task": ..., "tasks": []}, ["tasks = []", "at least 1 value"]),
        (
            {"task": ..., "tasks": [DIGITS, DIGITS | {"flippd": 1}]},
            ["tasks.1.flippd = 1", "did you mean 'flipped'"],
        ),
        (
            {
                "task": ...,
                "tasks": [DIGITS, QUADRATIC | {"start": "normal"}],
                "algorithms": {"A": {"learning_rate": 0.1, "local_steps": 1}},
            },
            ["start is 'normal'", "leave start out"],
        ),
        ({"task": DIGITS | {"data_seed": "sed"}}, ["task.data_seed = 'sed'", '"seed" for a draw']),
        ({"axes": {"task.data_seed": ["seed", 1]}}, ["axes.task.data_seed", "without a list"]),
        ({"axes": {"task.partition.alpha": [0.1, -1]}}, ["at task.partition.alpha = -1"]),
        (
            {"num_models": ..., "axes": {"num_models": {"start": 1, "stop": 2, "num": 3}}},
            ["at num_models = 1.0", "integer"],
        ),
        ({"axes": {"tasks": [[DIGITS]]}}, ["axes.tasks: it cannot vary within a sweep"]),
    ],
)
def test_an_error_names_the_fault_and_the_remedy(changes, fragments):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        validate(Experiment, values(**changes))
    for fragment in fragments:
        assert fragment in str(error.value)


def test_draws_of_files_need_a_random_part(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "data.json").write_text("{}")
    task = {"name": "leaf", "directory": str(tmp_path), "data_seed": "seed"}
    with pytest.raises(ValueError, match=r'data_seed is "seed".* flipped is 0; leave data_seed'):
        validate(Experiment, values(task=task))
