"""Pooling, resizing, dropout and other layers of images and rows that have no parameters; products."""

from __future__ import annotations

import math
from typing import Any

from polyreme.core.op import recorded
from polyreme.core.rng import fixed_key
from polyreme.errors import ConfigError
from polyreme.fluid.layer import layer
from polyreme.nn import functional as F
from polyreme.ops import arithmetic as ar
from polyreme.ops import math as mt
from polyreme.ops import reduce as rd
from polyreme.ops.manipulation import reshape
from polyreme.ops.neural import dropout_train
from polyreme.ops.resample import nearest_corners


def _pool(
    n: int, x: Any, size: Any, kind: str, stride: Any, padding: Any, everything: bool, ceil: bool, exclusive: bool,
    data_format: str,
) -> Any:  # fmt: skip
    if kind not in ("max", "avg"):
        raise ConfigError(f"fluid.layers.pool{n}d: pool_type={kind!r}; give 'max' or 'avg'")
    if everything:
        first = 2 if data_format.startswith("NC") else 1
        return (rd.max if kind == "max" else rd.mean)(x, list(range(first, first + n)), keepdim=True)
    if kind == "max":
        run = F.max_pool2d if n == 2 else F.max_pool3d
        return run(x, size, stride, padding, ceil_mode=ceil, data_format=data_format)
    run = F.avg_pool2d if n == 2 else F.avg_pool3d
    return run(x, size, stride, padding, ceil_mode=ceil, exclusive=exclusive, data_format=data_format)


@layer
def pool2d(
    input: Any, pool_size: Any = -1, pool_type: str = "max", pool_stride: Any = 1, pool_padding: Any = 0,
    global_pooling: bool = False, use_cudnn: bool = True, ceil_mode: bool = False, name: str | None = None,
    exclusive: bool = True, data_format: str = "NCHW",
) -> Any:  # fmt: skip
    """The largest, or the mean, of each window: [n, c, h, w] -> [n, c, h', w'].

    global_pooling: one window of the whole image. exclusive: a mean counts no padding.
    """
    return _pool(
        2, input, pool_size, pool_type, pool_stride, pool_padding, global_pooling, ceil_mode, exclusive, data_format
    )


@layer
def pool3d(
    input: Any, pool_size: Any = -1, pool_type: str = "max", pool_stride: Any = 1, pool_padding: Any = 0,
    global_pooling: bool = False, use_cudnn: bool = True, ceil_mode: bool = False, name: str | None = None,
    exclusive: bool = True, data_format: str = "NCDHW",
) -> Any:  # fmt: skip
    """pool2d over three dims."""
    return _pool(
        3, input, pool_size, pool_type, pool_stride, pool_padding, global_pooling, ceil_mode, exclusive, data_format
    )


@layer
def adaptive_pool2d(
    input: Any, pool_size: Any, pool_type: str = "max", require_index: bool = False, name: str | None = None
) -> Any:
    """Windows such that pool_size of them fit; require_index: also where each largest is."""
    return _adaptive(2, input, pool_size, pool_type, require_index)


@layer
def adaptive_pool3d(
    input: Any, pool_size: Any, pool_type: str = "max", require_index: bool = False, name: str | None = None
) -> Any:
    """adaptive_pool2d over three dims."""
    return _adaptive(3, input, pool_size, pool_type, require_index)


def _adaptive(n: int, x: Any, size: Any, kind: str, places: bool) -> Any:
    if kind not in ("max", "avg") or (kind == "avg" and places):
        raise ConfigError(
            f"fluid.layers.adaptive_pool{n}d: pool_type={kind!r}, require_index={places}; max has indices"
        )
    if kind == "max":
        return (F.adaptive_max_pool2d if n == 2 else F.adaptive_max_pool3d)(x, size, places)
    return (F.adaptive_avg_pool2d if n == 2 else F.adaptive_avg_pool3d)(x, size)


_DROPOUTS = {"downgrade_in_infer": "downscale_in_infer", "upscale_in_train": "upscale_in_train"}


@layer
def dropout(
    x: Any, dropout_prob: float, is_test: bool = False, seed: int | None = None, name: str | None = None,
    dropout_implementation: str = "downgrade_in_infer",
) -> Any:  # fmt: skip
    """x with elements set to 0 at this probability while training.

    "downgrade_in_infer" multiplies by 1 - dropout_prob in evaluation, "upscale_in_train" divides by it while training.
    With a seed the same elements in each run.
    """
    if dropout_implementation not in _DROPOUTS:
        raise ConfigError(
            f"fluid.layers.dropout: dropout_implementation={dropout_implementation!r}; there are {sorted(_DROPOUTS)}"
        )
    mode = _DROPOUTS[dropout_implementation]
    if seed and not is_test:
        return dropout_train(x, dropout_prob, mode=mode, **fixed_key(seed))
    return F.dropout(x, dropout_prob, training=not is_test, mode=mode)


@layer
def lrn(
    input: Any, n: int = 5, k: float = 1.0, alpha: float = 1e-4, beta: float = 0.75, name: str | None = None,
    data_format: str = "NCHW",
) -> Any:  # fmt: skip
    """x / (k + alpha * sum of x^2 over n neighbouring channels)^beta. Source: Krizhevsky et al. 2012, section 3.3."""
    return F.local_response_norm(input, n, alpha * n, beta, k, data_format)


@layer
def l2_normalize(x: Any, axis: int, epsilon: float = 1e-12, name: str | None = None) -> Any:
    """x / sqrt(sum of x^2 over axis + epsilon)."""
    total = rd.sum(mt.square(x), 0 if x.ndim == 1 else axis, keepdim=True)
    return ar.multiply(x, mt.rsqrt(ar.add(total, epsilon)))


@layer
def clip_by_norm(x: Any, max_norm: float, name: str | None = None) -> Any:
    """x scaled down to an L2 norm of at most max_norm."""
    norm = mt.sqrt(rd.sum(mt.square(x)))
    return ar.multiply(x, ar.divide(max_norm, mt.maximum(norm, max_norm)))


@layer
def matmul(
    x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False, alpha: float = 1.0, name: str | None = None
) -> Any:
    """alpha * x @ y over the last two dims; of two vectors, shape [1]."""
    product = ar.matmul(x, y, transpose_x and x.ndim > 1, transpose_y and y.ndim > 1)
    product = reshape(product, [1]) if not product.shape else product
    return product if alpha == 1.0 else mt.scale(product, alpha)


@layer
def mul(x: Any, y: Any, x_num_col_dims: int = 1, y_num_col_dims: int = 1, name: str | None = None) -> Any:
    """x @ y as matrices, of which the first x_num_col_dims of x's dims and y_num_col_dims of y's are the rows."""
    rows, inner = x.shape[:x_num_col_dims], x.shape[x_num_col_dims:]
    columns = y.shape[y_num_col_dims:]
    a = x if x.ndim == 2 else reshape(x, [-1, math.prod(inner)])
    b = y if y.ndim == 2 else reshape(y, [math.prod(y.shape[:y_num_col_dims]), -1])
    product = ar.matmul(a, b)
    return product if (x.ndim, y.ndim) == (2, 2) else reshape(product, [*rows, *columns])


_RESAMPLE = {"BILINEAR": "bilinear", "TRILINEAR": "trilinear", "NEAREST": "nearest"}


@layer
def image_resize(
    input: Any, out_shape: Any = None, scale: Any = None, name: str | None = None, resample: str = "BILINEAR",
    actual_shape: Any = None, align_corners: bool = True, align_mode: int = 1, data_format: str = "NCHW",
) -> Any:  # fmt: skip
    """Images of another size, out_shape or scale times as large, by resample "BILINEAR", "TRILINEAR" or "NEAREST".

    align_corners: the centres of corner pixels stay. Raises ConfigError for actual_shape: sizes are known while
    recording.
    """
    if resample not in _RESAMPLE:
        raise ConfigError(f"fluid.layers.image_resize: resample={resample!r}; there are {sorted(_RESAMPLE)}")
    if actual_shape is not None:
        raise ConfigError("fluid.layers.image_resize: actual_shape cannot be honoured; give out_shape")
    if resample == "NEAREST" and align_corners:
        first = 2 if data_format.startswith("NC") else 1
        return _nearest_corners(input, None if out_shape is None else list(out_shape), scale, first)
    return F.interpolate(
        input, None if out_shape is None else list(out_shape), scale, _RESAMPLE[resample], align_corners,
        align_mode, data_format,
    )  # fmt: skip


@recorded(draws=False)
def _nearest_corners(x: Any, out_shape: Any, scale: Any, first: int) -> Any:
    sizes = x.shape[first : first + 2]
    return nearest_corners(
        x, [int(s * scale) for s in sizes] if out_shape is None else [int(s) for s in out_shape], first
    )


@layer
def resize_bilinear(
    input: Any, out_shape: Any = None, scale: Any = None, name: str | None = None, actual_shape: Any = None,
    align_corners: bool = True, align_mode: int = 1, data_format: str = "NCHW",
) -> Any:  # fmt: skip
    """image_resize by "BILINEAR"."""
    return image_resize(input, out_shape, scale, name, "BILINEAR", actual_shape, align_corners, align_mode, data_format)


@layer
def resize_trilinear(
    input: Any, out_shape: Any = None, scale: Any = None, name: str | None = None, actual_shape: Any = None,
    align_corners: bool = True, align_mode: int = 1, data_format: str = "NCDHW",
) -> Any:  # fmt: skip
    """image_resize by "TRILINEAR"."""
    return image_resize(
        input, out_shape, scale, name, "TRILINEAR", actual_shape, align_corners, align_mode, data_format
    )


@layer
def resize_nearest(
    input: Any, out_shape: Any = None, scale: Any = None, name: str | None = None, actual_shape: Any = None,
    align_corners: bool = True, data_format: str = "NCHW",
) -> Any:  # fmt: skip
    """image_resize by "NEAREST"."""
    return image_resize(input, out_shape, scale, name, "NEAREST", actual_shape, align_corners, 1, data_format)


@layer
def image_resize_short(input: Any, out_short_len: int, resample: str = "BILINEAR") -> Any:
    """Images [n, c, h, w] scaled until the shorter side is out_short_len."""
    h, w = input.shape[2:]
    short = min(h, w)
    sizes = [int(s * out_short_len / short + 0.5) for s in (h, w)]
    return image_resize(input, sizes, resample=resample)


@layer
def pixel_shuffle(x: Any, upscale_factor: int) -> Any:
    """[n, c * r^2, h, w] -> [n, c, h * r, w * r]. Source: arXiv:1609.05158."""
    return F.pixel_shuffle(x, upscale_factor)


@layer
def shuffle_channel(x: Any, group: int, name: str | None = None) -> Any:
    """Channels of `group` groups taken in turn. Source: arXiv:1707.01083."""
    return F.channel_shuffle(x, group)


@layer
def grid_sampler(x: Any, grid: Any, name: str | None = None) -> Any:
    """Images read at places of grid [n, h, w, 2], -1 to 1 from corner to corner; 0 outside."""
    return F.grid_sample(x, grid)


@layer
def affine_grid(theta: Any, out_shape: Any, name: str | None = None) -> Any:
    """Places of an image of out_shape under affine maps [n, 2, 3], -> [n, h, w, 2]."""
    return F.affine_grid(theta, out_shape)


@layer
def unfold(x: Any, kernel_sizes: Any, strides: Any = 1, paddings: Any = 0, dilations: Any = 1, name: Any = None) -> Any:
    """Each window as a column: [n, c, h, w] -> [n, c * window, windows]."""
    return F.unfold(x, kernel_sizes, strides, paddings, dilations)


__all__ = [
    "adaptive_pool2d", "adaptive_pool3d", "affine_grid", "clip_by_norm", "dropout", "grid_sampler", "image_resize",
    "image_resize_short", "l2_normalize", "lrn", "matmul", "mul", "pixel_shuffle", "pool2d", "pool3d",
    "resize_bilinear", "resize_nearest", "resize_trilinear", "shuffle_channel", "unfold",
]  # fmt: skip
