"""The families as rows: parameters, the same distribution by SciPy, values to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats as st

import polyreme.distribution as D


@dataclass(frozen=True)
class Family:
    """make: parameters -> Distribution. scipy: the same parameters -> frozen SciPy distribution.

    values: where densities are compared, broadcast against the batch; outside: values of density 0. terms: rounded
    terms of a log density, with the loss by cancellation. free: parameters whose derivative is tested. unique:
    parameters whose pathwise derivative the distribution alone determines. slow: why it is captured in the long suite.
    """

    make: Callable[..., D.Distribution]
    scipy: Callable[..., Any]
    parameters: dict[str, Any]
    values: Any
    outside: Any = ()
    terms: int = 16
    free: tuple[str, ...] | None = None
    unique: tuple[str, ...] = ()
    has: tuple[str, ...] = ("mean", "variance", "entropy")
    slow: str = ""

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(self.parameters) if self.free is None else self.free


A = np.array([[0.5], [2.0]])
B = np.array([0.7, 1.5, 4.0])
P = np.array([[0.2, 0.5], [0.7, 0.9]])
X = np.array([-1.3, 0.0, 0.4])
POSITIVE = np.array([0.3, 1.0, 2.5])
UNIT = np.array([0.1, 0.5, 0.8])
MATRIX = np.array([[2.0, 0.6, 0.1], [0.6, 1.0, -0.2], [0.1, -0.2, 0.5]])
SIMPLEX = np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
ALL, LOC_SCALE = ("mean", "variance", "entropy", "cdf"), {"loc": A - 1, "scale": B}


def continuous_bernoulli(probs):
    """By its definition, integrated exactly: SciPy has none."""
    near = probs == 0.5
    far = np.where(near, 0.25, probs)
    return _ContinuousBernoulli(probs, np.log(far / (1 - far)), near, np.abs(1 - 2 * far))


@dataclass
class _ContinuousBernoulli:
    probs: np.ndarray
    t: np.ndarray
    near: np.ndarray
    apart: np.ndarray

    @property
    def log_norm(self):
        return np.where(self.near, np.log(2), np.log(np.abs(self.t) / self.apart))

    def logpdf(self, x):
        c = self.log_norm
        inside = (x >= 0) & (x <= 1)
        return np.where(inside, x * np.log(self.probs) + (1 - x) * np.log(1 - self.probs) + c, -np.inf)

    def cdf(self, x):
        return np.where(self.near, x, np.expm1(self.t * x) / np.expm1(self.t))

    def pdf(self, x):
        return np.exp(self.logpdf(x))

    def mean(self):
        return np.where(self.near, 0.5, 1 - 1 / self.t + 1 / np.expm1(self.t))

    def var(self):
        return np.where(self.near, 1 / 12, 1 / self.t**2 - 1 / (4 * np.sinh(self.t / 2) ** 2))

    def entropy(self):
        m = self.mean()
        return -(self.log_norm + m * np.log(self.probs) + (1 - m) * np.log(1 - self.probs))


SAMPLER = "compiling its sampler takes seconds; that of Gamma is in the short suite"


class Mapped:
    """A multivariate SciPy distribution for each row of a batch."""

    def __init__(self, rows):
        self.rows = rows

    def logpdf(self, x):
        return np.array([getattr(r, "logpdf", None) and r.logpdf(x) for r in self.rows])

    def __getattr__(self, name):
        return lambda: np.array([getattr(r, name)() for r in self.rows])


FAMILIES = [
    Family(D.Normal, lambda loc, scale: st.norm(loc, scale), LOC_SCALE, X, unique=("loc", "scale")),
    Family(D.Laplace, lambda loc, scale: st.laplace(loc, scale), LOC_SCALE, X, unique=("loc", "scale"), has=(*ALL, "icdf")),
    Family(D.Cauchy, lambda loc, scale: st.cauchy(loc, scale), LOC_SCALE, X, unique=("loc", "scale"), has=("entropy", "cdf"), slow="as Normal and Uniform"),
    Family(D.Gumbel, lambda loc, scale: st.gumbel_r(loc, scale), LOC_SCALE, X, unique=("loc", "scale"), has=ALL, slow="as Normal and Uniform"),
    Family(D.LogNormal, lambda loc, scale: st.lognorm(scale, scale=np.exp(loc)), LOC_SCALE, POSITIVE, (-1.0, 0.0), unique=("loc", "scale")),
    Family(D.StudentT, lambda df, loc, scale: st.t(df, loc, scale), {"df": B + 2, "loc": A, "scale": A + 1}, X, slow=SAMPLER),
    Family(D.Uniform, lambda low, high: st.uniform(low, high - low), {"low": -B, "high": A}, np.array([-0.6, 0.0, 0.4]), (-5.0, 3.0), unique=("low", "high"), has=ALL),
    Family(D.Gamma, lambda concentration, rate: st.gamma(concentration, scale=1 / rate), {"concentration": A, "rate": B}, POSITIVE, (-0.5,), terms=64, unique=("concentration", "rate")),
    Family(D.Chi2, lambda df: st.chi2(df), {"df": B}, POSITIVE, (-0.5,), terms=64, slow=SAMPLER),
    Family(D.Exponential, lambda rate: st.expon(scale=1 / rate), {"rate": B}, POSITIVE, (-0.5,), unique=("rate",), has=(*ALL, "icdf")),
    Family(D.Beta, lambda alpha, beta: st.beta(alpha, beta), {"alpha": A, "beta": B}, UNIT, (-0.5, 1.5), terms=64, slow=SAMPLER),
    Family(D.ContinuousBernoulli, continuous_bernoulli, {"probs": np.array([[0.2, 0.5], [0.6, 0.95]])}, UNIT[:2], (-0.5, 1.5), terms=256, unique=("probs",), has=(*ALL, "icdf"), slow="as Normal and Uniform"),
    Family(D.Bernoulli, lambda probs: st.bernoulli(probs), {"probs": P}, np.array([0.0, 1.0]), (-1.0, 2.0), has=ALL),
    Family(D.Binomial, lambda total_count, probs: st.binom(total_count, probs), {"total_count": np.array([4.0, 9.0]), "probs": P}, np.array([0.0, 3.0]), (-1.0, 10.0), terms=64, free=("probs",), slow=SAMPLER),
    Family(D.Geometric, lambda probs: st.geom(probs, loc=-1), {"probs": P}, np.array([0.0, 3.0]), (-1.0,), has=("mean", "variance", "cdf")),
    Family(D.Poisson, lambda rate: st.poisson(rate), {"rate": B}, np.array([0.0, 1.0, 6.0]), (-1.0,), terms=64, slow=SAMPLER),
    Family(D.Dirichlet, lambda concentration: Mapped([st.dirichlet(c) for c in concentration]), {"concentration": A * B}, SIMPLEX[0], terms=64, slow=SAMPLER),
    Family(D.MultivariateNormal, lambda loc, covariance_matrix: Mapped([st.multivariate_normal(m, covariance_matrix) for m in loc]), {"loc": A * B, "covariance_matrix": MATRIX}, X, terms=64, has=("entropy",)),
]  # fmt: skip
