"""Flax modules as networks of a task: checks, initial parameters and outputs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedjax_mm.checks.values import NO_VALUE, described

_BATCH = 1009


def check_module(module: Any) -> nn.Module:
    """Checks that a flax module can be part of a compiled program, and returns it."""
    if isinstance(module, type):
        raise TypeError(
            f"module is {described(module)}; give an instance, such as {module.__name__}(...)"
        )
    if any(base.__module__.startswith("flax.nnx") for base in type(module).__mro__) and not (
        isinstance(module, nn.Module)
    ):
        name = type(module).__name__
        raise TypeError(
            f"module is an nnx module; give flax.nnx.bridge.to_linen({name}, ...), with the "
            f"arguments of {name} except rngs"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module is {described(module)}; give a flax.linen module, such as tasks.MLP(10)"
        )
    try:
        hash(module)
    except TypeError as error:
        raise TypeError(
            f"module {type(module).__name__} has an attribute that cannot be hashed; give tuples "
            "instead of lists and arrays"
        ) from error
    return module


class _Traced(NamedTuple):
    """Properties of a module found by tracing it.

    Attributes:
      shape: the shape of its logits.
      drawn: names of the random streams that it uses in training.
      allowed: names of streams that its layers could use at other dropout rates.
    """

    shape: tuple[int, ...]
    drawn: frozenset[str]
    allowed: frozenset[str]


def check_outputs(
    module: nn.Module,
    features: Any,
    num_classes: int,
    rngs: tuple[str, ...],
    takes_weights: bool,
) -> None:
    """Raises `ValueError` unless a module has one output per class and `rngs` are its streams.

    The module is only traced, so nothing is computed.

    Args:
      module: the network.
      features: the features of all examples; only their shape and dtype are used.
      num_classes: C, the number of classes.
      rngs: the names of the module's random streams.
      takes_weights: whether the module is also called with weights.
    """
    size = _BATCH + num_classes  # a batch size that is unlikely to equal another dimension
    example = jax.ShapeDtypeStruct(features.shape[1:], features.dtype)
    shape, drawn, allowed = _traced(module, example, size, rngs, takes_weights)
    if shape != (size, num_classes):
        words = ", ".join("batch" if each == size else str(each) for each in shape)
        raise ValueError(
            f"module {type(module).__name__} returns logits of shape [{words}]; give one output "
            f"for each class, [batch, {num_classes}]"
        )
    right = tuple(sorted(drawn | (allowed & {*rngs})))
    if {*right} != {*rngs}:
        source = f"from {' and '.join(map(repr, sorted(drawn)))}" if drawn else "nothing"
        raise ValueError(
            f"rngs is {rngs}, but module {type(module).__name__} draws {source} in training; give "
            f"rngs={right}"
        )


class _StatisticsError(ValueError):
    """Raised if a module keeps batch statistics."""


@functools.lru_cache(maxsize=64)  # a sweep rebuilds its tasks whenever it is traced
def _traced(
    module: nn.Module,
    example: jax.ShapeDtypeStruct,
    size: int,
    rngs: tuple[str, ...],
    takes_weights: bool,
) -> _Traced:
    name = getattr(module, "nnx_class", type(module)).__name__
    # Allow both names, because flax hides nnx layers, which substitute one stream for another.
    is_nnx = hasattr(module, "nnx_class")
    allowed = {"dropout", "default"} if is_nnx else set()

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        fields = {field.name for field in dataclasses.fields(context.module)}
        allowed.update([context.module.rng_collection] if "rng_collection" in fields else [])
        allowed.update(["dropout"] if "dropout_rate" in fields else [])
        return call(*args, **kwargs)

    def evaluated(rng_key: PRNGKeyArray, features: Array, weights: Array) -> Any:
        variables = initial(module, rng_key, features[:1], rngs)
        if "batch_stats" in variables:
            raise _StatisticsError(
                f"module {name} keeps batch_stats, which no client may change for others; give a "
                "norm without them, such as GroupNorm"
            )
        more = [weights] if takes_weights else []
        params = variables["params"]
        return logits_of(module, params, features, *more, rngs={}), params

    def trained(rngs: Any, params: Any, features: Array, weights: Array) -> Any:
        more = [weights] if takes_weights else []
        return logits_of(module, params, features, *more, rngs=rngs)

    shapes = (size, *example.shape)
    kind = example.dtype if jnp.issubdtype(example.dtype, jnp.floating) else jnp.result_type(float)
    weights = jax.ShapeDtypeStruct((size,), jnp.result_type(float))
    inputs = jax.ShapeDtypeStruct(shapes, kind), weights
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        with nn.intercept_methods(note):
            logits, params = jax.eval_shape(evaluated, key, *inputs)
        asked = {*rngs} if is_nnx else {"dropout", *allowed, *rngs}
        streams = dict.fromkeys(sorted(asked), key)
        is_used = _used(jax.make_jaxpr(trained)(streams, params, *inputs).jaxpr)
    except _StatisticsError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # flax and the module itself can raise any exception
        (line, *_) = str(error).strip().splitlines() or [type(error).__name__]
        line = line.split(" (https://")[0]  # drops the link that flax adds
        if isinstance(error, NO_VALUE):
            raise ValueError(
                f"module {name} needs the value of an array, which is traced and has none: "
                f"{line}; instead of `if` use jax.numpy.where or jax.lax.cond"
            ) from error
        if "rng" in line.lower():
            remedy = "name it, as in classification(..., rngs=('dropout',)), for training alone"
            if any(stream in line for stream in rngs):
                remedy = "where it is tested there is none: ask self.has_rng, as MLP does"
            raise ValueError(f"module {name} draws from a stream: {line}; {remedy}") from error
        raise ValueError(
            f"module {name} does not take features of shape [batch, "
            f"{', '.join(map(str, example.shape))}]: {line}"
        ) from error
    if not hasattr(logits, "shape"):
        raise ValueError(f"module {name} returns {described(logits)}; return logits alone")
    drawn = (each for each, used in zip(streams, is_used, strict=False) if used)
    return _Traced(tuple(logits.shape), frozenset(drawn), frozenset(allowed))


def _used(program: Any) -> list[bool]:
    """Returns, for each input of a traced function, whether any output may depend on it."""
    # Count only used keys, because nnx makes a key for every stream, even unused ones.
    live = {id(x) for x in program.outvars}
    for line in reversed(program.eqns):
        if live.intersection(map(id, line.outvars)):
            live.update(map(id, line.invars))
    return [id(x) in live for x in program.invars]


def initial(
    module: nn.Module, rng_key: PRNGKeyArray, features: Array, rngs: Sequence[str] = ()
) -> Any:
    """Returns the module's initial variables, including "params"."""
    # Provide all streams, because nnx modules need them here. They can share a key, because flax
    # folds the location of each draw into it and only the parameters are kept.
    return module.init(dict.fromkeys(("params", *rngs), rng_key), features)


def logits_of(module: nn.Module, params: Any, *inputs: Array, rngs: dict[str, PRNGKeyArray]) -> Any:
    """Returns the logits, in evaluation mode if no random streams are given."""
    call: Any = module.apply  # flax's type allows for additional results
    if not rngs and hasattr(module, "nnx_class"):
        # Without streams, an nnx module would always draw with the same keys.
        return call({"params": params}, *inputs, nnx_method=_evaluated)
    return call({"params": params}, *inputs, rngs=rngs)


def _evaluated(module: Any, *inputs: Array) -> Any:
    module.eval()
    return module(*inputs)
