"""The methods of the papers, as restrictions: data parallelism with ZeRO, and Megatron-LM's tensor parallelism beside it.

In:     the decision graph of a step or of one stage, the method's settings.
Out:    `Allowed`, extended; edges that say what is meant to happen to a value along the tensor axis.
Method: choices are forbidden, or dear; which of the others is cheapest the ILP finds, so that columns and rows, heads and
        vocabulary are nowhere named. Along the tensor axis:
        a product of samples with a parameter splits the parameter, so that no weight is ever gathered;
        nothing splits samples, and an activation is gathered or exchanged only where no reader could take it in parts,
        or where there is no other way.
        What remains is to split by columns, and to add up what was split by rows: two all-reduces in the forward pass of
        a layer and two in the backward. With `sequence` no operation on samples is done by all devices of the axis alike:
        what is between two products is done in parts, for which sums are scattered, and gathered for the next product.
        Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation", 2022;
        Rajbhandari et al., "ZeRO", SC 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar._jax import Jaxpr, Literal, Var
from autopar.intra_op.batch import BatchDims, factors_of
from autopar.intra_op.graph import Graph, Node, Shardings
from autopar.intra_op.restrict import Allowed
from autopar.intra_op.strategies import IDLE
from autopar.ir.region import is_region, region_of
from autopar.ir.rules import ShardingRule
from autopar.ir.rules.terms import factors_of as factors_in
from autopar.mesh import Sharding
from autopar.tuning import TUNING

REPLICATED, PARTIAL = -1, -2
"""Beside the number of a dim: the placements of a value on one axis."""


def restrict_to_data_parallel(
    graph: Graph, allowed: Allowed, batch_inputs: Sequence[int], state_inputs: Sequence[int], zero: int
) -> None:
    """Forbid everything but data parallelism of one ZeRO stage over all axes of the mesh.

    Every operation on samples splits them and nothing else; what is made for samples, such as the random bits of a
    dropout, may be made in the same parts. Stage 0: state and update are whole on every device. 1 and 2: what is state
    but no parameter (optimizer moments) is stored split, so gradients are reduce-scattered and new parameters gathered;
    without gradient accumulation both stages are one plan. 3: parameters are stored split too.

    Args:
        graph: The decisions of the step.
        allowed: Extended.
        batch_inputs: Inputs whose leading dim is the batch.
        state_inputs: Inputs that come back as new state.
        zero: ZeRO stage, 0 to 3.
    """
    _split_samples(graph, allowed, zero)
    # An axis of one device splits nothing.
    axes = tuple(axis for axis, size in graph.mesh.axis_sizes.items() if size > 1)
    for position in batch_inputs:
        node = graph.nodes[graph.inputs[position]]
        allowed.only(
            node,
            [all(s.dims[0] == axes if k == 0 else not d for k, d in enumerate(s.dims)) for s in node.shardings],
            "batch",
        )
    parameters = _parameters(graph)
    for position in state_inputs:
        node = graph.nodes[graph.inputs[position]]
        stored_split = zero == 3 or (zero > 0 and node.var not in parameters)
        whole = [not any(s.dims) for s in node.shardings]
        most = max(s.num_shards(graph.mesh) for s in node.shardings)
        split = [s.num_shards(graph.mesh) == most for s in node.shardings]
        allowed.only(node, split if stored_split else whole, "split" if stored_split else "whole")


def _split_samples(graph: Graph, allowed: Allowed, zero: int) -> None:
    """Operations on samples split them and nothing else; at stage 0 all others split nothing but what is made for samples."""
    batch = graph.batch
    known: dict[tuple[int, tuple[str, ...]], tuple[np.ndarray, np.ndarray]] = {}

    def masks(node: Node, factors: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Which strategies split these factors and nothing else, and which of them do split one."""
        key = (id(node.strategies), factors)  # equal operations share their strategies
        if key not in known:
            split = np.array([_splits_only(s.choice, factors) for s in node.strategies])
            known[key] = split, split & [any(c in factors for c in s.choice) for s in node.strategies]
        return known[key]

    for node in graph.nodes:
        if node.kind == "op":
            factors = factors_of(node.eqn, node.rule, batch)
            if factors:
                only, some = masks(node, factors)
                # A loop of unknown length may not communicate: there samples are split only if that needs nothing.
                allowed.only(node, some if some.any() and node.communicates else only, ("batch", factors))
            elif zero == 0:
                lent = batch.lent_factors(node.eqn, node.rule)
                allowed.only(node, masks(node, lent)[0], ("whole", lent))


@dataclass(frozen=True, slots=True)
class InPlace:
    """Along "tensor" a value is sliced and added up on its way to a reader, and hardly ever gathered: see above.

    Attributes:
        scatters: Whether sums may be left in parts and gathered later (sequence parallelism).
    """

    scatters: bool

    def price(self, given: Shardings, wanted: Shardings) -> np.ndarray:
        """`[choice of the source, choice of the target]`: how many times its seconds each conversion counts."""
        sources, targets = (np.array([_state_on(s, "tensor") for s in side]) for side in (given, wanted))
        source, target = sources[:, None], targets[None, :]
        meant = (source == target) | (source == REPLICATED) | ((source == PARTIAL) & (target == REPLICATED))
        if self.scatters:
            meant |= (source == PARTIAL) | ((source >= 0) & (target == REPLICATED))
        nobody_takes_it_so = ~np.isin(sources, targets)[:, None] & (source >= 0)
        return np.where(meant | nobody_takes_it_so, 1.0, TUNING.unmeant_gather)


def _state_on(sharding: Sharding, axis: str) -> int:
    """The dim that `axis` splits, or `REPLICATED`, or `PARTIAL`."""
    if axis in sharding.partial:
        return PARTIAL
    return next((dim for dim, axes in enumerate(sharding.dims) if axis in axes), REPLICATED)


def restrict_to_axes(
    graph: Graph,
    allowed: Allowed,
    state_inputs: Sequence[int],
    zero: int = 0,
    sequence: bool = False,
) -> None:
    """Data parallelism over the axis "data" of a mesh, tensor parallelism over "tensor", as Megatron-LM has them.

    Args:
        graph: The decisions of a stage.
        allowed: Extended.
        state_inputs: Inputs that are state.
        zero: What of the state is split over the data axis, as of `restrict_to_data_parallel`.
        sequence: Whether activations are split over the tensor axis between products.
    """
    at = {axis: k for k, axis in enumerate(graph.mesh.axis_sizes)}
    multiplied: dict[Var, None] = {}
    for node in graph.nodes:
        if node.kind == "op":
            factors = factors_of(node.eqn, node.rule, graph.batch)
            mask = _axis_mask(node, graph, factors, at["data"], at["tensor"], zero, sequence)
            allowed.only(node, mask, ("axes", tuple(mask)))
            if _weight_factors(node, graph.batch):
                multiplied.update((a, None) for a in node.eqn.invars if isinstance(a, Var) and a in graph.batch.readers)
    parameters, weights = _parameters(graph), _made_of(graph, multiplied)
    for position in state_inputs:
        node = graph.nodes[graph.inputs[position]]
        split = zero == 3 or (zero > 0 and node.var not in parameters)
        _store(node, "data", split, allowed, "splits state" if split else "keeps state whole")
        if node.var in weights:
            _store(node, "tensor", True, allowed, "splits weights")
    if graph.mesh.axis_sizes["tensor"] > 1:
        sent, kept = InPlace(scatters=sequence), InPlace(scatters=False)
        for edge in graph.edges:
            edge.moves = sent if edge.is_sample else kept


def _axis_mask(
    node: Node, graph: Graph, factors: Sequence[str], data: int, tensor: int, zero: int, sequence: bool
) -> np.ndarray:
    """What an operation may choose: of each wish in turn as much as leaves a choice."""
    lent = graph.batch.lent_factors(node.eqn, node.rule)
    over_data = factors or lent
    mask = np.array(
        [
            (s.choice[data] in over_data or _is_idle(s.choice[data]) or (zero > 0 and not factors))
            and s.choice[tensor] not in (*factors, *lent)
            for s in node.strategies
        ]
    )
    if not factors or not node.communicates:  # a loop of unknown length may not communicate: nothing is asked of it
        return mask
    weights, alike = _weight_factors(node, graph.batch), _done_by_all(node.rule)
    wishes = [
        [s.choice[data] in factors for s in node.strategies],
        [s.choice[tensor] in weights for s in node.strategies],
    ]
    if sequence:
        wishes.append([s.choice[tensor] not in alike for s in node.strategies])
    for wish in map(np.array, wishes):
        mask = mask & wish if (mask & wish).any() else mask
    return mask


def _done_by_all(rule: ShardingRule) -> tuple[str, ...]:
    """What an axis may do of an operation such that all its devices do as much; sums of parts are none, products are."""
    groups = {f"+{k}": len(group) == len(rule.operands) for k, group in enumerate(rule.linear)}
    return (IDLE, *(name for name, is_sum in groups.items() if not is_sum))


def _weight_factors(node: Node, batch: BatchDims) -> tuple[str, ...]:
    """Factors of the parameter in a product with samples, which is summed over one of them; none in other operations."""
    operands = list(zip(node.eqn.invars, node.rule.operands, strict=True))
    weights = [term for atom, term in operands if not isinstance(atom, Literal) and atom in batch.readers]
    own = factors_in(*weights)
    return own if any(f in own for f in node.rule.summed) else ()


def _store(node: Node, axis: str, split: bool, allowed: Allowed, verb: str) -> None:
    """State is split over an axis, where it can be; or whole."""
    wanted = np.array([any(axis in axes for axes in s.dims) == split for s in node.shardings])
    if (wanted & allowed.masks.get(node.index, True)).any() or not split:
        allowed.only(node, wanted, ("stored", axis, split), f"the method {verb} over axis {axis!r}")


def _is_idle(what: str) -> bool:
    return what[0] in "+-"


def _splits_only(choice: Sequence[str], factors: Sequence[str]) -> bool:
    return all(c in factors or _is_idle(c) for c in choice)


def _parameters(graph: Graph) -> dict[Var, None]:
    """What samples meet, and all that it is made of without samples."""
    if graph.batch.parameters is None:
        graph.batch.parameters = _made_of(graph, graph.batch.readers)
    return graph.batch.parameters


def _made_of(graph: Graph, read: Iterable[Var]) -> dict[Var, None]:
    """Values that samples meet, and all that these are made of without samples: the parameters are among them."""
    found = dict.fromkeys(read)
    _collect(graph.jaxpr, graph.batch, found)
    return found


def _collect(jaxpr: Jaxpr, batch: BatchDims, found: dict[Var, None]) -> None:
    for eqn in reversed(jaxpr.eqns):
        pairs: list[tuple[object, Var | None]] = []
        if is_region(eqn):
            region = region_of(eqn)
            for body in region.bodies:
                _collect(body, batch, found)
            pairs = [(b.outer, var) for b in region.bindings for var in b.variables or [b.result]]
        elif not any(batch.dims(a) for a in eqn.invars):
            pairs = [(a, v) for v in eqn.outvars for a in eqn.invars]
        for atom, var in pairs:
            if var in found and isinstance(atom, Var):
                found[atom] = None
