"""Discrete Fourier transforms: complex, of real signals, and of signals with real spectra; in 1, 2 and n dims.

All are one of three bodies, complex to complex, real to half a spectrum, half a spectrum to real. "Forward"
has exp(-2 pi i k n / N) in it. norm says where the factor 1 / N goes: "backward" on the inverse, "forward" on the
forward one, "ortho" its square root on both. n and s are sizes that dims are cut or filled with zeros to; they default
to those of x, and for a real result of half a spectrum of m frequencies to 2 (m - 1). Half precision is computed in
float32.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.annotations import Axes, DTypeLike
from polyreme.core.op import op
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.bounds import dims_of, ints
from polyreme.ops.creation import as_float, creator

_OTHER = {"backward": "forward", "forward": "backward", "ortho": "ortho"}


def _sizes(x: Array, s: Any, axes: Any, half: bool, what: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(size of each dim that is transformed, those dims). half: the last is given as half a spectrum."""
    if axes is None:
        count = x.ndim if s is None else len(s)
        if s is not None and count > x.ndim:
            raise ShapeError(f"{what}: s={list(s)} has {count} sizes, x {list(x.shape)} only {x.ndim} dims")
        dims = tuple(range(x.ndim - count, x.ndim))
    else:
        dims = dims_of(axes, x.ndim, what)
    if s is None:
        sizes = [x.shape[d] for d in dims]
        if half and dims:
            sizes[-1] = 2 * (sizes[-1] - 1)
    else:
        sizes = list(s)
    if len(sizes) != len(dims):
        raise ShapeError(f"{what}: s={sizes} and axes={list(dims)} differ in length; give one size a dim")
    for size, dim in zip(sizes, dims, strict=True):
        if not isinstance(size, int) or size < 1:
            raise ShapeError(f"{what}: size {size!r} for dim {dim} of x {list(x.shape)}; it must be an int above 0")
    return tuple(sizes), dims


def _prepare(x: Array, norm: str, what: str) -> Array:
    if norm not in _OTHER:
        raise ConfigError(f"{what}: norm={norm!r}; choose 'backward', 'ortho' or 'forward'")
    x = dtypes.floating(x)
    return x if x.dtype in (dtypes.float64, dtypes.complex64, dtypes.complex128) else x.astype(dtypes.float32)


def _complex_to_complex(x: Array, s: Any, axes: Any, norm: str, forward: bool, what: str) -> Array:
    x = _prepare(x, norm, what)
    x = x if dtypes.is_complex(x.dtype) else jnp.asarray(x, jnp.result_type(x, dtypes.complex64))
    sizes, dims = _sizes(x, s, axes, False, what)
    return (jnp.fft.fftn if forward else jnp.fft.ifftn)(x, sizes, dims, norm) if dims else x


def _real_to_half(x: Array, s: Any, axes: Any, norm: str, forward: bool, what: str) -> Array:
    if dtypes.is_complex(x.dtype):
        raise DTypeError(f"{what}: x is {x.dtype.name}, needs a real dtype; fft, ifft and theirs take complex ones")
    x = _prepare(x, norm, what)
    sizes, dims = _sizes(x, s, _some(axes, what), False, what)
    return jnp.fft.rfftn(x, sizes, dims, norm) if forward else jnp.conj(jnp.fft.rfftn(x, sizes, dims, _OTHER[norm]))


def _half_to_real(x: Array, s: Any, axes: Any, norm: str, forward: bool, what: str) -> Array:
    x = _prepare(x, norm, what)
    sizes, dims = _sizes(x, s, _some(axes, what), True, what)
    return jnp.fft.irfftn(jnp.conj(x), sizes, dims, _OTHER[norm]) if forward else jnp.fft.irfftn(x, sizes, dims, norm)


def _some(axes: Any, what: str) -> Any:
    if axes == ():
        raise ShapeError(f"{what}: axes=(); name at least one dim")
    return axes


def _as_tuple(n: Any) -> Any:
    return None if n is None else (n,)


def _two(s: Any, axes: Any, what: str) -> Any:
    if axes is not None and (len(ints(axes)) != 2 or (s is not None and len(ints(s)) != 2)):
        raise ShapeError(f"{what}: s={s} and axes={axes}; give two of each, or use the form for n dims")
    return axes


@op(amp="fp32", method=False)
def fft(x: Array, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """Forward transform over one dim, complex: X[k] = sum over j of x[j] exp(-2 pi i j k / n).

    >>> fft(paddle.to_tensor([1.0, 0.0, 0.0, 0.0])).tolist()
    [(1+0j), (1+0j), (1+0j), (1+0j)]
    """
    return _complex_to_complex(x, _as_tuple(n), axis, norm, True, "fft")


@op(amp="fp32", method=False)
def ifft(x: Array, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """Inverse of fft over one dim."""
    return _complex_to_complex(x, _as_tuple(n), axis, norm, False, "ifft")


@op(amp="fp32", method=False)
def rfft(x: Array, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """The first n // 2 + 1 values of fft of a real x; the others are their conjugates in reverse order."""
    return _real_to_half(x, _as_tuple(n), axis, norm, True, "rfft")


@op(amp="fp32", method=False)
def irfft(x: Array, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """Inverse of rfft over one dim: n real values; give n where it is odd."""
    return _half_to_real(x, _as_tuple(n), axis, norm, False, "irfft")


@op(amp="fp32", method=False)
def hfft(x: Array, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """The n real values of fft of a Hermitian signal, of which x is the first half: x[-j] = conj(x[j])."""
    return _half_to_real(x, _as_tuple(n), axis, norm, True, "hfft")


@op(amp="fp32", method=False)
def ihfft(x: Array, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """Inverse of hfft over one dim: the first n // 2 + 1 values of ifft of a real x."""
    return _real_to_half(x, _as_tuple(n), axis, norm, False, "ihfft")


@op(amp="fp32", method=False)
def fftn(x: Array, s: Axes | None = None, axes: Axes | None = None, norm: str = "backward") -> Array:
    """fft over several dims: axes, else the last len(s), else all."""
    return _complex_to_complex(x, s, axes, norm, True, "fftn")


@op(amp="fp32", method=False)
def ifftn(x: Array, s: Axes | None = None, axes: Axes | None = None, norm: str = "backward") -> Array:
    """Inverse of fftn."""
    return _complex_to_complex(x, s, axes, norm, False, "ifftn")


@op(amp="fp32", method=False)
def rfftn(x: Array, s: Axes | None = None, axes: Axes | None = None, norm: str = "backward") -> Array:
    """fftn of a real x; of the last dim named only the first half is given, as in rfft."""
    return _real_to_half(x, s, axes, norm, True, "rfftn")


@op(amp="fp32", method=False)
def irfftn(x: Array, s: Axes | None = None, axes: Axes | None = None, norm: str = "backward") -> Array:
    """Inverse of rfftn, real; give s where the last size is odd."""
    return _half_to_real(x, s, axes, norm, False, "irfftn")


@op(amp="fp32", method=False)
def hfftn(x: Array, s: Axes | None = None, axes: Axes | None = None, norm: str = "backward") -> Array:
    """fftn, real, of a signal that is Hermitian in the last dim named, of which x is the first half."""
    return _half_to_real(x, s, axes, norm, True, "hfftn")


@op(amp="fp32", method=False)
def ihfftn(x: Array, s: Axes | None = None, axes: Axes | None = None, norm: str = "backward") -> Array:
    """Inverse of hfftn: half of ifftn of a real x."""
    return _real_to_half(x, s, axes, norm, False, "ihfftn")


@op(amp="fp32", method=False)
def fft2(x: Array, s: Axes | None = None, axes: Axes = (-2, -1), norm: str = "backward") -> Array:
    """fft over two dims; over the last len(s), else all, with axes=None. The other forms for two dims are like it."""
    return _complex_to_complex(x, s, _two(s, axes, "fft2"), norm, True, "fft2")


@op(amp="fp32", method=False)
def ifft2(x: Array, s: Axes | None = None, axes: Axes = (-2, -1), norm: str = "backward") -> Array:
    """Inverse of fft2."""
    return _complex_to_complex(x, s, _two(s, axes, "ifft2"), norm, False, "ifft2")


@op(amp="fp32", method=False)
def rfft2(x: Array, s: Axes | None = None, axes: Axes = (-2, -1), norm: str = "backward") -> Array:
    """fft2 of a real x; of the last dim only the first half is given, as in rfft."""
    return _real_to_half(x, s, _two(s, axes, "rfft2"), norm, True, "rfft2")


@op(amp="fp32", method=False)
def irfft2(x: Array, s: Axes | None = None, axes: Axes = (-2, -1), norm: str = "backward") -> Array:
    """Inverse of rfft2, real; give s where the last size is odd."""
    return _half_to_real(x, s, _two(s, axes, "irfft2"), norm, False, "irfft2")


@op(amp="fp32", method=False)
def hfft2(x: Array, s: Axes | None = None, axes: Axes = (-2, -1), norm: str = "backward") -> Array:
    """fft2, real, of a signal that is Hermitian in the last dim, of which x is the first half."""
    return _half_to_real(x, s, _two(s, axes, "hfft2"), norm, True, "hfft2")


@op(amp="fp32", method=False)
def ihfft2(x: Array, s: Axes | None = None, axes: Axes = (-2, -1), norm: str = "backward") -> Array:
    """Inverse of hfft2: half of ifft2 of a real x."""
    return _real_to_half(x, s, _two(s, axes, "ihfft2"), norm, False, "ihfft2")


@creator
def fftfreq(n: int, d: float = 1.0, dtype: DTypeLike | None = None) -> Array:
    """The n frequencies of fft, in its order, of samples d apart: cycles per unit of d, [0, 1, ..., -2, -1] / (d n).

    >>> fftfreq(4, 0.5).tolist()
    [0.0, 0.5, -1.0, -0.5]
    """
    _space(n, d, "fftfreq")
    return jnp.fft.fftfreq(n, d, dtype=as_float(dtype))


@creator
def rfftfreq(n: int, d: float = 1.0, dtype: DTypeLike | None = None) -> Array:
    """The n // 2 + 1 frequencies of rfft of n samples d apart: cycles per unit of d."""
    _space(n, d, "rfftfreq")
    return jnp.fft.rfftfreq(n, d, dtype=as_float(dtype))


def _space(n: int, d: float, what: str) -> None:
    if not isinstance(n, int) or n < 1 or d == 0:
        raise ShapeError(f"{what}: n={n!r}, d={d!r}; n is an int above 0 and d is not 0")


@op(method=False)
def fftshift(x: Array, axes: Axes | None = None) -> Array:
    """x rolled so that frequency 0 stands in the middle of each of axes (all by default), at size // 2."""
    dims = tuple(range(x.ndim)) if axes is None else dims_of(axes, x.ndim, "fftshift")
    return jnp.fft.fftshift(x, dims)


@op(method=False)
def ifftshift(x: Array, axes: Axes | None = None) -> Array:
    """Undoes fftshift, for odd sizes too."""
    dims = tuple(range(x.ndim)) if axes is None else dims_of(axes, x.ndim, "ifftshift")
    return jnp.fft.ifftshift(x, dims)
