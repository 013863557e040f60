"""Contract rows of ops/fft.py; the oracles are numpy.fft and scipy.fft."""

import numpy as np
import scipy.fft as sf

from polyreme.conformance.case import Case
from polyreme.errors import ConfigError, DTypeError, ShapeError


def reals(*shape, args=()):
    return lambda rng: (rng.standard_normal(shape).astype("float32"), *args)


def complexes(*shape, args=()):
    return lambda rng: ((rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype("complex64"), *args)


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


RATE = (ones(3), None, -1, "unitary")
T = 32  # terms: at most 5 x 4 values and the twiddles' rounding

CASES = [
    Case("fft", complexes(2, 5), np.fft.fft, terms=T, bad=((ones(4), 0), ShapeError, "fft: size 0 for dim 0")),
    Case("fft", reals(3, 4, args=(5, 0, "ortho")), np.fft.fft, terms=T, tag="real", bad=((ones(4), None, 3), ShapeError, "axis=3")),
    Case("fft", lambda rng: (np.arange(4),), lambda x: np.fft.fft(x).astype("complex64"), no_grad="integers", tag="int", bad=(RATE, ConfigError, "norm='unitary'")),
    Case("fft", complexes(0, 4), np.fft.fft, no_grad="no elements", tag="empty", bad=((np.float32(1),), ShapeError, "0 dims")),
    Case("ifft", complexes(2, 5, args=(3, 1, "forward")), np.fft.ifft, terms=T, bad=(RATE, ConfigError, "ifft: norm='unitary'")),
    Case("rfft", reals(2, 5), np.fft.rfft, terms=T, bad=((ones(3, dtype="complex64"),), DTypeError, "rfft: x is complex64, needs a real dtype")),
    Case("irfft", complexes(2, 4, args=(5, 0, "ortho")), np.fft.irfft, terms=T, bad=((ones(1, dtype="complex64"),), ShapeError, "size 0 for dim 0")),
    Case("irfft", reals(3), np.fft.irfft, terms=T, tag="real", bad=(RATE, ConfigError, "norm")),
    Case("hfft", complexes(2, 4), np.fft.hfft, terms=T, bad=((ones(1, dtype="complex64"),), ShapeError, "size 0 for dim 0")),
    Case("hfft", complexes(4, args=(7, -1, "forward")), np.fft.hfft, terms=T, tag="odd"),
    Case("ihfft", reals(2, 5, args=(4, -1, "ortho")), np.fft.ihfft, terms=T, bad=((ones(3, dtype="complex64"),), DTypeError, "ihfft: x is complex64")),
    Case("fftn", complexes(2, 3, 4, args=((3, 3),)), lambda x, s: sf.fftn(x, s), terms=T, bad=((ones(3), (2, 2)), ShapeError, r"s=\[2, 2\] has 2 sizes, x \[3\] only 1")),
    Case("fftn", reals(2, 2, 2, 3, args=(None, None, "ortho")), sf.fftn, terms=T, tag="four", bad=((ones(3, 2), (2, 2), (0,)), ShapeError, "differ in length")),
    Case("ifftn", complexes(3, 4, args=(None, (1, 0))), sf.ifftn, terms=T, bad=((ones(3, 2), None, (0, 0)), ShapeError, "twice")),
    Case("rfftn", reals(2, 3, 4, args=(None, (2, 0))), sf.rfftn, terms=T, bad=((ones(3, 2), None, ()), ShapeError, r"axes=\(\)")),
    Case("irfftn", complexes(3, 3, args=((2, 5), None, "ortho")), sf.irfftn, terms=T, bad=((ones(3, 2), None, (2,)), ShapeError, "axis=2")),
    Case("hfftn", complexes(3, 3, args=((3, 5), None, "ortho")), sf.hfftn, terms=T, bad=((ones(3, 1),), ShapeError, "size 0 for dim 1")),
    Case("ihfftn", reals(3, 4, args=(None, None, "forward")), sf.ihfftn, terms=T, bad=((ones(3, dtype="complex64"),), DTypeError, "ihfftn")),
    Case("fft2", complexes(2, 3, 4), sf.fft2, terms=T, bad=((ones(3, 3), None, (0,)), ShapeError, "give two of each")),
    Case("ifft2", complexes(3, 4, args=((2, 5), (1, 0))), sf.ifft2, terms=T, bad=((ones(3, 3), (3,)), ShapeError, "give two of each")),
    Case("rfft2", reals(2, 3, 4), sf.rfft2, terms=T, bad=((ones(3, 3, dtype="complex64"),), DTypeError, "rfft2")),
    Case("fft2", reals(2, 3, 4, args=(None, None)), lambda x, *_: sf.fftn(x), terms=T, tag="all"),
    Case("rfft2", reals(2, 3, 4, args=((2, 2), None)), lambda x, s, _: sf.rfftn(x, s), terms=T, tag="last"),
    Case("irfft2", complexes(3, 3), sf.irfft2, terms=T, bad=((ones(3, 3), (3,)), ShapeError, "give two of each")),
    Case("hfft2", complexes(3, 3), sf.hfft2, terms=T, bad=((ones(3, 3), (3,)), ShapeError, "give two of each")),
    Case("ihfft2", reals(3, 4), sf.ihfft2, terms=T, bad=((ones(3, 3, dtype="complex64"),), DTypeError, "ihfft2")),
    Case("fftfreq", lambda rng: (5, 0.5), lambda n, d: np.fft.fftfreq(n, d).astype("float32"), no_grad="no input", bad=((0,), ShapeError, "n=0, d=1.0")),
    Case("rfftfreq", lambda rng: (5, 0.5, "float64"), lambda n, d, _: np.fft.rfftfreq(n, d), no_grad="no input", bad=((4, 0.0), ShapeError, "n=4, d=0.0")),
    Case("fftshift", complexes(3, 4), np.fft.fftshift, bad=((ones(3, 2), (0, 5)), ShapeError, "axis=5")),
    Case("ifftshift", reals(3, 4, args=((0,),)), np.fft.ifftshift, bad=((ones(3, 2), 2), ShapeError, "axis=2")),
]  # fmt: skip
