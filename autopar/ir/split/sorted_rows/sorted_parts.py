"""Rewrites sorts of rows by a key into sorts of equal parts, where no result depends on it.

In:     a flat program, and the number of parts: devices times microbatches.
Out:    the same function, in which `argsort`, gathers and scatters by it, and grouped products (experts without capacity)
        work on each part by itself. Parts are a dim like any other, split with the samples on a mesh axis or in
        microbatches.
Method: the order of rows is propagated through the program (`ordered.py`). A sort whose order reaches an operation that
        depends on it is left as it is. Operations on parts are the `vmap` of the operation on one part. Each value that
        counts the rows of groups gets a second one that counts those of each part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var, bind_eqn, make_jaxpr, new_eqn, new_var, replace_eqn, resized
from autopar.ir.build import Equations, flat_function
from autopar.ir.dims import apart, together
from autopar.ir.region import Binding, Region, equations_within, is_region, region_of
from autopar.ir.rewrite.dead_code import remove_dead_code
from autopar.ir.rules.grouped_product import grouped_product_p
from autopar.ir.signature import equation_signature
from autopar.ir.split.sorted_rows.ordered import PRODUCTS, Counts, Ordering, RowOrder, Rows, Transfer, on_one_part


def sort_in_parts(jaxpr: Jaxpr, num_devices: int, count: int = 1) -> Jaxpr:
    """Sort rows in as many parts as possible: per microbatch at most one for each device.

    Args:
        jaxpr: Flat program.
        num_devices: Number of devices that samples may be split over.
        count: Number of microbatches.
    """
    if not any(eqn.primitive.name == "sort" for eqn, _ in equations_within(jaxpr)):
        return jaxpr
    for parts in (count * n for n in range(num_devices, 0, -1) if num_devices % n == 0 and count * n > 1):
        found = _Found(jaxpr, parts)
        if found.transfer_of:
            eqns = _Writer(found).equations(jaxpr.eqns)
            return remove_dead_code(make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns))
    return jaxpr


class _Found:
    """The order of rows in a program.

    Attributes:
        count: Number of parts.
        order_of: The order of each value that has one, or what it counts.
        transfer_of: The transfer of the equations on these values.
    """

    def __init__(self, jaxpr: Jaxpr, count: int):
        self.count, self.ordering = count, Ordering(jaxpr, count)
        while True:  # ends: each turn has fewer keys
            self.order_of: dict[Var, Rows | Counts] = {}
            self.transfer_of: dict[JaxprEqn, Transfer] = {}
            self.failed: dict[int, None] = {}
            if self.ordering.key_of:
                self.body(jaxpr)
                self.give_up(map(self.of, jaxpr.outvars))
            if not self.failed:
                break
            left = self.ordering.key_of.items()
            self.ordering.key_of = {var: key for var, key in left if key not in self.failed}

    def of(self, atom: Atom | None) -> RowOrder:
        return self.order_of.get(atom) if isinstance(atom, Var) else None

    def give_up(self, places: Iterable[RowOrder]) -> None:
        """Give up the sorts on whose order these values depend."""
        for rows in places:
            self.failed.update(dict.fromkeys(rows.keys if isinstance(rows, Rows) else ()))

    def place(self, var: Var, order: RowOrder) -> None:
        if order is not None:
            self.order_of[var] = order

    def body(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if is_region(eqn):
                self.region(region_of(eqn))
                continue
            known = [self.of(a) for a in eqn.invars]
            found = self.ordering.transfer(eqn, known)
            if found is None:
                self.give_up(known)
                continue
            self.transfer_of[eqn] = found
            for var, order in zip(eqn.outvars, found.results, strict=True):
                self.place(var, order)

    def region(self, region: Region) -> None:
        """Propagate orders through a region: as constants or stacks, not through carries or tests."""
        for b in region.bindings:
            order = self.of(b.operand)
            if order is None:
                continue
            if b.role == "through" and b.result is not None:
                self.place(b.result, order)
            elif b.role == "const" and not order.depth:
                for var in b.variables:
                    self.place(var, order)
            elif b.role == "xs" and order.depth:
                self.place(b.var, order.moved(-1))
            else:
                self.give_up([order])
        for body in region.bodies:
            self.body(body)
        for b in region.bindings:
            if b.role == "ys" and b.result is not None:
                order = self.of(b.value)
                self.place(b.result, None if order is None else order.moved(1))
            else:
                self.give_up(map(self.of, b.values))


class _Writer:
    """Writes the program in which rows are sorted in parts.

    `counted`: values that count rows -> the values that count those of each part, `[..., part, group]`.
    """

    def __init__(self, found: _Found):
        self.found, self.count = found, found.count
        self.counted: dict[Var, Var] = {}
        self.programs: dict[object, Jaxpr] = {}

    def equations(self, given: Sequence[JaxprEqn]) -> Equations:
        eqns = Equations()
        for eqn in given:
            if is_region(eqn):
                eqns.append(self.region(region_of(eqn)))
                continue
            transfer = self.found.transfer_of.get(eqn)
            if transfer is None:
                eqns.append(eqn)
            elif isinstance(transfer.results[0], Counts):
                eqns.append(eqn)
                self.count_apart(eqns, eqn, transfer)
            elif eqn.primitive.name in PRODUCTS and transfer.parts:
                eqns.append(self.product(eqn))
            elif transfer.parts:
                self.apart(eqns, eqn, transfer)
            else:
                eqns.append(eqn)
        return eqns

    def product(self, eqn: JaxprEqn) -> JaxprEqn:
        """The grouped product of rows that are sorted by group in each part."""
        lhs, rhs, sizes = eqn.invars
        assert isinstance(sizes, Var), "a literal counts nothing"
        params = {
            "ragged_dot_dimension_numbers": eqn.params["ragged_dot_dimension_numbers"],
            "preferred_element_type": eqn.outvars[0].aval.dtype,
            "precision": eqn.params["precision"],
            "tiles": eqn.params.get("tiles"),
        }
        operands = [lhs, rhs, self.counted[sizes]]
        return new_eqn(grouped_product_p, operands, eqn.outvars, params, source_info=eqn.source_info)

    def apart(self, eqns: Equations, eqn: JaxprEqn, transfer: Transfer) -> None:
        """Write an equation that works on each part by itself."""
        first = len(eqns)
        made = self.by_parts(eqns, eqn, transfer)
        named = dict(zip(made, eqn.outvars, strict=True))
        eqns[first:] = [replace_eqn(e, outvars=[named.get(v, v) for v in e.outvars]) for e in eqns[first:]]

    def count_apart(self, eqns: Equations, eqn: JaxprEqn, transfer: Transfer) -> None:
        """Write beside a sum over rows, or what is computed of such sums, that of each part."""
        (var,) = eqn.outvars
        if transfer.parts is None:
            counts = [self.counts(atom) for atom in eqn.invars]
            depth = max(order.depth for order in transfer.results if order is not None)
            into = [None if count is None else depth for count in counts]
            operands = [atom if count is None else count for atom, count in zip(eqn.invars, counts, strict=True)]
            each = jax.vmap(lambda *part: bind_eqn(eqn, *part)[0], into, depth)
            (made,) = eqns.inline(flat_function(each, *(atom.aval for atom in operands)), operands, eqn.source_info)
            assert isinstance(made, Var), "a count is computed"
            self.counted[var] = made
        else:
            (made,) = self.by_parts(eqns, eqn, transfer)
            assert isinstance(made, Var), "a count is computed"
            self.counted[var] = made

    def by_parts(self, eqns: Equations, eqn: JaxprEqn, transfer: Transfer) -> list[Atom]:
        key = equation_signature(eqn), transfer
        if key not in self.programs:
            self.programs[key] = _program(eqn, transfer, self.count)
        return eqns.inline(self.programs[key], eqn.invars, eqn.source_info)

    def counts(self, atom: Atom | None) -> Var | None:
        """The value that counts the rows of each part, beside one that counts all rows; None: it is no count."""
        return self.counted.get(atom) if isinstance(atom, Var) else None

    def region(self, region: Region) -> JaxprEqn:
        """Rebuild a region; counts of each part cross its boundary beside the counts of all rows."""
        more = []
        for b in region.bindings:
            counts = self.counts(b.operand)
            if counts is not None and b.role in ("const", "xs"):
                shape = counts.aval.shape[1:] if b.role == "xs" else counts.aval.shape
                inner = tuple(None if var is None else new_var(resized(var.aval, shape)) for var in b.inputs)
                self.counted.update({var: new for var, new in zip(b.inputs, inner, strict=True) if var and new})
                more.append(Binding(b.role, counts, inner, (None,) * len(region.bodies)))
            elif counts is not None and b.role == "through" and b.result is not None:
                self.counted[b.result] = made = new_var(counts.aval)
                more.append(Binding("through", counts, (), (), made))
        bodies = [self.equations(body.eqns) for body in region.bodies]
        for b in region.ys:
            counts = self.counts(b.value)
            if counts is not None and b.result is not None:
                self.counted[b.result] = made = region.new_stack(counts)
                more.append(Binding("ys", None, (None,), (counts,), made))
        same = [[*map(id, body.eqns)] for body in region.bodies] == [[*map(id, eqns)] for eqns in bodies]
        return region.eqn if same and not more else region.rebuild([*region.bindings, *more], bodies)


def _program(eqn: JaxprEqn, transfer: Transfer, count: int) -> Jaxpr:
    """The program of an equation on all parts, from that of one part."""
    into = transfer.parts or ()

    def program(*operands: jax.Array) -> list[jax.Array]:
        parts = [x if d is None else apart(x, d, count) for x, d in zip(operands, into, strict=True)]
        made = jax.vmap(lambda *part: on_one_part(eqn, *part), into, [d or 0 for d in transfer.made])(*parts)
        return [x if d is None else together(x, d) for x, d in zip(made, transfer.made, strict=True)]

    return flat_function(program, *(atom.aval for atom in eqn.invars))
