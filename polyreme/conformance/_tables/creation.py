"""Contract rows of ops/creation.py."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import DTypeError, ShapeError

NONE = "made from nothing"
CONSTANT = "does not depend on its input"


def floats(*shape):
    return lambda rng: (rng.standard_normal(shape).astype("float32"),)


def given(*args):
    return lambda rng: args


def with_x(shape, *args):
    return lambda rng: (rng.standard_normal(shape).astype("float32"), *args)


def embed(x, offset=0, dim1=-2, dim2=-1):
    size = x.shape[-1] + abs(offset)
    out = np.zeros((*x.shape[:-1], size, size), x.dtype)
    for i in range(x.shape[-1]):
        out[..., i + max(-offset, 0), i + max(offset, 0)] = x[..., i]
    return np.moveaxis(out, (-2, -1), (dim1, dim2))


def padded_diag(x, offset, padding):
    size = len(x) + abs(offset)
    return np.where(np.eye(size, k=offset, dtype=bool), np.diag(x, offset), np.float32(padding))


def has(dtype, shape):
    def check(got):
        assert got.dtype == dtype
        assert got.shape == shape

    return check


NEGATIVE = (([2, -1],), ShapeError, r"\[2, -1\] needs integers >= 0, got -1")

CASES = [
    Case("zeros", given([2, 3]), lambda s: np.zeros(s, "float32"), no_grad=NONE, bad=NEGATIVE, check=has("float32", (2, 3))),
    Case("zeros", given(3, "int32"), lambda s, d: np.zeros(s, d), no_grad=NONE, check=has("int32", (3,)), tag="int"),
    Case("ones", given([2, 3], "int64"), np.ones, no_grad=NONE, bad=NEGATIVE, check=has("int64", (2, 3))),
    Case("full", given([2, 2], 1.5), lambda s, v: np.full(s, v, "float32"), no_grad=NONE, check=has("float32", (2, 2))),
    Case("full", given([2], 7), np.full, no_grad=NONE, check=has("float32", (2,)), tag="int"),
    Case("full", given([2], True), np.full, no_grad=NONE, check=has("bool", (2,)), tag="bool"),
    Case("full", given([], 7, "float64"), np.full, no_grad=NONE, bad=(([-1], 7), ShapeError, r"\[-1\]"), tag="0d"),
    Case("empty", given([2, 3]), None, no_grad=NONE, bad=NEGATIVE, check=has("float32", (2, 3))),
    Case("zeros_like", floats(2, 3), np.zeros_like, no_grad=CONSTANT, bad=((np.ones(2), "x8"), DTypeError, "x8")),
    Case("ones_like", with_x((2, 3), "int32"), lambda x, d: np.ones_like(x, dtype=d), no_grad=CONSTANT),
    Case("full_like", with_x((2, 3), 2), np.full_like, no_grad=CONSTANT, check=has("float32", (2, 3))),
    Case("empty_like", with_x((2, 3), "float64"), None, no_grad=CONSTANT, check=has("float64", (2, 3))),
    Case("range", given(1, 3, 0.5), lambda a, b, s: np.arange(a, b + s, s, "float32"), no_grad=NONE, check=has("float32", (5,)), bad=((0, 5, 0), ShapeError, "step=0")),
    Case("range", given(5, 0, -2, "int64"), lambda a, b, s, d: np.array([5, 3, 1]), no_grad=NONE, check=has("int64", (3,)), tag="down", bad=((0, 5, -1), ShapeError, "step=-1")),
    Case("range", given(2), lambda n: np.arange(3, dtype="float32"), no_grad=NONE, tag="end"),
    Case("arange", given(5), np.arange, no_grad=NONE, check=has("int64", (5,)), bad=((0, 5, 0), ShapeError, "step=0")),
    Case("arange", given(5, -3, -2, "int32"), lambda *a: np.arange(5, -3, -2), no_grad=NONE, check=has("int32", (4,)), tag="down"),
    Case("arange", given(0.5, 2.0, 0.25), np.arange, no_grad=NONE, check=has("float32", (6,)), tag="float"),
    Case("arange", given(5, 2), np.arange, no_grad=NONE, check=has("int64", (0,)), tag="empty"),
    Case("linspace", given(0, 1, 5), lambda a, b, n: np.linspace(a, b, n, dtype="float32"), no_grad=NONE, bad=((0, 1, 0), ShapeError, "num=0")),
    Case("linspace", given(-3, 3, 4, "int32"), lambda a, b, n, d: np.linspace(a, b, n).astype(d), no_grad=NONE, tag="int"),
    Case("linspace", lambda rng: (np.array(0.5), np.array(3.0), 4, "float64"), lambda a, b, n, d: np.linspace(a, b, n), no_grad=NONE, tag="tensor"),
    Case("logspace", given(0, 3, 4), np.logspace, no_grad=NONE, bad=((0, 1, -1), ShapeError, "num=-1")),
    Case("logspace", given(0, 3, 4, 2.0), lambda a, b, n, base: np.logspace(a, b, n, base=base), no_grad=NONE, tag="base"),
    Case("eye", given(3), lambda n: np.eye(n, dtype="float32"), no_grad=NONE, bad=((-2,), ShapeError, "-2")),
    Case("eye", given(2, 4, "int64"), lambda m, n, d: np.eye(m, n, dtype=d), no_grad=NONE, tag="wide"),
    Case("diag", floats(3), np.diag, bad=((np.ones((2, 2, 2), "float32"),), ShapeError, r"1 or 2 dims, got shape \[2, 2, 2\]")),
    Case("diag", floats(3, 4), np.diag, tag="matrix"),
    Case("diag", with_x((3,), -1, 5.0), padded_diag, tag="padding"),
    Case("diagflat", with_x((2, 2), 1), np.diagflat),
    Case("diag_embed", floats(2, 3), embed),
    Case("diag_embed", with_x((2, 3), -1, 0, 2), embed, tag="dims", bad=((np.ones((2, 3)), 0, 7, 1), ShapeError, "diag_embed")),
    Case("diagonal", floats(3, 4), np.diagonal, bad=((np.ones(3),), ShapeError, "diagonal")),
    Case("diagonal", with_x((2, 3, 4), 1, 1, 2), np.diagonal, tag="axes"),
    Case("tril", floats(3, 4), np.tril),
    Case("tril", with_x((2, 3, 4), -1), np.tril, tag="below"),
    Case("triu", floats(3, 4), np.triu),
    Case("triu", with_x((2, 3, 4), 1), np.triu, tag="above"),
    Case("tril_indices", given(3, 4, 1), lambda m, n, k: np.stack(np.tril_indices(m, k, n)), no_grad=NONE, check=has("int64", (2, 9)), bad=((-3, 4), ShapeError, "row=-3, col=4; sizes are at least 0")),
    Case("triu_indices", given(3, None, 0, "int32"), lambda m, n, k, d: np.stack(np.triu_indices(m, k)), no_grad=NONE, check=has("int32", (2, 6))),
    Case(
        "meshgrid",
        lambda rng: (rng.standard_normal(3), rng.standard_normal(2)),
        lambda x, y: tuple(np.meshgrid(x, y, indexing="ij")),
        bad=((np.ones((2, 2)), np.ones(2)), ShapeError, r"vectors, got one of shape \[2, 2\]"),
    ),
    Case("meshgrid", lambda rng: ([rng.standard_normal(3), np.arange(2)],), lambda v: tuple(np.meshgrid(*v, indexing="ij")), tag="list"),
    Case("meshgrid", lambda rng: ([rng.standard_normal(()), rng.standard_normal(2)],), lambda v: tuple(np.meshgrid(*v, indexing="ij")), tag="0d"),
    Case("assign", floats(2, 3), lambda x: x),
    Case("assign", given(2.5), lambda x: np.float32([2.5]), no_grad=NONE, check=has("float32", (1,)), tag="number"),
    Case("assign", given([[1.5, 2.0]]), lambda x: np.float32([[1.5, 2.0]]), no_grad=NONE, check=has("float32", (1, 2)), tag="list"),
    Case("clone", floats(2, 3), lambda x: x),
    Case("complex", lambda rng: (rng.standard_normal(3).astype("float32"), rng.standard_normal((2, 3)).astype("float32")), lambda r, i: r + 1j * i,
         bad=((np.ones(2, "float32"), np.ones(3, "float32")), ShapeError, r"\[2\].*\[3\]"), check=has("complex64", (2, 3))),
]  # fmt: skip
