"""What may be chosen: masks that meet, and `PartitionSpec`s as shardings of a mesh."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.errors import ConstraintError
from autopar.intra_op.graph import Node
from autopar.intra_op.restrict import Allowed, keep_node_whole, matches_spec, read_spec
from autopar.mesh import LogicalMesh, Sharding

MESH = LogicalMesh((2, 4))
WHOLE, BY_X, BY_Y = (Sharding((axes, ())) for axes in ((), ("x",), ("y",)))


def node(*shardings):
    return Node(3, "port", "argument", shardings=shardings)


def test_restrictions_meet():
    allowed, port = Allowed(), node(WHOLE, BY_X, BY_Y)
    allowed.only(port, [True, True, False], "first", "one reason")
    allowed.only(port, [False, True, True], "second", "another")
    np.testing.assert_array_equal(allowed.masks[3], [False, True, False])
    assert allowed.keys[3] == ("first", "second") and allowed.reasons[3] == ["one reason", "another"]
    same = Allowed()
    same.only(port, [True, True, False], "first")
    same.only(port, [False, True, True], "second")
    assert same.keys == allowed.keys and same.reasons == {}


def test_words_of_a_key_stay_together():
    allowed, key = Allowed(), node(WHOLE, BY_X, Sharding(((), ("x",))))
    keep_node_whole(key, allowed)
    np.testing.assert_array_equal(allowed.masks[3], [True, True, False])


@pytest.mark.parametrize(
    "spec, dims, free",
    [
        (P(), ((), ()), (False, False)),
        (P("x"), (("x",), ()), (False, False)),
        (P(None, ("x", "y")), ((), ("x", "y")), (False, False)),
        (P(P.UNCONSTRAINED, "y"), ((), ("y",)), (True, False)),
    ],
)
def test_a_spec_is_a_sharding(spec, dims, free):
    sharding, open_dims = read_spec(spec, (8, 8), MESH, "it")
    assert (sharding, open_dims) == (Sharding(dims), free)
    assert matches_spec(sharding, sharding, open_dims)
    assert not matches_spec(Sharding(dims, ("x",)), sharding, open_dims)  # a sum that is not complete
    other = Sharding((("x",) if dims[0] == () else (), dims[1]))
    assert matches_spec(other, sharding, open_dims) == open_dims[0]


def test_axes_in_another_order_are_warned_of():
    with pytest.warns(UserWarning, match="split over"):
        sharding, _ = read_spec(P(("y", "x")), (8,), MESH, "it")
    assert sharding == Sharding((("x", "y"),))


@pytest.mark.parametrize(
    "spec, wrong", [(P("z"), "no axis 'z'"), (P("x", "y", None), "3 entries"), (P("y"), "length 6")]
)
def test_what_cannot_be_says_why(spec, wrong):
    with pytest.raises(ConstraintError, match=wrong):
        read_spec(spec, (6, 8), MESH, "it")
