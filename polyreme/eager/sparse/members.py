"""Members of a dense Tensor about sparsity: conversions, and queries, whose answer is that it is dense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyreme.eager.sparse import formats, shaping


def _of_sparse_only(name: str, kinds: str) -> Any:
    def member(self: Any) -> Any:
        raise TypeError(f"Tensor.{name}(): this Tensor is dense, only {kinds} has that; {maker} makes one")

    maker = "to_sparse_csr()" if kinds == "a SparseCsrTensor" else "to_sparse_coo()"
    member.__name__ = member.__qualname__ = name
    member.__doc__ = f"Of {kinds} only: raises TypeError for a dense Tensor."
    return member


_SPARSE_ONLY = {
    "values": "a sparse Tensor",
    "nnz": "a sparse Tensor",
    "indices": "a SparseCooTensor",
    "coalesce": "a SparseCooTensor",
    "is_coalesced": "a SparseCooTensor",
    "crows": "a SparseCsrTensor",
    "cols": "a SparseCsrTensor",
}

if TYPE_CHECKING:
    _SparseOnly = object
else:
    _SparseOnly = type(
        "_SparseOnly",
        (),
        {"__slots__": (), **{name: _of_sparse_only(name, kinds) for name, kinds in _SPARSE_ONLY.items()}},
    )


class SparseMembers(_SparseOnly):
    """Members of a dense Tensor that have to do with sparse ones."""

    __slots__ = ()

    def to_sparse_coo(self: Any, sparse_dim: int) -> formats.SparseCooTensor:
        """The elements that are not 0 by their coordinates in the first sparse_dim dims; slices, if dims are left.

        Reads the Tensor on the host: what is 0 decides the shapes.

        >>> import polyreme as paddle
        >>> paddle.to_tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_coo(2).values().tolist()
        [2.0, 3.0]
        """
        return formats.coo_of_dense(self, sparse_dim)

    def to_sparse_csr(self: Any) -> formats.SparseCsrTensor:
        """The elements that are not 0 of a matrix, or a batch of matrices, by rows. Reads the Tensor on the host.

        >>> import polyreme as paddle
        >>> paddle.to_tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr().crows().tolist()
        [0, 1, 2]
        """
        return formats.csr_of_dense(self)

    def to_dense(self: Any) -> Any:
        """Itself: a Tensor is dense."""
        return self

    def is_sparse(self) -> bool:
        """False: a sparse Tensor is a SparseCooTensor or SparseCsrTensor."""
        return False

    def is_sparse_coo(self) -> bool:
        """False for a dense Tensor."""
        return False

    def is_sparse_csr(self) -> bool:
        """False for a dense Tensor."""
        return False

    def sparse_dim(self) -> int:
        """Number of sparse dims: 0."""
        return 0

    def dense_dim(self: Any) -> int:
        """Number of dense dims: all of them."""
        return self.ndim

    def is_same_shape(self: Any, y: Any) -> bool:
        """Whether y, sparse or dense, has this shape."""
        return shaping.is_same_shape(self, y)
