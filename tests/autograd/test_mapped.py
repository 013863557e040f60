"""vmap against loops over the examples, eager and captured, nested and differentiated."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.autograd import hessian, vmap
from polyreme.errors import CaptureError, ConfigError, ProgramError, ShapeError

EPS = 2.0**-52
RNG = np.random.default_rng(7)
ROWS, WEIGHT = RNG.uniform(-1, 1, (4, 3)), RNG.uniform(-1, 1, (3, 3))


def double(value, stop_gradient=True):
    return paddle.to_tensor(np.asarray(value, "float64"), stop_gradient=stop_gradient)


def test_results_gradients_and_derivatives_inside_are_those_of_a_loop():
    x, weight = double(ROWS, False), double(WEIGHT, False)

    def energy(row):  # with a branch on a value, and a Tensor that it only reads
        total = paddle.tanh(weight @ row).sum()
        if total > 0:
            total = total * 2
        return total

    def at_each(row):
        value = energy(row)
        (slope,) = paddle.grad(value, row, create_graph=True)
        return {"value": value, "slope": slope, "curvature": hessian(value, row)[:]}

    mapped = vmap(at_each)
    results = paddle.jit.to_static(mapped)(x)
    ones = [at_each(double(row, False)) for row in ROWS]
    for key, value in results.items():
        want = np.stack([one[key].numpy() for one in ones])
        np.testing.assert_allclose(value.numpy(), want, rtol=0, atol=64 * EPS)
        np.testing.assert_array_equal(mapped(x)[key].numpy(), value.numpy())

    mapped(x)["slope"].square().sum().backward()
    by_rows, by_weight = x.grad.numpy(), weight.grad.numpy()
    x.clear_grad()
    weight.clear_grad()
    sum(at_each(x[i])["slope"].square().sum() for i in range(4)).backward()
    np.testing.assert_allclose(by_rows, x.grad.numpy(), rtol=0, atol=256 * EPS)
    np.testing.assert_allclose(by_weight, weight.grad.numpy(), rtol=0, atol=256 * EPS)


def test_axes_structures_and_vmaps_in_vmaps():
    def distance(p, q):
        return ((p - q) ** 2).sum()

    all_distances = vmap(vmap(distance, in_axes=(None, 0)), in_axes=(0, None))
    want = ((ROWS[:, None] - WEIGHT[None]) ** 2).sum(-1)
    np.testing.assert_allclose(all_distances(double(ROWS), double(WEIGHT)).numpy(), want, rtol=0, atol=16 * EPS)

    def parts(pair, factor):
        return pair["a"] * factor, [pair["a"].sum(), factor]

    scaled, (sums, factor) = vmap(parts, in_axes=(1, None), out_axes=(-1, 0))({"a": double(ROWS)}, 3.0)
    np.testing.assert_array_equal(scaled.numpy(), ROWS * 3)
    np.testing.assert_allclose(sums.numpy(), ROWS.sum(0), rtol=0, atol=8 * EPS)
    assert factor == 3.0
    assert scaled.stop_gradient


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: vmap(lambda row: row + paddle.rand([3]))(x), CaptureError, "draws random numbers"),
        (lambda x: vmap(lambda row: row.sum())(x, x[0]), ShapeError, r"differ: 4 .* \[4, 3\], 3 in .* \[3\]"),
        (lambda x: vmap(paddle.sum, in_axes=2)(x), ShapeError, r"in_axes=2 is no dim of a Tensor of shape \[4, 3\]"),
        (lambda x: vmap(paddle.sum, out_axes=1)(x), ShapeError, r"out_axes=1, but func gives \[\]"),
        (lambda x: vmap(lambda row: (row, row), out_axes=(0, 0, 0))(x), ConfigError, "3 entries, func gives 2"),
        (lambda x: vmap(paddle.sum, in_axes=(0, 0))(x), ConfigError, "2 entries for 1 arguments"),
        (lambda x: vmap(paddle.sum, in_axes=None)(x), ConfigError, "no argument is mapped"),
        (lambda x: vmap(paddle.sum, in_axes="rows"), ConfigError, "in_axes holds 'rows'"),
        (lambda x: vmap(x), ConfigError, "takes a function"),
    ],
)
def test_what_cannot_be_mapped_is_said(call, error, message):
    with pytest.raises(error, match=message):
        call(double(ROWS))


def test_a_program_refuses_it_by_name():
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()), pytest.raises(ProgramError, match="vmap"):
            vmap(paddle.sum)(paddle.static.data("x", [4, 3]))
    finally:
        paddle.disable_static()
