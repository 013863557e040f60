"""C++ as an op: `python examples/custom_op_ffi.py` compiles custom_op_ffi.cc and loads it. Needs a C++ compiler."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import polyreme as paddle
from polyreme.utils import cpp_extension, register_op

library = cpp_extension.load("custom_op_ffi", [str(Path(__file__).parent / "custom_op_ffi.cc")])


def rms_norm_grad(x, y, dy, eps):
    """In jax: a gradient of higher order then needs nothing more."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    return scale * (dy - y * jnp.mean(dy * y, -1, keepdims=True))


@register_op(name="ffi_rms_norm", backward=rms_norm_grad, amp="fp32", sharding="*b [n] -> *b [n]")
def rms_norm(x: jax.Array, eps: float = 1e-6):
    """x / sqrt(mean(x^2) + eps) over the last dim, float32. RmsNorm is the handler's name in the C++ file."""
    return library.RmsNorm(jax.ShapeDtypeStruct(x.shape, x.dtype))(x, eps=np.float32(eps))


x = paddle.to_tensor([[3.0, 4.0], [0.0, 2.0]], stop_gradient=False)
y = rms_norm(x)
want = x / paddle.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)
assert paddle.allclose(y, want, rtol=1e-6)
(dx,) = paddle.grad([(y * y * y).sum()], [x])
(wanted,) = paddle.grad([(want * want * want).sum()], [x])
assert paddle.allclose(dx, wanted, atol=1e-5)
