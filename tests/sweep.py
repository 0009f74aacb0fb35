"""The matrix of correctness: every model x mesh x method, three steps, against plain `jax.jit` on one device.

In:     `tests/models/registry.py`, meshes, methods; random legal plans.
Out:    `check_case`, used by the tests; `python -m tests.sweep` runs the whole matrix and prints it as a table.
Method: leaf by leaf, relative to each leaf's scale; and the collectives in the traced per-device program against the
        plan's own list: kind, axes, bytes, times.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import autopar
from autopar._jax import Jaxpr, JaxprEqn, open_jaxpr
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.restrict import Allowed, pin_constraints
from autopar.ir.region import trip_count
from autopar.ir.rules.exchanged_rows import ragged_all_to_all
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.mesh import logical_mesh
from autopar.search.one_mesh import in_microbatches, restrict_plan
from autopar.search.request import Request
from tests.cells import Judged, add_arguments, run_cells
from tests.conftest import XLA_FLAGS
from tests.draw import draw_choices
from tests.models.case import Case
from tests.planned_choices import plan_of_choices

MESHES: dict[str, tuple[int, ...]] = {"8": (8,), "2x4": (2, 4), "2x2x2": (2, 2, 2), "6": (6,)}
SLOW, QUICK = autopar.Device("slow", 1e8, memory_bytes_per_second=1e9), autopar.Link(1e-7, 1e9)
"""Small models would not be split at all where their communication takes longer than their work."""
METHODS = ("auto", "zero0", "zero1", "zero2", "zero3", "random0", "random1", "random2")


@dataclass(frozen=True)
class Outcome:
    """Result of one cell of the matrix: largest error relative to its leaf's scale, and where."""

    error: float
    where: str
    num_collectives: int
    seconds: float


_references: dict[str, list[Any]] = {}


def reference(case: Case) -> list[Any]:
    """State and metrics of three steps of plain `jax.jit` on one device."""
    if case.name not in _references:
        step, state, results = jax.jit(case.step), case.state, []
        for batch in case.batches:
            state, metrics = step(state, batch)
            results.append(jax.tree.map(_host, (state, metrics)))
        _references[case.name] = results
    return _references[case.name]


def _host(leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def check_case(case: Case, shape: tuple[int, ...], method: str, num_microbatches: int = 1) -> Outcome:
    """Run one cell.

    Raises:
        AssertionError: A leaf differs, or the program communicates something else than the plan says.
    """
    started = time.perf_counter()
    expected = reference(case)
    compiled = compile_case(case, shape, method, num_microbatches)
    check_faithful(compiled)
    worst, where = largest_error(case, compiled, expected)
    assert worst <= case.tolerance, f"{case.name} {shape} {method}: {where} differs by {worst:.2e} of its scale"
    return Outcome(worst, where, len(compiled.plan.cost.collectives), time.perf_counter() - started)


def largest_error(case: Case, compiled: autopar.CompiledStep, expected: list[Any]) -> tuple[float, str]:
    """Run the case's steps: the largest error of any leaf relative to its scale, and where."""
    state, worst, where = case.state, 0.0, ""
    for batch, result in zip(case.batches, expected, strict=True):
        state, metrics = compiled(state, batch)
        for (path, got), want in zip(
            jax.tree_util.tree_leaves_with_path((state, metrics)), jax.tree.leaves(result), strict=True
        ):
            error = relative_error(_host(got), want)
            if not error <= worst:
                worst, where = error, jax.tree_util.keystr(path)
    return worst, where


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the leaf's scale, its largest magnitude (at least 1e-6); infinite if NaN or infinities differ."""
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
    )
    if want.size == 0:
        return 0.0
    if want.dtype.kind not in "fc" and want.dtype.name not in ("bfloat16",):
        return 0.0 if np.array_equal(got, want) else float("inf")
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    got, want = got.astype(wide), want.astype(wide)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return float("inf")
    got, want = got[finite], want[finite]
    scale = max(float(np.max(np.abs(want), initial=0.0)), 1e-6)
    return float(np.max(np.abs(got - want), initial=0.0)) / scale


def compile_case(case: Case, shape: tuple[int, ...], method: str, num_microbatches: int = 1) -> autopar.CompiledStep:
    """Compile a model under one method of the matrix."""
    devices = jax.devices()[: int(np.prod(shape))]
    cluster = autopar.Cluster.local(devices, device=SLOW, intra=QUICK)
    if method.startswith("zero"):
        chosen = autopar.DataParallel(zero=int(method[4:]), num_microbatches=num_microbatches)
    else:
        chosen = autopar.ShardParallel(mesh_shape=shape, num_microbatches=num_microbatches)
    step = autopar.parallelize(case.step, cluster=cluster, method=chosen, batch_argnums=(1,))
    if not method.startswith("random"):
        return step.compile(case.state, case.batches[0])
    return _compile_random(step, case, cluster, shape, int(method[6:]), num_microbatches)


def _compile_random(
    step: Any, case: Case, cluster: Any, shape: tuple[int, ...], seed: int, num_microbatches: int
) -> autopar.CompiledStep:
    """A plan whose every choice is drawn; nothing is solved."""
    step_program = trace_step(case.step, (case.state, case.batches[0]))
    roles = find_roles(step_program, (1,))
    method = autopar.ShardParallel(mesh_shape=shape, num_microbatches=num_microbatches)
    program = in_microbatches(step_program, roles, num_microbatches, "exact", cluster.num_devices)
    graph = build_graph(program.jaxpr, logical_mesh(cluster, shape), roles.aliases, roles.batch)
    allowed = Allowed()
    pin_constraints(graph, allowed)
    request = Request(step_program, roles, cluster, method)
    restrict_plan(request.of(program), graph.mesh, graph, allowed)
    plan = plan_of_choices(request, program, graph, draw_choices(graph, seed, allowed))
    return step.compile(case.state, case.batches[0], plan=plan)


def check_faithful(compiled: autopar.CompiledStep) -> None:
    """The traced programs communicate exactly what the plan lists."""
    planned = Counter((c.stage, c.kind, tuple(c.axes), c.bytes, c.times) for c in compiled.plan.cost.collectives)
    emitted: Counter[tuple[int, str, tuple[str, ...], int, int]] = Counter()
    planning = compiled.plan.origin.pipeline
    for name, function in compiled.functions.items():
        task = planning.streams.programs[name].task
        times = planning.num_microbatches if task.is_in_loop else 1
        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in function.inputs]
        traced = open_jaxpr(jax.make_jaxpr(function.code)(*structs))[0]
        for kind, axes, num_bytes, count in emitted_collectives(traced):
            emitted[task.stage, kind, axes, num_bytes, count * times] += 1
    assert emitted == planned, (
        f"emitted but not planned: {emitted - planned}; planned but not emitted: {planned - emitted}"
    )


_KINDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def emitted_collectives(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[str, tuple[str, ...], int, int]]:
    """(kind, axes, bytes, times) of every collective in a traced program, loop trips counted."""
    for eqn in jaxpr.eqns:
        kind = _KINDS.get(eqn.primitive.name)
        if eqn.params.get("name") == ragged_all_to_all.__name__:  # a call that stands for one
            yield _stood_for(eqn, times)
            continue
        if kind is not None:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
                counted = (result if kind == "all-gather" else operand).aval
                yield (
                    kind,
                    (axes,) if isinstance(axes, str) else tuple(axes),
                    counted.size * counted.dtype.itemsize,
                    times,
                )
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from emitted_collectives(
                        open_jaxpr(inner)[0] if hasattr(inner, "jaxpr") else inner, times * trip_count(eqn)
                    )


def _stood_for(call: JaxprEqn, times: int) -> tuple[str, tuple[str, ...], int, int]:
    """The all-to-all of unequal counts that a call stands for; the larger side is a buffer for the worst case."""
    (axes,) = {axes for _, axes, _, _ in emitted_collectives(open_jaxpr(call.params["jaxpr"])[0])}
    rows, made = (value.aval.size * value.aval.dtype.itemsize for value in (call.invars[0], call.outvars[0]))
    return "ragged-all-to-all", axes, min(rows, made), times


def use_virtual_devices() -> None:
    """As `conftest.py` does, and for its reasons; what the caller has set wins."""
    os.environ["XLA_FLAGS"] = " ".join((*XLA_FLAGS, os.environ.get("XLA_FLAGS", "")))
    os.environ.setdefault("PJRT_NPROC", "32")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])  # JAX reads this one when it is imported


def main() -> int:
    """Run the matrix, or what the arguments choose of it, and print it as a table."""
    use_virtual_devices()
    from tests.models.registry import CASES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="comma-separated names; default: all")
    parser.add_argument("--meshes", default=",".join(MESHES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--microbatches", default="1", help="comma-separated numbers of microbatches")
    add_arguments(parser)
    chosen = parser.parse_args()
    cells = [
        (name, mesh, method, count)
        for name in (chosen.models.split(",") if chosen.models else CASES)
        for mesh in chosen.meshes.split(",")
        for method in chosen.methods.split(",")
        for count in chosen.microbatches.split(",")
        if not (method.startswith("zero") and len(MESHES[mesh]) > 1)
    ]
    case_of = functools.lru_cache(1)(lambda name: CASES[name]())
    return run_cells(cells, lambda cell: _judge(case_of(cell[0]), *cell[1:]), chosen, "tests.sweep")


def _judge(case: Case, mesh: str, method: str, num_microbatches: str) -> Judged:
    try:
        return equal(check_case(case, MESHES[mesh], method, int(num_microbatches)))
    except autopar.errors.MicrobatchError as error:
        return Judged(bool(case.refused), f"n/a    {case.refused or error}")
    except autopar.errors.BatchError as error:
        return Judged(True, f"n/a    {error.summary}")
    except Exception as error:
        return failed(error)


def equal(outcome: Outcome) -> Judged:
    """What is said of a cell that equals jit."""
    found = f"{outcome.error:.1e}  {outcome.num_collectives:5d} collectives  {outcome.seconds:6.1f} s"
    return Judged(True, f"ok     {found}")


def failed(error: Exception) -> Judged:
    """What is said of a cell that does not, or raises what it should not."""
    traceback.print_exception(error)
    return Judged(False, f"FAILED {type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    sys.exit(main())
