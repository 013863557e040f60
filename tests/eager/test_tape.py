"""The tape: accumulation, hooks, retained graphs, in-place writes, complex numbers, depth and memory."""

import gc
import threading
import weakref

import numpy as np
import pytest

from polyreme.autograd import grad
from polyreme.eager.mode import enable_grad, no_grad, set_grad_enabled
from polyreme.eager.tensor import to_tensor
from polyreme.errors import DTypeError, GradError, ShapeError
from polyreme.jit import to_static
from polyreme.nn.parameter import Parameter

EPS = 2.0**-52


def leaf(value, dtype="float64"):
    return to_tensor(np.asarray(value), dtype=dtype, stop_gradient=False)


def const(value, dtype="float64"):
    return to_tensor(np.asarray(value), dtype=dtype)


# accumulation and shape of the graph


def test_gradients_add_up_over_backward_passes():
    x = leaf([1.0, 2.0])
    for n in (1, 2, 3):
        (x * x).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), n * 2 * x.numpy())
    x.clear_grad()
    assert x.grad.tolist() == [0, 0]
    x.clear_grad(set_to_zero=False)
    assert x.grad is None


def test_a_diamond_visits_each_node_once():
    calls = []
    x = leaf(3.0)
    h = x * x
    h.register_hook(lambda g: calls.append(g.item()))
    (h * h + h * 5 + h.sin() * 0).backward()
    # d/dh (h^2 + 5 h) at 9 = 23; dh/dx = 6
    assert calls == [23.0]
    assert x.grad.item() == 23.0 * 6


def test_one_tensor_used_twice_by_one_op_and_nested_diamonds():
    x = leaf(1.5)
    y = x
    for _ in range(10):
        y = y + y
    y.backward()
    assert x.grad.item() == 2.0**10


def test_leaves_that_share_a_gradient_keep_their_own():
    x, y = leaf([1.0]), leaf([1.0])
    start = const([1.0])
    (x + y).backward(start)
    x.backward(start)
    assert (x.grad.item(), y.grad.item(), start.item()) == (2.0, 1.0, 1.0)


def test_backward_from_a_leaf_and_with_a_gradient_of_ones_by_default():
    x = leaf([1.0, 2.0])
    x.backward()
    np.testing.assert_array_equal(x.grad.numpy(), [1.0, 1.0])
    (x * 3).backward()
    np.testing.assert_array_equal(x.grad.numpy(), [4.0, 4.0])


def test_gradients_come_in_the_leafs_dtype_and_integers_want_none():
    x, n = leaf([1.0], "float32"), to_tensor([2], stop_gradient=False)
    (x.astype("float64") * n).sum().backward()
    assert x.grad.dtype == "float32"
    assert n.grad is None


def test_detach_stops_gradients_and_shares_the_value():
    x = leaf(2.0)
    d = (x * x).detach()
    assert d.stop_gradient
    assert d.is_leaf
    (x * d).backward()
    assert x.grad.item() == 4.0


def test_no_grad_and_enable_grad_nest():
    x = leaf(2.0)
    with no_grad():
        assert (x * x).stop_gradient
        with enable_grad():
            assert not (x * x).stop_gradient
        assert (x * x).stop_gradient
    set_grad_enabled(False)
    assert (x * x).stop_gradient
    set_grad_enabled(True)
    assert not (x * x).stop_gradient


# hooks


def test_leaf_hooks_see_the_sum_once_and_may_replace_it():
    seen = []
    x = leaf([1.0, 2.0])
    x.register_hook(lambda g: seen.append(g.tolist()))
    x.register_hook(lambda g: g * 10)
    (x * 2 + x * 3).sum().backward()
    assert seen == [[5.0, 5.0]]
    np.testing.assert_array_equal(x.grad.numpy(), [50.0, 50.0])


def test_interior_hooks_replace_what_flows_on():
    x = leaf([1.0, 2.0])
    h = x * 2
    h.register_hook(lambda g: g * 100)
    h.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [200.0, 200.0])


@pytest.mark.parametrize("interior", [False, True], ids=["leaf", "interior"])
def test_removed_hooks_are_not_called(interior):
    x = leaf(1.0)
    t = x * 1 if interior else x
    handle = t.register_hook(lambda g: g * 7)
    keep = t.register_hook(lambda g: g * 2)
    assert handle.remove()
    assert not handle.remove()
    (t * 1).backward()
    assert x.grad.item() == 2.0
    assert keep.remove()


@pytest.mark.parametrize("interior", [False, True], ids=["leaf", "interior"])
def test_hooks_run_for_grad_too_and_can_be_differentiated(interior):
    from_hook = []
    x = leaf(3.0)
    t = x * 1 if interior else x
    t.register_hook(lambda g: from_hook.append(1) or g * g)
    (g,) = grad(t * t * t, t, create_graph=True)
    assert g.item() == 27.0**2
    assert from_hook == [1]
    # (3 t^2)^2 = 9 t^4 -> 36 t^3, which the hook squares again
    (again,) = grad(g, t)
    assert again.item() == (36 * 27.0) ** 2


def test_retain_grads_keeps_interior_gradients():
    x = leaf([1.0, 2.0])
    h = x * 3
    h.retain_grads()
    (h * h).sum().backward()
    np.testing.assert_array_equal(h.grad.numpy(), 2 * h.numpy())


def test_a_hook_that_changes_the_shape_is_refused():
    x = leaf([1.0, 2.0])
    x.register_hook(lambda g: g.sum())
    with pytest.raises(GradError, match=r"the gradient's shape \[2\], got \[\]"):
        (x * 1).sum().backward()
    y = leaf([1.0, 2.0])
    y.register_hook(lambda g: 3.0)
    with pytest.raises(GradError, match="got float"):
        y.sum().backward()
    with pytest.raises(GradError, match="register_hook: this Tensor has stop_gradient=True"):
        const(1.0).register_hook(print)


# the graph's life


def test_retain_graph_and_double_backward():
    x = leaf(2.0)
    y = x * x
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.item() == 8.0
    with pytest.raises(GradError, match=r"'multiply' a second time: .* retain_graph=True"):
        y.backward()


def test_errors_of_backward():
    with pytest.raises(GradError, match=r"this Tensor \(shape \[\]\) has stop_gradient=True"):
        const(1.0).backward()
    with pytest.raises(GradError, match=r"the gradient given has shape \[3\], the Tensor \[2\]"):
        (leaf([1.0, 2.0]) * 1).backward(const([1.0, 1.0, 1.0]))


def test_a_chain_of_ten_thousand_nodes():
    x = leaf(1.0)
    y = x
    for _ in range(10_000):
        y = y + 1.0
    y.backward()
    assert x.grad.item() == 1.0
    y = x * 1
    for _ in range(10_000):
        y = y + 1.0
    del y  # never walked: freeing it must not recurse either


def test_backward_frees_saved_values_and_dropping_the_result_frees_the_graph():
    x = leaf(np.ones(8))
    h = x.sin()
    y = (h * h).sum()
    saved = weakref.ref(h._array)
    node = weakref.ref(h._node)
    y.backward()
    del h
    gc.collect(1)
    assert saved() is None
    del y
    gc.collect(1)
    assert node() is None


def test_results_never_walked_need_no_collector():
    x = leaf(np.ones(8))
    h = x * 2
    node = weakref.ref(h._node)
    gc.disable()
    try:
        del h
        assert node() is None
    finally:
        gc.enable()


# in place


def test_in_place_ops_are_taped():
    x = leaf([1.0, 2.0])
    h = x * 1
    h.add_(const([1.0, 1.0]))
    h[0] = 5.0
    (h * h).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [0.0, 6.0])


def test_saved_values_are_those_at_call_time():
    x = leaf([1.0, 2.0])
    h = x * 1
    y = (h * h).sum()
    h.add_(const([10.0, 10.0]))
    y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), [2.0, 4.0])


def test_sums_of_integers_are_wide_and_stay_narrow_in_place():
    x = to_tensor(np.array([200, 100], "uint8"))
    assert (x.cumsum().dtype.name, x.cumsum().tolist()) == ("int64", [200, 300])
    y = to_tensor(np.array([2, 3], "int32"))
    assert (y.cumsum_().dtype.name, y.tolist()) == ("int32", [2, 5])
    with pytest.raises(DTypeError, match="cumsum_: the result is int64"):
        y.cumsum_(0, "int64")


def test_an_in_place_write_can_bring_in_a_gradient():
    x, buffer = leaf([1.0, 2.0]), const([0.0, 0.0])
    buffer.add_(x)
    assert not buffer.stop_gradient
    buffer.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [1.0, 1.0])


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(const([1.0, 1.0])), lambda x: x.__setitem__(0, 3.0), lambda x: x.fill_(0.0)]
)
def test_leaves_that_want_gradients_are_not_written(write):
    x = leaf([1.0, 2.0])
    with pytest.raises(GradError, match="in-place change of a leaf Tensor that wants a gradient"):
        write(x)
    np.testing.assert_array_equal(x.numpy(), [1.0, 2.0])


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_under_no_grad_a_write_leaves_a_parameter_trainable(captured):
    p = Parameter(np.array([1.0, 2.0]), "float64")

    def double():
        with no_grad():
            p.add_(p.detach())
            p[0] = 7.0

    (to_static(double) if captured else double)()
    assert not p.stop_gradient
    (p * p).sum().backward()
    np.testing.assert_array_equal(p.grad.numpy(), [14.0, 8.0])


# complex: the gradient of a real L is dL/dx + i dL/dy

FUNCTIONS = {
    "abs2": lambda z: (z * z.conj()).real().sum(),
    "real_part_of_a_product": lambda z: (z * const([1 - 2j, 0.5j], "complex128")).real().sum(),
    "abs": lambda z: z.abs().sum(),
    "angle": lambda z: z.angle().sum(),
    "exp": lambda z: z.exp().imag().sum(),
    "division": lambda z: (1.0 / (z * z + 2.0)).real().sum(),
    "matmul": lambda z: z.reshape([1, 2]).matmul(z.conj().reshape([2, 1])).real().sum(),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_gradients_against_finite_differences(name, captured):
    f = FUNCTIONS[name]
    point = np.array([0.7 + 0.4j, -1.1 + 0.9j])
    z = leaf(point, "complex128")
    (to_static(f) if captured else f)(z).backward()

    step = EPS ** (1 / 3)  # balances rounding eps / h with the error h^2 of a central difference
    want = np.zeros(2, complex)
    for i in range(2):
        for unit in (1, 1j):
            d = np.zeros(2, complex)
            d[i] = step * unit
            high, low = (f(const(point + s * d, "complex128")).item() for s in (1, -1))
            want[i] += unit * (high - low) / (2 * step)
    # third derivatives of these functions stay below 60 here
    np.testing.assert_allclose(z.grad.numpy(), want, rtol=0, atol=60 * step**2)


def test_no_grad_is_of_its_thread():
    x, inside, done = leaf([1.0]), threading.Event(), threading.Event()

    def other():
        with no_grad():
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert inside.wait(10)
        assert not (x * 2.0).stop_gradient
    finally:
        done.set()
        thread.join()


def test_in_place_never_grows():
    x = const([1.0, 2.0])
    with pytest.raises(ShapeError, match=r"add_: the result has shape \[3, 2\], the Tensor changed in place \[2\]"):
        x.add_(const(np.ones((3, 2))))
    assert x.tolist() == [1.0, 2.0]
    assert x.reshape_([2, 1]).shape == [2, 1]


def test_a_hook_is_a_function():
    with pytest.raises(TypeError, match="register_hook takes a function of the gradient, got int"):
        leaf([1.0]).register_hook(3)


@pytest.mark.parametrize("value", ["a", None, [1, object()]])
def test_only_numbers_are_assigned(value):
    x = const([1.0, 2.0])
    with pytest.raises(TypeError, match=r"cannot make a Tensor of .* with dtype .*; give numbers"):
        x[0] = value
    assert x.tolist() == [1.0, 2.0]
