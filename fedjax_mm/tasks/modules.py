"""Networks of a task, flax modules or pairs of functions: checks, parameters and outputs."""

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from fedjax_mm.base import Params
from fedjax_mm.base.programs import NO_VALUE
from fedjax_mm.checks.values import described

STATISTICS = "batch_stats"
"""Flax's name of running statistics, and the key of those in parameters."""


class Network(Protocol):
    """A flax module or a `Pair`."""

    @property
    def init(self) -> Callable[..., Any]:
        """Draws initial parameters."""

    @property
    def apply(self) -> Callable[..., Any]:
        """Computes outputs."""


class Pair(NamedTuple):
    """A network of plain functions.

    Attributes:
      init: from a key and features ``[1, ...]`` to a pytree of float arrays.
      apply: from parameters and features ``[batch, ...]`` to outputs, such as logits ``[batch,
        classes]``. It may have an argument `weights`, ``[batch]``, and an argument `rng_key`, which
        is None in evaluation.
    """

    init: Callable[..., Any]
    apply: Callable[..., Any]


_GIVE = "give a flax.linen module, such as tasks.MLP(10), or a pair of functions (init, apply)"
_KEY = "rng_key"


def check_module(module: Any) -> Network:
    """Checks that a network can be part of a compiled program, and returns it, or the `Pair`."""
    if type(module) in (tuple, list, Pair):
        return _checked_pair(module)
    if isinstance(module, type):
        raise TypeError(
            f"module is {described(module)}; give an instance, such as {module.__name__}(...)"
        )
    # Ask for the loaded flax, because no other one could have made the module.
    linen = sys.modules.get("flax.linen")
    is_linen = linen is not None and isinstance(module, linen.Module)
    name = type(module).__name__
    if not is_linen and any(
        base.__module__.startswith("flax.nnx") for base in type(module).__mro__
    ):
        raise TypeError(
            f"module is an nnx module; give flax.nnx.bridge.to_linen({name}, ...), with the "
            f"arguments of {name} except rngs"
        )
    if not is_linen:
        raise TypeError(f"module is {described(module)}; {_GIVE}")
    try:
        hash(module)
    except TypeError as error:
        raise TypeError(
            f"module {name} has an attribute that cannot be hashed; give tuples "
            "instead of lists and arrays"
        ) from error
    network: Network = module
    return network


def _checked_pair(functions: Sequence[Any]) -> Pair:
    if len(functions) != 2:
        raise TypeError(f"module is a {type(functions).__name__} of {len(functions)}; {_GIVE}")
    pair = Pair(*functions)
    for name, function, first in zip(Pair._fields, pair, (_KEY, "params"), strict=True):
        if not callable(function):
            raise TypeError(f"{name} of the pair is {described(function)}; {_GIVE}")
        try:
            hash(function)
        except TypeError as error:
            raise TypeError(
                f"{name} of the pair is {described(function)}, which cannot be hashed; give a "
                "function, which may use such a value"
            ) from error
        signature = inspect.signature(function)
        named = {*signature.parameters} & {"weights", _KEY} if name == "apply" else ()
        try:
            signature.bind(None, None, **dict.fromkeys(named))
        except TypeError as error:
            more = " and, if it needs them, weights and rng_key" if name == "apply" else ""
            raise TypeError(
                f"{name} of the pair has the arguments {signature}; give a function of ({first}, "
                f"x){more}"
            ) from error
    return pair


def takes_weights(module: Any) -> bool:
    """Whether a network has an argument `weights`."""
    call = module.apply if isinstance(module, Pair) else module.__call__
    return "weights" in inspect.signature(call).parameters


def streams_of(module: Network, rngs: Sequence[str]) -> tuple[str, ...]:
    """Names of a network's random streams, which for a pair is only `rng_key`."""
    rngs = (rngs,) if isinstance(rngs, str) else tuple(rngs)
    if not isinstance(module, Pair):
        return rngs
    if rngs:
        raise ValueError(
            f"rngs is {rngs}, but streams have names in flax modules only; give apply an argument "
            "rng_key instead, which is a key in training and None in evaluation"
        )
    return (_KEY,) if _KEY in inspect.signature(module.apply).parameters else ()


def name_of(module: Any) -> str:
    """A module's name in error messages."""
    if isinstance(module, Pair):
        return f"({', '.join(getattr(f, '__name__', type(f).__name__) for f in module)})"
    return str(getattr(module, "nnx_class", type(module)).__name__)


class _Traced(NamedTuple):
    """Properties of a module found by tracing it.

    Attributes:
      outputs: the shapes of its outputs.
      drawn: names of the random streams that it uses in training.
      allowed: names of streams that its layers could use at other dropout rates.
    """

    outputs: Any
    drawn: frozenset[str]
    allowed: frozenset[str]


def check_outputs(
    module: Any, features: Any, size: int, rngs: tuple[str, ...], has_weights: bool
) -> Any:
    """Shapes of a module's outputs, or raises `ValueError` unless `rngs` are its streams.

    The module is only traced, so nothing is computed.

    Args:
      module: the network, checked.
      features: the features of all examples; only their shape and dtype are used.
      size: the number of examples in a batch.
      rngs: the names of the module's random streams.
      has_weights: whether the module is also called with weights.
    """
    example = jax.ShapeDtypeStruct(features.shape[1:], features.dtype)
    real = jnp.result_type(float)
    outputs, drawn, allowed = _traced(module, example, size, rngs, has_weights, real)
    right = tuple(sorted(drawn | (allowed & {*rngs})))
    if {*right} != {*rngs}:
        source = f"from {' and '.join(map(repr, sorted(drawn)))}" if drawn else "nothing"
        raise ValueError(
            f"rngs is {rngs}, but module {name_of(module)} draws {source} in training; give "
            f"rngs={right}"
        )
    return outputs


class _RefusedError(ValueError):
    """Raised for variables that cannot be parameters."""


@functools.lru_cache(maxsize=64)  # a sweep rebuilds its tasks whenever it is traced
def _traced(
    module: Any,
    example: jax.ShapeDtypeStruct,
    size: int,
    rngs: tuple[str, ...],
    has_weights: bool,
    real: Any,  # the dtype of floats, because double precision gives other outputs
) -> _Traced:
    name = name_of(module)
    # Allow both names, because flax hides nnx layers, which substitute one stream for another.
    is_nnx = hasattr(module, "nnx_class")
    allowed = {"dropout", "default"} if is_nnx else set()
    is_pair = isinstance(module, Pair)

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        fields = {field.name for field in dataclasses.fields(context.module)}
        allowed.update([context.module.rng_collection] if "rng_collection" in fields else [])
        allowed.update(["dropout"] if "dropout_rate" in fields else [])
        if isinstance(context.module, linen.BatchNorm) and context.module.momentum:
            raise _RefusedError(
                f"module {name} has a BatchNorm of momentum {context.module.momentum:g}; give "
                "momentum=0.0, because running statistics follow at the local learning rate"
            )
        return call(*args, **kwargs)

    def evaluated(rng_key: PRNGKeyArray, features: Array, weights: Array) -> Any:
        params = initial(module, rng_key, features[:1], rngs)
        for path, leaf in jax.tree.leaves_with_path(params):
            if not jnp.issubdtype(getattr(leaf, "dtype", object), jnp.floating):
                raise _RefusedError(
                    f"module {name} has the parameter params{jax.tree_util.keystr(path)}, which is "
                    f"{described(leaf)}; parameters are arrays of floats: keep other values out of "
                    "them, for example by equinox.partition or flax.nnx.split"
                )
        return outputs_of(module, params, features, weights if has_weights else None, {}), params

    def trained(rngs: Any, params: Any, features: Array, weights: Array) -> Any:
        given = weights if has_weights else None
        outputs, changed = trained_outputs(module, params, features, given, rngs)
        return outputs, changed.get(STATISTICS)

    shapes = (size, *example.shape)
    kind = example.dtype if jnp.issubdtype(example.dtype, jnp.floating) else real
    weights = jax.ShapeDtypeStruct((size,), real)
    inputs = jax.ShapeDtypeStruct(shapes, kind), weights
    key = jax.eval_shape(lambda: jax.random.key(0))
    linen: Any = sys.modules.get("flax.linen")
    try:
        with contextlib.nullcontext() if is_pair else linen.intercept_methods(note):
            outputs, params = jax.eval_shape(evaluated, key, *inputs)
        asked = {*rngs} if is_nnx or is_pair else {"dropout", *allowed, *rngs}
        streams = dict.fromkeys(sorted(asked), key)
        is_used = _used(jax.make_jaxpr(trained)(streams, params, *inputs).jaxpr)
    except _RefusedError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # flax and the module itself can raise any exception
        (line, *_) = str(error).strip().splitlines() or [type(error).__name__]
        line = line.split(" (https://")[0]  # drops the link that flax adds
        if isinstance(error, NO_VALUE):
            raise ValueError(
                f"module {name} needs the value of an array, which is traced and has none: "
                f"{line}; instead of `if` use jax.numpy.where or jax.lax.cond"
            ) from error
        if type(error).__name__ == "ModifyScopeVariableError":
            raise ValueError(
                f"module {name} changes its batch_stats in evaluation; give BatchNorm "
                "use_running_average=not self.is_mutable_collection('batch_stats')"
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
    drawn = (each for each, used in zip(streams, is_used, strict=False) if used)
    return _Traced(outputs, frozenset(drawn), frozenset(allowed))


def _used(program: Any) -> list[bool]:
    """For each input of a traced function, whether any output may depend on it."""
    # Count only used keys, because nnx makes a key for every stream, even unused ones.
    live = {id(x) for x in program.outvars}
    for line in reversed(program.eqns):
        if live.intersection(map(id, line.outvars)):
            live.update(map(id, line.invars))
    return [id(x) in live for x in program.invars]


def initial(
    module: Network, rng_key: PRNGKeyArray, features: Array, rngs: Sequence[str] = ()
) -> Any:
    """Draws the network's initial parameters."""
    if isinstance(module, Pair):
        return module.init(rng_key, features)
    # Provide all streams, because nnx modules need them here. They can share a key, because flax
    # folds the location of each draw into it and only the parameters are kept.
    variables = module.init(dict.fromkeys(("params", *rngs), rng_key), features)
    if STATISTICS not in variables:
        return variables["params"]
    if hasattr(module, "nnx_class"):
        raise _RefusedError(
            f"module {name_of(module)} keeps batch_stats; give a linen module with nn.BatchNorm, "
            "or a norm without them, such as GroupNorm"
        )
    return {name: variables[name] for name in ("params", STATISTICS)}


def has_statistics(params: Params) -> bool:
    """Whether parameters contain running statistics of batch norm."""
    return isinstance(params, dict) and params.keys() == {"params", STATISTICS}


def follow(params: Params, statistics: Any) -> Float[Array, ""]:
    """0, with the gradient ``v - b`` for running statistics v, given those of a batch, b.

    A step of SGD then sets ``v <- (1 - eta) v + eta b``.
    """
    pairs = zip(*map(jax.tree.leaves, (params[STATISTICS], statistics)), strict=True)
    total = jnp.zeros(()) + sum(jnp.sum((v - lax.stop_gradient(b)) ** 2) / 2 for v, b in pairs)
    return total - lax.stop_gradient(total)


def trained_outputs(
    module: Network,
    params: Params,
    features: Array,
    weights: Array | None,
    rngs: dict[str, PRNGKeyArray],
) -> tuple[Any, dict[str, Any]]:
    """Outputs in training mode, and the statistics and sown values that a flax module changes."""
    if isinstance(module, Pair) or hasattr(module, "nnx_class"):
        return outputs_of(module, params, features, weights, rngs), {}
    named = {} if weights is None else {"weights": weights}
    changes = [STATISTICS, "intermediates"]
    return module.apply(_variables(params), features, **named, rngs=rngs, mutable=changes)


def _variables(params: Params) -> dict[str, Any]:
    if not has_statistics(params):
        return {"params": params}

    # Noise, compression and momentum may make a running variance negative.
    def at_least_0(path: Any, x: Array) -> Array:
        return jnp.maximum(x, 0) if path[-1].key == "var" else x

    statistics = jax.tree.map_with_path(at_least_0, params[STATISTICS])
    return {"params": params["params"], STATISTICS: statistics}


def outputs_of(
    module: Network,
    params: Params,
    features: Array,
    weights: Array | None,
    rngs: dict[str, PRNGKeyArray],
) -> Any:
    """Computes the outputs, in evaluation mode if no random streams are given.

    Args:
      module: the network.
      params: its parameters.
      features: ``[batch, ...]``.
      weights: the examples' weights ``[batch]``, or None for a network without such an argument.
      rngs: the keys of the random streams by name.
    """
    named: dict[str, Any] = {} if weights is None else {"weights": weights}
    if isinstance(module, Pair):
        if _KEY in inspect.signature(module.apply).parameters:
            named[_KEY] = rngs.get(_KEY)
        return module.apply(params, features, **named)
    if not rngs and hasattr(module, "nnx_class"):
        # Without streams, an nnx module would always draw with the same keys.
        return module.apply({"params": params}, features, **named, nnx_method=_evaluated)
    return module.apply(_variables(params), features, **named, rngs=rngs)


def _evaluated(module: Any, *inputs: Array, **named: Array) -> Any:
    module.eval()
    return module(*inputs, **named)
