"""Windows against SciPy; mel scales, filters, the cosine transform and decibels against loops and scipy.fft."""

import math

import numpy as np
import pytest
import scipy  # which loads its parts when they are used

from polyreme.audio import functional as F
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.jit import to_static

NAMED = ["bartlett", "blackman", "bohman", "cosine", "hamming", "hann", "nuttall", "taylor", "triang", "tukey"]
WITH_PARAMETERS = [
    ("exponential", None, 1.5),
    ("gaussian", 2.0),
    ("general_cosine", [0.5, 0.3, 0.2]),
    ("general_gaussian", 1.5, 2.0),
    ("general_hamming", 0.6),
    ("kaiser", 8.0),
    ("taylor", 3, 25, False),
    ("tukey", 0.0),
    ("tukey", 0.3),
    ("tukey", 1.0),
]


@pytest.mark.parametrize("window", NAMED + WITH_PARAMETERS, ids=str)
def test_windows_are_those_of_scipy(window):
    for n in (1, 2, 7, 8):
        for periodic in (True, False):
            got = F.get_window(window, n, periodic).numpy()
            assert got.dtype == np.float64
            # cosines of a few terms, each correct to an ulp
            np.testing.assert_allclose(got, scipy.signal.get_window(window, n, periodic), atol=1e-14)


def test_a_window_centered_elsewhere_is_periodic():
    want = scipy.signal.get_window(("exponential", 2.0, 0.5), 7)
    np.testing.assert_allclose(F.get_window(("exponential", 2.0, 0.5), 7).numpy(), want, atol=1e-14)
    assert F.get_window("hann", 4, dtype="float32").dtype == "float32"


def test_windows_that_are_none():
    with pytest.raises(ConfigError, match="window='hannn'; choose one of bartlett"):
        F.get_window("hannn", 4)
    with pytest.raises(ConfigError, match=r"window='kaiser': .*'beta'; give"):
        F.get_window("kaiser", 4)
    with pytest.raises(ConfigError, match="fftbins=False"):
        F.get_window(("exponential", 2.0), 4, False)
    with pytest.raises(ShapeError, match="win_length=-1"):
        F.get_window("hann", -1)


# made with PaddlePaddle 3.3.1: hz_to_mel and mel_to_hz of 0, 440, 3000 and 8000
MEL = {False: [0.0, 6.60000038, 30.97940254, 45.24564362], True: [0.0, 549.63873291, 1876.45397949, 2840.02319336]}


@pytest.mark.parametrize("htk", [False, True])
def test_mel_and_hertz(htk):
    hertz = [0.0, 440.0, 3000.0, 8000.0]
    mel = F.hz_to_mel(to_tensor(hertz), htk)
    np.testing.assert_allclose(mel.numpy(), MEL[htk], rtol=1e-6)
    np.testing.assert_allclose([F.hz_to_mel(f, htk) for f in hertz], MEL[htk], rtol=1e-6)
    # float32 logarithms back and forth: mel of 45 or 2840 rounds to 2^-23 of itself, times the slope log(6.4) / 27
    np.testing.assert_allclose(F.mel_to_hz(mel, htk).numpy(), hertz, rtol=1e-5)
    assert F.mel_to_hz(F.hz_to_mel(523.25, htk), htk) == pytest.approx(523.25)


def test_gradient_of_mel_is_finite_at_zero_hertz():
    hertz = to_tensor([0.0, 500.0, 2000.0], "float64", stop_gradient=False)
    F.hz_to_mel(hertz).sum().backward()
    np.testing.assert_allclose(hertz.grad.numpy(), [0.015, 0.015, 27 / math.log(6.4) / 2000])


def test_frequencies():
    np.testing.assert_allclose(F.fft_frequencies(23, 5).numpy(), [0, 4.6, 9.2], rtol=1e-6)
    found = F.mel_frequencies(5, 20.0, 8000.0, htk=True, dtype="float64").numpy()
    # made with PaddlePaddle 3.3.1
    np.testing.assert_allclose(found, [20, 642.39147506, 1802.79843375, 3966.29900174, 8000], rtol=1e-9)


@pytest.mark.parametrize("norm", ["slaney", None, 2.0])
def test_filters_are_triangles_between_mel_frequencies(norm):
    filters = F.compute_fbank_matrix(16000, 32, 4, 100.0, 7000.0, norm=norm, dtype="float64").numpy()
    edges = F.mel_frequencies(6, 100.0, 7000.0, dtype="float64").numpy()
    for row, (left, peak, right) in zip(filters, zip(edges, edges[1:], edges[2:], strict=False), strict=True):
        want = np.interp(np.arange(17) * 500.0, [left, peak, right], [0, 1, 0])
        scale = {"slaney": 2 / (right - left), None: 1, 2.0: 1 / np.sqrt(np.sum(want**2))}[norm]
        np.testing.assert_allclose(row, want * scale, atol=1e-12)


def test_a_filter_between_two_bins_is_zero_and_not_nan():
    assert np.isfinite(F.compute_fbank_matrix(16000, 16, 40, norm=2.0).numpy()).all()


def test_filters_that_cannot_be():
    with pytest.raises(ConfigError, match="f_min=5000, f_max=4000"):
        F.compute_fbank_matrix(16000, 512, f_min=5000, f_max=4000)
    with pytest.raises(ConfigError, match="norm='slany'"):
        F.compute_fbank_matrix(16000, 512, norm="slany")


def test_cosine_transform_is_that_of_scipy():
    x = np.random.default_rng(0).standard_normal(6)
    for norm in ("ortho", None):
        want = scipy.fft.dct(x, norm=norm)[:4]
        np.testing.assert_allclose(x @ F.create_dct(4, 6, norm, "float64").numpy(), want, atol=1e-13)
    with pytest.raises(ConfigError, match="norm='slaney'"):
        F.create_dct(4, 6, "slaney")


def test_decibels_have_a_floor_and_a_range():
    power = to_tensor([0.0, 1e-5, 1.0, 100.0], stop_gradient=False)
    np.testing.assert_allclose(F.power_to_db(power, top_db=None).numpy(), [-100, -50, 0, 20], atol=1e-4)
    shown = to_static(F.power_to_db)(power, 10.0)
    np.testing.assert_allclose(shown.numpy(), [-70, -60, -10, 10], atol=1e-4)
    F.power_to_db(power, top_db=None).sum().backward()
    np.testing.assert_allclose(power.grad.numpy()[1:], 10 / np.log(10) / np.array([1e-5, 1, 100]), rtol=1e-5)
    for wrong in ({"amin": 0.0}, {"ref_value": 0.0}, {"top_db": -1.0}):
        with pytest.raises(ConfigError, match="power_to_db: amin="):
            F.power_to_db(power, **wrong)
