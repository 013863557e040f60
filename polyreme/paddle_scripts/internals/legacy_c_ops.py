"""paddle._legacy_C_ops: kernels under their older names, with attributes as pairs: op(x, "axis", 1, "dim", 0)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.core.operator_names import ELEMENTWISE, REDUCTIONS, newer_names
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.ops import arithmetic, creation, manipulation
from polyreme.ops.attention.gated import fused_gate_attention
from polyreme.paddle_scripts.internals.c_ops import kernel
from polyreme.paddle_scripts.internals.kernels.registry import refuse
from polyreme.stand_ins import Absent, absent

# how a kernel is carried out, which is XLA's matter here
_NO_EFFECT = frozenset([
    "use_mkldnn", "use_cudnn", "use_calc_stream", "ring_id", "op_device", "with_quant_attr", "workspace_size_MB",
    "exhaustive_search", "fuse_relu_before_depthwise_conv", "numeric_stable_mode",
])  # fmt: skip
# dtypes by their number in a Program's file
_DTYPES = {
    0: "bool", 1: "int16", 2: "int32", 3: "int64", 4: "float16", 5: "float32", 6: "float64", 20: "uint8", 21: "int8",
    22: "bfloat16", 23: "complex64", 24: "complex128",
}  # fmt: skip
# kernels whose attributes have these names in the function too
_AS_THEY_ARE = frozenset(["slice", "strided_slice"])
# the older name of an attribute -> the newer
_ATTRIBUTES = {
    "dim": "axis", "axes": "axis", "keep_dim": "keepdim", "trans_x": "transpose_x", "trans_y": "transpose_y",
    "out_dtype": "dtype", "depth": "num_classes", "dropout_prob": "p", "pre_nms_topN": "pre_nms_top_n",
    "post_nms_topN": "post_nms_top_n",
}  # fmt: skip


def _cast(x: Any, in_dtype: Any = None, dtype: Any = None) -> Any:
    return arithmetic.cast(x, dtypes.as_dtype(dtype))


def _lookup(weight: Any, x: Any, padding_idx: int = -1, **_: Any) -> Any:
    return kernel("embedding")(x, weight, padding_idx)


def _transpose(x: Any, axis: Any) -> tuple[Any, None]:
    return manipulation.transpose(x, axis), None


def _reduce(name: str) -> Callable[..., Any]:
    def run(x: Any, axis: Any = None, keepdim: bool = False, reduce_all: bool = False, **_: Any) -> Any:
        return kernel(name)(x, None if reduce_all else axis, keepdim=keepdim)

    return run


def _elementwise(name: str) -> Callable[..., Any]:
    def run(x: Any, y: Any, axis: int = -1) -> Any:
        if axis != -1 and y.ndim < x.ndim:  # dims of y begin at this one of x
            y = manipulation.reshape(y, [*y.shape, *[1] * (x.ndim - axis - y.ndim)])
        return kernel(name)(x, y)

    return run


def _full(shape: Any = None, value: Any = 0.0, dtype: Any = None, **_: Any) -> Any:
    return creation.full(shape, value, dtype)


def _softmax_with_cross_entropy(logits: Any, label: Any, **attributes: Any) -> tuple[Any, Any]:
    attributes.pop("use_softmax", None)
    loss, probs = F.softmax_with_cross_entropy(logits, label, return_softmax=True, **attributes)
    return probs, loss


def _dropout(x: Any, p: float = 0.5, is_test: bool = False, dropout_implementation: str = "downgrade_in_infer",
            seed: int = 0, fix_seed: bool = False) -> tuple[Any, None]:  # fmt: skip
    if not is_test:
        refuse("dropout", fix_seed=fix_seed)
    mode = "downscale_in_infer" if dropout_implementation == "downgrade_in_infer" else dropout_implementation
    return F.dropout(x, p, training=not is_test, mode=mode), None


def _layer_norm(
    x: Any, scale: Any, bias: Any, epsilon: float = 1e-5, begin_norm_axis: int = 1
) -> tuple[Any, None, None]:
    return F.layer_norm(x, x.shape[begin_norm_axis:], scale, bias, epsilon), None, None


def _fused_gate_attention(
    query: Any, key: Any, query_weight: Any, key_weight: Any, value_weight: Any, qkv_weight: Any, nonbatched_bias: Any,
    attn_mask: Any, gate_linear_weight: Any, gate_linear_bias: Any, out_linear_weight: Any, out_linear_bias: Any,
    has_gating: bool = True, merge_qkv: bool = True, use_flash_attn: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    out = fused_gate_attention(
        query, key, query_weight, key_weight, value_weight, qkv_weight, gate_linear_weight, gate_linear_bias,
        out_linear_weight, out_linear_bias, nonbatched_bias, attn_mask, has_gating, merge_qkv, use_flash_attn,
    )  # fmt: skip
    return *(None,) * 8, out


def _with_shape(name: str) -> Callable[..., Any]:
    """A kernel that returns its input's shape as well, for its own backward."""

    def run(*args: Any, **attributes: Any) -> tuple[Any, None]:
        return kernel(name)(*args, **attributes), None

    return run


_OWN: dict[str, Callable[..., Any]] = {
    "cast": _cast, "fill_constant": _full, "softmax_with_cross_entropy": _softmax_with_cross_entropy,
    "lookup_table_v2": _lookup, "lookup_table": _lookup, "transpose2": _transpose, "dropout": _dropout,
    "layer_norm": _layer_norm, "fused_gate_attention": _fused_gate_attention,
    **{f"{name}2": _with_shape(name) for name in ("reshape", "squeeze", "unsqueeze", "flatten")},
    **{f"reduce_{name}": _reduce(name) for name in REDUCTIONS},
    **{f"elementwise_{older}": _elementwise(newer) for older, newer in ELEMENTWISE.items()},
}  # fmt: skip


def _without_absent(inputs: tuple[Any, ...]) -> list[Any]:
    """Inputs without the optional ones at the end that are not given."""
    listed = list(inputs)
    while listed and listed[-1] is None:
        listed.pop()
    return listed


def legacy(name: str) -> Any:
    """The kernel of an older name, taking its Tensors and then attributes by name and value."""
    if name.startswith("fused_") and name not in _OWN:
        return absent(f"_legacy_C_ops.{name}", "use the function of paddle.incubate.nn.functional")
    functions = (_OWN.get(name), *(kernel(n) for n in newer_names(name)))
    function: Any = next((f for f in functions if f is not None and not isinstance(f, Absent)), kernel(name))
    if isinstance(function, Absent):
        return function

    def run(*args: Any) -> Any:
        num_tensors = next((i for i, value in enumerate(args) if isinstance(value, str)), len(args))
        if (len(args) - num_tensors) % 2:
            raise ConfigError(f"_legacy_C_ops.{name}: attributes come as names and values, got {args[num_tensors:]!r}")
        pairs = zip(args[num_tensors::2], args[num_tensors + 1 :: 2], strict=True)
        attributes = {key: value for key, value in pairs if key not in _NO_EFFECT}
        if name not in _AS_THEY_ARE:
            attributes = {_ATTRIBUTES.get(key, key): value for key, value in attributes.items()}
        if isinstance(attributes.get("dtype"), int):
            attributes["dtype"] = _DTYPES[attributes["dtype"]]
        return function(*_without_absent(args[:num_tensors]), **attributes)

    run.__name__ = name
    return run


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return legacy(name)
