"""Stacked: layers as one loop equal layers called one after another, random numbers and sharded weights included."""

import numpy as np
import pytest

import polyreme
from polyreme import nn
from polyreme.core import rng
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, ConfigError, ProgramError, ShapeError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.nn import functional as F


class Residual(nn.Layer):
    """x + tanh(x w + b) * scale, and a count of all outputs' sums."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear = nn.Linear(8, 8, dims=("embed", None))
        self.dropout = dropout

    def forward(self, x, total, scale=None):
        h = F.dropout(F.tanh(self.linear(x)), self.dropout, training=self.training) * scale
        return x + h, total + h.sum()


def inputs():
    rows = np.random.default_rng(0).standard_normal((2, 8)).astype("float32")
    return to_tensor(rows, stop_gradient=False), to_tensor([0.0]), to_tensor([0.5], stop_gradient=False)


def gradients(run, x, total, scale, weights):
    out, total = run(x, total, scale)
    (out.sum() + total.sum()).backward()
    leaves = [x, scale, *weights]
    return [out.numpy(), total.numpy(), *(leaf.grad.numpy() for leaf in leaves)]


def test_is_its_layers_one_after_another():
    rng.seed(3)
    stack = nn.Stacked(Residual, 3)
    weight, bias = stack.layer.linear.weight, stack.layer.linear.bias
    assert {name: list(t.shape) for name, t in stack.state_dict().items()} == {
        "layer.linear.weight": [3, 8, 8], "layer.linear.bias": [3, 8],
    }  # fmt: skip
    assert weight.dims == ("layers", "embed", None)
    assert len({weight.numpy()[i].tobytes() for i in range(3)}) == 3  # drawn one by one
    x, total, scale = inputs()
    got = gradients(lambda x, total, scale: stack(x, total, scale=scale), x, total, scale, [weight, bias])
    for leaf in (x, scale, weight, bias):
        leaf.clear_grad()

    def loop(x, total, scale):
        for i in range(3):
            h = F.tanh(x @ weight[i] + bias[i]) * scale
            x, total = x + h, total + h.sum()
        return x, total

    want = gradients(loop, x, total, scale, [weight, bias])
    for have, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(have, wanted, rtol=0, atol=2**-24 * 64)


def test_draws_other_numbers_in_each_layer_and_goes_on_from_there():
    stack = nn.Stacked(lambda: Residual(0.5), 2)
    stack.layer.linear.weight.set_value(np.zeros((2, 8, 8), "float32"))
    stack.layer.linear.bias.set_value(np.ones((2, 8), "float32"))

    def run():
        out = stack(to_tensor(np.zeros((8, 8), "float32")), to_tensor([0.0]), scale=to_tensor([1.0]))[0]
        return np.rint(out.numpy() / np.tanh(1)).astype(int)

    rng.seed(1)
    first, second = run(), run()
    rng.seed(1)
    assert (first == run()).all()
    assert (first != second).any()
    assert set(first.ravel()) == {0, 2, 4}  # two layers with one mask would give no 2


def test_parts_of_weights_are_gathered_inside_the_loop():
    rng.seed(3)
    stack = nn.Stacked(Residual, 4)
    x, total, scale = inputs()
    want = gradients(lambda *xs: stack(*xs[:2], scale=xs[2]), x, total, scale, [stack.layer.linear.weight])
    for leaf in (x, scale, *stack.parameters()):
        leaf.clear_grad()
    apply_plan(Plan.from_degrees(sharding=8, sharding_stage=3), stack)
    try:
        # an axis that may move cuts what is inside a layer, not the layers
        assert stack.layer.linear.weight._array.sharding.spec[0] is None
        run = to_static(lambda x, total, scale: stack(x, total, scale=scale))
        got = gradients(run, x, total, scale, [stack.layer.linear.weight])
    finally:
        clear_plan()
    for have, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(have, wanted, rtol=0, atol=2**-24 * 64)


def test_the_program_does_not_grow_with_the_layers():
    def program(count):
        stack = nn.Stacked(Residual, count)
        x, total, scale = inputs()
        return to_static(lambda x: stack(x, total, scale=scale)[0]).compiled(x).as_text()

    assert program(2).count("\n") == program(48).count("\n")


def test_refusals():
    with pytest.raises(ConfigError, match="count=0"):
        nn.Stacked(Residual, 0)
    with pytest.raises(ConfigError, match="BatchNorm1D has buffers that are saved"):
        nn.Stacked(lambda: nn.BatchNorm1D(4), 2)
    x = to_tensor(np.ones((2, 4), "float32"))
    with pytest.raises(ShapeError, match=r"gives \[2, 3\] float32 for \[2, 4\] float32"):
        nn.Stacked(lambda: nn.Linear(4, 3), 2)(x)

    class Counting(nn.Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", to_tensor([0.0]), persistable=False)

        def forward(self, x):
            self.calls.set_value(self.calls + 1)
            return x

    with pytest.raises(CaptureError, match="a stacked layer writes a Tensor"):
        nn.Stacked(Counting, 2)(x)
    polyreme.enable_static()
    try:
        with pytest.raises(ProgramError, match="use a LayerList there"):
            nn.Stacked(lambda: nn.Linear(4, 4), 2)
    finally:
        polyreme.disable_static()
