"""Layers' functions: linear and bilinear maps, embedding, dropout, similarities, masks of lengths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from polyreme import kernels
from polyreme.core import dtype as dtypes
from polyreme.core import layout, state
from polyreme.core.annotations import AnyTensor, Axes, DTypeLike
from polyreme.core.dtype import floating, promote_floating
from polyreme.core.op import DRAWN, Key, composite, op
from polyreme.core.sharding_rule import OpCall, ShardingRule
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops import arithmetic
from polyreme.ops.activation import positive_dim, wide
from polyreme.ops.attention import over_devices
from polyreme.ops.by_index import bounded, read
from polyreme.ops.creation import clone, republish
from polyreme.ops.ids import check_range
from polyreme.ops.losses.elementwise import cosine
from polyreme.ops.matrices.norms import p_norm
from polyreme.ops.sharding import dim_names, elementwise
from polyreme.ops.windows.geometry import is_channels_last


def _linear_rule(call: OpCall) -> ShardingRule:
    """[*b, k] x [k, n] + [n] -> [*b, n]; with a bias the sum over a split k is joined at once."""
    batch = dim_names(call.shapes[0][:-1], "b")
    biased = "bias" in call.params
    leading = call.shapes[-1][:-1] if biased else ()
    rows = (*[None] * (len(leading) - len(batch)), *batch)
    aligned = zip(leading, rows[len(rows) - len(leading) :], strict=True)
    return ShardingRule(
        call.inputs(x=(*batch, "k"), weight=("k", "n"), bias=(*(r if d > 1 else None for d, r in aligned), "n")),
        ((*rows, "n"),),
        reduce=None if biased else "sum",
        linear="no" if biased else "alone",
        piecewise=True,
    )


def _embedding_rule(call: OpCall) -> ShardingRule:
    """[*b] in [v, h] -> [*b, h]; split rows make the result Partial: each device adds what it has."""
    ids = dim_names(call.shapes[0], "b")
    counted = call.attrs.get("scale_grad_by_freq")
    return ShardingRule(
        (ids, ("v", "h")),
        ((*ids, "h"),),
        reduce=None if counted else "sum",
        piecewise=not counted,
        lookup="v",
    )


@op(amp="low", method=False, rule=_linear_rule)
def linear(x: Array, weight: Array, bias: Array | None = None, ways: tuple[int, int] = over_devices.WHOLE) -> Array:
    """x @ weight + bias over the last dim: [*b, in], [in, out], [out] -> [*b, out]; a bias of more dims broadcasts.

    A weight of 1 dim or of more than 2 is taken as matmul takes it.

    Raises ShapeError when the dims do not fit.
    """
    x, weight = promote_floating(x, weight)
    if bias is not None:
        bias = bias.astype(x.dtype)
    if weight.ndim != 2:
        y = arithmetic.matmul.op.fn(x, weight)
        return y if bias is None else y + bias
    if bias is not None:
        if bias.ndim > x.ndim or any(size != 1 for size in bias.shape[:-1]):
            return kernels.linear(x, weight, None) + bias
        bias = bias.reshape(-1)
    if ways == over_devices.WHOLE:
        return kernels.linear(x, weight, bias)
    # tokens of a split sequence, joined so that the split survives
    y = kernels.linear(over_devices.join_tokens(x, ways), weight, bias)
    return over_devices.part_tokens(y, x.shape[:-1], ways)


_linear = linear


def _with_ways(x: AnyTensor, weight: AnyTensor, bias: AnyTensor | None = None, name: str | None = None) -> AnyTensor:
    if layout.active.layout is None:
        return _linear(x, weight, bias)
    ways = over_devices.token_ways(x.shape)
    return _linear(x, weight, bias, ways if ways[1] > 1 else over_devices.WHOLE)


linear = republish(_linear, _with_ways)


@op(amp="low", method=False)
def bilinear(x1: Array, x2: Array, weight: Array, bias: Array | None = None) -> Array:
    """y[o] = x1 weight[o] x2^T + bias[o]: [N, in1], [N, in2], [out, in1, in2], [1, out] -> [N, out].

    Raises ShapeError when the dims do not fit.
    """
    x1, x2, weight = promote_floating(x1, x2, weight)
    y = jnp.einsum("ni,oij,nj->no", x1, weight, x2)
    if bias is None:
        return y
    if bias.size != y.shape[1]:
        raise ShapeError(f"bilinear: bias {list(bias.shape)}; needs [1, {y.shape[1]}]")
    return y + bias.astype(y.dtype).reshape(-1)


# ---- embedding ----


@op(method=False, rule=_embedding_rule)
def embedding_rows(x: Array, weight: Array, padding_idx: int | None = None, scale_grad_by_freq: bool = False) -> Array:
    """Rows of weight at ids x, without a check of the ids; an id out of range gives NaN."""
    if not dtypes.is_integer(x.dtype):
        raise DTypeError(f"embedding: x is {x.dtype.name}; ids are integers, use astype")
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight {list(weight.shape)} needs 2 dims, [rows, size]")
    size = weight.shape[0]
    ids = bounded(x, size, negative=False)
    rows = read(weight, (ids,))
    if scale_grad_by_freq:
        counts = jnp.zeros((size,), dtypes.float32).at[ids].add(1)
        fixed = jax.lax.stop_gradient(rows)
        rows = fixed + (rows - fixed) / jnp.maximum(counts[ids], 1)[..., None].astype(rows.dtype)
    return rows if padding_idx is None else jnp.where((x == padding_idx)[..., None], 0, rows)


@op(method=False)
def embedding_within(weight: Array, x: Array, max_norm: float, norm_type: float) -> Array:
    """weight with the rows at ids x scaled down to a norm of at most max_norm."""
    norm = p_norm(wide(weight), norm_type, 1, True)
    ids = bounded(x.reshape(-1), weight.shape[0], negative=False)
    used = jnp.zeros(weight.shape[:1], bool).at[ids].set(True)[:, None]
    # 1e-7 keeps a row that was scaled once from being scaled again for its rounding
    scaled = (weight * (max_norm / (norm + 1e-7))).astype(weight.dtype)
    return jnp.where(used & (norm > max_norm), scaled, weight)


@composite(method=False)
def embedding(
    x: AnyTensor,
    weight: AnyTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    sparse: bool = False,
    scale_grad_by_freq: bool = False,
    name: str | None = None,
) -> AnyTensor:
    """Rows of weight: ids [*b], [rows, size] -> [*b, size].

    padding_idx (negative from the end): that id gives zeros and no gradient. max_norm: rows used are first scaled, in
    weight itself, to an L-norm_type norm of at most that. scale_grad_by_freq divides the gradient of a row by how often
    its id occurs. sparse: Adam(lazy_mode=True) leaves rows of weight not looked up as they are; the gradient is
    the same, and always dense here.
    Raises IndexError for an id out of range (a captured function gives NaN), ShapeError for a padding_idx out of range.
    """
    rows = weight.shape[0]
    if padding_idx is not None:
        if not -rows <= padding_idx < rows:
            raise ShapeError(f"embedding: padding_idx={padding_idx}; needs {-rows} <= padding_idx < {rows}")
        padding_idx %= rows
    check_range(x, rows, "embedding: id")
    if sparse and hasattr(weight, "has_sparse_rows"):
        weight.has_sparse_rows = True
    if max_norm is not None:
        state.write(weight, state.read(embedding_within(weight.detach(), x, float(max_norm), float(norm_type))))
    return embedding_rows(x, weight, padding_idx, scale_grad_by_freq)


# ---- dropout ----


def _probability(p: Any, what: str) -> float:
    """p, a number or a Tensor of one element, as a number; ConfigError for one outside [0, 1]."""
    p = p.item() if isinstance(p, state.TensorState) else p
    if isinstance(p, str) or not 0 <= p <= 1:
        raise ConfigError(f"{what}: p={p!r}; a probability is a number in [0, 1]")
    return p


@op(method=False, rule=elementwise)
def dropout_train(
    x: Array, p: float, axis: Axes | None = None, mode: str = "upscale_in_train", key: Key = DRAWN
) -> Array:
    """x with each element (or slice along axis) set to 0 with probability p, the rest divided by 1 - p if upscaled."""
    x = floating(x)
    shape = x.shape
    if axis is not None:
        kept = {positive_dim(a, x.ndim, "dropout") for a in ((axis,) if isinstance(axis, int) else axis)}
        shape = tuple(z if d in kept else 1 for d, z in enumerate(x.shape))
    keep = jax.random.bernoulli(key, 1.0 - p, shape)
    if mode == "upscale_in_train" and p < 1:
        x = x / jnp.asarray(1 - p, x.dtype)
    return jnp.where(keep, x, jnp.zeros((), x.dtype))


@op(method=False, rule=elementwise)
def scaled_by_keep(x: Array, p: float) -> Array:
    """x * (1 - p): what downscale_in_infer does outside training."""
    x = floating(x)
    return x * jnp.asarray(1 - p, x.dtype)


@composite(method=False)
def dropout(
    x: AnyTensor,
    p: float = 0.5,
    axis: Axes | None = None,
    training: bool = True,
    inplace: bool = False,
    mode: str = "upscale_in_train",
    name: str | None = None,
) -> AnyTensor:
    """x with each element set to 0 with probability p in training. Source: arXiv:1207.0580.

    mode "upscale_in_train" divides the rest by 1 - p in training; "downscale_in_infer" multiplies x by 1 - p
    outside it. axis: draw once for each index along these dims, and for all elements of the others together.
    Outside of training a copy. inplace writes into x. Draws no random numbers unless training and p > 0. Raises
    ConfigError for a p outside [0, 1] or another mode.
    """
    p = _probability(p, "dropout")
    if mode not in ("upscale_in_train", "downscale_in_infer"):
        raise ConfigError(f"dropout: mode={mode!r}; choose 'upscale_in_train' or 'downscale_in_infer'")
    out = {"out": x} if inplace else {}
    if training and p > 0:
        return dropout_train(x, p, axis, mode, **out)
    if not training and mode == "downscale_in_infer":
        return scaled_by_keep(x, p, **out)
    return x if training or inplace else clone(x)


def _channel_dropout(x: Any, p: float, training: bool, data_format: str, n: int) -> Any:
    what = f"dropout{n}d"
    if len(x.shape) != n + 2:
        raise ShapeError(f"{what}: x {list(x.shape)} has {len(x.shape)} dims, needs {n + 2}")
    return dropout(x, p, [0, n + 1 if is_channels_last(data_format, n, what) else 1], training)


@composite(method=False)
def dropout1d(input: AnyTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> AnyTensor:
    """dropout of whole channels, [N, C, L]; also [C, L], one batch entry."""
    if len(input.shape) not in (2, 3):
        raise ShapeError(f"dropout1d: input {list(input.shape)}; needs [N, C, L] or [C, L]")
    return dropout(input, p, list(range(len(input.shape) - 1)), training, inplace)


@composite(method=False)
def dropout2d(
    x: AnyTensor, p: float = 0.5, training: bool = True, data_format: str = "NCHW", name: str | None = None
) -> AnyTensor:
    """dropout of whole channels, [N, C, H, W]. Source: arXiv:1411.4280."""
    return _channel_dropout(x, p, training, data_format, 2)


@composite(method=False)
def dropout3d(
    x: AnyTensor, p: float = 0.5, training: bool = True, data_format: str = "NCDHW", name: str | None = None
) -> AnyTensor:
    """dropout of whole channels, [N, C, D, H, W]."""
    return _channel_dropout(x, p, training, data_format, 3)


# selu's limit at -inf, -scale * alpha (arXiv:1706.02515)
_SELU_FLOOR = -1.0507009873554805 * 1.6732632423543772


@op(method=False, rule=elementwise)
def alpha_dropout_train(x: Array, p: float, num_dims: int | None = None, key: Key = DRAWN) -> Array:
    """a * (x where kept, else selu's floor) + b, a and b keeping mean and variance; one draw over dims >= num_dims."""
    x = floating(x)
    shape = x.shape if num_dims is None else x.shape[:num_dims] + (1,) * (x.ndim - num_dims)
    keep = jax.random.bernoulli(key, 1.0 - p, shape)
    a = ((1 - p) * (1 + p * _SELU_FLOOR**2)) ** -0.5
    b = -a * p * _SELU_FLOOR
    return a * jnp.where(keep, x, jnp.asarray(_SELU_FLOOR, x.dtype)) + jnp.asarray(b, x.dtype)


def _alpha_dropout(x: Any, p: float, training: bool, num_dims: int | None, what: str) -> Any:
    p = _probability(p, what)
    if not training:
        return x
    if p == 0:
        return clone(x)
    return scaled_by_keep(x, 1.0) if p == 1 else alpha_dropout_train(x, p, num_dims)


@composite(method=False)
def alpha_dropout(x: AnyTensor, p: float = 0.5, training: bool = True, name: str | None = None) -> AnyTensor:
    """dropout that keeps zero mean and unit variance after selu. Source: arXiv:1706.02515, section "Alpha dropout".

    Draws no random numbers unless training and 0 < p < 1. Raises ConfigError for a p outside [0, 1].
    """
    return _alpha_dropout(x, p, training, None, "alpha_dropout")


@composite(method=False)
def feature_alpha_dropout(x: AnyTensor, p: float = 0.5, training: bool = True, name: str | None = None) -> AnyTensor:
    """alpha_dropout of whole channels, [N, C, ...]."""
    if len(x.shape) < 2:
        raise ShapeError(f"feature_alpha_dropout: x {list(x.shape)}; needs at least 2 dims, [N, C, ...]")
    return _alpha_dropout(x, p, training, 2, "feature_alpha_dropout")


# ---- similarities and masks ----


@op(amp="fp32", method=False, real=True)
def cosine_similarity(x1: Array, x2: Array, axis: int = 1, eps: float = 1e-08) -> Array:
    """x1 . x2 / max(|x1| |x2|, eps) along axis; x1 and x2 broadcast."""
    x1, x2 = promote_floating(x1, x2)
    ndim = max(x1.ndim, x2.ndim)
    dim = positive_dim(axis, ndim, "cosine_similarity") - ndim
    return cosine(wide(x1), wide(x2), dim, eps).astype(x1.dtype)


@op(amp="fp32", method=False, real=True)
def pairwise_distance(x: Array, y: Array, p: float = 2.0, epsilon: float = 1e-06, keepdim: bool = False) -> Array:
    """||x - y + epsilon||_p over the last dim: [*b, M] -> [*b]; p may be inf."""
    x, y = promote_floating(x, y)
    return p_norm(wide(x) - wide(y) + epsilon, float(p), -1, keepdim).astype(x.dtype)


@op(method=False, real=True)
def mask_of_lengths(x: Array, maxlen: int, dtype: DTypeLike = "int64") -> Array:
    """1 where the index is below the length, [*b] -> [*b, maxlen]."""
    return (jnp.arange(maxlen, dtype=dtypes.int64) < x[..., None]).astype(dtypes.as_dtype(dtype))


@composite(method=False)
def sequence_mask(x: AnyTensor, maxlen: Any = None, dtype: DTypeLike = "int64", name: str | None = None) -> AnyTensor:
    """1 where the index is below the length x, else 0: lengths [*b] -> [*b, maxlen].

    maxlen is the longest length unless given, for which the lengths are read on the host (CaptureError inside a
    captured function). Raises ShapeError for a negative maxlen.
    """
    if maxlen is None:
        lengths = state.host(x, "sequence_mask without maxlen")
        maxlen = int(lengths.max()) if lengths.size else 0
    maxlen = int(maxlen)
    if maxlen < 0:
        raise ShapeError(f"sequence_mask: maxlen={maxlen}; it must not be negative")
    return mask_of_lengths(x, maxlen, dtype)


ALIASES: dict[str, str] = {}
