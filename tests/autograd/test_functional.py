import numpy as np
import pytest

from polyreme import autograd
from polyreme.autograd import backward, grad, hessian, jacobian, jvp, saved_tensors_hooks, vjp
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, GradError, ShapeError
from polyreme.jit import to_static

EPS = 2.0**-52


def leaf(value, dtype="float64"):
    return to_tensor(np.asarray(value), dtype=dtype, stop_gradient=False)


def test_grad_leaves_dot_grad_alone():
    x, y = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    dx, dy = grad((x * y).sum(), [x, y])
    np.testing.assert_array_equal(dx.numpy(), y.numpy())
    np.testing.assert_array_equal(dy.numpy(), x.numpy())
    assert x.grad is None
    assert dx.stop_gradient


def test_grad_with_respect_to_an_interior_tensor_and_to_the_output_itself():
    x = leaf([1.0, 2.0])
    h = x * 3
    y = (h * h).sum()
    dh, dy = grad(y, [h, y])
    np.testing.assert_array_equal(dh.numpy(), 2 * h.numpy())
    assert dy.item() == 1.0


def test_grad_outputs_and_several_outputs():
    x = leaf([1.0, 2.0])
    cotangent = to_tensor([10.0, 100.0], dtype="float64")
    (dx,) = grad([x * 2, (x * x).sum()], x, grad_outputs=[cotangent, None])
    np.testing.assert_array_equal(dx.numpy(), [20 + 2, 200 + 4])
    (same,) = grad(x, x, grad_outputs=cotangent)
    assert same is not cotangent
    assert cotangent.stop_gradient


def test_allow_unused_and_no_grad_vars():
    x, y = leaf(2.0), leaf(3.0)
    h = x * x
    out = h * x + h
    assert grad(x * 1, [x, y], allow_unused=True)[1] is None
    (dx,) = grad(out, x, no_grad_vars=h, retain_graph=True)
    assert dx.item() == 4.0  # h taken as a constant
    (dx,) = grad(out, x)
    assert dx.item() == 3 * 4.0 + 2 * 2.0


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("f", "derivatives"),
    [
        (lambda x: x.sin(), [np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x)]),
        (lambda x: x.tanh(), [
            lambda x: 1 - np.tanh(x) ** 2,
            lambda x: -2 * np.tanh(x) * (1 - np.tanh(x) ** 2),
            lambda x: (1 - np.tanh(x) ** 2) * (6 * np.tanh(x) ** 2 - 2),
        ]),
        (lambda x: x * x * x * x, [lambda x: 4 * x**3, lambda x: 12 * x**2, lambda x: 24 * x]),
        (lambda x: 1 / x, [lambda x: -(x**-2.0), lambda x: 2 * x**-3.0, lambda x: -6 * x**-4.0]),
    ],
    ids=["sin", "tanh", "x^4", "1/x"],
)  # fmt: skip
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_third_order_against_closed_forms(f, derivatives, captured):
    def three(x):
        found, value = [], f(x)
        for _ in range(3):
            (value,) = grad(value.sum(), x, create_graph=True)
            found.append(value)
        return found

    x = leaf([0.3, -1.2, 2.0])
    for found, want in zip((to_static(three) if captured else three)(x), derivatives, strict=True):
        # at most 64 roundings of terms no larger than 128
        np.testing.assert_allclose(found.numpy(), want(x.numpy()), rtol=0, atol=64 * 128 * EPS)


def test_backward_of_several_tensors_at_once():
    x = leaf([1.0, 2.0])
    h = x * x
    backward([h.sum(), h], [None, to_tensor([1.0, 10.0], dtype="float64")])
    np.testing.assert_array_equal(x.grad.numpy(), [2 * 1 * 2, 2 * 2 * 11])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: grad(x.sum(), x, only_inputs=False), ConfigError, "only_inputs=False"),
        (lambda x: grad(x.sum(), x, dump_backward_graph_path="a"), ConfigError, "dump_backward_graph_path='a'"),
        (lambda x: grad([], x), GradError, "outputs must be a Tensor or a non-empty list"),
        (lambda x: grad(x, 3), GradError, "inputs must be a Tensor or a non-empty list of Tensors, got int"),
        (lambda x: grad(x, x, [None, None]), GradError, "2 entries in grad_outputs for 1 Tensors"),
        (lambda x: grad(x, x, [3.0]), GradError, "grad_outputs holds Tensors or None, got float"),
        (
            lambda x: grad(x * 1, x, to_tensor([1.0])),
            GradError,
            r"the gradient given has shape \[1\], the Tensor \[2\]",
        ),
        (lambda x: grad(x * 1, to_tensor([1.0])), GradError, "an input .* has stop_gradient=True"),
        (lambda x: grad(to_tensor([1.0]), x), GradError, "this Tensor .* has stop_gradient=True"),
        (lambda x: grad(x * 1, leaf(1.0)), GradError, "input 0 .* was not used"),
        (lambda x: backward([x, x]), GradError, "appears twice"),
    ],
)
def test_refuses_what_it_cannot_do(call, error, message):
    with pytest.raises(error, match=message):
        call(leaf([1.0, 2.0]))


# products of vectors and Jacobians


def both(x, y):
    return x.sin() * y, (x * y).sum()


def test_vjp_and_jvp_agree_with_the_jacobian():
    x, y = np.array([0.5, 1.5]), np.array([2.0, -1.0])
    jacobian_x = np.vstack([np.diag(np.cos(x) * y), y])  # rows: both outputs
    jacobian_y = np.vstack([np.diag(np.sin(x)), x])
    u, w = np.array([1.0, 2.0]), 3.0
    ys, (gx, gy) = vjp(both, [to_tensor(x), to_tensor(y)], [to_tensor(u), to_tensor(w)])
    row = np.array([*u, w])
    np.testing.assert_allclose(ys[0].numpy(), np.sin(x) * y, rtol=4 * EPS)
    np.testing.assert_allclose(gx.numpy(), row @ jacobian_x, rtol=32 * EPS)
    np.testing.assert_allclose(gy.numpy(), row @ jacobian_y, rtol=32 * EPS)
    _, (first, second) = jvp(both, [to_tensor(x), to_tensor(y)], [to_tensor(u), to_tensor(u)])
    want = (jacobian_x + jacobian_y) @ u
    np.testing.assert_allclose([*first.tolist(), second.item()], want, rtol=32 * EPS)


def test_default_vectors_are_ones_and_structures_are_kept():
    x = to_tensor([1.0, 2.0], dtype="float64")
    out, g = vjp(lambda x: x * x, x)
    np.testing.assert_array_equal(g.numpy(), [2.0, 4.0])
    out, t = jvp(lambda x: x * x, x)
    assert isinstance(out, Tensor)
    np.testing.assert_array_equal(t.numpy(), [2.0, 4.0])
    assert x.stop_gradient
    assert t.stop_gradient
    _, (_, b) = vjp(lambda x, y: x * 1, [x, x])
    np.testing.assert_array_equal(b.numpy(), [0.0, 0.0])


def test_jvp_of_a_constant_is_zero_and_products_differentiate_again():
    x = leaf([1.0, 2.0])
    _, t = jvp(lambda x: x * 1, x)
    np.testing.assert_array_equal(t.numpy(), [1.0, 1.0])
    with no_grad():
        _, t = jvp(lambda x: x * x * x, x)
    _, t = jvp(lambda x: x * x * x, x)
    (again,) = grad(t.sum(), x)
    np.testing.assert_array_equal(again.numpy(), 6 * x.numpy())
    with pytest.raises(GradError, match="1 entries in v for 2 Tensors"):
        jvp(lambda x, y: x + y, [x, x], x)


# matrices


def test_jacobian_shapes_and_lazy_rows():
    a = np.arange(6.0).reshape(3, 2)
    x = leaf([1.0, 2.0])
    J = jacobian(to_tensor(a).matmul(x), x)
    assert J.shape == [3, 2]
    np.testing.assert_array_equal(J[1].numpy(), a[1])
    assert "1 rows computed" in repr(J)
    np.testing.assert_array_equal(J[:].numpy(), a)
    np.testing.assert_array_equal(J[:, 1].numpy(), a[:, 1])
    np.testing.assert_array_equal(J[-1, 0].numpy(), a[-1, 0])
    np.testing.assert_array_equal(J[::2, :].numpy(), a[::2])
    np.testing.assert_array_equal(J[..., 0].numpy(), a[:, 0])
    np.testing.assert_array_equal(np.asarray(J), a)
    assert J.ndim == 2


def test_jacobian_of_and_with_respect_to_scalars():
    s = leaf(3.0)
    assert jacobian(s * s, s).numpy() == 6.0
    np.testing.assert_array_equal(jacobian(s * to_tensor([1.0, 2.0], dtype="float64"), s)[:].numpy(), [1.0, 2.0])
    x = leaf([1.0, 2.0])
    np.testing.assert_array_equal(jacobian((x * x).sum(), x)[:].numpy(), [2.0, 4.0])


def test_batched_jacobian():
    x = leaf(np.arange(6.0).reshape(3, 2))
    J = jacobian(x * x, x, batch_axis=0)
    assert J.shape == [3, 2, 2]
    want = np.stack([np.diag(2 * row) for row in x.numpy()])
    np.testing.assert_array_equal(J[:].numpy(), want)
    np.testing.assert_array_equal(J[:, 1, :].numpy(), want[:, 1])
    np.testing.assert_array_equal(J[1:, :, 0].numpy(), want[1:, :, 0])
    np.testing.assert_array_equal(jacobian((x * x).sum(-1), x, batch_axis=0)[:].numpy(), 2 * x.numpy())


def test_several_ys_and_xs_and_unused_ones():
    x, y = leaf([1.0, 2.0]), leaf([3.0])
    (a, b), (c, d) = jacobian([x * x, y * 5], [x, y])
    np.testing.assert_array_equal(a[:].numpy(), np.diag([2.0, 4.0]))
    np.testing.assert_array_equal(b[:].numpy(), np.zeros((2, 1)))
    np.testing.assert_array_equal(c[:].numpy(), np.zeros((1, 2)))
    assert d[0, 0].item() == 5.0


def test_hessians():
    a = np.array([[2.0, 1.0], [1.0, 4.0]])
    x, y = leaf([1.0, 2.0]), leaf([3.0])
    H = hessian((x * to_tensor(a).matmul(x)).sum() / 2, x)
    assert H.shape == [2, 2]
    np.testing.assert_array_equal(H[:].numpy(), a)
    (xx, xy), (yx, yy) = hessian((x * x).sum() * y, [x, y])
    np.testing.assert_array_equal(xx[:].numpy(), np.diag([6.0, 6.0]))
    np.testing.assert_array_equal(xy[:].numpy(), [[2.0], [4.0]])
    np.testing.assert_array_equal(yx[:].numpy(), [[2.0, 4.0]])
    np.testing.assert_array_equal(yy[:].numpy(), [[0.0]])
    rows = leaf(np.arange(4.0).reshape(2, 2))
    batched = hessian((rows * rows * rows).sum(-1), rows, batch_axis=0)
    np.testing.assert_array_equal(batched[:].numpy(), np.stack([np.diag(6 * r) for r in rows.numpy()]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: jacobian(x * 1, x), ShapeError, r"ys has shape \[2, 2\], needs 0 or 1 dims"),
        (lambda x: jacobian(x.sum(), x, batch_axis=0), ShapeError, r"ys has shape \[\], needs 1 or 2 dims"),
        (lambda x: jacobian(x[:1], x, batch_axis=0), ShapeError, "ys has 1 samples, xs 2"),
        (lambda x: jacobian(x, x, batch_axis=1), ConfigError, "batch_axis is None or 0, got 1"),
        (lambda x: jacobian(x.sum(), to_tensor([1.0])), GradError, "xs has stop_gradient=True"),
        (lambda x: hessian(x.sum(), to_tensor([1.0])), GradError, "xs has stop_gradient=True"),
        (lambda x: hessian(x[0], x[0]), ShapeError, r"hessian: ys has shape \[2\], needs one element\n"),
        (lambda x: hessian(x, x, batch_axis=0), ShapeError, "needs one element per sample"),
        (lambda x: jacobian(x[0], x[0])[5], IndexError, "row 5 is out of range"),
        (lambda x: jacobian(x[0], x[0])[5:], IndexError, "selects no row"),
        (lambda x: jacobian(x[0], x[0])[0, 0, 0], IndexError, "3 indices for a Jacobian"),
        (lambda x: jacobian(x[0], x[0])[None], IndexError, "takes no new dims"),
    ],
)
def test_matrix_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(leaf([[1.0, 2.0], [3.0, 4.0]]))


# saved tensors


def test_saved_tensors_go_through_the_hooks():
    packed, unpacked = [], []

    def pack(t):
        packed.append(t.shape)
        return t.numpy()

    def unpack(a):
        unpacked.append(a.shape)
        return to_tensor(a)

    x = leaf([1.0, 2.0])
    with saved_tensors_hooks(pack, unpack):
        y = (x * x).sin().sum()
    count = len(packed)
    assert count >= 3
    assert not unpacked
    z = y * 2  # outside: not packed
    z.backward()
    assert len(packed) == count == len(unpacked)
    np.testing.assert_allclose(x.grad.numpy(), 4 * x.numpy() * np.cos(x.numpy() ** 2), rtol=8 * EPS)


def test_saved_tensor_hooks_and_py_layers():
    class Square(autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return g * 2 * ctx.saved_tensor()[0]

    x = leaf([1.0, 2.0])
    with saved_tensors_hooks(lambda t: t.numpy(), lambda a: to_tensor(a + 1)):
        y = Square.apply(x)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [4.0, 6.0])


def test_bad_saved_tensor_hooks():
    with pytest.raises(ConfigError, match="pack_hook is a function, got 3"):
        saved_tensors_hooks(3, len)
    x = leaf(1.0)
    with saved_tensors_hooks(lambda t: t, lambda t: 3):
        y = x * x
    with pytest.raises(GradError, match="must return a Tensor, got int"):
        y.backward()
