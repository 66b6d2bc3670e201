"""Verdicts on the statements of Cho et al.'s tables, from made-up numbers."""

import numpy as np
import pytest
import xarray as xr
from scipy.stats import kendalltau

from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS
from fedjax_mm.papers.cho2022 import comparison
from fedjax_mm.papers.cho2022.grid import DIMS, METHODS

NAMES = (
    *(f"maxfl-{name}" for name in ("fig3", "fig4", "fig7", "demand", "weights")),
    *(f"maxfl-table{number}" for number in range(1, 7)),
)
METRICS = ("accuracy", "appeal", "preferred_accuracy", "loss", "train_loss")
AXES = ("algorithm", *DIMS.values())
POOLS = ("available", "available_flipped", "weight", "weight_flipped")


def config_of(name, **changes):
    item = ITEMS[name]
    return validate(type(item.settings), item.settings.model_dump() | {"num_seeds": 24} | changes)


def made_up(config, values, data="fashion-mnist"):
    """A result whose metrics are a function of the coordinates."""
    axes = {
        "algorithm": list(config.methods),
        "byzantine": list(config.byzantine),
        "warm_up_steps": list(config.requirement.num_steps),
        "demand_rate": list(config.requirement.rates),
        "seed": list(range(config.num_seeds)),
        "round": [0, 100, config.num_rounds],
    }
    shape = tuple(map(len, axes.values()))
    names = [*METRICS, *(f"unseen_{name}" for name in METRICS), *POOLS]
    arrays = {name: np.zeros(shape) for name in names}
    for place in np.ndindex(shape):
        where = {name: axis[i] for (name, axis), i in zip(axes.items(), place, strict=True)}
        for name in names:
            arrays[name][place] = values(name=name, **where)
    dataset = xr.Dataset({name: (tuple(axes), x) for name, x in arrays.items()}, axes)
    dataset["idle_rounds"] = xr.zeros_like(dataset["accuracy"], int)
    dataset["diverged"] = xr.full_like(dataset["accuracy"].isel(round=0, drop=True), -1, int)
    dataset.attrs["manifest"] = {"data": "real", "datasets": [data]}
    point = {"variant": list(config.methods)}
    point |= {"learning_rate": 0.1, "local_steps": 10, "batch_size": 32}
    size = len(config.methods)
    coords = {k: ("algorithm", v if k == "variant" else [v] * size) for k, v in point.items()}
    return dataset.assign_coords(coords)


def verdicts(name, values, data="fashion-mnist", **changes):
    """Maps keys to verdicts, for all statements that are judged by code."""
    config = config_of(name, **changes)
    found = ITEMS[name].findings(made_up(config, values, data), config)
    return {each.key: each.verdict for each in found.statements if not each.untested}


def ours(*, noise=0.0, **leads):
    """Values in which MaxFL is ahead by `leads` in some metrics, plus or minus `noise`."""

    def values(name, algorithm, seed, **_):
        is_ours = algorithm == "MaxFL" and name in leads
        return 0.5 + is_ours * (leads.get(name, 0.0) + noise * (-1) ** seed)

    return values


def apart(name, algorithm, seed, **_):
    """All methods differ in all metrics, by more than any margin for their difference."""
    others = "qFFL, q = 1", "qFFL, q = 10", "AFL", "MaxFL with q = s"
    place = (*METHODS, *others).index(algorithm)
    return 0.3 + 0.05 * place + 0.001 * (-1) ** seed


SUPPORTED, CONTRADICTED = "supported", "not reproduced"  # under our reading
SLIP, OPEN, UNTESTED = "slip in print", "not settled", "not tested"


@pytest.mark.parametrize("name", NAMES)
def test_every_statement_has_a_quotation_and_one_verdict(name):
    """On other data, only statements about the paper's printed numbers are tested."""
    config = config_of(name)
    found = ITEMS[name].findings(made_up(config, ours(), "digits"), config)
    for each in found.statements:
        assert each.quote
        assert each.where
        assert each.rule or each.untested
        assert each.takes or not each.untested
        is_tested = each.key in ("at-least-10-sent140", "up-to", "lower-than-0-01")
        assert each.verdict == (SLIP if is_tested else UNTESTED)
    on_its_data = ITEMS[name].findings(made_up(config, apart), config).statements
    assert all(each.verdict != UNTESTED for each in on_its_data if not each.untested)


# Tables of leads


def leads(appeal, accuracy, spread=0.0):
    by = {"appeal": appeal, "unseen_appeal": appeal}
    return ours(noise=spread, accuracy=accuracy, unseen_accuracy=accuracy, **by)


@pytest.mark.parametrize(
    ("appeal", "accuracy", "spread", "expected"),
    [
        (0.4, 0.3, 0.001, ["supported"] * 4),
        (0.2, 0.2, 0.001, [SUPPORTED, SUPPORTED, CONTRADICTED, CONTRADICTED]),
        (0.0, 0.0, 0.0, [CONTRADICTED] * 4),  # equal in every seed: not more
        (0.32, 0.22, 0.0, ["supported"] * 4),  # at the margin in every seed: at least
        (0.3, 0.2, 0.3, ["not settled"] * 4),
        (-0.1, -0.1, 0.001, [CONTRADICTED] * 4),
        (np.nan, np.nan, 0.0, ["not tested"] * 4),
    ],
)
def test_verdicts_on_table_1(appeal, accuracy, spread, expected):
    found = verdicts("maxfl-table1", leads(appeal, accuracy, spread))
    keys = ("highest-accuracy", "retains", "appeal-by-32", "accuracy-by-22")
    assert [found[key] for key in keys] == expected


def test_one_undecided_comparison_is_named():
    def values(name, algorithm, seed, **_):
        varied = 0.9 * (algorithm == "SCAFFOLD" and name == "accuracy") * (-1) ** seed
        return 0.5 + 0.2 * (algorithm == "MaxFL") - varied

    config = config_of("maxfl-table1", num_seeds=24)
    found = ITEMS["maxfl-table1"].findings(made_up(config, values), config)
    (statement,) = [each for each in found.statements if each.key == "highest-accuracy"]
    assert statement.verdict == OPEN
    assert statement.needed
    undecided = [part.name for part in statement.parts if part.verdict != SUPPORTED]
    assert undecided == ["test accuracy, seen, SCAFFOLD"]
    assert len(statement.parts) == 12


def test_one_seed_leaves_all_open():
    found = verdicts("maxfl-table1", apart, num_seeds=1)
    assert set(found.values()) == {OPEN}


def test_statements_about_missing_methods_are_not_tested():
    methods = {name: {"name": "fedavg"} for name in ("FedAvg", "MaxFL")}
    found = verdicts("maxfl-table1", leads(0.4, 0.3), methods=methods)
    assert found.pop("higher-than-fedavg") == SUPPORTED
    assert set(found.values()) == {UNTESTED}
    without = verdicts("maxfl-table1", leads(0.4, 0.3), methods={"FedAvg": {"name": "fedavg"}})
    assert set(without.values()) == {UNTESTED}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_rounds": 150},
        {"appealing_from": None},
        {"flips": "everywhere"},
        {"requirement": {"num_steps": (50,)}},
    ],
)
def test_under_another_protocol_nothing_is_tested(changes):
    config = config_of("maxfl-table1", **changes)
    found = ITEMS["maxfl-table1"].findings(made_up(config, leads(0.4, 0.3)), config).statements
    judged = [each for each in found if not each.untested]
    assert {each.verdict for each in judged} == {UNTESTED}
    assert all(next(iter(changes)) in each.about for each in judged)


def test_grids_and_seeds_do_not_change_the_protocol():
    grid = {"learning_rates": (0.1,), "batch_sizes": (32,), "selection_seeds": 1, "seed": 7}
    found = verdicts("maxfl-table1", leads(0.4, 0.3, 0.001), **grid)
    assert found["appeal-by-32"] == SUPPORTED


@pytest.mark.parametrize(("appeal", "verdict"), [(0.3, SUPPORTED), (0.6, CONTRADICTED)])
def test_verdicts_on_the_low_appeal_of_baselines(appeal, verdict):
    found = verdicts("maxfl-table1", lambda name, **_: appeal)
    assert found["low-appeal"] == verdict


@pytest.mark.parametrize(("sign", "verdict"), [(1, SUPPORTED), (-1, CONTRADICTED)])
def test_verdicts_on_the_correlation_of_appeal_and_accuracy(sign, verdict):
    order = ["qFFL", "SCAFFOLD", "MW-Fed", "FedAvg", "FedProx", "PerFedAvg", "MaxFL"]

    def values(name, algorithm, seed, **_):
        rank = order.index(algorithm) / 10
        return sign * rank if name.endswith("accuracy") else rank

    found = verdicts("maxfl-table1", values)
    assert found["appeal-and-accuracy"] == verdict
    # The appeal to unseen clients equals that to seen ones, in one of two parts.
    assert found["seen-and-unseen-appeal"] == verdict


def test_the_rank_correlation_is_kendalls_tau():
    """Without ties tau-a equals tau-b, and ties count as 0."""
    rng = np.random.default_rng(0)
    x, y = (xr.DataArray(rng.normal(size=(3, 7)), dims=("seed", "k")) for _ in range(2))
    expected = [kendalltau(a, b).statistic for a, b in zip(x.values, y.values, strict=True)]
    np.testing.assert_allclose(comparison.concordance(x, y, "k"), expected)
    tied = xr.DataArray([0.0, 0.0, 1.0], dims="k")
    other = xr.DataArray([2.0, 1.0, 3.0], dims="k")
    assert comparison.concordance(tied, other, "k") == pytest.approx(2 / 3)


def test_opt_in_clients_have_a_table_and_a_check():
    shares = {"available": 0.5, "available_flipped": 0.2, "weight": 0.1, "weight_flipped": 0.01}

    def values(name, algorithm, round, seed, **_):
        if name in shares and round:
            return shares[name] * (1 + 0.01 * seed) if algorithm == "MaxFL" else 0.0
        return 0.9

    config = config_of("maxfl-table1")
    found = ITEMS["maxfl-table1"].findings(made_up(config, values), config)
    assert [each.outcome for each in found.checks] == ["holds"]
    rows = {row[0]: row[1:] for row in found.tables[1].rows}
    assert rows["MaxFL"] == ("5.6 ± 0.1", "40.0 ± 0.0", "10.0 ± 0.0")  # of 10 clients
    assert rows["FedAvg"] == ("0.0 ± 0.0", "empty", "empty")
    alike = made_up(config, values).assign(weight_flipped=lambda data: 0.4 * data["weight"])
    assert [each.outcome for each in ITEMS["maxfl-table1"].findings(alike, config).checks] != [
        "holds"
    ]


@pytest.mark.parametrize(
    ("maxfl", "mwfed", "expected"),
    [
        (0.05, 0.2, ["supported", "supported"]),
        (0.06, 0.2, [CONTRADICTED, SUPPORTED]),
        (-0.01, 0.05, [SUPPORTED, CONTRADICTED]),
    ],
)
def test_verdicts_on_losses_under_attack(maxfl, mwfed, expected):
    def values(name, algorithm, byzantine, **_):
        lost = {"MaxFL": maxfl, "MW-Fed": mwfed}[algorithm]
        return 0.75 - lost * (byzantine > 0)

    found = verdicts("maxfl-table2", values)
    assert [found[key] for key in ("loses-little", "mw-fed-susceptible")] == expected
    cut = verdicts("maxfl-table2", values, byzantine=(0.0, 0.1))
    assert set(cut.values()) == {UNTESTED}


def test_verdicts_on_figure_3():
    def values(name, algorithm, round, **_):
        is_ours = algorithm == "MaxFL"
        return (0.5 + 0.1 * is_ours) * round / 200 if name == "appeal" else 0.9 + 0.01 * is_ours

    level = verdicts("maxfl-fig3", values)
    assert level == {"significantly-higher": SUPPORTED, "rise-together": CONTRADICTED}

    def rising(name, round, **at):
        extra = 0.05 * round / 200 if name == "preferred_accuracy" else 0.0
        return values(name=name, round=round, **at) + extra

    assert verdicts("maxfl-fig3", rising)["rise-together"] == SUPPORTED


@pytest.mark.parametrize(
    ("appeal", "preferred", "by_47", "highest"),
    [
        (0.47, 0.0, UNTESTED, UNTESTED),  # equality by a margin that nobody can fail
        (0.5, -0.0005, UNTESTED, UNTESTED),
        (0.5, 0.0011, SUPPORTED, SUPPORTED),
        (0.5, -0.002, CONTRADICTED, CONTRADICTED),
        (0.46, 0.0011, CONTRADICTED, SUPPORTED),
    ],
)
def test_verdicts_on_figure_4(appeal, preferred, by_47, highest):
    values = ours(unseen_appeal=appeal, unseen_preferred_accuracy=preferred)
    assert verdicts("maxfl-fig4", values) == {"by-47": by_47, "highest": highest}


@pytest.mark.parametrize(("preferred", "part"), [(0.0008, UNTESTED), (0.0012, SUPPORTED)])
def test_a_tenth_of_a_point_is_not_significantly_higher(preferred, part):
    found = verdicts("maxfl-fig3", ours(appeal=0.1, preferred_accuracy=preferred))
    assert found["significantly-higher"] == part


def test_ranks_with_many_ties_are_not_tested():
    """Of seven methods six have the same appeal: MaxFL is first, and that is all."""
    found = verdicts("maxfl-table1", leads(0.4, 0.3))
    assert found["retains"] == SUPPORTED
    assert found["appeal-and-accuracy"] == found["seen-and-unseen-appeal"] == UNTESTED


NUMBERS = {"maxfl-table1": 28, "maxfl-table2": 16, "maxfl-fig4": 10, "maxfl-table3": 12}
NUMBERS |= {"maxfl-table4": 18, "maxfl-table5": 10, "maxfl-table6": 6}


@pytest.mark.parametrize("name", NUMBERS)
def test_printed_numbers_are_no_statements(name):
    """The paper's own numbers agree with themselves if its spread allows it, each in its table."""
    item, config = ITEMS[name], config_of(name)
    found = item.findings(made_up(config, ours()), config)
    assert "printed" not in {each.key for each in found.statements}
    means = found.measured["published"]
    metrics = {"test accuracy": "accuracy", "GM-Appeal": "appeal"}
    metrics["preferred-model accuracy"] = "preferred_accuracy"

    def of_paper(name, algorithm, byzantine, warm_up_steps, off=0.0, **_):
        for metric in means["metric"].values:
            title, who = metric.split(", ")
            if name == "unseen_" * (who == "unseen") + metrics[title]:
                at = {"attackers": byzantine, "warm-up steps": warm_up_steps}
                value = means.sel(metric=metric, algorithm=algorithm, **at).squeeze().item()
                return value / 100 + off if np.isfinite(value) else 0.5
        return 0.5

    for off, word in ((0.0, "agrees"), (9.0, "differs")):
        result = made_up(config, lambda off=off, **at: of_paper(**at, off=off))
        numbers = {each.key: each for each in item.findings(result, config).numbers}
        printed = numbers["printed"]
        assert len(printed.parts) == printed.numbers == NUMBERS[name]
        assert sum(printed.agreements.values()) == NUMBERS[name]
        assert not item.findings(made_up(config, ours(), "digits"), config).numbers[0].parts
        # Three runs agree within a margin if it is 19.2 of their standard errors.
        digit = np.array([0.01 if "accuracy" in part.name else 1.0 for part in printed.parts])
        margin = np.array([0.5 if "preferred" in part.name else 5.0 for part in printed.parts])
        spread = np.array([float(part.evidence.rpartition("sd ")[2]) for part in printed.parts])
        is_near = margin > 19.21 * np.maximum(spread, digit / np.sqrt(12)) / np.sqrt(3)
        words = [part.verdict for part in printed.parts]
        if word == "agrees":
            assert words == ["agrees" if near else "too noisy" for near in is_near]
        assert set(words) <= {word, "too noisy"}
    for key, each in numbers.items():
        assert each.verdict == ("not run" if key != "printed" else "differs")
        assert sum(each.agreements.values()) == each.numbers


def test_table_3_and_the_papers_own_numbers():
    """No difference is the quoted "up to 4 %", and Sent140 has 55 and 47 of unseen clients."""
    found = verdicts("maxfl-table3", leads(0.1, 0.0))
    assert found["at-least-10"] == found["above-perfedavg"] == SUPPORTED
    assert found["at-least-10-sent140"] == found["up-to"] == SLIP
    assert verdicts("maxfl-table3", leads(0.05, 0.0))["at-least-10"] == CONTRADICTED
    config = config_of("maxfl-table3")
    statements = ITEMS["maxfl-table3"].findings(made_up(config, ours()), config).statements
    parts = {(each.key, part.name): part.verdict for each in statements for part in each.parts}
    assert parts["at-least-10-sent140", "printed, seen"] == SUPPORTED
    assert parts["at-least-10-sent140", "printed, unseen"] == SLIP
    up_to = [
        parts["up-to", f"printed, {data}, {who}"]
        for data in ("fmnist", "sent140")
        for who in ("seen", "unseen")
    ]
    assert up_to == [SUPPORTED] * 3 + [SLIP]


@pytest.mark.parametrize(("step", "verdict"), [(0.02, SUPPORTED), (0.03, CONTRADICTED)])
def test_verdicts_on_the_effect_of_the_warm_up(step, verdict):
    def values(name, algorithm, warm_up_steps, **_):
        return 0.2 + step * warm_up_steps / 50 * (algorithm == "FedProx")

    assert verdicts("maxfl-table4", values) == {"do-not-vary-much": verdict}


@pytest.mark.parametrize(
    ("fedprox", "expected"),
    [
        (0.0005, [SUPPORTED, SUPPORTED, UNTESTED]),  # all are within the margin
        (0.0, [SUPPORTED, CONTRADICTED, UNTESTED]),
        (0.002, [SUPPORTED, CONTRADICTED, CONTRADICTED]),
    ],
)
def test_verdicts_on_table_5(fedprox, expected):
    """SCAFFOLD may be far better on unseen clients, because the table lacks it."""

    def values(name, algorithm, **_):
        ahead = {"FedProx": fedprox, "SCAFFOLD": 0.3}.get(algorithm, 0.0)
        if name == "unseen_preferred_accuracy":
            return 0.6 + ahead
        return 0.5 + 0.1 * (algorithm == "MaxFL")

    found = verdicts("maxfl-table5", values)
    keys = ("seen-same-or-higher", "fedprox-slightly-higher", "loses-very-little")
    assert [found[key] for key in keys] == expected


def test_verdicts_on_table_6():
    for ahead, verdict in ((0.0, UNTESTED), (0.002, SUPPORTED), (-0.002, CONTRADICTED)):
        found = verdicts("maxfl-table6", ours(appeal=0.3, preferred_accuracy=ahead))
        expected = {"fair-not-effective": SUPPORTED, "preferred-higher": verdict}
        assert found == expected | {"lower-than-0-01": SLIP}


@pytest.mark.parametrize(
    ("test_loss", "verdict"), [(1.05, SUPPORTED), (0.95, SUPPORTED), (1.2, CONTRADICTED)]
)
def test_verdicts_on_nearly_identical_losses(test_loss, verdict):
    def values(name, algorithm, round, **_):
        is_apart = round == 100 and algorithm == "FedAvg"
        return {"loss": test_loss if is_apart else 1.0, "train_loss": 1.0}.get(name, 0.5)

    assert verdicts("maxfl-fig7", values) == {"nearly-identical": verdict}


def test_our_own_questions_are_checks():
    config = config_of("maxfl-demand")
    found = ITEMS["maxfl-demand"].findings(made_up(config, ours(appeal=0.2)), config)
    assert found.statements == found.checks == ()
    config = config_of("maxfl-weights")
    equal = ITEMS["maxfl-weights"].findings(made_up(config, ours()), config)
    assert equal.statements == ()
    assert [each.outcome for each in equal.checks] == ["level"]


# Readings

PRINTED = {"at-least-10-sent140", "up-to", "lower-than-0-01"}  # judged by the paper's own numbers


@pytest.mark.parametrize("name", NAMES)
def test_what_rests_on_our_runs_is_under_our_reading(name):
    config = config_of(name)
    for each in ITEMS[name].findings(made_up(config, apart), config).statements:
        assert each.is_under_reading == (not each.untested and each.key not in PRINTED)
    on_others = ITEMS[name].findings(made_up(config, ours(), "digits"), config).statements
    assert not any(each.is_under_reading for each in on_others)


def readings_of(name, values, **changes):
    config = config_of(name, **changes)
    found = ITEMS[name].findings(made_up(config, values), config).readings
    return {(each.reading, each.statement): each.verdict for each in found}


def test_other_readings_judge_table_1_and_figure_7():
    judged = [f"maxfl-table1/{key}" for key in verdicts("maxfl-table1", leads(0.4, 0.3))]
    judged.append("maxfl-fig7/nearly-identical")
    found = readings_of("maxfl-flips", leads(0.4, 0.3))
    assert sorted(statement for _, statement in found) == sorted(judged)
    assert found[next(iter(found))[0], "maxfl-table1/retains"] == SUPPORTED

    def at_most(rate):
        by_rate = {0.1: 0.0, 0.05: 0.2, 0.01: 0.4}[rate]
        return leads(by_rate, by_rate)

    found = readings_of("maxfl-demand", lambda demand_rate, **at: at_most(demand_rate)(**at))
    assert len(found) == 3 * len(judged)
    for statement, expected in {
        "maxfl-table1/retains": [CONTRADICTED, SUPPORTED, SUPPORTED],
        "maxfl-table1/appeal-by-32": [CONTRADICTED, CONTRADICTED, SUPPORTED],
        "maxfl-fig7/nearly-identical": [SUPPORTED] * 3,
    }.items():
        assert [found[each] for each in found if each[1] == statement] == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [SUPPORTED, SUPPORTED]),
        ({"MaxFL": 0.4}, [SUPPORTED, CONTRADICTED]),  # it loses as much as the baselines
        ({"FedAvg": 0.6}, [SUPPORTED, CONTRADICTED]),
        ({"qFFL": 0.7}, [CONTRADICTED, CONTRADICTED]),
    ],
)
def test_verdicts_on_clients_that_leave(changed, expected):
    """All methods have 0.6 if nobody leaves, and all baselines but the `changed` lose 0.2."""
    left = dict.fromkeys(METHODS, 0.4) | {"MaxFL": 0.6} | changed
    config = config_of("maxfl-flexible")
    each = [
        made_up(config, lambda algorithm, **_: left[algorithm]),
        made_up(config, lambda **_: 0.6),
    ]
    result = xr.concat(each, xr.IndexVariable("participation", ["flexible", "full"]))
    item = ITEMS["maxfl-flexible"]
    found = item.findings(result, config)
    assert [each.verdict for each in found.statements] == expected
    (table,) = found.tables
    assert len(table.rows) == 14
    assert [axes.get_title()[4:] for axes in item.figure(result, found.measured, config).axes] == [
        "test accuracy",
        "GM-Appeal",
    ]


def test_other_readings_judge_tables_2_to_6():
    found = readings_of("maxfl-fixed", leads(0.4, 0.3))
    judged = {f"maxfl-table1/{key}" for key in verdicts("maxfl-table1", leads(0.4, 0.3))}
    assert {statement for _, statement in found} == judged
    for name, tables in {"maxfl-literal": ("3", "5"), "maxfl-literal-qffl": ("6",)}.items():
        assert ITEMS[name].settings.chosen_by == "accuracy"
        found = readings_of(name, leads(0.4, 0.3))
        assert {each.split("/")[0] for _, each in found} == {f"maxfl-table{x}" for x in tables}
        (reading,) = {each for each, _ in found}
        assert "one warm-up at MaxFL's learning rate" in reading


def test_verdicts_on_other_attacks():
    """MaxFL loses nothing, and MW-Fed more than five points if the attack is not weak."""
    config, lost = config_of("maxfl-attackers"), {"leaving": 0.1, "weak": 0.0, "strong": 0.2}

    def accuracies(label):
        def of(algorithm, byzantine, **_):
            return 0.6 - lost[label] * (algorithm == "MW-Fed") * (byzantine > 0)

        return made_up(config, of)

    result = xr.concat(map(accuracies, lost), xr.IndexVariable("attack", list(lost)))
    found = ITEMS["maxfl-attackers"].findings(result, config).readings
    verdicts = {"loses-little": [], "mw-fed-susceptible": []}
    for each in found:
        verdicts[each.statement.removeprefix("maxfl-table2/")].append(each.verdict)
    assert verdicts["loses-little"] == [SUPPORTED] * 3
    assert verdicts["mw-fed-susceptible"] == [SUPPORTED, CONTRADICTED, SUPPORTED]


def test_seeds_that_the_search_for_a_reading_used_are_told_apart():
    def lost_later(seed, **at):
        return leads(0.4 * (seed < 10), 0.3 * (seed < 10))(seed=seed, **at)

    (early,) = {reading for reading, _ in readings_of("maxfl-table1", lost_later, num_seeds=8)}
    found = readings_of("maxfl-table1", lost_later, num_seeds=40)
    (late,) = {reading for reading, _ in found} - {early}
    assert "from 10 on" in late
    assert found[late, "maxfl-table1/retains"] == CONTRADICTED


def searched(config, scores):
    """The scores of two candidates of each method on one selection seed."""
    methods = [name for name in config.methods for _ in range(2)]
    rates = [0.1, 0.05] * len(config.methods)
    names = {"variant": methods, "algorithm": methods, "learning_rate": rates}
    names |= {"local_steps": [10] * len(rates), "batch_size": [32] * len(rates)}
    values = {
        f"selection_{metric}": (
            ("candidate", "selection_seed"),
            [[scores(metric, *each)] for each in zip(methods, rates, strict=True)],
        )
        for metric in ("accuracy", "appeal", "unseen_accuracy", "unseen_appeal")
    }
    coords = {f"candidate_{name}": ("candidate", each) for name, each in names.items()}
    return xr.Dataset(values, coords | {"selection_seed": [7]})


def test_both_rules_of_selection_are_shown():
    """MaxFL's point with the highest appeal is one whose model has collapsed."""

    def scores(metric, algorithm, rate):
        if algorithm != "MaxFL":
            return 0.6 * metric.endswith("accuracy")
        return {"accuracy": 0.3, "appeal": 0.2}.get(metric.removeprefix("unseen_")) * (
            1 if rate == 0.1 else 2 * metric.endswith("accuracy")
        )

    config = config_of("maxfl-table6")
    result = made_up(config, ours(appeal=0.2, accuracy=-0.2))
    found = ITEMS["maxfl-table6"].findings(result.merge(searched(config, scores)), config)
    first, second = found.tables
    assert first.rows[-1][first.header.index("test accuracy, seen")] == "30.0 ± 0.0"
    by_accuracy, by_appeal = (row for row in second.rows if row[0] == "MaxFL")
    at = {name: second.header.index(name) for name in second.header}
    for row, numbers in ((by_accuracy, ("60.0", "0.0")), (by_appeal, ("30.0", "20.0"))):
        assert (row[at["test accuracy, seen"]], row[at["GM-Appeal, seen"]]) == numbers
    assert "lr 0.05" in by_accuracy[-1]
    assert "lr 0.1," in by_appeal[-1]
    (reading,) = found.readings
    assert (reading.statement, reading.verdict) == ("maxfl-table6/fair-not-effective", OPEN)


# Pages


@pytest.mark.parametrize("name", NAMES)
def test_published_rows_have_names_of_measured_rows_and_are_drawn(name):
    item = ITEMS[name]
    config = config_of(name)
    result = made_up(config, lambda name, **_: 0.5)
    found = item.findings(result, config)
    measured, tables = found.measured, found.tables
    rows = comparison.names_of(measured["mean"])
    values = item.paper.get("values", {})
    for numbers in values.values():
        assert set(numbers) <= set(rows)
        assert all(len(row) == measured.sizes["metric"] for row in numbers.values())
    figure = item.figure(result, measured, config)
    assert f"T = {config.num_rounds}" in figure.get_label()
    assert len(figure.axes) <= 6
    if item.table is not comparison.table:
        return
    assert len(tables[0].rows) == len(rows)
    paper = values.get("fmnist", {})
    for label, row, numbers in zip(
        rows, tables[0].rows, measured.published.stack(row=AXES).values.T, strict=True
    ):
        shown = [text for text in row if text.startswith("50.0")][: measured.sizes["metric"]]
        wanted = paper.get(label, [np.nan] * measured.sizes["metric"])
        np.testing.assert_array_equal(numbers, wanted)
        assert shown == [f"50.0 ± 0.0 ({x:g})" if np.isfinite(x) else "50.0 ± 0.0" for x in wanted]
    if item.figure is not comparison.figure:
        return
    # Each measured row is drawn once per kind of metric, and so are the paper's numbers.
    kinds = {title.partition(",")[0] for title in measured["metric"].values}
    assert {axes.get_title().rpartition(") ")[2] for axes in figure.axes} == kinds
    assert len(figure.axes) == len(kinds)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == rows
    drawn = [bars[0].get_xdata() for axes in figure.axes for bars in axes.containers]
    for metric, printed in measured.published.stack(row=AXES).groupby("metric"):
        assert any(np.array_equal(x, printed.values.ravel(), equal_nan=True) for x in drawn), metric


def test_the_table_shows_each_methods_point():
    config = config_of("maxfl-table6")
    result = made_up(config, ours())
    variants = [f"{name} (mu = 0.1)" for name in result["algorithm"].values]
    result = result.assign_coords(variant=("algorithm", variants))
    (table,) = ITEMS["maxfl-table6"].findings(result, config).tables
    assert table.rows[-1][0] == "MaxFL"
    assert "lr 0.1, tau 10, B 32, mu = 0.1" in table.rows[-1]


def test_the_table_of_warm_ups_has_a_row_for_each_method():
    config = config_of("maxfl-demand")
    found = ITEMS["maxfl-demand"].findings(made_up(config, ours(appeal=0.2)), config)
    (table,) = found.tables
    assert len(table.rows) == 7
    assert len(table.header) == 1 + 2 * 3
