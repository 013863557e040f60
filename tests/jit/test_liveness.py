"""Which arguments a derivative depends on, and that a split program keeps no other array."""

import jax
import jax.numpy as jnp
import numpy as np

from polyreme import nn
from polyreme.eager.tensor import Tensor
from polyreme.jit.liveness import used_arguments
from polyreme.jit.split import Flow, SplitProgram


def test_arguments_of_an_unused_result_or_of_a_jitted_function_that_ignores_them_are_unused():
    @jax.jit
    def inner(x, y, z):
        return x.reshape(-1) + jnp.zeros_like(y).sum(), z * 2

    def outer(a, b, c, d):
        first, second = inner(a, b, c)
        return first, second + d

    arrays = [np.ones((2, 2), np.float32)] * 4
    jaxpr = jax.make_jaxpr(outer)(*arrays).jaxpr
    assert used_arguments(jaxpr, [True, True]) == [True, False, True, True]
    assert used_arguments(jaxpr, [True, False]) == [True, False, False, False]
    assert used_arguments(jaxpr, [False, False]) == [False] * 4


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        return nn.functional.gelu(self.linear(x)).reshape([-1]) + 1.0


def test_forward_keeps_what_backward_reads_and_no_more():
    net = Net()
    x = jnp.ones((3, 4), jnp.float32)
    flow = Flow.of(Tensor(x, stop_gradient=False))
    for cut in (False, True):
        program = SplitProgram(net, flow, None, backward=True, cut=cut)
        read = [t._array for t in program.read]
        _, _, kept = program.forward(read, jnp.zeros(2, jnp.uint32), [x])
        # gelu's argument; the product's is the input, a reshape and a sum need the value of nothing
        assert [a.shape for a in kept.residuals] == [(3, 6)]
