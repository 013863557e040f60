"""Sparse Tensors: coordinates and values as Tensors of their own, and what is computed with them.

Floor: 3.
"""

from polyreme.eager.sparse.formats import SparseCooTensor, SparseCsrTensor, SparseTensor

__all__ = ["SparseCooTensor", "SparseCsrTensor", "SparseTensor"]
