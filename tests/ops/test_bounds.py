"""Indices out of range: an IndexError in eager mode, never a wrong value inside a capture; in-place forms."""

import numpy as np
import pytest

from polyreme.core.op import OPS
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError
from polyreme.jit import to_static

X = np.arange(6, dtype="float32").reshape(3, 2)
OUT = np.array([0, 3])

READS = {
    "gather": lambda x, i: OPS["gather"](x, i),
    "index_select": lambda x, i: OPS["index_select"](x, i),
    "gather_nd": lambda x, i: OPS["gather_nd"](x, OPS["unsqueeze"](i, 1)),
    "take_along_axis": lambda x, i: OPS["take_along_axis"](x, OPS["unsqueeze"](i, 1), 0),
}
WRITES = {
    "scatter": lambda x, i: OPS["scatter"](x, i, np.ones((2, 2), "float32")),
    "index_add": lambda x, i: OPS["index_add"](x, i, 0, np.ones((2, 2), "float32")),
    "index_fill": lambda x, i: OPS["index_fill"](x, i, 0, 9.0),
    "index_put": lambda x, i: OPS["index_put"](x, [i], 9.0),
}


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_index_out_of_range_raises_in_eager_mode(name):
    with pytest.raises(IndexError, match="index 3 is out of range for dim 0 of size 3; give -3 to 2"):
        {**READS, **WRITES}[name](to_tensor(X), to_tensor(OUT))


@pytest.mark.parametrize("name", READS)
def test_captured_read_out_of_range_gives_nan(name):
    got = to_static(READS[name])(to_tensor(X), to_tensor(OUT)).numpy()
    np.testing.assert_array_equal(got[0], X[0])
    assert np.isnan(got[1]).all()


@pytest.mark.parametrize("name", WRITES)
def test_captured_write_out_of_range_is_dropped(name):
    got = to_static(WRITES[name])(to_tensor(X), to_tensor(OUT)).numpy()
    assert (got[0] != X[0]).any()
    np.testing.assert_array_equal(got[1:], X[1:])


def test_size_that_depends_on_values_raises_in_a_capture():
    for name in ("nonzero", "unique", "unique_consecutive", "one_hot"):
        with pytest.raises(CaptureError, match=name):
            to_static(OPS[name])(to_tensor(OUT))
    with pytest.raises(CaptureError, match="masked_select"):
        to_static(lambda x: OPS["masked_select"](x, x > 1))(to_tensor(X))


IN_PLACE = [
    ("reshape_", ([2, 3],), X.reshape(2, 3)),
    ("t_", (), X.T),
    ("transpose_", ([1, 0],), X.T),
    ("unsqueeze_", (0,), X[None]),
    ("squeeze_", (), X),
    ("flatten_", (), X.reshape(-1)),
    ("masked_fill_", (X > 3, 0.0), np.where(X > 3, 0, X)),
    ("index_put_", ([X > 3], 0.0), np.where(X > 3, 0, X)),
    ("index_fill_", (np.array([1]), 1, 7.0), np.stack([X[:, 0], X[:, 0] * 0 + 7], 1)),
    ("index_add_", (np.array([0]), 0, X[1:2]), np.stack([X[0] + X[1], X[1], X[2]])),
    ("scatter_", (np.array([0]), X[1:2]), np.stack([X[1], X[1], X[2]])),
    ("put_along_axis_", (np.array([[0, 1]]), 9.0, 0), np.array([[9, 1], [2, 9], [4, 5]])),
    ("fill_diagonal_", (9.0,), np.array([[9, 1], [2, 9], [4, 5]])),
    ("fill_diagonal_tensor_", (X[0],), np.array([[0, 1], [2, 1], [4, 5]])),
    ("masked_scatter_", (X > 3, np.float32([8, 9])), np.array([[0, 1], [2, 3], [8, 9]])),
]


@pytest.mark.parametrize(("name", "arguments", "want"), IN_PLACE, ids=lambda v: v if isinstance(v, str) else "")
def test_in_place_form_writes_into_the_tensor(name, arguments, want):
    x = to_tensor(X)
    positional = [
        to_tensor(a)
        if isinstance(a, np.ndarray)
        else [to_tensor(b) for b in a]
        if name == "index_put_" and i == 0
        else a
        for i, a in enumerate(arguments)
    ]
    assert getattr(x, name)(*positional) is x
    np.testing.assert_array_equal(x.numpy(), want)


def test_in_place_form_keeps_gradients():
    leaf = to_tensor(X, stop_gradient=False)
    y = leaf * 2.0
    y.reshape_([6]).masked_fill_(to_tensor(X.reshape(-1) > 3), 0.0)
    y.sum().backward()
    np.testing.assert_array_equal(leaf.grad.numpy(), np.where(X > 3, 0, 2))
