"""Contract rows of ops/complex.py."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import DTypeError, ShapeError


def complexes(rng):
    return ((rng.standard_normal((3, 4)) + 1j * rng.standard_normal((3, 4))).astype("complex64"),)


def reals(rng):
    return (rng.uniform(0.3, 2, (3, 4)).astype("float32") * rng.choice([-1, 1], (3, 4)).astype("float32"),)


SHIFTED = np.complex64([0, 3 - 4j, -2])

CASES = [
    *(Case(n, complexes, getattr(np, n)) for n in ("real", "imag", "conj", "angle")),
    *(Case(n, reals, getattr(np, n), tag="real") for n in ("real", "imag", "conj", "angle")),
    Case("isreal", lambda rng: (np.complex64([1, 1j, 2]),), np.isreal, no_grad="bool result"),
    Case("sgn", complexes, lambda x: x / np.abs(x)),
    Case("sgn", lambda rng: (SHIFTED,), lambda x: np.complex64([0, 0.6 - 0.8j, -1]), no_grad="at zero", tag="zero"),
    Case("sgn", reals, np.sign, tag="real"),
    Case("as_complex", lambda rng: (rng.standard_normal((3, 2)).astype("float32"),), lambda x: x[:, 0] + 1j * x[:, 1],
         bad=((np.ones((2, 3), "float32"),), ShapeError, r"last dim of size 2, got shape \[2, 3\]")),
    Case("as_complex", lambda rng: (rng.standard_normal(2),), lambda x: x[0] + 1j * x[1], tag="one", bad=((np.ones((3, 2), "int32"),), DTypeError, "got int32")),
    Case("as_real", complexes, lambda x: np.stack([x.real, x.imag], -1), bad=((np.ones(2, "float32"),), DTypeError, "takes complex numbers, got float32")),
    Case("polar", lambda rng: (*reals(rng), *reals(rng)), lambda r, a: r * np.exp(1j * a), bad=((np.ones(2), np.ones(3)), ShapeError, r"\[2\].*\[3\]")),
]  # fmt: skip
