"""Offloads state to host memory: it is copied to the device where it is read, and its new value back.

In:     a flat program; which of its inputs are in host memory, and the results that are their new values.
Out:    the same program, in which these inputs and results have host memory space. Each input is copied to the device
        before its readers (`host_reads.py`), and its new value back after the equation that computes it.
Method: equations that gradients depend on keep their order. Among them the rest are ordered parameter by parameter, each
        updated once its gradient is there and the backward pass has read it, so that the state and the gradients of few
        parameters are on the device at once. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", ATC
        2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import jax

from autopar._jax import (
    Atom,
    Jaxpr,
    JaxprEqn,
    Var,
    copies_to_or_from_host,
    in_host_memory,
    make_jaxpr,
    new_var,
    on_host,
)
from autopar.ir.dataflow import inputs_of, makers, read_by, readers_of, variables, with_makers
from autopar.ir.gradient import feeds_backward
from autopar.ir.region import kind_of, region_of
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.rewrite.host_reads import copy_to, read_from_host, send_rows

ReadFor: TypeAlias = Literal["gradients", "update", ""]
"""What an input is read for: what gradients depend on, perhaps besides the update; the update alone; nothing."""


def read_for(jaxpr: Jaxpr) -> list[ReadFor]:
    """For each input, what it is read for; `""` for all if the program takes no gradient."""
    head = feeds_backward(jaxpr)
    early = read_by(eqn for eqn, waits in zip(jaxpr.eqns, head, strict=True) if waits)
    late = read_by(eqn for eqn, waits in zip(jaxpr.eqns, head, strict=True) if not waits)
    if not any(head):
        return [""] * len(jaxpr.invars)
    return ["gradients" if var in early else "update" if var in late else "" for var in jaxpr.invars]


def state_on_host(jaxpr: Jaxpr, inputs: Sequence[int], aliases: Mapping[int, int]) -> Jaxpr:
    """The program with some of its state in host memory.

    `inputs`: which of its inputs are offloaded. `aliases`: result -> input whose new value it is.
    """
    there = {jaxpr.invars[k]: new_var(in_host_memory(jaxpr.invars[k].aval)) for k in inputs}
    renewed = {k: jaxpr.invars[at] for k, at in aliases.items() if jaxpr.invars[at] in there}
    eqns = _by_parameter(jaxpr, renewed)
    others = [a for k, a in enumerate(jaxpr.outvars) if k not in renewed]
    eqns, names = read_from_host(
        eqns, there, [*others, *(jaxpr.outvars[k] for k in renewed if jaxpr.outvars[k] not in there)]
    )
    sent: dict[Atom, Var] = {}
    for k in renewed:
        atom = jaxpr.outvars[k]
        if not on_host(atom.aval):
            sent.setdefault(atom, there[atom] if atom in there else new_var(in_host_memory(atom.aval)))
    outvars = [
        sent.get(a, a) if k in renewed else names.get(a, a)  # type: ignore[arg-type]
        for k, a in enumerate(jaxpr.outvars)
    ]
    written = _sending(eqns, {a: v for a, v in sent.items() if a not in there}, [names.get(a, a) for a in others])
    return make_jaxpr([there.get(var, var) for var in jaxpr.invars], outvars, written)


def _sending(eqns: Sequence[JaxprEqn], sent: Mapping[Atom, Var], results: Sequence[Atom]) -> list[JaxprEqn]:
    """The equations, with copies of values to host memory as they are made; of stacks that nothing else reads, row by row."""
    made, readers, kept = makers(eqns), readers_of(eqns), set(variables(results))
    written = [copy_to(a, v, jax.memory.Space.Host) for a, v in sent.items() if a not in made]
    for eqn in eqns:
        rows = {}
        if kind_of(eqn) == "scan":
            stacks = [b.result for b in region_of(eqn).ys if b.result in sent]
            rows = {v: sent[v] for v in stacks if v not in readers and v not in kept}
        written.append(send_rows(eqn, rows) if rows else eqn)
        written += [copy_to(v, sent[v], jax.memory.Space.Host, eqn) for v in eqn.outvars if v in sent and v not in rows]
    return written


def return_to_host(jaxpr: Jaxpr, aliases: Mapping[int, int]) -> Jaxpr:
    """Offload the state whose new value the step itself puts into host memory: then the old value is there too."""
    there = [k for k in aliases if on_host(jaxpr.outvars[k].aval)]
    if not there:
        return jaxpr
    # Drop the step's own copies, wherever the user put them; `state_on_host` writes them right after their operand.
    copied = {
        v: a for eqn in jaxpr.eqns if copies_to_or_from_host(eqn) for a, v in zip(eqn.invars, eqn.outvars, strict=True)
    }
    outvars = [copied.get(atom, atom) if k in there else atom for k, atom in enumerate(jaxpr.outvars)]
    made = remove_dead_code(make_jaxpr(jaxpr.invars, outvars, jaxpr.eqns))
    return state_on_host(made, [aliases[k] for k in there], aliases)


def _by_parameter(jaxpr: Jaxpr, renewed: Mapping[int, Var]) -> list[JaxprEqn]:
    """The equations that gradients depend on, and the others in the order in which the results need them, each result among
    the former as early as can be: of new state, not before the backward pass has read the old. Of results that are possible
    at once, those come first that no other is computed from: a parameter, with its moments, not the moments of all.

    `renewed`: result -> the input whose new value it is.
    """
    head = feeds_backward(jaxpr)
    tail = [eqn for eqn, waits in zip(jaxpr.eqns, head, strict=True) if not waits]
    if not any(head) or any(eqn.effects for eqn in tail):
        return list(jaxpr.eqns)
    first = [eqn for eqn, waits in zip(jaxpr.eqns, head, strict=True) if waits]
    known = {var: k for k, eqn in enumerate(first, 1) for var in eqn.outvars}  # value -> how many are run before it is
    last = {var: k for k, eqn in enumerate(first, 1) for var in inputs_of(eqn)}  # value -> how many read it
    for eqn in tail:
        known.update(dict.fromkeys(eqn.outvars, max((known.get(a, 0) for a in inputs_of(eqn)), default=0)))
    position = {eqn: k for k, eqn in enumerate(tail)}
    maker, read = makers(tail), read_by(tail)
    wanted = [
        (max(known.get(atom, 0), last.get(renewed[k], 0) if k in renewed else 0), atom in read, k)
        for k, atom in enumerate(jaxpr.outvars)
        if atom in maker
    ]
    done: dict[JaxprEqn, None] = {}
    groups = dict[int, list[JaxprEqn]]()
    for at, _, k in sorted(wanted):
        made = with_makers((), variables([jaxpr.outvars[k]]), maker, position, done)
        done |= dict.fromkeys(made)
        groups.setdefault(at, []).extend(made)
    return [*groups.get(0, ()), *(e for k, eqn in enumerate(first, 1) for e in (eqn, *groups.get(k, ())))]
