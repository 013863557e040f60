"""Spectrograms, mel spectrograms and cepstra of waveforms, as Layers: differentiable, and captured with a model.

x is [samples] or [batch, samples]; the result has frequencies (or mels, or coefficients) and frames last.
sr is samples a second; hop_length is n_fft // 4 and win_length n_fft if None; frequencies are hertz.
"""

from __future__ import annotations

from typing import Any

from polyreme.audio.functional import compute_fbank_matrix, create_dct, get_window, power_to_db
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer
from polyreme.ops.arithmetic import matmul
from polyreme.ops.signal import stft


class Spectrogram(Layer):
    """|short-time Fourier transform| ** power: [..., n_fft // 2 + 1, frames].

    power: 1.0 gives magnitudes, 2.0 energies. window: as in functional.get_window. center and pad_mode: as in
    signal.stft.
    """

    def __init__(
        self,
        n_fft: int = 512,
        hop_length: int | None = 512,
        win_length: int | None = None,
        window: str | tuple[Any, ...] = "hann",
        power: float = 1.0,
        center: bool = True,
        pad_mode: str = "reflect",
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        if power <= 0:
            raise ConfigError(f"Spectrogram: power={power}; it must be above 0: 1.0 for magnitudes, 2.0 for energies")
        self.power = power
        self._settings = {
            "n_fft": n_fft,
            "hop_length": hop_length,
            "win_length": n_fft if win_length is None else win_length,
            "center": center,
            "pad_mode": pad_mode,
        }
        self.register_buffer("fft_window", get_window(window, self._settings["win_length"], dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Spectrogram of x."""
        spectra = stft(x, window=self.fft_window, **self._settings)
        return spectra.abs() ** self.power


class MelSpectrogram(Layer):
    """A Spectrogram through n_mels triangular filters: [..., n_mels, frames]; see functional.compute_fbank_matrix."""

    def __init__(
        self,
        sr: int = 22050,
        n_fft: int = 2048,
        hop_length: int | None = 512,
        win_length: int | None = None,
        window: str | tuple[Any, ...] = "hann",
        power: float = 2.0,
        center: bool = True,
        pad_mode: str = "reflect",
        n_mels: int = 64,
        f_min: float = 50.0,
        f_max: float | None = None,
        htk: bool = False,
        norm: str | float | None = "slaney",
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self._spectrogram = Spectrogram(n_fft, hop_length, win_length, window, power, center, pad_mode, dtype)
        self.register_buffer("fbank_matrix", compute_fbank_matrix(sr, n_fft, n_mels, f_min, f_max, htk, norm, dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Mel spectrogram of x."""
        return matmul(self.fbank_matrix, self._spectrogram(x))


class LogMelSpectrogram(Layer):
    """A MelSpectrogram in decibels: [..., n_mels, frames]; ref_value, amin and top_db as in functional.power_to_db."""

    def __init__(
        self,
        sr: int = 22050,
        n_fft: int = 512,
        hop_length: int | None = None,
        win_length: int | None = None,
        window: str | tuple[Any, ...] = "hann",
        power: float = 2.0,
        center: bool = True,
        pad_mode: str = "reflect",
        n_mels: int = 64,
        f_min: float = 50.0,
        f_max: float | None = None,
        htk: bool = False,
        norm: str | float | None = "slaney",
        ref_value: float = 1.0,
        amin: float = 1e-10,
        top_db: float | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self._melspectrogram = MelSpectrogram(
            sr, n_fft, hop_length, win_length, window, power, center, pad_mode, n_mels, f_min, f_max, htk, norm, dtype
        )
        self._decibels = {"ref_value": ref_value, "amin": amin, "top_db": top_db}

    def forward(self, x: Tensor) -> Tensor:
        """Mel spectrogram of x in decibels."""
        return power_to_db(self._melspectrogram(x), **self._decibels)


class MFCC(Layer):
    """Mel-frequency cepstral coefficients, the cosine transform of a LogMelSpectrogram: [..., n_mfcc, frames]."""

    def __init__(
        self,
        sr: int = 22050,
        n_mfcc: int = 40,
        n_fft: int = 512,
        hop_length: int | None = None,
        win_length: int | None = None,
        window: str | tuple[Any, ...] = "hann",
        power: float = 2.0,
        center: bool = True,
        pad_mode: str = "reflect",
        n_mels: int = 64,
        f_min: float = 50.0,
        f_max: float | None = None,
        htk: bool = False,
        norm: str | float | None = "slaney",
        ref_value: float = 1.0,
        amin: float = 1e-10,
        top_db: float | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        if not 1 <= n_mfcc <= n_mels:
            raise ConfigError(f"MFCC: n_mfcc={n_mfcc} coefficients of n_mels={n_mels} mels; give from 1 to n_mels")
        settings: tuple[Any, ...] = (
            sr, n_fft, hop_length, win_length, window, power, center, pad_mode, n_mels, f_min, f_max, htk, norm,
            ref_value, amin, top_db, dtype,
        )  # fmt: skip
        self._log_melspectrogram = LogMelSpectrogram(*settings)
        self.register_buffer("dct_matrix", create_dct(n_mfcc, n_mels, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Coefficients of x."""
        return matmul(self.dct_matrix, self._log_melspectrogram(x), transpose_x=True)
