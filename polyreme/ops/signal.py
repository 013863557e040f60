"""Short-time Fourier transform and its inverse.

Frames of n_fft samples start hop_length apart; each is multiplied with the window and transformed. The
inverse is the least squares one of D. Griffin and J. Lim, "Signal estimation from modified short-time Fourier
transform", IEEE ASSP 32(2), 1984, eq. 6: what stft gave comes back exactly.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core import dtype as dtypes
from polyreme.core.op import op
from polyreme.errors import ConfigError, DTypeError, NumericsError, ShapeError
from polyreme.ops.bounds import at_hand, preceded

# a sample whose windows' squares sum to less is lost: float64 has 1e-16 left of it
_LEAST_ENVELOPE = 1e-11


def _lengths(n_fft: int, hop_length: int | None, win_length: int | None, what: str) -> tuple[int, int]:
    """(hop, window length) in samples, with their defaults: a quarter of n_fft, n_fft."""
    hop = max(n_fft // 4, 1) if hop_length is None else hop_length
    win = n_fft if win_length is None else win_length
    if n_fft < 1 or hop < 1 or not 1 <= win <= n_fft:
        raise ShapeError(
            f"{what}: n_fft={n_fft}, hop_length={hop}, win_length={win}; all are above 0 and win_length at most n_fft"
        )
    return hop, win


def _window(window: Array | None, win: int, n_fft: int, dtype: Any, what: str) -> Array:
    """The window with as many zeros on both sides as n_fft needs; ones if None."""
    window = jnp.ones(win, dtype) if window is None else window
    if window.shape != (win,):
        raise ShapeError(f"{what}: window has shape {list(window.shape)}, win_length needs [{win}]")
    left = (n_fft - win) // 2
    return jnp.pad(window, (left, n_fft - win - left))


def _places(frames: int, n_fft: int, hop: int) -> np.ndarray:
    """Sample number of each element of each frame [frames, n_fft]."""
    return np.arange(frames)[:, None] * hop + np.arange(n_fft)


def _with_dtypes(x: Array, window: Array | None) -> tuple[Any, Any]:
    """Both in one precision, float32 at least, each real or complex as it was."""
    wide = [dtypes.float64, dtypes.complex128]
    given = [v for v in (x, window) if v is not None]
    double = any(v.dtype in wide for v in given)
    done = []
    for v in (x, window):
        kind = wide if double else [dtypes.float32, dtypes.complex64]
        done.append(None if v is None else v.astype(kind[dtypes.is_complex(v.dtype)]))
    return done[0], done[1]


@op(amp="fp32")
def stft(
    x: Array,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Array | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
) -> Array:
    """Spectra of overlapping frames: [samples] or [batch, samples] -> [..., frequencies, frames], complex.

    center pads n_fft // 2 samples at both ends ("reflect" or "constant": zeros), so that frame t stands around sample
    t hop_length. normalized divides by sqrt(n_fft). onesided gives n_fft // 2 + 1 frequencies instead of n_fft; it is
    the default unless x or the window is complex, and then not possible. window has win_length values, 1 by default.

    >>> stft(paddle.to_tensor([1.0, 1.0, 1.0, 1.0]), 4, center=False).real().tolist()
    [[4.0], [0.0], [0.0]]
    """
    hop, win = _lengths(n_fft, hop_length, win_length, "stft")
    if x.ndim not in (1, 2) or not n_fft <= x.shape[-1]:
        raise ShapeError(
            f"stft: x {list(x.shape)}; needs [samples] or [batch, samples], at least n_fft={n_fft} samples"
        )
    if pad_mode not in ("reflect", "constant"):
        raise ConfigError(f"stft: pad_mode={pad_mode!r}; choose 'reflect' or 'constant'")
    x, given = _with_dtypes(x, window)
    weights = _window(given, win, n_fft, x.dtype, "stft")
    whole = dtypes.is_complex(x.dtype) or dtypes.is_complex(weights.dtype)
    if onesided and whole:
        raise DTypeError(f"stft: onesided=True of x {x.dtype.name}, window {weights.dtype.name}; only real ones halve")
    if center:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(n_fft // 2, n_fft // 2)], mode=pad_mode)
    frames = 1 + (x.shape[-1] - n_fft) // hop
    framed = x[..., _places(frames, n_fft, hop)] * weights
    norm = "ortho" if normalized else "backward"
    half = not whole if onesided is None else onesided
    spectra = jnp.fft.rfft(framed, norm=norm) if half else jnp.fft.fft(framed, norm=norm)
    return jnp.swapaxes(spectra, -1, -2)


def _not_lost(
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool = True,
    length: int | None = None,
    return_complex: bool = False,
    name: Any = None,
) -> None:
    """Raise NumericsError where a window at hand leaves samples that no frame says anything of."""
    hop, win = _lengths(n_fft, hop_length, win_length, "istft")
    weights = np.ones(win) if window is None else at_hand(window)
    if weights is None or weights.shape != (win,) or len(x.shape) not in (2, 3) or x.shape[-1] < 1:
        return
    squares = np.zeros(n_fft)
    left = (n_fft - win) // 2
    squares[left : left + win] = np.abs(weights) ** 2
    envelope = np.bincount(_places(x.shape[-1], n_fft, hop).ravel(), np.tile(squares, x.shape[-1]))
    kept = envelope[_keep(len(envelope), n_fft, center, length)]
    if kept.size and kept.min() < _LEAST_ENVELOPE:
        raise NumericsError(
            f"istft: the windows' squares sum to {kept.min():g} at sample {kept.argmin()}, which is lost (the nonzero "
            f"overlap-add condition); take a smaller hop_length than {hop}, another window, or center=True"
        )


def _keep(samples: int, n_fft: int, center: bool, length: int | None) -> slice:
    """The range of the overlapped samples that is the result: without the padding, at most length."""
    start = n_fft // 2 if center else 0
    stop = samples - start if length is None else min(start + length, samples)
    return slice(start, max(stop, start))


@preceded(_not_lost)
@op(amp="fp32")
def istft(
    x: Array,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Array | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool = True,
    length: int | None = None,
    return_complex: bool = False,
) -> Array:
    """Inverse of stft with the same settings: [frequencies, frames] or [batch, ...] -> [..., samples].

    length cuts the result or fills it with zeros; without it there are (frames - 1) hop_length samples (and n_fft more
    with center=False). return_complex needs onesided=False and takes all frequencies; without it the first
    n_fft // 2 + 1 say everything of a real signal. Where no frame covers a sample (the nonzero overlap-add condition),
    NumericsError; inside a captured function such samples are NaN.
    """
    hop, win = _lengths(n_fft, hop_length, win_length, "istft")
    _check_spectra(x, n_fft, hop, win, onesided, "istft")
    if length is not None and length < 1:
        raise ShapeError(f"istft: length={length}; give the number of samples, above 0")
    x, given = _with_dtypes(x, window)
    weights = _window(given, win, n_fft, jnp.real(x).dtype, "istft")
    if return_complex and onesided:
        raise ConfigError("istft: return_complex=True with onesided=True, which stands for a real signal; give one")
    if dtypes.is_complex(weights.dtype) and not return_complex:
        raise DTypeError(f"istft: window is {weights.dtype.name}; return_complex=True and onesided=False take such")
    norm = "ortho" if normalized else "backward"
    spectra = jnp.swapaxes(x, -1, -2)
    if return_complex:
        frames = jnp.fft.ifft(spectra, norm=norm) * jnp.conj(weights)
    else:
        frames = jnp.fft.irfft(spectra[..., : n_fft // 2 + 1], n_fft, norm=norm) * weights
    places = _places(x.shape[-1], n_fft, hop)
    zeros = jnp.zeros((x.shape[-1] - 1) * hop + n_fft, frames.dtype)
    added = jnp.broadcast_to(zeros, (*frames.shape[:-2], zeros.size)).at[..., places].add(frames)
    envelope = jnp.real(zeros).at[places].add(jnp.abs(weights) ** 2)
    kept = _keep(zeros.size, n_fft, center, length)
    envelope = envelope[kept]
    signal = added[..., kept] / jnp.where(envelope < _LEAST_ENVELOPE, jnp.nan, envelope)
    missing = 0 if length is None else length - signal.shape[-1]
    return jnp.pad(signal, [(0, 0)] * (signal.ndim - 1) + [(0, missing)])


def _check_spectra(x: Array, n_fft: int, hop: int, win: int, onesided: bool, what: str) -> None:
    rows = n_fft // 2 + 1 if onesided else n_fft
    if x.ndim not in (2, 3) or x.shape[-2] != rows or x.shape[-1] == 0:
        raise ShapeError(f"{what}: x {list(x.shape)}; n_fft={n_fft}, onesided={onesided} needs [..., {rows}, frames]")
    if not dtypes.is_complex(x.dtype):
        raise DTypeError(f"{what}: x is {x.dtype.name}, needs complex64 or complex128")
    if hop > win:
        raise ShapeError(f"{what}: hop_length={hop} is above win_length={win}, which leaves samples out")
