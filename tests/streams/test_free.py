"""Every buffer is let go of directly behind its last use on its mesh, once, and no result is."""

import numpy as np
import pytest

from autopar.streams.free import free
from autopar.streams.instructions import Free, Recv, Run, Send, Streams, reads, writes


def streams(instructions, results=()):
    return Streams(instructions, (), (), (), tuple(results), {}, {})


def test_behind_the_last_reader():
    first = Run("a", 0, 0, (0,), (1, 2)), Run("b", 0, 0, (1,), (3,)), Send((1,), 1, 0)
    second = Recv((4,), 0, 0), Run("c", 1, 0, (4,), (5,))
    found = free(streams({0: first, 1: second}, [3, None, 5])).instructions
    assert found[0] == (first[0], Free((0, 2)), *first[1:], Free((1,)))  # 2 is read by nobody, 3 is a result
    assert found[1] == (*second, Free((4,)))


def drawn(seed):
    """A stream of runs that read what is there, and which buffers are results."""
    random = np.random.default_rng(seed)
    there, stream = [0, 1], []
    for number in range(int(random.integers(3, 12))):
        read = tuple(int(b) for b in random.choice(there, size=min(2, len(there)), replace=False))
        made = tuple(range(len(there), len(there) + int(random.integers(1, 3))))
        stream.append(Run(f"p{number}", 0, 0, read, made))
        there += made
    return tuple(stream), [int(b) for b in random.choice(there, size=2, replace=False)]


@pytest.mark.parametrize("seed", range(20))
def test_once_and_not_before_it_may_go(seed):
    stream, results = drawn(seed)
    found = free(streams({0: stream}, results)).instructions[0]
    assert tuple(i for i in found if not isinstance(i, Free)) == stream
    gone = [b for i in found if isinstance(i, Free) for b in i.buffers]
    used = {b for i in stream for b in (*reads(i), *writes(i))}
    assert sorted(gone) == sorted(used.difference(results))
    for before, after in zip(found, found[1:], strict=False):
        if isinstance(after, Free):
            last = found.index(after)
            assert all(b in (*reads(before), *writes(before)) for b in after.buffers)
            assert not any(b in (*reads(i), *writes(i)) for b in after.buffers for i in found[last:])
