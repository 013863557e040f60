"""Contract rows of ops/signal.py; the oracle is a loop over frames, from the definition."""

import numpy as np

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, NumericsError, ShapeError


def frames_of(x, n, hop=None, win=None, window=None, center=True, pad_mode="reflect", normalized=False, onesided=None):
    hop, win = hop or n // 4, win or n
    full = np.zeros(n, "float64" if window is None else window.dtype)
    full[(n - win) // 2 : (n - win) // 2 + win] = 1 if window is None else window
    if center:
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(n // 2, n // 2)], mode=pad_mode)
    frames = [x[..., at : at + n] * full for at in range(0, x.shape[-1] - n + 1, hop)]
    if onesided is None:
        onesided = not np.iscomplexobj(frames[0])
    spectra = [(np.fft.rfft if onesided else np.fft.fft)(f) / (np.sqrt(n) if normalized else 1) for f in frames]
    return np.stack(spectra, -1)


def signal_of(
    x, n, hop=None, win=None, window=None, center=True, normalized=False, onesided=True, length=None, whole=False
):
    hop, win = hop or n // 4, win or n
    full = np.zeros(n, "float64" if window is None else window.dtype)
    full[(n - win) // 2 : (n - win) // 2 + win] = 1 if window is None else window
    scale = np.sqrt(n) if normalized else 1
    size = (x.shape[-1] - 1) * hop + n
    total, weight = np.zeros((*x.shape[:-2], size), complex), np.zeros(size)
    for t in range(x.shape[-1]):
        frame = (np.fft.ifft(x[..., t]) if whole else np.fft.irfft(x[..., : n // 2 + 1, t], n)) * scale
        total[..., t * hop : t * hop + n] += frame * full.conj()
        weight[t * hop : t * hop + n] += abs(full) ** 2
    start = n // 2 if center else 0
    stop = size - start if length is None else min(start + length, size)
    out = total[..., start:stop] / weight[start:stop]
    out = np.pad(out, [(0, 0)] * (x.ndim - 2) + [(0, 0 if length is None else length - out.shape[-1])])
    return out if whole else out.real


def some(*shape, kind="f", args=(), window=0):
    """Random x; a window of that many positive values stands in the place of the first None."""

    def make(rng):
        x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if kind == "c" else 0)
        filled = list(args)
        if window:
            filled[filled.index(None)] = rng.uniform(0.5, 1.5, window).astype("float32")
        return (x.astype("complex64" if kind == "c" else "float32"), *filled)

    return make


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


HALF = ones(5, 6, dtype="complex64")
T = 32  # terms: 8 samples a frame, a transform and up to 4 overlaps

CASES = [
    Case("stft", some(2, 20, args=(8,)), frames_of, terms=T, bad=((ones(7), 8), ShapeError, "n_fft=8 samples")),
    Case("stft", some(21, args=(8, 3, 5, None, True, "constant", True, False), window=5), frames_of, terms=T, tag="window", bad=((ones(9), 8, None, None, None, True, "edge"), ConfigError, "pad_mode='edge'")),
    Case("stft", some(17, kind="c", args=(6, 2, 6, None, False), window=6), frames_of, terms=T, tag="complex", bad=((ones(9, dtype="complex64"), 8, None, None, None, True, "reflect", False, True), DTypeError, "onesided=True of x complex64")),
    Case("stft", some(10, args=(5,)), frames_of, terms=T, tag="odd", bad=((ones(9), 8, 0), ShapeError, "hop_length=0")),
    Case("stft", some(10, args=(5, 2)), frames_of, terms=T, tag="hop", bad=((ones(9), 8, None, 7, ones(8)), ShapeError, r"window has shape \[8\], win_length needs \[7\]")),
    Case("istft", some(5, 6, kind="c", args=(8,)), signal_of, terms=T, bad=((HALF, 8, 5, 4), NumericsError, "at sample 2, which is lost")),
    Case("istft", some(2, 4, 5, kind="c", args=(6, 2, 6, None, True, True, True, 20), window=6), signal_of, terms=T, tag="length", bad=((HALF, 8, None, None, ones(8) * 0), NumericsError, "sum to 0")),
    Case("istft", lambda rng: (*some(4, 5, kind="c")(rng), 4, 1, 4, np.exp(1j * rng.uniform(0, 6, 4)).astype("complex64"), True, False, False, None, True), signal_of, terms=T, tag="complex", bad=((ones(8, 6, dtype="complex64"), 8, None, None, HALF[0, 0] * ones(8), True, False, False), DTypeError, "window is complex64")),
    Case("istft", some(5, 6, kind="c", args=(8, 3, None, None, True, False, True, 9)), signal_of, terms=T, tag="cut", bad=((HALF, 8, None, None, None, True, False, True, None, True), ConfigError, "return_complex=True with onesided=True")),
    Case("istft", some(8, 6, kind="c", args=(8, None, None, None, True, False, False)), signal_of, terms=T, tag="whole", bad=((HALF.real.copy(), 8), DTypeError, "x is float32")),
    Case("istft", some(5, 2, kind="c", args=(8, 2)), signal_of, terms=T, tag="two", bad=((HALF, 10), ShapeError, r"needs \[..., 6, frames\]")),
]  # fmt: skip
