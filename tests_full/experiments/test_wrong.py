"""More wrong experiments in files, for the kinds of errors that `tests/experiments` has."""

import numpy as np
import pytest

from tests.experiments import test_experiment, test_method_tables
from tests.experiments.test_experiment import DIGITS
from tests.experiments.test_method_tables import ASKED, MAXFL, OWN, STAYING, settings


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"num_seeds": -1}, ["num_seeds = -1", "greater than or equal to 1"]),
        ({"seed": -1}, ["seed = -1", "greater than or equal to 0"]),
        ({"task": {"start": "one"}}, ["task.start = 'one'", "'zeros' or 'normal'"]),
        ({"local_steps": 0}, ["algorithms.A.local_steps = 0", "greater than or equal to 1"]),
        (
            {"assignment": {"name": "mfa_rand", "cohort": 4}},
            ["algorithms.A.assignment", "cohort = 4", "did you mean 'cohort_size'"],
        ),
    ],
)
def test_an_error_names_the_key_the_value_and_the_remedy(change, fragments):
    test_experiment.test_an_error_names_the_key_the_value_and_the_remedy(change, fragments)


@pytest.mark.parametrize(
    ("task", "algorithm", "fragments"),
    [
        ({"name": "mnist"}, {}, ["task.name = 'mnist'", "'quadratic', 'synthetic', 'digits'"]),
        (
            DIGITS,
            {"epochs": None},
            ["neither local steps nor epochs are given", "give one of the two"],
        ),
        (DIGITS, {"batch_size": 0}, ["algorithms.A.batch_size = 0", "greater than or equal to 1"]),
        (DIGITS | {"num_clients": 1}, {}, ["num_models is 2", "at most 1 models"]),
        (
            DIGITS | {"model": "rnn"},
            {},
            ["task.model = 'rnn'", "'logistic', 'mlp', 'cnn', 'batch_norm_cnn' or 'gru'"],
        ),
        (DIGITS | {"partiton": {}}, {}, ["unknown key", "did you mean 'partition'"]),
        (DIGITS | {"partition": {"name": "x"}}, {}, ["task.partition.name = 'x'", "'dirichlet'"]),
        (
            DIGITS | {"partition": {"name": "dirichlet", "alpha": 0}},
            {},
            ["task.partition.alpha = 0", "greater than 0"],
        ),
        ({"name": "synthetic", "alpha": -1}, {}, ["task.alpha = -1", "greater than or equal to 0"]),
        ({"name": "synthetic", "num_classes": 1}, {}, ["num_classes = 1", "equal to 2"]),
        ({"name": "idx"}, {}, ["task.directory: missing"]),
    ],
)
def test_an_error_about_data_names_the_remedy(task, algorithm, fragments):
    test_experiment.test_an_error_about_data_names_the_remedy(task, algorithm, fragments)


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        (
            settings(top={"assignment": {"name": "mfa_rand", "arriving": [-1]}}),
            ["assignment.arriving", "greater than or equal to 0"],
        ),
        (settings(top={"assignment": {"name": "mfa"}}), ["assignment.name = 'mfa'", "'mfa_rr'"]),
        (
            settings(top={"assignment": {"name": "mfa_rr", "redrw": "round"}}),
            ["assignment.redrw = 'round'", "did you mean 'redraw'"],
        ),
        (
            settings(assignment=STAYING),
            ["algorithms.A: assignment.appealing asks", "add a table requirement"],
        ),
        (
            settings(top=ASKED | {"assignment": {"name": "mfa_rand", "appealing": {}}}),
            ["assignment.appealing.cohort_size: missing"],
        ),
        (
            settings(top=ASKED | {"assignment": {**STAYING, "appealing": {"cohort_size": 9}}}),
            ["algorithms.A: cohort_size is 9", "between 1 and num_clients = 8"],
        ),
        (
            settings(top={"requirement": {"num_unseen": -1}}),
            ["requirement.num_unseen = -1", "greater than or equal to 0"],
        ),
        (
            settings(
                top={
                    "requirement": {"num_unseen": 3},
                    "assignment": {"name": "mfa_rand", "cohort_size": 6},
                }
            ),
            ["algorithms.A: cohort_size is 6", "num_clients = 5", "requirement.num_unseen = 3"],
        ),
        (
            settings(epochs=2, local_steps=...),
            ["algorithms.A: epochs is 2", "the quadratic has no examples", "give local_steps"],
        ),
        (
            settings(OWN, mu=1, **MAXFL),
            ["algorithms.A.mu = 1", "known keys of maxfl are", "local_steps"],
        ),
        (settings(OWN, epochs=1), ["algorithms.A: 3 local steps and epochs = 1", "one of the two"]),
        (
            settings(OWN, local_steps=...),
            ["algorithms.A: neither local steps nor epochs are given"],
        ),
        (settings(OWN, name="qffl"), ["algorithms.A.q: missing"]),
        (
            settings(OWN, name="fedprox", mu=-1),
            ["algorithms.A.mu = -1", "greater than or equal to 0"],
        ),
        (settings(OWN, name="fedprox", mu=np.nan), ["algorithms.A.mu = nan", "finite number"]),
        (settings(OWN, name="fedprox", mu=-np.inf), ["algorithms.A.mu = -inf", "finite number"]),
        (settings(OWN, name="mwfed", growth=1), ["algorithms.A.growth = 1", "greater than 1"]),
        (settings(OWN, name="maxflow"), ["algorithms.A.name = 'maxflow'", "'maxfl'", "'fedavg'"]),
        (settings(top={"byzantine": {}}), ["byzantine.fraction: missing"]),
        (settings(top={"byzantine": {"fraction": 2}}), ["byzantine.fraction = 2", "equal to 1"]),
        (
            settings(top={"byzantine": {"fraction": 0.1, "loss_facto": 3}}),
            ["byzantine.loss_facto = 3", "unknown key, did you mean 'loss_factor'"],
        ),
        (settings(DIGITS | {"test_fraction": 0}), ["task.test_fraction = 0", "greater than 0"]),
        (settings(OWN | {"flipped": 1.5}), ["task.flipped = 1.5", "less than or equal to 1"]),
    ],
)
def test_an_error_names_the_fault_and_the_remedy(values, fragments):
    test_method_tables.test_an_error_names_the_fault_and_the_remedy(values, fragments)


@pytest.mark.parametrize(
    ("axes", "fragments"),
    [
        ({"task": {"mu": []}}, ["axes.task.mu = []", "at least 1 value"]),
        ({"seed": [0, 1]}, ["axes.seed", "cannot vary within a sweep"]),
        ({"precision": ["float32"]}, ["axes.precision", "cannot vary within a sweep"]),
    ],
)
def test_wrong_axes_are_named_with_a_remedy(axes, fragments):
    test_experiment.test_wrong_axes_are_named_with_a_remedy(axes, fragments)


@pytest.mark.parametrize(
    ("axes", "fragments"),
    [
        ({"algorithms.Q.q": [1, -1]}, ["at algorithms.Q.q = -1", "greater than or equal to 0"]),
        (
            {"learning_rate": [0.1], "requirement.learning_rate": [0.1]},
            ["two axes are called 'learning_rate'"],
        ),
    ],
)
def test_a_wrong_axis_is_named(axes, fragments):
    test_method_tables.test_a_wrong_axis_is_named(axes, fragments)
