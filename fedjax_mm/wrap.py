"""The two ways to wrap: an assignment whose cohorts change, and an algorithm whose messages do.

The wrapped part keeps its keys, its state and its functions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray

from fedjax_mm.base import (
    Algorithm,
    Assignment,
    ClientContext,
    ClientState,
    Cohort,
    Contribution,
    Index,
    Look,
    Metrics,
    Params,
    Round,
    Sampling,
    ServerContext,
    ServerState,
    Steps,
    Task,
    keys,
)
from fedjax_mm.base.paths import Where
from fedjax_mm.base.sums import Joint, as_arrays, dense_update
from fedjax_mm.checks.instances import check_algorithm, check_assignment
from fedjax_mm.checks.values import described


class Wrapping(NamedTuple):
    """State of a wrapped part.

    Attributes:
      inner: the state of the part inside.
      own: the state of the wrapper.
    """

    inner: Any
    own: Any


class Hidden:
    """Stand-in for an argument that the server of a wrapped algorithm must not read."""

    def __init__(self, refusal: str, **public: Any) -> None:
        """Stores the message of the error, and the attributes that the server may read."""
        vars(self).update(public, _refusal=refusal)

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._refusal)

    def __getitem__(self, key: Any) -> Any:
        raise ValueError(self._refusal)


ChangeFn: TypeAlias = Callable[[PRNGKeyArray, Round, Any, Cohort, Look], tuple[Cohort, Any]]
"""``(rng_key, round, own, cohort, look) -> (cohort, own)``, with the wrapper's key and state."""

KeysFn: TypeAlias = Callable[[PRNGKeyArray], tuple[PRNGKeyArray, PRNGKeyArray]]
"""Maps the key of a round to those of the assignment inside and of the wrapper."""

SendFn: TypeAlias = Callable[[ClientContext, Contribution, Any, Any], tuple[Contribution, Any]]
"""``(context, sent, server, client) -> (sent, client)``, with the wrapper's states."""

ServeFn: TypeAlias = Callable[[ServerContext, Any], tuple[ServerContext, Any]]
"""``(context, server) -> (context, server)``, with the wrapper's state of the server."""


def layers(part: Any) -> list[Any]:
    """An algorithm or an assignment and those inside it, from the outside in."""
    return [part] if part.inner is None else [part, *layers(part.inner)]


def names_of(part: Algorithm | Assignment) -> list[str]:
    """Names of the wrappers around a part, from the outside in."""
    return [each.name for each in layers(part)[:-1]]


def wrap_assignment(
    inner: Assignment,
    name: str,
    change: ChangeFn,
    *,
    keys_of: KeysFn | None = None,
    init: Callable[[PRNGKeyArray], Any] | None = None,
    metrics: Callable[[Any], Metrics] = lambda own: {},
    sampling: Sampling | None = None,
    learn: Callable[[Round, Cohort, Any], Any] | None = None,
    mix: Callable[[Round, Any, Params | None, Params], Params] | None = None,
    where: Where | None = None,
) -> Assignment:
    """Wraps an assignment and changes its cohorts.

    Args:
      inner: the assignment.
      name: the wrapper's name.
      change: changes a cohort. It gets the wrapper's key, the round, the wrapper's state, the
        cohort and the `Look` of the round, and returns the new cohort and the wrapper's new state.
      keys_of: divides the key of a round. By default the wrapper's key depends on the number of
        wrappers inside.
      init: makes the wrapper's state. Without it, the state is that of the assignment.
      metrics: returns numbers by name, from the wrapper's state, to record for all models.
      sampling: how the clients are sampled; None if unknown. Privacy accounting relies on it.
      learn: changes the wrapper's state after a round, given the round and the cohort of
        participants.
      mix: mixes the models, given the wrapper's state. None leaves that to the assignment.
      where: the parameters that `mix` gets, as in `Assignment`.

    Raises:
      TypeError: if `inner` is not an assignment.

    Example: the messages of every second round are lost.
      >>> import dataclasses
      >>> from fedjax_mm import fedavg, mfa_rr, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> def change(rng_key, round, own, cohort, look):
      ...     arrives = cohort.participates() & (round % 2 == 0)
      ...     return dataclasses.replace(cohort, takes_part=arrives), own
      >>> assignment = wrap_assignment(mfa_rr(24, 2), "every_second", change)
      >>> task, algorithm = quadratic(24, 4, mu=0.1), fedavg(0.1, local_steps=5)
      >>> simulate(0, task, algorithm, assignment, 4)[1].client_updates[:, 0].tolist()
      [0, 0, 12, 0, 12]
    """
    split, join = (_alone, _first) if init is None else (tuple, Wrapping)
    depth = len(names_of(check_assignment(inner)))
    both: KeysFn = keys_of or (lambda key: (key, keys.wrapper_key(key, depth)))

    def start(rng_key: PRNGKeyArray, look: Look) -> Any:
        _, own_key = both(rng_key)
        return join(inner.init(rng_key, look), () if init is None else init(own_key))

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        inside, own = split(state)
        inner_key, own_key = both(rng_key)
        cohort, inside = inner.assign(inner_key, round, inside, look)
        found = change(own_key, round, own, cohort, look)
        cohort, own = _two(name, "change", found, "a Cohort", has_state=init is not None)
        return cohort, join(inside, own)

    def observe(round: Round, cohort: Cohort, reports: Any, state: Any) -> Any:
        inside, own = split(state)
        inside = inner.observe(round, cohort, reports, inside) if inner.observe else inside
        return join(inside, own if learn is None else learn(round, cohort, own))

    def mixed(round: Round, state: Any, old: Params | None, new: Params) -> Params:
        inside, own = split(state)
        if mix is not None:
            return mix(round, own, old, new)
        of_inner: Any = inner.mix
        return of_inner(round, inside, old, new)

    def measured(state: Any) -> Metrics:
        inside, own = split(state)
        new = {key: jnp.full(inner.num_models, x) for key, x in metrics(own).items()}
        return (inner.metrics(inside) if inner.metrics else {}) | new

    return inner._replace(
        init=start,
        assign=assign,
        observe=observe if inner.observe or learn else None,
        metrics=measured,
        mix=mixed if inner.mix or mix else None,
        where=inner.where if mix is None else where,
        name=name,
        inner=inner,
    ).sampled(sampling)


def _unchanged(params: Params, own: Any) -> Params:
    del own
    return params


def wrap_algorithm(
    inner: Algorithm,
    name: str,
    *,
    send: SendFn,
    receive: Callable[[ClientContext, Any], ClientContext] = lambda context, own: context,
    serve: ServeFn = lambda context, own: (context, own),
    init: Callable[[Task, Params, Any, Any], tuple[Any, Any]] | None = None,
    metrics: Callable[[Task, Params, Any, Any], Metrics] = lambda *_: {},
    steps_idle: bool = False,
    steps: Callable[[Any], Bool[Array, ""]] | None = None,
    personal: Callable[[Params, Any], Params] = _unchanged,
    download: Callable[[Params], Any] | None = None,
) -> Algorithm:
    """Wraps an algorithm and changes its contributions and sums.

    Args:
      inner: the algorithm.
      name: the wrapper's name.
      send: changes a client's contribution.
      receive: changes the context of a client, given the wrapper's state of the client.
      serve: changes the context of the server step, with the sum of the contributions.
      init: returns the wrapper's states of the server and of one client, given the task, the
        parameters and both states of the algorithm. Without it, states are those of the algorithm.
      metrics: returns additional metrics by name, given the task, the parameters, and the server
        states of the algorithm and of the wrapper.
      steps_idle: whether the server also steps in rounds without participants.
      steps: whether the server of the algorithm steps, given the wrapper's new state; otherwise the
        model keeps its parameters and that server's state. None means always.
      personal: changes the parameters with which a client evaluates, given the wrapper's state of
        the client.
      download: returns the part of the parameters that a client receives.

    Raises:
      TypeError: if `inner` is not an algorithm.

    Example: clients send half of their updates.
      >>> import jax
      >>> from fedjax_mm import fedavg, full_participation, simulate
      >>> from fedjax_mm.base.sums import dense_update
      >>> from fedjax_mm.tasks import quadratic
      >>> def send(context, sent, server, client):
      ...     sent = dense_update(sent, context.params)  # a quadratic's updates are sparse
      ...     return sent._replace(update=jax.tree.map(lambda x: x / 2, sent.update)), client
      >>> halved = wrap_algorithm(fedavg(0.1, local_steps=1), "halved", send=send)
      >>> task, everybody = quadratic(4, 2, mu=0.1), full_participation(4)
      >>> _, trace = simulate(0, task, halved, everybody, 5)
      >>> _, same = simulate(0, task, fedavg(0.05, local_steps=1), everybody, 5)
      >>> bool(abs(trace.metrics["loss"] - same.metrics["loss"]).max() < 1e-6)
      True
    """
    split, join = (_alone, _first) if init is None else (tuple, Wrapping)
    count: Any = check_algorithm(inner).num_steps

    def start(task: Task, params: Params) -> tuple[Any, Any]:
        server, client = inner.init(task, params)
        own = ((), ()) if init is None else init(task, params, server, client)
        return join(server, own[0]), join(client, own[1])

    def client(
        context: ClientContext, server_state: Any, client_state: Any
    ) -> tuple[Contribution, Any]:
        (server, server_own), (inside, own) = split(server_state), split(client_state)
        sent, inside = inner.client(receive(context, own), server, inside)
        if isinstance(sent.update, Joint):
            raise ValueError(
                f"{name} changes the clients' updates, but the algorithm sends two parts that the "
                "server multiplies, as fednova does; use another algorithm, such as fedavg"
            )
        found = send(context, as_arrays(sent), server_own, own)
        sent, own = _two(name, "send", found, "a Contribution", has_state=init is not None)
        return sent, join(inside, own)

    def server(context: ServerContext) -> tuple[Params, Any]:
        (inside, own), states = split(context.server_state), context.client_states
        states = states.inner if init and isinstance(states, Wrapping) else states
        found = serve(context._replace(server_state=inside, client_states=states), own)
        context, own = _two(name, "serve", found, "a ServerContext", has_state=init is not None)
        new = inner.server(context)
        if steps is not None:
            old = context.params, context.server_state
            new = jax.tree.map(partial(jnp.where, steps(own)), new, old)
        params, inside = new
        return params, join(inside, own)

    def num_steps(task: Task, client: Index, server: Any) -> Steps:
        steps: Steps = count(task, client, split(server)[0])
        return steps

    def measured(task: Task, params: Params, server: Any) -> Metrics:
        inside, own = split(server)
        others = inner.metrics(task, params, inside) if inner.metrics else {}
        return others | metrics(task, params, inside, own)

    def evaluated(params: Params, state: Any) -> Params:
        inside, own = split(state)
        own_model = inner.personal(params, inside) if inner.personal else params
        return personal(own_model, own)

    has_own_models = inner.personal is not None or personal is not _unchanged
    return inner._replace(
        init=start,
        client=client,
        server=server,
        num_steps=None if count is None else num_steps,
        steps_idle=inner.steps_idle or steps_idle,
        metrics=measured,
        personal=evaluated if has_own_models else None,
        download=inner.download if download is None else download,
        name=name,
        inner=inner,
    )


def sent_by(
    algorithm: Algorithm, context: ClientContext, server: ServerState, client: ClientState
) -> Contribution:
    """Trains a client outside of a round, and returns its contribution without the report."""
    sent, _ = algorithm.client(context, server, client)
    return as_arrays(sent)._replace(report=())


def zero_message(
    algorithm: Algorithm, task: Task, params: Params, server: ServerState, client: ClientState
) -> Contribution:
    """Returns zeros with the shapes and types of a client's dense contribution."""

    def send(rng_key: PRNGKeyArray, *given: Any) -> Contribution:
        params, *states = given
        context = ClientContext(rng_key, 1, task, jnp.int32(0), params)
        return dense_update(sent_by(algorithm, context, *states), params)

    rng_key = jax.eval_shape(jax.random.key, 0)
    shapes = jax.eval_shape(send, rng_key, params, server, client)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _two(name: str, function: str, found: Any, first: str, *, has_state: bool) -> tuple[Any, Any]:
    """Returns the two results of a wrapper's function, or raises an error if it has others."""
    if type(found) is not tuple or len(found) != 2:
        raise TypeError(
            f"{function} of {name} returns {described(found)}; return two: {first}, and the "
            "wrapper's state, which is () without init"
        )
    if not has_state and jax.tree.leaves(found[1]):
        raise ValueError(
            f"{function} of {name} returns a state, but the wrapper has none; give init, which "
            "makes the first one"
        )
    return found


def _alone(state: Any) -> tuple[Any, tuple[()]]:
    return state, ()


def _first(inside: Any, own: Any) -> Any:
    del own
    return inside
