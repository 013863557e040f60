"""Plans that split a layer's inputs, not its parameters: context parallelism and convolutions over width."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from polyreme.distributed.auto_parallel.layers.plans import MP, LayerPlan, after, before
from polyreme.distributed.auto_parallel.layers.ring import exchange_over, width_dim
from polyreme.distributed.auto_parallel.tensors.moves import each_tensor, first_tensor, moved
from polyreme.distributed.auto_parallel.tensors.placements import Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.errors import ConfigError, did_you_mean
from polyreme.nn.layer import Layer
from polyreme.nn.layers.conv import Conv2D
from polyreme.ops.attention.over_devices import SegmentExchange, exchanging

_BACKENDS = {"p2p": "ring", "all2all": "ulysses"}
_NAMES = ("sep", "cp")


class _OverSequence(LayerPlan):
    """A plan of context parallelism. backend: "p2p" (keys and values go round a ring) or "all2all" (heads are dealt out
    instead of the sequence while attention runs). The mesh dim is "sep" or "cp"."""

    def __init__(self, backend: str = "p2p") -> None:
        if backend not in _BACKENDS:
            raise ConfigError(f"{type(self).__name__}: backend={backend!r}{did_you_mean(backend, _BACKENDS)}")
        self.backend = backend

    def check(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        self._dim(mesh)

    def _dim(self, mesh: ProcessMesh) -> str:
        found = next((name for name in _NAMES if name in mesh.dim_names), None)
        if found is None:
            raise ConfigError(f"{type(self).__name__} needs a mesh dim 'sep' or 'cp'; the mesh has {mesh.dim_names}")
        return found


class PrepareContextParallel(_OverSequence):
    """For the whole model: the Tensors it is called with are split along dim 1, the sequence."""

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        dim = self._dim(mesh)
        before(layer, lambda args: each_tensor(args, lambda x: moved(x, mesh, dim, Shard(1)) if x.ndim > 1 else x))


class ContextParallel(_OverSequence):
    """For a layer that calls scaled_dot_product_attention on [batch, seq, heads, d]: it attends over the split
    sequence, and its output is split along dim 1. Sources: arXiv:2310.01889, arXiv:2309.14509.
    """

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        dim = self._dim(mesh)
        axes = [[name for name in names if name in mesh.dim_names] for names in (("dp",), (dim,), (MP,))]

        def chosen(query: Sequence[int], key: Sequence[int]) -> SegmentExchange:
            return exchange_over(_BACKENDS[self.backend], mesh, axes, query, key)

        layer.forward = _attending(layer.forward, chosen)
        after(layer, lambda out: first_tensor(out, lambda x: moved(x, mesh, dim, Shard(1))))


class ConvParallel(LayerPlan):
    """For a Conv2D: the image it takes, and with it the one it gives, is split along its width over mp.

    The partitioner sends each device the columns at its borders, so any kernel, stride, padding and dilation will do.
    Raises ConfigError for another layer.
    """

    def check(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        if not isinstance(layer, Conv2D):
            raise ConfigError(f"ConvParallel is for Conv2D, {layer.full_name()} is a {type(layer).__name__}")

    def apply(self, layer: Layer, mesh: ProcessMesh, only: str | None = None) -> None:
        assert isinstance(layer, Conv2D)
        width = width_dim(layer.data_format)
        before(layer, lambda args: first_tensor(args, lambda x: moved(x, mesh, MP, Shard(width))))
        after(layer, lambda out: first_tensor(out, lambda x: moved(x, mesh, MP, Shard(width))))


def _attending(forward: Callable[..., Any], chosen: Callable[..., SegmentExchange]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def attending(*args: Any, **kwargs: Any) -> Any:
        with exchanging(chosen):
            return forward(*args, **kwargs)

    return attending
