"""Feature Layers against PaddlePaddle's numbers, captured, differentiated, and as state."""

import numpy as np
import pytest

from polyreme.audio import features
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.jit import to_static

WAVE = np.sin(np.arange(600) ** 1.5 / 40).astype("float32")
# (settings, shape, first four of frame 3, sum) made with PaddlePaddle 3.3.1: Layer(**settings)(WAVE as a batch)[0]
KNOWN = {
    "Spectrogram": (
        {"n_fft": 64, "hop_length": 32},
        [1, 33, 19],
        [0.19207075238227844, 0.3639880418777466, 1.7139877080917358, 11.096446990966797],
        651.6085455145376,
    ),
    "MelSpectrogram": (
        {"sr": 8000, "n_fft": 64, "hop_length": 32, "n_mels": 5},
        [1, 5, 19],
        [0.8080045580863953, 0.13880135118961334, 1.4284923963714391e-05, 1.6731792129576206e-07],
        16.19785099443235,
    ),
    "LogMelSpectrogram": (
        {"sr": 8000, "n_fft": 64, "n_mels": 5, "top_db": 30.0},
        [1, 5, 38],
        [-1.4739841222763062, -19.80202865600586, -30.85223388671875, -30.85223388671875],
        -3721.4951170682907,
    ),
    "MFCC": (
        {"sr": 8000, "n_fft": 64, "n_mels": 6, "n_mfcc": 4},
        [1, 4, 38],
        [-112.97526550292969, 71.02140808105469, 11.797382354736328, 4.425912857055664],
        -2742.2765417099,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_features_are_those_of_paddle_captured_too(name):
    settings, shape, column, total = KNOWN[name]
    layer = getattr(features, name)(**settings)
    got = to_static(layer)(to_tensor(WAVE[None]))
    assert got.shape == shape
    # transforms of 64 float32 samples up to 32, of which small ones keep an absolute error; decibels of those more
    np.testing.assert_allclose(got.numpy()[0, :4, 3], column, rtol=1e-4, atol=1e-5)
    assert float(got.numpy().astype("float64").sum()) == pytest.approx(total, rel=1e-5)


def test_one_waveform_needs_no_batch():
    layer = features.MFCC(sr=8000, n_fft=64, n_mels=6, n_mfcc=4)
    batch = layer(to_tensor(WAVE[None])).numpy()
    np.testing.assert_allclose(layer(to_tensor(WAVE)).numpy(), batch[0], rtol=1e-5, atol=1e-4)
    assert set(layer.state_dict()) == {
        "dct_matrix",
        "_log_melspectrogram._melspectrogram.fbank_matrix",
        "_log_melspectrogram._melspectrogram._spectrogram.fft_window",
    }


def test_gradient_equals_finite_differences():
    layer = features.MFCC(sr=8000, n_fft=32, n_mels=4, n_mfcc=3, dtype="float64")
    wave = WAVE[:64].astype("float64")
    x = to_tensor(wave, stop_gradient=False)
    layer(x).sum().backward()
    direction = np.random.default_rng(0).standard_normal(64)
    step = 1e-6
    ends = [float(layer(to_tensor(wave + sign * step * direction)).sum()) for sign in (1, -1)]
    # central differences: step^2 times the third derivative of decibels, here up to 1e4
    assert float((x.grad.numpy() * direction).sum()) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


def test_silence_has_a_finite_gradient():
    x = to_tensor(np.zeros(64, "float32"), stop_gradient=False)
    features.LogMelSpectrogram(sr=8000, n_fft=32, n_mels=4)(x).sum().backward()
    assert np.isfinite(x.grad.numpy()).all()


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="power=0"):
        features.Spectrogram(power=0)
    with pytest.raises(ConfigError, match="n_mfcc=80 coefficients of n_mels=64"):
        features.MFCC(n_mfcc=80)
