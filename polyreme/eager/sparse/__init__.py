"""Sparse Tensors: coordinates and values as Tensors of their own, and what is computed with them."""

from polyreme.eager.sparse.formats import SparseCooTensor, SparseCsrTensor, SparseTensor

__all__ = ["SparseCooTensor", "SparseCsrTensor", "SparseTensor"]
