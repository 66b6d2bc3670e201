"""`fedjax-mm bench capabilities`: rows for all public parts, counts and files."""

import importlib
import inspect
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from docs import capabilities as page
from docs.hooks import NAMESPACES
from fedjax_mm.cli import capabilities, costs, workloads
from fedjax_mm.cli.capabilities import ABSENT, CAPABILITIES, UNTIMED, Problem
from fedjax_mm.cli.counting import Counted, count, count_round
from fedjax_mm.cli.speed import rounds_program
from fedjax_mm.tasks.view import View
from tests.test_cli import call, check_refusal, files

TINY = workloads.LearningWorkload("W2", workloads.LOGISTIC, 10, 8, 10, 2, 4, num_rounds=3)
HIDDEN = workloads.LearningWorkload("W3", workloads.Model((6,), (), (4, 3)), 10, 8, 10, 2, 4, 3)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(capabilities, "problems", lambda: {"W2": Problem(TINY)})


def public_parts():
    """Public factories of parts with a cost in each round, by their return types."""
    kinds = ("Algorithm", "Assignment", "Attack", "Compressor", "Delay", "Dispatch", "Law", "Rule")
    kinds += ("StaleWeight", "GradientTransformation")
    for namespace in NAMESPACES:
        module = importlib.import_module(namespace)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                kind = inspect.signature(value, eval_str=True).return_annotation
                is_task = inspect.isclass(kind) and issubclass(kind, View)
                is_part = getattr(kind, "__name__", "") in kinds or "schedules" in namespace
                if is_task or is_part:
                    yield name


def test_every_public_part_has_a_row():
    """A factory has a row if it, or the type of the task that it makes, is in the row's parts."""
    problem, listed = Problem(HIDDEN), set()
    for name, row in CAPABILITIES.items():
        setup = problem.with_part(row.build(problem))
        made = {plain(word) for word in re.findall(r"(\w+)\(", f"{tuple(setup)}")}
        assert plain(name.split()[0]) in made, name
        listed |= made
    public = {*public_parts()}
    assert {"fedavg", "krum", "top_k", "mfa_rr", "alie", "markov", "fedast", "attacked"} <= public
    assert {name for name in public if plain(name) not in listed} == {*UNTIMED}


def plain(name):
    """Equal strings for a function and for its return type."""
    return name.lower().replace("_", "")


@pytest.mark.slow
def test_all_rows_can_run():
    for workload in (TINY, HIDDEN):
        problem = Problem(workload)
        for name, row in CAPABILITIES.items():
            if (workload.name, name) not in ABSENT:
                setup = problem.with_part(row.build(problem))
                program = rounds_program(setup, 2, lambda state: (state.models, state.assignment))
                jax.eval_shape(program.function, *program.arguments)


def test_a_capability_is_timed_shown_and_saved(tiny, tmp_path):
    options = ("--only", "krum", "--only", "fedast", "--rounds", 2, "--repeats", 1)
    code, out, _ = call("bench", "capabilities", "W2", *options, "--out", "made/costs.json")
    assert code == 0
    assert files(tmp_path / "made") == ["costs.json", "costs.png"]
    saved = json.loads((tmp_path / "made" / "costs.json").read_text())
    found = costs.Costs.from_json(saved)
    assert [*found.of("W2")] == ["fedavg", "krum", "fedast"]
    assert found.about["rounds"] == {"W2": 2}
    assert not found.about["is_cached"]
    krum, arrivals = found.of("W2")["krum"], found.of("W2")["fedast"]
    assert min(krum.seconds, krum.times, krum.trace, krum.lower, krum.compile, krum.numpy) > 0
    assert (krum.words, arrivals.words) == (10, None)
    assert all(x > 1 for x in costs.bounds_of(krum, found.of("W2")["fedavg"]))
    shown, written = out + costs.markdown(found), saved["about"]
    for cell in ("krum", "W2 krum (krum)", f"jax {written['jax']}", "| `fedast` |"):
        assert cell in shown
    assert ("not installed" in out) == (written["torch"] is None)


def test_kinds_of_capabilities_can_be_chosen(tiny):
    planned = costs.plan(["compressor", "scaffold"], [], None, 7)
    names = [name for _, name in planned.points]
    assert names == ["fedavg", "scaffold", "top_k", "random_k", "qsgd", "sign"]


def test_draws_of_loops_and_of_batches_are_counted():
    def rounds(key):
        def one_round(key, _):
            key, own = jax.random.split(key)
            each = jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(own, 5))
            bits = lax.map(lambda k: jax.random.bits(k, (8,), jnp.uint8), jax.random.split(own, 4))
            return key, (each, bits)

        return lax.scan(one_round, key, length=7)

    traced = jax.make_jaxpr(rounds)(jax.random.key(0))
    assert count_round(traced, 7)[:2] == (2 + 5 + 4, 15 + 4 * 2)
    assert count(traced)[:2] == (7 * 11, 7 * 23)
    assert count_round(traced, 8) is None
    drawn = jax.make_jaxpr(
        lambda key: lax.while_loop(lambda x: x < 0.9, lambda _: jax.random.uniform(key), 0.0)
    )
    found = count(drawn(jax.random.key(0)))
    assert (found.words, found.is_open) == (1, True)


def test_operations_and_rows_of_loops_are_counted():
    def rounds(table, weights, places):
        def one_round(x, place):
            unread = jnp.sin(x)
            rows = table[place]  # [5, 3]
            x = lax.fori_loop(0, 4, lambda _, y: y + 1, x)
            del unread
            return x, jnp.max(rows @ weights, axis=0)

        return lax.scan(one_round, jnp.zeros(6), places)

    shapes = (jnp.ones((9, 3)), jnp.ones((3, 2)), jnp.zeros((7, 5), jnp.int32))
    found = count_round(jax.make_jaxpr(rounds)(*shapes), 7)
    product, largest, loop = 2 * 5 * 3 * 2, 5 * 2, 4 * 6
    indices = 2 * 5  # negative ones count from the end
    assert found == Counted(operations=product + largest + loop + indices, moved=4 * 5 * 3)


def test_the_page_is_made_from_its_numbers():
    saved = page.saved()
    assert page.PAGE.read_text() == page.page(saved)
    labels = costs.draw(saved).axes[0].get_yticklabels()
    assert {label.get_text() for label in labels} == {row.name for row in saved.rows}


REFUSED = {
    "unknown row": (("capabilities", "--only", "krm"), ("'krm'", "krum", "rule")),
    "unknown workload": (("capabilities", "W4"), ("'W4'", "W2")),
    "one round": (("capabilities", "--rounds", 1), ("--rounds is 1", "at least 2")),
    "no repeats": (("capabilities", "--repeats", 0), ("--repeats is 0", "at least 1")),
    "no JSON": (("capabilities", "--out", "costs.csv"), ("costs.csv", ".json")),
    "other workloads": (("W2", "--rounds", 2), ("--rounds", "bench capabilities")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_options_are_refused(tiny, tmp_path, name):
    options, fragments = REFUSED[name]
    check_refusal(tmp_path, ("bench", *options), fragments)
