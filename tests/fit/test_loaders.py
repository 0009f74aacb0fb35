"""Real loaders of grain, torch and TensorFlow: their batches as arrays, and a run that goes on where it was."""

from __future__ import annotations

import json
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.fit.batches import Batches
from autopar.fit.portions import PortionReader
from tests.fit.drawn import all_of

ROWS = 24
DATA = np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2)


def check_goes_on(make, drawn=None):
    """Batches of a run in two parts, two processes, equal those of one; what was drawn, is not drawn again."""
    whole = all_of(Batches(make()))
    assert len(whole) == 6 and all(isinstance(leaf, np.ndarray) for batch in whole for leaf in batch.values())
    batches = Batches(make(), every=2)
    for number in range(4):
        np.testing.assert_array_equal(batches.at(number)["x"], whole[number]["x"])
        batches.fetch_ahead([number + 1], lambda batch: batch)
    position = json.loads(json.dumps(batches.position(4)))
    if drawn is not None:
        assert position is not None
        drawn.clear()
    resumed = Batches(make(), every=2)
    resumed.go_to(4, position)
    for got, want in zip(all_of(resumed, 4), whole[4:], strict=True):
        np.testing.assert_array_equal(got["x"], want["x"])
    if drawn is not None:
        assert set(drawn) == {float(x) for batch in whole[4:] for x in batch["x"][:, 0]}, "nothing before"


@pytest.fixture
def grain():
    pytest.importorskip("grain", reason="grain is not installed: pip install grain")
    return pytest.importorskip("grain.python")


def grain_loader(grain, source, shard=(0, 1)):
    options = grain.ShardOptions(*shard, drop_remainder=True)
    return grain.DataLoader(
        data_source=source,
        sampler=grain.IndexSampler(ROWS, options, shuffle=True, num_epochs=1, seed=0),
        operations=[grain.Batch(4 // shard[1], drop_remainder=True)],
    )


class Source:
    """Rows by index; says which were drawn."""

    def __init__(self, drawn):
        self.drawn = drawn

    def __repr__(self):
        return "Source"  # grain goes back only where this is the same

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.drawn.append(float(DATA[index, 0]))
        return {"x": DATA[index]}


def test_grain_loader(grain):
    drawn = []
    check_goes_on(lambda: grain_loader(grain, Source(drawn)), drawn)


def test_grain_refuses_other_data(grain):
    """By its source's `repr`, which is an address where a class has none: batches are drawn and dropped, with a warning."""

    class Unnamed(Source):
        __repr__ = object.__repr__

    with pytest.warns(UserWarning, match="set_state refuses where the run was .DataSource in checkpoint"):
        check_goes_on(lambda: grain_loader(grain, Unnamed([])))


@pytest.mark.parametrize("kind", ["map", "iter"])
def test_grain_datasets(grain, kind):
    """A `MapDataset` is a sequence, of which batch n is taken; an `IterDataset` has iterators with a position."""
    made = grain.MapDataset.source(Source([])).seed(0).shuffle().batch(4)
    check_goes_on(lambda: made if kind == "map" else made.to_iter_dataset())


def test_grain_in_parts(grain):
    """Sent to a worker as it is; each part goes back to its own place."""
    reader = pickle.loads(pickle.dumps(PortionReader(grain_parts, every=2)))
    parts = [reader.open(host, 2, 0) for host in range(2)]
    whole = [[part.at(number)["x"] for part in parts] for number in range(6)]
    rows = sorted(float(row[0]) for batch in whole for part in batch for row in part)
    assert rows == sorted(DATA[:, 0]) and parts[0].at(6) is None and parts[0].at(7) is None
    again = [reader.open(host, 2, 0) for host in range(2)]
    for number in range(4):
        [part.at(number) for part in again]
    positions = json.loads(json.dumps([part.position(4) for part in again]))
    for host in range(2):
        resumed = reader.open(host, 2, 4, positions[host])
        np.testing.assert_array_equal(resumed.at(4)["x"], whole[4][host])


def grain_parts(host, hosts):
    import grain.python as grain

    return grain_loader(grain, Source([]), (host, hosts))


def test_torch_loaders():
    """torchdata's loader knows its position, torch's own does not; dtypes that NumPy lacks are JAX's."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    loader = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    ).StatefulDataLoader
    drawn = []
    check_goes_on(lambda: loader(Source(drawn), batch_size=4), drawn)
    check_goes_on(lambda: torch.utils.data.DataLoader(Source([]), batch_size=4))
    tensors = [{"x": torch.ones(4, 2, dtype=torch.bfloat16, requires_grad=True), "n": torch.tensor(3)}]
    (batch,) = all_of(Batches(iter(tensors)))
    assert batch["x"].dtype == jnp.bfloat16 and batch["x"].shape == (4, 2) and batch["n"] == 3


def test_tensorflow_datasets():
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install tensorflow-cpu")
    dataset = tf.data.Dataset.from_tensor_slices({"x": DATA}).batch(4)
    check_goes_on(lambda: dataset)
    check_goes_on(lambda: dataset.as_numpy_iterator())
