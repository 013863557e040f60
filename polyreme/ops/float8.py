"""Blocks of 128 numbers in float8 with a scale each, the gated activations beside them, and other fused gradients.

Source: arXiv:2209.05433. q = x / scale, in float8_e4m3fn, whose largest number is 448.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.op import op
from polyreme.errors import DTypeError, ShapeError
from polyreme.ops.by_index import add

BLOCK = 128
LARGEST = 448.0


def _block(x: Array) -> Array:
    """[..., n] -> [..., blocks, 128], 0 past the end."""
    blocks = -(-x.shape[-1] // BLOCK)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - x.shape[-1])])
    return padded.reshape(*x.shape[:-1], blocks, BLOCK)


def _weighted_swiglu(x: Array, prob: Array | None) -> Array:
    gate, value = jnp.split(x.astype(jnp.float32), 2, -1)
    out = jax.nn.silu(gate) * value
    return out if prob is None else out * prob.reshape(*out.shape[:-1], 1)


def _check_even(x: Array, what: str) -> None:
    if x.ndim < 1 or x.shape[-1] % 2:
        raise ShapeError(f"{what}: x {list(x.shape)}; the last dim is split in two, make it even")


@op(method=False)
def fused_weighted_swiglu_act_quant(
    x: Array, prob: Array | None = None, using_pow2_scaling: bool = False
) -> tuple[Array, Array]:
    """silu(first half) * second half * prob, in float8: [*b, 2 n], [*b] -> [*b, n] and scales [*b, n / 128 rounded up].

    A block of 128 times its scale is what was quantized; using_pow2_scaling rounds scales up to a power of 2. Raises
    ShapeError for an odd width.
    """
    _check_even(x, "fused_weighted_swiglu_act_quant")
    out = _weighted_swiglu(x, prob)
    blocks = _block(out)
    top = jnp.abs(blocks).max(-1)
    scale = jnp.where(top == 0, 1.0, top / LARGEST)
    scale = jnp.exp2(jnp.ceil(jnp.log2(scale))) if using_pow2_scaling else scale
    quantized = (blocks / scale[..., None]).reshape(*out.shape[:-1], -1)[..., : out.shape[-1]]
    # a quotient that rounding brings over the largest number would be NaN
    return jnp.clip(quantized, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), scale


@op(method=False)
def fused_act_dequant(x: Array, x_scale: Array) -> Array:
    """float8 times the scale of its block of 128: [m, n], [m, n / 128 rounded up] float32 -> [m, n] bfloat16.

    x_scale may be int32 [m, n / 512 rounded up]: the exponents of four blocks, 127 added, lowest byte first. Raises
    DTypeError for an x that is no float8, ShapeError for scales that do not fit.
    """
    if x.dtype != jnp.float8_e4m3fn:
        raise DTypeError(f"fused_act_dequant: x is {x.dtype.name}; needs float8_e4m3fn, use astype")
    blocks = -(-x.shape[-1] // BLOCK)
    packed = dtypes.is_integer(x_scale.dtype)
    if x_scale.shape != (x.shape[0], -(-blocks // 4) if packed else blocks):
        raise ShapeError(f"fused_act_dequant: x_scale {list(x_scale.shape)} for x {list(x.shape)}")
    if packed:
        shifts = jnp.arange(0, 32, 8, dtype=x_scale.dtype)
        exponents = ((x_scale[..., None] >> shifts) & 255).reshape(x.shape[0], -1)[:, :blocks]
        x_scale = jnp.exp2(exponents.astype(jnp.float32) - 127)
    scaled = _block(x.astype(jnp.float32)) * x_scale[..., None]
    return scaled.reshape(x.shape[0], -1)[:, : x.shape[1]].astype(jnp.bfloat16)


@op(method=False, real=True)
def fused_swiglu_weighted_bwd(o1: Array, do2_s: Array, unzipped_probs: Array) -> tuple[Array, Array, Array]:
    """The gradient of y = silu(first half of o1) * second half * unzipped_probs, given do2_s, that of y.

    [*b, 2 n], [*b, n], [*b] -> the gradients of o1 and of unzipped_probs, and y. Raises ShapeError for an odd width.
    """
    _check_even(o1, "fused_swiglu_weighted_bwd")
    y, pull = jax.vjp(_weighted_swiglu, o1, unzipped_probs.astype(jnp.float32))
    do1, dprobs = pull(do2_s.astype(jnp.float32))
    return do1, dprobs, y.astype(o1.dtype)


@op(method=False, real=True)
def cross_entropy_with_softmax_bwd_w_downcast(label: Array, softmax: Array, loss_grad: Array) -> Array:
    """The gradient of cross entropy for its logits, in bfloat16: (softmax - one_hot(label)) * loss_grad.

    softmax [*b, classes]; label (integers) and loss_grad [*b] or [*b, 1].
    """
    rows = softmax.shape[:-1]
    hot = label.reshape(*rows, 1) == jnp.arange(softmax.shape[-1], dtype=label.dtype)
    return ((softmax - hot.astype(softmax.dtype)) * loss_grad.reshape(*rows, 1)).astype(jnp.bfloat16)


@op(method=False)
def rows_added(token_indices: Array, main_grad: Array, out_grad: Array) -> Array:
    """main_grad [rows, width] with out_grad [*b, width] added to its rows token_indices [*b], in main_grad's dtype."""
    return add(main_grad, (token_indices,), out_grad.astype(main_grad.dtype))


ALIASES: dict[str, str] = {}
