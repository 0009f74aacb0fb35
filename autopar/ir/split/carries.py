"""Which carries of a loop are sums over its trips, and which loops end for each sample by itself.

In:     a `scan`, or a `while`.
Out:    which carries are sums; whether a loop may go on for what has ended.
Method: the form of the body.
"""

from __future__ import annotations

from autopar._jax import Atom, JaxprEqn, Var
from autopar.ir.dataflow import inputs_of, makers
from autopar.ir.region import Region, kind_of


def sum_carries(scan: Region) -> list[bool | None]:
    """For each carry of a scan: True if it is a sum over the trips, False if it does not change, None otherwise.

    A carry that anything but the addition reads is no sum: its reader waits for the trips before.
    """
    eqns, carries = scan.bodies[0].eqns, scan.carries
    entered = {b.var: b.var for b in carries}
    for eqn in eqns:
        entered.update((var, entered[a]) for a, var in passed_on(eqn) if isinstance(a, Var) and a in entered)
    stays = [isinstance(b.value, Var) and entered.get(b.value) is b.var for b in carries]
    sum_of: dict[Atom, int] = {b.var: k for k, b in enumerate(carries) if not stays[k]}
    broken: set[int] = set()
    for eqn in eqns:
        read, passed = [a for a in inputs_of(eqn) if a in sum_of], passed_on(eqn)
        adds = eqn.primitive.name in ("add", "add_any") and len(read) == 1 and read[0].aval == eqn.outvars[0].aval
        if passed:
            sum_of.update((var, sum_of[a]) for a, var in passed if isinstance(a, Var) and a in sum_of)
        elif adds:
            sum_of[eqn.outvars[0]] = sum_of[read[0]]
        else:
            broken.update(sum_of[a] for a in read)
    left = [sum_of.get(a) if isinstance(a, Var) else None for a in scan.bodies[0].outvars]
    broken.update(of for k, of in enumerate(left) if of is not None and of != k)
    is_sum = [of == k and k not in broken for k, of in enumerate(left[: len(carries)])]
    return [False if same else True if adds_up else None for same, adds_up in zip(stays, is_sum, strict=True)]


def passed_on(eqn: JaxprEqn) -> list[tuple[Atom, Var]]:
    """Pairs of an operand and the result that equals it: of a barrier, or of a cast that only drops a weak type."""
    pairs = list(zip(eqn.invars, eqn.outvars, strict=False))
    if kind_of(eqn) == "barrier":
        return pairs
    if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype:
        return pairs
    return []


def is_done_apart(loop: Region) -> bool:
    """Whether a `while` treats each sample alone: it runs while any sample is active, and leaves finished ones unchanged.

    Then shards may stop at different turns: further turns would not change their samples.
    """
    made_by = makers(eqn for body in loop.bodies for eqn in body.eqns)
    (predicate,) = loop.of_role("test")
    test = loop.bodies[0].eqns[0] if len(loop.bodies[0].eqns) == 1 else None
    if test is None or test.primitive.name != "reduce_or" or predicate.value is not test.outvars[0]:
        return False
    going = next((b.var for b in loop.carries if b.inputs[0] is test.invars[0]), None)

    def stays(old: Var, result: Atom) -> bool:
        """Whether finished samples keep their old value."""
        eqn = made_by.get(result) if isinstance(result, Var) else None
        if eqn is None or result is old:
            return result is old
        if old is going:
            return eqn.primitive.name == "and" and going in eqn.invars
        if eqn.primitive.name != "select_n" or eqn.invars[1] is not old:
            return False
        choice = eqn.invars[0]
        wide = made_by.get(choice) if isinstance(choice, Var) else None
        if wide is not None and wide.primitive.name == "broadcast_in_dim":
            leading = list(wide.params["broadcast_dimensions"]) == list(range(wide.invars[0].aval.ndim))
            choice = wide.invars[0] if leading else choice
        return choice is going

    return going is not None and all(stays(b.var, b.value) for b in loop.carries)
