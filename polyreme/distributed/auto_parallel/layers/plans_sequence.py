"""Plans of sequence parallelism: between the parallel layers, activations are split along the sequence over mp.

Source: arXiv:2205.05198, section 4.2.2.  Inside the range activations are [seq, batch, hidden].
"""

from __future__ import annotations

from polyreme.distributed.auto_parallel.layers.plans import MP, LayerPlan, after, before
from polyreme.distributed.auto_parallel.tensors.moves import first_tensor, moved
from polyreme.distributed.auto_parallel.tensors.placements import Placement, Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.eager.tensor import Tensor
from polyreme.nn.layer import Layer


class SequenceParallelBegin(LayerPlan):
    """For the last layer before the range: its output [batch, seq, hidden] becomes [seq, batch, hidden], split.

    need_transpose=False: the output is [seq, batch, hidden] already.
    """

    def __init__(self, need_transpose: bool = True) -> None:
        self.need_transpose = need_transpose

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        after(layer, lambda out: first_tensor(out, lambda x: _split_sequence(x, mesh, self.need_transpose)))


class SequenceParallelEnd(LayerPlan):
    """For the first layer after the range: its input [seq, batch, hidden] becomes [batch, seq, hidden], whole.

    need_transpose=False: the layer takes [seq, batch, hidden].
    """

    def __init__(self, need_transpose: bool = True) -> None:
        self.need_transpose = need_transpose

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        before(layer, lambda args: first_tensor(args, lambda x: _gather_sequence(x, mesh, self.need_transpose)))


class SequenceParallelEnable(LayerPlan):
    """For a layer that takes and gives [batch, seq, hidden]: works on its part of the sequence; the output is whole."""

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        before(layer, lambda args: first_tensor(args, lambda x: _along(x, mesh, Shard(1))))
        after(layer, lambda out: first_tensor(out, lambda x: _along(x, mesh, Replicate())))


class SequenceParallelDisable(LayerPlan):
    """For a layer inside the range that needs the whole sequence: gathered before it, split again after it.

    need_transpose: the layer takes and gives [batch, seq, hidden], else [seq, batch, hidden].
    """

    def __init__(self, need_transpose: bool = True) -> None:
        self.need_transpose = need_transpose

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        before(layer, lambda args: first_tensor(args, lambda x: _gather_sequence(x, mesh, self.need_transpose)))
        after(layer, lambda out: first_tensor(out, lambda x: _split_sequence(x, mesh, self.need_transpose)))


def _along(x: Tensor, mesh: ProcessMesh, placement: Placement) -> Tensor:
    return moved(x, mesh, MP, placement)


def _split_sequence(x: Tensor, mesh: ProcessMesh, transpose: bool) -> Tensor:
    # before the exchange: what is a sum still to be made over mp is summed and split in one
    return _swap(_along(x, mesh, Shard(1))) if transpose else _along(x, mesh, Shard(0))


def _gather_sequence(x: Tensor, mesh: ProcessMesh, transpose: bool) -> Tensor:
    x = _along(x, mesh, Replicate())
    return _swap(x) if transpose else x


def _swap(x: Tensor) -> Tensor:
    """Batch and sequence exchanged."""
    return x.transpose([1, 0, *range(2, x.ndim)])
