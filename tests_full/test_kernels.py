"""Kernel launches per round, in handwritten HLO and in compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.kernels import Module, by_source

TEXT = """HloModule rounds

%fused (p: f32[100,8], q: s32[4,1]) -> f32[4,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %q = s32[4,1]{1,0} parameter(1)
  ROOT %rows = f32[4,8]{1,0} gather(%p, %q), offset_dims={1}
}

%step (a: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %a = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%a), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%a), index=1
  %dot = f32[4,8]{1,0} dot(%x, %x), metadata={op_name="jit(run)/while/body/dot_general"}
  %add = s32[] add(%i, %i)
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%add, %dot)
}

%hash (b: (s32[], u32[2], u32[4], u32[4])) -> (s32[], u32[2], u32[4], u32[4]) {
  %b = (s32[], u32[2]{0}, u32[4]{0}, u32[4]{0}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %k = u32[2]{0} get-tuple-element(%b), index=1
  %r = u32[4]{0} get-tuple-element(%b), index=2
  %l = u32[2]{0} xor(%k, %k)
  ROOT %u = (s32[], u32[2]{0}, u32[4]{0}, u32[4]{0}) tuple(%j, %l, %r, %r)
}

%goes_on (c: (s32[], f32[4,8])) -> pred[] {
  %c = (s32[], f32[4,8]{1,0}) parameter(0)
  %m = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%m, %m), direction=LT
}

%small (h: (s32[], u32[2], u32[4], u32[4])) -> (s32[], u32[2], u32[4], u32[4]) {
  %h = (s32[], u32[2]{0}, u32[4]{0}, u32[4]{0}) parameter(0)
  ROOT %loop = (s32[], u32[2]{0}, u32[4]{0}, u32[4]{0}) while(%h), condition=%goes_on, \
body=%hash, backend_config={"known_trip_count":{"n":"5"}}
}

%few (d: f32[4,8]) -> f32[4,8] {
  ROOT %d = f32[4,8]{1,0} parameter(0)
}

%many (e: f32[4,8]) -> f32[4,8] {
  %e = f32[4,8]{1,0} parameter(0)
  %sort = f32[4,8]{1,0} sort(%e), dimensions={0}, to_apply=%few
  ROOT %neg = f32[4,8]{1,0} negate(%sort)
}

%command_buffer (z: f32[4,8]) -> f32[4,8] {
  %z = f32[4,8]{1,0} parameter(0)
  ROOT %cos = f32[4,8]{1,0} cosine(%z)
}

%round (f: (s32[], f32[100,8], f32[4,8])) -> (s32[], f32[100,8], f32[4,8]) {
  %f = (s32[], f32[100,8]{1,0}, f32[4,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%f), index=0
  %data = f32[100,8]{1,0} get-tuple-element(%f), index=1
  %w = f32[4,8]{1,0} get-tuple-element(%f), index=2
  %ids = s32[4,1]{1,0} custom-call(%n), custom_call_target="draw"
  %got = f32[4,8]{1,0} fusion(%data, %ids), kind=kLoop, calls=%fused
  %in = (s32[], f32[4,8]{1,0}) tuple(%n, %got)
  %steps = (s32[], f32[4,8]{1,0}) while(%in), condition=%goes_on, body=%step, TRIPS
  %key = u32[2]{0} constant({0, 0})
  %own = u32[2]{0} copy(%key)
  %turns = u32[4]{0} constant({1, 2, 3, 4})
  %start = (s32[], u32[2]{0}, u32[4]{0}, u32[4]{0}) tuple(%n, %own, %turns, %turns)
  %hashed = (s32[], u32[2]{0}, u32[4]{0}, u32[4]{0}) call(%start), to_apply=%small
  %y = f32[4,8]{1,0} get-tuple-element(%steps), index=1
  %which = f32[4,8]{1,0} conditional(%n, %y, %y), branch_computations={%few, %many}
  %graph = f32[4,8]{1,0} call(%which), to_apply=%command_buffer
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  ROOT %out = (s32[], f32[100,8]{1,0}, f32[4,8]{1,0}) tuple(%next, %data, %graph)
}

ENTRY %main (g: f32[100,8]) -> f32[100,8] {
  %g = f32[100,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %w0 = f32[4,8]{1,0} slice(%g), slice={[0:4], [0:8]}
  %first = (s32[], f32[100,8]{1,0}, /*index=2*/f32[4,8]{1,0}) tuple(%zero, %g, %w0)
  %rounds = (s32[], f32[100,8]{1,0}, f32[4,8]{1,0}) while(%first), condition=%goes_on, \
body=%round, backend_config={"known_trip_count":{"n":"1000"}}
  ROOT %end = f32[100,8]{1,0} get-tuple-element(%rounds), index=1
}
"""
KNOWN = TEXT.replace("TRIPS", 'backend_config={"known_trip_count":{"n":"30"}}')
UNKNOWN = TEXT.replace(", TRIPS", "")


def test_launches_of_a_round():
    """Draw, gather, 30 x 2 for local steps, a branch of 2, 2 more, and 5 + 1 for Threefry."""
    counted = Module(KNOWN).rounds(num_rounds=1000)
    others = 1 + 1 + 30 * 2 + 2 + 1 + 1
    assert (counted.kernels, counted.as_on_gpus) == (others + 5 + 1, others + 1)
    assert (counted.trips, counted.in_graphs) == (1000, 1)


def test_a_loop_of_unknown_length_counts_once_with_its_condition():
    counted = Module(UNKNOWN).rounds(num_rounds=1000)
    assert counted.as_on_gpus == 1 + 1 + (2 + 1) + 2 + 1 + 1 + 1


def test_the_loop_of_rounds_is_found_by_depth_or_length():
    module = Module(KNOWN)
    assert module.rounds() == module.rounds(num_rounds=1000) == module.rounds(num_rounds=500)
    assert module.rounds(depth=2).kernels == 30 * 2 / 30  # one step of local training
    assert module.rounds(num_rounds=1).kernels == 1 + 1000 * module.rounds().kernels
    with pytest.raises(ValueError, match="no loop at depth 4"):
        module.rounds(depth=4)


def test_a_gather_reads_its_rows_instead_of_the_whole_array():
    module = Module(KNOWN)
    (gather,) = (each for each in module.rounds().launches if each.operation.name == "got")
    assert module.traffic(gather) == 4 * (4 * 8 + 4 + 4 * 8)


def test_launches_are_counted_by_source():
    module = Module(KNOWN)
    assert by_source(module, module.rounds())["", "jit(run)/while/dot_general"] == 30


def test_compiled_rounds():
    """Each of 7 rounds has a counter and a product, which XLA does not fuse with the next."""

    def one_round(x, _):
        return jnp.sin(x @ x), None

    def run(x):
        return lax.scan(one_round, x, length=7)[0]

    text = jax.jit(run).lower(jnp.ones((64, 64))).compile().as_text()
    counted = Module(text).rounds(num_rounds=7)
    assert 2 <= counted.kernels <= 6
    assert counted.num_bytes >= 2 * 64 * 64 * 4
