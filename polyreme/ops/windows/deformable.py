"""Convolution whose sampling points are moved by learned offsets.

Sources: Dai et al., 2017, arXiv:1703.06211 (offsets); Zhu et al., 2018, arXiv:1811.11168 (the mask).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core.annotations import Padding, Sizes
from polyreme.core.dtype import promote_floating
from polyreme.core.op import op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ShapeError
from polyreme.ops.by_index import read_along
from polyreme.ops.windows.geometry import per_dim


def _rule(call: OpCall) -> ShardingRule:
    """The batch goes through."""
    batch = ("b", None, None, None)
    return ShardingRule(call.inputs(x=batch, offset=batch, mask=batch), (batch,), laid_out=True)


@op(amp="fp32", method=False, rule=_rule)
def deform_conv2d(
    x: Array,
    offset: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    deformable_groups: int = 1,
    groups: int = 1,
    mask: Array | None = None,
) -> Array:
    """conv2d that reads x between pixels: [N, C, H, W], [O, C / groups, kh, kw] -> [N, O, H', W'].

    offset [N, 2 deformable_groups kh kw, H', W']: how far (down, right) each tap of each output is moved, one set for
    C / deformable_groups channels. x there is interpolated bilinearly, 0 outside. mask [N, deformable_groups kh kw, H',
    W'] multiplies each tap (version 2). Raises ShapeError where sizes do not fit.
    """
    stride, dilation = (per_dim(v, 2, f"deform_conv2d: {n}") for v, n in ((stride, "stride"), (dilation, "dilation")))
    padding = per_dim(padding, 2, "deform_conv2d: padding", low=0)
    x, offset, weight = promote_floating(x, offset, weight)
    kernel, taps = weight.shape[2:], weight.shape[2] * weight.shape[3]
    out = tuple(
        (z + 2 * p - d * (k - 1) - 1) // s + 1
        for z, p, d, k, s in zip(x.shape[2:], padding, dilation, kernel, stride, strict=True)
    )
    _check(x, offset, weight, mask, deformable_groups, groups, out, taps)
    n, channels = x.shape[:2]
    moves = offset.reshape(n, deformable_groups, taps, 2, *out)
    tap = np.stack(np.meshgrid(*(np.arange(k) for k in kernel), indexing="ij"), -1).reshape(taps, 2)
    here = [
        moves[:, :, :, dim]
        + (tap[:, dim] * dilation[dim] - padding[dim])[:, None, None]
        + (np.arange(out[dim]) * stride[dim]).reshape((-1, 1) if dim == 0 else (1, -1))
        for dim in (0, 1)
    ]
    values = _between_pixels(x.reshape(n, deformable_groups, -1, *x.shape[2:]), here[0], here[1])
    if mask is not None:
        values = values * mask.astype(x.dtype).reshape(n, deformable_groups, 1, taps, *out)
    values = values.reshape(n, groups, channels // groups, taps, *out)
    kernels = weight.reshape(groups, -1, channels // groups, taps)
    y = jnp.einsum("ngckhw,gock->ngohw", values, kernels).reshape(n, weight.shape[0], *out)
    return y if bias is None else y + bias.astype(y.dtype).reshape(-1, 1, 1)


def _check(
    x: Array, offset: Array, weight: Array, mask: Array | None, parts: int, groups: int, out: tuple, taps: int
) -> None:
    if min(out) < 1:
        raise ShapeError(f"deform_conv2d: {list(weight.shape[2:])} does not fit in x {list(x.shape)}; pad more")
    channels = x.shape[1]
    if groups < 1 or parts < 1 or channels % parts or channels != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ShapeError(
            f"deform_conv2d: x {list(x.shape)}, weight {list(weight.shape)}, {groups=}, deformable_groups={parts}; "
            "weight needs [out, channels / groups, kh, kw], and both groups must divide the channels"
        )
    for name, value, each in (("offset", offset, 2), ("mask", mask, 1)):
        want = (x.shape[0], each * parts * taps, *out)
        if value is not None and value.shape != want:
            raise ShapeError(f"deform_conv2d: {name} {list(value.shape)}; needs {list(want)}")


def _between_pixels(x: Array, row: Array, column: Array) -> Array:
    """x [N, G, C, H, W] at real places [N, G, taps, H', W'], bilinear with 0 outside -> [N, G, C, taps, H', W']."""
    height, width = x.shape[3:]
    flat = x.reshape(*x.shape[:3], height * width)
    top, left = jnp.floor(row), jnp.floor(column)
    total: Any = 0
    for down in (0, 1):
        for right in (0, 1):
            r, c = top + down, left + right
            weight = (1 - jnp.abs(row - r)) * (1 - jnp.abs(column - c))
            inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
            at = jnp.clip(r, 0, height - 1).astype(jnp.int32) * width + jnp.clip(c, 0, width - 1).astype(jnp.int32)
            at = at.reshape(*at.shape[:2], 1, -1)
            taken = read_along(flat, at, 3).reshape(*x.shape[:3], *row.shape[2:])
            total = total + taken * jnp.where(inside, weight, 0)[:, :, None]
    return total


ALIASES: dict[str, str] = {}
