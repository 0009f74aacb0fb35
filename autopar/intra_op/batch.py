"""Propagates the batch: finds the dims of values, and the factors of equations, that run over samples.

In:     a flat program and the dims of its inputs that are the batch.
Out:    `BatchDims`: for each value its batch dims, for each equation its batch factors.
Method: forward propagation by the sharding rules: a factor is a batch factor if it leads a batch dim of an operand; every
        result dim that it leads is then a batch dim. Loops are iterated to a fixed point. Samples that are joined, cut or
        picked along their dim are still samples, though the equation that does so cannot be split there.
        What has no batch dims may be made for samples: readers align it with them, or it is drawn at random, or counted,
        with as many rows (a GAN's second batch). Its dims are lent, backwards from readers and forwards from what is drawn.

The split solver (`ir/split/`) answers another question: it proves that a program can be run in exact shards, each value
split along one dim, and refuses programs that cannot. Here every program has an answer, also one without exact
microbatches (statistics over the batch, pairs of samples along two dims): this is what hand-made plans mean by the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.dataflow import inputs_of, variables
from autopar.ir.dims import Dims
from autopar.ir.region import is_region, region_of
from autopar.ir.rules import ShardingRule
from autopar.ir.rules.rule import Term


@dataclass(eq=False, slots=True)
class BatchDims:
    """Attributes:
    of: Value -> its batch dims: those that run over samples; absent: none.
    pure: Value -> its dims that run over samples and nothing else, or over samples at each point in time: if such a dim is
        split in two, both do.
    readers: Values without batch dims that equations with batch factors read: parameters and values computed from them.
    lent: Value without batch dims -> its dims that are made for samples: of random bits, of a mask.
    drawn: Dims, each with a size that makes it a batch dim in a value that is made of nothing (counters of random bits).
    times: Lengths of time in inputs whose samples lie behind it.
    factors: Equation -> its batch factors; a cache (`factors_of`).
    parameters: `readers` and all values without batch dims that they depend on; a cache (`hand_plans.py`).
    """

    of: dict[Var, Dims] = field(default_factory=dict)
    pure: dict[Var, Dims] = field(default_factory=dict)
    readers: dict[Var, None] = field(default_factory=dict)
    lent: dict[Var, Dims] = field(default_factory=dict)
    drawn: frozenset[tuple[int, int]] = frozenset()
    times: frozenset[int] = frozenset()
    factors: dict[JaxprEqn, tuple[str, ...]] = field(default_factory=dict)
    parameters: dict[Var, None] | None = None

    def dims(self, atom: object) -> Dims:
        """Batch dims of a value; none for a literal or None."""
        return self.of.get(atom, frozenset()) if isinstance(atom, Var) else frozenset()

    def dims_or_lent(self, var: Var) -> Dims:
        """Batch dims of a value, or those that are lent: what another program needs to know of it."""
        return self.of.get(var) or self.lent.get(var, frozenset())

    def add(self, var: Var, dims: Dims) -> bool:
        """Record further batch dims of a value; returns whether any is new."""
        known = self.of.get(var, frozenset())
        if dims <= known:
            return False
        self.of[var] = known | dims
        return True

    def lent_factors(self, eqn: JaxprEqn, rule: ShardingRule) -> tuple[str, ...]:
        """Factors of an equation without batch factors that lead lent dims of its operands and results."""
        atoms, found = (*eqn.outvars, *eqn.invars), dict[str, None]()
        if not any([atom in self.lent for atom in atoms if isinstance(atom, Var)]):
            return ()
        for atom, term in zip(atoms, (*rule.results, *rule.operands), strict=True):
            lent = () if isinstance(atom, Literal) else sorted(self.lent.get(atom, ()))
            found.update(dict.fromkeys(term[d][0] for d in lent if term[d]))
        return tuple(found)

    def lend(self, atom: object, dims: Iterable[int]) -> None:
        """Record dims of a value without batch dims that its reader aligns with batch dims."""
        if isinstance(atom, Var) and not self.dims(atom):
            self.lent[atom] = self.lent.get(atom, frozenset()) | frozenset(dims)


def batch_factors(eqn: JaxprEqn, rule: ShardingRule, batch: BatchDims) -> tuple[str, ...]:
    """Factors of an equation that run over samples."""
    if not any([atom in batch.of or atom in batch.pure for atom in eqn.invars if isinstance(atom, Var)]):
        return ()
    found: dict[str, None] = {}
    for atom, term in zip(eqn.invars, rule.operands, strict=True):
        for d in sorted(batch.dims(atom)):
            if term[d]:
                found[term[d][0]] = None
    return tuple(dict.fromkeys((*found, *_pure_factors(eqn, rule, batch))))


def factors_of(eqn: JaxprEqn, rule: ShardingRule, batch: BatchDims) -> tuple[str, ...]:
    """`batch_factors`, cached; for programs whose propagation has ended."""
    found = batch.factors.get(eqn)
    if found is None:
        found = batch.factors[eqn] = batch_factors(eqn, rule, batch)
    return found


def _pure_factors(eqn: JaxprEqn, rule: ShardingRule, batch: BatchDims) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for atom, term in zip(eqn.invars, rule.operands, strict=True):
        for d in () if isinstance(atom, Literal) else sorted(batch.pure.get(atom, ())):
            found.update(dict.fromkeys(term[d]))
    return tuple(found)


def _is_behind_time(dim: Sequence[str], factors: Collection[str], rule: ShardingRule, batch: BatchDims) -> bool:
    """Whether a dim runs over the samples of each point in time: `[time, batch]` as rows."""
    return len(dim) > 1 and dim[1] in factors and dim[0] not in factors and rule.sizes[dim[0]] in batch.times


def _moved_dims(operand: Term, result: Term, factors: Collection[str]) -> list[int]:
    """The dim along which an equation joins, cuts or picks what an operand has there, if it keeps all others; else [].

    `factors`: those along which it may do so.
    """
    if len(operand) != len(result):
        return []
    changed = [d for d, (was, now) in enumerate(zip(operand, result, strict=True)) if was != now]
    return changed if len(changed) == 1 and factors and set(operand[changed[0]]) <= set(factors) else []


def follow_batch(jaxpr: Jaxpr, rule_of: Mapping[JaxprEqn, ShardingRule], inputs: Mapping[int, Dims]) -> BatchDims:
    """Propagate the batch from the inputs.

    `rule_of`: rule of each plain equation. `inputs`: position of an input -> its batch dims.
    """
    behind = ((jaxpr.invars[k].aval.shape, d) for k, dims in inputs.items() for d in dims if d and d - 1 not in dims)
    batch = BatchDims(times=frozenset(shape[d - 1] for shape, d in behind))
    for position, dims in inputs.items():
        batch.add(jaxpr.invars[position], dims)
        batch.pure[jaxpr.invars[position]] = dims
    _follow(jaxpr, rule_of, batch)
    drawn = frozenset(_sizes_of_samples(jaxpr, inputs))
    if any(pair in drawn for eqn in rule_of if not eqn.invars for v in eqn.outvars for pair in enumerate(v.aval.shape)):
        made = BatchDims(drawn=drawn, times=batch.times)
        _follow(jaxpr, rule_of, made)
        for var, dims in made.of.items():
            batch.lend(var, dims)
    _lend(jaxpr, rule_of, batch)
    return batch


def _sizes_of_samples(jaxpr: Jaxpr, inputs: Mapping[int, Dims]) -> Iterator[tuple[int, int]]:
    """The batch dims of the inputs, with their sizes; of a stack also those of one entry, and of all entries together."""
    for position, dims in inputs.items():
        shape = jaxpr.invars[position].aval.shape
        for d in dims:
            yield d, shape[d]
            if d:
                yield from ((d - 1, shape[d]), (d - 1, shape[d - 1] * shape[d]))


def _lend(jaxpr: Jaxpr, rule_of: Mapping[JaxprEqn, ShardingRule], batch: BatchDims) -> None:
    """Propagate batch factors backwards, to values made for samples; loops are passed through once."""
    for eqn in reversed(jaxpr.eqns):
        if is_region(eqn):
            _lend_region(eqn, rule_of, batch)
            continue
        rule = rule_of[eqn]
        factors = factors_of(eqn, rule, batch) or batch.lent_factors(eqn, rule)
        for atom, term in zip(eqn.invars, rule.operands, strict=True) if factors else ():
            batch.lend(atom, (d for d, dim in enumerate(term) if dim and dim[0] in factors))
            for var, result in zip(eqn.outvars, rule.results, strict=True) if rule.whole else ():
                of_samples = batch.dims(var) | batch.lent.get(var, frozenset())
                batch.lend(atom, (d for d in _moved_dims(term, result, rule.whole) if d in of_samples))


def _lend_region(eqn: JaxprEqn, rule_of: Mapping[JaxprEqn, ShardingRule], batch: BatchDims) -> None:
    region = region_of(eqn)
    for b in region.bindings:
        lent = batch.lent.get(b.result, frozenset()) if b.result is not None else frozenset()
        for atom in b.values or ([b.operand] if b.role == "through" else []):
            batch.lend(atom, {d - b.lead for d in lent if d >= b.lead})
    for body in region.bodies:
        _lend(body, rule_of, batch)
    for b in region.bindings:
        for var in b.variables:
            lent = batch.lent.get(var, frozenset())
            batch.lend(b.operand, {d + b.lead for d in lent})


def _follow(jaxpr: Jaxpr, rule_of: Mapping[JaxprEqn, ShardingRule], batch: BatchDims) -> None:
    for eqn in jaxpr.eqns:
        if is_region(eqn):
            _follow_region(eqn, rule_of, batch)
            continue
        rule = rule_of[eqn]
        factors = batch_factors(eqn, rule, batch)
        if batch.drawn and not eqn.invars:
            for var in eqn.outvars:
                batch.add(var, frozenset(d for d, n in enumerate(var.aval.shape) if (d, n) in batch.drawn))
        if not factors:
            continue
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and not batch.dims(atom):
                batch.readers[atom] = None
        pure, moving = _pure_factors(eqn, rule, batch), (*rule.whole, *rule.one_hot)
        for var, term in zip(eqn.outvars, rule.results, strict=True):
            batch.add(var, frozenset([d for d, dim in enumerate(term) if dim and dim[0] in factors]))
            own = {d for d, dim in enumerate(term) if dim and all([f in pure for f in dim])} if pure else set()
            behind = [d for d, dim in enumerate(term) if batch.times and _is_behind_time(dim, factors, rule, batch)]
            batch.add(var, frozenset(behind))
            own.update(behind)
            for atom, operand in zip(eqn.invars, rule.operands, strict=True) if moving else ():
                moved = batch.dims(atom) & frozenset(_moved_dims(operand, term, moving))
                batch.add(var, moved)
                own.update(moved & batch.pure.get(atom, frozenset()) if isinstance(atom, Var) else ())
            if own:
                batch.pure[var] = frozenset(own)


def _follow_region(eqn: JaxprEqn, rule_of: Mapping[JaxprEqn, ShardingRule], batch: BatchDims) -> None:
    """Propagate through the bodies, to a fixed point: carries have the batch dims of any trip."""
    region = region_of(eqn)
    for b in region.bindings:
        dims = frozenset(d - b.lead for d in batch.dims(b.operand) if d >= b.lead)
        for var in b.variables:
            batch.add(var, dims)
    for b in region.of_role("const", "xs"):
        if isinstance(b.operand, Var) and b.operand in batch.pure:
            pure = frozenset(d - b.lead for d in batch.pure[b.operand] if d >= b.lead)
            batch.pure.update(dict.fromkeys(b.variables, pure))
    changed = True
    while changed:
        for body in region.bodies:
            _follow(body, rule_of, batch)
        changed = False
        for b in region.carries:
            for var in b.variables:
                changed |= batch.add(var, batch.dims(b.value))
    for b in region.bindings:
        if b.result is not None:
            inside = batch.dims(b.operand).union(*map(batch.dims, (*b.variables, *b.values)))
            batch.add(b.result, frozenset(d + b.lead for d in inside))


def between_samples(jaxpr: Jaxpr, batch: BatchDims) -> set[Var]:
    """Values without batch dims that depend on samples and that other samples depend on: statistics over the batch.

    Their collectives cannot wait to be fused with others, while those of parameters (which depend on no samples) and of
    gradients (on which none depend) can. Loops are treated coarsely: all results depend on all operands.
    """
    after: set[Var] = set()
    before: set[Var] = set()
    _mark_after(jaxpr, batch, after)
    _mark_before(jaxpr, batch, before)
    return {var for var in after & before if not batch.dims(var)}


def _mark_after(jaxpr: Jaxpr, batch: BatchDims, after: set[Var]) -> None:
    for eqn in jaxpr.eqns:
        marked = [a for a in inputs_of(eqn) if a in after or batch.dims(a)]
        if not marked:
            continue
        after.update(eqn.outvars)
        if is_region(eqn):
            region = region_of(eqn)
            anyway = region.kind == "while"
            for b in region.bindings:
                after.update(var for var in b.variables if anyway or any(b.operand is a for a in marked))
            for body in region.bodies:
                _mark_after(body, batch, after)


def _mark_before(jaxpr: Jaxpr, batch: BatchDims, before: set[Var]) -> None:
    for eqn in reversed(jaxpr.eqns):
        marked = {var: var in before or bool(batch.dims(var)) for var in eqn.outvars}
        if not any(marked.values()):
            continue
        before.update(inputs_of(eqn))
        if is_region(eqn):
            region = region_of(eqn)
            for b in region.bindings:
                before.update(variables(b.values) if marked.get(b.result, b.role == "test") else ())
            for body in region.bodies:
                _mark_before(body, batch, before)
