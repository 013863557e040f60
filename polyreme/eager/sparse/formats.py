"""SparseCooTensor and SparseCsrTensor: Tensors of indices and of values that stand for a Tensor of mostly zeros.

They are containers of Tensors, dataclasses, so that the tape sees the values and a captured function the
indices and the values: gradients flow to values(), and a program captured with one set of indices serves every other of
the same number. Nothing is changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from polyreme.core import state
from polyreme.eager.memory import Size
from polyreme.eager.sparse import elementwise, products, shaping
from polyreme.eager.sparse.structure import constant
from polyreme.errors import GradError, ShapeError
from polyreme.ops import arithmetic as ar
from polyreme.ops.indices.gather import gather
from polyreme.ops.manipulation import reshape
from polyreme.ops.sparse import sparse_at, sparse_compress, sparse_coordinates, sparse_scatter

_METHODS: dict[str, Callable[..., Any]] = {
    **elementwise.UNARY,
    **{f.__name__: f for f in (elementwise.pow, elementwise.cast, elementwise.add, elementwise.subtract)},
    **{f.__name__: f for f in (elementwise.multiply, elementwise.divide, products.matmul, products.mv)},
    **{f.__name__: f for f in (shaping.transpose, shaping.reshape, shaping.slice, shaping.sum, shaping.coalesce)},
    "is_same_shape": shaping.is_same_shape,
}

if TYPE_CHECKING:

    class SparseMethods:
        """The functions of polyreme.sparse that are methods too."""

        def __getattr__(self, name: str) -> Any: ...
else:
    SparseMethods = type(
        "SparseMethods",
        (),
        {"__doc__": "The functions of polyreme.sparse that are methods too.", "__slots__": (), **_METHODS},
    )


class SparseTensor(SparseMethods):
    """Base of both formats: the places of the stored elements, their values, and the dense shape.

    elements: the values, [n, *dense dims]. dims: the dense shape. where: the Tensors of indices, as ops.sparse takes
    them.
    """

    elements: Any
    dims: tuple[int, ...]

    @property
    def where(self) -> list[Any]:
        raise NotImplementedError

    def to_sparse_coo(self, sparse_dim: int | None = None) -> SparseCooTensor:
        """The same Tensor in coordinate format."""
        raise NotImplementedError

    # what it is

    @property
    def shape(self) -> Size:
        """Size of each dim of the Tensor it stands for."""
        return Size.of(self.dims)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def size(self) -> int:
        """Number of elements of the Tensor it stands for, zeros that are not stored included."""
        return math.prod(self.dims)

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return self.dtype.itemsize

    @property
    def name(self) -> str:
        """Name of the Tensor of its values."""
        return self.elements.name

    def dim(self) -> int:
        """Number of dims of the Tensor it stands for."""
        return len(self.dims)

    ndimension = dim

    def element_size(self) -> int:
        """Bytes of one stored element."""
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.dims[0]

    def is_floating_point(self) -> bool:
        """Whether the values are floating numbers."""
        return self.elements.is_floating_point()

    def is_complex(self) -> bool:
        """Whether the values are complex numbers."""
        return self.elements.is_complex()

    def is_integer(self) -> bool:
        """Whether the values are integers."""
        return self.elements.is_integer()

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values."""
        return self.elements.dtype

    @property
    def index_dtype(self) -> np.dtype:
        """Dtype of the indices."""
        return self.where[-1].dtype

    @property
    def place(self) -> Any:
        """The device that holds the values."""
        return self.elements.place

    def values(self) -> Any:
        """The stored elements, [n, *dense dims]: a Tensor with a place in the tape."""
        return self.elements

    def nnz(self) -> int:
        """Number of stored elements; those stored as 0 and repeated ones count."""
        return self.elements.shape[0]

    def dense_dim(self) -> int:
        """Number of dims, the last ones, in which all elements are stored."""
        return len(self.dims) - self.sparse_dim()

    def sparse_dim(self) -> int:
        """Number of dims, the first ones, of which only some coordinates are stored."""
        return self.where[0].shape[0] if len(self.where) == 1 else len(self.dims)

    def is_sparse(self) -> bool:
        return True

    def is_sparse_coo(self) -> bool:
        return isinstance(self, SparseCooTensor)

    def is_sparse_csr(self) -> bool:
        return isinstance(self, SparseCsrTensor)

    def is_dense(self) -> bool:
        return False

    # gradients

    @property
    def stop_gradient(self) -> bool:
        """Whether the values are kept out of differentiation."""
        return self.elements.stop_gradient

    @stop_gradient.setter
    def stop_gradient(self, value: bool) -> None:
        self.elements.stop_gradient = value

    @property
    def requires_grad(self) -> bool:
        """Whether the values take part in differentiation."""
        return not self.elements.stop_gradient

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.elements.stop_gradient = not value

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Call hook with the gradient, sparse with these indices, in backward(); what it returns replaces that."""

        def of_values(gradient: Any) -> Any:
            replaced = hook(self.with_values(gradient))
            return None if replaced is None else self._gradient_of_values(replaced)

        return self.elements.register_hook(of_values)

    @property
    def is_leaf(self) -> bool:
        """True if no taped op made the values."""
        return self.elements.is_leaf

    @property
    def grad(self) -> Any:
        """The gradient of the values as a sparse Tensor with these indices, or None."""
        gradient = self.elements.grad
        return None if gradient is None else self.with_values(gradient)

    def clear_grad(self, set_to_zero: bool = False) -> None:
        """Forget the gradient of the values."""
        self.elements.clear_grad(set_to_zero)

    def backward(self, grad_tensor: Any = None, retain_graph: bool = False) -> None:
        """backward() of the values, from ones or from what grad_tensor, sparse and of this shape, has at their indices.

        Raises GradError for a gradient that is dense or of another shape.
        """
        self.elements.backward(None if grad_tensor is None else self._gradient_of_values(grad_tensor), retain_graph)

    def _gradient_of_values(self, gradient: Any) -> Any:
        facts = [(x.shape, x.sparse_dim()) if isinstance(x, SparseTensor) else None for x in (self, gradient)]
        if facts[0] != facts[1]:
            raise GradError(
                f"backward(): the Tensor is sparse, of shape {list(self.shape)} with {self.sparse_dim()} sparse dims; "
                f"give a gradient like it, got {gradient!r}"
            )
        if all(mine is its for mine, its in zip(self.where, gradient.where, strict=False)):
            return gradient.values()
        return sparse_at(gradient.values(), gradient.where, self.where, self.dims[: self.sparse_dim()])

    def retain_grads(self) -> None:
        """Keep .grad although the values are not a leaf."""
        self.elements.retain_grads()

    # made from it

    def with_values(self, values: Any) -> Any:
        """A Tensor that stores other values, [n, *dense dims], in the same places."""
        return replace(self, elements=values, dims=(*self.dims[: self.sparse_dim()], *values.shape[1:]))  # type: ignore[type-var]

    def to_dense(self, name: str | None = None) -> Any:
        """The dense Tensor; elements stored twice are added up."""
        return sparse_scatter(self.elements, self.where, self.dims[: self.sparse_dim()])

    def numpy(self) -> np.ndarray:
        """The dense value as an ndarray."""
        return self.to_dense().numpy()

    def detach(self) -> Any:
        """The same value outside the tape."""
        return self.with_values(self.elements.detach())

    def clone(self) -> Any:
        """A copy that gradients flow through."""
        return self.with_values(self.elements.clone())

    def cpu(self) -> Any:
        """The same Tensor on the host's device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        moved = {name: t.cpu() for name, t in tensors.items() if isinstance(t, state.TensorState)}
        return replace(self, **moved)  # type: ignore[type-var]

    @property
    def T(self) -> Any:
        """The Tensor with its dims in reverse order."""
        return shaping.transpose(self, list(range(len(self.dims)))[::-1])

    def astype(self, dtype: Any) -> Any:
        """The same Tensor with its values in another dtype."""
        return elementwise.cast(self, None, dtype)

    # operators

    def __add__(self, y: Any) -> Any:
        return elementwise.add(self, y)

    def __sub__(self, y: Any) -> Any:
        return elementwise.subtract(self, y)

    def __mul__(self, y: Any) -> Any:
        return elementwise.multiply(self, y)

    def __rmul__(self, y: Any) -> Any:
        return elementwise.multiply(self, y)

    def __truediv__(self, y: Any) -> Any:
        return elementwise.divide(self, y)

    def __matmul__(self, y: Any) -> Any:
        return products.matmul(self, y)

    def __neg__(self) -> Any:
        return self.with_values(ar.neg(self.elements))

    def _shown(self, **parts: Any) -> str:
        facts = (
            f"shape={list(self.shape)}, dtype={self.dtype.name}, nnz={self.nnz()}, stop_gradient={self.stop_gradient}"
        )
        if any(isinstance(p._array, state.Tracer) for p in (*self.where, self.elements)):
            return f"{type(self).__name__}({facts}, captured)"
        lines = [f"{name}={np.array2string(p.numpy(), separator=', ')}" for name, p in parts.items()]
        text = ",\n".join(lines).replace("\n", "\n" + " " * 7)
        return f"{type(self).__name__}({facts},\n       {text})"


@dataclass(eq=False, repr=False)
class SparseCooTensor(SparseTensor):
    """Elements by their coordinates: indices [sparse dims, n], values [n, *dense dims], in any order.

    coalesced: known to be sorted and without repetition. Made by sparse.sparse_coo_tensor and Tensor.to_sparse_coo.
    """

    coordinates: Any
    elements: Any
    dims: tuple[int, ...]
    coalesced: bool = False

    @property
    def where(self) -> list[Any]:
        """[indices]."""
        return [self.coordinates]

    def indices(self) -> Any:
        """Coordinates of the stored elements, [sparse dims, n]."""
        return self.coordinates

    def is_coalesced(self) -> bool:
        """Whether the indices are known to be sorted and without repetition."""
        return self.coalesced

    def from_coo(self, indices: Any, values: Any, shape: tuple[int, ...], coalesced: bool = True) -> SparseCooTensor:
        """A Tensor of this format with other elements."""
        return SparseCooTensor(indices, values, tuple(shape), coalesced)

    def converted(self, index_dtype: Any, value_dtype: Any) -> SparseCooTensor:
        """Indices and values in other dtypes, where one is given."""
        (indices,), values = shaping.converted(self.where, self.elements, index_dtype, value_dtype)
        return replace(self, coordinates=indices, elements=values)

    def to_sparse_coo(self, sparse_dim: int | None = None) -> SparseCooTensor:
        """Itself. Raises ShapeError if another number of sparse dims is asked for."""
        if sparse_dim not in (None, self.sparse_dim()):
            raise ShapeError(
                f"to_sparse_coo: sparse_dim={sparse_dim} of a Tensor with {self.sparse_dim()}; go through to_dense()"
            )
        return self

    def to_sparse_csr(self) -> SparseCsrTensor:
        """In compressed rows: of 2 or 3 dims, all sparse. Elements stored twice are added up, outside of a capture."""
        if self.dense_dim() or len(self.dims) not in (2, 3):
            raise ShapeError(
                f"to_sparse_csr: shape {list(self.shape)} with {self.dense_dim()} dense dims; needs 2 or 3 dims, all "
                "sparse"
            )
        x = self if self.coalesced or state.capturing() else shaping.coalesce(self)
        crows, cols, order = sparse_compress(x.coordinates, x.dims)
        return SparseCsrTensor(crows, cols, x.elements if x.coalesced else gather(x.elements, order, 0), x.dims)

    def __repr__(self) -> str:
        return self._shown(indices=self.coordinates, values=self.elements)


@dataclass(eq=False, repr=False)
class SparseCsrTensor(SparseTensor):
    """A matrix, or a batch of them, by rows: cols [n] and values [n] of the elements, row after row.

    Row i of matrix b has the elements crows[b, i] to crows[b, i + 1] of that matrix; crows is [batch * (rows + 1)].
    Made by sparse.sparse_csr_tensor and Tensor.to_sparse_csr.
    """

    row_ends: Any
    columns: Any
    elements: Any
    dims: tuple[int, ...]

    @property
    def where(self) -> list[Any]:
        """[crows, cols]."""
        return [self.row_ends, self.columns]

    def crows(self) -> Any:
        """The bounds of each row's elements, [batch * (rows + 1)]."""
        return self.row_ends

    def cols(self) -> Any:
        """Column of each stored element, [n]."""
        return self.columns

    def from_coo(self, indices: Any, values: Any, shape: tuple[int, ...], coalesced: bool = True) -> SparseCsrTensor:
        """A Tensor of this format with other elements."""
        return SparseCooTensor(indices, values, tuple(shape), coalesced).to_sparse_csr()

    def converted(self, index_dtype: Any, value_dtype: Any) -> SparseCsrTensor:
        """Indices and values in other dtypes, where one is given."""
        (crows, cols), values = shaping.converted(self.where, self.elements, index_dtype, value_dtype)
        return replace(self, row_ends=crows, columns=cols, elements=values)

    def to_sparse_coo(self, sparse_dim: int | None = None) -> SparseCooTensor:
        """In coordinates. Raises ShapeError unless every dim is to be sparse."""
        if sparse_dim not in (None, len(self.dims)):
            raise ShapeError(
                f"to_sparse_coo: sparse_dim={sparse_dim} of a CSR Tensor of shape {list(self.shape)}; go through "
                "to_dense()"
            )
        return SparseCooTensor(sparse_coordinates(self.where, self.dims), self.elements, self.dims, False)

    def to_sparse_csr(self) -> SparseCsrTensor:
        """Itself."""
        return self

    def __repr__(self) -> str:
        return self._shown(crows=self.row_ends, cols=self.columns, values=self.elements)


def coo_of_dense(x: Any, sparse_dim: int) -> SparseCooTensor:
    """The elements of a dense Tensor that are not 0, as slices of its first sparse_dim dims.

    Reads x on the host. Raises ShapeError unless 1 <= sparse_dim <= number of dims.
    """
    shape = tuple(x.shape)
    if not 1 <= sparse_dim <= len(shape):
        raise ShapeError(f"to_sparse_coo: sparse_dim={sparse_dim} of shape {list(shape)}; give 1 to {len(shape)}")
    value = state.host(x, "to_sparse_coo() of a dense Tensor, whose elements decide what is stored,")
    outer = math.prod(shape[:sparse_dim])
    found = np.flatnonzero((value.reshape(outer, math.prod(shape[sparse_dim:])) != 0).any(axis=1))
    values = gather(reshape(x, [outer, *shape[sparse_dim:]]), found, 0)
    indices = np.stack(np.unravel_index(found, shape[:sparse_dim])).astype(np.int64)
    return SparseCooTensor(constant(indices), values, shape, True)


def csr_of_dense(x: Any) -> SparseCsrTensor:
    """The elements of a dense matrix, or batch of matrices, that are not 0, by rows. Reads x on the host."""
    if len(x.shape) not in (2, 3):
        raise ShapeError(f"to_sparse_csr: shape {list(x.shape)}; needs 2 or 3 dims")
    return coo_of_dense(x, len(x.shape)).to_sparse_csr()
