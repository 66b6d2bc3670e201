"""Every attack reaches every rule, in whole runs."""

import pytest

from tests.robust.test_backdoor import ALL, check_rule
from tests.robust.test_backdoor import QUICK as BACKDOORS
from tests.robust.test_runs import QUICK, RULES, check_attacks, check_places


@pytest.mark.parametrize("name", [name for name in RULES if name not in QUICK])
def test_every_attack_reaches_every_rule(name, x64):
    check_attacks(name)


def test_attackers_inside_or_without_a_rule_are_those_outside(x64):
    check_places(["sign flip", "scaling"])


@pytest.mark.parametrize("name", [name for name in ALL if name not in BACKDOORS])
def test_a_backdoor_reaches_every_rule(name, x64):
    check_rule(name)
