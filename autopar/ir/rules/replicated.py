"""Lists the primitives without a rule: computed whole, structured, or not allowed in a one-device program.

Out:    names of primitives, as a jaxpr prints them. A primitive has a rule or is in exactly one of these lists.
Method: by name, since releases of JAX have different primitives. A test walks all of JAX's primitives and names those
        that are nowhere.
"""

from __future__ import annotations

COMPUTED_REPLICATED: tuple[str, ...] = (
    # random bits of a hardware generator: one stream, in which no device can start in the middle
    *"rng_bit_generator rng_uniform random_gamma".split(),
    # loops over data without a batch dim, or on scalars only
    *"custom_lin linear_call run_state tie".split(),
    *"dim_as_value dimension_size empty empty2 platform_index shape_assertion".split(),
    *"after_all create_token dce_sink program_order".split(),
)
"""Computed whole on every device, without a warning: rare, small, or one stream by nature."""

SIDE_EFFECTS: tuple[str, ...] = tuple(
    "check debug_callback debug_print inspect_sharding io_callback pure_callback".split()
)
"""Calls into the host. Their operands are gathered whole; they must run on one device only, not on each."""

STRUCTURED: tuple[str, ...] = (
    # loops and branches: the planner looks into their bodies
    *"cond scan while".split(),
    # calls, inlined before any rule is asked for
    *"call call_exported checkpoint closed_call composite core_call core_closed_call custom_jvp_call".split(),
    *"custom_linear_solve jit pjit".split(),
    *"custom_jvp_call_jaxpr custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call eval_jaxpr remat remat2".split(),
    *"remat_opt xla_metadata_call".split(),
    # inlined as slices
    *"unstack".split(),
    # typed random keys: inlined down to integer arithmetic on counters
    *"from_edtype random_bits random_clone random_fold_in random_seed random_split random_unwrap random_wrap".split(),
    *"to_edtype".split(),
    # any number of operands, passed through together
    *"optimization_barrier".split(),
)
"""Removed by flattening, or handled as regions by the planner's graph: they need no rule."""

KERNELS: tuple[str, ...] = tuple(
    (
        "core_map cudnn_fusion dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper "
        "dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper ffi_call "
        "mosaic_gpu_call tpu_custom_call triton_call"
    ).split()
)
"""Foreign kernels: only their authors know what they compute. Whole on every device, with a warning, unless they are
wrapped in `autopar.sharding_rule`."""

STATEFUL: tuple[str, ...] = tuple(
    (
        "accum_grad_in_ref addupdate box_get box_set broadcast_to create_linear empty_ref free_ref freeze get "
        "log_extend log_read new_box new_log new_ref pin swap unpin"
    ).split()
)
"""Mutable references and what hijax adds to jaxprs: not part of a pure training step."""

COLLECTIVE: tuple[str, ...] = tuple(
    (
        "all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast pmax pmin ppermute precv "
        "preduced psend psum psum_invariant pvary ragged_all_to_all reduce_scatter reduced_vary_cast_p shard_map "
        "unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter vary_unreduced_cast_p"
    ).split()
)
"""Communication over named mesh axes: not allowed in a program written for one device. Includes the asynchronous halves,
`*_start` and `*_done`."""

DIFFERENTIATION_ONLY: tuple[str, ...] = tuple(
    "call_hi_primitive call_hi_primitive_linearized stage unreachable".split()
)
"""Absent from a program that is traced and differentiated."""


def list_of(name: str) -> str | None:
    """The name of the list that has the primitive of this name; None: none has."""
    base = name.removesuffix("_start").removesuffix("_done")
    for title, names in ALL_LISTS.items():
        if name in names or (title == "COLLECTIVE" and base in names):
            return title
    return None


ALL_LISTS: dict[str, tuple[str, ...]] = {
    "COMPUTED_REPLICATED": COMPUTED_REPLICATED,
    "SIDE_EFFECTS": SIDE_EFFECTS,
    "STRUCTURED": STRUCTURED,
    "KERNELS": KERNELS,
    "STATEFUL": STATEFUL,
    "COLLECTIVE": COLLECTIVE,
    "DIFFERENTIATION_ONLY": DIFFERENTIATION_ONLY,
}
