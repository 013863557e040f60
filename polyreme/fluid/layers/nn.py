"""Layers with parameters: fully connected, embedding, convolution, normalization, PReLU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError, ShapeError
from polyreme.fluid.layer import layer
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant, Normal
from polyreme.ops import arithmetic as ar
from polyreme.ops.manipulation import reshape, squeeze
from polyreme.ops.math import add_n
from polyreme.program.activations import activate
from polyreme.program.parameters import LayerParameters
from polyreme.static.nn.checks import channels
from polyreme.static.nn.normalization import prelu as prelu_of_program


@layer
def fc(
    input: Any, size: int, num_flatten_dims: int = 1, param_attr: Any = None, bias_attr: Any = None,
    act: str | None = None, name: str | None = None,
) -> Any:  # fmt: skip
    """act(sum of input_i @ w_i + b): [*kept, *features] -> [*kept, size].

    input: one Variable or several, each with a weight [product of its features, size] of its own (param_attr may be a
    list too). num_flatten_dims: how many leading dims are kept, -1 for all but the last.
    """
    parts = LayerParameters("fc", name)
    inputs = list(input) if isinstance(input, (list, tuple)) else [input]
    attrs = list(param_attr) if isinstance(param_attr, (list, tuple)) else [param_attr] * len(inputs)
    if len(attrs) != len(inputs):
        raise ConfigError(f"fluid.layers.fc: {len(attrs)} param_attrs for {len(inputs)} inputs; give one for each")
    products = [_product(parts, x, size, num_flatten_dims, attr) for x, attr in zip(inputs, attrs, strict=True)]
    total = products[0] if len(products) == 1 else add_n(products)
    bias = parts.bias(bias_attr, [size], inputs[0].dtype)
    return activate(total if bias is None else ar.add(total, bias), act)


def _product(parts: LayerParameters, x: Any, size: int, num_dims: int, attr: Any) -> Any:
    num_dims = x.ndim - 1 if num_dims == -1 else num_dims
    if not 0 < num_dims < x.ndim:
        raise ShapeError(
            f"fluid.layers.fc: num_flatten_dims={num_dims} of an input of shape {list(x.shape)}; give 1 to {x.ndim - 1}"
        )
    features = x.shape[num_dims:]
    weight = parts.parameter(attr, [-1 if min(features) < 0 else math.prod(features), size], x.dtype)
    if weight is None:
        raise ConfigError("fluid.layers.fc: param_attr=False; a fully connected layer has a weight")
    flat = x if len(features) == 1 else reshape(x, [*x.shape[:num_dims], math.prod(features)])
    return ar.matmul(flat, weight)


def rows_of(
    kind: str, input: Any, size: Sequence[int], padding_idx: int | None, param_attr: Any, dtype: Any, sparse: bool
) -> Any:  # fmt: skip
    """input's ids as rows of a table [vocabulary, width] of its own."""
    weight = LayerParameters(kind).parameter(param_attr, list(size), dtype)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += size[0]
    return F.embedding(input, weight, padding_idx, sparse=bool(sparse))


@layer
def embedding(
    input: Any, size: Sequence[int], is_sparse: bool = False, is_distributed: bool = False,
    padding_idx: int | None = None, param_attr: Any = None, dtype: Any = "float32",
) -> Any:  # fmt: skip
    """Rows of a table of shape size for ids [*b, 1] -> [*b, width].

    is_sparse: Adam with lazy_mode leaves rows not looked up as they are. is_distributed: the values are the same
    either way. padding_idx: an id whose row is zeros and is not trained.
    """
    if not input.shape or input.shape[-1] != 1:
        raise ShapeError(
            f"fluid.layers.embedding: input {list(input.shape)} does not end in a dim of 1; fluid.embedding takes it "
            "as it is"
        )
    return rows_of("embedding", squeeze(input, [-1]), size, padding_idx, param_attr, dtype, is_sparse)


def _sizes(value: Any, n: int) -> list[int]:
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)] * n


def _convolution(
    what: str, n: int, x: Any, filters: int, kernel: Any, stride: Any, padding: Any, dilation: Any, groups: int | None,
    param_attr: Any, bias_attr: Any, act: str | None, name: str | None, data_format: str,
) -> Any:  # fmt: skip
    parts = LayerParameters(what, name)
    inputs, groups = channels(f"fluid.layers.{what}", x, data_format, [n + 2]), groups or 1
    if inputs % groups or filters % groups:
        raise ShapeError(f"fluid.layers.{what}: {inputs} channels and {filters} filters in {groups} groups")
    sizes = _sizes(kernel, n)
    spread = math.sqrt(2.0 / (math.prod(sizes) * inputs)) if inputs > 0 else 1.0
    weight = parts.parameter(param_attr, [filters, inputs // groups, *sizes], x.dtype, Normal(0.0, spread))
    bias = parts.bias(bias_attr, [filters], x.dtype)
    run = F.conv2d if n == 2 else F.conv3d
    return activate(run(x, weight, bias, stride, padding, dilation, groups, data_format=data_format), act)


@layer
def conv2d(
    input: Any, num_filters: int, filter_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int | None = None, param_attr: Any = None, bias_attr: Any = None, use_cudnn: bool = True,
    act: str | None = None, name: str | None = None, data_format: str = "NCHW",
) -> Any:  # fmt: skip
    """Convolution, act(filters * input + bias): [n, c, h, w] -> [n, num_filters, h', w']."""
    return _convolution(
        "conv2d", 2, input, num_filters, filter_size, stride, padding, dilation, groups, param_attr, bias_attr, act,
        name, data_format,
    )  # fmt: skip


@layer
def conv3d(
    input: Any, num_filters: int, filter_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int | None = None, param_attr: Any = None, bias_attr: Any = None, use_cudnn: bool = True,
    act: str | None = None, name: str | None = None, data_format: str = "NCDHW",
) -> Any:  # fmt: skip
    """Convolution over three dims: [n, c, d, h, w] -> [n, num_filters, d', h', w']."""
    return _convolution(
        "conv3d", 3, input, num_filters, filter_size, stride, padding, dilation, groups, param_attr, bias_attr, act,
        name, data_format,
    )  # fmt: skip


def _transpose(
    what: str, n: int, x: Any, filters: int, out: Any, kernel: Any, padding: Any, stride: Any, dilation: Any,
    groups: int | None, param_attr: Any, bias_attr: Any, act: str | None, name: str | None, data_format: str,
) -> Any:  # fmt: skip
    parts = LayerParameters(what, name)
    inputs, groups = channels(f"fluid.layers.{what}", x, data_format, [n + 2]), groups or 1
    if kernel is None:
        kernel = _kernel_for(what, n, x, out, padding, stride, dilation, data_format)
    weight = parts.parameter(param_attr, [inputs, filters // groups, *_sizes(kernel, n)], x.dtype)
    bias = parts.bias(bias_attr, [filters], x.dtype)
    run = F.conv2d_transpose if n == 2 else F.conv3d_transpose
    made = run(
        x, weight, bias, stride, padding, dilation=dilation, groups=groups, data_format=data_format,
        output_size=None if out is None else _sizes(out, n),
    )  # fmt: skip
    return activate(made, act)


def _kernel_for(what: str, n: int, x: Any, out: Any, padding: Any, stride: Any, dilation: Any, fmt: str) -> list[int]:
    """The filter size that gives this output size."""
    if out is None or isinstance(padding, str):
        raise ConfigError(f"fluid.layers.{what}: give filter_size, or output_size and padding as numbers")
    inner = x.shape[2:] if fmt[1] == "C" else x.shape[1:-1]
    parts = zip(_sizes(out, n), inner, _sizes(padding, n), _sizes(stride, n), _sizes(dilation, n), strict=True)
    return [(o - (i - 1) * s + 2 * p - 1) // d + 1 for o, i, p, s, d in parts]


@layer
def conv2d_transpose(
    input: Any, num_filters: int, output_size: Any = None, filter_size: Any = None, padding: Any = 0, stride: Any = 1,
    dilation: Any = 1, groups: int | None = None, param_attr: Any = None, bias_attr: Any = None,
    use_cudnn: bool = True, act: str | None = None, name: str | None = None, data_format: str = "NCHW",
) -> Any:  # fmt: skip
    """The gradient of a convolution, as a layer: [n, c, h, w] -> [n, num_filters, h', w']."""
    return _transpose(
        "conv2d_transpose", 2, input, num_filters, output_size, filter_size, padding, stride, dilation, groups,
        param_attr, bias_attr, act, name, data_format,
    )  # fmt: skip


@layer
def conv3d_transpose(
    input: Any, num_filters: int, output_size: Any = None, filter_size: Any = None, padding: Any = 0, stride: Any = 1,
    dilation: Any = 1, groups: int | None = None, param_attr: Any = None, bias_attr: Any = None,
    use_cudnn: bool = True, act: str | None = None, name: str | None = None, data_format: str = "NCDHW",
) -> Any:  # fmt: skip
    """conv2d_transpose over three dims."""
    return _transpose(
        "conv3d_transpose", 3, input, num_filters, output_size, filter_size, padding, stride, dilation, groups,
        param_attr, bias_attr, act, name, data_format,
    )  # fmt: skip


@layer
def batch_norm(
    input: Any, act: str | None = None, is_test: bool = False, momentum: float = 0.9, epsilon: float = 1e-05,
    param_attr: Any = None, bias_attr: Any = None, data_layout: str = "NCHW", in_place: bool = False,
    name: str | None = None, moving_mean_name: str | None = None, moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True, use_global_stats: bool = False, fuse_with_relu: bool = False,
) -> Any:  # fmt: skip
    """act((x - mean) / sqrt(variance + epsilon) * scale + bias), channel by channel.

    Mean and variance are the batch's while training, and move momentum * old + (1 - momentum) * new; is_test,
    use_global_stats and clone(for_test=True) take the moved ones. in_place: it always is a new value here, which the
    compiler may put in the old one's memory; fuse_with_relu, which 1.5 had, says nothing of values either.
    """
    parts = LayerParameters("batch_norm", name)
    channels = input.shape[1 if data_layout == "NCHW" and input.ndim > 1 else -1]
    wide = dtypes.float32 if input.dtype == dtypes.float16 else input.dtype
    scale = parts.parameter(param_attr, [channels], wide, Constant(1.0))
    bias = parts.bias(bias_attr, [channels], wide)
    mean = parts.statistic(moving_mean_name, [channels], wide, Constant(0.0))
    variance = parts.statistic(moving_variance_name, [channels], wide, Constant(1.0))
    made = F.batch_norm(
        input, mean, variance, scale, bias, not is_test, momentum, epsilon, data_layout,
        use_global_stats=True if use_global_stats else None,
    )  # fmt: skip
    return activate(made, act)


@layer
def instance_norm(
    input: Any, epsilon: float = 1e-05, param_attr: Any = None, bias_attr: Any = None, name: str | None = None
) -> Any:
    """Each channel of each image to mean 0 and variance 1, then scaled and shifted: [n, c, ...]."""
    parts = LayerParameters("instance_norm", name)
    scale = parts.parameter(param_attr, [input.shape[1]], input.dtype, Constant(1.0))
    return F.instance_norm(input, weight=scale, bias=parts.bias(bias_attr, [input.shape[1]], input.dtype), eps=epsilon)


@layer
def layer_norm(
    input: Any, scale: bool = True, shift: bool = True, begin_norm_axis: int = 1, epsilon: float = 1e-05,
    param_attr: Any = None, bias_attr: Any = None, act: str | None = None, name: str | None = None,
) -> Any:  # fmt: skip
    """Each row of dims from begin_norm_axis on to mean 0 and variance 1, scaled and shifted element by element."""
    parts = LayerParameters("layer_norm", name)
    sizes = input.shape[begin_norm_axis:]
    count = [-1 if min(sizes, default=-1) < 0 else math.prod(sizes)]  # 1.7 keeps them as one row
    weight = parts.parameter(param_attr, count, input.dtype, Constant(1.0)) if scale else None
    bias = parts.bias(bias_attr, count, input.dtype) if shift else None
    shaped = [None if p is None else reshape(p, sizes) for p in (weight, bias)]
    return activate(F.layer_norm(input, sizes, shaped[0], shaped[1], epsilon), act)


@layer
def group_norm(
    input: Any, groups: int, epsilon: float = 1e-05, param_attr: Any = None, bias_attr: Any = None,
    act: str | None = None, data_layout: str = "NCHW", name: str | None = None,
) -> Any:  # fmt: skip
    """Groups of channels to mean 0 and variance 1, then scaled and shifted channel by channel."""
    parts = LayerParameters("group_norm", name)
    size = channels("fluid.layers.group_norm", input, data_layout, (2, 3, 4, 5))
    weight = parts.parameter(param_attr, [size], input.dtype, Constant(1.0))
    bias = parts.bias(bias_attr, [size], input.dtype)
    return activate(F.group_norm(input, groups, epsilon, weight, bias, data_layout), act)


@layer
def prelu(x: Any, mode: str, param_attr: Any = None, name: str | None = None) -> Any:
    """max(0, x) + slope * min(0, x), one slope in all, one a "channel" [n, c, ...], or one an "element"."""
    return prelu_of_program(x, mode, param_attr, name=name)


@layer
def bilinear_tensor_product(
    x: Any, y: Any, size: int, act: str | None = None, name: str | None = None, param_attr: Any = None,
    bias_attr: Any = None,
) -> Any:  # fmt: skip
    """x W_i y for each i of size: [n, a], [n, b] -> [n, size]."""
    parts = LayerParameters("bilinear_tensor_product", name)
    weight = parts.parameter(param_attr, [size, x.shape[1], y.shape[1]], x.dtype)
    bias = parts.bias(bias_attr, [1, size], x.dtype)
    return activate(F.bilinear(x, y, weight, bias), act)


__all__ = [
    "batch_norm", "bilinear_tensor_product", "conv2d", "conv2d_transpose", "conv3d", "conv3d_transpose", "embedding",
    "fc", "group_norm", "instance_norm", "layer_norm", "prelu",
]  # fmt: skip
