"""An op of a plain jax function, with a gradient of its own: `python examples/custom_op_jax.py`."""

import jax.numpy as jnp

import polyreme as paddle
from polyreme.utils import register_op


def log1pexp_grad(x, y, dy, beta):
    """Called with the inputs, the results, their gradients, and the attributes by name."""
    return dy / (1 + jnp.exp(-beta * x))


@register_op(amp="fp32", backward=log1pexp_grad)
def log1pexp(x, beta=1.0):
    """log(1 + exp(beta x)) / beta, without overflow. x, with no default, is a Tensor; beta is an attribute."""
    return jnp.logaddexp(beta * x, 0.0) / beta


x = paddle.to_tensor([-200.0, 0.0, 200.0], stop_gradient=False)
y = log1pexp(x, beta=2.0)  # eager
y.sum().backward()
assert x.grad.tolist() == [0.0, 0.5, 1.0]

captured = paddle.jit.to_static(lambda x: log1pexp(x, beta=2.0))
assert captured(x).tolist() == y.tolist()

paddle.enable_static()
program = paddle.static.Program()
with paddle.static.program_guard(program):
    out = log1pexp(paddle.static.data("x", [3]), beta=2.0)
    (fetched,) = paddle.static.Executor().run(program, feed={"x": x.numpy()}, fetch_list=[out])
paddle.disable_static()
assert fetched.tolist() == y.tolist()
