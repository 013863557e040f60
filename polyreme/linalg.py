"""polyreme.linalg: linear algebra under its public path."""

import polyreme.eager.tensor  # noqa: F401  (what ops run on, whichever name is used first)
from polyreme.module_names import suggest_names
from polyreme.ops.arithmetic import matmul
from polyreme.ops.creation import diagonal
from polyreme.ops.matrices.factors import (
    householder_product,
    lu,
    lu_solve,
    lu_unpack,
    ormqr,
    pca_lowrank,
    svd_lowrank,
)
from polyreme.ops.matrices.linalg import (
    cholesky,
    cholesky_inverse,
    cholesky_solve,
    cond,
    det,
    eig,
    eigh,
    eigvals,
    eigvalsh,
    fp8_fp8_half_gemm_fused,
    inverse,
    lstsq,
    matrix_exp,
    matrix_power,
    matrix_rank,
    pinv,
    qr,
    slogdet,
    solve,
    svd,
    svdvals,
    triangular_solve,
)
from polyreme.ops.matrices.norms import matrix_norm, norm, vector_norm
from polyreme.ops.matrices.products import cross, matrix_transpose, multi_dot, vecdot
from polyreme.ops.statistics import corrcoef, cov

inv = inverse

__all__ = [
    "cholesky",
    "cholesky_inverse",
    "cholesky_solve",
    "cond",
    "corrcoef",
    "cov",
    "cross",
    "det",
    "diagonal",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "fp8_fp8_half_gemm_fused",
    "householder_product",
    "inv",
    "inverse",
    "lstsq",
    "lu",
    "lu_solve",
    "lu_unpack",
    "matmul",
    "matrix_exp",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "multi_dot",
    "norm",
    "ormqr",
    "pca_lowrank",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svd_lowrank",
    "svdvals",
    "triangular_solve",
    "vecdot",
    "vector_norm",
]

suggest_names(__name__)
