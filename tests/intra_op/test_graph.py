"""Decision graphs: what of one mesh is said of another."""

from __future__ import annotations

import numpy as np

from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.costs import Prices
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.mesh import LogicalMesh
from tests.planned_mlp import CLUSTER, arguments, train_step


def test_what_does_not_depend_on_the_mesh_is_taken_over():
    """Rules, samples, traffic: the problem is the same as if they had been found anew."""
    program = trace_step(train_step, arguments())
    roles = find_roles(program, (1,))
    meshes = [LogicalMesh(shape, links=(CLUSTER.intra,) * len(shape)) for shape in ((8,), (2, 4), (2, 2, 2))]
    first = None
    for mesh in meshes:
        anew, like = (build_graph(program.jaxpr, mesh, roles.aliases, roles.batch, like=g) for g in (None, first))
        assert [str(node.name) for node in anew.nodes] == [node.name for node in like.nodes]
        assert [edge.is_sample for edge in anew.edges] == [edge.is_sample for edge in like.edges]
        alone = list(range(len(anew.nodes)))
        one, other = (Prices(graph, CLUSTER.device, alone).problem() for graph in (anew, like))
        assert all(map(np.array_equal, one.costs, other.costs)) and list(one.edges) == list(other.edges)
        assert all(np.array_equal(one.edges[key], other.edges[key]) for key in one.edges)
        first = first or anew
