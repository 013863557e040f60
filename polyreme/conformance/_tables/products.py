"""Contract rows of ops/matrices/products.py."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError


def floats(*shapes, args=()):
    return lambda rng: (*(rng.standard_normal(s).astype("float32") for s in shapes), *args)


def ones(*shapes):
    return tuple(np.ones(s, "float32") for s in shapes)


def given(*args):
    return lambda rng: args


CASES = [
    Case("bmm", floats((2, 3, 4), (2, 4, 5)), np.matmul, bad=(ones((2, 3, 4), (2, 5, 4)), ShapeError, "bmm: dim 'k' is 4 in x .* but 5 in y")),
    Case("mm", floats((3, 4), (4, 5)), np.matmul, bad=(ones((2, 3), (4, 5)), ShapeError, "mm: dim 'k' is 3 in input .* but 4 in mat2")),
    Case("mv", floats((3, 4), (4,)), np.matmul, bad=(ones((2, 3), (4,)), ShapeError, "mv: dim 'k' is 3 in x")),
    Case("dot", floats((4,), (4,)), np.dot, bad=(ones((3,), (4,)), ShapeError, "dot: dim 'k' is 3 in x")),
    Case("dot", floats((2, 4), (2, 4)), lambda x, y: (x * y).sum(-1), tag="batch", bad=(ones((2, 2, 2), (2, 2, 2)), ShapeError, r"\[batch, k\], got shape")),
    Case("vecdot", floats((3, 4), (4,)), np.vecdot, bad=(ones((3,), (4,)), ShapeError, "vecdot")),
    Case("vecdot", given(np.int32([2**30, 2**30]), np.int32([1, 3])), lambda x, y: np.vecdot(x.astype("int64"), y), no_grad="integers", tag="int32"),
    Case("vecdot", given(np.complex64([1 + 2j, 3]), np.complex64([1j, 1 - 1j])), np.vecdot, tag="complex"),
    Case("inner", floats((3, 4), (2, 5, 4)), np.inner, bad=(ones((3,), (4,)), ShapeError, "inner: dim 'k' is 3 in x")),
    Case("inner", floats((), (3, 2)), np.inner, tag="0d"),
    Case("outer", floats((3,), (2, 2)), np.outer),
    Case("outer", given(np.arange(3), np.arange(2)), np.outer, no_grad="integers", tag="int"),
    Case("kron", floats((2, 3), (3, 2)), np.kron),
    Case("cross", floats((2, 3), (2, 3)), np.cross, bad=(ones((2, 2), (2, 2)), ShapeError, "a dim of size 3")),
    Case("cross", floats((3, 3), (3, 3), args=(1,)), lambda x, y, a: np.cross(x, y), tag="axis"),
    Case("cross", floats((3, 3), (3, 3)), lambda x, y: np.cross(x, y, axis=0), tag="first"),
    Case("addmm", floats((4,), (2, 3), (3, 4), args=(0.5, 2.0)), lambda i, x, y, b, a: b * i + a * (x @ y), bad=(ones((4,), (2, 3), (4, 4)), ShapeError, "addmm: dim 'k' is 3 in x")),
    Case("baddbmm", floats((2, 2, 4), (2, 2, 3), (2, 3, 4), args=(0.5, 2.0)), lambda i, x, y, b, a: b * i + a * (x @ y),
         bad=(ones((4,), (2, 2, 3), (3, 3, 4)), ShapeError, "baddbmm: dim 'b' is 2 in x")),
    Case("matrix_transpose", floats((2, 3, 4)), np.matrix_transpose, bad=(ones((3,)), ShapeError, r"got shape \[3\]")),
    Case("trace", floats((3, 4)), np.trace, bad=(ones((3,)), ShapeError, "trace")),
    Case("trace", floats((2, 3, 4), args=(1, 1, 2)), np.trace, tag="axes"),
    Case("trace", given(np.eye(3, dtype="int32")), lambda x: np.trace(x, dtype="int32"), no_grad="integers", tag="int"),
    Case("einsum", lambda rng: ("bik,bkj->ij", *floats((2, 3, 4), (2, 4, 5))(rng)), np.einsum, bad=(("ij,jk", *ones((2, 3), (4, 5))), ShapeError, "einsum")),
    Case("einsum", lambda rng: ("...ij,jk", *floats((2, 3, 4), (4, 5))(rng)), lambda e, x, y: x @ y, tag="implicit"),
    Case("einsum", lambda rng: ("ij,jk,kl->il", floats((2, 3), (3, 4), (4, 2))(rng)), lambda e, v: v[0] @ v[1] @ v[2], tag="list", terms=16),
    Case("tensordot", floats((2, 3, 4), (3, 4, 5)), np.tensordot, terms=12, bad=(ones((2, 3), (4, 5)), ShapeError, r"dim 0 of x \[2, 3\] and dim 0 of y \[4, 5\]")),
    Case("tensordot", floats((4, 3), (3, 4), args=([[0, 1], [1, 0]],)), np.tensordot, terms=12, tag="lists", bad=((*ones((2, 3), (3, 2)), [[5], [7]]), ShapeError, r"tensordot\(x float32\[2, 3\].*axes=")),
    Case("tensordot", floats((4, 3), (4, 3), args=([0, 1],)), lambda x, y, a: (x * y).sum(), terms=12, tag="same"),
    Case("tensordot", floats((4, 3), (4, 3), args=([[0, 1], [0]],)), lambda x, y, a: (x * y).sum(), terms=12, tag="shorter"),
    Case("tensordot", floats((4, 3), (4, 2), args=([[0]],)), lambda x, y, a: x.T @ y, tag="one"),
    Case("multi_dot", lambda rng: (list(floats((3, 4), (4, 2), (2, 5))(rng)),), np.linalg.multi_dot, terms=16, bad=(([np.ones((2, 2))],), ShapeError, "at least two matrices, got 1")),
    Case("multi_dot", lambda rng: (list(floats((4,), (4, 2))(rng)),), np.linalg.multi_dot, tag="two", bad=((list(ones((2, 3), (4, 5))),), ShapeError, "multi_dot")),
    Case("vander", floats((3,)), np.vander, bad=(ones((2, 2)), ShapeError, r"vector, got shape \[2, 2\]")),
    Case("vander", given(np.float32([0, 2, -1]), 4, True), np.vander, tag="zero", bad=((np.ones(2), -1), ShapeError, "n=-1")),
    Case("vander", given(np.array([1, 2, 3]), 0), np.vander, no_grad="integers", tag="none"),
]  # fmt: skip
