"""polyreme.sparse: Tensors of mostly zeros, by coordinates (COO) or by rows (CSR). See docs/sparse.md."""

from collections.abc import Callable
from typing import Any

from polyreme.eager.sparse import SparseCooTensor, SparseCsrTensor
from polyreme.eager.sparse.elementwise import UNARY, add, cast, divide, multiply, pow, subtract
from polyreme.eager.sparse.products import addmm, masked_matmul, matmul, mv
from polyreme.eager.sparse.shaping import coalesce, is_same_shape, mask_as, reshape, slice, sum, transpose
from polyreme.module_names import suggest_names
from polyreme.sparse import nn
from polyreme.sparse.creation import sparse_coo_tensor, sparse_csr_tensor
from polyreme.sparse.pca import pca_lowrank

abs: Callable[..., Any] = UNARY["abs"]
asin: Callable[..., Any] = UNARY["asin"]
asinh: Callable[..., Any] = UNARY["asinh"]
atan: Callable[..., Any] = UNARY["atan"]
atanh: Callable[..., Any] = UNARY["atanh"]
deg2rad: Callable[..., Any] = UNARY["deg2rad"]
expm1: Callable[..., Any] = UNARY["expm1"]
isnan: Callable[..., Any] = UNARY["isnan"]
log1p: Callable[..., Any] = UNARY["log1p"]
neg: Callable[..., Any] = UNARY["neg"]
rad2deg: Callable[..., Any] = UNARY["rad2deg"]
sin: Callable[..., Any] = UNARY["sin"]
sinh: Callable[..., Any] = UNARY["sinh"]
sqrt: Callable[..., Any] = UNARY["sqrt"]
square: Callable[..., Any] = UNARY["square"]
tan: Callable[..., Any] = UNARY["tan"]
tanh: Callable[..., Any] = UNARY["tanh"]

__all__ = [
    "SparseCooTensor",
    "SparseCsrTensor",
    "abs",
    "add",
    "addmm",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cast",
    "coalesce",
    "deg2rad",
    "divide",
    "expm1",
    "is_same_shape",
    "isnan",
    "log1p",
    "mask_as",
    "masked_matmul",
    "matmul",
    "multiply",
    "mv",
    "neg",
    "nn",
    "pca_lowrank",
    "pow",
    "rad2deg",
    "reshape",
    "sin",
    "sinh",
    "slice",
    "sparse_coo_tensor",
    "sparse_csr_tensor",
    "sqrt",
    "square",
    "subtract",
    "sum",
    "tan",
    "tanh",
    "transpose",
]

suggest_names(__name__)
