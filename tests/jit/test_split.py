"""A captured function cut into forward, backward and weight programs equals the same code run eagerly."""

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.autograd import PyLayer
from polyreme.core import rng, state
from polyreme.errors import CaptureError
from polyreme.jit.split import Flow, SplitProgram

RNG = np.random.default_rng(0)
KEY = jax.random.PRNGKey(3)


class Doubled(PyLayer):
    """x * w with the wrong factor two in its gradient, so that a test sees which backward ran."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.kept = x + 0
        return x * w

    @staticmethod
    def backward(ctx, g):
        _, w = ctx.saved_tensor()
        return g * w * 2, (g * ctx.kept * 2).sum(0)


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.3), nn.BatchNorm1D(8))
        self.second = nn.Linear(8, 6)
        self.scale = self.create_parameter([6], default_initializer=nn.initializer.Constant(1.5))

    def forward(self, x):
        # the transpose is a node between a weight and the matmul that reads it
        hidden = self.second(self.first(x)).matmul(self.second.weight.t()[:6, :6].t())
        return Doubled.apply(hidden, self.scale), x.sum()


def run_split(fn, x, cotangents, *, cut):
    program = SplitProgram(fn, Flow.of(x), None, backward=True, cut=cut)
    read = [t._array for t in program.read]
    outs, key, kept = program.forward(read, KEY, [x._array])
    sums = [] if cut else program.zeros(read, kept, cotangents)
    inputs, sums, kept = program.backward(read, kept, cotangents, sums)
    if cut:
        sums = program.weights(read, kept, program.zeros(read, kept, None))
    return outs, key, inputs, dict(zip([id(p) for p in program.leaves], sums, strict=True))


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("cut", [False, True])
def test_parts_equal_eager(cut):
    paddle.seed(0)
    net, again = Net(), Net()
    again.set_state_dict(net.state_dict())
    x = paddle.to_tensor(RNG.standard_normal((5, 6)).astype("float32"), stop_gradient=False)
    g = paddle.to_tensor(RNG.standard_normal((5, 6)).astype("float32"))
    outs, key, inputs, sums = run_split(net, x, [g._array, None], cut=cut)
    holder = rng.default_generator.key_state()
    state.write(holder, KEY)
    y, _ = again(x)
    y.backward(g)
    # the same float32 kernels in another program: rounding of sums of at most 8 terms, of values below 64
    close = {"rtol": 2.0**-23 * 64, "atol": 2.0**-23 * 64}
    np.testing.assert_allclose(outs.arrays[0], y.numpy(), **close)
    np.testing.assert_array_equal(key, holder._array)
    np.testing.assert_allclose(inputs[0], x.grad.numpy(), **close)
    trained = [(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True) if p.trainable]
    assert len(sums) == len(trained)
    for ours, theirs in trained:
        np.testing.assert_allclose(sums[id(ours)], theirs.grad.numpy(), **close)
    np.testing.assert_allclose(net.first[3]._mean.numpy(), again.first[3]._mean.numpy(), **close)


def test_the_first_part_of_a_cut_backward_computes_no_weight_gradient():
    layer = nn.Linear(16, 32)
    x = paddle.to_tensor(RNG.standard_normal((8, 16)).astype("float32"), stop_gradient=False)
    program = SplitProgram(layer, Flow.of(x), None, backward=True, cut=True)
    read = [t._array for t in program.read]
    _, _, saved = program.forward(read, KEY, [x._array])
    ones = [paddle.ones([8, 32])._array]
    inputs = program._inputs.lower(read, saved.inputs, saved.residuals, ones).compile().cost_analysis()["flops"]
    _, _, saved = program.backward(read, saved, ones, [])
    zeros = program.zeros(read, saved, None)
    weights = program._weights.lower(read, saved.inputs, saved.residuals, saved.stash, zeros).compile()
    one_matmul = 2 * 8 * 16 * 32
    assert inputs == pytest.approx(one_matmul, rel=0.1)
    assert weights.cost_analysis()["flops"] == pytest.approx(one_matmul, rel=0.2)


def test_structures_none_and_integers_pass_through():
    layer = nn.Linear(4, 4)

    def fn(value):
        x, ids, nothing, scale = value["x"], *value["rest"]
        return {"y": layer(x) * scale, "ids": ids + 1, "nothing": nothing, "n": 3}

    x = paddle.to_tensor(RNG.standard_normal((2, 4)).astype("float32"), stop_gradient=False)
    ids = paddle.to_tensor(np.arange(2))
    flow = Flow.of({"x": x, "rest": (ids, None, 2.0)})
    program = SplitProgram(fn, flow, None, backward=True, cut=False)
    read = [t._array for t in program.read]
    outs, _, saved = program.forward(read, KEY, flow.arrays)
    value = outs.tensors()
    assert list(value) == ["y", "ids", "nothing", "n"]
    assert value["nothing"] is None
    assert value["n"] == 3
    np.testing.assert_array_equal(value["ids"].numpy(), [1, 2])
    cotangents = [paddle.ones([2, 4])._array, None]
    gradients, _, _ = program.backward(read, saved, cotangents, program.zeros(read, saved, cotangents))
    np.testing.assert_allclose(gradients[0], 2 * np.ones((2, 4)) @ layer.weight.numpy().T, rtol=2.0**-21)
    assert gradients[1] is None


def test_a_frozen_parameter_and_a_changed_mode_need_another_program():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    program = SplitProgram(layer, Flow.of(paddle.ones([1, 3])), None, backward=False, cut=False)
    assert program.serves()
    layer.eval()
    assert not program.serves()
    layer.train()
    layer[0].weight.stop_gradient = True
    assert not program.serves()


class Scaled(nn.Layer):
    """scale x; last keeps the result."""

    def __init__(self):
        super().__init__()
        self.scale, self.unread, self.last = 2.0, 0, None

    def forward(self, x):
        self.last = x * self.scale
        return self.last


def test_a_setting_that_the_code_reads_needs_another_program_once_it_changes():
    layer = Scaled()
    flow = Flow.of(paddle.ones([2]))
    program = SplitProgram(layer, flow, None, backward=False, cut=False)
    program.forward([], KEY, flow.arrays)
    layer.unread = 1
    layer.last = None  # what the code itself leaves there
    assert program.serves()
    layer.scale = 3.0
    assert not program.serves()


def test_a_function_that_keeps_changing_other_tensors_is_refused():
    made = [paddle.zeros([2]) for _ in range(8)]

    def fn(x):
        made.pop().add_(x)
        return x

    program = SplitProgram(fn, Flow.of(paddle.ones([2])), None, backward=False, cut=False)
    with pytest.raises(CaptureError, match="second run"):
        program.forward([t._array for t in program.read], KEY, [paddle.ones([2])._array])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_calls_that_fit_a_pattern_go_back_as_one_unless_a_hook_looks_between(cut, hooked):
    head = nn.Linear(4, 1024)
    labels = paddle.to_tensor(RNG.integers(0, 1024, 6))

    def fn(x):
        logits = head(x)
        if hooked:
            logits.register_hook(lambda g: g * 2)
        return nn.functional.cross_entropy(logits, labels)

    x = paddle.to_tensor(RNG.standard_normal((6, 4)).astype("float32"), stop_gradient=False)
    program = SplitProgram(fn, Flow.of(x), None, backward=True, cut=cut)
    assert program.fusions == ("linear_cross_entropy",)
    _, _, kept = program.forward([t._array for t in program.read], KEY, [x._array])
    assert any(a.shape == (6, 1024) for a in kept.residuals) is hooked
    _, _, (dx,), sums = run_split(fn, x, [np.float32(1)], cut=cut)
    fn(x).backward()
    for ours, theirs in [(dx, x.grad), *((sums[id(p)], p.grad) for p in head.parameters())]:
        # sums of 1024 terms below 1 in another order
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=2.0**-23 * 1024**0.5)
