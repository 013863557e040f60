"""Layer functions that convolve: conv2d, conv3d, their transposes, and deform_conv2d."""

from __future__ import annotations

import math
from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.initializer import Normal
from polyreme.nn.layers.conv import sizes_of
from polyreme.ops.windows import deformable
from polyreme.program.activations import activation
from polyreme.program.parameters import LayerParameters
from polyreme.static.nn.checks import channels


def conv2d(
    input: Any,
    num_filters: int,
    filter_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Any:
    """act(cross-correlation with num_filters learned kernels + bias), as nn.Conv2D: [n, c, h, w] -> [n, f, h', w'].

    use_cudnn: XLA chooses how to convolve, so it changes nothing. Initial weights: Normal(0, sqrt(2 / (kernel * c))).
    """
    return _conv("conv2d", 2, input, num_filters, filter_size, stride, padding, dilation, groups, param_attr, bias_attr,
                 act, name, data_format)  # fmt: skip


def conv3d(
    input: Any,
    num_filters: int,
    filter_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCDHW",
) -> Any:
    """conv2d over three dims: [n, c, d, h, w] -> [n, f, d', h', w']."""
    return _conv("conv3d", 3, input, num_filters, filter_size, stride, padding, dilation, groups, param_attr, bias_attr,
                 act, name, data_format)  # fmt: skip


def _conv(
    kind: str, spatial: int, x: Any, filters: int, filter_size: Any, stride: Any, padding: Any, dilation: Any,
    groups: int | None, param_attr: Any, bias_attr: Any, act: str | None, name: str | None, data_format: str,
) -> Any:  # fmt: skip
    after = activation(act)
    weight, bias, parts = _kernel(
        kind, spatial, x, filters, filter_size, groups, param_attr, bias_attr, name, data_format
    )
    return after(getattr(F, kind)(x, weight, bias, stride, padding, dilation, parts, data_format))


def _kernel(
    kind: str, spatial: int, x: Any, filters: int, filter_size: Any, groups: int | None, param_attr: Any,
    bias_attr: Any, name: str | None, data_format: str,
) -> tuple[Any, Any, int]:  # fmt: skip
    """(weight, bias, groups)."""
    kernel = sizes_of(filter_size, spatial, f"{kind}: filter_size")
    parameters, parts, have = _parts(kind, spatial, x, filters, groups, param_attr, name, data_format)
    spread = Normal(0.0, math.sqrt(2.0 / (have * math.prod(kernel)))) if have > 0 else None
    weight = parameters.parameter(param_attr, [filters, have // parts, *kernel], x.dtype, spread)
    return weight, parameters.bias(bias_attr, [filters], x.dtype), parts


def deform_conv2d(
    x: Any,
    offset: Any,
    mask: Any,
    num_filters: int,
    filter_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    deformable_groups: int = 1,
    im2col_step: int = 1,
    weight_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
) -> Any:
    """vision.ops.deform_conv2d with num_filters learned kernels + bias: [n, c, h, w] -> [n, f, h', w'].

    mask: None for version 1. im2col_step: XLA chooses how many images go together, so it changes nothing.
    """
    weight, bias, parts = _kernel(
        "deform_conv2d", 2, x, num_filters, filter_size, groups, weight_attr, bias_attr, name, "NCHW"
    )
    return deformable.deform_conv2d(x, offset, weight, bias, stride, padding, dilation, deformable_groups, parts, mask)


def _parts(
    kind: str, spatial: int, x: Any, filters: int, groups: int | None, attr: Any, name: str | None, data_format: str
) -> tuple[LayerParameters, int, int]:
    """(parameters, groups, channels)."""
    parts = 1 if groups is None else groups
    have = channels(kind, x, data_format, [spatial + 2])
    if attr is False:
        raise ConfigError(f"{kind}: param_attr=False leaves no kernel; leave it out")
    if not isinstance(parts, int) or parts < 1 or filters < 1 or filters % parts or (have > 0 and have % parts):
        raise ConfigError(f"{kind}: groups={groups} must divide the {have} channels and num_filters={filters}")
    return LayerParameters(kind, name), parts, have


def conv2d_transpose(
    input: Any,
    num_filters: int,
    output_size: Any = None,
    filter_size: Any = None,
    padding: Any = 0,
    stride: Any = 1,
    dilation: Any = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Any:
    """act(the transpose of conv2d's map + bias), as nn.Conv2DTranspose: [n, c, h, w] -> [n, f, h', w'].

    filter_size: may be left out if output_size is given; it is then the one that leads there. use_cudnn: as in conv2d.
    """
    return _transpose("conv2d_transpose", 2, input, num_filters, output_size, filter_size, padding, stride, dilation,
                      groups, param_attr, bias_attr, act, name, data_format)  # fmt: skip


def conv3d_transpose(
    input: Any,
    num_filters: int,
    output_size: Any = None,
    filter_size: Any = None,
    padding: Any = 0,
    stride: Any = 1,
    dilation: Any = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCDHW",
) -> Any:
    """conv2d_transpose over three dims."""
    return _transpose("conv3d_transpose", 3, input, num_filters, output_size, filter_size, padding, stride, dilation,
                      groups, param_attr, bias_attr, act, name, data_format)  # fmt: skip


def _transpose(
    kind: str, spatial: int, x: Any, filters: int, output_size: Any, filter_size: Any, padding: Any, stride: Any,
    dilation: Any, groups: int | None, param_attr: Any, bias_attr: Any, act: str | None, name: str | None,
    data_format: str,
) -> Any:  # fmt: skip
    after = activation(act)
    parameters, parts, have = _parts(kind, spatial, x, filters, groups, param_attr, name, data_format)
    sizes = None if output_size is None else sizes_of(output_size, spatial, f"{kind}: output_size")
    if filter_size is None:
        filter_size = _leading_to(kind, spatial, x, sizes, padding, stride, dilation, data_format)
    kernel = sizes_of(filter_size, spatial, f"{kind}: filter_size")
    weight = parameters.parameter(param_attr, [have, filters // parts, *kernel], x.dtype)
    bias = parameters.bias(bias_attr, [filters], x.dtype)
    return after(getattr(F, kind)(x, weight, bias, stride, padding, 0, dilation, parts, sizes, data_format))


def _leading_to(
    kind: str, spatial: int, x: Any, sizes: list[int] | None, padding: Any, stride: Any, dilation: Any, data_format: str
) -> list[int]:
    """The kernel k for these sizes: size' = (size - 1) * stride - 2 * padding + dilation * (k - 1) + 1."""
    if sizes is None:
        raise ConfigError(f"{kind}: give filter_size, output_size or both")
    pads = [padding] * spatial if isinstance(padding, int) else list(padding)
    start = 2 if data_format[1] == "C" else 1
    have = x.shape[start : start + spatial]
    if -1 in have or len(pads) != spatial or not all(isinstance(p, int) for p in pads):
        raise ConfigError(
            f"{kind}: filter_size cannot be found from output_size {sizes} with input {list(x.shape)} and padding "
            f"{padding!r}; give it"
        )
    steps, spreads = (sizes_of(v, spatial, f"{kind}: stride and dilation") for v in (stride, dilation))
    rest = zip(sizes, have, steps, pads, spreads, strict=True)
    return [(want - (n - 1) * s + 2 * p - 1) // d + 1 for want, n, s, p, d in rest]
