"""LocalLayer: a Layer whose forward sees one device's parts of Tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.core import state
from polyreme.distributed.auto_parallel.tensors.kept import form_of
from polyreme.distributed.auto_parallel.tensors.local_map import local_map
from polyreme.distributed.auto_parallel.tensors.placements import Placement
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.distributed.auto_parallel.tensors.reshard import Moved, form_for, linked
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer

Attr = tuple[ProcessMesh, Sequence[Placement]]


class LocalLayer(Layer):
    """A Layer called with Tensors on a mesh, whose forward is given this device's parts of them, as by local_map.

    out_dist_attrs: (mesh, placements) of each result, all on one mesh; they say how the parts that forward returns make
    up the whole. grad_dist_attrs: (mesh, placements) in which each input's gradient comes back, None for the input's
    own. What forward keeps in an attribute has no value afterwards; return it. Its own parameters are whole on every
    device, and get the gradient of the whole. Raises ConfigError for results on several meshes.
    """

    out_dist_attrs: Sequence[Attr | None]
    grad_dist_attrs: Sequence[Attr | None] | None

    def __init__(
        self, out_dist_attrs: Sequence[Attr | None], grad_dist_attrs: Sequence[Attr | None] | None = None
    ) -> None:
        super().__init__()
        meshes = [attr[0] for attr in out_dist_attrs if attr is not None]
        if not meshes or any(m != meshes[0] for m in meshes):
            raise ConfigError(f"LocalLayer: out_dist_attrs must name one mesh, got {[str(m) for m in meshes]}")
        self.out_dist_attrs, self.grad_dist_attrs = out_dist_attrs, grad_dist_attrs
        placements = [None if attr is None else attr[1] for attr in out_dist_attrs]
        # the Layer is an argument, so that a copy of it runs itself
        self._mapped = local_map(Layer.__call__, placements, process_mesh=meshes[0])

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        attrs = iter(self.grad_dist_attrs or ())
        given = [self._input(v, next(attrs, None)) if isinstance(v, Tensor) else v for v in inputs]
        return self._mapped(self, *given, **kwargs)

    @staticmethod
    def _input(tensor: Tensor, attr: Attr | None) -> Tensor:
        """tensor, whose gradient comes back as attr says."""
        if attr is None or tensor.stop_gradient or form_of(tensor) is None or state.capturing():
            return tensor
        target = form_for("LocalLayer: grad_dist_attrs", attr[0], attr[1], tensor.shape)
        return linked(tensor, tensor.detach(), Moved(tensor, target, None))
