"""Models that arrive and finish, with more assignments."""

import pytest

from tests.simulator import test_jobs as quick

OTHERS = [name for name in quick.ASSIGNMENTS if name not in quick.QUICK]
PROPERTIES = (
    quick.test_models_that_are_done_are_frozen_and_the_others_get_their_clients,
    quick.test_targets_that_are_never_met_change_nothing,
    quick.test_no_model_trains_if_all_have_met_their_targets_or_none_has_arrived,
)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("check", PROPERTIES, ids=lambda each: each.__name__)
def test_more_assignments_have_the_property(check, name):
    check(name)
