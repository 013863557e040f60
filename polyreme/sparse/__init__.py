"""polyreme.sparse: Tensors of mostly zeros, by coordinates (COO) or by rows (CSR). See docs/sparse.md."""

from polyreme.eager.sparse import SparseCooTensor, SparseCsrTensor
from polyreme.eager.sparse.elementwise import UNARY, add, cast, divide, multiply, pow, subtract
from polyreme.eager.sparse.products import addmm, masked_matmul, matmul, mv
from polyreme.eager.sparse.shaping import coalesce, is_same_shape, mask_as, reshape, slice, sum, transpose
from polyreme.module_names import suggest_names
from polyreme.sparse import nn
from polyreme.sparse.creation import sparse_coo_tensor, sparse_csr_tensor
from polyreme.sparse.pca import pca_lowrank

abs = UNARY["abs"]
asin = UNARY["asin"]
asinh = UNARY["asinh"]
atan = UNARY["atan"]
atanh = UNARY["atanh"]
deg2rad = UNARY["deg2rad"]
expm1 = UNARY["expm1"]
isnan = UNARY["isnan"]
log1p = UNARY["log1p"]
neg = UNARY["neg"]
rad2deg = UNARY["rad2deg"]
sin = UNARY["sin"]
sinh = UNARY["sinh"]
sqrt = UNARY["sqrt"]
square = UNARY["square"]
tan = UNARY["tan"]
tanh = UNARY["tanh"]

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
