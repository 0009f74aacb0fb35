"""The only importer of `jax.extend` and `jax._src`: stable names for what JAX may move between releases.

In:     JAX 0.10 or 0.11.
Out:    the types of a jaxpr, and small functions for what differs between the two.
Method: imports and adapters only. No file of autopar outside of this folder imports those modules.
"""

# ruff: noqa: F401
from autopar._jax.compiled import (
    Checked,
    Direct,
    direct_call,
    dispatched,
    has_refused,
    host_callbacks,
    is_from_dispatch,
    load_elsewhere,
    looks_at_numbers,
    nan_error,
    takes_packed,
)
from autopar._jax.primitives import (
    find_primitives,
    high_primitive_jaxpr,
    key_primitive_implementation,
    lowered_program,
    primitives,
    shardy_rule,
    with_cudnn_of,
)
from autopar._jax.program import (
    all_equations,
    bind_eqn,
    bodies_in,
    close_jaxpr,
    eqn_context,
    eval_jaxpr,
    function_file,
    function_name,
    line_of,
    make_jaxpr,
    new_eqn,
    new_scan_params,
    new_source_info,
    new_var,
    open_jaxpr,
    optimization_barrier_p,
    raw_frames,
    replace_eqn,
    scan_counts,
    scan_params,
    trace,
    trace_context,
    trace_function,
    without_context_mesh,
    without_mesh,
)
from autopar._jax.types import (
    Atom,
    Aval,
    ClosedJaxpr,
    Constant,
    DropVar,
    Function,
    Jaxpr,
    JaxprEqn,
    Literal,
    NameStack,
    Params,
    Primitive,
    SourceInfo,
    Var,
)
from autopar._jax.values import (
    as_key,
    buffer_addresses,
    copied_to,
    copies_to_or_from_host,
    empty_in_host_memory,
    in_host_memory,
    is_key,
    key_data,
    key_impl_name,
    on_device,
    on_host,
    outermost_node,
    physical_aval,
    put_shards,
    reads_as_array,
    resized,
    shaped,
    weakly_typed,
    without_axes,
)
