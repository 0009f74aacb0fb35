"""Copies between the memories of device and host: as planned, and as a compiled program has them."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.verify.hlo import read_module
from autopar.verify.host_copies import executed_copies, planned_copies

STACK, ROW = "f32[6,100]{1,0:S(5)}", "f32[1,100]{1,0}"
TEXT = f"""HloModule m, is_scheduled=true

%write (s: f32[6,100], r: f32[1,100], n: s32[]) -> f32[6,100] {{
  %s = {STACK} parameter(0)
  %r = {ROW} parameter(1)
  %n = s32[] parameter(2)
  ROOT %written = {STACK} dynamic-update-slice(%s, %r, %n, %n)
}}

%read (s.1: f32[6,100], n.1: s32[]) -> f32[1,100] {{
  %s.1 = {STACK} parameter(0)
  %n.1 = s32[] parameter(1)
  %slice = {ROW} dynamic-slice(%s.1, %n.1, %n.1), dynamic_slice_sizes={{1,100}}
  ROOT %more = {ROW} negate(%slice)
}}

%body (arg: (s32[], f32[6,100])) -> (s32[], f32[6,100]) {{
  %arg = (s32[], {STACK}) parameter(0)
  %k = s32[] get-tuple-element(%arg), index=0
  %stack = {STACK} get-tuple-element(%arg), index=1
  %row = {ROW} fusion(%k), kind=kLoop
  %begun = (({STACK}, {ROW}, s32[]), {STACK}, u32[]) async-start(%stack, %row, %k), calls=%write
  %ended = {STACK} async-done(%begun)
  ROOT %out = (s32[], {STACK}) tuple(%k, %ended)
}}

ENTRY %main (x: f32[6,100]) -> f32[1,100] {{
  %x = f32[6,100]{{1,0}} parameter(0)
  %there = ({STACK}, f32[6,100]{{1,0}}, u32[]) copy-start(%x)
  %begin = {STACK} copy-done(%there)
  %zero = s32[] constant(0)
  %room = {STACK} custom-call(), custom_call_target="AllocateBuffer"
  %state = (s32[], {STACK}) tuple(%zero, %room)
  %loop = (s32[], {STACK}) while(%state), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"6"}}}}
  %filled = {STACK} get-tuple-element(%loop), index=1
  %moved = {STACK} copy(%filled)
  ROOT %last = {ROW} fusion(%moved, %zero), kind=kLoop, calls=%read
}}

%cond (arg.1: (s32[], f32[6,100])) -> pred[] {{
  %arg.1 = (s32[], {STACK}) parameter(0)
  ROOT %more.1 = pred[] constant(true)
}}
"""


def test_copies_of_a_compiled_program():
    # All of x, and a row in each turn; one row comes back. What moves within the host's memory is none.
    assert executed_copies(read_module(TEXT)) == {"to host": 2400 + 6 * 400, "from host": 400}


def test_copies_of_a_plan():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["entering"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def train_step(params, x):
        def block(x, layer):
            return jnp.tanh(checkpoint_name(x, "entering") @ layer), None

        def loss(params):
            return jnp.sum(jax.lax.scan(jax.checkpoint(block, policy=policy), x, params)[0])

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    step = autopar.parallelize(train_step, cluster=autopar.Cluster.of("4 h100"), method=autopar.DataParallel())
    (stage,) = step.plan(array(3, 16, 16), array(32, 16)).attached.pipeline.stages
    (task,) = stage.tasks
    every_layer = 3 * 8 * 16 * 4  # 8 of 32 rows on each device
    assert planned_copies(task.body, stage.mesh) == {"to host": every_layer, "from host": every_layer}
