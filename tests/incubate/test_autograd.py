"""incubate.autograd: matrices of functions, both modes in static Programs, the switch for primitives."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import static
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, GradError, ProgramError, ShapeError
from polyreme.incubate import autograd
from polyreme.incubate.autograd import Hessian, Jacobian
from polyreme.jit import to_static

EPS = 2.0**-52
X, Y = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.5, -1.0], [2.0, 1.5]])


def double(value):
    return to_tensor(value, dtype="float64")


def both(x, y):
    return x * y, x.sum(-1, keepdim=True)


def test_jacobian_of_several_inputs_and_outputs():
    J = Jacobian(both, [double(X), double(Y)])
    product = np.hstack([np.diag(Y.ravel()), np.diag(X.ravel())])
    sums = np.hstack([np.kron(np.eye(2), [1.0, 1.0]), np.zeros((2, 4))])
    want = np.vstack([product, sums])
    assert J.shape == [6, 8]
    np.testing.assert_array_equal(J[1].numpy(), want[1])
    np.testing.assert_array_equal(J[:].numpy(), want)
    np.testing.assert_array_equal(J[:, 0].numpy(), want[:, 0])


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_batched_jacobian(captured):
    def run(x, y):
        return Jacobian(both, [x, y], is_batched=True)[:]

    found = (to_static(run) if captured else run)(double(X), double(Y)).numpy()
    for sample in range(2):
        product = np.hstack([np.diag(Y[sample]), np.diag(X[sample])])
        np.testing.assert_array_equal(found[sample], np.vstack([product, [1, 1, 0, 0]]))


def test_hessians():
    H = Hessian(lambda x: (x**3).sum(), double(X))
    np.testing.assert_allclose(H[:].numpy(), np.diag(6 * X.ravel()), rtol=8 * EPS)
    H = Hessian(lambda x, y: (x * x * y).sum(-1, keepdim=True), [double(X), double(Y)], is_batched=True)
    assert H.shape == [2, 4, 4]
    for sample, (x, y) in enumerate(zip(X, Y, strict=True)):
        want = np.block([[np.diag(2 * y), np.diag(2 * x)], [np.diag(2 * x), np.zeros((2, 2))]])
        np.testing.assert_allclose(H[sample].numpy(), want, rtol=8 * EPS)
    np.testing.assert_array_equal(Hessian(lambda x: x.sum() * 0 + 1.0, double(X))[:].numpy(), np.zeros((4, 4)))
    np.testing.assert_array_equal(Hessian(lambda x: double(1.0), double(X))[0].numpy(), np.zeros(4))


def test_matrices_differentiate_again():
    x = to_tensor(X, dtype="float64", stop_gradient=False)
    (dx,) = paddle.grad(Jacobian(lambda x: x**3, x)[:].sum(), x)
    np.testing.assert_allclose(dx.numpy(), 6 * X, rtol=8 * EPS)


def test_forward_grad_follows_the_tape():
    x = to_tensor(X, dtype="float64", stop_gradient=False)
    y = x * x
    first = autograd.forward_grad(y.sin(), x, double(Y))
    np.testing.assert_allclose(first.numpy(), np.cos(X * X) * 2 * X * Y, rtol=0, atol=64 * EPS)
    second, constant = autograd.forward_grad([first, x[0] * 0 + 1], [x], [double(Y)])
    want = -np.sin(X * X) * (2 * X * Y) ** 2 + np.cos(X * X) * 2 * Y * Y
    np.testing.assert_allclose(second.numpy(), want, rtol=0, atol=256 * EPS * 8)
    np.testing.assert_array_equal(constant.numpy(), [0.0, 0.0])
    (again,) = autograd.grad([first], [x])
    np.testing.assert_allclose(again.numpy() * Y, want, rtol=0, atol=256 * EPS * 8)


def test_static_programs_have_both_modes():
    paddle.enable_static()
    try:
        autograd.enable_prim()
        assert autograd.prim_enabled()
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup):
            x, v = static.data("x", [2, 2], "float64"), static.data("v", [2, 2], "float64")
            x.stop_gradient = False
            y = (x * x).sin()
            forward = autograd.forward_grad(y, x, v)
            ones = autograd.forward_grad(y, x)
            reverse = autograd.grad(y, x, v)
            _, along = autograd.jvp(lambda x: (x * x).sin(), x, v)
            autograd.prim2orig()
            with pytest.raises(ConfigError, match="block is the current block"):
                autograd.prim2orig(static.Program().global_block())
            with pytest.raises(ConfigError, match="blacklist is a list of operator names"):
                autograd.prim2orig(blacklist=[3])
        autograd.disable_prim()
        assert not autograd.prim_enabled()
        executor = static.Executor()
        executor.run(startup)
        found = executor.run(main, feed={"x": X, "v": Y}, fetch_list=[forward, ones, reverse, along])
    finally:
        paddle.disable_static()
    slope = np.cos(X * X) * 2 * X
    for got, want in zip(found, [slope * Y, slope, slope * Y, slope * Y], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=64 * EPS)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: Jacobian(lambda x: x.sum(), x, is_batched=True), ShapeError, "func's result .* dim 0 is the batch"),
        (lambda x: Jacobian(lambda x: 3, x), GradError, "func's result must be a Tensor"),
        (lambda x: Hessian(lambda x: x, x), ShapeError, r"has shape \[2, 2\], needs one element; sum it"),
        (lambda x: Hessian(lambda x: x, x, True), ShapeError, "needs one element per sample"),
        (lambda x: autograd.forward_grad(x * 1, x), GradError, "an input .* has stop_gradient=True"),
        (lambda x: autograd.enable_prim(), ProgramError, "enable_prim is for static Programs"),
        (lambda x: autograd.disable_prim(), ProgramError, "disable_prim is for static Programs"),
        (lambda x: autograd.prim2orig(), ProgramError, "prim2orig is for static Programs"),
    ],
)
def test_refuses_what_it_cannot_do(call, error, message):
    with pytest.raises(error, match=message):
        call(double(X))
