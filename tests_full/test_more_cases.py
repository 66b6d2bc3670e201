"""More cases of properties that the fast tests check for a few methods, wrappers and sizes."""

import jax
import pytest

from tests import test_wrappers as wrappers
from tests.algorithms import test_moon as moon
from tests.algorithms import test_properties as properties
from tests.data import test_partition as partitions
from tests.methods import METHODS
from tests.robust import test_runs as robust
from tests.simulator import test_device_time as device_time
from tests.simulator import test_jobs as jobs
from tests.simulator import test_leaves as leaves
from tests.simulator import test_personal as personal
from tests.simulator import test_scheduling as scheduling
from tests.tasks import test_quadratic as quadratic

OTHER_JOBS = [name for name in jobs.ASSIGNMENTS if name not in jobs.QUICK]
SLOW = wrappers.WRAPPERS.keys() - {"available", "replaced", "compressed", "private", "robust"}
OTHER_SIZES = [(5, 4, 2e-4), (2, 1, 0.5), (3, 5, 100.0)]
CASES = {
    wrappers.test_seeds_do_not_depend_on_their_neighbours: ["replaced", "robust"],
    wrappers.test_runs_resume_exactly_and_split_over_two_devices: [
        name for name in wrappers.WRAPPERS if name != "all of them"
    ],
    moon.test_without_contrast_it_is_fedavg_and_with_it_another: ["own steps", "dropout", "FedBN"],
    partitions.test_clients_of_extended_dirichlet_have_few_labels: [2, 10],
    partitions.test_summaries_of_dirichlet_proportions_have_their_expectations: [
        (0.1, 0.55, 0.846539),
        (1.0, 0.181818, 1.928968),
    ],
    robust.test_results_depend_neither_on_chunks_nor_on_how_models_are_given: [
        *robust.ASSIGNMENTS[:2]
    ],
    device_time.test_bytes_are_those_that_a_run_counts: ["plain", "top_k", "qsgd", "robust"],
    jobs.test_models_that_are_done_are_frozen_and_the_others_get_their_clients: OTHER_JOBS,
    jobs.test_targets_that_are_never_met_change_nothing: OTHER_JOBS,
    jobs.test_no_model_trains_if_all_have_met_their_targets_or_none_has_arrived: OTHER_JOBS,
    jobs.test_jobs_resume_exactly_and_targets_and_arrivals_can_be_vmapped: [
        "MFA-RR",
        "bandit: rank-list",
    ],
    leaves.test_another_number_compiles_nothing_and_gives_its_own_results: [
        "devices",
        "optax",
        "asynchronous",
    ],
    personal.test_records_are_those_of_the_clients_models: [
        ("ditto", "vmap"),
        ("apfl", 4),
        ("pfedme", "vmap"),
        ("pfedme", 4),
    ],
    scheduling.test_clients_are_served_as_one_after_another: [
        case for case in scheduling.CASES if case not in scheduling.QUICK
    ],
}
IN_DOUBLE_PRECISION = {
    wrappers.test_gradients_are_those_of_finite_differences: [
        (name, None) for name in wrappers.WRAPPERS if name not in wrappers.QUICK
    ],
    properties.test_epochs_momentum_and_the_server_match_the_loop: [
        name for name in properties.ROWS if name not in properties.QUICK
    ],
    properties.test_other_words_for_the_same_training_give_the_same_bits: [
        name for name in METHODS if name not in ("fedavg", "scaffold", "ditto")
    ],
    quadratic.test_losses_gradients_and_metrics: OTHER_SIZES,
    quadratic.test_minimizer_and_optimum: OTHER_SIZES,
    quadratic.test_minimizer_solves_the_tridiagonal_system: OTHER_SIZES,
    quadratic.test_constants: OTHER_SIZES,
    quadratic.test_closed_form_of_local_steps: OTHER_SIZES,
}


def rows(table):
    """One case for each check and its arguments."""
    for check, cases in table.items():
        for case in cases:
            given = case if type(case) is tuple else (case,)
            marks = pytest.mark.slow if given[0] in SLOW else ()
            yield pytest.param(check, given, id=f"{check.__name__}-{case}", marks=marks)


@pytest.mark.parametrize(("check", "given"), [*rows(CASES)])
def test_another_case_has_the_property(check, given):
    check(*given)


@pytest.mark.parametrize(("check", "given"), [*rows(IN_DOUBLE_PRECISION)])
def test_another_case_has_the_property_in_double_precision(check, given):
    with jax.enable_x64(True):
        check(*given)
