"""Linear algebra: factorizations, inverses, solving, eigenvalues, and what follows from singular values.

Matrices are the last two dims, leading dims are a batch. Where only one triangle of a Hermitian matrix is
read, its gradient is shared evenly by both. A matrix that cannot be factored or inverted raises NumericsError; inside a
captured function, where there is no value to look at, it gives NaN or inf.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import expm

from polyreme.core import dims, state
from polyreme.core import dtype as dtypes
from polyreme.core.dtype import floating, promote
from polyreme.core.op import op
from polyreme.errors import ConfigError, DTypeError, NumericsError, ShapeError
from polyreme.ops.creation import republish


def _check(
    remedy: str, when: Callable[..., bool] = lambda *args, **kwargs: True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare an op whose public function raises NumericsError, naming the remedy, if its result is not finite.

    when: of the same arguments, whether to look.
    """

    def declare(fn: Callable[..., Any]) -> Callable[..., Any]:
        declared = op(fn, amp="fp32")

        def public(*args: Any, **kwargs: Any) -> Any:
            result = declared(*args, **kwargs)
            if not state.capturing() and isinstance(result, state.TensorState) and when(*args, **kwargs):
                array = result._array
                if not isinstance(array, state.Tracer) and not bool(jnp.isfinite(array).all()):
                    raise NumericsError(f"{fn.__name__}: the result has NaN or infinite elements; {remedy}")
            return result

        return republish(declared, public)

    return declare


def square(x: Array, what: str) -> Array:
    """x as floating square matrices; ShapeError for another shape."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"{what} takes square matrices [*b, n, n], got shape {list(x.shape)}")
    return floating(x)


def matrices(x: Array, what: str) -> Array:
    """x as floating matrices; ShapeError for fewer than two dims."""
    if x.ndim < 2:
        raise ShapeError(f"{what} takes matrices [*b, m, n], got shape {list(x.shape)}")
    return floating(x)


def turned(x: Array) -> Array:
    """The conjugate transpose."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _hermitian(x: Array, upper: bool) -> Array:
    """The Hermitian matrix that one triangle of x holds, with a gradient shared by both triangles."""
    held = jnp.triu(x) + turned(jnp.triu(x, 1)) if upper else jnp.tril(x) + turned(jnp.tril(x, -1))
    even = (x + turned(x)) / 2
    return even + lax.stop_gradient(held - even)


def _upper(UPLO: str, what: str) -> bool:
    if UPLO not in ("L", "U"):
        raise ShapeError(f"{what}: UPLO={UPLO!r}; choose 'L' (read the lower triangle) or 'U'")
    return UPLO == "U"


@_check("x is not positive definite, or has such elements itself")
def cholesky(x: Array, upper: bool = False) -> Array:
    """The lower triangular L with L L^H = x, or the upper U with U^H U = x; x is positive definite [*b, n, n].

    Only the triangle that corresponds to the result is read.
    """
    held = _hermitian(square(x, "cholesky"), upper)
    return jnp.linalg.cholesky(held, upper=upper, symmetrize_input=False)


@op(amp="fp32")
def cholesky_solve(x: Array, y: Array, upper: bool = False) -> Array:
    """The solution z of A z = x, where y is A's Cholesky factor: x [*b, n, k], y [*b, n, n] -> [*b, n, k]."""
    x, y = promote(matrices(x, "cholesky_solve"), square(y, "cholesky_solve"))
    dims.check("cholesky_solve", {"x": "*_a n k", "y": "*_b n _"}, {"x": x.shape, "y": y.shape})
    half = triangular(y, x, lower=not upper, turn=upper)
    return triangular(y, half, lower=not upper, turn=not upper)


def triangular(a: Array, b: Array, lower: bool, turn: bool, unit: bool = False, conjugate: bool = True) -> Array:
    """Solution z of a z = b, a triangular, or of a's transpose if turn, conjugated if conjugate; batches broadcast."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(v, (*batch, *v.shape[-2:])) for v in (a, b))
    return lax.linalg.triangular_solve(
        a, b, left_side=True, lower=lower, transpose_a=turn, conjugate_a=turn and conjugate, unit_diagonal=unit
    )


@_check("x has a zero on its diagonal, or such elements itself: it is no Cholesky factor of a regular matrix")
def cholesky_inverse(x: Array, upper: bool = False) -> Array:
    """The inverse of A from its Cholesky factor x: [n, n] -> [n, n]."""
    x = square(x, "cholesky_inverse")
    half = triangular(x, jnp.eye(x.shape[-1], dtype=x.dtype), lower=not upper, turn=upper)
    return triangular(x, half, lower=not upper, turn=not upper)


@_check("x is singular, or has such elements itself; pinv takes singular matrices")
def inverse(x: Array) -> Array:
    """The inverse of square matrices [*b, n, n]."""
    return jnp.linalg.inv(square(x, "inverse"))


@op(amp="fp32", method=False)
def det(x: Array) -> Array:
    """Determinant: [*b, n, n] -> [*b]."""
    return jnp.linalg.det(square(x, "det"))


@op(amp="fp32")
def slogdet(x: Array) -> Array:
    """Sign and natural logarithm of the determinant's magnitude, stacked: [*b, n, n] -> [2, *b].

    A determinant of 0 gives 0 and -inf.
    """
    sign, log = jnp.linalg.slogdet(square(x, "slogdet"))
    return jnp.stack([sign, log.astype(sign.dtype)])


@_check("x is singular, or an input has such elements; lstsq and pinv take singular matrices")
def solve(x: Array, y: Array, left: bool = True) -> Array:
    """The solution z of x z = y, or of z x = y with left=False.

    x [*b, n, n], y [*b, n, k], or [*b, n] for one column.
    """
    x, y = promote(square(x, "solve"), floating(y))
    column = y.ndim == 1 or y.shape == x.shape[:-1]
    if not left:
        x = jnp.swapaxes(x, -1, -2)
        y = y if column else jnp.swapaxes(y, -1, -2)
    y = y[..., None] if column else y
    dims.check("solve", {"x": "*_a n _", "y": "*_b n k"}, {"x": x.shape, "y": y.shape})
    z = jnp.linalg.solve(x, y)
    return z[..., 0] if column else z if left else jnp.swapaxes(z, -1, -2)


@op(amp="fp32", method=False)
def triangular_solve(
    x: Array, y: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Array:
    """The solution z of x z = y, x triangular: x [*b, n, n], y [*b, n, k] -> [*b, n, k].

    Only that triangle of x is read; transpose solves with x transposed; unitriangular takes its diagonal as ones.
    """
    x, y = promote(square(x, "triangular_solve"), matrices(y, "triangular_solve"))
    dims.check("triangular_solve", {"x": "*_a n _", "y": "*_b n k"}, {"x": x.shape, "y": y.shape})
    return triangular(x, y, lower=not upper, turn=transpose, unit=unitriangular, conjugate=False)


@op(amp="fp32")
def qr(x: Array, mode: str = "reduced") -> Any:
    """(Q, R): x = Q R, Q with orthonormal columns, R upper triangular; x is [*b, m, n].

    mode: "reduced" (Q [m, min(m, n)]), "complete" (Q [m, m]; no gradient unless m <= n), or "r" (R alone).
    """
    if mode not in ("reduced", "complete", "r"):
        raise ShapeError(f"qr: mode={mode!r}; choose 'reduced', 'complete' or 'r'")
    x = matrices(x, "qr")
    return jnp.linalg.qr(x, mode="r") if mode == "r" else tuple(jnp.linalg.qr(x, mode=mode))


@op(amp="fp32", method=False)
def svd(x: Array, full_matrices: bool = False) -> tuple[Array, Array, Array]:
    """(U, S, V^H): x = U diag(S) V^H, S descending; x is [*b, m, n], S [*b, min(m, n)].

    full_matrices makes U and V square; what they have beyond the others then is any basis of what is left, and gets no
    gradient. Gradients are infinite where singular values are equal.
    """
    x = matrices(x, "svd")
    if not full_matrices or x.shape[-1] == x.shape[-2]:
        return tuple(jnp.linalg.svd(x, full_matrices=False))
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    left, _, right = jnp.linalg.svd(lax.stop_gradient(x), full_matrices=True)
    count = s.shape[-1]
    # the two may differ by a sign, or phase, of each vector
    phase = jnp.sum(lax.stop_gradient(u).conj() * left[..., :count], -2, keepdims=True)
    left = left.at[..., :count].add(phase * (u - lax.stop_gradient(u)))
    return left, s, right.at[..., :count, :].add(phase.conj().mT * (vh - lax.stop_gradient(vh)))


@op(amp="fp32", method=False)
def svdvals(x: Array) -> Array:
    """Singular values, descending: [*b, m, n] -> [*b, min(m, n)]."""
    return jnp.linalg.svd(matrices(x, "svdvals"), compute_uv=False)


@op(amp="fp32", method=False)
def eigh(x: Array, UPLO: str = "L") -> tuple[Array, Array]:
    """(eigenvalues ascending, eigenvectors as columns) of a Hermitian x [*b, n, n], of which one triangle is read.

    Gradients through the vectors are infinite where eigenvalues are equal.
    """
    held = _hermitian(square(x, "eigh"), _upper(UPLO, "eigh"))
    return tuple(jnp.linalg.eigh(held, symmetrize_input=False))


@op(amp="fp32")
def eigvalsh(x: Array, UPLO: str = "L") -> Array:
    """Eigenvalues, ascending, of a Hermitian x, of which one triangle is read: [*b, n, n] -> [*b, n], real."""
    held = _hermitian(square(x, "eigvalsh"), _upper(UPLO, "eigvalsh"))
    return jnp.linalg.eigh(held, symmetrize_input=False)[0]


@op(amp="fp32")
def pinv(x: Array, rcond: Array | float = 1e-15, hermitian: bool = False) -> Array:
    """Moore-Penrose inverse [*b, m, n] -> [*b, n, m]; singular values up to rcond times the largest count as 0.

    hermitian: x equals its conjugate transpose, which makes it cheaper.
    """
    x = square(x, "pinv with hermitian=True") if hermitian else matrices(x, "pinv")
    rcond = jnp.astype(rcond, jnp.real(x).dtype)
    return _pinv(x, rcond.reshape(()) if rcond.size == 1 else rcond, bool(hermitian))


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _pinv(x: Array, rcond: Array, hermitian: bool) -> Array:
    """jnp.linalg.pinv, whose own derivative holds on to rcond, and so cannot be taken later than it was traced."""
    return jnp.linalg.pinv(x, rtol=rcond, hermitian=hermitian)


@_pinv.defjvp
def _pinv_jvp(hermitian: bool, primals: tuple, tangents: tuple) -> tuple:
    # doi:10.1137/0710036, equation 4.12, where the rank stays
    (x, rcond), dx = primals, tangents[0]
    p = _pinv(x, rcond, hermitian)
    left, right = p @ turned(p) @ turned(dx), turned(dx) @ turned(p) @ p
    return p, left - (left @ x) @ p + right - p @ (x @ right) - p @ dx @ p


@op(amp="fp32")
def lstsq(x: Array, y: Array, rcond: float | None = None, driver: str | None = None) -> tuple[Array, ...]:
    """(solution, residuals, rank, singular values) of the least squares problem min |x z - y|^2, by singular values.

    x [*b, m, n], y [*b, m, k] -> [*b, n, k], [*b, k], [*b] int32, [*b, min(m, n)]. Of several solutions the shortest.
    Singular values up to rcond (machine epsilon times max(m, n) by default) times the largest count as 0. residuals are
    the sums of squares left over, and empty unless m > n. driver names a LAPACK routine; all give this result.
    """
    if driver not in (None, "gels", "gelsy", "gelsd", "gelss"):
        raise ShapeError(f"lstsq: driver={driver!r}; choose 'gels', 'gelsy', 'gelsd', 'gelss' or None")
    x, y = promote(matrices(x, "lstsq"), matrices(y, "lstsq"))
    dims.check("lstsq", {"x": "*_a m n", "y": "*_b m k"}, {"x": x.shape, "y": y.shape})
    m, n = x.shape[-2:]
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    share = float(jnp.finfo(x.dtype).eps) * max(m, n) if rcond is None else rcond
    nonzero = s > share * s[..., :1]
    inverse = jnp.where(nonzero, 1 / jnp.where(nonzero, s, 1), 0).astype(x.dtype)
    solution = turned(vh) @ (inverse[..., None] * (turned(u) @ y))
    left = jnp.real(y - x @ solution)
    residuals = jnp.sum(left**2, -2) if m > n else jnp.zeros((0,), left.dtype)
    return solution, residuals, jnp.sum(nonzero, -1).astype(dtypes.int32), s


@_check(
    "x is singular, or has such elements itself; pinv takes singular matrices",
    when=lambda x, n, name=None, out=None: n < 0,
)
def matrix_power(x: Array, n: int) -> Array:
    """x multiplied by itself n times, by squaring; negative n inverts, 0 gives the identity."""
    return jnp.linalg.matrix_power(square(x, "matrix_power"), n)


@op(amp="fp32", method=False)
def matrix_exp(x: Array) -> Array:
    """I + x + x^2 / 2 + x^3 / 6 + ..., by scaling and squaring: [*b, n, n] -> [*b, n, n]."""
    return expm(square(x, "matrix_exp"))


@op(amp="fp32", method=False)
def matrix_rank(
    x: Array,
    tol: Array | None = None,
    hermitian: bool = False,
    atol: Array | None = None,
    rtol: Array | None = None,
) -> Array:
    """Number of singular values (of |eigenvalues|, if hermitian) above a threshold: [*b, m, n] -> [*b], int64.

    Of a hermitian x the lower triangle is read.

    The threshold is tol, or max(atol, rtol * largest); by default rtol is machine epsilon times max(m, n), or 0 if atol
    is given. tol together with atol or rtol raises ShapeError.
    """
    if tol is not None and (atol is not None or rtol is not None):
        raise ShapeError("matrix_rank: tol with atol or rtol; give tol alone, or atol and rtol")
    x = square(x, "matrix_rank with hermitian=True") if hermitian else matrices(x, "matrix_rank")
    if hermitian:
        sizes = jnp.abs(jnp.linalg.eigh(_hermitian(x, False), symmetrize_input=False)[0])
    else:
        sizes = jnp.linalg.svd(x, compute_uv=False)
    if tol is not None:
        threshold = tol
    else:
        share = jnp.finfo(x.dtype).eps * max(x.shape[-2:]) if rtol is None and atol is None else rtol
        least = 0 if atol is None else atol
        threshold = jnp.maximum(least, 0 if share is None else share * jnp.max(sizes, -1, initial=0))
    return jnp.sum(sizes > jnp.asarray(threshold, sizes.dtype)[..., None], -1)


@op(amp="fp32")
def cond(x: Array, p: Any = None) -> Array:
    """Condition number |x| |x^-1| in the matrix norm p: [*b, m, n] -> [*b].

    p: None or 2 (largest over smallest singular value), -2 (the inverse of that), "fro", "nuc", 1, -1, inf or -inf;
    only 2 and -2 take matrices that are not square.
    """
    if p not in (None, 2, -2, "fro", "nuc", 1, -1, float("inf"), -float("inf")):
        raise ShapeError(f"cond: p={p!r}; choose None, 'fro', 'nuc', 1, -1, 2, -2, inf or -inf")
    return jnp.linalg.cond(matrices(x, "cond") if p in (None, 2, -2) else square(x, f"cond with p={p!r}"), p)


@op(amp="fp32")
def eig(x: Array) -> tuple[Array, Array]:
    """(eigenvalues, eigenvectors as columns) of any square matrix, complex; on the host's processor only.

    Vectors have length 1 and a phase that nothing fixes: the gradient is that of a loss which does not depend on it.
    """
    values, vectors = lax.linalg.eig(square(x, "eig"), compute_left_eigenvectors=False, enable_eigvec_derivs=True)
    return values, vectors


@op(amp="fp32")
def eigvals(x: Array) -> Array:
    """Eigenvalues of any square matrix, complex: [*b, n, n] -> [*b, n]; on the host's processor only."""
    return _eigvals(square(x, "eigvals"))


@jax.custom_jvp
def _eigvals(x: Array) -> Array:
    """jnp.linalg.eigvals, whose own derivative has none; vectors are computed for derivatives alone."""
    return jnp.linalg.eigvals(x)


@_eigvals.defjvp
def _eigvals_jvp(primals: tuple, tangents: tuple) -> tuple:
    (x,), (dx,) = primals, tangents
    values, v = lax.linalg.eig(x, compute_left_eigenvectors=False, enable_eigvec_derivs=True)
    change = jnp.linalg.solve(v, dx.astype(v.dtype) @ v)
    return values, jnp.diagonal(change, axis1=-2, axis2=-1)


_ACTIVATIONS = {"identity": lambda x: x, "relu": jax.nn.relu, "gelu": lambda x: jax.nn.gelu(x, approximate=False)}


@op(method=False)
def fp8_fp8_half_gemm_fused(
    x: Array,
    y: Array,
    transpose_x: bool = False,
    transpose_y: bool = False,
    bias: Array | None = None,
    scale: float = 1.0,
    output_dtype: str = "float16",
    act: str = "identity",
) -> Array:
    """act(scale x y + bias) of two float8 matrices, summed in float32, as float16 or bfloat16.

    x [*b, m, k], y [*b, k, n], or with the last two dims swapped under transpose_x, transpose_y; bias [n]. act:
    "identity", "relu" or "gelu". scale undoes the scales that the operands were brought into float8's range with.
    """
    for name, given in (("x", x), ("y", y)):
        if given.dtype not in (dtypes.float8_e4m3fn, dtypes.float8_e5m2):
            raise DTypeError(f"fp8_fp8_half_gemm_fused: {name} is {given.dtype.name}, needs float8_e4m3fn; use astype")
    out = dtypes.as_dtype(output_dtype)
    if out not in (dtypes.float16, dtypes.bfloat16) or act not in _ACTIVATIONS:
        raise ConfigError(
            f"fp8_fp8_half_gemm_fused: output_dtype={output_dtype!r}, act={act!r}; 'float16' or 'bfloat16', and one "
            f"of {', '.join(_ACTIVATIONS)}"
        )
    x, y = (jnp.swapaxes(v, -1, -2) if turn else v for v, turn in ((x, transpose_x), (y, transpose_y)))
    dims.check("fp8_fp8_half_gemm_fused", {"x": "*_a m k", "y": "*_b k n"}, {"x": x.shape, "y": y.shape})
    product = jnp.matmul(x, y, preferred_element_type=dtypes.float32) * scale
    return _ACTIVATIONS[act](product if bias is None else product + bias).astype(out)


ALIASES = {"inv": "inverse"}
"""Other public names of the same functions."""
