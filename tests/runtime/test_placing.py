"""Arguments in their places: passed on as they are, moved, copied where they are taken over, refused where they are gone."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import DonatedError
from autopar.runtime.placing import Placing

SPLIT = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))
TYPE = jax.ShapeDtypeStruct((4,), np.float32, sharding=SPLIT)


def ones():
    return jax.device_put(np.ones(4, np.float32), SPLIT)


def made():
    """Of a step that takes the memory of its first argument."""
    return Placing("step", ["state", "batch"], [TYPE, TYPE], [True, False])


def test_what_is_there_is_passed_on():
    placing, given = made(), [ones(), ones()]
    for _ in range(2):
        placed = placing.place(given)
        assert all(a is b for a, b in zip(placed, given, strict=True)) and placing.was_as_passed


def test_what_is_elsewhere_is_moved():
    placing, state, batch = made(), ones(), np.arange(4, dtype=np.float32)
    placed = placing.place([state, batch])
    assert placed[0] is state and placed[1].sharding == SPLIT and placing.was_as_passed
    np.testing.assert_array_equal(placed[1], batch)
    placed = placing.place([batch, ones()])
    assert placed[0].sharding == SPLIT and not placing.was_as_passed, "JAX would not copy it"
    placed[0].delete()
    np.testing.assert_array_equal(batch, np.arange(4))


def test_what_is_passed_twice_is_copied():
    placing, array = made(), ones()
    state, batch = placing.place([array, array])
    assert batch is array and state is not array and not placing.was_as_passed


def test_what_others_were_made_of_counts():
    """A batch in pieces is another array than the user's, who passes it as the state, too."""
    placing, array = made(), ones()
    state, _ = placing.place([array, array], [array, ones()])
    assert state is not array


def test_what_is_gone_is_named():
    placing, state = made(), ones()
    state.delete()
    with pytest.raises(DonatedError, match="state") as caught:
        placing.place([state, ones()])
    assert caught.value.paths == ("state",)
