"""The functions of polyreme.sparse against SciPy and dense NumPy, and their gradients against dense Tensors'."""

import numpy as np
import pytest
import scipy.sparse as sp

import polyreme as paddle
from polyreme import sparse
from polyreme.errors import ConfigError, ShapeError
from tests.sparse.reference import RTOL, coo, csr, random_dense, value, weighted

rng = np.random.default_rng(1)
DENSE = random_dense(rng, (4, 5))
OTHER = random_dense(rng, (4, 5))
FORMATS = {"coo": coo, "csr": csr}
UNARY = {
    name: getattr(np, numpy)
    for name, numpy in {
        "abs": "abs", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atanh": "arctanh", "deg2rad": "deg2rad",
        "expm1": "expm1", "isnan": "isnan", "log1p": "log1p", "neg": "negative", "rad2deg": "rad2deg", "sin": "sin",
        "sinh": "sinh", "sqrt": "sqrt", "square": "square", "tan": "tan", "tanh": "tanh",
    }.items()
}  # fmt: skip


def assert_gradients(call, dense_call, makers, arrays):
    """call on sparse leaves has the gradients of dense_call on dense ones, where elements are stored."""
    leaves = [make(a) for make, a in zip(makers, arrays, strict=True)]
    dense = [paddle.to_tensor(a, stop_gradient=False) for a in arrays]
    got, want = call(*leaves), dense_call(*dense)
    np.testing.assert_allclose(value(got), value(want), rtol=RTOL, atol=RTOL)
    weighted(got).backward()
    weighted(want).backward()
    for leaf, reference, array in zip(leaves, dense, arrays, strict=True):
        expected = reference.grad.numpy()
        if not isinstance(leaf, paddle.Tensor):
            expected = np.where(array != 0, expected, 0)
        np.testing.assert_allclose(value(leaf.grad), expected, rtol=RTOL, atol=RTOL * np.abs(expected).max())


def leaf(array):
    return paddle.to_tensor(array, stop_gradient=False)


def test_functions_of_each_element():
    half = np.abs(DENSE) / 4
    for make in (coo, csr):
        x = make(half)
        for name, numpy in UNARY.items():
            got = getattr(sparse, name)(x)
            np.testing.assert_allclose(value(got), numpy(half), rtol=RTOL, err_msg=name)
            assert got.nnz() == x.nnz()
        np.testing.assert_allclose(value(x.pow(3.0)), half**3, rtol=RTOL)
        np.testing.assert_allclose(value(-x.sin() * 2 / 4), -np.sin(half) / 2, rtol=RTOL)
    x = coo(half)
    weighted(sparse.tan(x)).backward()
    dense = leaf(half)
    weighted(dense.tan()).backward()
    np.testing.assert_allclose(value(x.grad), np.where(half != 0, dense.grad.numpy(), 0), rtol=RTOL)
    complex_ = random_dense(rng, (3, 3), dtype="complex128")
    np.testing.assert_allclose(value(sparse.sin(coo(complex_))), np.sin(complex_), rtol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_two_tensors_elementwise(make):
    for name, dense_call in (
        ("add", lambda a, b: a + b),
        ("subtract", lambda a, b: a - b),
        ("multiply", lambda a, b: a * b),
    ):
        assert_gradients(getattr(sparse, name), dense_call, (make, make), (DENSE, OTHER))
    total = make(DENSE) + make(OTHER)
    assert total.nnz() == np.count_nonzero((DENSE != 0) | (OTHER != 0))
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(value(make(DENSE) / make(OTHER)), DENSE / OTHER, rtol=RTOL)
    x = make(DENSE)
    np.testing.assert_allclose(value(x * x - x), DENSE * DENSE - DENSE, rtol=RTOL, atol=RTOL)
    twice = sparse.sparse_coo_tensor([[0, 0], [1, 1]], [2.0, 3.0], [2, 2])
    np.testing.assert_allclose(value(twice * twice), [[0, 25], [0, 0]])
    ints = random_dense(rng, (3, 3)).astype("int64")
    assert (make(ints, False) + make(ints.T.copy(), False)).dtype == "int64"


@pytest.mark.slow
def test_hybrid_and_batched_elementwise():
    dense, other = random_dense(rng, (3, 4, 2)), random_dense(rng, (3, 4, 2))

    def hybrid(a):
        return coo(a, 2)

    np.testing.assert_allclose(value(hybrid(dense) + hybrid(other)), dense + other, rtol=RTOL)
    np.testing.assert_allclose(value(csr(dense) * csr(other)), dense * other, rtol=RTOL)


@pytest.mark.slow
def test_products_equal_dense():
    y = rng.standard_normal((5, 3)).astype("float32")
    vec = rng.standard_normal(5).astype("float32")
    square, more = random_dense(rng, (5, 6)), random_dense(rng, (4, 6))
    for make in (coo, csr):
        assert_gradients(sparse.matmul, lambda a, b: a @ b, (make, leaf), (DENSE, y))
        assert_gradients(sparse.mv, lambda a, b: a @ b, (make, leaf), (DENSE, vec))
        assert_gradients(sparse.matmul, lambda a, b: a @ b, (make, make), (DENSE, square))
        assert_gradients(
            lambda i, a, b: sparse.addmm(i, a, b, 2.0, 3.0),
            lambda i, a, b: 2 * i + 3 * (a @ b),
            (make, make, make),
            (more, DENSE, square),
        )
        assert_gradients(
            lambda i, a, b: sparse.addmm(i, a, b, 2.0, 3.0),
            lambda i, a, b: 2 * i + 3 * (a @ b),
            (leaf, make, leaf),
            (more, DENSE, rng.standard_normal((5, 6)).astype("float32")),
        )
    found = csr(DENSE) @ csr(square)
    want = (sp.csr_matrix(DENSE) @ sp.csr_matrix(square)).sorted_indices()
    np.testing.assert_array_equal(found.cols().numpy(), want.indices)
    np.testing.assert_allclose(found.values().numpy(), want.data, rtol=RTOL, atol=RTOL)
    complex_ = random_dense(rng, (3, 3), dtype="complex64")
    assert_gradients(sparse.matmul, lambda a, b: a @ b, (coo, leaf), (complex_, complex_.T.copy()))


@pytest.mark.slow
def test_batched_products():
    dense, other = random_dense(rng, (2, 3, 4)), random_dense(rng, (2, 4, 2))
    for make in (coo, csr):
        assert_gradients(sparse.matmul, lambda a, b: a @ b, (make, leaf), (dense, other))
        np.testing.assert_allclose(value(make(dense) @ make(other)), dense @ other, rtol=RTOL, atol=RTOL)
        pattern = random_dense(rng, (2, 3, 2))
        got = sparse.masked_matmul(paddle.to_tensor(dense), paddle.to_tensor(other), make(pattern))
        np.testing.assert_allclose(value(got), np.where(pattern, dense @ other, 0), rtol=RTOL, atol=RTOL)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_dense_tensors_at_stored_places(make):
    x, y = (rng.standard_normal(s).astype("float32") for s in ((4, 3), (3, 5)))
    keep = paddle.to_tensor((DENSE != 0).astype("float32"))
    assert_gradients(
        lambda a, b: sparse.masked_matmul(a, b, make(DENSE)), lambda a, b: (a @ b) * keep, (leaf, leaf), (x, y)
    )
    assert_gradients(lambda a: sparse.mask_as(a, make(DENSE)), lambda a: a * keep, (leaf,), (OTHER + 1,))
    hybrid = random_dense(rng, (3, 4, 2))
    full = rng.standard_normal((3, 4, 2)).astype("float32")
    kept = np.where((hybrid != 0).any(2, keepdims=True), full, 0)
    np.testing.assert_array_equal(value(sparse.mask_as(paddle.to_tensor(full), coo(hybrid, 2))), kept)


def test_transpose_reshape_and_slice_equal_dense():
    for make in (coo, csr):
        assert_gradients(lambda x: sparse.transpose(x, [1, 0]), lambda x: x.transpose([1, 0]), (make,), (DENSE,))
        assert_gradients(lambda x: sparse.reshape(x, [-1, 2]), lambda x: x.reshape([10, 2]), (make,), (DENSE,))
        assert_gradients(lambda x: sparse.slice(x, [0, 1], [1, -4], [9, 4]), lambda x: x[1:, 1:4], (make,), (DENSE,))
    assert sparse.reshape(coo(DENSE), [2, 0, 2]).shape == [2, 5, 2]
    batch = random_dense(rng, (2, 3, 4))
    np.testing.assert_array_equal(value(sparse.transpose(csr(batch), [2, 0, 1])), batch.transpose(2, 0, 1))
    np.testing.assert_array_equal(value(sparse.reshape(csr(batch), [6, 4])), batch.reshape(6, 4))
    hybrid = random_dense(rng, (2, 3, 4, 2))
    x = coo(hybrid, 2)
    np.testing.assert_array_equal(value(sparse.transpose(x, [1, 0, 3, 2])), hybrid.transpose(1, 0, 3, 2))
    np.testing.assert_array_equal(value(sparse.reshape(x, [6, 4, 2])), hybrid.reshape(6, 4, 2))
    np.testing.assert_array_equal(value(x.slice([2, 1], [1, 0], [3, 2])), hybrid[:, :2, 1:3])
    bounds = (paddle.to_tensor(v) for v in ([0], [1], [2]))
    np.testing.assert_array_equal(value(sparse.slice(coo(DENSE), *bounds)), DENSE[1:2])


def test_sums_over_axes_equal_dense():
    for axis in (0, 1, -1, (0, 1)):
        assert_gradients(
            lambda x, axis=axis: sparse.sum(x, axis, keepdim=True),
            lambda x, axis=axis: x.sum(axis, keepdim=True),
            (coo,),
            (DENSE,),
        )
        got = sparse.sum(csr(DENSE), axis)
        assert got.is_sparse_csr()
        np.testing.assert_allclose(value(got), DENSE.sum(axis, keepdims=True), rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(value(sparse.sum(coo(DENSE), 1)), DENSE.sum(1), rtol=RTOL)
    assert sparse.sum(coo(DENSE)).shape == [1]
    np.testing.assert_allclose(value(sparse.sum(coo(DENSE))), [DENSE.sum()], rtol=RTOL)
    hybrid = random_dense(rng, (2, 3, 4))
    for axis, keepdim in ((2, False), (1, False), ((0, 2), True), ((1, 2), False)):
        got = value(sparse.sum(coo(hybrid, 2), axis, keepdim=keepdim))
        np.testing.assert_allclose(got, hybrid.sum(axis, keepdims=keepdim), rtol=RTOL, atol=RTOL)
    assert sparse.sum(coo(hybrid, 2), (0, 1)).shape == [1, 4]
    counts = sparse.sum(coo(np.eye(3, dtype="int32"), wants_grad=False), 0)
    assert (counts.dtype, value(counts).tolist()) == (np.int64, [1, 1, 1])
    assert sparse.sum(coo(DENSE), 0, "float64").dtype == "float64"


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("center", [True, False])
def test_principal_components(center):
    paddle.seed(3)
    dense = random_dense(rng, (12, 8)) + 0.0
    u, s, v = sparse.pca_lowrank(coo(dense), 8, center, 3)
    want = dense - dense.mean(0) if center else dense
    np.testing.assert_allclose(s.numpy(), np.linalg.svd(want)[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose((u * s @ v.T).numpy(), want, atol=1e-4)
    assert [t.shape for t in sparse.pca_lowrank(csr(dense))] == [[12, 6], [6], [8, 6]]


def tall():
    return sparse.sparse_coo_tensor([[0], [0]], [1.0], [2**32, 1])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: x + csr(DENSE), TypeError, "give two of one format"),
        (lambda x: x @ csr(DENSE.T.copy()), TypeError, "give two of one format"),
        (lambda x: sparse.add(x, paddle.ones([4, 5])), TypeError, "sparse.add: y is a Tensor"),
        (lambda x: x + coo(DENSE.T.copy()), ShapeError, "nothing broadcasts"),
        (lambda x: sparse.matmul(paddle.ones([4, 4]), x), TypeError, "sparse.matmul: x is a Tensor"),
        (lambda x: x @ paddle.ones([4, 2]), ShapeError, r"needs \[\*, m, k\]"),
        (lambda x: x @ paddle.ones([5]), ShapeError, "mv takes a vector"),
        (lambda x: coo(np.ones((2, 2)), 1) @ paddle.ones([2, 2]), ShapeError, "1 dense dims"),
        (lambda x: sparse.mv(x, paddle.ones([4])), ShapeError, "sparse.mv"),
        (lambda x: tall() @ tall().transpose([1, 0]), ShapeError, "more elements than an int64"),
        (lambda x: sparse.addmm(paddle.ones([2, 2]), x, paddle.ones([5, 2])), ShapeError, "must be alike"),
        (lambda x: sparse.addmm(x, x, paddle.ones([5, 5])), TypeError, "make both dense"),
        (lambda x: sparse.masked_matmul(paddle.ones([4, 2]), paddle.ones([3, 5]), x), ShapeError, "masked_matmul: x"),
        (lambda x: sparse.mask_as(paddle.ones([4, 4]), x), ShapeError, "must have the same shape"),
        (lambda x: sparse.transpose(x, [0]), ShapeError, "name every dim once"),
        (lambda x: sparse.transpose(coo(np.ones((2, 2)), 1), [1, 0]), ShapeError, "the sparse ones first"),
        (lambda x: sparse.reshape(x, [3, 3]), ShapeError, "needs as many elements"),
        (lambda x: sparse.reshape(csr(DENSE), [20]), ShapeError, "2 or 3 dims"),
        (lambda x: sparse.slice(x, [0], [1, 2], [3]), ShapeError, "differ in number"),
        (lambda x: sparse.pca_lowrank(x, 9), ConfigError, "1 <= q <= 4"),
        (lambda x: sparse.pca_lowrank(coo(np.ones((2, 2)), 1)), ShapeError, "needs a sparse matrix"),
    ],
)
def test_what_is_wrong_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call(coo(DENSE))
