"""Windows, mel scales, filter banks, the cosine transform and decibels.

Matrices that depend on settings alone are computed on the host in float64, then cast. The mel scale is
Slaney's (Auditory Toolbox, 1998: linear below 1000 Hz, logarithmic above), or with htk that of the HTK book:
2595 log10(1 + f / 700).
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from polyreme.audio.windows import window_of
from polyreme.core import dtype as dtypes
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.ops.indices.gather import where
from polyreme.ops.math import exp, log, log10, maximum
from polyreme.ops.reduce import max as maximum_of

# Slaney's: 200 / 3 Hz a mel up to 1000 Hz, which is 15 mel; from there 27 mel for a factor of 6.4
_LINEAR, _KNEE, _LOG_STEP = 200 / 3, 1000.0, math.log(6.4) / 27
_KNEE_MEL = _KNEE / _LINEAR
_ON_TENSORS = SimpleNamespace(exp=exp, log=log, log10=log10, maximum=maximum, where=where)


def get_window(window: str | tuple[Any, ...], win_length: int, fftbins: bool = True, dtype: str = "float64") -> Tensor:
    """A window of win_length samples by name, or (name, parameters...); fftbins makes it periodic, else symmetric.

    Names: bartlett, blackman, bohman, cosine, exponential (center or None, tau), gaussian (std), general_cosine
    (weights), general_gaussian (p, sig), general_hamming (alpha), hamming, hann, kaiser (beta), nuttall, taylor (nbar,
    sll, norm), triang, tukey (alpha). Raises ConfigError for others.

    >>> get_window("hann", 4).tolist()
    [0.0, 0.5, 1.0, 0.5]
    """
    return to_tensor(window_of(window, win_length, fftbins).astype(dtypes.as_dtype(dtype)))


def hz_to_mel(freq: Any, htk: bool = False) -> Any:
    """Hertz as mel: a number for a number, a Tensor for a Tensor.

    >>> round(hz_to_mel(440.0), 6)
    6.6
    """
    return _mel(freq, htk, _ON_TENSORS) if isinstance(freq, Tensor) else float(_mel(np.float64(freq), htk, np))


def _mel(freq: Any, htk: bool, lib: Any) -> Any:
    if htk:
        return 2595.0 * lib.log10(1.0 + freq / 700.0)
    # the logarithm is taken of what is above the knee alone, so that its gradient at 0 Hz is finite
    above = _KNEE_MEL + lib.log(lib.maximum(freq, freq * 0 + _KNEE) / _KNEE) / _LOG_STEP
    return lib.where(freq >= _KNEE, above, freq / _LINEAR)


def mel_to_hz(mel: Any, htk: bool = False) -> Any:
    """Mel as hertz: the inverse of hz_to_mel."""
    return _hertz(mel, htk, _ON_TENSORS) if isinstance(mel, Tensor) else float(_hertz(np.float64(mel), htk, np))


def _hertz(mel: Any, htk: bool, lib: Any) -> Any:
    if htk:
        return 700.0 * (lib.exp(mel * (math.log(10) / 2595.0)) - 1.0)
    return lib.where(mel >= _KNEE_MEL, _KNEE * lib.exp(_LOG_STEP * (mel - _KNEE_MEL)), mel * _LINEAR)


def _mel_frequencies(n_mels: int, f_min: float, f_max: float, htk: bool) -> np.ndarray:
    ends = _mel(np.array([f_min, f_max], float), htk, np)
    return _hertz(np.linspace(ends[0], ends[1], n_mels), htk, np)


def mel_frequencies(
    n_mels: int = 64, f_min: float = 0.0, f_max: float = 11025.0, htk: bool = False, dtype: str = "float32"
) -> Tensor:
    """n_mels frequencies from f_min to f_max, hertz, evenly spaced in mel."""
    return to_tensor(_mel_frequencies(n_mels, f_min, f_max, htk).astype(dtypes.as_dtype(dtype)))


def fft_frequencies(sr: int, n_fft: int, dtype: str = "float32") -> Tensor:
    """The n_fft // 2 + 1 frequencies of a transform of n_fft samples at sr samples a second: k sr / n_fft, hertz."""
    return to_tensor(np.fft.rfftfreq(n_fft, 1 / sr).astype(dtypes.as_dtype(dtype)))


def compute_fbank_matrix(
    sr: int,
    n_fft: int,
    n_mels: int = 64,
    f_min: float = 0.0,
    f_max: float | None = None,
    htk: bool = False,
    norm: str | float | None = "slaney",
    dtype: str = "float32",
) -> Tensor:
    """Triangular filters evenly spaced in mel: [n_mels, n_fft // 2 + 1]; times a spectrum it gives a mel spectrum.

    sr: samples a second. f_max is sr / 2 by default. norm: "slaney" gives each filter the area 1 (in hertz, as
    continuous triangles), a number p divides it by its p-norm, None leaves the peaks at 1.
    """
    f_max = sr / 2 if f_max is None else f_max
    if not 0 <= f_min < f_max or n_mels < 1:
        raise ConfigError(f"compute_fbank_matrix: f_min={f_min}, f_max={f_max}, n_mels={n_mels}; 0 <= f_min < f_max")
    edges = _mel_frequencies(n_mels + 2, f_min, f_max, htk)
    bins = np.fft.rfftfreq(n_fft, 1 / sr)
    widths = np.diff(edges)[:, None]
    rising = (bins - edges[:-2, None]) / widths[:-1]
    falling = (edges[2:, None] - bins) / widths[1:]
    filters = np.maximum(0, np.minimum(rising, falling))
    if norm == "slaney":
        filters *= 2 / (edges[2:] - edges[:-2])[:, None]
    elif isinstance(norm, (int, float)):
        # 1e-12 keeps a filter between two bins, which has no weight at all, from 0 / 0
        filters /= np.maximum(np.linalg.norm(filters, norm, axis=-1, keepdims=True), 1e-12)
    elif norm is not None:
        raise ConfigError(f"compute_fbank_matrix: norm={norm!r}; choose 'slaney', a number p or None")
    return to_tensor(filters.astype(dtypes.as_dtype(dtype)))


def create_dct(n_mfcc: int, n_mels: int, norm: str | None = "ortho", dtype: str = "float32") -> Tensor:
    """The first n_mfcc columns of the discrete cosine transform, type II: [n_mels, n_mfcc].

    norm: "ortho" makes the columns orthonormal, None leaves the factor 2 of the definition.
    """
    if norm not in ("ortho", None):
        raise ConfigError(f"create_dct: norm={norm!r}; choose 'ortho' or None")
    matrix = 2 * np.cos(np.pi / n_mels * (np.arange(n_mels)[:, None] + 0.5) * np.arange(n_mfcc))
    if norm == "ortho":
        matrix *= np.sqrt(1 / (2 * n_mels))
        matrix[:, 0] *= np.sqrt(0.5)
    return to_tensor(matrix.astype(dtypes.as_dtype(dtype)))


def power_to_db(spect: Tensor, ref_value: float = 1.0, amin: float = 1e-10, top_db: float | None = 80.0) -> Tensor:
    """10 log10(spect / ref_value), decibels, for a power spectrum.

    What is below amin counts as amin; with top_db nothing is more than top_db below the largest.

    >>> power_to_db(to_tensor([1.0, 100.0])).tolist()
    [0.0, 20.0]
    """
    if amin <= 0 or ref_value <= 0 or (top_db is not None and top_db < 0):
        raise ConfigError(
            f"power_to_db: amin={amin}, ref_value={ref_value}, top_db={top_db}; above 0, 0 and at least 0"
        )
    decibels = 10.0 * log10(maximum(spect, amin)) - 10.0 * math.log10(max(ref_value, amin))
    return decibels if top_db is None else maximum(decibels, maximum_of(decibels) - top_db)
