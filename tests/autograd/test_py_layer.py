import gc
import weakref

import numpy as np
import pytest

from polyreme import autograd
from polyreme.autograd import PyLayer, grad
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CaptureError, GradError
from polyreme.jit import to_static
from polyreme.nn.parameter import Parameter


def leaf(value, dtype="float64"):
    return to_tensor(np.asarray(value), dtype=dtype, stop_gradient=False)


class Wrong(PyLayer):
    """x^3 with a gradient 10 times too large: only the user's own backward gives 30 x^2."""

    @staticmethod
    def forward(ctx, x, power=3):
        ctx.power = power
        ctx.save_for_backward(x)
        return x**power

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensor()
        return g * 10 * ctx.power * x ** (ctx.power - 1)


class MulAdd(PyLayer):
    """x y and x + y; the middle argument is no Tensor."""

    @staticmethod
    def forward(ctx, x, scale, y):
        ctx.scale = scale
        ctx.save_for_backward(x, y)
        return x * y * scale, x + y, "text"

    @staticmethod
    def backward(ctx, g_product, g_sum):
        x, y = ctx.saved_tensor()
        return g_product * y * ctx.scale + g_sum, g_product * x * ctx.scale + g_sum


def test_backward_is_the_users():
    x = leaf([1.0, 2.0])
    Wrong.apply(x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [30.0, 120.0])


def test_keyword_and_static_arguments():
    x = leaf(2.0)
    Wrong.apply(x, power=2).backward()
    assert x.grad.item() == 40.0


def test_several_inputs_and_outputs():
    x, y = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    product, total, text = MulAdd.apply(x, 2.0, y)
    assert text == "text"
    (product * 5 + total).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), 10 * y.numpy() + 1)
    np.testing.assert_array_equal(y.grad.numpy(), 10 * x.numpy() + 1)


def test_unused_outputs_are_zeros_or_none():
    seen = []

    class Two(PyLayer):
        @staticmethod
        def forward(ctx, x, materialize):
            ctx.set_materialize_grads(materialize)
            return x * 1, x * 2

        @staticmethod
        def backward(ctx, a, b):
            seen.append(b)
            return a

    for materialize in (True, False):
        Two.apply(leaf([1.0, 2.0]), materialize)[0].sum().backward()
    np.testing.assert_array_equal(seen[0].numpy(), [0.0, 0.0])
    assert seen[1] is None


def test_none_gradients_and_inputs_that_want_none():
    class First(PyLayer):
        @staticmethod
        def forward(ctx, x, y, n):
            return x + y + n

        @staticmethod
        def backward(ctx, g):
            return g, None, g

    x, y, n = leaf(1.0), leaf(2.0), to_tensor(3)
    First.apply(x, y, n).backward()
    assert x.grad.item() == 1.0
    assert y.grad is None
    assert n.grad is None


def test_non_differentiable_and_integer_outputs():
    class Sort(PyLayer):
        @staticmethod
        def forward(ctx, x):
            order = x.argsort()
            top = x.max()
            ctx.mark_non_differentiable(top)
            ctx.order = order
            return x * 2, order, top

        @staticmethod
        def backward(ctx, g, g_order, g_top):
            assert g_order.numpy().any() == g_top.numpy().any() == False  # noqa: E712
            return g * 2

    x = leaf([3.0, 1.0])
    y, order, top = Sort.apply(x)
    assert order.stop_gradient
    assert top.stop_gradient
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [2.0, 2.0])


def test_no_tape_means_no_node():
    with no_grad():
        assert Wrong.apply(leaf(1.0)).stop_gradient
    assert Wrong.apply(to_tensor(1.0)).stop_gradient


def test_saved_values_are_those_at_call_time():
    x = leaf([1.0, 2.0]) * 1
    y = Wrong.apply(x)
    x.add_(to_tensor([5.0, 5.0], dtype="float64"))
    (dx,) = grad(y.sum() + 0 * x.sum(), x, allow_unused=True)
    w = Parameter(np.array([1.0, 2.0]), "float64")
    z = Wrong.apply(w)
    with no_grad():
        w.set_value(np.array([7.0, 7.0]))
    z.sum().backward()
    np.testing.assert_array_equal(w.grad.numpy(), [30.0, 120.0])
    np.testing.assert_array_equal(dx.numpy(), [0.0, 0.0])


def test_higher_orders_through_inputs_and_saved_outputs():
    class Exp(PyLayer):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, g):
            (y,) = ctx.saved_tensor()
            return g * y

    x = leaf([0.5, -1.0])
    value = Exp.apply(x * 2)
    for order in range(1, 4):
        (value,) = grad(value.sum(), x, create_graph=True)
        # exp(2 x) differentiated `order` times; each order rounds fewer than 16 times
        np.testing.assert_allclose(value.numpy(), 2.0**order * np.exp(2 * x.numpy()), rtol=16 * order * 2**-52)
    x = leaf(2.0)
    (first,) = grad(Wrong.apply(x), x, create_graph=True)
    (second,) = grad(first, x)
    assert second.item() == 60 * 2.0


def test_in_place_forward_keeps_the_object():
    class Double(PyLayer):
        @staticmethod
        def forward(ctx, x):
            x.multiply_(to_tensor(2.0, dtype="float64")) if hasattr(x, "multiply_") else x.set_value(x.numpy() * 2)
            return x

        @staticmethod
        def backward(ctx, g):
            return g * 2

    a = leaf([1.0, 2.0])
    h = a * 3
    out = Double.apply(h)
    assert out is h
    (h * h).sum().backward()
    # d/da (6 a)^2 = 72 a
    np.testing.assert_array_equal(a.grad.numpy(), [72.0, 144.0])
    with pytest.raises(GradError, match="changed in place a leaf"):
        Double.apply(leaf(1.0))


def test_returning_an_input_gives_a_new_tensor():
    class Same(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_not_inplace(x)
            return x

        @staticmethod
        def backward(ctx, g):
            return g * 5

    x = leaf(1.0)
    y = Same.apply(x)
    assert y is not x
    y.backward()
    assert x.grad.item() == 5.0
    assert x.is_leaf


@pytest.mark.parametrize("case", ["forward", "whole"])
def test_a_captured_call_equals_eager(case):
    w = Parameter(np.array([1.0, 2.0]), "float64", name="w")
    want = 30 * w.numpy() ** 2

    if case == "forward":  # eager backward through a captured forward: jax differentiates it
        f = to_static(lambda: Wrong.apply(w).sum())
        for n in (1, 2):
            f().backward()
            np.testing.assert_array_equal(w.grad.numpy(), n * want)
    else:

        @to_static
        def step():
            Wrong.apply(w).sum().backward()
            g = w.grad.detach()
            w.clear_grad()
            return g

        np.testing.assert_array_equal(step().numpy(), want)
        np.testing.assert_array_equal(step().numpy(), want)


def test_captured_forward_with_attributes_integers_and_several_outputs():
    class Pick(PyLayer):
        @staticmethod
        def forward(ctx, x, index):
            ctx.save_for_backward(index)
            ctx.seen = x * 2
            return x * 2, index + 1

        @staticmethod
        def backward(ctx, g, _):
            (index,) = ctx.saved_tensor()
            return g * 7 * index.astype("float64") + 0 * ctx.seen, None

    f = to_static(lambda x, i: Pick.apply(x * 1, i))
    x = leaf([1.0, 2.0])
    y, i = f(x, to_tensor([1, 3]))
    assert i.tolist() == [2, 4]
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [7.0, 21.0])


def test_captured_backward_that_reads_other_tensors_is_refused():
    other = Parameter(np.ones(2), "float64")

    class Reads(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * other

    with pytest.raises(CaptureError, match="neither saved in ctx nor made there"):
        to_static(lambda x: Reads.apply(x).sum())(leaf([1.0, 2.0])).backward()


def test_complex_gradients_keep_the_convention_when_captured():
    class Conj(PyLayer):
        @staticmethod
        def forward(ctx, z):
            return z.conj()

        @staticmethod
        def backward(ctx, g):
            return g.conj()

    z = leaf([1 + 2j], "complex128")
    f = to_static(lambda z: (Conj.apply(z) * (3 - 1j)).real().sum())
    f(z).backward()
    # L = Re((3 - i)(x - i y)) = 3 x - y -> dL/dx + i dL/dy = 3 - i
    np.testing.assert_array_equal(z.grad.numpy(), [3 - 1j])


def test_memory_is_freed_by_backward():
    x = leaf(np.ones(4))
    h = x * 2
    y = Wrong.apply(h)
    saved = weakref.ref(y._node.context)
    y.sum().backward()
    gc.collect()
    assert saved() is None


def bad(backward):
    class Bad(PyLayer):
        forward = staticmethod(lambda ctx, x: x * 1)

    Bad.backward = staticmethod(backward)
    return Bad


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda ctx, g: (g, g), "returned 2 gradients, forward took 1 Tensors"),
        (lambda ctx, g: 3.0, "gradient 0 is a float"),
        (lambda ctx, g: g.sum(), r"gradient 0 has shape \[\], its Tensor \[2\]"),
    ],
)
def test_a_backward_that_gives_no_gradient_is_refused(backward, message):
    with pytest.raises(GradError, match=message):
        bad(backward).apply(leaf([1.0, 2.0])).sum().backward()


def test_a_second_backward_and_missing_methods_are_refused():
    y = Wrong.apply(leaf(1.0))
    y.backward()
    with pytest.raises(GradError, match="'Wrong' a second time"):
        y.backward()
    with pytest.raises(NotImplementedError, match=r"must define forward\(ctx"):
        PyLayer.apply(leaf(1.0))

    class NoTensor(PyLayer):
        forward = staticmethod(lambda ctx, x: 3)

    with pytest.raises(GradError, match="must return at least one Tensor, got int"):
        NoTensor.apply(leaf(1.0))

    class Saves(PyLayer):
        @staticmethod
        def forward(ctx, x, what):
            ctx.save_for_backward(*what[0])
            ctx.save_for_backward(*what[1])
            return x * 1

    with pytest.raises(GradError, match="takes Tensors, got int"):
        Saves.apply(leaf(1.0), [[3], []])
    with pytest.raises(GradError, match="was called already"):
        Saves.apply(leaf(1.0), [[to_tensor(1.0)], [to_tensor(1.0)]])


def test_function_is_the_other_name():
    assert autograd.Function is PyLayer
    assert isinstance(leaf(1.0), Tensor)
