"""Every attack reaches every rule, in whole runs."""

import jax
import numpy as np
import pytest

from fedjax_mm import Experiment, attacked, fedavg, local_sgd, mfa_rand, run, simulate
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.robust import attacking, backdoored, scaling
from tests.robust.test_backdoor import ALL, attacked_file, check_rule, clean_task
from tests.robust.test_backdoor import QUICK as BACKDOORS
from tests.robust.test_runs import KEY, QUICK, RULES, N, check_attacks, check_places


@pytest.mark.parametrize("name", [name for name in RULES if name not in QUICK])
def test_every_attack_reaches_every_rule(name, x64):
    check_attacks(name)


def test_attackers_inside_or_without_a_rule_are_those_outside(x64):
    check_places(["sign flip", "scaling"])


@pytest.mark.parametrize("name", [name for name in ALL if name not in BACKDOORS])
def test_a_backdoor_reaches_every_rule(name, x64):
    check_rule(name)


def test_a_file_names_a_backdoor():
    experiment = validate(Experiment, attacked_file())
    with_axes = validate(Experiment, attacked_file(axes={"byzantine.attack.share": [0.0, 1.0]}))
    (alone,), swept = run(experiment).attack_success.squeeze()[[-1]], run(with_axes)
    success = swept.attack_success.squeeze().isel(round=-1)
    assert success[0] < alone < success[1]
    mine = experiment.points().at({}).setup("A", [clean_task()])
    who = experiment.byzantine.attackers(N)
    task = attacked(backdoored(clean_task(), who, target=1, size=2), who)
    algorithm = attacking(fedavg(local_sgd(0.1, epochs=1, batch_size=10)), who, scaling(3.0))
    _, expected = simulate(KEY, task, algorithm, mfa_rand(N, 1), 2)
    _, found = simulate(KEY, mine.tasks, mine.algorithm, mine.assignment, 2)
    jax.tree.map(np.testing.assert_array_equal, found.metrics, expected.metrics)
