"""Contract rows of ops/probability.py."""

import numpy as np
import scipy.special as sp
import scipy.stats as st

from polyreme.conformance._tables.random import RANDOM, moments
from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, ShapeError

N = 4000
MISMATCH = ((np.ones((2, 3), "float32"), np.ones((2, 4), "float32")), ShapeError, r"\[2, 3\].*\[2, 4\]")


def pair(rng):
    return rng.uniform(0.5, 3, (3, 4)).astype("float32"), rng.uniform(0.2, 0.9, (4,)).astype("float32")


SCIPY = {"normal": st.norm, "laplace": st.laplace, "cauchy": st.cauchy, "gumbel": st.gumbel_r}


def triple(family):
    def make(rng):
        value, loc = rng.normal(size=(3, 4)).astype("float32"), rng.normal(size=(4,)).astype("float32")
        return value, loc, rng.uniform(0.5, 2, (3, 1)).astype("float32"), family

    return make


def log_density(value, loc, scale, family):
    return SCIPY[family](loc, scale).logpdf(value)


def multinomial_entropy(n, p, most):
    return np.array([st.multinomial(int(a), b / b.sum()).entropy() for a, b in zip(n, p, strict=True)], p.dtype)


def weights(rng):
    p = rng.uniform(0.2, 1, (2, 3))
    return p / p.sum(-1, keepdims=True)


def poisson_entropy(rate):
    k = np.arange(3000)
    logs = st.poisson(rate[:, None]).logpmf(k)
    return -(np.exp(logs) * logs).sum(-1)


def check_counts(got):
    assert got.dtype == "float32"
    assert got.shape == (N, 3)
    np.testing.assert_array_equal(got.sum(-1), 5)
    p = np.array([0.2, 0.3, 0.5])
    np.testing.assert_allclose(got.mean(0), 5 * p, rtol=0, atol=6 * np.sqrt(5 * 0.25 / N))
    np.testing.assert_allclose(got.var(0), 5 * p * (1 - p), rtol=6 * np.sqrt(8 / N))


CASES = [
    Case("xlogy", pair, sp.xlogy, bad=MISMATCH),
    Case("xlogy", lambda rng: (np.float32([0, 0, 2]), np.float32([0, -1, 0])), lambda x, y: np.float32([0, 0, -np.inf]), no_grad="infinite", tag="zero"),
    Case("xlogy", lambda rng: (np.float32([1e-30, 0.5]), np.float32([0.5, 2])), sp.xlogy, tag="small"),
    Case("xlog1py", pair, sp.xlog1py, bad=MISMATCH),
    Case("xlog1py", lambda rng: (np.float32([0, 0, 2]), np.float32([-1, -3, -1])), lambda x, y: np.float32([0, 0, -np.inf]), no_grad="infinite", tag="zero"),
    *(Case("location_scale_log_density", triple(name), log_density, tag=name) for name in SCIPY),
    Case("location_scale_log_density", lambda rng: (np.float32(0), np.array([1, 2]), np.float64(2.0), "normal"), log_density, no_grad="integers", tag="mixed",
         bad=((*np.ones((3, 1)), "t"), ConfigError, "family='t'; give one of normal")),
    Case("gumbel_like", lambda rng: (np.zeros(N, "float32"),), check=moments(np.euler_gamma, np.pi / 6**0.5), no_grad=RANDOM),
    # the log of a Gamma(3) draw has mean digamma(3) and variance trigamma(3)
    Case("standard_log_gamma", lambda rng: (np.full(N, 3.0, "float32"),), check=moments(sp.digamma(3), sp.polygamma(1, 3) ** 0.5), no_grad=RANDOM),
    Case("multinomial_counts", lambda rng: (np.tile(np.float32([0.2, 0.3, 0.5]), (N, 1)), 5), check=check_counts, no_grad=RANDOM),
    Case("multinomial_entropy", lambda rng: (np.array([4, 6]), weights(rng), 6), multinomial_entropy, no_ref_grad="SciPy's takes weights that add up to 1", terms=64,
         bad=((np.array([4]), np.ones((1, 2)), -1), ShapeError, "most=-1")),
    Case("multinomial_entropy", lambda rng: (np.array([1000]), np.float32([[0.6, 0.4]]), 1000), multinomial_entropy, no_grad="float32 of many trials", tag="many"),
    Case("poisson_entropy", lambda rng: (np.array([0.05, 1.0, 8.0, 64.0, 65.0, 900.0]),), poisson_entropy, terms=1200),
]  # fmt: skip
