"""A traced step: a flat jaxpr, and how the user's pytrees, names and typed keys map to its variables.

In:     the trace of the user's function (`trace/`).
Out:    `Program`, which every pass reads, and its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath, PyTreeDef

from autopar._jax import Aval, Constant, Jaxpr, as_key, key_data
from autopar.ir.printer import Names, equations_text
from autopar.ir.trace.containers import in_containers
from autopar.ir.trace.parameters import Argument


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step.

    Attributes:
        name: The function's name.
        jaxpr: Flat. Its invars are one per argument leaf, then one per captured constant; no constvars, no typed keys.
        consts: The captured constants, for the last invars.
        in_tree: Tree of `(args, kwargs)`, without static arguments.
        out_tree: Tree of the result.
        in_paths: Readable path of each argument leaf: "state/params/layers/0/kernel".
        in_keys: The same path in JAX's keys, those of `(args, kwargs)` first.
        out_paths: Readable path of each result leaf: "result/0/params/layers/0/kernel".
        in_avals: What the user passes per argument leaf; a typed key is a typed key here.
        out_avals: What the user gets back per result leaf.
        key_inputs: Per argument leaf, the name of the key's generator, or None if it is no typed key.
        key_outputs: The same per result leaf.
        raw_keys: Argument leaves that are random keys as integers, as `jax.random.PRNGKey` makes them.
        gradient: The user's line that the step takes the gradient of; "" if it takes none.
        num_args: Number of argument leaves.
        static: Name and `repr` of each static argument.
        arguments: The parameter that each child of `in_tree`'s args and kwargs belongs to.
        defaulted: Numbers of the parameters that have a default and were not passed.
    """

    name: str
    jaxpr: Jaxpr
    consts: tuple[Constant, ...]
    in_tree: PyTreeDef
    out_tree: PyTreeDef
    in_paths: tuple[str, ...]
    in_keys: tuple[KeyPath, ...]
    out_paths: tuple[str, ...]
    in_avals: tuple[Aval, ...]
    out_avals: tuple[Aval, ...]
    key_inputs: tuple[str | None, ...]
    key_outputs: tuple[str | None, ...]
    num_args: int
    static: tuple[tuple[str, str], ...] = ()
    arguments: tuple[Argument, ...] = ()
    defaulted: tuple[int, ...] = ()
    raw_keys: tuple[int, ...] = ()
    gradient: str = ""

    def __str__(self) -> str:
        return print_program(self)

    def flatten_inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """Argument leaves to values of the jaxpr's invars: typed keys become integers, constants are appended."""
        assert len(leaves) == self.num_args, f"{len(leaves)} leaves for {self.num_args} arguments"
        physical = [key_data(x) if impl else x for x, impl in zip(leaves, self.key_inputs, strict=True)]
        return [*physical, *self.consts]

    def spec_of(self, leaf: int, spec: PartitionSpec) -> PartitionSpec:
        """The spec of an argument leaf, from its variable's: an array of typed keys lacks the dim of the key's integers."""
        return PartitionSpec(*tuple(spec)[: self.in_avals[leaf].ndim]) if self.key_inputs[leaf] else spec

    def in_containers(self, values: Sequence[object]) -> Any:
        """One value per argument leaf (a `PartitionSpec`, a sharding) in the arguments' tree `(args, kwargs)`."""
        return in_containers(self.in_tree, values, self.in_keys)

    def unflatten_outputs(self, values: Sequence[Any]) -> Any:
        """Values of the jaxpr's outvars to the user's result."""
        leaves = [as_key(value, impl) if impl else value for value, impl in zip(values, self.key_outputs, strict=True)]
        return jax.tree.unflatten(self.out_tree, leaves)


def print_program(program: Program, *, source: bool = True) -> str:
    """The program as text; `source`: with the user's line and the name stack beside each equation."""
    names = Names()
    lines = [f"program {program.name}"]
    leaves = zip(program.in_paths, program.jaxpr.invars, program.key_inputs, strict=False)
    lines += [f"  in    {names.define(var)}  {path}{f'  (key {impl})' if impl else ''}" for path, var, impl in leaves]
    lines += [f"  const {names.define(var)}" for var in program.jaxpr.invars[program.num_args :]]
    lines += [f"  static {name} = {text}" for name, text in program.static]
    lines += equations_text(program.jaxpr, names, "  ", source)
    results = zip(program.out_paths, program.jaxpr.outvars, program.key_outputs, strict=True)
    lines += [f"  out   {names.use(atom)}  {path}{f'  (key {impl})' if impl else ''}" for path, atom, impl in results]
    return "\n".join(line.rstrip() for line in lines)
