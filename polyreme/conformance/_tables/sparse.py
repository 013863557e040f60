"""Contract rows of ops.sparse: stored elements against dense NumPy."""

import itertools

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ShapeError

AT = np.array([[1, 0, 2, 1], [0, 3, 1, 0]])
CROWS, COLS = np.array([0, 1, 3, 0, 0, 1]), np.array([2, 0, 1, 1])
CSR_AT = np.array([[0, 0, 0, 1], [0, 1, 1, 1], [2, 0, 1, 1]])
SITES = np.array([[0, 0, 0, 1], [0, 1, 2, 1], [1, 1, 2, 0]])
SOURCES = np.array([[0, 1, 3], [2, 3, 1]])


def rows(*shape):
    return lambda rng: rng.standard_normal(shape).astype("float32")


def scattered(values, at, shape):
    out = np.zeros((*shape, *values.shape[1:]), values.dtype)
    np.add.at(out, tuple(at), values)
    return out


def windows(sites, outs, spatial, kernel, steps):
    known = {tuple(c): i for i, c in enumerate(sites.T)}
    numbers = []
    for batch, *out in outs.T:
        for k in itertools.product(*map(range, kernel)):
            at = [o * s - p + i * d for o, s, p, i, d in zip(out, steps[0], steps[1], k, steps[2], strict=True)]
            numbers.append(known.get((batch, *at), len(known)))
    return np.array(numbers).reshape(outs.shape[1], -1)


def padded(values, fill):
    return np.concatenate([values, np.full((1, *values.shape[1:]), fill, values.dtype)])


def window_product(values, sources, weight, bias=None, groups=1):
    out = np.zeros((len(sources), weight.shape[-1]), values.dtype)
    picked, inner, outs = padded(values, 0)[sources], weight.shape[-2], weight.shape[-1] // groups
    weight = weight.reshape(sources.shape[1], inner, -1)
    for g in range(groups):
        block = picked[:, :, g * inner : (g + 1) * inner], weight[:, :, g * outs : (g + 1) * outs]
        out[:, g * outs : (g + 1) * outs] = np.einsum("mwi,wio->mo", *block)
    return out if bias is None else out + bias


def softmax_rows(values, where, shape, dim, keep=None):
    out = np.zeros_like(values)
    at = np.delete(where[0], dim, 0)
    keep = np.ones(len(values), bool) if keep is None else keep
    for i in range(len(values)):
        same = (at == at[:, i : i + 1]).all(0) & keep
        out[i] = np.exp(values[i]) / np.exp(values[same]).sum(0) if keep[i] else 0
    return out


BATCHED = ([CROWS, COLS], (2, 2, 3))

CASES = [
    Case("sparse_coordinates", lambda rng: BATCHED, lambda where, shape: CSR_AT, no_grad="integers"),
    Case("sparse_scatter", lambda rng: (rows(4, 2)(rng), [AT], (3, 4)), lambda v, w, s: scattered(v, w[0], s)),
    Case("sparse_scatter", lambda rng: (rows(4)(rng), *BATCHED), lambda v, w, s: scattered(v, CSR_AT, s), tag="csr"),
    Case(
        "sparse_at",
        lambda rng: (rows(4, 2)(rng), [AT], [np.array([[2, 0, 1, 1], [1, 0, 0, 0]])], (3, 4)),
        lambda v, w, at, s: scattered(v, w[0], s)[tuple(at[0])],
    ),
    Case("sparse_gather", lambda rng: (rows(3, 4, 2)(rng), [AT], 2), lambda x, w, n: x[tuple(w[0])]),
    Case(
        "sparse_reshape",
        lambda rng: ([AT], (3, 4), (2, 2, 3)),
        lambda w, a, b: np.stack(np.unravel_index(np.ravel_multi_index(tuple(w[0]), a), b)),
        no_grad="integers",
    ),
    Case(
        "sparse_compress",
        lambda rng: (CSR_AT[:, [3, 1, 0, 2]].astype("int32"), (2, 2, 3)),
        lambda at, shape: (CROWS, COLS, np.array([2, 1, 3, 0])),
        no_grad="integers",
    ),
    Case(
        "sparse_matmul",
        lambda rng: (rows(4)(rng), rows(4, 2)(rng), [AT], (3, 4)),
        lambda v, y, w, s: scattered(v, w[0], s) @ y,
        bad=((np.ones(4), np.ones((4, 2)), [AT], (3,)), ShapeError, "sparse_matmul"),
    ),
    Case(
        "sparse_matmul",
        lambda rng: (rows(4)(rng), rows(2, 3, 2)(rng), *BATCHED),
        lambda v, y, w, s: scattered(v, CSR_AT, s) @ y,
        tag="csr",
    ),
    Case(
        "sampled_matmul",
        lambda rng: (rows(2, 2, 3)(rng), rows(2, 3, 3)(rng), [CROWS, COLS]),
        lambda x, y, w: (x @ y)[tuple(CSR_AT)],
    ),
    Case(
        "sparse_softmax",
        lambda rng: (rows(4, 2)(rng), [AT[::-1].copy()], (4, 3), 1, np.array([True, True, True, False])),
        softmax_rows,
    ),
    Case("sparse_softmax", lambda rng: (rows(4)(rng), [AT[:1]], (3,), 0), softmax_rows, tag="1d"),
    Case(
        "window_sources",
        lambda rng: (SITES[:, ::-1].copy(), SITES, (3, 3), (2, 3), ((1, 1), (1, 2), (1, 2))),
        windows,
        no_grad="integers",
    ),
    Case(
        "window_sources",
        lambda rng: (SITES[:, :0].copy(), SITES, (3, 3), (1, 2), ((2, 1), (0, 0), (1, 1))),
        windows,
        no_grad="integers",
        tag="empty",
    ),
    Case(
        "window_matmul",
        lambda rng: (rows(3, 4)(rng), SOURCES, rows(1, 3, 2, 6)(rng), rows(6)(rng), 2),
        window_product,
        terms=16,
    ),
    Case("window_max", lambda rng: (rows(3, 4)(rng), SOURCES), lambda v, s: padded(v, -np.inf)[s].max(1)),
]
