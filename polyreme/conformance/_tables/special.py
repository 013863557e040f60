"""Contract rows of ops/special.py."""

import numpy as np
import scipy.special as sp

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError


def within(low, high, *args):
    return lambda rng: (rng.uniform(low, high, (3, 4)).astype("float32"), *args)


def pair(rng):
    return rng.uniform(0.5, 3, (3, 4)).astype("float32"), rng.uniform(0.5, 3, (4,)).astype("float32")


MISMATCH = ((np.ones((2, 3), "float32"), np.ones((2, 4), "float32")), ShapeError, r"\[2, 3\].*\[2, 4\]")
# jax computes these in float32 by series of some 20 terms, and in float64 to the accuracy of Cephes
SERIES = 32

CASES = [
    Case("erf", within(-2, 2), sp.erf),
    Case("erfinv", within(-0.9, 0.9), sp.erfinv),
    *(Case(n, within(0.2, 5), sp.gammaln, terms=SERIES) for n in ("lgamma", "gammaln")),
    Case("lgamma", lambda rng: (np.array([1, 3, 5]),), lambda x: sp.gammaln(x).astype("float32"), no_grad="integers", tag="int"),
    Case("digamma", within(0.5, 5), sp.digamma, terms=SERIES),
    Case("digamma", lambda rng: (np.array([0.0, -0.0, 1.0]),), sp.digamma, terms=SERIES, no_grad="infinite at 0", tag="at_zero"),
    Case("polygamma", within(0.5, 5, 2), lambda x, n: sp.polygamma(n, x), terms=SERIES, bad=((np.ones(2), -1), ShapeError, "n=-1")),
    Case("polygamma", within(0.5, 5, 0), lambda x, n: sp.digamma(x), terms=SERIES, tag="zero"),
    Case("multigammaln", within(1.5, 5, 3), lambda x, p: np.vectorize(lambda v: sp.multigammaln(v, p))(x), terms=SERIES, bad=((np.ones(2), 0), ShapeError, "p=0")),
    Case("gammainc", pair, sp.gammainc, terms=SERIES, bad=MISMATCH),
    Case("gammaincc", pair, sp.gammaincc, terms=SERIES, bad=MISMATCH),
    *(Case(n, within(-3, 3), getattr(sp, n), terms=SERIES) for n in ("i0", "i0e", "i1", "i1e")),
    Case("logit", within(0.1, 0.9), sp.logit),
    Case("logit", lambda rng: (np.float32([0.0, 0.3, 1.0]), 0.2), lambda x, eps: sp.logit(np.clip(x, eps, 1 - eps)), tag="eps"),
]  # fmt: skip
