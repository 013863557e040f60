"""Attention and convolution over a dim that a mesh splits, under the names that take Tensors of such placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.distributed.auto_parallel.tensors.kept import form_of
from polyreme.distributed.auto_parallel.tensors.moves import put_on
from polyreme.distributed.auto_parallel.tensors.placements import Placement, Replicate, Shard
from polyreme.distributed.auto_parallel.tensors.process_mesh import ProcessMesh
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, PlacementError, ShapeError
from polyreme.kernels.ring_attention import Split
from polyreme.mesh import nearest_multiples
from polyreme.nn import functional as F
from polyreme.ops.attention.over_devices import SegmentExchange, exchanging


def exchange_over(
    how: str, mesh: ProcessMesh, axes: Sequence[Sequence[str]], query: Sequence[int], key: Sequence[int]
) -> SegmentExchange:
    """The exchange over a mesh for attention of [batch, s, heads, d] to [batch, t, kv_heads, d].

    how: "ring" or "ulysses". axes: the mesh dims that split batch, sequence and heads; batch and heads stay whole where
    theirs do not divide them. Raises ShapeError for a sequence that its dims do not divide, ConfigError for heads that
    "ulysses" cannot deal out.
    """
    ways = [math.prod(mesh.get_dim_size(name) for name in names) for names in axes]
    for what, size in (("queries", query[1]), ("keys", key[1])):
        if size % ways[1]:
            raise ShapeError(
                f"attention: {size} {what} do not divide into {ways[1]} equal parts over mesh dim {'+'.join(axes[1])}; "
                f"make it {nearest_multiples(size, ways[1])}"
            )
    batch, heads = (tuple(axes[i]) if query[d] % ways[i] == 0 else () for i, d in ((0, 0), (2, 2)))
    split_heads = ways[2] if heads else 1
    repeat = query[2] // key[2] if key[2] % split_heads else 1
    dealt = split_heads * ways[1]
    if how == "ulysses" and (query[2] % dealt or key[2] * repeat % dealt):
        raise ConfigError(
            f"attention: backend 'all2all' deals {query[2]} query heads and {key[2]} key heads out to {dealt} devices, "
            "which do not divide them; use 'p2p'"
        )
    return SegmentExchange(how, Split(mesh.jax_mesh, batch, tuple(axes[1]), heads), repeat)


class RingFlashAttention:
    """Attention over a sequence that a mesh splits; keys and values travel round a ring. Source: arXiv:2310.01889."""

    @staticmethod
    def apply(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        fixed_seed_offset: Any = None,
        training: bool = True,
    ) -> Tensor:
        """scaled_dot_product_attention of [batch, s, heads, d] that lie over a mesh, split along dim 1 -> as query.

        Dropout's numbers are those of one device. Raises PlacementError for a query that is not split along dim 1,
        ConfigError for fixed_seed_offset (use paddle.seed); as exchange_over does for lengths.
        """
        if fixed_seed_offset is not None:
            raise ConfigError(
                "RingFlashAttention: fixed_seed_offset; random numbers come from paddle.seed, leave it out"
            )
        form = form_of(query)
        axes = [] if form is None else [[form.mesh.dim_names[i] for i in form.axes(dim)] for dim in (0, 1, 2)]
        if form is None or not axes[1]:
            lies = "on no mesh" if form is None else list(form.placements)
            raise PlacementError(f"RingFlashAttention: the query is to be split along dim 1, but lies {lies}")
        over = exchange_over("ring", form.mesh, axes, query.shape, key.shape)
        with exchanging(lambda *_: over):
            out = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout, is_causal, training)
        return put_on(out, form.mesh, form.placements)


class RingConv2d:
    """A convolution over an image whose width a mesh splits: each device is sent the columns at its borders."""

    @staticmethod
    def apply(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        padding_algorithm: str | None = None,
        dilation: Any = 1,
        groups: int = 1,
        data_format: str = "NCHW",
        channel_dim: int = 1,
    ) -> Tensor:
        """conv2d of x that lies over a mesh, split along its width -> split in the same way.

        The partitioner sends the borders, so any stride, padding and dilation will do. padding_algorithm: "SAME" or
        "VALID" in place of padding, "EXPLICIT" for padding. Raises PlacementError for x not split along its width,
        ConfigError for another padding_algorithm and for a channel_dim that is not data_format's.
        """
        form, width = form_of(x), width_dim(data_format)
        if channel_dim != data_format.index("C"):
            raise ConfigError(f"RingConv2d: channel_dim={channel_dim}, which data_format {data_format} contradicts")
        if form is None or not form.axes(width):
            raise PlacementError(
                f"RingConv2d: x is to be split along dim {width}, its width, and is not: shard_tensor it"
            )
        if padding_algorithm not in (None, "EXPLICIT", "SAME", "VALID"):
            raise ConfigError(f"RingConv2d: padding_algorithm={padding_algorithm!r}; give EXPLICIT, SAME or VALID")
        pads = padding_algorithm if padding_algorithm in ("SAME", "VALID") else padding
        out = F.conv2d(x, weight, bias, stride, pads, dilation, groups, data_format)
        kept: list[Placement] = [
            p if isinstance(p, Shard) and p.get_dim() in (0, width) else Replicate() for p in form.placements
        ]
        return put_on(out, form.mesh, kept)


def width_dim(data_format: str) -> int:
    """The dim of an image's width; ConfigError for a format of anything but images."""
    if data_format not in ("NCHW", "NHWC"):
        raise ConfigError(f"data_format {data_format!r}; give 'NCHW' or 'NHWC'")
    return data_format.index("W")
