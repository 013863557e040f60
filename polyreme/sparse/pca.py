"""Principal components of a sparse matrix."""

from __future__ import annotations

from typing import Any

from polyreme.eager.sparse.elementwise import need_sparse
from polyreme.eager.sparse.products import matmul
from polyreme.eager.sparse.shaping import transpose
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.creation import ones
from polyreme.ops.matrices import linalg
from polyreme.ops.random import randn


def pca_lowrank(
    x: Any, q: int | None = None, center: bool = True, niter: int = 2, name: str | None = None
) -> tuple[Any, Any, Any]:
    """The q first principal components of a sparse [n, m]: U [n, q], S [q], V [m, q], dense, x ~ U diag(S) V^T.

    q: 6 by default, or n or m if smaller; a little more than what is wanted is more exact. center: of x less the mean
    of each column, which is never formed. niter: subspace iterations. Random; source: arXiv:0909.4061, algorithms 4.4
    and 5.1.
    """
    need_sparse("sparse.pca_lowrank", "x", x)
    if len(x.shape) != 2 or x.dense_dim():
        raise ShapeError(f"sparse.pca_lowrank: x {list(x.shape)}; needs a sparse matrix [n, m]")
    n, m = x.shape
    q = min(6, n, m) if q is None else q
    if not 0 < q <= min(n, m) or niter < 0:
        raise ConfigError(
            f"sparse.pca_lowrank: q={q}, niter={niter} of {list(x.shape)}; needs 1 <= q <= {min(n, m)}, niter >= 0"
        )
    flipped = transpose(x, [1, 0])
    means = (matmul(flipped, ones([n, 1], x.dtype)) / n).transpose([1, 0])

    def times(y: Any) -> Any:
        found = matmul(x, y)
        return found - means @ y if center else found

    def times_flipped(y: Any) -> Any:
        found = matmul(flipped, y)
        return found - means.transpose([1, 0]) @ y.sum(0, keepdim=True) if center else found

    basis = _orthonormal(times(randn([m, q], dtype=x.dtype)))
    for _ in range(niter):
        basis = _orthonormal(times(_orthonormal(times_flipped(basis))))
    u, s, vt = linalg.svd(times_flipped(basis).transpose([1, 0]))
    return basis @ u, s, vt.transpose([1, 0])


def _orthonormal(y: Any) -> Any:
    return linalg.qr(y)[0]
