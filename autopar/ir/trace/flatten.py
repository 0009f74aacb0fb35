"""Flattens a jaxpr: no calls, no typed random keys, every variable defined once.

In:     a jaxpr as JAX traces it, and the values of its constants.
Out:    a flat jaxpr (invars, then one invar per constant) and those constants.
Method: the passes of `FLATTEN`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from autopar._jax import Constant, Jaxpr, NameStack, Var, make_jaxpr
from autopar.ir.check import check_program
from autopar.ir.passes import Pass, run_passes
from autopar.ir.rewrite.batch_indices import batch_indices
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.trace.inline_calls import Block, Walk, append_flat, fresh


@dataclass(frozen=True, slots=True)
class Traced:
    """The form that the trace passes work on.

    Attributes:
        jaxpr: The program.
        constants: Values of its constvars; once calls are inlined, of its last invars.
        num_inputs: How many of the first invars stay, read or not.
    """

    jaxpr: Jaxpr
    constants: Mapping[Var, Constant]
    num_inputs: int

    def by(self, rewrite: Callable[[Jaxpr], Jaxpr]) -> Self:
        """Apply a rewrite that keeps the inputs."""
        return replace(self, jaxpr=rewrite(self.jaxpr))


def flatten(jaxpr: Jaxpr, consts: Sequence[Constant] = ()) -> tuple[Jaxpr, tuple[Constant, ...]]:
    """Flatten a jaxpr.

    `jaxpr`: any jaxpr; its invars stay the first invars, keys as integers.

    Returns the flat jaxpr, without constvars, and the arrays for its last invars, one per distinct constant.
    """
    given = Traced(jaxpr, dict(zip(jaxpr.constvars, consts, strict=True)), len(jaxpr.invars))
    flat = run_passes(FLATTEN, given, check_flat)
    return flat.jaxpr, tuple(flat.constants.values())


def check_flat(program: Traced) -> None:
    """Assert that a program is flat, and has a value for each constant."""
    check_program(program.jaxpr)
    assert program.jaxpr.invars[program.num_inputs :] == list(program.constants), "a constant without a value"


def _inline_calls(program: Traced) -> Traced:
    block = Block()
    invars = [fresh(var.aval) for var in program.jaxpr.invars]
    outvars = append_flat(Walk(block, NameStack(), flatten), program.jaxpr, tuple(program.constants.values()), invars)
    invars += block.captured.values()
    constants = dict(zip(block.captured.values(), block.values.values(), strict=True))
    return replace(program, jaxpr=make_jaxpr(invars, outvars, block.eqns), constants=constants)


def _remove_dead_code(program: Traced) -> Traced:
    flat = remove_dead_code(program.jaxpr, keep_inputs=program.num_inputs)
    kept = set(flat.invars)
    return replace(program, jaxpr=flat, constants={var: x for var, x in program.constants.items() if var in kept})


FLATTEN: tuple[Pass[Traced], ...] = (
    Pass("flatten", "calls are inlined, typed keys become integers, random bits counters", _inline_calls),
    Pass(
        "batch_indices",
        "indices that only count become batch dims",
        lambda program: program.by(partial(batch_indices, constants=program.constants)),
    ),
    Pass("dead_code", "what nothing reads is removed, constants too", _remove_dead_code),
)
"""The passes from any jaxpr to a flat program."""
