"""A compiled program followed in order: what it communicates, what hides it."""

import pytest

from autopar import Achieved, Device, Link, LogicalMesh
from autopar.cost import collective_seconds
from autopar.ir.region import ASSUMED_TRIPS
from autopar.verify.hlo import read_module
from autopar.verify.schedule import follow_program, product_flops, program_kernels

MESH = LogicalMesh((2, 4), links=(Link(0.0, 1e9), Link(0.0, 4e9)))
DEVICE = Device("toy", 1e12, memory_bytes_per_second=1e9, achieved=Achieved(overlap=1.0))
# One row of the mesh is {0,1,2,3}: its axis is y.
ROWS, COLUMNS = "replica_groups={{0,1,2,3},{4,5,6,7}}", "replica_groups=[4,2]<=[2,4]T(1,0)"
ASYNC = 'backend_config={"collective_backend_config":{"is_sync":false}}'
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'
TEXT = f"""HloModule m, is_scheduled=true

%wrapped (p: f32[1000]) -> f32[500] {{
  %p = f32[1000]{{0}} parameter(0)
  ROOT %scatter = f32[500]{{0}} reduce-scatter(%p), {COLUMNS}, dimensions={{0}}
}}

%body (arg: f32[1000]) -> f32[1000] {{
  %arg = f32[1000]{{0}} parameter(0)
  %gather = (f32[1000]{{0}}, f32[4000]{{0}}) all-gather-start(%arg), {ROWS}, {ASYNC}
  %kernel = f32[1000]{{0}} fusion(%arg), kind=kLoop
  %gathered = f32[4000]{{0}} all-gather-done(%gather)
  %begin = ((f32[1000]{{0}}), f32[500]{{0}}, u32[]) async-start(%arg), calls=%wrapped, {ASYNC}
  %end = f32[500]{{0}} async-done(%begin)
  ROOT %new = f32[1000]{{0}} fusion(%gathered), kind=kLoop
}}

%cond (arg.1: f32[1000]) -> pred[] {{
  ROOT %arg.1 = f32[1000]{{0}} parameter(0)
}}

ENTRY %main (x: f32[1000]) -> f32[1000] {{
  %x = f32[1000]{{0}} parameter(0)
  %sum = f32[1000]{{0}} all-reduce-start(%x), replica_groups={{}}, {SYNC}
  %summed = f32[1000]{{0}} all-reduce-done(%sum)
  %loop = f32[1000]{{0}} while(%summed), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  ROOT %own = f32[1000]{{0}} custom-call(%loop), custom_call_target="mine"
}}
"""


@pytest.fixture(scope="module")
def seen():
    return follow_program(read_module(TEXT), MESH, DEVICE)


def test_collectives(seen):
    found = [(c.kind, c.axes, c.bytes, c.times, c.is_async) for c in seen.collectives]
    assert found == [
        ("all-reduce", ("x", "y"), 4000, 1, False),
        ("all-gather", ("y",), 16000, 3, True),
        ("reduce-scatter", ("x",), 4000, 3, True),
    ]
    assert seen.bytes_of == {"all-reduce": 4000, "all-gather": 48000, "reduce-scatter": 12000}
    assert seen.kernels == {"mine f32[1000]": 1}


def test_seconds(seen):
    reduce, gather, scatter = (
        collective_seconds(kind, size, axes, MESH)
        for kind, size, axes in (
            ("all-reduce", 4000, ("x", "y")),
            ("all-gather", 16000, ("y",)),
            ("reduce-scatter", 4000, ("x",)),
        )
    )
    short, long = 8000 / 1e9, 20000 / 1e9  # a kernel's bytes at the memory's rate
    assert seen.compute_seconds == pytest.approx(3 * (short + long) + short)
    assert [c.seconds for c in seen.collectives] == pytest.approx([reduce, gather, scatter])
    # The kernel between begin and end hides its time of the gather, nothing hides the scatter.
    assert seen.collectives[1].hidden_seconds == pytest.approx(short)
    assert seen.exposed_seconds == pytest.approx(reduce + 3 * (max(0, gather - short) + scatter))


def test_kernels_beside_a_collective_are_slowed_down(seen):
    """As in the plan: by the part of it that does not overlap."""
    device = Device("toy", 1e12, memory_bytes_per_second=1e9, achieved=Achieved(overlap=0.75))
    slowed = follow_program(read_module(TEXT), MESH, device)
    (_, gather, scatter), kernel = slowed.collectives, 8000 / 1e9
    lost = max(0.25 * gather.seconds, gather.seconds - kernel) + scatter.seconds
    assert slowed.exposed_seconds == pytest.approx(slowed.collectives[0].seconds + 3 * lost)
    assert slowed.compute_seconds == seen.compute_seconds and slowed.exposed_seconds >= seen.exposed_seconds


def test_a_loop_of_unknown_length_is_assumed_to_run_as_often_as_in_the_plan():
    text = TEXT.replace('backend_config={"known_trip_count":{"n":"3"}}', "")
    seen = follow_program(read_module(text), MESH, DEVICE)
    assert seen.bytes_of["all-reduce"] == 4000 and seen.bytes_of["all-gather"] == ASSUMED_TRIPS * 16000


@pytest.mark.parametrize(
    "line, operands, flops",
    [
        (
            "f32[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            ["f32[8,32]{1,0}", "f32[32,16]{1,0}"],
            2 * 8 * 16 * 32,
        ),
        (
            '(bf16[4,8,16]{2,1,0}, s8[99]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config='
            '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"]}}}',
            ["bf16[4,8,32]{2,1,0}", "bf16[4,32,16]{2,1,0}"],
            2 * 4 * 8 * 16 * 32,
        ),
        (
            "(f32[2,8,8,5]{3,2,1,0}, u8[0]{0}) custom-call(%a, %b), dim_labels=b01f_01io->b01f, "
            'custom_call_target="__cudnn$convForward"',
            ["f32[2,8,8,3]{3,2,1,0}", "f32[3,3,3,5]{3,2,1,0}"],
            2 * (2 * 8 * 8 * 5) * (3 * 3 * 3),
        ),
        ("f32[4]{0} add(%a, %b)", ["f32[4]{0}", "f32[4]{0}"], 0),
    ],
)
def test_flops(line, operands, flops):
    text = f"ENTRY %e (a: f32[]) -> f32[] {{\n  %r = {line}\n}}\n"
    (hlo,) = read_module(text).computations["e"]
    assert product_flops(hlo, operands) == flops


TPU = """
%first (p: f32[10]) -> (f32[10], f32[80]) {
  %p = f32[10]{0} parameter(0)
  %gather.1 = f32[80]{0} all-gather(%p), channel_id=3, replica_groups={}, frontend_attributes={chain_id="0"}
  ROOT %start = (f32[10]{0}, f32[80]{0}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%beside (q: f32[10]) -> f32[1000] {
  %q = f32[10]{0} parameter(0)
  %gather.2 = f32[80]{0} all-gather(%q), channel_id=3, replica_groups={}, frontend_attributes={chain_id="0"}
  ROOT %work = f32[1000]{0} broadcast(%gather.2)
}

%last (r: f32[10]) -> f32[80] {
  %r = f32[10]{0} parameter(0)
  %gather.3 = f32[80]{0} all-gather(%r), channel_id=3, replica_groups={}, frontend_attributes={chain_id="0"}
  ROOT %done = f32[80]{0} custom-call(%r, %gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[10]) -> f32[80] {
  %x = f32[10]{0} parameter(0)
  %async-collective-start = (f32[10]{0}, f32[80]{0}) fusion(%x), kind=kCustom, calls=%first
  %kernel = f32[1000]{0} fusion(%x), kind=kOutput, calls=%beside
  ROOT %async-collective-done = f32[80]{0} fusion(%x), kind=kCustom, calls=%last
}
"""


def test_a_collective_that_is_carried_out_in_parts_is_one():
    """As XLA for TPUs has it: each kernel beside it moves a part, and the whole collective stands there again."""
    seen = follow_program(read_module(TPU), MESH, DEVICE)
    (gather,) = seen.collectives
    assert (gather.kind, gather.bytes, gather.times, gather.is_async) == ("all-gather", 320, 1, True)
    assert gather.hidden_seconds == pytest.approx(seen.compute_seconds) and gather.hidden_seconds > 0


PARTS = """
%of_one (p.0: f32[8,1000]) -> f32[8,5] {
  %p.0 = f32[8,1000]{1,0} parameter(0)
  %flat = f32[8000]{0} bitcast(%p.0)
  ROOT %piece = f32[8,5]{1,0} BODY
}

%row (p.2: f32[5], p.1: f32[100,5], p.3: s32[]) -> f32[100,5] {
  %p.1 = f32[100,5]{1,0} parameter(1)
  %p.2 = f32[5]{0} parameter(0)
  %p.3 = s32[] parameter(2)
  %new = f32[1,5]{1,0} bitcast(%p.2)
  ROOT %stack = f32[100,5]{1,0} dynamic-update-slice(%p.1, %new, %p.3, %p.3)
}

ENTRY %main (x: f32[8,1000], y: f32[100,5], z: f32[5], i: s32[]) -> f32[100,5] {
  %x = f32[8,1000]{1,0} parameter(0)
  %y = f32[100,5]{1,0} parameter(1)
  %z = f32[5]{0} parameter(2)
  %i = s32[] parameter(3)
  %one = f32[8,5]{1,0} fusion(%x), kind=kLoop, calls=%of_one
  ROOT %other = f32[100,5]{1,0} fusion(%z, %y, %i), kind=kLoop, calls=%row
}
"""


@pytest.mark.parametrize(
    "body, num_bytes",
    [
        ("slice(%p.0), slice={[0:8], [0:5]}", 2 * 8 * 5 * 4),
        ("dynamic-slice(%flat), dynamic_slice_sizes={40}", 2 * 8 * 5 * 4),
        ("reduce-window(%p.0)", 8 * 1000 * 4 + 8 * 5 * 4),
        ("fusion(%p.0, %flat)", 8 * 1000 * 4 + 8 * 5 * 4),
    ],
)
def test_of_an_array_only_the_part_that_a_kernel_reads_or_replaces_is_moved(body, num_bytes):
    """A slice of weights that were gathered in one message; a row of a loop's stack."""
    seen = follow_program(read_module(PARTS.replace("BODY", body)), MESH, DEVICE)
    row = 5 * 4
    assert seen.compute_seconds == pytest.approx((num_bytes + 2 * row + 4) / 1e9)


REWRITTEN = """
%all-reduce-scatter (given: f32[80]) -> f32[12] {
  %given = f32[80]{0} parameter(0)
  %nought = f32[] constant(0)
  %padded = f32[96]{0} pad(%given, %nought), padding=0_16
  %within = f32[96]{0} all-reduce(%padded), replica_groups={}
  %from = u32[] partition-id()
  ROOT %taken = f32[12]{0} dynamic-slice(%within, %from), dynamic_slice_sizes={12}
}

%part (p.0: f32[8,10], p.1: u32[]) -> f32[10] {
  %p.0 = f32[8,10]{1,0} parameter(0)
  %p.1 = u32[] parameter(1)
  %row = f32[1,10]{1,0} dynamic-slice(%p.0, %p.1, %p.1), dynamic_slice_sizes={1,10}
  ROOT %flat = f32[10]{0} bitcast(%row)
}

ENTRY %main (x: f32[80], y: f32[8,10], z: f32[10], i: u32[]) -> f32[10] {
  %x = f32[80]{0} parameter(0)
  %y = f32[8,10]{1,0} parameter(1)
  %z = f32[10]{0} parameter(2)
  %i = u32[] parameter(3)
  %none = f32[] constant(0)
  %scattered = f32[12]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
  %surplus = f32[4]{0} slice(%scattered), slice={[8:12]}
  %shifted = f32[4]{0} collective-permute(%surplus), source_target_pairs={{0,1}}PERMUTED
  %summed = f32[8,10]{1,0} all-reduce(%y), replica_groups={}
  %own = f32[10]{0} fusion(%summed, %i), kind=kLoop, calls=%part
  %zeros = f32[80]{0} broadcast(%none), dimensions={}
  %placed = f32[80]{0} dynamic-update-slice(%zeros, %z, %i)
  %gathered = f32[80]{0} all-reduce(%placed), replica_groups={}
  %known = f32[8,10]{1,0} all-reduce(%y), replica_groups={}
  ROOT %first = f32[10]{0} slice(%known), slice={[0:1], [0:10]}
}
"""


def test_collectives_that_xla_for_tpus_runs_in_another_form():
    """Each counts as what the program asked for, and takes as long as what is sent; a permute that XLA adds counts apart."""
    module = read_module(REWRITTEN.replace("PERMUTED", ""))
    seen = follow_program(module, MESH, DEVICE, on_tpus=True)
    found = [(c.kind, c.bytes, c.sent_as, c.is_added) for c in seen.collectives]
    assert found == [
        ("reduce-scatter", 320, None, False),
        ("collective-permute", 16, None, True),
        ("reduce-scatter", 320, "all-reduce", False),
        ("all-gather", 320, "all-reduce", False),
        ("all-reduce", 320, None, False),  # of which all devices take the same rows
    ]
    assert seen.bytes_of == {"reduce-scatter": 640, "all-gather": 320, "all-reduce": 320}
    scattered, _, summed, gathered, known = (c.seconds for c in seen.collectives)
    assert summed == gathered == known == collective_seconds("all-reduce", 320, ("x", "y"), MESH) > scattered
    asked = follow_program(
        read_module(REWRITTEN.replace("PERMUTED", ', metadata={op_name="jit(f)/ppermute"}')), MESH, DEVICE, True
    )
    assert asked.bytes_of["collective-permute"] == 16
    assert set(follow_program(module, MESH, DEVICE).bytes_of) == {"all-reduce", "collective-permute"}


TOGETHER = """
%part (p.0: f32[8,10], p.1: u32[]) -> f32[10] {
  %p.0 = f32[8,10]{1,0} parameter(0)
  %p.1 = u32[] parameter(1)
  %row = f32[1,10]{1,0} dynamic-slice(%p.0, %p.1, %p.1), dynamic_slice_sizes={1,10}
  ROOT %flat = f32[10]{0} bitcast(%row)
}

ENTRY %main (y: f32[8,10], loss: f32[], i: u32[]) -> f32[10] {
  %y = f32[8,10]{1,0} parameter(0)
  %loss = f32[] parameter(1)
  %i = u32[] parameter(2)
  %summed = (f32[8,10]{1,0}, f32[]) all-reduce(%y, %loss), replica_groups={}
  %mean = f32[] get-tuple-element(%summed), index=1
  %rows = f32[8,10]{1,0} get-tuple-element(%summed), index=0
  ROOT %own = f32[10]{0} fusion(%rows, %i), kind=kLoop, calls=%part
}
"""


def test_one_all_reduce_of_xla_for_tpus_may_stand_for_several_collectives():
    seen = follow_program(read_module(TOGETHER), MESH, DEVICE, on_tpus=True)
    found = [(c.kind, c.bytes, c.sent_as) for c in seen.collectives]
    assert found == [("reduce-scatter", 320, "all-reduce"), ("all-reduce", 4, None)]
    total = collective_seconds("all-reduce", 324, ("x", "y"), MESH)
    assert sum(c.seconds for c in seen.collectives) == pytest.approx(total) == pytest.approx(seen.exposed_seconds)


def test_kernels_of_the_program():
    """Not those of XLA, which has names for parts of its own, nor of libraries."""
    named = ["ConcatBitcast f32[8]", "AllocateBuffer", "__cublas$lt$matmul f32[8]", "tpu_custom_call f32[8]", "mine"]
    assert list(program_kernels(dict.fromkeys(named, 1))) == ["tpu_custom_call f32[8]", "mine"]
