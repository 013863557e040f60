"""Contract rows of ops/indices/gather.py and ops/indices/scatter.py."""

import functools

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import DTypeError, ShapeError


def cube(rng, shape=(4, 3)):
    return np.asarray(rng.uniform(-2, 2, shape), "float32")


def of(shape, *rest):
    return lambda rng: (cube(rng, shape), *rest)


def makes(*parts):
    """A make where a tuple of sizes stands for a random Tensor of that shape, anything else for itself."""
    return lambda rng: tuple(cube(rng, p) if isinstance(p, tuple) else p for p in parts)


def at(*values):
    return np.array(values)


def bad(match, *arguments, error=ShapeError):
    return (arguments, error, match)


out_of_range = functools.partial(bad, error=IndexError)


def changed(x, write):
    """A copy of x after write(copy)."""
    copy = np.array(x)
    write(copy)
    return copy


def put(x, index, value):
    return changed(x, lambda c: c.__setitem__(index, value))


def added(x, index, value):
    return changed(x, lambda c: np.add.at(c, index, value))


X = np.ones((2, 3), "float32")
ROW = np.ones((1, 3), "float32")
HOST = "the number of elements found is the shape"
INTS = "integer result"
IN_PLACE = "in place on a leaf; the other form is tested"
MASK = np.array([[True, False, True], [False, False, True], [True, True, False], [False, True, False]])

GATHER = [
    Case("gather", of((4, 3), at(2, 0, 2, -1)), lambda x, i: x[i], bad=out_of_range("index 2 is out of range for dim 0 of size 2; give -2 to 1", X, at(0, 2))),
    Case("gather", of((4, 3), at([1], [0]), 1), lambda x, i, a: x[:, i[:, 0]], tag="column", bad=bad(r"must be \[n\]", X, at([0, 1]))),
    Case("gather", of((4, 3), np.array(1)), lambda x, i: x[1], tag="0d", bad=bad("needs int32", X, at(0.5), error=DTypeError)),
    Case("index_select", of((4, 3), at(2, -3, 2), 1), lambda x, i, a: x[:, i], bad=out_of_range("index -3", X, at(-3), 0)),
    Case("index_sample", of((2, 3), at([2, 0], [1, 1])), lambda x, i: np.take_along_axis(x, i, 1), bad=out_of_range("index -1 .* give 0 to 2", X, at([-1], [0]))),
    Case("index_sample", of((2, 3), at([0], [1])), lambda x, i: np.take_along_axis(x, i, 1), tag="one", bad=bad("needs x", X, at([0]))),
    Case("take_along_axis", of((4, 3), at([3, 0, -1]), 0), lambda x, i, a: np.take_along_axis(x, i, 0), bad=out_of_range("index 2", X, at([2]), 0)),
    Case("take_along_axis", of((1, 3), at([2], [0]), 1), lambda x, i, a: np.take_along_axis(np.broadcast_to(x, (2, 3)), i, 1), tag="broadcast", bad=bad("number of dims", X, at(0), 0)),
    Case("take_along_axis", of((4, 3), at([2, 0]), 0, False), lambda x, i, a, b: np.take_along_axis(x[:, :2], i, 0), tag="cut", bad=bad("dim 1 is 4 against 3", X, at([0, 0, 0, 0]), 0, False)),
    Case("gather_nd", of((4, 3), at([3, 0], [1, -2])), lambda x, i: x[i[:, 0], i[:, 1]], bad=out_of_range("dim 1 of size 3", X, at([0, 3]))),
    Case("gather_nd", of((4, 3), at([[3], [1]])), lambda x, i: x[i[..., 0]], tag="rows", bad=bad("at most 2 coordinates", X, at([0, 0, 0]))),
    Case("gather_nd", of((4, 3), np.zeros((2, 0), "int64")), lambda x, i: np.stack([x, x]), tag="whole"),
    Case("take", of((2, 3), at([0, 5], [-1, -6])), np.take, bad=out_of_range("index 6", X, at(6))),
    Case("take", of((2, 3), at(6, -7, 13), "wrap"), lambda x, i, m: np.take(x, i, mode=m), tag="wrap", bad=bad("mode='zz'", X, at(0), "zz")),
    Case("take", of((2, 3), at(6, -1, 2), "clip"), lambda x, i, m: np.take(x, i, mode=m), tag="clip"),
]  # fmt: skip

MASKED = [
    Case("nonzero", lambda rng: (rng.integers(0, 2, (3, 4)),), np.argwhere, no_grad=INTS, host=HOST),
    Case("nonzero", lambda rng: (rng.integers(0, 2, (3, 4)), True), lambda x, t: np.nonzero(x), no_grad=INTS, host=HOST, tag="tuple"),
    Case("argwhere", lambda rng: (rng.integers(0, 2, (3, 4)),), np.argwhere, no_grad=INTS, host=HOST),
    Case("where", makes(MASK, (4, 3), (3,)), np.where, bad=bad("only one was given", X > 0, X)),
    Case("where", makes(MASK, (4, 3), 0), np.where, tag="scalar", bad=bad("where", X > 0, X.T, X)),
    Case("where", makes(MASK), np.nonzero, no_grad=INTS, host=HOST, tag="alone"),
    Case("where_", makes(MASK, (4, 3), (4, 3)), np.where, no_grad=IN_PLACE),
    Case("masked_select", makes((4, 3), MASK), lambda x, m: x[m], host=HOST, bad=bad("mask is float32", X, X, error=DTypeError)),
    Case("masked_select", makes((4, 1), MASK), lambda x, m: np.broadcast_to(x, (4, 3))[m], host=HOST, tag="broadcast", bad=bad("differ in a dim", X, X.T > 0)),
    Case("masked_fill", makes((4, 3), MASK, 1.5), lambda x, m, v: np.where(m, np.float32(v), x), bad=bad("masked_fill", X, X[:, :2], 1)),
    Case("masked_fill", lambda rng: (cube(rng, (4, 3)), rng.integers(-1, 2, (4, 3)), 1.5), lambda x, m, v: np.where(m, np.float32(v), x), tag="integer-mask"),
    Case("masked_fill", makes((4, 3), MASK[:, :1], (3,)), lambda x, m, v: np.where(m, v, x), tag="broadcast"),
    Case("masked_fill", lambda rng: (rng.integers(0, 9, (4, 3)), MASK, 7), lambda x, m, v: np.where(m, v, x), no_grad=INTS, tag="int"),
    Case("masked_scatter", makes((4, 3), MASK, (7,)), lambda x, m, v: put(x, m, v[: m.sum()]), bad=bad("6 True elements, value only 1", X, X > 0, X[0, :1])),
    Case("masked_scatter", makes((4, 3), MASK[0], (4, 2)), lambda x, m, v: put(x, np.broadcast_to(m, x.shape), v.reshape(-1)), tag="broadcast"),
    Case("masked_scatter", makes((0, 3), np.ones((0, 3), bool), (0,)), lambda x, m, v: x, no_grad="no elements", tag="empty"),
]  # fmt: skip

IDS = [
    Case("one_hot", makes(at([0, 2], [1, 1]), 4), lambda x, n: np.eye(4, dtype="float32")[x], no_grad="integer input", bad=out_of_range("index 3", at(3), 3)),
    Case("one_hot", makes(at(0, 2)), lambda x: np.eye(3, dtype="float32")[x], no_grad="integer input", host="the largest element is the size", tag="infer", bad=out_of_range("index -1", at(-1), 3)),
    Case("shard_index", makes(at([16], [1]), 20, 2, 1), lambda x, *_: at([6], [-1]), no_grad=INTS, bad=out_of_range("index 20", at([20]), 20, 2, 0)),
    Case("shard_index", makes(at([6], [2]), 7, 3, 2, 9), lambda x, *_: at([0], [9]), no_grad=INTS, tag="ignore", bad=bad("shard_id=2 of nshards=2", at([0]), 20, 2, 2)),
]  # fmt: skip


def scattered(x, index, updates, overwrite=True):
    return put(x, index, updates) if overwrite else added(put(x, index, 0), index, updates)


SLICES = [
    Case("scatter", makes((4, 3), at(2, 0), (2, 3)), scattered, bad=out_of_range("index 2 is out of range for dim 0", X, at(2), ROW)),
    Case("scatter", makes((4, 3), at(1, 1, -1), (3, 3), False), scattered, tag="add", bad=bad(r"updates is \[1, 3\], needs \[2, 3\]", X, at(0, 1), ROW)),
    Case("scatter", makes((4, 3), at(1, 1), (2, 3)), scattered, tag="twice"),
    Case("scatter", makes((4, 3), np.array(1), (3,)), scattered, tag="0d", bad=bad("must be", X, at([0, 1]), X)),
    Case("index_add", makes((4, 3), at(2, 0, 2), 0, (3, 3)), lambda x, i, a, v: added(x, i, v), bad=out_of_range("index 5", X, at(5), 0, ROW)),
    Case("index_add", makes((4, 3), at(2, -2), 1, (4, 2), 3), lambda x, i, a, v, c: added(x, (slice(None), i), 3 * v), tag="alpha", bad=bad("value is", X, at(0), 0, X)),
    Case("index_fill", makes((4, 3), at(2, 0), 1, 5.0), lambda x, i, a, v: put(x, (slice(None), i), 5), bad=out_of_range("index 5", X, at(5), 0, 1.0)),
    Case("index_fill", makes((4, 3), at([2, 0]), 0, ()), lambda x, i, a, v: put(x, i[0], v), tag="tensor", bad=bad("must be one number", X, at(0), 0, X)),
]  # fmt: skip

COORDINATES = [
    Case("scatter_nd_add", makes((4, 3), at([3, 0], [1, -1], [3, 0]), (3,)), lambda x, i, u: added(x, tuple(i.T), u), bad=out_of_range("dim 0 of size 2", X, at([2]), ROW)),
    Case("scatter_nd_add", makes((4, 3), at([[3], [1]]), (1, 2, 3)), lambda x, i, u: added(x, i[..., 0], u), tag="rows", bad=bad("updates is", X, at([0, 0]), X)),
    Case("scatter_nd_add", makes((4, 3), np.zeros((2, 0), "int64"), (2, 4, 3)), lambda x, i, u: x + u.sum(0), tag="whole"),
    Case("scatter_nd", makes(at([1], [1], [3]), (3, 2), [4, 2]), lambda i, u, s: added(np.zeros(s, "float32"), i[:, 0], u), bad=out_of_range("index 4", at([4]), X[0, :1], [4])),
    Case("index_put", makes((4, 3), [at(1, 3), at(0, -1)], (2,)), lambda x, i, v: put(x, tuple(i), v), bad=out_of_range("index 7", X, [at(7)], 1.0)),
    Case("index_put", makes((4, 3), [at(1, 1)], (3,), True), lambda x, i, v, a: added(x, i[0], v), tag="accumulate", bad=bad("3 indices", X, [at(0)] * 3, 1.0)),
    Case("index_put", makes((4, 3), [MASK], ()), lambda x, i, v: put(x, i[0], v), host="the True elements are counted", tag="mask", bad=bad("a bool mask", X, [MASK], 1.0)),
    Case("index_put", makes((4, 3), [at(0, 2)], (2, 3)), lambda x, i, v: put(x, i[0], v), tag="rows", bad=bad("does not fit", X, [at(0)], X)),
    Case("index_put", makes((4, 3), [at(0)], 1), lambda x, i, v: put(x, i[0], 1), tag="scalar", bad=bad("list or tuple of Tensors", X, at(0), 1.0, error=TypeError)),
]  # fmt: skip

COMBINE = {"add": np.add, "mul": np.multiply, "multiply": np.multiply, "amin": np.minimum, "amax": np.maximum}


def put_along(x, index, values, axis, reduce="assign", include_self=True, broadcast=True):
    """put_along_axis element by element."""
    if broadcast:
        index = np.broadcast_to(index, [index.shape[d] if d == axis else n for d, n in enumerate(x.shape)])
        values = np.broadcast_to(values, index.shape)
    out, count, total = np.array(x), np.full(x.shape, int(include_self)), np.array(x) * include_self
    for place in np.ndindex(*index.shape):
        to = (*place[:axis], index[place] % x.shape[axis], *place[axis + 1 :])
        v = values if np.ndim(values) == 0 else values[place]
        first = count[to] == 0
        out[to] = v if reduce in ("assign", "mean") or first else COMBINE[reduce](out[to], v)
        count[to] += 1
        total[to] += v
    hit = count > int(include_self)
    if reduce == "mean":
        mean = total // np.maximum(count, 1) if x.dtype.kind == "i" else total / np.maximum(count, 1)
        return np.where(hit, mean, x).astype(x.dtype)
    return out


INDEX = at([0, 1, -1], [0, 1, 0], [2, 2, 0])


def spread(shape):
    """Values at least 0.05 apart, so that a finite difference does not change which one is largest."""
    return lambda rng: ((rng.permutation(int(np.prod(shape))) * 0.1 - 0.55).reshape(shape)).astype("float32")


def reducing(reduce, include_self):
    return lambda rng: (
        spread((4, 3))(rng) + np.float32(0.05),
        INDEX,
        spread((3, 3))(rng),
        0,
        reduce,
        include_self,
        False,
    )


def with_zeros(rng):
    x, values = cube(rng), cube(rng, (3, 3))
    x[0, 0] = values[0, 1] = values[1, 1] = values[2, 2] = 0
    return x, INDEX, values, 0, "mul", True, False


def counted(reduce, include_self):
    return lambda rng: (rng.integers(1, 9, (4, 3)), INDEX, rng.integers(1, 9, (3, 3)), 0, reduce, include_self, False)


ALONG = [
    Case("put_along_axis", makes((4, 3), at([3, 0, -1]), 9.0, 0), put_along, bad=out_of_range("index 2", X, at([2]), 1.0, 0)),
    Case("put_along_axis", makes((4, 3), at([2]), (4, 1), 1), put_along, tag="broadcast", bad=bad("reduce='zz'", X, at([0]), 1.0, 0, "zz")),
    Case("put_along_axis", makes((4, 3), at([2, 1]), (2, 2), 0, "assign", True, False), lambda x, i, v, *_: put_along(x, i, v[:1], 0, broadcast=False), tag="cut", bad=bad("does not fit", X, at([0, 0]), ROW[:, :1].repeat(3, 0), 0, "add", True, False)),
    *(Case("put_along_axis", reducing(r, s), put_along, tag=f"{r}-{'self' if s else 'new'}") for r in ("add", "mul", "mean", "amin", "amax") for s in (True, False)),
    *(Case("put_along_axis", counted(r, s), put_along, no_grad="integers", tag=f"int-{r}-{'self' if s else 'new'}") for r in ("multiply", "mean", "amin", "amax") for s in (True, False)),
    Case("put_along_axis", with_zeros, put_along, tag="mul-zeros", bad=bad("do not expand", ROW, at([0], [0]), 1.0, 1)),
    Case("scatter_add", makes((4, 3), 0, INDEX, (3, 3)), lambda x, d, i, v: put_along(x, i, v, 0, "add", True, False)),
    Case("scatter_add_", makes((4, 3), 0, INDEX, (3, 3)), lambda x, d, i, v: put_along(x, i, v, 0, "add", True, False), no_grad=IN_PLACE),
    Case("scatter_reduce", makes((4, 3), 0, INDEX, (3, 3), "prod"), lambda x, d, i, v, r: put_along(x, i, v, 0, "mul", True, False), bad=bad("reduce='add'", X, 0, at([0]), ROW, "add")),
]  # fmt: skip


def diagonal(x, y, offset=0, axis1=0, axis2=1):
    moved = np.moveaxis(np.array(x), (axis1, axis2), (-2, -1))
    for row in range(moved.shape[-2]):
        if 0 <= row + offset < moved.shape[-1]:
            moved[..., row, row + offset] = y[..., row - max(-offset, 0)]
    return np.moveaxis(moved, (-2, -1), (axis1, axis2))


def filled(x, value, offset=0, wrap=False):
    return changed(x, lambda c: np.fill_diagonal(c[:, offset:] if offset > 0 else c[-offset:], value, wrap))


DIAGONALS = [
    Case("select_scatter", makes((4, 3), (4,), 1, -1), lambda x, v, a, i: put(x, (slice(None), -1), v), bad=out_of_range("index 5", X, X[0], 0, 5)),
    Case("select_scatter", makes((4, 3), (3,), 0, 2), lambda x, v, a, i: put(x, 2, v), tag="row", bad=bad("values is", X, X, 0, 1)),
    Case("slice_scatter", makes((4, 3), (2, 1), [0, 1], [0, 1], [4, 3], [2, 1]), lambda x, v, *_: put(x, (slice(0, 4, 2), slice(1, 3)), v), bad=bad("does not fit", X, X, [0], [0], [1], [1])),
    Case("diagonal_scatter", makes((4, 3), (3,)), diagonal, bad=bad("y is", X, X)),
    Case("diagonal_scatter", makes((2, 4, 3), (4, 2), 1, 0, -1), lambda x, y, *_: diagonal(x, y, 1, 0, 2), tag="planes", bad=bad("are one dim", X, X, 0, 1, -1)),
    Case("fill_diagonal_tensor", makes((4, 3), (3,), -1), diagonal, bad=bad("y is", X, X)),
    Case("fill_diagonal", makes((4, 3), 7.0), filled, bad=bad("needs 2 dims", X[0], 1.0)),
    Case("fill_diagonal", makes((7, 3), (), 0, True), filled, tag="wrap", bad=bad("does not fit", X, X, 0)),
    Case("fill_diagonal", makes((3, 4), 7.0, -1), filled, tag="below"),
    Case("fill_diagonal", makes((3, 5), 7.0, 2), filled, tag="above"),
    Case("fill_diagonal", makes((3, 3, 3), 7.0), lambda x, v: put(x, (range(3),) * 3, 7), tag="3d", bad=bad("offset=1", np.ones((2, 2, 2)), 1.0, 1)),
]  # fmt: skip

CASES = [*GATHER, *MASKED, *IDS, *SLICES, *COORDINATES, *ALONG, *DIAGONALS]
