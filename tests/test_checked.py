"""Ranges and choices in annotations hold for factories and for files."""

import copy
import inspect
import pickle
from typing import Annotated, Any, Literal, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt
from jaxtyping import Array, Float
from pydantic import TypeAdapter, ValidationError

from fedjax_mm import fedavg, fedprox, full_participation, local_sgd, mfa_rand, mfa_rr, simulate
from fedjax_mm.availability import available, bernoulli
from fedjax_mm.base import Look, Padded, Scalar
from fedjax_mm.checks.annotations import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Percent,
    Positive,
    Seed,
    Share,
    TracedCount,
    TwoOrMore,
    check_argument,
    checked,
    limits_of,
    members_of,
    part,
)
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.experiments.fields import columns_of
from fedjax_mm.results.manifest import manifest
from fedjax_mm.schedules import Schedule
from fedjax_mm.sweeps import Grid, Setup
from fedjax_mm.tasks import quadratic
from tests.test_public import documented

Vector = Annotated[Float[Array, " models"] | tuple[float, ...], Gt(0)]
Way = Literal["up", "down"]


def wrong(annotation, value, words, kind=ValueError):
    """A value outside of an annotation, with the expected message."""
    return pytest.param(annotation, value, words, kind, id=f"{words} {value!r:.20}")


@pytest.mark.parametrize(
    ("annotation", "value", "words", "kind"),
    [
        wrong(Positive, 0, "x is 0; it must be positive"),
        wrong(Positive, jnp.float32(-1), "x is -1.0; it must be positive"),
        wrong(Positive, np.float32(0), "x is 0.0; it must be positive"),
        wrong(Positive, float("nan"), "x is nan; it must be positive"),
        wrong(Positive, float("inf"), "x is inf; it must be positive"),
        wrong(Positive, None, "x is None; it must be a number, and be positive", TypeError),
        wrong(Positive, "1", "x is '1'; it must be a number, and be positive", TypeError),
        wrong(Positive, True, "x is True; it must be a number, and be positive", TypeError),
        wrong(Positive, [1.0, 2.0], "x is of shape (2,); give one number; vmap or sweep over"),
        wrong(NonNegative, -1, "x is -1; it must not be negative"),
        wrong(Annotated[Scalar, Gt(1)], 1, "x is 1; it must be greater than 1"),
        wrong(Annotated[Scalar, Ge(1)], 0.5, "x is 0.5; it must be at least 1"),
        wrong(Annotated[Scalar, Lt(1)], 1, "x is 1; it must be less than 1"),
        wrong(Annotated[Scalar, Le(1)], 2, "x is 2; it must be at most 1"),
        wrong(Annotated[Scalar, Gt(0), Le(1)], 0, "x is 0; it must be in (0, 1]"),
        wrong(Annotated[Scalar, Interval(ge=0, lt=1)], 1, "x is 1; it must be in [0, 1)"),
        wrong(Fraction, 1.0, "x is 1.0; it must lie between 0 and 1, both excluded"),
        wrong(Share, 1.5, "x is 1.5; it must lie between 0 and 1"),
        wrong(Percent, -1, "x is -1; it must lie between 0 and 100"),
        wrong(Count, 0, "x is 0; it must be a positive whole number"),
        wrong(Count, 2.0, "x is 2.0; it must be a positive whole number"),
        wrong(Count, True, "x is True; it must be a positive whole number"),
        wrong(Count, None, "x is None; it must be a positive whole number"),
        wrong(Count, 2**31, "x is 2147483648; it must be a positive whole number, at most 214"),
        wrong(Count | None, 0, "x is 0; it must be a positive whole number"),
        wrong(Count | Padded, (4, 2), "x is a tuple of 2; it must be a positive whole number"),
        wrong(TracedCount, jnp.int32(0), "x is an array of shape (); it must be a positive"),
        wrong(CountOrZero, -1, "x is -1; it must be a whole number, 0 or more"),
        wrong(TwoOrMore, 1, "x is 1; it must be a whole number, 2 or more"),
        wrong(Seed, 2**32, "x is 4294967296; it must be a whole number, 0 or more, at most 42"),
        wrong(Vector | None, (1.0, 0.0), "x is (1.0, 0.0); it must be positive"),
        wrong(Vector, 1.0, "x is of shape (); give one number for each, [clients]"),
        wrong(Positive | Schedule, -1.0, "x is -1.0; it must be positive"),
        wrong(Way, "in", "x is 'in'; it must be 'up' or 'down'"),
        wrong(Way, None, "x is None; it must be 'up' or 'down'"),
        wrong(Way | None, 1, "x is 1; it must be 'up', 'down' or None"),
        wrong(Way | Count, "in", "x is 'in'; it must be 'up' or 'down'"),
        wrong(Way | Count, 0, "x is 0; it must be a positive whole number"),
        wrong(bool, 1, "x is 1; it must be True or False"),
        wrong(bool, None, "x is None; it must be True or False"),
        wrong(bool | None, "no", "x is 'no'; it must be True or False"),
    ],
)
def test_values_outside_of_an_annotation_are_refused(annotation, value, words, kind):
    with pytest.raises(kind) as refusal:
        check_argument("x", value, annotation)
    assert str(refusal.value).startswith(words)


def test_allowed_values_pass_unchanged():
    for annotation, values in [
        (Positive, [1e-30, 3, jnp.float32(2), np.float64(1), np.int8(1)]),
        (NonNegative, [0, 0.0]),
        (Fraction, [1e-9, 0.999]),
        (Annotated[int | float, Gt(0)], [0.5, 2]),
        (Share, [0, 1]),
        (Annotated[Scalar, Gt(0), Le(1)], [1, 0.1]),
        (Count | None, [1, 2**31 - 1, None]),
        (Count | Padded, [4, Padded(4, 0)]),
        (Seed, [0, 2**32 - 1]),
        (Vector | None, [(1.0, 2.0), np.ones(3), jnp.ones(2), None]),
        (Positive | Schedule, [0.1, lambda t: -1.0]),
        (Way | None, ["up", "down", None]),
        (Way | Count, ["up", 3]),
        (bool | None, [True, False, None]),
        (Any, [None, -1]),
        (float | None, [-1, "x"]),
        (jax.typing.ArrayLike, [1, [2]]),
    ]:
        for value in values:
            assert check_argument("x", value, annotation) is value


def test_integers_and_flags_become_python_types():
    for value in (np.uint8(3), np.array(3), jnp.int32(3)):
        assert type(check_argument("x", value, Count)) is int
    assert check_argument("x", np.True_, bool) is True


@checked
def factory(size: TracedCount, ratio: Positive = 1.0, *rest: Any, way: Way = "up", **more: Any):
    """An example."""
    return size, ratio, rest, way, more


def test_positional_and_keyword_arguments_are_checked():
    assert factory(np.int8(2)) == (2, 1.0, (), "up", {})
    assert factory(2, 0.5, -1, -2, way="down", size2=0) == (2, 0.5, (-1, -2), "down", {"size2": 0})
    for call in (lambda: factory(0), lambda: factory(size=0)):
        with pytest.raises(ValueError, match="size is 0"):
            call()
    for call in (lambda: factory(1, -1), lambda: factory(1, ratio=-1)):
        with pytest.raises(ValueError, match="ratio is -1"):
            call()
    with pytest.raises(ValueError, match="way is 'in'"):
        factory(1, way="in")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'size'"):
        factory()


def test_arguments_by_position_are_refused_unless_the_function_takes_any():
    @checked
    def some(first: Count, *, second=2):
        return first, second

    @checked
    def every(first: Count, *others):
        return first, others

    words = "some takes only first by position; give the others by name: second"
    with pytest.raises(TypeError, match=words):
        some(1, 2)
    assert every(np.int8(1), 2, 3) == (1, (2, 3))


def test_a_checked_function_keeps_its_name_and_signature():
    assert pickle.loads(pickle.dumps(factory)) is factory
    assert (factory.__name__, factory.__doc__) == ("factory", "An example.")
    assert inspect.isfunction(factory)
    assert list(inspect.signature(factory).parameters) == ["size", "ratio", "rest", "way", "more"]
    assert get_type_hints(factory, include_extras=True)["size"] == TracedCount


def test_annotations_may_name_what_is_defined_later():
    @checked
    def later(x: "Known"):
        return x

    globals()["Known"] = Count
    try:
        assert [later(np.int8(1)), later(2)] == [1, 2]
    finally:
        del globals()["Known"]
    assert later(np.int8(3)) == 3, "they are read once"


def test_traced_numbers_pass_and_their_shapes_are_checked():
    jaxpr = jax.make_jaxpr(lambda mu, size: factory(size, mu)[:2])(-1.0, 0)
    jax.eval_shape(lambda size: check_argument("x", size, TracedCount), 0)
    assert not jaxpr.eqns
    jax.eval_shape(lambda mu: quadratic(4, 2, mu=mu), -1.0)
    with pytest.raises(ValueError, match=r"ratio is of shape \(2,\); give one number"):
        jax.eval_shape(lambda mu: factory(1, mu)[1], jnp.ones(2))


def ranges():
    """Finds the public functions with ranges in annotations."""
    found = {}
    for _, name, value in documented():
        if inspect.isfunction(value):
            parameters = inspect.signature(value, eval_str=True).parameters
            limited = {
                key: member
                for key, each in parameters.items()
                for member in members_of(each.annotation)
                if limits_of(member) != Interval()
            }
            if limited:
                found[name] = value, limited
    return found


RANGES = ranges()


def test_the_factories_have_ranges():
    assert RANGES.keys() >= {"quadratic", "bandit", "synthetic", "mfa_rand", "least_squares"}


def test_functions_with_ranges_are_checked():
    wrong = [name for name, (each, _) in RANGES.items() if each.__code__ is not factory.__code__]
    assert wrong == []


def test_files_have_the_ranges_of_factories():
    """Both accept the same values around the ends of every range."""
    for name, (function, limited) in RANGES.items():
        columns = columns_of(function)
        for key, annotation in limited.items():
            kind, base = TypeAdapter(columns[key][0]), members_of(annotation.__origin__)
            step = 1 if int in base else 1e-6
            for end in ends_of(limits_of(annotation)):
                for value in (end - step, end, end + step):
                    given = (value,) if tuple[float, ...] in base else value
                    same = is_allowed_in_files(kind, given) == is_allowed(annotation, given)
                    assert same, (name, key, value)


def ends_of(limits):
    return [x for x in (limits.gt, limits.ge, limits.lt, limits.le) if x is not None]


def is_allowed(annotation, value):
    try:
        check_argument("x", value, annotation)
    except ValueError:
        return False
    return True


def is_allowed_in_files(kind, value):
    try:
        kind.validate_python(value)
    except ValidationError:
        return False
    return True


def test_an_assignment_accepts_counts_of_any_integer_type():
    assignment = mfa_rand(np.uint8(200), jnp.int32(2), cohort_size=np.int8(100))
    assert assignment.num_clients * 2 == 400


PARTS = [
    "mfa_rr(24, 2)",
    "fedavg(0.1, local_steps=5)",
    "fedprox(local_sgd(0.1, steps=2, optimizer=adam), mu=1.0)",
    "compressed(fedavg(0.1, local_steps=1), top_k(0.1))",
    "available(mfa_rand(24, 2, cohort_size=12), bernoulli(0.5))",
]
FACTORIES = {"adam": optax.adam} | {
    each.__name__: each
    for each in (
        *(available, bernoulli, compressed, fedavg, fedprox, local_sgd, mfa_rand, mfa_rr, top_k),
    )
}


def test_a_part_prints_as_its_call_and_pickle_saves_it():
    for call in PARTS:
        part = eval(call, FACTORIES)
        loaded = pickle.loads(pickle.dumps(part))
        assert repr(part) == repr(loaded) == call
        assert type(loaded) is type(part)


def test_a_changed_part_has_no_call():
    changed = mfa_rand(24, 2)._replace(num_clients=25)
    assert changed.call is None
    assert changed.sampling is None
    assert repr(changed).startswith("Assignment(num_clients=25")


def test_a_wrapper_that_returns_its_part_does_not_rename_it():
    @part
    def same(inner):
        return inner

    inner = mfa_rr(24, 2)
    assert repr(same(inner)) == "same(mfa_rr(24, 2))"
    assert repr(inner) == "mfa_rr(24, 2)"


def test_calls_show_types_of_arrays_and_short_lists():
    law, assignment = bernoulli(jnp.full(24, 0.5)), mfa_rand(24, 2, processors=[1] * 24)
    assert repr(law) == "bernoulli(float32[24])"
    assert repr(assignment) == "mfa_rand(24, 2, processors=[1, 1, 1, 1, 1, 1, ...])"
    traced = []
    jax.eval_shape(lambda p: traced.append(repr(bernoulli(p))), 0.5)
    assert traced == ["bernoulli(float32[])"]


def test_reprs_do_not_grow_with_the_problem():
    def shown(size):
        task, algorithm, assignment = quadratic(size, 4, mu=0.5), fedavg(0.1, local_steps=1), mfa_rr
        setup = Setup(task, algorithm, assignment(size, 2), jnp.zeros(task.dim))
        state, trace = simulate(0, *setup[:3], size)
        axes = {"algorithm.local_steps": [i + 1 for i in range(size)]}
        grid = Grid(setup, axes, size, num_seeds=size)
        about = manifest(axes, seed=0, data="")
        for each in (assignment(size, 2), setup, state, trace, grid):  # in a notebook
            assert 100 < len(each._repr_html_()) < 4000
        return [len(repr(each)) for each in (task, setup, state, trace, grid, about)]

    small, large = shown(20), shown(200)
    for before, after in zip(small, large, strict=True):
        assert after <= before + 20, (small, large)


def test_a_call_keeps_the_arguments_it_had():
    chances, processors = np.full(4, 0.5), [1, 1, 1, 1]
    law, assignment = bernoulli(chances), mfa_rand(4, 2, processors=processors)
    chances[:], processors[:] = 0.01, [2, 2, 2, 2]
    assert pickle.loads(pickle.dumps(law)).share.tolist() == [0.5] * 4
    assert pickle.loads(pickle.dumps(assignment)).sampling.most_models == 1


def test_parts_do_not_change_and_copies_are_the_part():
    part = mfa_rand(4, 2)
    assert copy.copy(part) is part
    assert copy.deepcopy([part])[0] is part
    with pytest.raises(AttributeError, match="cannot assign to field 'sampling'"):
        part.sampling = None


def test_functions_of_wrapped_parts_can_be_compiled():
    assignment = available(full_participation(4), bernoulli(1.0))
    key, look = jax.random.key(0), Look()
    state = assignment.init(key, look)
    cohort, _ = jax.jit(assignment.assign, static_argnums=3)(key, 1, state, look)
    assert cohort.clients.tolist() == [0, 1, 2, 3]
