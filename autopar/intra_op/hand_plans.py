"""Expresses the papers' methods as restrictions: data parallelism with ZeRO, and Megatron-LM's tensor parallelism.

In:     the decision graph of a step or of one stage, the method's settings.
Out:    `Allowed`, extended; edges with preferences (`Edge.moves`) along the tensor axis.
Method: choices are forbidden or made dear, and the ILP finds the cheapest of the others, so that columns, rows, heads and
        vocabulary are nowhere named. Along the tensor axis:
        - a product of samples with a parameter splits the parameter, so that no weight is gathered;
        - no operation splits samples, and an activation is gathered or exchanged only if no reader takes it split, or if
          there is no other way.
        What remains are column splits, and sums over row splits: two all-reduces in the forward pass of a layer and two in
        the backward. With `sequence`, no operation on samples is replicated over the axis: work between two products is
        split, so that sums are reduce-scattered, and gathered for the next product.
        Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation", 2022;
        Rajbhandari et al., "ZeRO", SC 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar._jax import Jaxpr, Literal, Var
from autopar.intra_op.batch import BatchDims, factors_of
from autopar.intra_op.graph import Graph, Node, Shardings
from autopar.intra_op.restrict import Allowed
from autopar.intra_op.strategies import IDLE
from autopar.ir.dims import Dims
from autopar.ir.region import is_region, region_of
from autopar.ir.rules import ShardingRule
from autopar.ir.rules.terms import factors_of as factors_in
from autopar.mesh import Sharding
from autopar.tuning import TUNING

REPLICATED, PARTIAL = -1, -2
"""The placements of a value on one axis, besides the number of the dim that it splits."""


def restrict_to_data_parallel(
    graph: Graph, allowed: Allowed, batch_inputs: Mapping[int, Dims], state_inputs: Sequence[int], zero: int
) -> None:
    """Forbid everything but data parallelism of one ZeRO stage over all axes of the mesh.

    Every operation on samples splits them and nothing else; values made for samples, such as the random bits of a dropout,
    may be split alike. Stage 0: state and update are replicated. 1 and 2: state other than parameters (optimizer moments)
    is stored split, so that gradients are reduce-scattered and new parameters gathered; without gradient accumulation both
    stages are one plan. 3: parameters are stored split, too.

    Args:
        graph: The decision graph of the step.
        allowed: Extended.
        batch_inputs: Inputs that hold samples -> their dims that run over samples; one of these is split.
        state_inputs: Inputs that are returned as new state.
        zero: ZeRO stage, 0 to 3.
    """
    _split_samples(graph, allowed, zero)
    # An axis of one device splits nothing.
    axes = tuple(axis for axis, size in graph.mesh.axis_sizes.items() if size > 1)
    for position, dims in batch_inputs.items():
        node = graph.nodes[graph.inputs[position]]
        axes_of = [{d: of for d, of in enumerate(s.dims) if of} for s in node.shardings]
        wanted = [{d: axes} if axes else {} for d in sorted(dims)]
        allowed.only(node, [of in wanted for of in axes_of], "batch")
    parameters = _parameters(graph)
    for position in state_inputs:
        node = graph.nodes[graph.inputs[position]]
        stored_split = zero == 3 or (zero > 0 and node.var not in parameters)
        whole = [not any(s.dims) for s in node.shardings]
        most = max(s.num_shards(graph.mesh) for s in node.shardings)
        split = [s.num_shards(graph.mesh) == most for s in node.shardings]
        allowed.only(node, split if stored_split else whole, "split" if stored_split else "whole")


def _split_samples(graph: Graph, allowed: Allowed, zero: int) -> None:
    """Let operations on samples split them and nothing else; at stage 0, others split only values made for samples."""
    batch = graph.batch
    known: dict[tuple[int, tuple[str, ...]], tuple[np.ndarray, np.ndarray]] = {}

    def masks(node: Node, factors: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The strategies that split no other than these factors, and, if there are any, those that split one of them."""
        key = (id(node.strategies), factors)  # equal operations share their strategies
        if key not in known:
            split = np.array([_splits_only(s.choice, factors) for s in node.strategies])
            some = split & [any(c in factors for c in s.choice) for s in node.strategies]
            known[key] = split, some if some.any() else split
        return known[key]

    for node in graph.nodes:
        if node.kind == "op":
            factors = factors_of(node.eqn, node.rule, batch)
            if factors:
                allowed.only(node, masks(node, factors)[1], ("batch", factors))
            elif zero == 0:
                lent = batch.lent_factors(node.eqn, node.rule)
                allowed.only(node, masks(node, lent)[0], ("whole", lent))


@dataclass(frozen=True, slots=True)
class InPlace:
    """Preferences along the axis "tensor": values may be sliced and reduced; gathers are dear (see the module's docstring).

    `scatters`: whether sums may be reduce-scattered and gathered later (sequence parallelism).
    """

    scatters: bool

    def price(self, given: Shardings, wanted: Shardings) -> np.ndarray:
        """`[source's choice, target's choice]`: factor on the seconds of each conversion."""
        sources, targets = (np.array([_state_on(s, "tensor") for s in side]) for side in (given, wanted))
        source, target = sources[:, None], targets[None, :]
        meant = (source == target) | (source == REPLICATED) | ((source == PARTIAL) & (target == REPLICATED))
        if self.scatters:
            meant |= (source == PARTIAL) | ((source >= 0) & (target == REPLICATED))
        no_reader_takes_it = ~np.isin(sources, targets)[:, None] & (source >= 0)
        return np.where(meant | no_reader_takes_it, 1.0, TUNING.unmeant_gather)


def _state_on(sharding: Sharding, axis: str) -> int:
    """The dim that `axis` splits, or `REPLICATED`, or `PARTIAL`."""
    if axis in sharding.partial:
        return PARTIAL
    return next((dim for dim, axes in enumerate(sharding.dims) if axis in axes), REPLICATED)


def restrict_to_axes(
    graph: Graph, allowed: Allowed, state_inputs: Sequence[int], zero: int = 0, sequence: bool = False
) -> None:
    """Restrict to Megatron-LM's data parallelism over the axis "data" and tensor parallelism over "tensor".

    Args:
        graph: The decision graph of a stage.
        allowed: Extended.
        state_inputs: Inputs that are state.
        zero: ZeRO stage over the data axis, as in `restrict_to_data_parallel`.
        sequence: Whether activations between products are split over the tensor axis.
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
    weights |= dict.fromkeys(_updated_with(graph, weights))
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
    """The choices of an operation: each wish in turn is applied unless it would leave none."""
    lent = graph.batch.lent_factors(node.eqn, node.rule)
    over_data = factors or lent
    mask = np.array(
        [
            (s.choice[data] in over_data or is_idle(s.choice[data]) or (zero > 0 and not factors))
            and s.choice[tensor] not in (*factors, *lent)
            for s in node.strategies
        ]
    )
    if not factors:
        return mask
    weights, replicated = _weight_factors(node, graph.batch), _replicated_work(node.rule)
    wishes = [
        [s.choice[data] in factors for s in node.strategies],
        [s.choice[tensor] in weights for s in node.strategies],
    ]
    if sequence:
        wishes.append([s.choice[tensor] not in replicated for s in node.strategies])
    for wish in map(np.array, wishes):
        mask = mask & wish if (mask & wish).any() else mask
    return mask


def _replicated_work(rule: ShardingRule) -> tuple[str, ...]:
    """Choices on an axis under which each device does the whole work: idle, or partial operands unless all are partial."""
    groups = {f"+{k}": len(group) == len(rule.operands) for k, group in enumerate(rule.linear)}
    return (IDLE, *(name for name, is_sum in groups.items() if not is_sum))


def _weight_factors(node: Node, batch: BatchDims) -> tuple[str, ...]:
    """Factors of the parameters in a product with samples that sums over one of them; () for other operations."""
    operands = list(zip(node.eqn.invars, node.rule.operands, strict=True))
    weights = [term for atom, term in operands if not isinstance(atom, Literal) and atom in batch.readers]
    own = factors_in(*weights)
    return own if any(f in own for f in node.rule.summed) else ()


def _store(node: Node, axis: str, split: bool, allowed: Allowed, verb: str) -> None:
    """Store state split over an axis, if possible; or not split."""
    wanted = np.array([any(axis in axes for axes in s.dims) == split for s in node.shardings])
    if (wanted & allowed.masks.get(node.index, True)).any() or not split:
        allowed.only(node, wanted, ("stored", axis, split), f"the method {verb} over axis {axis!r}")


def is_idle(what: str) -> bool:
    """Whether a choice on an axis splits no factor."""
    return what[0] in "+-"


def _splits_only(choice: Sequence[str], factors: Sequence[str]) -> bool:
    return all(c in factors or is_idle(c) for c in choice)


def _parameters(graph: Graph) -> dict[Var, None]:
    """The parameters, and values computed from them alone; cached."""
    if graph.batch.parameters is None:
        graph.batch.parameters = _made_of(graph, graph.batch.readers)
    return graph.batch.parameters


def _made_of(graph: Graph, read: Iterable[Var]) -> dict[Var, None]:
    """The values in `read`, and all values without batch dims that they depend on."""
    found = dict.fromkeys(read)
    _collect(graph.jaxpr, graph.batch, found)
    return found


def _updated_with(graph: Graph, weights: Iterable[Var]) -> list[Var]:
    """Inputs, such as moments, that work without batch dims combines element by element with one that is among `weights`."""
    leader: dict[Var, Var] = {}

    def led(var: Var) -> Var:
        while var in leader:
            var = leader[var]
        return var

    for eqn in graph.jaxpr.eqns:
        if not is_region(eqn) and not any(graph.batch.dims(a) for a in eqn.invars):
            made = eqn.outvars[0]
            for atom in eqn.invars:
                if isinstance(atom, Var) and atom.aval.shape == made.aval.shape and led(atom) is not led(made):
                    leader[led(atom)] = led(made)
    inputs, known = graph.jaxpr.invars, set(weights)
    leaders = {led(var) for var in inputs if var in known}
    return [var for var in inputs if led(var) in leaders]


def _collect(jaxpr: Jaxpr, batch: BatchDims, found: dict[Var, None]) -> None:
    for eqn in reversed(jaxpr.eqns):
        pairs: list[tuple[object, Var | None]] = []
        if is_region(eqn):
            region = region_of(eqn)
            for body in region.bodies:
                _collect(body, batch, found)
            pairs = [(b.operand, var) for b in region.bindings for var in b.variables or [b.result]]
        elif not any(batch.dims(a) for a in eqn.invars):
            pairs = [(a, v) for v in eqn.outvars for a in eqn.invars]
        for atom, var in pairs:
            if var in found and isinstance(atom, Var):
                found[atom] = None
