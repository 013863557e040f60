"""What the contract rows of Fourier transforms cannot say: identities, precision, round trips, captured errors."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.eager.tensor import to_tensor
from polyreme.jit import to_static

RNG = np.random.default_rng(8)


def test_dtypes_follow_the_input():
    x = RNG.standard_normal(6)
    for given, real, whole in (("float16", "float32", "complex64"), ("bfloat16", "float32", "complex64")):
        assert paddle.fft.fft(to_tensor(x).astype(given)).dtype == whole
        assert paddle.fft.irfft(to_tensor(x).astype(given)).dtype == real
    assert paddle.fft.fft(to_tensor(x)).dtype == "complex128"
    assert paddle.fft.hfft(to_tensor(x)).dtype == "float64"


def test_no_axes_leave_x_as_it_is():
    assert paddle.fft.fftn(to_tensor([1.0, 2.0]), axes=[]).tolist() == [1, 2]


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_pairs_undo_each_other(norm):
    x = to_tensor(RNG.standard_normal((2, 3, 5)))
    for there, back in (("fftn", "ifftn"), ("rfftn", "irfftn"), ("ihfftn", "hfftn")):
        kept = {"s": [2, 3, 5]} if there != "fftn" else {}
        again = getattr(paddle.fft, back)(getattr(paddle.fft, there)(x, norm=norm), norm=norm, **kept)
        # 30 terms there and back
        np.testing.assert_allclose(again.numpy().real, x.numpy(), atol=60 * np.finfo("float64").eps)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("window", [None, "hann"])
@pytest.mark.parametrize("samples", [32, 37])
def test_a_signal_comes_back_from_its_spectra(window, samples):
    x = to_tensor(RNG.standard_normal((2, samples)), stop_gradient=False)
    weights = None if window is None else paddle.audio.functional.get_window(window, 8)
    spectra = x.stft(8, 2, window=weights, normalized=True)
    again = spectra.istft(8, 2, window=weights, normalized=True, length=samples)
    # frames of 8 terms, there and back, 4 of them over each sample
    np.testing.assert_allclose(again.numpy(), x.numpy(), atol=64 * np.finfo("float64").eps)
    (again * again).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 2 * x.numpy(), atol=256 * np.finfo("float64").eps)


def test_what_no_frame_covers_is_nan_in_a_captured_function():
    spectra = paddle.signal.stft(to_tensor(RNG.standard_normal(32)), 8)

    @to_static
    def back(spectra, window):
        return paddle.signal.istft(spectra, 8, window=window)

    assert np.isnan(back(spectra, to_tensor(np.zeros(8))).numpy()).all()
