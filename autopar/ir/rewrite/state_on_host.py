"""Offloads state to host memory: it is copied to the device for the update, and its new value back.

In:     a flat program; which of its inputs are in host memory, and the results that are their new values.
Out:    the same program, in which these inputs and results have host memory space. Each input is copied to the device
        before its first reader, and its new value back after the equation that computes it.
Method: equations that gradients depend on keep their order; the rest are ordered parameter by parameter, so that the state
        of few parameters is on the device at once. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training",
        ATC 2021.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

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
from autopar.ir.build import Equations
from autopar.ir.dataflow import inputs_of, makers, variables, with_makers
from autopar.ir.gradient import feeds_backward
from autopar.ir.rewrite.dead_code import remove_dead_code


def only_for_update(jaxpr: Jaxpr) -> list[bool]:
    """For each input, whether it is read, but by nothing that gradients depend on; False for all without a gradient."""
    head = feeds_backward(jaxpr)
    early = {a for eqn, waits in zip(jaxpr.eqns, head, strict=True) if waits for a in inputs_of(eqn)}
    late = {a for eqn, waits in zip(jaxpr.eqns, head, strict=True) if not waits for a in inputs_of(eqn)}
    return [any(head) and var in late and var not in early for var in jaxpr.invars]


def state_on_host(jaxpr: Jaxpr, inputs: Sequence[int], aliases: Mapping[int, int]) -> Jaxpr:
    """The program with some of its state in host memory.

    `inputs`: which of its inputs are offloaded. `aliases`: result -> input whose new value it is.
    """
    host_var = {jaxpr.invars[k]: new_var(in_host_memory(jaxpr.invars[k].aval)) for k in inputs}
    leaving = {k: jaxpr.outvars[k] for k, at in aliases.items() if jaxpr.invars[at] in host_var}
    eqns = _by_parameter(jaxpr, [a for k, a in enumerate(jaxpr.outvars) if k not in leaving])
    sent: dict[Atom, Var] = {}
    for atom in leaving.values():
        if not on_host(atom.aval):
            sent.setdefault(atom, host_var[atom] if atom in host_var else new_var(in_host_memory(atom.aval)))
    made, fetched = makers(eqns), set[Var]()
    written = [copy_to(a, v, jax.memory.Space.Host) for a, v in sent.items() if a not in made and a not in host_var]
    for eqn in eqns:
        for var in inputs_of(eqn):
            if var in host_var and var not in fetched:
                fetched.add(var)
                written.append(copy_to(host_var[var], var, jax.memory.Space.Device, eqn))
        written.append(eqn)
        written += [copy_to(var, sent[var], jax.memory.Space.Host, eqn) for var in eqn.outvars if var in sent]
    outvars = [sent.get(atom, atom) if k in leaving else atom for k, atom in enumerate(jaxpr.outvars)]
    return make_jaxpr([host_var.get(var, var) for var in jaxpr.invars], outvars, written)


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


def copy_to(atom: Atom, made: Var, space: jax.memory.Space, near: JaxprEqn | None = None) -> JaxprEqn:
    """A copy of `atom` to a memory space, with the source location of `near`."""
    source = None if near is None else near.source_info
    return Equations().define(made, lambda x: jax.device_put(x, space), [atom], source)


def _by_parameter(jaxpr: Jaxpr, results: Iterable[Atom]) -> list[JaxprEqn]:
    """The equations that gradients depend on, then the others in the order in which the results need them."""
    head = feeds_backward(jaxpr)
    tail = [eqn for eqn, waits in zip(jaxpr.eqns, head, strict=True) if not waits]
    if not any(head) or any(eqn.effects for eqn in tail):
        return list(jaxpr.eqns)
    position = {eqn: k for k, eqn in enumerate(tail)}
    maker = makers(tail)
    done: dict[JaxprEqn, None] = {}
    for atom in variables(itertools.chain(results, jaxpr.outvars)):
        done |= dict.fromkeys(with_makers((), [atom], maker, position, done))
    return [*(eqn for eqn, waits in zip(jaxpr.eqns, head, strict=True) if waits), *done]
