"""derivatives, laplacian and hvp, eager and captured, against closed forms and nested gradients."""

import numpy as np
import pytest

from polyreme import autograd, nn
from polyreme.autograd import derivatives, grad, hessian, hvp, jvp, laplacian
from polyreme.distributed.fleet.utils import recompute
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, DTypeError, GradError, ShapeError
from polyreme.jit import to_static
from polyreme.nn import functional as F
from polyreme.ops.manipulation import concat

EPS = 2.0**-52
POINTS = np.random.default_rng(3).uniform(-1, 1, (5, 2))
either_way = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


def leaf(value):
    return to_tensor(np.asarray(value), dtype="float64", stop_gradient=False)


def plain(value):
    return to_tensor(np.asarray(value), dtype="float64")


class Network(nn.Layer):
    """Everything a network for equations is made of, and a kernel with a backward of its own (layer_norm)."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 6), nn.LayerNorm(6), nn.Linear(6, 1)
        for p, seed in zip(self.parameters(), range(9), strict=False):
            value = np.random.default_rng(seed).normal(size=p.shape)
            p._array = leaf(value)._array

    def forward(self, x):
        h = self.norm(self.first(x).tanh())
        return self.last(F.gelu(h) * h.sin())


def nested(fn, x, directions):
    """fn differentiated along each direction in turn, by reverse mode over reverse mode."""
    value = fn(x)
    for d in directions:
        (g,) = grad(value.sum(), x, create_graph=True)
        value = (g * plain(d)).sum(-1, keepdim=True)
    return value


@either_way
def test_powers_of_one_derivative_against_closed_forms(captured):
    def run(x):
        return derivatives(lambda x: (x.sin(), x * x * x), x, order=4)

    x = leaf([0.3, -1.2])
    found = (to_static(run) if captured else run)(x)
    s, c, v = np.sin(x.numpy()), np.cos(x.numpy()), x.numpy()
    for (a, b), sine, cube in zip(found, [s, c, -s, -c, s], [v**3, 3 * v**2, 6 * v, 6 + 0 * v, 0 * v], strict=True):
        np.testing.assert_allclose(a.numpy(), sine, rtol=0, atol=32 * EPS)
        np.testing.assert_allclose(b.numpy(), cube, rtol=0, atol=32 * 8 * EPS)


@pytest.mark.slow
def test_a_network_and_the_gradients_of_its_parameters():
    net, v = Network(), np.array([0.5, -2.0])

    def fast(x):
        _, _, second, third = derivatives(net, x, plain(np.tile(v, (5, 1))), order=3)
        (second * third).mean().backward()
        return second, third

    def slow(x):
        second, third = nested(net, x, [v] * 2), nested(net, x, [v] * 3)
        (second * third).mean().backward()
        return second, third

    def measure(fn, x):
        found = [t.numpy() for t in to_static(fn)(x)]
        grads = [p.grad.numpy() for p in net.parameters()]
        net.clear_gradients()
        return [*found, *grads]

    for got, want in zip(measure(fast, plain(POINTS)), measure(slow, leaf(POINTS)), strict=True):
        # sums of some 4096 products, each of up to 4 numbers below 8
        np.testing.assert_allclose(got, want, rtol=0, atol=4096 * EPS * max(np.abs(want).max(), 1))


@pytest.mark.slow_cases("apart")
@pytest.mark.parametrize("count", [3, 6], ids=["apart", "as_one_array"])
def test_laplacian_and_its_gradient_eager_and_captured(count):
    first, last = nn.Linear(count, 4), nn.Linear(4, 1)
    for p, seed in zip([*first.parameters(), *last.parameters()], range(4), strict=True):
        p._array = leaf(np.random.default_rng(seed).normal(size=p.shape))._array
    points = np.random.default_rng(5).uniform(-1, 1, (3, count))

    def run(x):
        lap = laplacian(lambda x: last(first(x).tanh()), x)[1]
        lap.square().sum().backward()
        return lap

    y = np.tanh(points @ first.weight.numpy() + first.bias.numpy())
    bend = (first.weight.numpy() ** 2).sum(0) * last.weight.numpy()[:, 0]  # of -2 y (1 - y^2) in the sum
    want = ((-2 * y * (1 - y * y)) @ bend)[:, None]
    for fn in (run, to_static(run)):
        x = leaf(points)
        np.testing.assert_allclose(fn(x).numpy(), want, rtol=0, atol=256 * EPS * np.abs(want).max())
        slope = (-2 * (1 - y * y) * (1 - 3 * y * y) * bend) @ first.weight.numpy().T * 2 * want
        np.testing.assert_allclose(x.grad.numpy(), slope, rtol=0, atol=1024 * EPS * np.abs(slope).max())


def test_coordinates_of_several_tensors():
    x, t = plain(POINTS), plain(POINTS[:, :1])

    def f(x, t):
        return (x * x * x).sum(-1, keepdim=True) * t * t

    cube, time = (POINTS**3).sum(-1, keepdims=True), POINTS[:, :1]
    np.testing.assert_allclose(
        laplacian(f, [x, t])[1].numpy(),
        6 * POINTS.sum(-1, keepdims=True) * time**2 + 2 * cube,
        rtol=0,
        atol=64 * EPS * 8,
    )
    np.testing.assert_allclose(laplacian(f, [x, t], coordinates=[-1])[1].numpy(), 2 * cube, rtol=0, atol=64 * EPS * 8)
    np.testing.assert_array_equal(laplacian(lambda x: x * 3, x)[1].numpy(), np.zeros((5, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("captured", [pytest.param(False, id="eager", marks=pytest.mark.slow), True])
def test_derivatives_of_derivatives(captured):
    x = leaf([[0.5, 2.0], [1.5, -1.0]])
    e0, e1 = plain([[1.0, 0.0]] * 2), plain([[0.0, 1.0]] * 2)

    def f(x):  # x^3 y^2
        return x[:, :1] ** 3 * x[:, 1:] ** 2

    def run(x):
        _, mixed = derivatives(lambda x: derivatives(f, x, e0, order=2)[2], x, e1, order=1)  # 12 x y
        bilaplacian = laplacian(lambda x: laplacian(f, x)[1], x)[1]  # of 6 x y^2 + 2 x^3: 12 x + 12 x
        (slope,) = grad(mixed.sum(), x, create_graph=True)
        (again,) = grad(slope[:, 0].sum(), x)  # 0, 12
        return mixed, bilaplacian, slope, again

    mixed, bilaplacian, slope, again = (to_static(run) if captured else run)(x)
    a, b = x.numpy()[:, :1], x.numpy()[:, 1:]
    for got, want in [(mixed, 12 * a * b), (bilaplacian, 24 * a), (slope, 12 * np.hstack([b, a])),
                      (again, [[0.0, 12.0]] * 2)]:  # fmt: skip
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=64 * 64 * EPS)


def test_what_is_taped_follows_who_wants_gradients():
    x, w = plain([1.0, 2.0]), leaf([3.0, 4.0])
    assert derivatives(lambda x: x * x, x)[1].stop_gradient
    assert laplacian(lambda x: x * x, x)[1].stop_gradient
    _, slope, _ = derivatives(lambda x: x * x * w, x)
    (dw,) = grad(slope.sum(), w)
    np.testing.assert_array_equal(dw.numpy(), [2.0, 4.0])
    with no_grad():
        assert derivatives(lambda x: x * x * w, x)[1].stop_gradient
        assert jvp(lambda x: x * x * w, leaf([1.0, 2.0]))[1].stop_gradient
    v = leaf([1.0, 1.0])
    (dv,) = grad(derivatives(lambda x: x * x, x, v)[2].sum(), v)  # 2 v^2
    np.testing.assert_array_equal(dv.numpy(), [4.0, 4.0])


@either_way
def test_hessian_vector_products(captured):
    a = np.array([[2.0, 1.0], [1.0, 4.0]])

    def run(x, y, vx, vy):
        return hvp(lambda x, y: (x * plain(a).matmul(x)).sum() * y.sum(), [x, y], [vx, vy])

    x, y, v = np.array([1.0, 2.0]), np.array([3.0]), np.array([0.5, -1.0])
    value, (hx, hy) = (to_static(run) if captured else run)(plain(x), plain(y), plain(v), plain([2.0]))
    assert value.item() == x @ a @ x * 3
    np.testing.assert_allclose(hx.numpy(), 2 * 3 * a @ v + 2 * a @ x * 2, rtol=16 * EPS)
    np.testing.assert_allclose(hy.numpy(), [2 * a @ x @ v], rtol=16 * EPS)
    with pytest.raises(GradError, match=r"hvp: func must return one number, its result has shape \[2\]"):
        hvp(lambda x: x * x, plain(x))


@pytest.mark.slow_cases("apart")
@pytest.mark.parametrize("size", [3, 7], ids=["apart", "stacked"])
def test_a_whole_hessian_goes_forward_over_reverse(size, monkeypatch):
    x = leaf(np.random.default_rng(0).uniform(1, 2, size))
    want = np.diag(1 / x.numpy()) * x.numpy().sum() + np.add.outer(*[np.log(x.numpy()) + 1] * 2)
    H = hessian((x.log() * x).sum() * x.sum(), x)
    monkeypatch.setattr(autograd.Jacobian, "_computed", None)  # no row by itself
    np.testing.assert_allclose(H[:].numpy(), want, rtol=0, atol=64 * EPS * np.abs(want).max())
    assert f"{size} rows computed" in repr(H)
    (third,) = grad(H[:].sum(), x)
    v = x.numpy()
    np.testing.assert_allclose(third.numpy(), (1 / v).sum() - v.sum() / v**2 + 2 * size / v, rtol=256 * EPS)
    batch = leaf(np.random.default_rng(1).uniform(1, 2, (2, size)))
    J = autograd.jacobian(batch.cumsum(-1) ** 2, batch, batch_axis=0)
    want = 2 * np.cumsum(batch.numpy(), -1)[:, :, None] * np.tril(np.ones((size, size)))
    np.testing.assert_allclose(J[:].numpy(), want, rtol=64 * EPS)
    np.testing.assert_allclose(J[:, 1].numpy(), want[:, 1], rtol=64 * EPS)
    s = leaf(2.0)
    np.testing.assert_array_equal(autograd.jacobian(s * s * plain([1.0, 2.0]), s)[:].numpy(), [4.0, 8.0])


class Cube(autograd.PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, g):
        return g * 3 * ctx.saved_tensor()[0] ** 2


def test_through_nodes_that_know_only_their_backward():
    x = leaf([1.0, 2.0])
    _, t = jvp(lambda x: Cube.apply(x.sin()) * x, x)
    s, c = np.sin(x.numpy()), np.cos(x.numpy())
    np.testing.assert_allclose(t.numpy(), 3 * s * s * c * x.numpy() + s**3, rtol=32 * EPS)
    _, t = jvp(lambda x: recompute(lambda x: x.sin() * x, x) * 2, x)
    np.testing.assert_allclose(t.numpy(), 2 * (c * x.numpy() + s), rtol=32 * EPS)
    with pytest.raises(GradError, match="Cube defines its own backward, so only a first derivative"):
        derivatives(Cube.apply, x)


def test_a_layer_captured_by_itself_and_control_flow_on_tensors():
    @to_static
    def f(x):
        y = x * x if x.sum() > 0 else x * x * x
        return y.sin()

    x = leaf([0.5, 1.0])
    for value in (x, -x):
        v = value.numpy()
        y, d, dd = (v * v, 2 * v, 2) if v.sum() > 0 else (v**3, 3 * v * v, 6 * v)
        found = derivatives(f, value.detach())
        np.testing.assert_allclose(found[2].numpy(), np.cos(y) * dd - np.sin(y) * d * d, rtol=64 * EPS)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: derivatives(lambda x: x, x, order=0), ConfigError, "order is a whole number of at least 1, got 0"),
        (lambda x: derivatives(lambda x: x, x, plain([1.0])), GradError, r"has shape \[1\], its x \[5, 2\]"),
        (lambda x: derivatives(lambda x: x, x.astype("int64")), DTypeError, "x 0 is int64, which has no derivatives"),
        (lambda x: jvp(lambda x: x, x, x.astype("complex64")), DTypeError, "direction in v is complex64, its x "),
        (lambda x: derivatives(lambda x: 3, x), GradError, "func's result must be a Tensor"),
        (lambda x: laplacian(lambda x: x, x.sum()), ShapeError, "x 0 is 0-D"),
        (lambda x: laplacian(lambda x: x, x, [2]), ConfigError, "coordinates holds 2; .* there are 2"),
        (lambda x: laplacian(lambda x: x, x, [0, -2]), ConfigError, "give one or more, each once"),
        (lambda x: laplacian(lambda x: x, x, []), ConfigError, "give one or more, each once"),
    ],
)
def test_refuses_what_it_cannot_do(call, error, message):
    with pytest.raises(error, match=message):
        call(plain(POINTS))


def test_a_freed_tape_says_so():
    def f(x):
        y = x * x
        z = y.sin()
        z.sum().backward()
        return concat([y, z])

    with pytest.raises(GradError, match="whose saved values a backward has freed; call that with retain_graph=True"):
        jvp(f, leaf([1.0]))
