"""The window functions, as float64 ndarrays of n samples, symmetric.

Definitions: F. J. Harris, "On the use of windows for harmonic analysis with the discrete Fourier transform", Proc.
IEEE 66(1), 1978; for Taylor's, W. Carrara et al., "Spotlight Synthetic Aperture Radar", 1995, appendix D.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from polyreme.errors import ConfigError, ShapeError


def _from_middle(n: int) -> np.ndarray:
    """Distance of each sample from the middle, in samples, with its sign."""
    return np.arange(n) - (n - 1) / 2


def general_cosine(n: int, a: Any) -> np.ndarray:
    """Sum of a[k] cos(k t) for t from -pi to pi."""
    t = np.linspace(-np.pi, np.pi, n)
    return np.sum([weight * np.cos(k * t) for k, weight in enumerate(a)], 0)


def general_hamming(n: int, alpha: float) -> np.ndarray:
    """alpha + (1 - alpha) cos(t): Hann's with 0.5, Hamming's with 0.54."""
    return general_cosine(n, (alpha, 1 - alpha))


def triang(n: int) -> np.ndarray:
    """A triangle whose ends are above 0."""
    return 1 - np.abs(_from_middle(n)) / ((n + n % 2) / 2)


def bartlett(n: int) -> np.ndarray:
    """A triangle that is 0 at both ends."""
    return 1 - np.abs(_from_middle(n)) / ((n - 1) / 2)


def bohman(n: int) -> np.ndarray:
    """The convolution of two half cosines."""
    t = np.abs(np.linspace(-1, 1, n))
    window = (1 - t) * np.cos(np.pi * t) + np.sin(np.pi * t) / np.pi
    window[[0, -1]] = 0
    return window


def cosine(n: int) -> np.ndarray:
    """Half a period of a sine, taken in the middle of each sample."""
    return np.sin(np.pi / n * (np.arange(n) + 0.5))


def tukey(n: int, alpha: float = 0.5) -> np.ndarray:
    """Ones with a cosine slope over the share alpha of the window: 0 gives a rectangle, 1 Hann's window."""
    if alpha <= 0:
        return np.ones(n)
    slope = min(alpha, 1) * (n - 1) / 2
    risen = np.minimum(((n - 1) / 2 - np.abs(_from_middle(n))) / slope, 1)
    return 0.5 * (1 - np.cos(np.pi * risen))


def kaiser(n: int, beta: float) -> np.ndarray:
    """I0(beta sqrt(1 - t^2)) / I0(beta) for t from -1 to 1, I0 the modified Bessel function."""
    return np.kaiser(n, beta)


def gaussian(n: int, std: float) -> np.ndarray:
    """exp(-t^2 / (2 std^2)), std in samples."""
    return general_gaussian(n, 1, std)


def general_gaussian(n: int, p: float, sig: float) -> np.ndarray:
    """exp(-|t / sig|^(2 p) / 2), sig in samples."""
    return np.exp(-0.5 * np.abs(_from_middle(n) / sig) ** (2 * p))


def exponential(n: int, center: float | None = None, tau: float = 1.0) -> np.ndarray:
    """exp(-|t - center| / tau), in samples; center is the middle by default."""
    return np.exp(-np.abs(np.arange(n) - ((n - 1) / 2 if center is None else center)) / tau)


def taylor(n: int, nbar: int = 4, sll: float = 30, norm: bool = True) -> np.ndarray:
    """Taylor's: nbar nearly equal side lobes sll decibels below the main one; norm makes the middle 1."""
    b = 10 ** (sll / 20)
    a = np.arccosh(b) / np.pi
    s2 = nbar**2 / (a**2 + (nbar - 0.5) ** 2)
    order = np.arange(1, nbar)
    weights = []
    for m in order:
        above = np.prod(1 - m**2 / s2 / (a**2 + (order - 0.5) ** 2))
        below = 2 * np.prod([1 - m**2 / k**2 for k in order if k != m])
        weights.append((-1) ** (m + 1) * above / below)

    def at(t: Any) -> Any:
        return 1 + 2 * np.sum([w * np.cos(2 * np.pi * m * t / n) for m, w in zip(order, weights, strict=True)], 0)

    return at(_from_middle(n)) / (at(0.0) if norm else 1)


_HAMMING, _HANN = 0.54, 0.5
WINDOWS: dict[str, Callable[..., np.ndarray]] = {
    "bartlett": bartlett,
    "blackman": lambda n: general_cosine(n, (0.42, 0.5, 0.08)),
    "bohman": bohman,
    "cosine": cosine,
    "exponential": exponential,
    "gaussian": gaussian,
    "general_cosine": general_cosine,
    "general_gaussian": general_gaussian,
    "general_hamming": general_hamming,
    "hamming": lambda n: general_hamming(n, _HAMMING),
    "hann": lambda n: general_hamming(n, _HANN),
    "kaiser": kaiser,
    "nuttall": lambda n: general_cosine(n, (0.3635819, 0.4891775, 0.1365995, 0.0106411)),
    "taylor": taylor,
    "triang": triang,
    "tukey": tukey,
}


def window_of(window: Any, n: int, periodic: bool) -> np.ndarray:
    """A window by name, or by a tuple of its name and its parameters.

    periodic leaves out the last of n + 1 samples, so that windows n samples apart fit together. Raises ConfigError for
    an unknown name or parameters that do not fit it.
    """
    name, arguments = (
        (window, ()) if isinstance(window, str) else (window[0], tuple(window[1:])) if window else (None, ())
    )
    if name not in WINDOWS:
        raise ConfigError(
            f"get_window: window={window!r}; choose one of {', '.join(WINDOWS)}, or a tuple with parameters"
        )
    if not isinstance(n, int) or n < 0:
        raise ShapeError(f"get_window: win_length={n!r}; give the number of samples")
    if name == "exponential" and not periodic and arguments and arguments[0] is not None:
        raise ConfigError(f"get_window: window={window!r} with fftbins=False, which is symmetric; give None for center")
    try:
        samples = WINDOWS[name](max(n, 2) + periodic, *arguments)[:n]
    except TypeError as error:
        raise ConfigError(f"get_window: window={window!r}: {error}; give (name, parameters...)") from error
    return np.ones(n) if n < 2 else samples
