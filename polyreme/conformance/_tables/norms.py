"""Contract rows of ops/matrices/norms.py."""

import numpy as np
from scipy.spatial.distance import cdist, pdist

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError


def floats(*shapes, args=()):
    return lambda rng: (
        *(rng.uniform(0.2, 2, s).astype("float32") * rng.choice([-1, 1], s).astype("float32") for s in shapes),
        *args,
    )


def entrywise(x, p, axis=None, keepdim=False):
    """p-norm of the elements over axis."""
    axis = tuple(range(x.ndim)) if axis is None else tuple(axis) if isinstance(axis, list) else (axis,)
    size = np.abs(x.astype("float64"))
    if p == 0:
        return (size != 0).sum(axis, keepdims=keepdim)
    if np.isinf(p):
        return (np.max if p > 0 else np.min)(size, axis, keepdims=keepdim)
    return (size**p).sum(axis, keepdims=keepdim) ** (1 / p)


def matrix(x, p="fro", axis=(-2, -1), keepdim=False):
    return np.linalg.norm(x.astype("float64"), p, tuple(axis), keepdim)


def renormed(x, p, axis, max_norm):
    rest = tuple(d for d in range(x.ndim) if d != axis)
    return x * np.minimum(1, max_norm / entrywise(x, p, list(rest), True))


def complexes(shape, args=()):
    return lambda rng: ((rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype("complex64"), *args)


METRICS = {1: "cityblock", 2: "euclidean", np.inf: "chebyshev"}
BAD_AXIS = ((np.ones((2, 3), "float32"), 2, 5), ShapeError, r"axis 5 of a Tensor of shape \[2, 3\]")
ORDERS = (0, 0.5, 1, 2, 3, np.inf, -np.inf, -1)
BAD_ROWS = ((np.ones((2, 3)), np.ones((2, 4))), ShapeError, "cdist: dim 'k' is 3 in x")

CASES = [
    *(Case("vector_norm", floats((3, 4), args=(p, 1)), entrywise, tag=f"p{p}", terms=24, no_grad="counts" if p == 0 else "", bad=BAD_AXIS) for p in ORDERS),
    Case("vector_norm", floats((3, 4)), lambda x: np.linalg.norm(x), terms=12, bad=((np.ones(2), "fro"), TypeError, "p='fro'")),
    Case("vector_norm", floats((2, 3, 4), args=(2.0, [0, 2], True)), entrywise, terms=12, tag="dims"),
    Case("vector_norm", lambda rng: (np.complex64([3 + 4j, 1 - 2j]),), lambda x: np.linalg.norm(x), tag="complex"),
    Case("vector_norm", lambda rng: (np.array([3, 4]),), lambda x: np.float32(5), no_grad="integers", tag="int"),
    *(Case("matrix_norm", floats((2, 3, 4), args=(p,)), matrix, tag=f"p{p}", terms=48) for p in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)),
    *(Case("vector_norm", complexes((2, 3, 4), args=(p, axis, True)), lambda x, p, axis, _: (np.max if p > 0 else np.min)(np.abs(x), axis, keepdims=True), tag=f"complex{p}-{axis}") for p, axis in ((np.inf, (0, -1)), (-np.inf, 1), (np.inf, None))),
    Case("matrix_norm", floats((3, 2, 4), args=(1, [0, 2], True)), matrix, terms=12, tag="dims", bad=((np.ones((2, 2)), 3), ShapeError, "p=3; choose")),
    Case("matrix_norm", floats((3, 4), args=("nuc", [1, 0], True)), matrix, terms=48, tag="keepdim", bad=((np.ones((2, 2, 2)), 1, [0, 1, 2]), ShapeError, "spans 2 dims")),
    Case("norm", floats((3, 4)), lambda x: np.linalg.norm(x), terms=12, bad=((np.ones((2, 2)), 0, [0, 1]), ShapeError, "p=0.*choose")),
    Case("norm", floats((3, 4), args=("fro", [0, 1])), lambda x, p, a: np.linalg.norm(x), terms=12, tag="fro", bad=((np.ones(2), "max"), ShapeError, "p='max'")),
    Case("norm", floats((3, 4), args=("nuc", [0, 1])), lambda x, p, a: np.linalg.norm(x, "nuc"), terms=48, tag="nuc"),
    *(Case("norm", floats((3, 2, 4), args=(p, [0, 2], True)), matrix, terms=24, tag=f"matrix-{p}") for p in (1, -1, 2, -2, np.inf, -np.inf)),
    Case("norm", floats((3, 4), args=(None, (0, 1))), lambda x, *_: np.linalg.norm(x, 2), terms=24, tag="spectral"),
    Case("norm", floats((3, 4), args=(3,)), entrywise, terms=24, tag="entrywise"),
    Case("norm", floats((3, 4), args=(1, -1)), entrywise, tag="axis", bad=BAD_AXIS),
    Case("dist", floats((3, 4), (4,)), lambda x, y: np.linalg.norm(x - y), terms=12, bad=((np.ones(2), np.ones(3)), ShapeError, "dist")),
    *(Case("dist", floats((3, 4), (3, 4), args=(p,)), lambda x, y, p: entrywise(x - y, p), tag=f"p{p}", terms=24, no_grad="counts" if p == 0 else "") for p in (0, 1, 3, np.inf, -np.inf)),
    *(Case("cdist", floats((3, 4), (5, 4), args=(p,)), lambda x, y, p: cdist(x, y, m) if (m := METRICS.get(p)) else cdist(x, y, "minkowski", p=p), tag=f"p{p}", terms=24, bad=BAD_ROWS) for p in (1, 2, 3, np.inf)),
    Case("cdist", floats((30, 4), (5, 4)), cdist, terms=64, tag="product", bad=((np.ones((2, 3)), np.ones((2, 3)), -1), ShapeError, "p=-1")),
    Case("cdist", floats((2, 3, 4), (2, 5, 4)), lambda x, y: np.stack([cdist(a, b) for a, b in zip(x, y, strict=True)]), tag="batch",
         bad=((np.ones((2, 3)), np.ones((2, 3)), 2.0, "fast"), ShapeError, "compute_mode='fast'")),
    Case("pdist", floats((5, 3)), pdist, bad=((np.ones(3),), ShapeError, "pdist")),
    Case("pdist", floats((5, 3), args=(1,)), lambda x, p: pdist(x, "cityblock"), tag="p1"),
    Case("renorm", floats((3, 4), args=(2, 0, 2.0)), renormed, terms=12, bad=((np.ones((2, 2)), -1, 0, 1.0), ShapeError, "p=-1")),
    Case("renorm", floats((2, 3, 4), args=(1.5, 1, 1.0)), renormed, terms=24, tag="middle", bad=((np.ones((2, 2)), 2, 4, 1.0), ShapeError, "axis 4")),
]  # fmt: skip
