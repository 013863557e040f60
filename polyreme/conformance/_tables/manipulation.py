"""Contract rows of ops/manipulation.py, ops/repetition.py, ops/slicing.py and ops/attributes.py."""

import itertools

import numpy as np
import scipy.linalg

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError


def cube(rng, shape=(2, 3, 4)):
    return np.asarray(rng.uniform(-2, 2, shape), "float32")


def of(shape, *rest):
    """A make that gives one random Tensor of the shape and the attributes after it."""
    return lambda rng: (cube(rng, shape), *rest)


def lists(*shapes, rest=()):
    """A make that gives a list of random Tensors and the attributes after it."""
    return lambda rng: ([cube(rng, s) for s in shapes], *rest)


def many(*shapes):
    """A make that gives random Tensors as positional arguments."""
    return lambda rng: tuple(cube(rng, s) for s in shapes)


def bad(match, *arguments, error=ShapeError):
    return (arguments, error, match)


X = np.ones((2, 3), "float32")
X3 = np.ones((2, 3, 4), "float32")
MISMATCH = [X, np.ones((3, 4), "float32")]

SHAPE = [
    Case("reshape", of((2, 3, 4), [0, -1]), lambda x, s: x.reshape(2, 12), bad=bad("6 elements", X, [4, 2])),
    Case("reshape", of((2, 3), [3, 2]), lambda x, s: x.reshape(3, 2), tag="plain", bad=bad("more than one -1", X, [-1, -1])),
    Case("reshape", of((), [1, 1]), lambda x, s: x.reshape(1, 1), tag="0d", bad=bad("copies a dim", X, [2, 3, 0])),
    Case("reshape", of((0, 3), [3, 0]), lambda x, s: x.reshape(3, 0), no_grad="no elements", tag="empty-turned"),
    Case("reshape", of((0, 3, 4), [0, -1]), lambda x, s: x.reshape(0, 12), no_grad="no elements", tag="empty"),
    Case("ravel", of((2, 3)), np.ravel),
    Case("flatten", of((2, 3, 4), 1), lambda x, a: x.reshape(2, 12), bad=bad("comes after", X, 1, 0)),
    Case("flatten", of(()), lambda x: x.reshape(1), tag="0d", bad=bad("axis=3", X, 3)),
    Case("unflatten", of((2, 6), -1, [3, -1]), lambda x, a, s: x.reshape(2, 3, 2), bad=bad("do not fill", X, 1, [2, 2])),
    Case("squeeze", of((1, 3, 1)), np.squeeze, bad=bad("axis=2 of a Tensor with 2 dims", X, 2)),
    Case("squeeze", of((1, 3, 1), [0, 1]), lambda x, a: x[0], tag="axis", bad=bad("names a dim twice", X, [0, -2])),
    Case("unsqueeze", of((2, 3), [2, 0]), lambda x, a: x[None, :, :, None], bad=bad("axis=4", X, 4)),
    Case("unsqueeze", of((), -1), lambda x, a: x.reshape(1), tag="0d"),
    Case("atleast_1d", of(()), lambda x: x.reshape(1), bad=bad("at least one Tensor")),
    Case("atleast_1d", lambda rng: (1 + 2j,), lambda x: np.complex64([x]), no_grad="a number", tag="number"),
    Case("atleast_1d", lambda rng: ([1.5, 2.5],), lambda x: np.float32(x), no_grad="numbers", tag="list"),
    Case("atleast_2d", many((), (3,), (2, 3)), lambda *xs: [np.atleast_2d(x) for x in xs]),
    Case("atleast_2d", many((0,), (0, 3)), lambda *xs: [np.atleast_2d(x) for x in xs], no_grad="no elements", tag="empty"),
    Case("atleast_3d", lists((), (3,), (2, 3), (1, 2, 3, 4)), lambda xs: [np.atleast_3d(x) for x in xs]),
    Case("atleast_3d", lists((0,), (0, 3)), lambda xs: [np.atleast_3d(x) for x in xs], no_grad="no elements", tag="empty"),
]  # fmt: skip

ORDER = [
    Case("transpose", of((2, 3, 4), [2, 0, -2]), lambda x, p: x.transpose(2, 0, 1), bad=bad("must name all 2", X, [0])),
    Case("transpose", of((2, 3), [1, 0]), lambda x, p: x.T, tag="2d", bad=bad("names a dim twice", X, [0, 0])),
    Case("permute", of((2, 3, 4), [1, 2, 0]), lambda x, p: x.transpose(1, 2, 0)),
    Case("t", of((2, 3)), lambda x: x.T, bad=bad("at most 2 dims", np.ones((1, 2, 3)))),
    Case("t", of((3,)), lambda x: x, tag="1d"),
    Case("moveaxis", of((2, 3, 4), [0, 1], [-1, 0]), np.moveaxis, bad=bad("different numbers", X, [0, 1], [0])),
    Case("swapaxes", of((2, 3, 4), 0, -1), np.swapaxes, bad=bad("axis=2", X, 0, 2)),
    Case("flip", of((2, 3, 4), [0, -1]), np.flip, bad=bad("axis=2", X, 2)),
    Case("flip", of((4,), 0), np.flip, tag="int"),
    Case("rot90", of((2, 3)), np.rot90, bad=bad("must name two dims", X, 1, [0])),
    Case("rot90", of((2, 3, 4), -1, [1, 2]), lambda x, k, a: np.rot90(x, k, a), tag="back"),
    Case("roll", of((2, 3), 4), np.roll, bad=bad("2 shifts for 1 dims", X, [1, 1], [0])),
    Case("roll", of((2, 3), [1, -1], [0, 1]), lambda x, s, a: np.roll(x, s, a), tag="axes", bad=bad("axis=5", X, 1, 5)),
    Case("roll", of((2, 3), [2]), lambda x, s: np.roll(x, 2), tag="one", bad=bad("2 shifts without axis", X, [1, 1])),
]  # fmt: skip

JOIN = [
    Case("concat", lists((2, 3), (1, 3)), np.concatenate, bad=bad("concat", [X, np.ones((2, 4), "float32")])),
    Case("concat", lists((2, 3), (2, 1), rest=(-1,)), np.concatenate, tag="last", bad=bad("1 dim or more", [X.sum()])),
    Case("stack", lists((2, 3), (2, 3), rest=(1,)), np.stack, bad=bad("stack", [X, np.ones((2, 4), "float32")])),
    Case("stack", lists((), ()), np.stack, tag="0d", bad=bad("at least one", [])),
    Case("hstack", lists((2, 3), (2, 1)), np.hstack, bad=bad("hstack", MISMATCH)),
    Case("hstack", lists((), (2,)), lambda x: np.hstack(x), tag="0d", bad=bad("empty list", [])),
    Case("vstack", lists((3,), (2, 3)), np.vstack, bad=bad("vstack", [X, np.ones((2, 4), "float32")])),
    Case("dstack", lists((2, 3), (2, 3)), np.dstack, bad=bad("dstack", MISMATCH)),
    Case("column_stack", lists((2,), (2, 3)), np.column_stack, bad=bad("column_stack", MISMATCH)),
    Case("block_diag", lists((), (2,), (2, 3)), lambda x: scipy.linalg.block_diag(*x), bad=bad("at most 2 dims", [np.ones((1, 1, 1))])),
]  # fmt: skip

SPLIT = [
    Case("split", of((6, 2), 3), lambda x, n: np.split(x, 3), bad=bad("2 equal parts do not fill", X, 2, 1)),
    Case("split", of((2, 6), [1, -1, 2], 1), lambda x, n, a: np.split(x, [1, 4], 1), tag="sizes", bad=bad("do not fill dim 1", X, [1, 1], 1)),
    Case("chunk", of((4, 2), 2), lambda x, n: np.split(x, 2), bad=bad("4 equal parts", X, 4)),
    Case("tensor_split", of((7, 2), 3), np.array_split, bad=bad("0 parts", X, 0)),
    Case("tensor_split", of((2, 7), [2, 9], 1), lambda x, i, a: np.array_split(x, i, 1), tag="indices", bad=bad("axis=2", X, 2, 2)),
    Case("hsplit", of((2, 5), 2), lambda x, n: np.array_split(x, n, 1), bad=bad("needs 1 dims", X.sum(), 2)),
    Case("hsplit", of((6,), [1, 3]), np.hsplit, tag="1d"),
    Case("vsplit", of((4, 3), 2), np.vsplit, bad=bad("needs 2 dims", X[0], 2)),
    Case("dsplit", of((1, 2, 4), 2), np.dsplit, bad=bad("needs 3 dims", X, 2)),
    Case("unbind", of((2, 3), 1), lambda x, a: list(x.T), bad=bad("axis=2", X, 2)),
    Case("unstack", of((2, 3), 0, 2), lambda x, a, n: list(x), bad=bad("num=5", X, 0, 5)),
]  # fmt: skip


def repeated(x, repeats, axis=None, **_):
    return np.repeat(x, repeats, axis)


REPEAT = [
    Case("tile", of((2, 3), [2, 1, 2]), np.tile, bad=bad("must be >= 0", X, [-1])),
    Case("tile", of((2, 3), [2]), np.tile, tag="short"),
    Case("expand", of((2, 1), [4, -1, 3]), lambda x, s: np.broadcast_to(x, (4, 2, 3)), bad=bad("only dims of size 1", X, [2, 4])),
    Case("expand", of((), [2]), lambda x, s: np.broadcast_to(x, (2,)), tag="0d", bad=bad("needs every dim", X, [3])),
    Case("broadcast_to", of((1, 3), [2, 3]), np.broadcast_to, bad=bad("broadcast_to", X, [3, 3])),
    Case("expand_as", many((1, 3), (2, 3)), lambda x, y: np.broadcast_to(x, (2, 3)), bad=bad("only dims of size 1", X, X.T)),
    Case("broadcast_shapes", lambda rng: ([2, 1, 3], [4, 1]), lambda *s: [np.array(n) for n in np.broadcast_shapes(*s)], no_grad="shapes", bad=bad("differ in a dim", [2], [3])),
    Case("broadcast_shape", lambda rng: ([2, 1], [3]), lambda *s: [np.array(2), np.array(3)], no_grad="shapes", bad=bad("differ in a dim", [2], [3])),
    Case("broadcast_tensors", lists((2, 1), (3,)), lambda x: np.broadcast_arrays(*x), bad=bad("differ in a dim", MISMATCH)),
    Case("repeat_each", of((2, 3), 2, 1), repeated, bad=bad("must be >= 0", X, -1, 0)),
    Case("repeat_by", lambda rng: (cube(rng, (2, 3)), np.array([1, 2]), 0, 3), lambda x, r, a, n: np.repeat(x, r, a), bad=bad("one a slice", X, np.array([1, 2]), 1, 3)),
    Case("repeat_interleave", of((2, 3), 2), repeated, bad=bad("axis=2", X, 2, 2)),
    Case("repeat_interleave", lambda rng: (cube(rng, (2, 3)), np.array([0, 2, 1]), -1), repeated, tag="counts", host="the sum of repeats is the size", bad=bad("sum to", X, np.array([1, -1]), 0)),
    Case(
        "repeat_interleave",
        lambda rng: (cube(rng, (2, 3)), np.array([2]), 0),
        repeated,
        kwargs={"output_size": 4},
        tag="size",
        bad=bad("output_size=4", X, np.array([1, 1]), 0),
    ),
    Case("cartesian_prod", lists((2,), (3,)), lambda x: np.array(list(itertools.product(*x))), bad=bad("1-D Tensors", [X])),
    Case("cartesian_prod", lists((3,)), lambda x: x[0], tag="one"),
    Case("combinations", of((4,), 2), lambda x, r: np.array(list(itertools.combinations(x, r))), bad=bad("1-D Tensor", X)),
    Case("combinations", of((3,), 2, True), lambda x, r, w: np.array(list(itertools.combinations_with_replacement(x, r))), tag="again"),
    Case("combinations", of((2,), 3), lambda x, r: np.zeros((0, 3), "float32"), no_grad="empty", tag="none"),
]  # fmt: skip


def padded(x, widths, mode="constant", **kwargs):
    return np.pad(x, widths, mode, **kwargs)


IMAGE = (1, 2, 3, 4)
SLICE = [
    Case("slice", of((4, 5), [0, 1], [-3, 0], [3, 100]), lambda x, *_: x[1:3], bad=bad("need as many", X, [0, 1], [0], [1])),
    Case("strided_slice", of((4, 5), [0, 1], [3, 0], [-9, 5], [-2, 2]), lambda x, *_: x[3::-2, 0:5:2], bad=bad("must not be 0", X, [0], [0], [1], [0])),
    Case("narrow", of((2, 5), 1, -3, 2), lambda x, *_: x[:, 2:4], bad=bad("leaves dim 1", X, 1, 2, 2)),
    Case("crop", of((4, 5), [2, -1], [1, 2]), lambda x, *_: x[1:3, 2:], bad=bad("leaves", X, [2, 3], [1, 0])),
    Case("crop", of((4, 5), [2, 3]), lambda x, s: x[:2, :3], tag="corner", bad=bad("need 2 numbers", X, [2])),
    Case("pad", of((2, 3), [1, 0, 0, 2]), lambda x, p: padded(x, [(1, 0), (0, 2)]), bad=bad("before, after", X, [1], "reflect")),
    Case("pad", of((2, 3), [1, 0, 0, 2]), lambda x, p, **_: padded(x, [(0, 2), (1, 0)]), kwargs={"pad_from_left_axis": False}, tag="right"),
    Case("pad", of(IMAGE, [1, 2, 0, 3], "constant", 7.0), lambda x, *_: padded(x, [(0, 0), (0, 0), (0, 3), (1, 2)], constant_values=7), tag="value"),
    Case("pad", of(IMAGE, [1, 2, 0, 3], "constant", 0.0, "NHWC"), lambda x, *_: padded(x, [(0, 0), (0, 3), (1, 2), (0, 0)]), tag="nhwc", bad=bad("data_format='NHWC'", X, [1, 1], "constant", 0.0, "NHWC")),
    Case("pad", of(IMAGE, [1, 2], "constant", 0.0, "NHWC"), lambda x, *_: padded(x, [(0, 0)] * 3 + [(1, 2)]), tag="nhwc-last"),
    Case("pad", of(IMAGE, [-1, 1]), lambda x, p: padded(x[..., 1:], [(0, 0)] * 3 + [(0, 1)]), tag="negative", bad=bad("8 numbers", X, [1] * 8)),
    Case("pad", of(IMAGE, [2, 1, 1, 0], "reflect"), lambda x, *_: padded(x, [(0, 0), (0, 0), (1, 0), (2, 1)], "reflect"), tag="reflect", bad=bad("reaches too far", X, [3, 0], "reflect")),
    Case("pad", of((2, 3, 4), [2, 5], "replicate", 0.0, "NCL"), lambda x, *_: padded(x, [(0, 0), (0, 0), (2, 5)], "edge"), tag="replicate", bad=bad("is negative", X, [-1, 0], "replicate")),
    Case("pad", of((1, 2, 3, 4, 1), [1, 1, 3, 0, 0, 2], "circular", 0.0, "NDHWC"), lambda x, *_: padded(x, [(0, 0), (0, 2), (3, 0), (1, 1), (0, 0)], "wrap"), tag="circular", bad=bad("mode='zeros'", X, [1, 1], "zeros")),
    Case("pad", lambda rng: (rng.integers(0, 9, (2, 3)), [1, 1], "constant", 5), lambda x, *_: padded(x, [(0, 0), (1, 1)], constant_values=5), no_grad="integers", tag="int", bad=bad("come before the channels", X3, [1, 1] * 3, "reflect", 0.0, "NLC")),
    Case("zeropad2d", of(IMAGE, [1, 2, 0, 3]), lambda x, p: padded(x, [(0, 0), (0, 0), (0, 3), (1, 2)]), bad=bad("left, right", X, [1, 2])),
    Case("unfold", of((2, 7), 1, 3, 2), lambda x, a, n, s: np.lib.stride_tricks.sliding_window_view(x, 3, 1)[:, ::2], bad=bad("size must fit", X, 1, 4, 1)),
    Case("unfold", of((5, 2), 0, 2, 1), lambda x, a, n, s: np.lib.stride_tricks.sliding_window_view(x, 2, 0), tag="first", bad=bad("step be >= 1", X, 1, 1, 0)),
    Case("as_strided", lambda rng: (rng.standard_normal((3, 4)), [2, 3], [1, 4], 8), lambda x, *_: np.lib.stride_tricks.as_strided(x.reshape(-1)[1:], (2, 3), (8, 32)), bad=bad("would read elements", X, [3, 3], [3, 1])),
    Case("as_strided", of((6,), [2, 2], [2, -1], 8), lambda x, *_: x[np.array([[2, 1], [4, 3]])], tag="back", bad=bad("a number each dim", X, [2], [1], 3)),
    Case("view", of((2, 6), [3, -1]), lambda x, s: x.reshape(3, 4), bad=bad("do not fill", X, [4])),
    Case("view", of((2, 3), "int16"), lambda x, d: x.view("int16"), no_grad="bytes", tag="narrow", bad=bad("no last dim", X.sum(), "int16")),
    Case("view", of((2, 4), "float64"), lambda x, d: x.view("float64"), no_grad="bytes", tag="wide", bad=bad("multiple of 2", X, "float64")),
    Case("view", lambda rng: ((rng.standard_normal((2, 2)) + 1j).astype("complex64"), "int16"), lambda x, d: x.view(d), no_grad="bytes", tag="parts"),
    Case("view", of((2, 4), "complex128"), lambda x, d: x.view(d), no_grad="bytes", tag="joined", bad=bad("does not fill items of complex64", X[:, :3], "complex64")),
    Case("view", of((2, 4), "int32"), lambda x, d: x.view("int32"), no_grad="bytes", tag="same", bad=bad("no last dim", X.sum(), "bool")),
    Case("view", of((2, 6), -1), lambda x, s: x.reshape(-1), no_grad="as of shape [3, -1]", tag="flat", bad=bad("7", X, 7)),
    Case("view_as", many((2, 6), (3, 4)), lambda x, y: x.reshape(3, 4), bad=bad("do not fill", X, X3)),
]  # fmt: skip

FACTS = "no floating result"
ATTRIBUTES = [
    Case("numel", of((2, 3)), lambda x: np.int64(6), no_grad=FACTS),
    Case("shape", of((2, 3)), lambda x: np.array([2, 3]), no_grad=FACTS),
    Case("rank", of((2, 3)), lambda x: np.int32(2), no_grad=FACTS),
    Case("is_empty", of((2, 0)), lambda x: np.True_, no_grad=FACTS),
    Case("is_tensor", of((2,)), lambda x: np.True_, no_grad=FACTS),
    Case("is_tensor", lambda rng: (3,), lambda x: np.False_, no_grad=FACTS, tag="number"),
    Case("is_complex", lambda rng: (cube(rng) * 1j,), np.iscomplexobj, no_grad=FACTS),
    Case("is_floating_point", of((2,)), lambda x: np.True_, no_grad=FACTS),
    Case("is_integer", lambda rng: (np.array([True]),), lambda x: np.False_, no_grad=FACTS),
    Case("tolist", of((2, 3)), lambda x: [np.asarray(v) for v in x.reshape(-1)], no_grad=FACTS, host="gives Python numbers"),
]  # fmt: skip

CASES = [*SHAPE, *ORDER, *JOIN, *SPLIT, *REPEAT, *SLICE, *ATTRIBUTES]
