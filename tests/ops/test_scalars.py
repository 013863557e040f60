"""Python numbers beside integer Tensors, and integers where no number is right: as in mathematics, or refused."""

import operator

import numpy as np
import pytest

import polyreme as paddle
from polyreme import flags, static
from polyreme.core import dtype as dtypes
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.ops import OPS

RELATIONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


def values(dtype):
    limits = np.iinfo(dtype)
    return np.array([limits.min, 0, 5, limits.max], dtype)


def edges(dtype):
    """The ends of a dtype, what lies beyond them, and 2 ** 40; of those the ones that int64 holds."""
    limits = np.iinfo(dtype)
    every = {int(limits.min) - 1, int(limits.min), -1, 5, int(limits.max), int(limits.max) + 1, 2**40}
    return sorted(n for n in every if -(2**63) <= n < 2**63)


def compare_all(x):
    every = edges(x.dtype)
    return [relation(x, n) for n in every for relation in RELATIONS] + [n < x for n in every]


def compare_exactly(x):
    every, exact = edges(x.dtype), [int(v) for v in x]
    found = [[relation(v, n) for v in exact] for n in every for relation in RELATIONS]
    return found + [[n < v for v in exact] for n in every]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
def test_comparisons_with_any_python_integer(dtype):
    x = values(dtype)
    wanted = compare_exactly(x)
    for run in (compare_all, paddle.jit.to_static(compare_all)):
        np.testing.assert_array_equal([r.numpy() for r in run(to_tensor(x))], wanted)


def test_comparisons_and_clips_in_a_program():
    x = values("uint8")
    paddle.enable_static()
    try:
        with static.program_guard(static.Program()):
            fed = static.data("x", [4], "uint8")
            fetches = [*compare_all(fed), paddle.clip(fed, -5, 300)]
            *compared, clipped = static.Executor().run(feed={"x": x}, fetch_list=fetches)
    finally:
        paddle.disable_static()
    np.testing.assert_array_equal(compared, compare_exactly(x))
    np.testing.assert_array_equal(clipped, x)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "wanted"),
    [
        ("uint8", 0, 256, [0, 0, 5, 255]),
        ("uint8", -1, 4, [0, 0, 4, 4]),
        ("int32", None, 3_000_000_000, [-(2**31), 0, 5, 2**31 - 1]),
        ("int8", -200, 4, [-128, 0, 4, 4]),
        ("uint8", 1.5, None, [1.5, 1.5, 5, 255]),  # Paddle's rule: a floating bound makes it floating
    ],
)
def test_clips_with_any_bound(dtype, low, high, wanted):
    for run in (paddle.clip, paddle.jit.to_static(lambda x, low, high: paddle.clip(x, low, high))):
        got = run(to_tensor(values(dtype)), low, high)
        assert got.dtype == (dtype if low != 1.5 else "float32")
        np.testing.assert_array_equal(got.numpy(), wanted)


def u8():
    return to_tensor(values("uint8"))


REFUSED = {
    "clip": lambda: paddle.clip(u8(), 300),
    "full": lambda: paddle.full([1], 300, "int8"),
    "full nan": lambda: paddle.full([1], float("nan"), "int32"),
    "full_like": lambda: paddle.full_like(u8(), -1),
    "fill_": lambda: u8().fill_(256),
    "to_tensor": lambda: to_tensor([1, 256], "uint8"),
    "arange": lambda: paddle.arange(0, 301, 50, "uint8"),
    "randint": lambda: paddle.randint(0, 300, [2], "uint8"),
    "x[0] = v": lambda: u8().__setitem__(0, 256),
    "x[mask] = v": lambda: (lambda x: x.__setitem__(x > 1, 256))(u8()),
    "masked_fill": lambda: paddle.masked_fill(u8(), u8() > 1, 256),
    "index_fill": lambda: paddle.index_fill(u8(), to_tensor([0]), 0, 256),
    "put_along_axis": lambda: paddle.put_along_axis(u8(), to_tensor([0]), 256, 0),
    "where": lambda: paddle.where(u8() > 1, u8(), 256),
    "maximum": lambda: paddle.maximum(u8(), 256),
    "remainder": lambda: u8() % 256,
    "divide": lambda: paddle.divide(u8(), 256, rounding_mode="floor"),
    "add": lambda: u8() + 256,  # it would wrap to x
    "multiply": lambda: 2**40 * to_tensor(values("int32")),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_a_number_that_the_dtype_does_not_hold_is_refused(call):
    for run in (call, paddle.jit.to_static(call)):
        for _ in range(2):  # the second time by the form of the call
            with pytest.raises(ConfigError, match="choose a wider dtype"):
                run()


def test_sums_and_products_count_modulo_the_bits():
    x = u8()
    assert (x + -1).tolist() == [255, 255, 4, 254]
    assert (x * -1).tolist() == [0, 0, 251, 1]
    assert (to_tensor(np.array([-1], "int32")) & 0xFFFFFFFF).tolist() == [-1]
    # true division leaves the integers before it divides
    np.testing.assert_allclose((x / 300).numpy(), values("uint8") / 300, rtol=1e-6)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("source", ["float16", "float32", "float64"])
def test_floats_become_integers_as_processors_have_it(source, dtype):
    wide = np.array([-1.5, 0.5, 300.7, 2.5e9, -2.5e9, 1e19, 1e30, np.nan, np.inf, -np.inf])
    x = wide.astype(source) if source != "float16" else np.array([-1.5, 300.7, 6e4, np.nan, -np.inf], source)
    bits = np.iinfo(dtype).bits
    through = 64 if bits == 64 or dtype == "uint32" else 32

    def exact(value):
        lowest = -(2 ** (through - 1))
        inside = np.isfinite(value) and lowest <= value < (2**64 if dtype == "uint64" else -lowest)
        whole = (int(value) if inside else lowest) % 2**bits
        return whole - 2**bits if dtype.startswith("int") and whole >= 2 ** (bits - 1) else whole

    wanted = np.array([exact(float(v)) for v in x], dtype)
    np.testing.assert_array_equal(to_tensor(x).astype(dtype).numpy(), wanted)


# integers by zero

DIVISIONS = {
    "//": operator.floordiv,
    "%": operator.mod,
    "trunc": lambda x, y: paddle.divide(x, y, rounding_mode="trunc"),
}


@pytest.mark.parametrize("divide", DIVISIONS.values(), ids=DIVISIONS)
def test_integers_by_zero(divide):
    x, y = to_tensor(np.array([7, 8], "int32")), to_tensor(np.array([0, 3], "int32"))
    captured = paddle.jit.to_static(lambda x, y: divide(x, y))
    for run in (lambda: divide(x, y), lambda: divide(x, 0), paddle.jit.to_static(lambda: divide(x, 0))):
        with pytest.raises(ZeroDivisionError):
            run()
    got = captured(x, y)
    assert got.tolist() == [np.iinfo("int32").min, 2]
    assert captured(x.astype("uint8"), y.astype("uint8")).tolist() == [255, 2]
    flags.set_flags({"FLAGS_check_nan_inf": True})
    try:
        with pytest.raises(ZeroDivisionError, match=r"\[0\] of the divisor is 0.*training step 1"):
            captured(x, y)
    finally:
        flags.set_flags({"FLAGS_check_nan_inf": False})
    assert np.isinf(divide(x.astype("float32"), 0.0).numpy()).all() or divide is operator.mod
    assert divide(x[:0], y[:0]).shape == [0]


def test_integers_to_powers_below_zero():
    x, y = to_tensor(np.array([2, 0])), to_tensor(np.array([3, -1]))
    for power in (y, -1):
        with pytest.raises(ConfigError, match="to the power -1"):
            x**power
    assert paddle.jit.to_static(lambda x, y: x**y)(x, y).tolist() == [8, np.iinfo("int64").min]


# what nobody can draw or count

DRAWN = {
    "multinomial": (lambda p: paddle.multinomial(p, 1, True), [[0.0, 0.0], [np.nan, 1.0], [-1.0, 2.0], [np.inf, 1.0]]),
    "multinomial without replacement": (lambda p: paddle.multinomial(p, 2)[..., 1], [[0.0, 1.0]]),
    "bernoulli": (paddle.bernoulli, [[np.nan], [1.5], [-0.5]]),
    "poisson": (paddle.poisson, [[np.nan], [-1.0]]),
    "binomial": (lambda p: paddle.binomial(to_tensor(3.0), p), [[np.nan], [1.5]]),
    "bernoulli_": (lambda p: paddle.zeros([1]).bernoulli_(p), [[np.nan], [2.0]]),
    "histogram": (lambda x: paddle.histogram(x, 2), [[np.inf]]),
    "uniform": (lambda p: paddle.uniform([3], min=p, max=1.0), [2.0]),
    "uniform_": (lambda p: paddle.zeros([1]).uniform_(p, 1.0), [2.0]),
    "exponential_": (lambda p: paddle.zeros([1]).exponential_(p), [[np.nan], [-1.0]]),
    "cauchy_": (lambda p: paddle.zeros([1]).cauchy_(0.0, p), [[np.nan], [-1.0]]),
    "geometric_": (lambda p: paddle.zeros([1]).geometric_(p), [[np.nan], [1.5]]),
    "standard_gamma": (paddle.standard_gamma, [[np.nan], [-1.0]]),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DRAWN)
def test_what_cannot_be_drawn_is_refused_or_shows(name):
    draw, impossible = DRAWN[name]
    captured = paddle.jit.to_static(lambda p: draw(p))
    for p in impossible:
        p = to_tensor(np.array(p, "float32"))
        with pytest.raises(ConfigError):
            draw(p)
        got = captured(p).numpy()
        nothing = dtypes.not_a_number(got.dtype)
        np.testing.assert_array_equal(got, np.full_like(got, nothing))


def test_a_histogram_leaves_nan_out():
    x = to_tensor(np.array([1, 2, np.nan], "float32"))
    assert paddle.histogram(x, 4).tolist() == [1, 0, 0, 1]
    assert OPS["histogram_bin_edges"](to_tensor(np.ones(3, "float32")), 4).tolist() == [0.5, 0.75, 1, 1.25, 1.5]


def test_the_power_of_zero_at_zero_has_a_derivative():
    x, y = (to_tensor(np.array(v, "float32"), stop_gradient=False) for v in ([0, 2, 0, 3], [0, 0, 2, 0.5]))
    power = paddle.pow(x, y)
    power.sum().backward()
    assert power.tolist()[:3] == [1, 1, 0]
    np.testing.assert_allclose(x.grad.numpy(), [0, 0, 0, 0.5 * 3**-0.5], rtol=2**-22)
    np.testing.assert_allclose(y.grad.numpy()[[1, 3]], [np.log(2), np.log(3) * 3**0.5], rtol=2**-22)
