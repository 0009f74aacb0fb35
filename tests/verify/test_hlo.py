"""The reader of compiled programs: lines, types, groups."""

import pytest

from autopar.ir.region import ASSUMED_TRIPS
from autopar.verify.hlo import groups_of, parts_of, read_module, type_bytes

TEXT = """HloModule jit_step, is_scheduled=true

%fused (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %copy = f32[4]{0} copy(%p.1)
}

%body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], f32[4]{0:T(128)}) parameter(0), metadata={op_name="a (b"}
  %get = f32[4]{0} get-tuple-element(%arg), index=1
  ROOT %out = (s32[], f32[4]{0}) tuple(%arg, /*index=1*/%get)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %loop = (s32[], f32[4]{0}) while(%x), condition=%cond.2, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %done = f32[4]{0} fusion(%loop), kind=kLoop, calls=%fused, backend_config={"collective_backend_config":{"is_sync":true}}
  ROOT %call = f32[2,3]{1,0} custom-call(%done, %x), custom_call_target="mine", called_computations={%fused}
}
"""


def test_module():
    module = read_module(TEXT)
    assert module.entry == "main" and list(module.computations) == ["fused", "body", "main"]
    x, loop, done, call = module.computations["main"]
    assert (x.opcode, x.operands, x.num_bytes) == ("parameter", ("0",), 16)
    assert (module.trips(loop), loop.called, loop.num_bytes) == (12, ("cond.2", "body"), 20)
    assert done.called == ("fused",) and done.is_synchronous and module.trips(done) == ASSUMED_TRIPS
    assert (call.target, call.operands, call.called) == ("mine", ("done", "x"), ("fused",))
    assert module.computations["body"][2].operands == ("arg", "get")


COUNTED = """
%cond (arg: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(LIMIT), metadata={op_name="a"}
  %arg = (s32[], f32[4]{0}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%arg), index=INDEX
  ROOT %lt = pred[]{:T(512)} compare(%counter, %limit), direction=DIRECTION
}

%body (arg.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %arg.1 = (s32[], f32[4]{0}) parameter(0)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %begin = s32[]{:T(128)} constant(2)
  %copied = s32[]{:T(128)} copy(%begin)
  %carried = (s32[], f32[4]{0}) tuple(%copied, %x)
  ROOT %loop = (s32[], f32[4]{0}) while(%carried), condition=%cond, body=%body
}
"""


@pytest.mark.parametrize(
    "limit, index, direction, trips",
    [
        (9, 0, "LT", 7),
        (1, 0, "LT", 0),
        (9, 1, "LT", ASSUMED_TRIPS),
        (9, 0, "NE", ASSUMED_TRIPS),
        ("{4}", 0, "LT", ASSUMED_TRIPS),
    ],
)
def test_trips_of_a_loop_whose_condition_counts(limit, index, direction, trips):
    """As XLA for TPUs prints it, which says of no loop how often it runs."""
    text = COUNTED.replace("LIMIT", str(limit)).replace("INDEX", str(index)).replace("DIRECTION", direction)
    module = read_module(text)
    assert module.trips(module.computations["main"][-1]) == trips


@pytest.mark.parametrize(
    "text, num_bytes",
    [
        ("f32[]", 4),
        ("bf16[3,5]{1,0}", 30),
        ("pred[7]{0}", 7),
        ("s4[5]{0:E(4)}", 3),
        ("f8e4m3fn[2,8]{1,0}", 16),
        ("c64[2]{0}", 16),
        ("(f32[2]{0}, (u8[3]{0}, s64[1]{0}), token[])", 19),
    ],
)
def test_type_bytes(text, num_bytes):
    assert type_bytes(text) == num_bytes


def test_parts_of_a_type():
    assert list(parts_of("((f32[2]{0:T(8,128)}, s8[]), bf16[4]{0})")) == ["(f32[2]{0:T(8,128)}, s8[])", "bf16[4]{0}"]


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,1},{2,3}}, x={1}", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[4], x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("dimensions={0}", ((0, 1, 2, 3),)),
    ],
)
def test_replica_groups(text, groups):
    assert groups_of(text, 4) == groups
