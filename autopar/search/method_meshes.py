"""The logical meshes that a method allows for a step that is one program.

In:     a request.
Out:    `LogicalMesh`es, fewer axes first.
Method: the method names a mesh, or its shape; or the user's own constraints do; else all shapes of the cluster are tried.
"""

from __future__ import annotations

from autopar.errors import DeviceCountError
from autopar.mesh import LogicalMesh, logical_mesh, logical_meshes, more_devices_text
from autopar.search.methods import Auto, DataParallel, Inference, PipelineParallel, ShardParallel, ThreeD
from autopar.search.pins import meshes_of_constraints
from autopar.search.request import Request
from autopar.search.stage_planner import meshes_of_one_program


def candidate_meshes(request: Request) -> list[LogicalMesh]:
    """Logical meshes to try.

    Raises `DeviceCountError`: the method's mesh has another number of devices than the cluster.
    """
    cluster = request.cluster
    match request.method:
        case ShardParallel(mesh_shape=LogicalMesh() as mesh):
            chosen = [mesh]
        case ShardParallel(mesh_shape=tuple() as shape):
            chosen = [logical_mesh(cluster, shape)]
        case DataParallel():
            # One axis over hosts, one within: slow links carry only what fast ones have reduced.
            both = cluster.hosts > 1 and cluster.devices_per_host > 1
            chosen = [
                logical_mesh(cluster, (cluster.hosts, cluster.devices_per_host) if both else (cluster.num_devices,))
            ]
        case PipelineParallel() | ThreeD() as method:
            chosen = meshes_of_one_program(request, method)
        case ShardParallel() | Auto() | Inference():
            chosen = meshes_of_constraints(request.program.jaxpr, cluster) or logical_meshes(cluster)
    for mesh in chosen:
        if mesh.num_devices != cluster.num_devices:
            raise DeviceCountError(
                "the mesh does not fit the cluster.",
                given=f"{mesh} for {cluster.num_devices} devices",
                wrong=f"it has {mesh.num_devices} places.",
                do=f"choose a shape whose product is {cluster.num_devices}, or pass cluster=Cluster.local(devices=...)."
                + more_devices_text(cluster, mesh.num_devices),
                wanted=mesh.num_devices,
                available=cluster.num_devices,
            )
    return chosen
