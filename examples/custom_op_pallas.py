"""A Pallas kernel as an op: compiled on GPUs, interpreted on processors. `python examples/custom_op_pallas.py`."""

import functools

import jax
from jax.experimental import pallas as pl

import polyreme as paddle
from polyreme.utils import register_op


def one_row(x, gate, out):
    """What the kernel does with one row, which is in fast memory."""
    out[...] = x[...] * jax.nn.sigmoid(x[...]) * gate[...]


def by_rows(x, gate, interpret=False):
    """The kernel over all rows of `[rows, n]`."""
    row = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        one_row, grid=x.shape[:1], in_specs=[row, row], out_specs=row, out_shape=shape, interpret=interpret
    )(x, gate)


def swiglu(x, gate):
    """silu(x) * gate: what every kernel computes, where it runs when there is none, and where its gradient is from."""
    return jax.nn.silu(x) * gate


swiglu = register_op(
    swiglu,
    name="my_swiglu",
    kernels={"gpu": by_rows, "cpu": functools.partial(by_rows, interpret=True)},
    amp="low",
    sharding="rows [n], rows [n] -> rows [n]",  # each device computes the rows it has, whole
)

x = paddle.randn([4, 8])
gate = paddle.randn([4, 8])
x.stop_gradient = False
y = swiglu(x, gate)
y.sum().backward()
assert paddle.allclose(y, paddle.nn.functional.silu(x) * gate, rtol=1e-6)
assert x.grad.shape == [4, 8]
