"""Small collectives of one kind are sent as one where none waits for another; results and order stay."""

import jax
import numpy as np
import pytest

from autopar._jax import new_var, shaped
from autopar.cost.steps import AllGather, AllReduce, ReduceScatter, Slice
from autopar.intra_op.fuse import BUCKET_BYTES, SMALL_BYTES, fuse_collectives, sent_together, small_bytes
from autopar.intra_op.sharded import Body, Fused, Move
from autopar.mesh import Link, LogicalMesh, Sharding

MESH = LogicalMesh((2, 2))
SUM, WHOLE = Sharding(((),), ("x",)), Sharding(((),))
SPLIT = Sharding((("x",),))


def reduced(size=8, **how):
    return Move(new_var(shaped(jax.ShapeDtypeStruct((size,), np.float32))), SUM, WHOLE, AllReduce(("x",)), **how)


def gathered(size=8):
    return Move(new_var(shaped(jax.ShapeDtypeStruct((size,), np.float32))), SPLIT, WHOLE, AllGather(("x",), 0))


def fused(*moves):
    inputs = tuple((m.var, m.source) for m in moves)
    return fuse_collectives(Body(inputs, moves, tuple((m.var, m.target) for m in moves)), MESH).instructions


def test_of_one_kind_together():
    moves = [reduced(8), gathered(8), reduced(16), gathered(4)]
    sent = fused(*moves)
    assert sorted(len(i.moves) for i in sent) == [2, 2]
    assert [i.moves for i in sent] == [(moves[0], moves[2]), (moves[1], moves[3])]


def test_large_ones_alone():
    small, large = reduced(8), reduced(int(small_bytes(MESH)) // 4 + 1)
    assert fused(small, large) == (small, large)


def test_one_that_waits_is_not_sent_with_what_it_waits_for():
    first = reduced()
    second = reduced(earlier=(first.var, first.target))
    assert fused(first, second) == (first, second)


def test_as_much_as_a_bucket_holds():
    size = int(small_bytes(MESH)) // 4
    per_bucket = BUCKET_BYTES // (4 * size)
    sent = fused(*(reduced(size) for _ in range(2 * per_bucket)))
    assert [len(i.moves) for i in sent] == [per_bucket, per_bucket]


@pytest.mark.parametrize("seed", range(20))
def test_everything_is_made_before_it_is_read(seed):
    random = np.random.default_rng(seed)
    moves = []
    for _ in range(int(random.integers(4, 12))):
        other = moves[int(random.integers(len(moves)))] if moves and random.random() < 0.5 else None
        moves.append(reduced(earlier=None if other is None else (other.var, other.target)))
    sent = fused(*moves)
    assert {m for i in sent for m in (i.moves if isinstance(i, Fused) else (i,))} == set(moves)
    there = set()
    for instruction in sent:
        assert there.issuperset(set(instruction.needs).difference(instruction.reads))
        there.update(instruction.makes)
    heads = sum(m.earlier is None for m in moves)
    assert len(sent) < len(moves) or heads == 1


RING = LogicalMesh((8,), links=(Link(1e-6, 4e11),))
INNER = Sharding(((), ("x",)))


def sliced(shape, target=SPLIT):
    """A sum over devices, and the slice of it that each device keeps."""
    var, nothing = new_var(shaped(jax.ShapeDtypeStruct(shape, np.float32))), Sharding(((),) * len(shape))
    total = Move(var, Sharding(nothing.dims, ("x",)), nothing, AllReduce(("x",)))
    return total, Move(var, nothing, target, Slice(("x",), [dim != () for dim in target.dims].index(True)))


def kinds_of(gradients, results=()):
    """The kinds of the messages in which gradients and a loss are sent, the slices aside."""
    moves = [move for pair in gradients for move in pair] + [loss := reduced(1)]
    outputs = (*((own.var, own.target) for _, own in gradients), (loss.var, loss.target), *results)
    body = Body(tuple((m.var, m.source) for m in moves if isinstance(m.step, AllReduce)), tuple(moves), outputs)
    sent = fuse_collectives(body, RING).instructions
    return [(type(i.moves[0].step), len(i.moves)) for i in sent if not isinstance(i.moves[0].step, Slice)]


def test_sums_of_which_devices_keep_slices_are_scattered_if_their_message_is_large():
    """A small one is sent with the loss, in one message instead of two."""
    assert kinds_of([sliced((64,)) for _ in range(8)]) == [(AllReduce, 9)]
    large = [sliced((1 << 20,)) for _ in range(8)]
    assert sorted(kinds_of(large), key=str) == [(AllReduce, 1), (ReduceScatter, 8)]
    # What is read whole, too, is summed whole.
    assert kinds_of(large, [(total.var, total.target) for total, _ in large]) == [(AllReduce, 9)]
    # Packing sorts the elements by devices, along whichever dim they are split.
    inner = [sliced((1 << 10, 1 << 10), INNER) for _ in range(8)]
    assert sorted(kinds_of(inner), key=str) == [(AllReduce, 1), (ReduceScatter, 8)]


def test_what_counts_as_small_grows_with_latency():
    slow, quick = (LogicalMesh((4,), links=(Link(latency, 1e11),)) for latency in (2e-5, 1e-6))
    assert small_bytes(slow) > small_bytes(quick) == SMALL_BYTES
    assert sent_together(slow, 8.0).links[0].latency_seconds < slow.links[0].latency_seconds
