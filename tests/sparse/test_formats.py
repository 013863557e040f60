"""Sparse Tensors are made, converted, shown, differentiated, captured and refused."""

import numpy as np
import pytest
import scipy.sparse as sp

import polyreme as paddle
from polyreme import sparse
from polyreme.errors import DTypeError, GradError, HostValueError, ShapeError
from tests.sparse.reference import coo, csr, random_dense

rng = np.random.default_rng(0)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int64", "bool"])
def test_duplicates_in_any_order_add_up(index, dtype):
    at = np.array([[2, 0, 2, 1], [1, 3, 1, 0]], index)
    value = (np.array([1, 2, 3, 4]) * (1 + 1j if dtype == "complex64" else 1)).astype(dtype)
    x = sparse.sparse_coo_tensor(at, value, [3, 4])
    want = np.asarray(sp.coo_matrix((value, at), (3, 4)).todense())
    np.testing.assert_array_equal(x.numpy(), want)
    assert x.indices().dtype == index
    assert x.dtype == dtype
    assert (x.nnz(), x.is_coalesced()) == (4, False)
    merged = x.coalesce()
    assert (merged.nnz(), merged.is_coalesced(), merged.indices().dtype.name) == (3, True, index)
    assert merged.indices().tolist() == [[0, 1, 2], [3, 0, 1]]
    np.testing.assert_array_equal(merged.numpy(), want)
    rows = x.to_sparse_csr()
    assert (rows.nnz(), rows.crows().tolist(), rows.crows().dtype.name) == (3, [0, 1, 2, 3], index)
    np.testing.assert_array_equal(rows.numpy(), want)


def test_conversions_agree_with_scipy():
    dense = random_dense(rng, (5, 7))
    x = paddle.to_tensor(dense, stop_gradient=False)
    want = sp.csr_matrix(dense)
    rows = x.to_sparse_csr()
    for got, expected in ((rows.crows(), want.indptr), (rows.cols(), want.indices), (rows.values(), want.data)):
        np.testing.assert_array_equal(got.numpy(), expected)
    np.testing.assert_array_equal(rows.to_sparse_coo(2).indices().numpy(), np.stack(dense.nonzero()))
    np.testing.assert_array_equal(rows.to_sparse_coo().to_sparse_csr().numpy(), dense)
    np.testing.assert_array_equal(x.to_sparse_coo(1).numpy(), dense)
    # gradients flow through what is stored
    (rows.to_dense() * 3).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), 3 * (dense != 0))


def test_batched_rows_and_hybrid_coordinates():
    dense = random_dense(rng, (2, 3, 4))
    dense[1, 0] = 0
    rows = paddle.to_tensor(dense).to_sparse_csr()
    assert rows.crows().shape == [8]
    np.testing.assert_array_equal(rows.numpy(), dense)
    np.testing.assert_array_equal(rows.to_sparse_coo().numpy(), dense)
    again = sparse.sparse_csr_tensor(rows.crows(), rows.cols(), rows.values(), [2, 3, 4])
    np.testing.assert_array_equal(again.numpy(), dense)
    for count in (1, 2, 3):
        x = paddle.to_tensor(dense).to_sparse_coo(count)
        assert (x.sparse_dim(), x.dense_dim(), x.shape, x.ndim) == (count, 3 - count, [2, 3, 4], 3)
        assert x.values().shape[1:] == [3, 4][count - 1 :]
        np.testing.assert_array_equal(x.numpy(), dense)


def test_a_tensor_without_values():
    x = sparse.sparse_coo_tensor(np.zeros((2, 0), "int64"), np.zeros(0, "float32"), [3, 2], stop_gradient=False)
    assert (x.nnz(), x.to_sparse_csr().crows().tolist()) == (0, [0, 0, 0, 0])
    y = sparse.sin(x) + x
    out = y @ paddle.ones([2, 2]) + sparse.sum(x, 0, keepdim=True).to_dense().sum()
    np.testing.assert_array_equal(out.numpy(), np.zeros((3, 2)))
    assert (x @ sparse.transpose(x, [1, 0])).nnz() == 0
    out.sum().backward()
    assert x.grad.nnz() == 0
    assert paddle.zeros([0, 3]).to_sparse_coo(2).to_dense().shape == [0, 3]
    assert sparse.nn.functional.softmax(x.to_sparse_csr()).nnz() == 0


def test_a_leaf_gets_its_gradient_and_a_parameter_keeps_its_own():
    x = sparse.sparse_coo_tensor([[0, 1], [1, 0]], [2.0, 3.0], [2, 2], stop_gradient=False)
    sparse.square(x).to_dense().sum().backward()
    assert (x.is_leaf, x.grad.values().tolist(), x.grad.is_sparse_coo()) == (True, [4.0, 6.0], True)
    x.clear_grad()
    assert x.grad is None
    weight = paddle.create_parameter([2], "float32")
    rows = sparse.sparse_csr_tensor([0, 1, 2], [1, 0], weight, [2, 2])
    assert not rows.stop_gradient
    (rows @ paddle.ones([2, 1])).sum().backward()
    assert weight.grad.tolist() == [1.0, 1.0]
    given = paddle.to_tensor([1.0, 2.0])
    leaf = sparse.sparse_coo_tensor([[0, 1]], given, stop_gradient=False)
    leaf.backward(leaf.detach())
    assert (leaf.shape, leaf.grad.values().tolist(), given.stop_gradient) == ([2], [1.0, 2.0], True)
    assert leaf.detach().stop_gradient
    assert leaf.clone().astype("float64").dtype == "float64"
    assert sparse.cast(leaf, "int32", "complex64").index_dtype == "int32"


def test_a_gradient_counts_where_the_values_are():
    x = sparse.sparse_coo_tensor([[0, 1], [0, 1]], [1.0, 2.0], [2, 2], stop_gradient=False)
    for indices, values, wanted in (
        ([[0, 1], [1, 1]], [2.0, 3.0], [0, 3]),
        ([[1, 0], [1, 0]], [2.0, 3.0], [3, 2]),
        ([[1, 1], [1, 1]], [2.0, 3.0], [0, 5]),
    ):
        x.clear_grad()
        x.backward(sparse.sparse_coo_tensor(indices, values, [2, 2]), retain_graph=True)
        assert x.grad.values().tolist() == wanted
    for wrong in (paddle.ones([2, 2]), sparse.sparse_coo_tensor([[0], [0]], [1.0], [2, 3])):
        with pytest.raises(GradError, match=r"of shape \[2, 2\] with 2 sparse dims; give a gradient like it"):
            x.backward(wrong)


def test_a_hook_has_the_gradient_as_a_sparse_tensor():
    x = sparse.sparse_coo_tensor([[0, 1], [1, 0]], [2.0, 3.0], [2, 2], stop_gradient=False)
    x.register_hook(lambda gradient: gradient * 10.0)
    (x * x).values().sum().backward()
    assert x.grad.numpy().tolist() == [[0, 40], [60, 0]]


def test_predicates():
    x = sparse.sparse_coo_tensor([[0], [1]], [2.0], [2, 3])
    assert (x.is_sparse(), x.is_sparse_coo(), x.is_sparse_csr(), x.is_dense()) == (True, True, False, False)
    assert x.to_sparse_csr().is_sparse_csr()
    dense = paddle.ones([2, 3])
    assert [dense.is_sparse(), dense.is_sparse_coo(), dense.is_sparse_csr()] == [False] * 3
    assert (dense.sparse_dim(), dense.dense_dim(), dense.to_dense() is dense) == (0, 2, True)
    assert dense.is_same_shape(x)
    assert x.is_same_shape(x.to_sparse_csr())
    assert not sparse.is_same_shape(x, paddle.ones([2]))
    for form in (x, x.to_sparse_csr()):
        assert (form.size, len(form), form.dim(), form.ndimension(), form.itemsize) == (6, 2, 2, 2, 4)
        assert (form.element_size(), form.requires_grad, form.cpu().numpy()[0, 1], form.T.shape) == (
            4,
            False,
            2,
            [3, 2],
        )
        assert [form.is_floating_point(), form.is_complex(), form.is_integer()] == [True, False, False]
        assert form.name == form.values().name
    assert "nnz=1" in repr(x)
    assert "crows=[0, 1, 1]" in repr(x.to_sparse_csr())


@pytest.mark.parametrize("name", ["values", "nnz", "indices", "coalesce", "is_coalesced", "crows", "cols"])
def test_a_dense_tensor_has_no_parts(name):
    with pytest.raises(TypeError, match=rf"Tensor.{name}\(\): this Tensor is dense"):
        getattr(paddle.ones([2]), name)()


def test_dense_functions_refuse_sparse_tensors():
    x = sparse.sparse_coo_tensor([[0], [1]], [2.0], [2, 3])
    for call in (lambda: paddle.sin(x), lambda: paddle.ones([2, 3]) + x, lambda: paddle.nn.functional.relu(x)):
        with pytest.raises(TypeError, match=r"SparseCooTensor; to_dense\(\) makes one"):
            call()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: sparse.sparse_coo_tensor([[0, 5], [0, 1]], [1.0, 2.0], [2, 2]),
            IndexError,
            "index 5 .* dim 0 of size 2",
        ),
        (lambda: sparse.sparse_coo_tensor([[0, -1], [0, 1]], [1.0, 2.0], [2, 2]), IndexError, "index -1"),
        (lambda: sparse.sparse_coo_tensor([[0, 1], [0, 1]], [1.0], [2, 2]), ShapeError, "hold 2 coordinates"),
        (lambda: sparse.sparse_coo_tensor([[0, 1]], [1.0, 2.0], [2, 2]), ShapeError, "do not fit shape"),
        (lambda: sparse.sparse_coo_tensor([0, 1], [1.0, 2.0], [2]), ShapeError, "indices .* needs 2 dims"),
        (lambda: sparse.sparse_coo_tensor([[0.5]], [1.0], [2]), DTypeError, "indices is float64"),
        (lambda: sparse.sparse_coo_tensor(np.zeros((1, 0), int), np.zeros(0)), ShapeError, "give shape"),
        (lambda: sparse.sparse_csr_tensor([0, 2, 1], [0, 1], [1.0, 2.0], [2, 2]), ShapeError, "must rise from 0"),
        (lambda: sparse.sparse_csr_tensor([0, 1], [0, 1], [1.0, 2.0], [1, 2]), ShapeError, "number of elements, 2"),
        (lambda: sparse.sparse_csr_tensor([0, 1, 2], [0, 9], [1.0, 2.0], [2, 2]), IndexError, "index 9 .* dim 1"),
        (lambda: sparse.sparse_csr_tensor([0, 2], [1, 1], [1.0, 2.0], [1, 2]), ShapeError, "stored twice"),
        (lambda: sparse.sparse_csr_tensor([0, 1], [0], [1.0], [3, 2]), ShapeError, "crows .* do not fit shape"),
        (lambda: sparse.sparse_csr_tensor([0, 1], [0], [[1.0]], [1, 2]), ShapeError, r"must both be \[n\]"),
        (lambda: sparse.sparse_csr_tensor([0, 0], np.zeros(0, int), np.zeros(0)), ShapeError, "give shape"),
        (lambda: paddle.ones([4]).to_sparse_csr(), ShapeError, "needs 2 or 3 dims"),
        (lambda: paddle.ones([4]).to_sparse_coo(2), ShapeError, "sparse_dim=2"),
        (lambda: coo(np.ones((2, 2, 2)), 2).to_sparse_csr(), ShapeError, "all sparse"),
        (lambda: coo(np.ones((2, 2))).to_sparse_coo(1), ShapeError, "sparse_dim=1"),
        (lambda: csr(np.ones((2, 2))).to_sparse_coo(1), ShapeError, "sparse_dim=1"),
        (lambda: sparse.coalesce(csr(np.ones((2, 2)))), TypeError, "only COO"),
        (lambda: sparse.sin(paddle.ones([2])), TypeError, "sparse.sin: x is a Tensor"),
        (
            lambda: sparse.sparse_coo_tensor([[0]] * 4, [1.0], (2**16,) * 4),
            ShapeError,
            "more elements than an int64",
        ),
    ],
)
def test_what_is_wrong_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_capture_takes_and_returns_sparse_tensors():
    dense = random_dense(rng, (4, 4), dtype="float32")
    y = rng.standard_normal((4, 3)).astype("float32")

    def both(x, rows, y):
        z = (sparse.tanh(x) + x) @ y
        back = sparse.transpose(rows, [1, 0])
        return z, x.to_sparse_csr() @ y, back, sparse.sin(rows), sparse.mask_as(z @ z.T, x)

    args = (coo(dense), csr(dense), paddle.to_tensor(y))
    captured = paddle.jit.to_static(both)
    for got, want in zip(captured(*args), both(*args), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-5)
    # the same program serves other indices of the same number
    other = coo(dense[::-1].copy())
    np.testing.assert_allclose(captured(other, *args[1:])[0].numpy(), both(other, *args[1:])[0].numpy(), rtol=1e-5)
    assert len(captured.concrete_programs()) == 1

    with pytest.raises(HostValueError, match=r"sparse.add.*indices"):
        paddle.jit.to_static(lambda a, b: a + b)(coo(dense), coo(dense.T.copy()))
    with pytest.raises(HostValueError, match="coalesce"):
        paddle.jit.to_static(lambda a: a.coalesce().to_dense())(coo(dense))
    with pytest.raises(HostValueError, match="to_sparse_coo"):
        paddle.jit.to_static(lambda a: a.to_sparse_coo(2).to_dense())(paddle.ones([2, 2]))


def test_a_training_step_over_stored_weights_is_captured_and_saved():
    class Sparse(paddle.nn.Layer):
        """A linear layer whose weight stores three elements."""

        def __init__(self):
            super().__init__()
            self.weight = self.create_parameter([3])
            self.register_buffer("indices", paddle.to_tensor([[0, 1, 1], [1, 0, 2]]))

        def forward(self, x):
            return sparse.sparse_coo_tensor(self.indices, self.weight, [2, 3]) @ x

    layer = Sparse()
    sgd = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    x = paddle.to_tensor(rng.standard_normal((3, 2)).astype("float32"))
    before = layer.weight.numpy()

    @paddle.jit.to_static
    def step(x):
        loss = layer(x).square().sum()
        loss.backward()
        sgd.step()
        sgd.clear_grad()
        return loss

    losses = [float(step(x)) for _ in range(2)]
    rows = np.zeros((2, 3), "float32")
    rows[[0, 1, 1], [1, 0, 2]] = before
    gradient = (2 * rows @ x.numpy() @ x.numpy().T)[[0, 1, 1], [1, 0, 2]]
    again = rows.copy()
    again[[0, 1, 1], [1, 0, 2]] = before - 0.1 * gradient
    np.testing.assert_allclose(losses, [((r @ x.numpy()) ** 2).sum() for r in (rows, again)], rtol=1e-5)
    other = Sparse()
    other.set_state_dict(layer.state_dict())
    np.testing.assert_array_equal(other(x).numpy(), layer(x).numpy())
