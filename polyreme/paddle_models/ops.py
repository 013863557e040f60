"""What each type of operation of PaddlePaddle's programs is here: a table of calls of our ops.

The types and attributes are those that files written by PaddlePaddle 1.8 to 3.3.1 have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import polyreme.ops  # noqa: F401  declares them
from polyreme.core import dtype as dtypes
from polyreme.core.op import OPS
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError
from polyreme.ops.resample import nearest_corners
from polyreme.paddle_models.call import PaddleCall, Results, as_tensor
from polyreme.paddle_models.fluid_ops import FLUID_TABLE
from polyreme.paddle_models.rules import Rule, layout_of, plain

# numbers by numbers


def elementwise(op: str) -> Rule:
    """An op of two Tensors, the second of which is aligned with the first at an axis; -1: at the end."""

    def rule(call: PaddleCall) -> Results:
        x, y = call.tensor("X"), call.tensor("Y")
        axis = call.attribute("axis", -1)
        if axis != -1 and y.ndim < x.ndim:
            y = _aligned(y, x.ndim, axis)
        elif axis != -1 and x.ndim < y.ndim:
            x = _aligned(x, y.ndim, axis)
        return OPS[op](x, y)

    return rule


def _aligned(y: Tensor, ndim: int, axis: int) -> Tensor:
    after = ndim - axis - y.ndim
    if after < 0:  # dims of 1 at the end are not counted
        y = OPS["squeeze"](y, list(range(y.ndim + after, y.ndim)))
        after = 0
    return OPS["reshape"](y, [*y.shape, *[1] * after])


def _scale(call: PaddleCall) -> Results:
    scale = _number(call, "ScaleTensor", "scale", 1.0)
    x, bias = call.tensor("X"), call.attribute("bias", 0.0)
    is_number = not isinstance(scale, Tensor)
    if (
        is_number and dtypes.is_integer(x.dtype) and scale == int(scale) and bias == int(bias)
    ):  # the numbers of integers are floats
        scale, bias = int(scale), int(bias)
    return OPS["cast"](OPS["scale"](x, scale, bias, call.attribute("bias_after_scale", True)), x.dtype)


def _number(call: PaddleCall, slot: str, attribute: str, default: Any = None) -> Any:
    """A number from a slot, else from an attribute; a Tensor where it depends on what is fed."""
    if not call.has(slot):
        return call.attribute(attribute, default)
    call.ignore(attribute)
    constant = call.constant(slot)
    return call.tensor(slot) if constant is None else constant


def _clip(call: PaddleCall) -> Results:
    low, high = _number(call, "Min", "min"), _number(call, "Max", "max")
    return OPS["clip"](call.tensor("X"), low, high)


def _pow(call: PaddleCall) -> Results:
    return OPS["pow"](call.tensor("X"), _number(call, "FactorTensor", "factor", 1.0))


def _hard_swish(call: PaddleCall) -> Results:
    shape = tuple(call.attribute(n, d) for n, d in (("threshold", 6.0), ("scale", 6.0), ("offset", 3.0)))
    if shape == (6.0, 6.0, 3.0):
        return OPS["hardswish"](call.tensor("X"))
    x, (threshold, scale, offset) = call.tensor("X"), shape
    return x * OPS["clip"](x + offset, 0.0, threshold) / scale


def _relu6(call: PaddleCall) -> Results:
    return OPS["clip"](call.tensor("X"), 0.0, call.attribute("threshold", 6.0))


def _swish(call: PaddleCall) -> Results:
    x, beta = call.tensor("X"), call.attribute("beta", 1.0)
    return OPS["silu"](x) if beta == 1 else x * OPS["sigmoid"](x * beta)


def _mish(call: PaddleCall) -> Results:
    if call.attribute("threshold", 20.0) != 20:
        raise CheckpointError(f"has threshold={call.attribute('threshold')}; 20 is known")
    return OPS["mish"](call.tensor("X"))


def _prelu(call: PaddleCall) -> Results:
    x, alpha, mode = call.tensor("X"), call.tensor("Alpha"), call.attribute("mode", "all")
    if mode == "element":
        alpha = OPS["reshape"](alpha, [1, *x.shape[1:]])
        return OPS["where"](x > 0, x, x * alpha)
    return OPS["prelu"](x, OPS["reshape"](alpha, [-1]), call.attribute("data_format", "NCHW"))


def _cast(call: PaddleCall) -> Results:
    return OPS["cast"](call.tensor("X"), call.dtype("out_dtype"))


def _add_n(call: PaddleCall) -> Results:
    first, *others = call.tensors("X")
    for other in others:
        first = first + other
    return first


# products


def _matmul(call: PaddleCall) -> Results:
    x, y = call.tensor("X"), call.tensor("Y")
    flags = [
        call.attribute(a, call.attribute(b, False)) for a, b in (("trans_x", "transpose_X"), ("trans_y", "transpose_Y"))
    ]
    if call.attribute("head_number", 1) != 1:
        raise CheckpointError(f"multiplies {call.attribute('head_number')} heads apart, which is not known")
    product, alpha = OPS["matmul"](x, y, *flags), call.attribute("alpha", 1.0)
    return product if alpha == 1 else product * alpha


def _flat_product(x: Tensor, y: Tensor, x_dims: int, y_dims: int) -> Tensor:
    """The product of x, of which x_dims dims are rows, and y, of which y_dims are."""
    flat = OPS["matmul"](_two_dims(x, x_dims), _two_dims(y, y_dims))
    return OPS["reshape"](flat, [*x.shape[:x_dims], *y.shape[y_dims:]])


def _two_dims(x: Tensor, rows: int) -> Tensor:
    return OPS["reshape"](x, [math.prod(x.shape[:rows]), math.prod(x.shape[rows:])])


def _mul(call: PaddleCall) -> Results:
    dims = call.attribute("x_num_col_dims", 1), call.attribute("y_num_col_dims", 1)
    return _flat_product(call.tensor("X"), call.tensor("Y"), *dims)


def _fc(call: PaddleCall) -> Results:
    result = _flat_product(call.tensor("Input"), call.tensor("W"), call.attribute("in_num_col_dims", 1), 1)
    bias, activation = call.optional("Bias"), call.attribute("activation_type", "")
    result = result if bias is None else result + OPS["reshape"](bias, [-1])
    if activation not in ("", "relu"):
        raise CheckpointError(f"has activation_type={activation!r}; relu is known")
    return OPS["relu"](result) if activation else result


# windows


def _padding(call: PaddleCall) -> Any:
    algorithm, sizes = call.attribute("padding_algorithm", "EXPLICIT"), call.attribute("paddings", [0, 0])
    return sizes if algorithm == "EXPLICIT" else algorithm


def _conv(op: str, ndim: int) -> Rule:
    def rule(call: PaddleCall) -> Results:
        ones = [1] * ndim
        settings = {"stride": "strides", "dilation": "dilations"}
        return {
            "Output": OPS[op](
                call.tensor("Input"), call.tensor("Filter"), call.optional("Bias"), padding=_padding(call),
                groups=call.attribute("groups", 1), data_format=layout_of(call, known=_LAYOUTS[ndim]),
                **{ours: call.attribute(theirs, ones) for ours, theirs in settings.items()},
            )
        }  # fmt: skip

    return rule


_LAYOUTS = {1: ("NCL", "NLC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


def _conv_transpose(op: str, ndim: int) -> Rule:
    def rule(call: PaddleCall) -> Results:
        ones = [1] * ndim
        size = call.numbers("OutputSizeTensor") or call.attribute("output_size", []) or None
        return {
            "Output": OPS[op](
                call.tensor("Input"), call.tensor("Filter"), call.optional("Bias"),
                stride=call.attribute("strides", ones), padding=_padding(call),
                output_padding=call.attribute("output_padding", []) or 0, output_size=size,
                groups=call.attribute("groups", 1), dilation=call.attribute("dilations", ones),
                data_format=layout_of(call, known=_LAYOUTS[ndim]),
            )
        }  # fmt: skip

    return rule


def _pool(ndim: int) -> Rule:
    def rule(call: PaddleCall) -> Results:
        x, kind, layout = call.tensor("X"), call.attribute("pooling_type", "max"), layout_of(call, known=_LAYOUTS[ndim])
        size, exclusive = _integers(call, ("Sizes",), "ksize"), call.attribute("exclusive", True)
        settings = {"stride": call.attribute("strides", [1] * ndim), "padding": _padding(call)}
        settings["ceil_mode"] = call.attribute("ceil_mode", False)
        if call.attribute("global_pooling", False):
            dims = list(range(2, 2 + ndim)) if layout == _LAYOUTS[ndim][0] else list(range(1, 1 + ndim))
            return OPS["max" if kind == "max" else "mean"](x, dims, True)
        if call.attribute("adaptive", False):
            if kind == "max":
                if layout != _LAYOUTS[ndim][0]:
                    raise CheckpointError(f"is an adaptive maximum in {layout}; {_LAYOUTS[ndim][0]} is known")
                return OPS[f"adaptive_max_pool{ndim}d"](x, size)
            return OPS[f"adaptive_avg_pool{ndim}d"](x, size, layout)
        if kind == "max":
            return OPS[f"max_pool{ndim}d"](x, size, data_format=layout, **settings)
        return OPS[f"avg_pool{ndim}d"](x, size, exclusive=exclusive, data_format=layout, **settings)

    return rule


def _pool_with_index(ndim: int) -> Rule:
    def rule(call: PaddleCall) -> Results:
        x, size = call.tensor("X"), call.attribute("ksize", [])
        stride, padding = call.attribute("strides", [1] * ndim), call.attribute("paddings", [0] * ndim)
        if call.attribute("adaptive", False) or call.attribute("global_pooling", False):
            size = [1] * ndim if call.attribute("global_pooling", False) else size
            values, index = OPS[f"adaptive_max_pool{ndim}d"](x, size, True)
        else:
            ceil = call.attribute("ceil_mode", False)
            values, index = OPS[f"max_pool{ndim}d"](x, size, stride, padding, True, ceil)
        return {"Out": values, "Mask": index}

    return rule


def _interpolate(mode: str, ndim: int, by_scale: bool) -> Rule:
    """by_scale: whether where values come from follows from the scale, not from the sizes, as in the newer types."""

    def rule(call: PaddleCall) -> Results:
        x, layout = call.tensor("X"), layout_of(call, "data_layout", _LAYOUTS[ndim])
        names = {1: ("out_w",), 2: ("out_h", "out_w"), 3: ("out_d", "out_h", "out_w")}[ndim]
        call.ignore("out_d", "out_h", "out_w", "interp_method")
        scale: Any = call.numbers("Scale") or call.attribute("scale", [])
        scale = [scale] if isinstance(scale, float) else list(scale)
        size = call.numbers("SizeTensor") or call.numbers("OutSize")
        settings = {"mode": mode, "align_corners": call.attribute("align_corners", False), "data_format": layout}
        settings["align_mode"] = call.attribute("align_mode", 1)
        if size is None and any(s > 0 for s in scale):
            scale = scale * ndim if len(scale) == 1 else scale
            if by_scale:
                return OPS["interpolate"](x, None, scale, **settings)
            inner = x.shape[2:] if layout == _LAYOUTS[ndim][0] else x.shape[1:-1]
            size = [int(n * s) for n, s in zip(inner, scale, strict=True)]
        size = [call.attribute(name, -1) for name in names] if size is None else [int(n) for n in size]
        if mode == "nearest" and settings["align_corners"]:
            return nearest_corners(x, size, 2 if layout == _LAYOUTS[ndim][0] else 1)
        return OPS["interpolate"](x, size, **settings)

    return rule


# norms


def _batch_norm(call: PaddleCall) -> Results:
    modes = [call.attribute(name, False) for name in ("is_test", "use_global_stats")]
    if not any(modes):
        raise CheckpointError(
            "takes the statistics of the batch: the program is one for training, save it for inference"
        )
    names = ("X", "Mean", "Variance", "Scale", "Bias")
    layout = layout_of(call, "data_layout")
    call.ignore("MomentumTensor")
    return {"Y": OPS["batch_norm_eval"](*map(call.tensor, names), call.attribute("epsilon", 1e-5), layout)}


def _layer_norm(call: PaddleCall) -> Results:
    x, begin = call.tensor("X"), call.attribute("begin_norm_axis", 1)
    shape = list(x.shape[begin:])
    scale, bias = (None if t is None else OPS["reshape"](t, shape) for t in map(call.optional, ("Scale", "Bias")))
    return {"Y": OPS["layer_norm"](x, shape, scale, bias, call.attribute("epsilon", 1e-5))}


def _instance_norm(call: PaddleCall) -> Results:
    settings = {"weight": call.optional("Scale"), "bias": call.optional("Bias")}
    return {"Y": OPS["instance_norm"](call.tensor("X"), eps=call.attribute("epsilon", 1e-5), **settings)}


def _group_norm(call: PaddleCall) -> Results:
    x, scale, bias = call.tensor("X"), call.optional("Scale"), call.optional("Bias")
    groups, epsilon = call.attribute("groups", 1), call.attribute("epsilon", 1e-5)
    return {"Y": OPS["group_norm"](x, groups, epsilon, scale, bias, layout_of(call, "data_layout"))}


def _unit_length(call: PaddleCall) -> Results:
    x, axis, epsilon = call.tensor("X"), call.attribute("axis", -1), call.attribute("epsilon", 1e-10)
    norm = OPS["sqrt"](OPS["sum"](x * x, axis, keepdim=True) + epsilon)
    return {"Out": x / norm, "Norm": norm}


def _p_norm(call: PaddleCall) -> Results:
    axis = None if call.attribute("asvector", False) else call.attribute("axis", -1)
    call.ignore("axis", "epsilon")
    return OPS["norm"](call.tensor("X"), call.attribute("porder", 2.0), axis, call.attribute("keepdim", False))


# shapes


def _integers(call: PaddleCall, slots: Sequence[str], attribute: str) -> list[int]:
    """Numbers from the first slot that has some, or an attribute."""
    for slot in slots:
        numbers = call.numbers(slot)
        if numbers is not None:
            call.ignore(attribute, *slots)
            return [int(n) for n in numbers]
    value = call.attribute(attribute, [])
    return [int(n) for n in value] if isinstance(value, (list, tuple)) else [int(value)]


def _shape(call: PaddleCall) -> Results:
    return np.array(call.tensor("Input").shape, np.int32)


def _shape64(call: PaddleCall) -> Results:
    return np.array(call.tensor("Input").shape, np.int64)


def _size(call: PaddleCall) -> Results:
    return np.array(math.prod(call.tensor("Input").shape), np.int64)


def _reshape(call: PaddleCall) -> Results:
    x, shape = call.tensor("X"), _integers(call, ("ShapeTensor", "Shape"), "shape")
    return OPS["reshape"](x, [x.shape[dim] if size == 0 else size for dim, size in enumerate(shape)])


def _squeeze(call: PaddleCall) -> Results:
    x, dims = call.tensor("X"), _integers(call, ("Axes",), "axes")
    dims = [d for d in dims if x.shape[d] == 1] if dims else [d for d, n in enumerate(x.shape) if n == 1]
    return OPS["squeeze"](x, dims) if dims else x


def _unsqueeze(call: PaddleCall) -> Results:
    return OPS["unsqueeze"](call.tensor("X"), _integers(call, ("AxesTensorList", "AxesTensor"), "axes"))


def _flatten(call: PaddleCall) -> Results:
    return OPS["reshape"](
        x := call.tensor("X"), [math.prod(x.shape[: (axis := call.attribute("axis", 1))]), math.prod(x.shape[axis:])]
    )


def _transpose(call: PaddleCall) -> Results:
    call.ignore("data_format")  # a hint for kernels
    return OPS["transpose"](call.tensor("X"), call.attribute("axis", []))


def _concat(call: PaddleCall) -> Results:
    return OPS["concat"](call.tensors("X"), _integers(call, ("AxisTensor",), "axis")[0])


def _split(call: PaddleCall) -> Results:
    x, (axis, *_) = call.tensor("X"), _integers(call, ("AxisTensor",), "axis") or [0]
    sections = _integers(call, ("SectionsTensorList",), "sections")
    return {"Out": OPS["split"](x, sections or call.attribute("num", 0), axis)}


def _stack(call: PaddleCall) -> Results:
    return {"Y": OPS["stack"](call.tensors("X"), call.attribute("axis", 0))}


def _unstack(call: PaddleCall) -> Results:
    call.ignore("num")
    return {"Y": OPS["unstack"](call.tensor("X"), call.attribute("axis", 0))}


def _unbind(call: PaddleCall) -> Results:
    return {"Out": OPS["unstack"](call.tensor("X"), call.attribute("axis", 0))}


def _slice(call: PaddleCall) -> Results:
    x, axes = call.tensor("Input"), call.attribute("axes", [])
    starts = _integers(call, ("StartsTensor", "StartsTensorList"), "starts")
    ends = _integers(call, ("EndsTensor", "EndsTensorList"), "ends")
    result, dropped = OPS["slice"](x, axes, starts, ends), call.attribute("decrease_axis", [])
    return OPS["squeeze"](result, dropped) if dropped else result


def _strided_slice(call: PaddleCall) -> Results:
    x, axes = call.tensor("Input"), call.attribute("axes", [])
    starts, ends, strides = (
        _integers(call, (f"{name}Tensor", f"{name}TensorList"), name.lower()) for name in ("Starts", "Ends", "Strides")
    )
    result, dropped = OPS["strided_slice"](x, axes, starts, ends, strides), call.attribute("decrease_axis", [])
    return OPS["squeeze"](result, dropped) if dropped else result


def _set_value(call: PaddleCall) -> Results:
    x, axes = call.tensor("Input"), call.attribute("axes", [])
    starts, ends, steps = (_integers(call, (f"{n}TensorList",), n.lower()) for n in ("Starts", "Ends", "Steps"))
    dropped = call.attribute("decrease_axes", [])
    if call.attribute("none_axes", []):
        raise CheckpointError("sets values along new dims, which is not known")
    index: list[Any] = [slice(None)] * x.ndim
    for dim, start, end, step in zip(axes, starts, ends, steps or [1] * len(axes), strict=True):
        index[dim] = start if dim in dropped else slice(start, end, step)
    if call.has("ValueTensor"):
        value = call.tensor("ValueTensor")
        call.ignore("shape", "values", "dtype")
    else:
        numbers, shape = np.array(call.attribute("values", [])), call.attribute("shape", [])
        value = as_tensor(numbers.astype(call.dtype("dtype", x.dtype)).reshape(shape if numbers.size > 1 else ()))
    result = x.clone()
    result[tuple(index)] = OPS["cast"](value, x.dtype)
    return result


def _expand(call: PaddleCall) -> Results:
    return OPS["expand"](call.tensor("X"), _integers(call, ("Shape", "expand_shapes_tensor"), "shape"))


def _expand_as(call: PaddleCall) -> Results:
    shape = list(call.tensor("Y").shape) if call.has("Y") else call.attribute("target_shape", [])
    call.ignore("target_shape")
    return OPS["expand"](call.tensor("X"), shape)


def _tile(call: PaddleCall) -> Results:
    return OPS["tile"](call.tensor("X"), _integers(call, ("RepeatTimes", "repeat_times_tensor"), "repeat_times"))


def _expand_times(call: PaddleCall) -> Results:
    return OPS["tile"](call.tensor("X"), _integers(call, ("ExpandTimes", "expand_times_tensor"), "expand_times"))


def _pad3d(call: PaddleCall) -> Results:
    sizes = _integers(call, ("Paddings",), "paddings")
    mode, value = call.attribute("mode", "constant"), call.attribute("value", 0.0)
    x, layout = call.tensor("X"), layout_of(call, "data_format", ("NCDHW", "NDHWC"))
    return OPS["pad"](x, sizes, mode, value, layout)


def _pad2d(call: PaddleCall) -> Results:
    top, bottom, left, right = _integers(call, ("Paddings",), "paddings")
    mode = {"edge": "replicate"}.get(mode := call.attribute("mode", "constant"), mode)
    value = call.attribute("pad_value", 0.0)
    return OPS["pad"](call.tensor("X"), [left, right, top, bottom], mode, value, layout_of(call))


def _pad(call: PaddleCall) -> Results:
    sizes = call.attribute("paddings", [])
    return OPS["pad"](call.tensor("X"), sizes, "constant", call.attribute("pad_value", 0.0), pad_from_left_axis=True)


# constants


def _constant(shape: Sequence[int], value: Any, dtype: np.dtype) -> Tensor | np.ndarray:
    """One number all over; a large one takes no place in what is compiled."""
    count = math.prod(shape)
    if any(n < 0 for n in shape) or count > _MOST_NUMBERS:
        raise CheckpointError(f"makes a constant of shape {list(shape)!s:.80}; it is of another model, or damaged")
    return np.full(shape, value, dtype) if count <= _FEW_NUMBERS else OPS["full"](list(shape), value, dtype)


_FEW_NUMBERS, _MOST_NUMBERS = 1 << 16, 1 << 28


def _fill(call: PaddleCall) -> Results:
    shape, dtype = _integers(call, ("ShapeTensor", "ShapeTensorList"), "shape"), call.dtype("dtype", dtypes.float32)
    if call.has("ValueTensor"):
        call.ignore("value", "str_value")
        return OPS["expand"](OPS["cast"](OPS["reshape"](call.tensor("ValueTensor"), [1] * len(shape)), dtype), shape)
    number, text = call.attribute("value", 0.0), call.attribute("str_value", "")
    if text:  # value is float32 and would round it
        number = float(text) if dtypes.is_inexact(dtype) or not text.lstrip("-").isdigit() else int(text)
    return _constant(shape, number, dtype)


def _fill_like(call: PaddleCall) -> Results:
    x = call.tensor("X")
    value, dtype = _number(call, "Value", "value", 0.0), call.dtype("dtype", np.dtype(x.dtype))
    if isinstance(value, Tensor):
        return OPS["expand"](OPS["cast"](value, dtype), list(x.shape))
    return _constant(x.shape, value, dtype)


def _zeros_like(call: PaddleCall) -> Results:
    return _constant((x := call.tensor("X")).shape, 0, np.dtype(x.dtype))


def _fill_batch(call: PaddleCall) -> Results:
    x, shape = call.tensor("Input"), list(call.attribute("shape", []))
    shape[call.attribute("output_dim_idx", 0)] = x.shape[call.attribute("input_dim_idx", 0)]
    text, dtype = call.attribute("str_value", ""), call.dtype("dtype", dtypes.float32)
    return _constant(shape, float(text) if text else call.attribute("value", 0.0), dtype)


def _assign_value(call: PaddleCall) -> Results:
    dtype, names = (
        call.dtype("dtype"),
        ("values", "fp32_values", "int32_values", "int64_values", "bool_values", "fp64_values"),
    )
    lists = [call.attribute(name, []) for name in names]
    return np.array(next((v for v in lists if v), []), dtype).reshape(call.attribute("shape", []))


def _range(call: PaddleCall) -> Results:
    ends = [(call.numbers(name) or [None])[0] for name in ("Start", "End", "Step")]
    if None in ends or math.ceil((ends[1] - ends[0]) / ends[2]) > _MOST_NUMBERS:
        raise CheckpointError(f"counts from start to end in steps as {ends}")
    return np.arange(*ends, dtype=call.dtype("dtype", np.dtype(call.tensor("Start").dtype)))


def _integers_given(call: PaddleCall) -> Results:
    return np.array(call.attribute("value", []), call.dtype("dtype", dtypes.int64))


def _linspace(call: PaddleCall) -> Results:
    start, stop, (num,) = call.tensor("Start"), call.tensor("Stop"), call.numbers("Num") or [0]
    return OPS["linspace"](start, stop, int(num), call.dtype("dtype", dtypes.float32))


def _eye(call: PaddleCall) -> Results:
    rows, columns = int(_number(call, "Rows", "num_rows", 0)), int(_number(call, "Columns", "num_columns", -1))
    if max(rows, columns) > 1 << 14:
        raise CheckpointError(
            f"is a unit matrix of {rows} rows and {columns} columns; it is of another model, or damaged"
        )
    return np.eye(rows, rows if columns < 0 else columns, dtype=call.dtype("dtype", dtypes.float32))


def _one_hot(call: PaddleCall) -> Results:
    depth = _integers(call, ("depth_tensor",), "depth")[0]
    call.ignore("allow_out_of_range")
    return OPS["cast"](OPS["one_hot"](call.tensor("X"), depth), call.dtype("dtype", dtypes.float32))


# along dims


def _reduce(op: str, dim: str = "dim", keeps: str = "keep_dim") -> Rule:
    def rule(call: PaddleCall) -> Results:
        x, dims = call.tensor("X"), _integers(call, ("Axis",), dim)
        if call.attribute("reduce_all", False) or not dims:
            dims = None
        result = OPS[op](x, dims, keepdim=call.attribute(keeps, False))
        return OPS["cast"](result, call.dtype("out_dtype", np.dtype(result.dtype)))

    return rule


def _mean(call: PaddleCall) -> Results:
    return OPS["mean"](call.tensor("X"))


def _softmax(op: str) -> Rule:
    def rule(call: PaddleCall) -> Results:
        call.ignore("data_format")
        return OPS[op](call.tensor("X"), call.attribute("axis", -1))

    return rule


def _arg(op: str) -> Rule:
    def rule(call: PaddleCall) -> Results:
        x, axis = call.tensor("X"), (_integers(call, ("Axis",), "axis") or [-1])[0]
        flat = call.attribute("flatten", False)
        return OPS[op](x, None if flat else axis, call.attribute("keepdims", False), call.dtype("dtype", dtypes.int64))

    return rule


def _top_k(call: PaddleCall) -> Results:
    k = _integers(call, ("K",), "k")[0]
    axis, largest = call.attribute("axis", -1), call.attribute("largest", True)
    values, indices = OPS["topk"](call.tensor("X"), k, axis, largest, call.attribute("sorted", True))
    return {"Out": values, "Indices": indices}


def _argsort(call: PaddleCall) -> Results:
    x, axis = call.tensor("X"), call.attribute("axis", -1)
    indices = OPS["argsort"](x, axis, call.attribute("descending", False), call.attribute("stable", False))
    return {"Out": OPS["take_along_axis"](x, indices, axis), "Indices": indices}


def _cumsum(call: PaddleCall) -> Results:
    is_flat, backward = call.attribute("flatten", False), call.attribute("reverse", False)
    axis = 0 if is_flat else int(_number(call, "Axis", "axis", -1))
    call.ignore("axis", "Axis")
    x = OPS["reshape"](call.tensor("X"), [-1]) if is_flat else call.tensor("X")
    x = OPS["flip"](x, [axis]) if backward else x
    if call.attribute("exclusive", False):
        none = OPS["zeros_like"](OPS["slice"](x, [axis], [0], [1]))
        x = OPS["concat"]([none, OPS["slice"](x, [axis], [0], [-1])], axis)
    total = OPS["cumsum"](x, axis)
    return OPS["flip"](total, [axis]) if backward else total


# by index


def _lookup(call: PaddleCall) -> Results:
    ids, table, padding = call.tensor("Ids"), call.tensor("W"), call.attribute("padding_idx", -1)
    if call.operation.type == "lookup_table":  # ids in a last dim of 1
        ids = OPS["squeeze"](ids, [-1])
    rows = OPS["embedding"](ids, table)
    if padding == -1:
        return rows
    return OPS["where"](OPS["unsqueeze"](ids == padding, [-1]), OPS["cast"](as_tensor(np.zeros(())), rows.dtype), rows)


def _gather(call: PaddleCall) -> Results:
    axis = (call.numbers("Axis") or [call.attribute("axis", 0)])[0]
    index = call.tensor("Index")
    if index.ndim == 2 and index.shape[1] == 1:
        index = OPS["squeeze"](index, [1])
    call.ignore("axis", "overwrite")
    return OPS["gather"](call.tensor("X"), index, int(axis))


def _tril_triu(call: PaddleCall) -> Results:
    return OPS["tril" if call.attribute("lower", True) else "triu"](call.tensor("X"), call.attribute("diagonal", 0))


def _roll(call: PaddleCall) -> Results:
    return OPS["roll"](
        call.tensor("X"), _integers(call, ("ShiftsTensor",), "shifts"), call.attribute("axis", []) or None
    )


def _meshgrid(call: PaddleCall) -> Results:
    return {"Out": OPS["meshgrid"](*call.tensors("X"))}


def _dropout(call: PaddleCall) -> Results:
    # in inference it passes, or scales by what is kept if training did not
    rate = 1 - _number(call, "Probability", "dropout_prob", 0.5)
    scales = call.attribute("dropout_implementation", "downgrade_in_infer") == "downgrade_in_infer"
    if not call.attribute("is_test", False):
        raise CheckpointError("drops values: the program is one for training, save it for inference")
    return call.tensor("X") * rate if scales else call.tensor("X")


def _is_finite(op: str) -> Rule:
    return plain(op, "X")


def _rnn(call: PaddleCall) -> Results:
    """A stack of recurrent layers over [time, batch, size]."""
    mode, ways = call.attribute("mode", "LSTM"), 2 if call.attribute("is_bidirec", False) else 1
    call.ignore("input_size", "hidden_size", "dropout_prob")
    x, weights, states = call.tensor("Input"), call.tensors("WeightList"), call.tensors("PreState")
    lengths, half = call.optional("SequenceLength"), len(weights) // 2  # matrices first, then biases
    last: list[list[Tensor]] = []
    for layer in range(call.attribute("num_layers", 1)):
        outputs = []
        for k in range(layer * ways, (layer + 1) * ways):
            parts = (*weights[2 * k : 2 * k + 2], *weights[half + 2 * k : half + 2 * k + 2])
            begin = dict(zip(("h", "c"), (s[k] for s in states), strict=False))
            reverse = k % ways == 1
            y, *final = OPS["recurrent_layer"](x, *parts, lengths=lengths, mode=mode, reverse=reverse, **begin)
            outputs.append(y)
            last.append(final)
        x = outputs[0] if ways == 1 else OPS["concat"](outputs, -1)
    return {"Out": x, "State": [OPS["stack"](list(finals), 0) for finals in zip(*last, strict=True)]}


def _close(op: str) -> Rule:
    def rule(call: PaddleCall) -> Results:
        near, far = (float(_number(call, n, n.lower(), d)) for n, d in (("Rtol", 1e-5), ("Atol", 1e-8)))
        return OPS[op](call.tensor("Input"), call.tensor("Other"), near, far, call.attribute("equal_nan", False))

    return rule


def _crop(call: PaddleCall) -> Results:
    shape = _integers(call, ("ShapeTensor", "Shape"), "shape")
    return OPS["crop"](call.tensor("X"), shape, _integers(call, ("OffsetsTensor", "Offsets"), "offsets"))


def _cumprod(call: PaddleCall) -> Results:
    if call.attribute("exclusive", False) or call.attribute("reverse", False):
        raise CheckpointError("is exclusive or reversed, which is not known")
    return OPS["cumprod"](call.tensor("X"), call.attribute("dim", 0))


def _repeat(call: PaddleCall) -> Results:
    if call.has("RepeatsTensor"):
        raise CheckpointError("repeats as often as a Tensor says, which is not known")
    return OPS["repeat_interleave"](call.tensor("X"), call.attribute("Repeats", 1), call.attribute("dim", 0))


def _index_add(call: PaddleCall) -> Results:
    axis = call.attribute("axis", 0)
    return OPS["index_add"](call.tensor("X"), call.tensor("Index"), axis, call.tensor("AddValue"))


def _fold(call: PaddleCall) -> Results:
    names = ("output_sizes", "kernel_sizes", "strides", "paddings", "dilations")
    return {"Y": OPS["fold"](call.tensor("X"), *(call.attribute(name, 1) for name in names))}


# boxes, and values at places that are computed


def _yolo_box(call: PaddleCall) -> Results:
    names = ("anchors", "class_num", "conf_thresh", "downsample_ratio", "clip_bbox", "scale_x_y", "iou_aware",
             "iou_aware_factor")  # fmt: skip
    defaults = ([], 1, 0.01, 32, True, 1.0, False, 0.5)
    settings = {name: call.attribute(name, default) for name, default in zip(names, defaults, strict=True)}
    boxes, scores = OPS["yolo_box"](call.tensor("X"), call.tensor("ImgSize"), **settings)
    return {"Boxes": boxes, "Scores": scores}


def _prior_box(call: PaddleCall) -> Results:
    boxes, variances = OPS["prior_box"](
        call.tensor("Input"), call.tensor("Image"), call.attribute("min_sizes", []),
        call.attribute("max_sizes", []) or None, call.attribute("aspect_ratios", [1.0]),
        call.attribute("variances", [0.1, 0.1, 0.2, 0.2]), call.attribute("flip", False), call.attribute("clip", False),
        [call.attribute("step_w", 0.0), call.attribute("step_h", 0.0)], call.attribute("offset", 0.5),
        call.attribute("min_max_aspect_ratios_order", False),
    )  # fmt: skip
    return {"Boxes": boxes, "Variances": variances}


def _box_coder(call: PaddleCall) -> Results:
    variance = call.optional("PriorBoxVar")
    numbers = call.attribute("variance", [])
    if variance is None and numbers:
        variance = as_tensor(np.array(numbers, np.float32))
    kinds = call.attribute("code_type", "encode_center_size"), call.attribute("box_normalized", True)
    boxes = call.tensor("PriorBox"), variance, call.tensor("TargetBox")
    return {"OutputBox": OPS["box_coder"](*boxes, *kinds, call.attribute("axis", 0))}


def _roi_size(call: PaddleCall) -> list[int]:
    return [call.attribute("pooled_height", 1), call.attribute("pooled_width", 1)]


def _roi_align(call: PaddleCall) -> Results:
    parts = call.tensor("X"), call.tensor("ROIs"), call.tensor("RoisNum"), _roi_size(call)
    scale, ratio = call.attribute("spatial_scale", 1.0), call.attribute("sampling_ratio", -1)
    return OPS["roi_align"](*parts, scale, ratio, call.attribute("aligned", False))


def _roi_pool(call: PaddleCall) -> Results:
    parts = call.tensor("X"), call.tensor("ROIs"), call.tensor("RoisNum"), _roi_size(call)
    return OPS["roi_pool"](*parts, call.attribute("spatial_scale", 1.0))


def _deform_conv(call: PaddleCall) -> Results:
    names = ("strides", "paddings", "dilations", "deformable_groups", "groups")
    settings = [call.attribute(name, 1) for name in names]
    call.ignore("im2col_step")
    x, offset, weight = call.tensor("Input"), call.tensor("Offset"), call.tensor("Filter")
    return {"Output": OPS["deform_conv2d"](x, offset, weight, None, *settings, call.optional("Mask"))}


def _affine_grid(call: PaddleCall) -> Results:
    shape = _integers(call, ("OutputShape",), "output_shape")
    return {"Output": OPS["affine_grid"](call.tensor("Theta"), shape, call.attribute("align_corners", True))}


def _unfold(call: PaddleCall) -> Results:
    names = ("kernel_sizes", "strides", "paddings", "dilations")
    return {"Y": OPS["image_to_columns"](call.tensor("X"), *(call.attribute(name, 1) for name in names))}


def _einsum(call: PaddleCall) -> Results:
    return OPS["einsum"](call.attribute("equation", ""), *call.tensors("Operands"))


TABLE: dict[str, Rule] = {
    **FLUID_TABLE,
    **{f"elementwise_{name}": elementwise(op) for name, op in {
        "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "max": "maximum", "min": "minimum",
        "pow": "pow", "mod": "remainder", "floordiv": "floor_divide", "fmax": "fmax", "fmin": "fmin",
    }.items()},
    **{name: elementwise(name) for name in (
        "equal", "not_equal", "less_than", "less_equal", "greater_than", "greater_equal", "logical_and", "logical_or",
        "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    )},
    **{name: plain(name) for name in (
        "relu", "sigmoid", "tanh", "sqrt", "rsqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "abs", "floor",
        "ceil", "round", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "erf", "square", "sign",
        "reciprocal", "silu", "softsign", "logical_not", "bitwise_not",
    )},
    "maximum": elementwise("maximum"), "minimum": elementwise("minimum"), "atan2": plain("atan2", "X1", "X2"),
    "mish": _mish, "logsigmoid": plain("log_sigmoid"), "tanh_shrink": plain("tanhshrink"),
    "isnan_v2": plain("isnan"), "isinf_v2": plain("isinf"), "isfinite_v2": plain("isfinite"),
    "leaky_relu": plain("leaky_relu", "X", negative_slope=("alpha", 0.02)),
    "elu": plain("elu", "X", alpha=("alpha", 1.0)), "celu": plain("celu", "X", alpha=("alpha", 1.0)),
    "selu": plain("selu", "X", scale=("scale", 1.0507009873554805), alpha=("alpha", 1.6732632423543772)),
    "gelu": plain("gelu", "X", approximate=("approximate", False)),
    "softplus": plain("softplus", "X", beta=("beta", 1.0), threshold=("threshold", 20.0)),
    "hard_sigmoid": plain("hardsigmoid", "X", slope=("slope", 0.2), offset=("offset", 0.5)),
    "hard_shrink": plain("hardshrink", "X", threshold=("threshold", 0.5)),
    "softshrink": plain("softshrink", "X", threshold=("lambda", 0.5)),
    "thresholded_relu": plain("thresholded_relu", "X", threshold=("threshold", 1.0), value=("value", 0.0)),
    "brelu": plain("hardtanh", "X", min=("t_min", 0.0), max=("t_max", 24.0)),
    "hard_swish": _hard_swish, "relu6": _relu6, "swish": _swish, "prelu": _prelu, "pow": _pow, "clip": _clip,
    "scale": _scale, "cast": _cast, "sum": _add_n,
    "increment": plain("increment", "X", value=("step", 1.0)),
    "matmul_v2": _matmul, "matmul": _matmul, "mul": _mul, "fc": _fc, "bmm": plain("bmm", "X", "Y"),
    "dot": plain("dot", "X", "Y"), "mv": plain("mv", "X", "Vec"),
    "addmm": plain("addmm", "Input", "X", "Y", alpha=("Alpha", 1.0), beta=("Beta", 1.0)),
    "conv2d": _conv("conv2d", 2), "depthwise_conv2d": _conv("conv2d", 2), "conv3d": _conv("conv3d", 3),
    "conv2d_transpose": _conv_transpose("conv2d_transpose", 2),
    "depthwise_conv2d_transpose": _conv_transpose("conv2d_transpose", 2),
    "conv3d_transpose": _conv_transpose("conv3d_transpose", 3),
    "pool2d": _pool(2), "pool3d": _pool(3), "max_pool2d_with_index": _pool_with_index(2),
    **{f"{mode}_interp{version}": _interpolate(mode, ndim, version == "_v2") for mode, ndim in {
        "nearest": 2, "bilinear": 2, "bicubic": 2, "linear": 1, "trilinear": 3}.items() for version in ("", "_v2")},
    "batch_norm": _batch_norm, "sync_batch_norm": _batch_norm, "layer_norm": _layer_norm,
    "instance_norm": _instance_norm, "group_norm": _group_norm, "norm": _unit_length, "p_norm": _p_norm,
    "shape": _shape, "shape64": _shape64, "size": _size, "reshape2": _reshape, "reshape": _reshape,
    "squeeze2": _squeeze,
    "squeeze": _squeeze, "unsqueeze2": _unsqueeze, "unsqueeze": _unsqueeze, "flatten2": _flatten, "flatten": _flatten,
    "flatten_contiguous_range": plain("flatten", "X", start_axis=("start_axis", 1), stop_axis=("stop_axis", 1)),
    "transpose2": _transpose, "transpose": _transpose,
    "concat": _concat, "split": _split, "stack": _stack, "unstack": _unstack, "unbind": _unbind, "slice": _slice,
    "strided_slice": _strided_slice, "set_value": _set_value, "expand_v2": _expand, "expand_as_v2": _expand_as,
    "expand": _expand_times, "tile": _tile, "pad": _pad, "pad2d": _pad2d, "pad3d": _pad3d,
    "flip": plain("flip", "X", axis=("axis", [])), "roll": _roll, "meshgrid": _meshgrid, "tril_triu": _tril_triu,
    "pixel_shuffle": plain("pixel_shuffle", "X", upscale_factor=("upscale_factor", 1),
                           data_format=("data_format", "NCHW")),
    "fill_constant": _fill, "full_int_array": _integers_given, "tril": plain("tril", diagonal=("diagonal", 0)),
    "triu": plain("triu", diagonal=("diagonal", 0)), "fill_any_like": _fill_like, "fill_zeros_like": _zeros_like,
    "fill_constant_batch_size_like": _fill_batch, "assign_value": _assign_value, "assign": plain("assign"),
    "range": _range, "linspace": _linspace, "eye": _eye, "one_hot_v2": _one_hot,
    **{f"reduce_{name}": _reduce(name) for name in ("mean", "sum", "max", "min", "prod", "all", "any")},
    "logsumexp": _reduce("logsumexp", "axis", "keepdim"), "mean": _mean, "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    "arg_max": _arg("argmax"), "arg_min": _arg("argmin"), "top_k_v2": _top_k, "top_k": _top_k, "argsort": _argsort,
    "cumsum": _cumsum, "lookup_table_v2": _lookup, "lookup_table": _lookup, "gather": _gather,
    "gather_nd": plain("gather_nd", "X", "Index"), "index_select": plain("index_select", "X", "Index", axis=("dim", 0)),
    "index_sample": plain("index_sample", "X", "Index"), "where": plain("where", "Condition", "X", "Y"),
    "take_along_axis": plain("take_along_axis", "Input", "Index", out="Result", axis=("Axis", 0)),
    "scatter": plain("scatter", "X", "Ids", "Updates", overwrite=("overwrite", True)),
    "grid_sampler": plain("grid_sample", "X", "Grid", out="Output", mode=("mode", "bilinear"),
                          padding_mode=("padding_mode", "zeros"), align_corners=("align_corners", True)),
    "trunc": plain("trunc"), "lgamma": plain("lgamma"), "kron": plain("kron", "X", "Y"), "cumprod": _cumprod,
    "put_along_axis": plain("put_along_axis", "Input", "Index", "Value", out="Result", axis=("Axis", 0),
                            reduce=("Reduce", "assign"), include_self=("Include_self", True)),
    "scatter_nd_add": plain("scatter_nd_add", "X", "Index", "Updates"),
    **{name: plain(name, "Input", offset=("offset", 0), axis1=("axis1", 0), axis2=("axis2", 1))
       for name in ("diagonal", "trace")},
    "diag_v2": plain("diag", "X", offset=("offset", 0), padding_value=("padding_value", 0.0)),
    "pixel_unshuffle": plain("pixel_unshuffle", "X", downscale_factor=("downscale_factor", 1),
                             data_format=("data_format", "NCHW")),
    "isclose": _close("isclose"), "allclose": _close("allclose"), "crop_tensor": _crop, "repeat_interleave": _repeat,
    "maxout": plain("maxout", "X", groups=("groups", 1), axis=("axis", 1)), "fold": _fold,
    "logit": plain("logit", "X", eps=("eps", None)), "index_add": _index_add,
    "label_smooth": plain("label_smooth", "X", "PriorDist?", epsilon=("epsilon", 0.1)),
    "inverse": plain("inverse", "Input", out="Output"),
    "searchsorted": plain("searchsorted", "SortedSequence", "Values", out_int32=("out_int32", False),
                          right=("right", False)),
    "dropout": _dropout, "rnn": _rnn, "yolo_box": _yolo_box, "prior_box": _prior_box, "box_coder": _box_coder,
    "roi_align": _roi_align, "roi_pool": _roi_pool, "deformable_conv": _deform_conv, "deformable_conv_v1": _deform_conv,
    "affine_grid": _affine_grid, "unfold": _unfold, "einsum": _einsum,
    "channel_shuffle": plain("channel_shuffle", "X", groups=("groups", 1), data_format=("data_format", "NCHW")),
}  # fmt: skip
"""Type of operation -> what it is here."""
