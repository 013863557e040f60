"""Tensors spread over a mesh by placements, and what distributes programs by them."""

from polyreme.distributed.auto_parallel.process_mesh import ProcessMesh, create_mesh, get_mesh, set_mesh

__all__ = ["ProcessMesh", "create_mesh", "get_mesh", "set_mesh"]
