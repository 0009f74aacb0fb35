"""Lists the primitives without a rule: computed whole, structured, or not allowed in a one-device program.

Out:    names of primitives, as a jaxpr prints them. A primitive has a rule or is in exactly one of these lists.
Method: by name, since releases of JAX have different primitives. A test walks all of JAX's primitives and names those
        that are nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping


def _names(*lines: str) -> tuple[str, ...]:
    return tuple(" ".join(lines).split())


ALL_LISTS: Mapping[str, tuple[str, ...]] = {
    # Computed whole on every device, without a warning: rare, small, or one stream by nature.
    "COMPUTED_REPLICATED": _names(
        # random bits of a hardware generator: one stream, in which no device can start in the middle
        "rng_bit_generator rng_uniform random_gamma",
        # loops over data without a batch dim, or on scalars only
        "custom_lin linear_call run_state tie",
        "dim_as_value dimension_size empty empty2 platform_index shape_assertion",
        "after_all create_token dce_sink program_order",
    ),
    # Calls into the host. Their operands are gathered whole; they must run on one device only, not on each.
    "SIDE_EFFECTS": _names("check debug_callback debug_print inspect_sharding io_callback pure_callback"),
    # Removed by flattening, or handled as regions by the planner's graph: they need no rule.
    "STRUCTURED": _names(
        # loops and branches: the planner looks into their bodies
        "cond scan while",
        # calls, inlined before any rule is asked for
        "call call_exported checkpoint closed_call composite core_call core_closed_call custom_jvp_call",
        "custom_linear_solve jit pjit",
        "custom_jvp_call_jaxpr custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call eval_jaxpr remat remat2",
        "remat_opt xla_metadata_call",
        # inlined as slices
        "unstack",
        # typed random keys: inlined down to integer arithmetic on counters
        "from_edtype random_bits random_clone random_fold_in random_seed random_split random_unwrap random_wrap",
        "to_edtype",
        # any number of operands, passed through together
        "optimization_barrier",
    ),
    # Foreign kernels: only their authors know what they compute. Whole on every device, with a warning, unless they are
    # wrapped in `autopar.sharding_rule`.
    "KERNELS": _names(
        "core_map cudnn_fusion dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper",
        "dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper ffi_call",
        "mosaic_gpu_call tpu_custom_call triton_call",
    ),
    # Mutable references and what hijax adds to jaxprs: not part of a pure training step.
    "STATEFUL": _names(
        "accum_grad_in_ref addupdate box_get box_set broadcast_to create_linear empty_ref free_ref freeze get",
        "log_extend log_read new_box new_log new_ref pin swap unpin",
    ),
    # Communication over named mesh axes: not allowed in a program written for one device. Includes the asynchronous halves,
    # `*_start` and `*_done`.
    "COLLECTIVE": _names(
        "all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast pmax pmin ppermute precv",
        "preduced psend psum psum_invariant pvary ragged_all_to_all reduce_scatter reduced_vary_cast_p shard_map",
        "unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter vary_unreduced_cast_p",
    ),
    # Absent from a program that is traced and differentiated.
    "DIFFERENTIATION_ONLY": _names("call_hi_primitive call_hi_primitive_linearized stage unreachable"),
}
SIDE_EFFECTS, KERNELS = ALL_LISTS["SIDE_EFFECTS"], ALL_LISTS["KERNELS"]


def list_of(name: str) -> str | None:
    """The name of the list that has the primitive of this name; None: none has."""
    base = name.removesuffix("_start").removesuffix("_done")
    for title, names in ALL_LISTS.items():
        if name in names or (title == "COLLECTIVE" and base in names):
            return title
    return None
