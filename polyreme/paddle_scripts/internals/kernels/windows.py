"""Kernels of convolutions, pools, interpolation and columns of windows."""

from __future__ import annotations

from typing import Any

from polyreme import api
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.ops import manipulation
from polyreme.paddle_scripts.internals.kernels.registry import Kernels, listing, refuse

KERNELS: Kernels = {}
_kernel = listing(KERNELS)


@_kernel
def _pad3d(x: Any, paddings: Any, mode: str, pad_value: float, data_format: str) -> Any:
    return F.pad(x, paddings, mode, pad_value, data_format)


def _padding(paddings: Any, padding_algorithm: str) -> Any:
    return padding_algorithm if padding_algorithm in ("SAME", "VALID") else paddings


@_kernel
def _conv2d(
    x: Any, filter: Any, strides: Any, paddings: Any, padding_algorithm: str, dilations: Any, groups: int,
    data_format: str,
) -> Any:  # fmt: skip
    return _depthwise_conv2d_bias(x, filter, None, strides, paddings, padding_algorithm, groups, dilations, data_format)


@_kernel
def _depthwise_conv2d(
    x: Any, filter: Any, strides: Any, paddings: Any, padding_algorithm: str, groups: int, dilations: Any,
    data_format: str,
) -> Any:  # fmt: skip
    return _depthwise_conv2d_bias(x, filter, None, strides, paddings, padding_algorithm, groups, dilations, data_format)


@_kernel
def _depthwise_conv2d_bias(
    x: Any, filter: Any, bias: Any, strides: Any, paddings: Any, padding_algorithm: str, groups: int, dilations: Any,
    data_format: str,
) -> Any:  # fmt: skip
    padding = _padding(paddings, padding_algorithm)
    return F.conv2d(x, filter, bias, strides, padding, dilations, groups, data_format)


@_kernel
def _conv3d(
    x: Any, filter: Any, strides: Any, paddings: Any, padding_algorithm: str, groups: int, dilations: Any,
    data_format: str,
) -> Any:  # fmt: skip
    padding = _padding(paddings, padding_algorithm)
    return F.conv3d(x, filter, None, strides, padding, dilations, groups, _of_dims(data_format, 5))


@_kernel
def _conv2d_transpose(
    x: Any, filter: Any, strides: Any, paddings: Any, output_padding: Any, output_size: Any, padding_algorithm: str,
    groups: int, dilations: Any, data_format: str,
) -> Any:  # fmt: skip
    return _conv2d_transpose_bias(
        x, filter, None, strides, paddings, output_padding, output_size, padding_algorithm, groups, dilations,
        data_format,
    )  # fmt: skip


KERNELS["depthwise_conv2d_transpose"] = _conv2d_transpose


@_kernel
def _conv2d_transpose_bias(
    x: Any, filter: Any, bias: Any, strides: Any, paddings: Any, output_padding: Any, output_size: Any,
    padding_algorithm: str, groups: int, dilations: Any, data_format: str,
) -> Any:  # fmt: skip
    return F.conv2d_transpose(
        x, filter, bias, strides, _padding(paddings, padding_algorithm), output_padding or 0, dilations, groups,
        _sizes(output_size), data_format,
    )  # fmt: skip


@_kernel
def _conv3d_transpose(
    x: Any, filter: Any, strides: Any, paddings: Any, output_padding: Any, output_size: Any, padding_algorithm: str,
    groups: int, dilations: Any, data_format: str,
) -> Any:  # fmt: skip
    return F.conv3d_transpose(
        x, filter, None, strides, _padding(paddings, padding_algorithm), output_padding or 0, groups, dilations,
        _sizes(output_size), _of_dims(data_format, 5),
    )  # fmt: skip


def _sizes(sizes: Any) -> Any:
    """Sizes, None for an empty list of them."""
    return None if isinstance(sizes, (list, tuple)) and not sizes else sizes


def _of_dims(data_format: str, ndim: int) -> str:
    """The layout of so many dims: kernels say NCHW and NHWC for all of them."""
    dims = "DHW"[5 - ndim :]
    return f"NC{dims}" if data_format in ("NCHW", "NCDHW", "NCW") else f"N{dims}C"


def _pooled(
    name: str, x: Any, kernel_size: Any, strides: Any, paddings: Any, ceil_mode: bool, exclusive: bool,
    data_format: str, pooling_type: str, global_pooling: bool, adaptive: bool, padding_algorithm: str,
) -> Any:  # fmt: skip
    ndim = x.ndim
    data_format = _of_dims(data_format, ndim)
    if pooling_type not in ("avg", "max"):
        raise ConfigError(f"_C_ops.{name}: pooling_type={pooling_type!r}; it is 'avg' or 'max'")
    suffix = f"pool{ndim - 2}d"
    if global_pooling or adaptive:
        sizes = [1] * (ndim - 2) if global_pooling else kernel_size
        if pooling_type == "avg":
            return getattr(F, f"adaptive_avg_{suffix}")(x, sizes, data_format)
        if data_format.endswith("C"):
            rows = getattr(F, f"adaptive_max_{suffix}")(manipulation.moveaxis(x, -1, 1), sizes)
            return manipulation.moveaxis(rows, 1, -1)
        return getattr(F, f"adaptive_max_{suffix}")(x, sizes)
    padding = _padding(paddings, padding_algorithm)
    if pooling_type == "max":
        pool = getattr(F, f"max_{suffix}")
        return pool(x, kernel_size, strides, padding, ceil_mode=ceil_mode, data_format=data_format)
    pool = getattr(F, f"avg_{suffix}")
    return pool(x, kernel_size, strides, padding, ceil_mode, exclusive, data_format=data_format)


@_kernel
def _pool2d(
    x: Any, kernel_size: Any, strides: Any, paddings: Any, ceil_mode: bool, exclusive: bool, data_format: str,
    pooling_type: str, global_pooling: bool, adaptive: bool, padding_algorithm: str, use_cudnn: bool = True,
) -> Any:  # fmt: skip
    return _pooled(
        "pool2d", x, kernel_size, strides, paddings, ceil_mode, exclusive, data_format, pooling_type, global_pooling,
        adaptive, padding_algorithm,
    )  # fmt: skip


@_kernel
def _pool3d(
    x: Any, kernel_size: Any, strides: Any, paddings: Any, ceil_mode: bool, exclusive: bool, data_format: str,
    pooling_type: str, global_pooling: bool, adaptive: bool, padding_algorithm: str, use_cudnn: bool = True,
) -> Any:  # fmt: skip
    return _pooled(
        "pool3d", x, kernel_size, strides, paddings, ceil_mode, exclusive, data_format, pooling_type, global_pooling,
        adaptive, padding_algorithm,
    )  # fmt: skip


def _pooled_with_index(
    x: Any, kernel_size: Any, strides: Any, paddings: Any, global_pooling: bool = False, adaptive: bool = False,
    ceil_mode: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    suffix = f"pool{x.ndim - 2}d"
    if global_pooling or adaptive:
        sizes = [1] * (x.ndim - 2) if global_pooling else kernel_size
        out, indices = getattr(F, f"adaptive_max_{suffix}")(x, sizes, return_mask=True)
    else:
        out, indices = getattr(F, f"max_{suffix}")(x, kernel_size, strides, paddings, True, ceil_mode)
    return out, api.cast(indices, "int32")


KERNELS["max_pool2d_with_index"] = KERNELS["max_pool3d_with_index"] = _pooled_with_index


def _fractional(name: str) -> Any:
    def run(x: Any, output_size: Any, kernel_size: Any, random_u: float, return_mask: bool) -> tuple[Any, Any]:
        sizes = kernel_size if any(kernel_size) else None
        out = getattr(F, name)(x, output_size, sizes, random_u, return_mask)
        return out if return_mask else (out, None)

    return run


for _name in ("fractional_max_pool2d", "fractional_max_pool3d"):
    KERNELS[_name] = _fractional(_name)


@_kernel
def _lp_pool2d(
    x: Any, kernel_size: Any, strides: Any, paddings: Any, ceil_mode: bool, exclusive: bool, data_format: str,
    pooling_type: str, global_pooling: bool, adaptive: bool, padding_algorithm: str, norm_type: float,
) -> Any:  # fmt: skip
    refuse("lp_pool2d", global_pooling=global_pooling, adaptive=adaptive)
    padding = _padding(paddings, padding_algorithm)
    return F.lp_pool2d(x, norm_type, kernel_size, strides, padding, ceil_mode, data_format)


@_kernel
def _unpool(
    x: Any, indices: Any, ksize: Any, strides: Any, padding: Any, output_size: Any, data_format: str = "NCHW"
) -> Any:
    return F.max_unpool2d(x, indices, ksize, strides, padding, data_format, _sizes(output_size))


@_kernel
def _unpool3d(
    x: Any, indices: Any, ksize: Any, strides: Any, paddings: Any, output_size: Any, data_format: str = "NCDHW"
) -> Any:
    return F.max_unpool3d(x, indices, ksize, strides, paddings, data_format, _sizes(output_size))


@_kernel
def _unfold(x: Any, kernel_sizes: Any, strides: Any, paddings: Any, dilations: Any) -> Any:
    return F.unfold(x, kernel_sizes, strides, paddings, dilations)


def _interpolated(kernel: str, mode: str) -> Any:
    def run(
        x: Any, out_size: Any = None, size_tensor: Any = None, scale_tensor: Any = None, data_format: str = "NCHW",
        out_d: int = 0, out_h: int = 0, out_w: int = 0, scale: Any = (), interp_method: str = mode,
        align_corners: bool = True, align_mode: int = 1,
    ) -> Any:  # fmt: skip
        if interp_method != mode:
            raise ConfigError(f"_C_ops.{kernel}: interp_method={interp_method!r}; this kernel is {mode!r}")
        sizes: Any = size_tensor or out_size
        factors: Any = scale_tensor if scale_tensor is not None else list(scale) or None
        if sizes is not None and factors is not None:
            raise ConfigError(f"_C_ops.{kernel}: sizes and scales; give one of them")
        if sizes is None and factors is None:
            sizes = [out_d, out_h, out_w][5 - x.ndim :]
        return F.interpolate(x, sizes, factors, mode, align_corners, align_mode, _of_dims(data_format, x.ndim))

    return run


for _name in ("linear", "bilinear", "trilinear", "bicubic", "nearest"):
    KERNELS[f"{_name}_interp"] = _interpolated(f"{_name}_interp", _name)
