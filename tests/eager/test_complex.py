"""Gradients of complex Tensors, dL/dx + i dL/dy, against finite differences; the page docs/complex.md is true."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import autograd
from polyreme.eager.tensor import to_tensor
from polyreme.errors import DTypeError
from polyreme.jit import to_static

STEP = np.finfo("float64").eps ** (1 / 3)  # balances rounding eps / h with the error h^2 of a central difference
RNG = np.random.default_rng(21)


def draw(*shape):
    return RNG.standard_normal(shape) + 1j * RNG.standard_normal(shape)


# off the branch cuts of every function below, and off 0
POINTS = np.array([0.6 + 0.4j, -0.7 + 0.3j, 0.5 - 0.8j, -0.3 - 0.6j, 2 + 1j, -1.5 + 2j, 1 - 2j, -2 - 1j])
ELEMENTWISE = {
    **{n: getattr(np, n) for n in ("abs", "angle", "conj", "real", "imag", "exp", "expm1", "log", "log2", "log10")},
    **{
        n: getattr(np, n)
        for n in ("log1p", "sqrt", "square", "sin", "cos", "tan", "sinh", "cosh", "tanh", "reciprocal")
    },
    **{f"a{n}": getattr(np, f"arc{n}") for n in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "rsqrt": lambda z: 1 / np.sqrt(z),
    "sgn": lambda z: z / np.abs(z),
    "neg": np.negative,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_gradient_of_an_elementwise_function(name):
    reference = ELEMENTWISE[name]
    weight = draw(len(POINTS))

    def loss(z):
        return np.real(np.conj(weight) * reference(z))

    z = to_tensor(POINTS, stop_gradient=False)
    out = getattr(paddle, name)(z)
    np.testing.assert_allclose(out.numpy(), reference(POINTS), rtol=1e-12)
    out.backward(to_tensor(weight if np.iscomplexobj(out.numpy()) else weight.real))
    want = (loss(POINTS + STEP) - loss(POINTS - STEP)) + 1j * (loss(POINTS + 1j * STEP) - loss(POINTS - 1j * STEP))
    # third derivatives are below 1e4: |z|^-7 of a square root at 0.67
    np.testing.assert_allclose(z.grad.numpy(), want / (2 * STEP), atol=1e4 * STEP**2)


def weights_of(outs):
    """A number for every part of every output: the loss is the sum of their products, in NumPy."""
    generator = np.random.default_rng(5)
    drawn = [generator.standard_normal(o.shape) + 1j * generator.standard_normal(o.shape) for o in outs]
    return [w if np.iscomplexobj(o) else w.real for w, o in zip(drawn, outs, strict=True)]


def without_phase(vectors):
    """|vectors|^2: eigenvectors and singular vectors have a phase that nothing fixes."""
    return (vectors * vectors.conj()).real()


L = paddle.linalg
MATRIX = draw(3, 3) + 3 * np.eye(3)
TALL = draw(4, 3)
FUNCTIONS = {
    "as_complex": (lambda x: paddle.as_complex(x), RNG.standard_normal((3, 2))),
    "as_real": (lambda z: paddle.as_real(z), draw(3)),
    "polar": (lambda r, t: paddle.polar(r, t), RNG.uniform(0.5, 1, 3), RNG.standard_normal(3)),
    "real_times_complex": (lambda x, z: x * z, RNG.standard_normal(3), draw(3)),
    "quotient": (lambda x, z: x / z, draw(3), draw(3)),
    "power": (lambda x, z: x**z, np.abs(draw(3)) + draw(3) / 4, draw(3)),
    "cube": (lambda z: z**3, draw(3)),
    "sums": (lambda z: (z.sum(0), z.mean(1), z.prod(1), z.cumsum(0), z.cumprod(1)), draw(2, 3)),
    "shapes": (lambda z: paddle.concat([z.transpose([1, 0])[1:].flatten(), z[0, ::2]]), draw(2, 3)),
    "where": (lambda z: paddle.where(z.real() > 0, z * z, z.conj()), draw(4)),
    "matmul": (lambda a, b: a @ b, draw(2, 2, 3), draw(3, 2)),
    "matmul_transposed": (lambda a, b: paddle.matmul(a, b, True, True), draw(3, 2), draw(2, 3)),
    "einsum": (lambda a, b: paddle.einsum("ij,jk,ik->k", a, b, a.conj()), draw(2, 3), draw(3, 3)),
    "norm": (lambda z: (L.norm(z), L.norm(z, 1, axis=0)), draw(2, 3)),
    "inverse": (L.inv, MATRIX),
    "det": (lambda a: (L.det(a), paddle.abs(L.det(a)).log()), MATRIX),
    "solve": (L.solve, MATRIX, draw(3, 2)),
    "triangular_solve": (lambda a, b: L.triangular_solve(a, b, upper=False), MATRIX, draw(3, 2)),
    "lu_solve": (lambda a, b: L.lu_solve(b, *L.lu(a), trans="C"), MATRIX, draw(3, 2)),
    "lstsq": (lambda a, b: L.lstsq(a, b)[0], TALL, draw(4, 1)),
    "pinv": (L.pinv, TALL),
    "matrix_exp": (L.matrix_exp, MATRIX / 4),
    "matrix_power": (lambda a: L.matrix_power(a, -2), MATRIX),
    "cholesky": (lambda a: L.cholesky(a @ a.conj().transpose([1, 0])), MATRIX),
    "eigh": (lambda a: (lambda w, v: (w, without_phase(v)))(*L.eigh(a + a.conj().transpose([1, 0]))), MATRIX),
    "eigvals": (L.eigvals, MATRIX),
    "eig": (lambda a: (lambda w, v: (w, without_phase(v)))(*L.eig(a)), MATRIX),
    "qr": (L.qr, TALL),
    "svd": (lambda a: (lambda u, s, v: (s, without_phase(u), without_phase(v), u @ v))(*L.svd(a)), TALL),
    "householder": (lambda a, t: L.householder_product(a, t), TALL, draw(3)),
    "fft": (lambda z: (paddle.fft.fft(z), paddle.fft.ifft2(z, (3, 2)), paddle.fft.fftshift(z)), draw(2, 4)),
    "half_spectra": (
        lambda z, x: (paddle.fft.irfft(z), paddle.fft.hfft(z, 5), paddle.fft.rfft(x)),
        draw(3),
        POINTS.real,
    ),
    "stft": (lambda z: paddle.signal.stft(z, 4), draw(8)),
}


@pytest.mark.slow_cases("lstsq", "matrix_exp")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_equals_finite_differences(name):
    function, *values = FUNCTIONS[name]

    def outputs(*tensors):
        outs = function(*tensors)
        return list(outs) if isinstance(outs, (tuple, list)) else [outs]

    def loss(*arrays):
        outs = [out.numpy() for out in outputs(*map(to_tensor, arrays))]
        return sum(np.real(out * w).sum() for out, w in zip(outs, weights_of(outs), strict=True))

    tensors = [to_tensor(v, stop_gradient=False) for v in values]
    outs = outputs(*tensors)
    # d Re(sum(w out)) is Re(conj(conj(w)) d out)
    autograd.backward(outs, [to_tensor(np.conj(w)) for w in weights_of([out.numpy() for out in outs])])
    for index, value in enumerate(values):
        unit = draw(*value.shape) if np.iscomplexobj(value) else RNG.standard_normal(value.shape)
        unit = unit / np.linalg.norm(unit)
        ends = [loss(*(v + sign * STEP * unit if i == index else v for i, v in enumerate(values))) for sign in (1, -1)]
        gradient = tensors[index].grad.numpy()
        assert gradient.dtype == value.dtype
        # the slope along `unit` is Re(conj(gradient) unit); third derivatives are below 1e4 here
        slope = float(np.sum(np.conj(gradient) * unit).real)
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * STEP), abs=1e4 * STEP**2, rel=1e4 * STEP**2)


def test_second_derivatives():
    """g of sum |z|^4 is 4 |z|^2 z; the gradient of Re(sum conj(c) g) follows the same convention."""
    c = draw(3)
    point = draw(3)
    z = to_tensor(point, stop_gradient=False)
    (g,) = paddle.grad([(z.abs() ** 4).sum()], [z], create_graph=True)
    np.testing.assert_allclose(g.numpy(), 4 * np.abs(point) ** 2 * point, rtol=1e-13)
    (g * to_tensor(c.conj())).real().sum().backward()
    # d/dx + i d/dy of 4 |z|^2 Re(conj(c) z)
    want = 8 * point * (c.conj() * point).real + 4 * np.abs(point) ** 2 * c
    np.testing.assert_allclose(z.grad.numpy(), want, rtol=1e-13)


def test_a_captured_step_gives_what_the_eager_one_gives():
    def step(z, a):
        spectrum = paddle.fft.fft2(z.exp() @ a)
        (gradient,) = paddle.grad([(spectrum.abs() ** 2).sum() + L.inv(a).imag().sum()], [a])
        return gradient

    z, a = to_tensor(MATRIX / 3), to_tensor(MATRIX, stop_gradient=False)
    # 9 terms a product and a transform
    np.testing.assert_allclose(to_static(step)(z, a).numpy(), step(z, a).numpy(), rtol=1e-13)


def test_descent_along_the_gradient_finds_a_complex_solution():
    a, want = to_tensor(MATRIX), draw(3)
    z = paddle.create_parameter([3], "complex128", default_initializer=paddle.nn.initializer.Assign(np.zeros(3)))
    optimizer = paddle.optimizer.SGD(0.02, parameters=[z])
    aim = a @ to_tensor(want)
    for _ in range(200):
        loss = ((a @ z - aim).abs() ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    np.testing.assert_allclose(z.numpy(), want, atol=1e-3)


def test_a_complex_tensor_is_no_real_number():
    z = to_tensor([1 + 2j])
    assert complex(z) == 1 + 2j
    for make in (float, int):
        with pytest.raises(DTypeError, match=rf"{make.__name__}\(Tensor\) of a complex64 one; take .real\(\), .abs"):
            make(z)
