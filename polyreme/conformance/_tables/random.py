"""Contract rows of ops/random.py: no oracle gives the same numbers, so ranges, moments and dtypes are checked.

A mean of n draws with standard deviation s is within 6 s / sqrt(n) of its expectation but for one run in 5e8.
"""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError

RANDOM = "random numbers do not depend on the input continuously, or differ from call to call"
N = 4000


def given(*args):
    return lambda rng: args


def filled(value, *args, dtype="float32", n=N):
    return lambda rng: (np.full(n, value, dtype), *args)


def moments(mean, std, dtype="float32", low=-np.inf, high=np.inf, shape=(N,)):
    """Check dtype, shape, range, and that the mean (and the variance, if the fourth moment is small) is as stated."""

    def check(got):
        assert got.dtype == dtype
        assert got.shape == shape
        assert np.all((got >= low) & (got <= high))
        assert len(np.unique(got)) > 1
        bound = 6 * std / np.sqrt(got.size)
        assert np.isclose(got.astype("float64").mean(), mean, rtol=0, atol=bound)
        # variance of the sample variance: (kurtosis - 1) std^4 / n, kurtosis <= 9 for all laws used here
        assert np.isclose(got.astype("float64").var(), std**2, rtol=6 * np.sqrt(8 / got.size))

    return check


def check_permutation(got):
    np.testing.assert_array_equal(np.sort(got), np.arange(50))
    assert np.any(got != np.arange(50))


def check_without_replacement(got):
    assert got.dtype == "int64"
    assert got.shape == (200, 3)
    assert all(len(set(row)) == 3 for row in got.tolist())
    assert not np.any(got == 1)  # probability 0


def check_frequencies(got):
    share = np.bincount(got, minlength=3) / N
    np.testing.assert_allclose(share, [0.5, 0.0, 0.5], atol=6 * 0.5 / np.sqrt(N))


def check_cauchy(got):
    # quartiles of loc + scale * Cauchy are loc -+ scale; density there is 1 / (2 pi scale)
    bound = 6 * np.sqrt(0.25 * 0.75 / N) * 2 * np.pi * 2.0
    np.testing.assert_allclose(np.quantile(got, [0.25, 0.5, 0.75]), [-1.0, 1.0, 3.0], atol=bound)


def complex_moments(mean, std, dtype="complex64"):
    """As moments, of the two parts: variance std^2 / 2 each, and no correlation (std of a product's mean: 1 / 2 std^2)."""

    def check(got):
        assert got.dtype == dtype
        real = {"complex64": "float32", "complex128": "float64"}[dtype]
        for part, at in ((got.real, mean.real), (got.imag, mean.imag)):
            moments(at, std / np.sqrt(2), real)(part)
        product = ((got.real - mean.real) * (got.imag - mean.imag)).astype("float64").mean()
        assert abs(product) < 6 * std**2 / 2 / np.sqrt(N)

    return check


COMPLEX_STD = ((0.0, 1j, [2]), DTypeError, "std is complex; a standard deviation is real")
COMPLEX_MEAN = ((np.ones(3, "float32"), 1j), DTypeError, "mean is complex, the numbers are float32")
BAD_SHAPE = (([-2],), ShapeError, r"\[-2\]")
BAD_RANGE = ((3, 3, [2]), ShapeError, "low < high")
INTEGERS = ((np.ones(3, "int64"),), DTypeError, "int64")
LOG_NORMAL = (np.exp(0.02), np.exp(0.02) * np.sqrt(np.expm1(0.04)))


def check_integers(low, high, dtype):
    def check(got):
        assert got.dtype == dtype
        assert got.min() >= low
        assert got.max() < high
        assert len(np.unique(got)) > 1
        np.testing.assert_array_equal(got, np.trunc(got))

    return check


CASES = [
    Case("random_", filled(0.0), check=check_integers(0, 2**24, "float32"), no_grad=RANDOM, bad=((np.ones(2, "float32"), 3, 3), ShapeError, "no integer is at least 3 and below 3")),
    Case("random_", filled(0, 3, 9, dtype="int32"), check=check_integers(3, 9, "int32"), no_grad=RANDOM, tag="between", bad=((np.ones(2, "float32"), 0, 2, 1), ConfigError, "seed it with polyreme")),
    Case("random_", filled(0, 5, dtype="int64"), check=check_integers(0, 5, "int64"), no_grad=RANDOM, tag="below"),
    Case("random_", filled(0, dtype="uint8"), check=check_integers(0, 256, "uint8"), no_grad=RANDOM, tag="all"),
    Case("rand", given([N]), check=moments(0.5, 12**-0.5, low=0, high=1), no_grad=RANDOM, bad=BAD_SHAPE),
    Case("rand", given([40, N // 40], "float64"), check=moments(0.5, 12**-0.5, "float64", shape=(40, N // 40)), no_grad=RANDOM, tag="float64", bad=(([2], "int32"), DTypeError, "int32")),
    Case("randn", given([N]), check=moments(0, 1), no_grad=RANDOM, bad=BAD_SHAPE),
    Case("rand_like", filled(9.0), check=moments(0.5, 12**-0.5, low=0, high=1), no_grad=RANDOM, bad=INTEGERS),
    Case("randn", given([N], "complex128"), check=complex_moments(0j, 1, "complex128"), no_grad=RANDOM, tag="complex", bad=(([2], "int32"), DTypeError, "floating or complex numbers, got dtype int32")),
    Case("randn_like", filled(9.0, "float64"), check=moments(0, 1, "float64"), no_grad=RANDOM, bad=INTEGERS),
    Case("standard_gamma", filled(3.0), check=moments(3, 3**0.5, low=0), no_grad=RANDOM),
    Case("standard_normal", given([N], "float64"), check=moments(0, 1, "float64"), no_grad=RANDOM, bad=BAD_SHAPE),
    Case("uniform", given([N], None, -2, 4), check=moments(1, 6 * 12**-0.5, low=-2, high=4), no_grad=RANDOM, bad=BAD_SHAPE),
    Case("gaussian", given([N], 3.0, 0.5), check=moments(3, 0.5), no_grad=RANDOM, bad=BAD_SHAPE),
    Case("normal", given(3.0, 0.5, [N]), check=moments(3, 0.5), no_grad=RANDOM),
    Case("normal", given(-3, 1, [N]), check=moments(-3, 1), no_grad=RANDOM, tag="whole numbers"),
    Case("normal", given(1 - 2j, 0.5, [N]), check=complex_moments(1 - 2j, 0.5), no_grad=RANDOM, tag="complex", bad=COMPLEX_STD),
    Case("normal", filled(3.0, 0.5), check=moments(3, 0.5), no_grad=RANDOM, tag="tensor", bad=((np.ones(3), 1.0, [2]), ShapeError, "leave shape out")),
    Case("log_normal", given(0.0, 0.2, [N]), check=moments(*LOG_NORMAL, low=0), no_grad=RANDOM, bad=((np.ones(3), 1.0, [2]), ShapeError, "leave shape out")),
    Case("randint", given(-2, 3, [N]), check=moments(0, 2**0.5, "int64", -2, 2), no_grad=RANDOM, bad=BAD_RANGE),
    Case("randint", given(5, None, [N], "int32"), check=moments(2, 2**0.5, "int32", 0, 4), no_grad=RANDOM, tag="below"),
    Case("randint_like", filled(0, -2, 3), check=moments(0, 2**0.5, "float32", -2, 2), no_grad=RANDOM, bad=((np.ones(2), 3, 1), ShapeError, "low < high")),
    Case("randperm", given(50), check=check_permutation, no_grad=RANDOM, bad=((0,), ShapeError, "n=0")),
    Case("bernoulli", filled(0.3), check=moments(0.3, 0.21**0.5, low=0, high=1), no_grad=RANDOM,
         bad=((np.float32([0.5, 2]),), ConfigError, "bernoulli: got 2.0; give values of at least 0 and at most 1")),
    Case("bernoulli", filled(0.3, 0.8), check=moments(0.8, 0.16**0.5, low=0, high=1), no_grad=RANDOM, tag="p",
         bad=((np.ones(2, "float32"), -0.5), ConfigError, "bernoulli: got -0.5")),
    Case("multinomial", lambda rng: (np.tile(np.float32([1, 0, 2, 3]), (200, 1)), 3), check=check_without_replacement, no_grad=RANDOM,
         bad=((np.ones(3, "float32"), 4), ShapeError, "num_samples=4 from 3 categories")),
    Case("multinomial", given(np.float32([2, 0, 2]), N, True), check=check_frequencies, no_grad=RANDOM, tag="replacement",
         bad=((np.ones((2, 2, 2), "float32"),), ShapeError, r"\[2, 2, 2\]")),
    Case("multinomial", given(np.float32([0, 2]), 9, True), lambda x, n, r: np.ones(n, "int64"), no_grad=RANDOM, tag="one of two",
         bad=((np.float32([-1, 2]),), ConfigError, "multinomial: got -1.0; give values of at least 0")),
    Case("poisson", filled(2.5), check=moments(2.5, 2.5**0.5, low=0), no_grad=RANDOM,
         bad=((np.float32([-1]),), ConfigError, "poisson: got -1.0; give values of at least 0")),
    Case("binomial", lambda rng: (np.full(N, 10), np.full(N, 0.3, "float32")), check=moments(3, 2.1**0.5, "int64", 0, 10), no_grad=RANDOM,
         bad=((np.ones(2, "int64"), np.ones(3)), ShapeError, "binomial")),
    Case("binomial", lambda rng: (np.full(3, 4), np.ones(3)), lambda n, p: n, no_grad=RANDOM, tag="sure",
         bad=((np.ones(2, "int64"), np.full(2, 1.5)), ConfigError, "binomial: prob: got 1.5; give values of at least 0 and at most 1")),
    Case("uniform_", filled(9.0, 1, 3), check=moments(2, 2 * 12**-0.5, low=1, high=3), no_grad=RANDOM, bad=INTEGERS),
    Case("normal_", filled(9.0, 1.0, 2.0, dtype="float64"), check=moments(1, 2, "float64"), no_grad=RANDOM, bad=INTEGERS),
    Case("normal_", filled(9.0, 1j, 2.0, dtype="complex64"), check=complex_moments(1j, 2.0), no_grad=RANDOM, tag="complex", bad=COMPLEX_MEAN),
    Case("log_normal_", filled(9.0, 0.0, 0.2), check=moments(*LOG_NORMAL, low=0), no_grad=RANDOM, bad=INTEGERS),
    Case("exponential_", filled(9.0, 2.0), check=moments(0.5, 0.5, low=0), no_grad=RANDOM, bad=INTEGERS),
    Case("bernoulli_", filled(9.0, 0.3), check=moments(0.3, 0.21**0.5, low=0, high=1), no_grad=RANDOM),
    Case("cauchy_", filled(9.0, 1, 2), check=check_cauchy, no_grad=RANDOM, bad=INTEGERS),
    Case("geometric_", filled(9.0, 0.4), check=moments(2.5, 0.6**0.5 / 0.4, low=1), no_grad=RANDOM, bad=((np.ones(3, "int64"), 0.5), DTypeError, "int64")),
]  # fmt: skip
