"""Matrix products with sparse Tensors."""

from __future__ import annotations

from typing import Any

from polyreme.core.state import TensorState
from polyreme.eager.sparse.elementwise import add, multiply, need_sparse
from polyreme.eager.sparse.structure import check_size, constant, indices_of, on_host, places_of, product
from polyreme.errors import ShapeError
from polyreme.ops import arithmetic as ar
from polyreme.ops.indices.gather import gather
from polyreme.ops.manipulation import reshape
from polyreme.ops.messages import segment_reduce
from polyreme.ops.sparse import sampled_matmul, sparse_matmul


def _check_matrices(what: str, x: Any, y: Any) -> None:
    if x.dense_dim():
        raise ShapeError(f"{what}: x {list(x.shape)} has {x.dense_dim()} dense dims; its matrices must be all sparse")
    a, b = list(x.shape), list(y.shape)
    if len(a) < 2 or len(a) != len(b) or a[:-2] != b[:-2] or a[-1] != b[-2]:
        raise ShapeError(
            f"{what}: x {a} and y {b}; needs [*, m, k] and [*, k, n] with the same dims *, which do not broadcast"
            + ("; mv takes a vector" if len(b) == 1 else "")
        )


def matmul(x: Any, y: Any, name: str | None = None) -> Any:
    """x @ y: sparse by dense gives a dense Tensor, two sparse ones of one format a sparse Tensor of it.

    x [*, m, k], y [*, k, n] -> [*, m, n]; the dims * must be the same. Of two sparse ones, indices are read on the
    host.
    """
    need_sparse("sparse.matmul", "x", x)
    _check_matrices("sparse.matmul", x, y)
    if isinstance(y, TensorState):
        return sparse_matmul(x.values(), y, x.where, x.dims)
    need_sparse("sparse.matmul", "y", y)
    if type(x) is not type(y):
        raise TypeError(
            f"sparse.matmul: {type(x).__name__} by {type(y).__name__}; give two of one format, or make y dense"
        )
    return _sparse_by_sparse(x, y)


def _sparse_by_sparse(x: Any, y: Any) -> Any:
    a, b = (on_host(each, "sparse.matmul of two sparse Tensors") for each in (x, y))
    *batch, rows, _ = x.dims
    columns = y.dims[-1]
    check_size((*batch, rows, columns))
    left, right, places, into = product(
        places_of(a[:-1], x.dims[:-1]),
        places_of(a[[*range(len(batch)), -1]], (*batch, x.dims[-1])),
        places_of(b[:-1], y.dims[:-1]),
        b[-1].astype("int64"),
        columns,
    )
    terms = ar.multiply(gather(x.values(), left, 0), gather(y.values(), right, 0))
    shape = (*batch, rows, columns)
    indices = constant(indices_of(places, shape, x.index_dtype))
    return x.from_coo(indices, segment_reduce(terms, into, len(places)), shape)


def mv(x: Any, vec: Any, name: str | None = None) -> Any:
    """A sparse matrix [m, n] by a dense vector [n] -> [m], dense."""
    need_sparse("sparse.mv", "x", x)
    if hasattr(vec, "with_values") or len(x.shape) != 2 or list(vec.shape) != x.shape[1:]:
        raise ShapeError(
            f"sparse.mv: x {list(x.shape)} and vec {list(vec.shape)}; needs a sparse [m, n] and a dense [n]"
        )
    return reshape(matmul(x, reshape(vec, [-1, 1])), [-1])


def addmm(input: Any, x: Any, y: Any, beta: float = 1.0, alpha: float = 1.0, name: str | None = None) -> Any:
    """beta * input + alpha * (x @ y), where x is sparse; input and y are both dense, or both sparse as x is."""
    product = matmul(x, y)
    if list(input.shape) != list(product.shape):
        raise ShapeError(f"sparse.addmm: input {list(input.shape)} and x @ y {list(product.shape)} must be alike")
    if isinstance(product, TensorState) != isinstance(input, TensorState):
        raise TypeError(
            f"sparse.addmm: input is a {type(input).__name__}, x @ y a {type(product).__name__}; make both dense"
        )
    if isinstance(product, TensorState):
        return ar.add(ar.multiply(input, beta), ar.multiply(product, alpha))
    return add(multiply(input, beta), multiply(product, alpha))


def masked_matmul(x: Any, y: Any, mask: Any, name: str | None = None) -> Any:
    """The elements of x @ y, both dense, where mask stores one; a sparse Tensor of mask's format and indices.

    x [*, m, k], y [*, k, n], mask [*, m, n]; what mask's values are does not matter. The whole product is never formed.
    """
    need_sparse("sparse.masked_matmul", "mask", mask)
    a, b = list(x.shape), list(y.shape)
    fits = len(a) >= 2 and len(a) == len(b) and a[:-2] == b[:-2] and a[-1] == b[-2]
    if not fits or mask.dense_dim() or mask.shape != [*a[:-1], b[-1]]:
        raise ShapeError(
            f"sparse.masked_matmul: x {a}, y {b} and mask {list(mask.shape)} with {mask.dense_dim()} dense dims; needs "
            "[*, m, k], [*, k, n] and [*, m, n] without dense dims"
        )
    return mask.with_values(sampled_matmul(x, y, mask.where))
