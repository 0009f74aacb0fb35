"""Counts the memory traffic of each operation, with elementwise work fused as compilers do.

In:     `Graph`.
Out:    `Traffic` of each operation: how often it moves each of its operands and results, and its kernel launches.
Method: compilers fuse connected elementwise operations and reductions of one level into a kernel, which reads its inputs
        and writes its outputs only. An operation's level is the number of unfusible kernels (products and the like) on the
        longest path before it. A value is stored if an unfusible kernel reads or makes it, if it crosses the boundary of a
        body, or if a reader has a later level and the value is clearly smaller than what it is computed from. Other values
        are recomputed by their readers, as are views, and results larger than their operands (but not reductions of
        those). Within a kernel, the first operation that reads a value pays for it. Elementwise work of one shape on parameters
        is one kernel though it stores values on the way: an update writes new moments, and goes on with them.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar._jax import Atom, JaxprEqn, Literal, Var, copies_to_or_from_host, on_host
from autopar.intra_op.graph import Graph, Node
from autopar.intra_op.sharded import Compute, Instruction
from autopar.ir.rules.replicated import KERNELS
from autopar.ir.work import num_bytes, num_elements_of
from autopar.tuning import TUNING

_VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "copy", "sharding_constraint", "copy_p"})
_PICKING = frozenset({"gather", "dynamic_slice", "slice"})
"""Read as many bytes of their first operand as they return."""
_WRITING = frozenset({"dynamic_update_slice", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"})
"""Update their first operand in place, as many bytes as the updates have."""
_SORTING = frozenset({"sort", "top_k", "approx_top_k"})
_KERNELS = frozenset({"pallas_call", "custom_partitioning", "grouped_product", *KERNELS})
"""Kernels that compilers do not fuse into."""
SORT_PASSES = 4.0
"""Passes over memory of a radix sort of 32 bits in digits of 8; Merrill & Grimshaw, 2011."""


class Traffic(NamedTuple):
    """The memory traffic of one operation.

    Attributes:
        counts: Per operand, then per result, how often its bytes on one device are moved.
        touched: Per operand and result, the index of the one whose bytes count for it; mostly its own.
        launches: Kernels that it launches.
        on_samples: Whether any operand or result has batch dims, or none are known, as of one sample; else it works on
            parameters.
        turned: The operands that are stored in another order of dims than they are read in.
    """

    counts: tuple[float, ...]
    touched: tuple[int, ...]
    launches: float
    on_samples: bool
    turned: tuple[int, ...] = ()


def find_traffic(graph: Graph) -> dict[int, Traffic]:
    """The traffic of each operation, by the index of its node; cached in the graph, and equal ones are one object."""
    return graph.cached("traffic", lambda: _Finder(graph).all_traffic())


def find_reads(graph: Graph) -> dict[int, tuple[Var, ...]]:
    """The stored values that each operation reads: its operands, or what they are recomputed from; by its node's index."""
    finder = _Finder(graph)
    return {
        node.index: tuple(
            dict.fromkeys(leaf for var in finder.read[node.index] for leaf in finder.leaves_of(finder.origin(var)))
        )
        for node in finder.ops
    }


def is_pointwise(node: Node | Compute) -> bool:
    """Whether an operation is elementwise, as far as a compiler can tell."""
    rule = node.rule
    in_one = not (rule.summed or rule.reduced or rule.whole or node.eqn.primitive.name in _KERNELS)
    return in_one and not copies_to_or_from_host(node.eqn)


def is_indexing(node: Node) -> bool:
    """Whether an operation gathers, scatters or sorts elements: memory-bound whatever FLOPs its rule counts."""
    return node.eqn.primitive.name in _PICKING | _WRITING | _SORTING


def is_picking(node: Node | Compute) -> bool:
    """Whether an operation reads only as much of its first operand as it returns."""
    return node.eqn.primitive.name in _PICKING


def is_view(eqn: JaxprEqn) -> bool:
    """Whether an operation only gives an array another shape or order of dims."""
    return (
        eqn.primitive.name in _VIEWS
        and len(eqn.invars) == 1
        and not isinstance(eqn.invars[0], Literal)
        and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype
    )


def is_fused(node: Node | Compute) -> bool:
    """Whether compilers fuse an operation with its neighbours: elementwise operations, slices, reductions of one operand."""
    rule, name = node.rule, node.eqn.primitive.name
    if name in _SORTING or name in _WRITING or name == "gather":
        return False
    if name in ("slice", "dynamic_slice", "concatenate", "pad", "rev") or is_pointwise(node):
        return True
    return len([o for o in rule.operands if o]) <= 1 and _is_sum(node)


def takes_waits(instruction: Instruction) -> bool:
    """Whether an instruction is elementwise work, into which a wait is fused without a pass over memory."""
    if not isinstance(instruction, Compute) or instruction.eqn.primitive.name in _VIEWS:
        return False
    on_devices = any(not on_host(var.aval) for var, _ in instruction.reads)
    return on_devices and is_fused(instruction) and not instruction.strategy.reductions


def _is_sum(node: Node | Compute) -> bool:
    """Whether an operation is a reduction."""
    return node.eqn.primitive.name.startswith(("reduce_", "arg"))


class _Finder:
    def __init__(self, graph: Graph):
        self.ops = [node for node in graph.nodes if node.kind == "op"]
        self.batch = graph.batch
        # A dim of length one has no factor, and is not followed: then no value but the inputs is known to be of samples.
        self.knows_samples = any(var.aval.shape[d] > 1 for var, dims in graph.batch.of.items() for d in dims)
        self.root: dict[Var, Var] = {}
        self.turned: set[Var] = set()
        self.floating: set[Var] = set()
        self.level: dict[Var, int] = {}
        self.level_of: dict[int, int | None] = {}
        self.parent: dict[int, int] = {}
        self.fused = {node.index: is_fused(node) for node in self.ops}
        self.made_by = {var: node for node in self.ops for var in node.eqn.outvars}
        ports = [graph.nodes[edge.target].kind == "port" for edge in graph.edges]
        crossing = [edge.var for edge, is_port in zip(graph.edges, ports, strict=True) if is_port]
        self.find_levels()
        # Needs the views, which `find_levels` finds.
        self.read = {node.index: self.operands(node.eqn) for node in self.ops}
        self.stored = {self.origin(var) for var in crossing}
        self.leaves: dict[Var, tuple[Var, ...]] = {}
        self.find_stored()
        self.join()

    def origin(self, var: Var) -> Var:
        """The value that a chain of views begins with."""
        return self.root.get(var, var)

    def operands(self, eqn: JaxprEqn) -> list[Var]:
        return [self.origin(atom) for atom in eqn.invars if not isinstance(atom, Literal)]

    def find_levels(self) -> None:
        """Find the level of each operation, the views, and the floating values: recomputed by every reader."""
        ready: dict[Var, int] = {}  # the least level at which a floating value can be computed
        for node in self.ops:
            eqn = node.eqn
            read = self.operands(eqn)
            solid = [var for var in read if var not in self.floating]
            self.level_of[node.index] = None
            if is_view(eqn):
                self.root[eqn.outvars[0]] = read[0]
                if _turns(eqn) or eqn.invars[0] in self.turned:
                    self.turned.add(eqn.outvars[0])
                continue
            level = max((self.level.get(var, 0) for var in solid), default=0)
            fused = self.fused[node.index]
            if fused and (_is_larger(eqn) or not (solid or _is_sum(node))):
                self.floating.update(eqn.outvars)
                least = max((ready.get(var, self.level.get(var, 0)) for var in read), default=0)
                ready.update((var, least) for var in eqn.outvars)
            else:
                # A reduction of floating values does not float: readers do not repeat it.
                level = level if solid else max((ready.get(var, 0) for var in read), default=0)
                self.level_of[node.index] = level
            for var in eqn.outvars:
                self.level[var] = level if fused else level + 1

    def find_stored(self) -> None:
        """Find the stored values; and for the others, the stored values they are computed from (`leaves`)."""
        late: set[Var] = set()
        for node in self.ops:
            for var in self.read[node.index]:
                maker = self.made_by.get(var)
                if maker is None or not self.fused[maker.index]:
                    self.stored.add(var)
                elif not self.fused[node.index]:
                    if not (var in self.floating and _is_larger(maker.eqn)):
                        self.stored.add(var)
                elif self.level_of[node.index] not in (None, self.level_of[maker.index]):
                    late.add(var)
            if not self.fused[node.index]:
                self.stored.update(node.eqn.outvars)
        for node in self.ops:
            if not self.fused[node.index] or is_view(node.eqn):
                continue
            read = dict.fromkeys([leaf for var in self.read[node.index] for leaf in self.leaves_of(var)])
            again = sum(map(num_bytes, read))
            for var in node.eqn.outvars:
                is_less = TUNING.made_of_bytes * num_bytes(var) < again
                if var in late and var not in self.floating and is_less or len(read) > TUNING.made_of:
                    self.stored.add(var)
                self.leaves[var] = tuple(read)

    def leaves_of(self, var: Var) -> tuple[Var, ...]:
        """The stored values that a kernel reads for a value."""
        return (var,) if var in self.stored else self.leaves.get(var, ())

    def join(self) -> None:
        """Join operations that are fused into one kernel."""
        for node in self.ops:
            for var in self.read[node.index] if self.fused[node.index] else ():
                maker = self.made_by.get(var)
                if maker is None or not self.is_one_kernel(maker, node):
                    continue
                if var not in self.stored or self.updates(maker, node):
                    self.parent[self.find(node.index)] = self.find(maker.index)

    def is_one_kernel(self, maker: Node, reader: Node) -> bool:
        level = self.level_of[maker.index]
        return self.fused[maker.index] and level is not None and level == self.level_of[reader.index]

    def updates(self, maker: Node, reader: Node) -> bool:
        """Whether both are elementwise work of one shape on parameters."""
        shapes = {var.aval.shape for node in (maker, reader) for var in node.eqn.outvars}
        return len(shapes) == 1 and not any(self.on_samples(node) or not is_pointwise(node) for node in (maker, reader))

    def on_samples(self, node: Node) -> bool:
        """Whether an operation works on samples, or it is not known which do."""
        values = [a for a in (*node.eqn.invars, *node.eqn.outvars) if not isinstance(a, Literal)]
        return not self.knows_samples or any([var in self.batch.of for var in values])

    def find(self, index: int) -> int:
        """The representative of the kernel that an operation is in (union-find)."""
        while self.parent.setdefault(index, index) != index:
            self.parent[index] = self.parent[self.parent[index]]
            index = self.parent[index]
        return index

    def is_made_by(self, kernel: int, var: Var) -> bool:
        """Whether a fused kernel makes a value, and goes on with it."""
        maker = self.made_by.get(var)
        return maker is not None and self.fused[maker.index] and self.find(maker.index) == kernel

    def is_read_turned(self, node: Node, atom: Atom) -> bool:
        """Whether a kernel reads an array in another order of dims than it is stored in.

        Elementwise work writes its result in its reader's layout, and compilers let a product compute the transposed matrix
        from swapped operands; other kernels do not, and the layout of inputs is given.
        """
        if not self.fused[node.index] or atom not in self.turned:
            return False
        maker = self.made_by.get(self.origin(atom))
        return maker is None or not (self.fused[maker.index] or maker.name == "dot_general")

    def all_traffic(self) -> dict[int, Traffic]:
        paid: set[tuple[int, Var]] = set()
        launched: set[int] = set()
        # A kernel that stores nothing is not run: its readers recompute its results.
        leaving = {self.find(node.index) for node in self.ops if any(var in self.stored for var in node.eqn.outvars)}
        found: dict[int, Traffic] = {}
        same: dict[Traffic, Traffic] = {}
        for node in self.ops:
            eqn = node.eqn
            num_operands, on_samples = len(eqn.invars), self.on_samples(node)
            counts, touched = [0.0] * (num_operands + len(eqn.outvars)), list(range(num_operands + len(eqn.outvars)))
            is_free = is_view(eqn) or (self.fused[node.index] and self.level_of[node.index] is None)
            kernel = self.find(node.index) if self.fused[node.index] else node.index
            is_free = is_free or (self.fused[node.index] and kernel not in leaving)
            for k, atom in enumerate(() if is_free else eqn.invars):
                if isinstance(atom, Literal):
                    continue
                leaves = [leaf for leaf in self.leaves_of(self.origin(atom)) if (kernel, leaf) not in paid]
                leaves = [leaf for leaf in leaves if on_samples or not self.is_made_by(kernel, leaf)]
                paid.update((kernel, leaf) for leaf in leaves)
                if leaves:
                    counts[k] = sum(map(num_bytes, leaves)) / max(1, num_bytes(atom))
            for k, var in enumerate(eqn.outvars):
                counts[num_operands + k] = float(var in self.stored)
            _touch(eqn, counts, touched)
            launches = 0.0
            if any(counts) and kernel not in launched:
                launched.add(kernel)
                launches = 1.0
            turned = tuple(k for k, atom in enumerate(eqn.invars) if counts[k] and self.is_read_turned(node, atom))
            traffic = Traffic(tuple(counts), tuple(touched), launches, on_samples, turned)
            found[node.index] = same.setdefault(traffic, traffic)
        return found


def _turns(eqn: JaxprEqn) -> bool:
    """Whether a transpose changes the order of dims, those of length one aside."""
    if eqn.primitive.name != "transpose":
        return False
    long = [d for d in eqn.params["permutation"] if eqn.invars[0].aval.shape[d] > 1]
    return long != sorted(long)


def _is_larger(eqn: JaxprEqn) -> bool:
    """Whether an operation's result is larger than its operands, such as a broadcast bias."""
    most = max((num_elements_of(v) for v in eqn.invars), default=1)
    return any(num_elements_of(v) > most for v in eqn.outvars[:1])  # a callback has no result


def _touch(eqn: JaxprEqn, counts: list[float], touched: list[int]) -> None:
    """Adjust the traffic of operations that touch only a part of an operand, and of sorts."""
    name, result = eqn.primitive.name, len(eqn.invars)
    if name in _PICKING:
        touched[0] = result
    elif name in _WRITING:
        updates = 2 if name.startswith("scatter") else 1
        counts[0], touched[0] = counts[0] and 1.0, updates
        touched[result] = updates
    elif name in _SORTING:
        counts[:] = [count * SORT_PASSES for count in counts]
