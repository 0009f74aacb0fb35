"""Batches by number: ahead of time, from loaders that know where they are, whole or not."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from autopar.errors import AutoparError, BatchError
from autopar.fit.batches import Batches, EndOfBatches
from autopar.fit.positions import _decoded, _encoded
from autopar.fit.remainder import check_remainder, weight_of, whole
from tests.fit.drawn import all_of

# Loaders that know where they are.


class Stateful:
    """As torchdata's: the loader has the position, and an iterator begins there."""

    def __init__(self, count=10):
        self.count, self.place, self.drawn = count, 0, []

    def state_dict(self):
        return {"place": self.place, "random": np.arange(3, dtype=np.uint8), 7: (1, b"x", [None, 2.5, "y", True])}

    def load_state_dict(self, state):
        assert state["random"].dtype == np.uint8 and state[7] == (1, b"x", [None, 2.5, "y", True])
        self.place = state["place"]

    def __iter__(self):
        while self.place < self.count:
            self.place += 1
            self.drawn.append(self.place - 1)
            yield self.place - 1
        self.place = 0


class GrainLike:
    """As grain's: the iterator has it."""

    def __init__(self, count=10):
        self.count, self.drawn = count, []

    def __iter__(self):
        return GrainIterator(self)


class GrainIterator:
    def __init__(self, loader):
        self.loader, self.place = loader, 0

    def get_state(self):
        return str(self.place).encode()

    def set_state(self, state):
        self.place = int(state)

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == self.loader.count:
            raise StopIteration
        self.loader.drawn.append(self.place)
        self.place += 1
        return self.place - 1


@pytest.mark.parametrize(
    "make", [Stateful, GrainLike, lambda: iter(GrainLike())], ids=["loader", "iterator of", "iterator"]
)
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_loader_goes_where_it_was(make, ahead):
    """In another process: nothing is drawn twice; and back, in the same one. What was drawn ahead does not count."""
    source = make()
    batches = Batches(source, every=2)
    for number in range(4):
        assert batches.at(number) == number
        batches.fetch_ahead(range(number + 1, number + 1 + ahead), lambda batch: batch)
    position = json.loads(json.dumps(batches.position(4)))

    other = make()
    resumed = Batches(other, every=2)
    resumed.go_to(4, position)
    assert all_of(resumed, 4) == list(range(4, 10))
    assert getattr(other, "drawn", None) in (None, list(range(4, 10))), "nothing before"

    batches.go_to(4, position)
    assert all_of(batches, 4) == list(range(4, 10))
    assert batches.position(10) is None, "an end is no place to go on from: the loader would begin again"


def test_without_a_position_batches_are_drawn_and_dropped():
    source = Stateful()
    batches = Batches(source)
    batches.go_to(4, None)
    assert all_of(batches, 4) == list(range(4, 10)) and source.drawn == list(range(10))


def test_a_position_that_cannot_be_written():
    source = Stateful()
    source.state_dict = lambda: {"generator": object()}
    batches = Batches(source)
    with pytest.warns(UserWarning, match="Stateful cannot be saved .it holds object"):
        assert batches.at(0) == 0 and batches.position(1) is None


def test_positions_are_written_as_they_are():
    state = {"a": [1, (2.5, None)], 3: {"b": b"\x00\xff"}, "c": np.float32([[1, 2]]), "~": "bytes"}
    found = _decoded(json.loads(json.dumps(_encoded(state))))
    np.testing.assert_array_equal(found.pop("c"), state.pop("c"))
    assert found == state and type(found["a"][1]) is tuple


def test_a_dataset_of_tensorflow_skips(monkeypatch):
    class Dataset:
        def __init__(self, first=0):
            self.first = first

        def skip(self, count):
            return Dataset(count)

        def __iter__(self):
            return iter([Tensor(k) for k in range(self.first, 5)])

    class Tensor(SimpleNamespace):
        def __init__(self, value):
            super().__init__(numpy=lambda: np.int32(value))

    Dataset.__module__ = Tensor.__module__ = "tensorflow.python"
    found = all_of(Batches(Dataset()), 3)
    assert found == [3, 4] and all(isinstance(batch, np.int32) for batch in found)


# Ahead of time.


def test_nothing_is_drawn_beyond_the_last_step():
    source = iter(range(10))
    batches = Batches(source, stop=4)
    for number in range(4):
        assert batches.at(number) == number
        batches.fetch_ahead(range(number + 1, number + 3), lambda batch: batch)
    with pytest.raises(EndOfBatches):
        batches.at(4)
    assert next(source) == 4


def test_what_is_placed_ahead_is_given_out_once():
    placed = []
    batches = Batches([0, 1, 2])
    batches.fetch_ahead(range(5), lambda batch: placed.append(batch) or -batch)
    assert all_of(batches) == [0, -1, -2] and placed == [0, 1, 2]
    batches.go_to(1)
    assert batches.at(1) == 1, "another machine may want it elsewhere"


# Partial batches.


def data(rows, *, mask=True, first=0):
    found = {"x": np.arange(first, first + 2 * rows, dtype=np.float32).reshape(rows, 2), "scale": np.float32(2)}
    return found | ({"mask": np.ones(rows, bool)} if mask else {})


SIZES = (4, 4, 3, 4, 1)
SOURCES = {
    "list": lambda batches: batches,
    "iterator": iter,
    "again": lambda batches: dict(enumerate(batches)).values(),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_partial_batches_are_dropped(kind):
    """Those in the middle, too; the others keep their numbers in a run that goes on."""
    whole_ones = all_of(Batches(SOURCES[kind]([data(n) for n in SIZES]), remainder="drop"))
    assert [len(batch["x"]) for batch in whole_ones] == [4, 4, 4]
    resumed = all_of(Batches(SOURCES[kind]([data(n) for n in SIZES]), remainder="drop"), 2)
    assert [len(batch["x"]) for batch in resumed] == [4]


def test_of_a_function_a_partial_batch_is_the_last():
    """It counts its batches itself."""
    source = lambda start: iter([data(n) for n in SIZES][start:])  # noqa: E731
    assert len(all_of(Batches(source, remainder="drop"))) == 2
    resumed = Batches(source, remainder="drop")
    resumed.go_to(2, None, rows=4)
    assert all_of(resumed, 2) == []


@pytest.mark.parametrize("kind", SOURCES)
def test_partial_batches_are_padded(kind):
    found = all_of(Batches(SOURCES[kind]([data(n) for n in SIZES]), remainder="pad"))
    assert [len(batch["x"]) for batch in found] == [4] * 5
    assert found[2]["mask"].tolist() == [True, True, True, False] and found[2]["mask"].dtype == bool
    np.testing.assert_array_equal(found[2]["x"], [[0, 1], [2, 3], [4, 5], [4, 5]])
    assert found[4]["scale"] == 2 and [weight_of(batch) for batch in found] == list(SIZES)


def test_batches_that_cannot_be_padded():
    batches = Batches([data(4, mask=False), data(3, mask=False)], remainder="pad")
    batches.at(0)
    with pytest.raises(BatchError, match="(?s)without a mask.*step 1.*'x'.*whole ones have 4 rows.*\"mask\"") as caught:
        batches.at(1)
    assert caught.value.size == 3


def test_partial_batches_are_refused_or_kept():
    partial = [data(4), data(3)]
    assert [len(batch["x"]) for batch in all_of(Batches(partial))] == [4, 3]
    for remainder, batches in (("error", partial), ("pad", [data(4), data(5)]), ("drop", [data(4), data(5)])):
        with pytest.raises(BatchError, match='another number of rows(?s:.*)remainder="drop"'):
            all_of(Batches(batches, remainder=remainder))
    with pytest.raises(AutoparError, match="autopar knows 'keep', 'drop', 'pad', 'error'"):
        check_remainder("cut")


def test_batches_without_rows():
    """Leaves that share no leading dim, or have none, have no partial batches."""
    for batch in ({"a": np.zeros((2, 3)), "b": np.zeros(5)}, 3.0, {}):
        assert whole(batch, None, "error", 0) is batch


def test_torch_is_not_imported():
    assert "torch" not in sys.modules
