"""CTC and transducer losses beyond their rows: optax, gradients that the loss does not show, captured label checks."""

import jax
import numpy as np
import optax
import pytest

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from tests.nn.table import wave

EPS = float(np.finfo(np.float32).eps)
STEPS, LENGTHS = np.array([7, 5, 2]), np.array([3, 1, 2])
LABELS = np.array([[1, 1, 3], [2, 0, 0], [3, 3, 0]])


def gradient(loss, x, *args, **settings):
    x = to_tensor(x, stop_gradient=False)
    value = loss(x, *args, reduction="none", **settings)
    value.sum().backward()
    return value.numpy(), x.grad.numpy()


@pytest.mark.slow
def test_ctc_is_optax_on_longer_sequences():
    x, steps, lengths = wave((7, 2, 4), 1), STEPS[:2], LENGTHS[:2]
    late = lambda n, size: (np.arange(size) >= n[:, None]).astype("float32")
    theirs = lambda s: optax.ctc_loss(s, late(steps, 7), LABELS[:2], late(lengths, 3)).sum()
    want, slope = jax.value_and_grad(theirs)(x.swapaxes(0, 1))
    got, own = gradient(F.ctc_loss, x, LABELS[:2], steps, lengths)
    # sums of seven steps, each a log of a sum of three
    np.testing.assert_allclose(got.sum(), want, rtol=64 * EPS)
    np.testing.assert_allclose(own, np.asarray(slope).swapaxes(0, 1), atol=64 * EPS)


def test_ctc_gradients_of_infinite_losses_and_norm_by_times():
    x = wave((7, 3, 4), 1)
    value, plain = gradient(F.ctc_loss, x, LABELS, STEPS, LENGTHS)
    assert np.isinf(value).tolist() == [False, False, True]
    assert (plain[:, 2] == 0).all()
    assert (plain[5:, 1] == 0).all()
    same, scaled = gradient(F.ctc_loss, x, LABELS, STEPS, LENGTHS, norm_by_times=True)
    np.testing.assert_array_equal(same, value)
    np.testing.assert_allclose(scaled, plain / STEPS[:, None], rtol=16 * EPS, atol=EPS)


def test_ctc_of_classes_that_are_ruled_out():
    x = wave((4, 1, 4), 1)
    x[:, :, 3] = -np.inf
    value, slope = gradient(F.ctc_loss, x, LABELS[:1, :2], STEPS[:1] - 3, LENGTHS[:1] - 1)
    without = F.ctc_loss(to_tensor(x[..., :3]), LABELS[:1, :2], STEPS[:1] - 3, LENGTHS[:1] - 1, reduction="none")
    np.testing.assert_allclose(value, without.numpy(), rtol=16 * EPS)
    assert np.isfinite(slope).all()
    assert np.isinf(F.ctc_loss(to_tensor(x), np.array([[3]]), STEPS[:1] - 3, LENGTHS[:1] - 2, reduction="none").numpy())


def test_fastemit_multiplies_the_gradient_of_labels_alone():
    x, labels, steps, lengths = wave((2, 3, 3, 4), 1), LABELS[:2, :2], np.array([3, 2]), np.array([2, 1])
    value, plain = gradient(F.rnnt_loss, x, labels, steps, lengths, fastemit_lambda=0.0)
    same, pushed = gradient(F.rnnt_loss, x, labels, steps, lengths, fastemit_lambda=0.5)
    np.testing.assert_array_equal(same, value)
    np.testing.assert_allclose(pushed[..., 0], plain[..., 0], rtol=16 * EPS)
    np.testing.assert_allclose(pushed[..., 1:], 1.5 * plain[..., 1:], rtol=16 * EPS)


@pytest.mark.slow_cases("rnnt_loss")
@pytest.mark.parametrize("loss", [F.ctc_loss, F.rnnt_loss])
def test_an_unknown_reduction_raises(loss):
    x = to_tensor(wave((2, 2, 2, 3) if loss is F.rnnt_loss else (2, 2, 3), 1))
    with pytest.raises(ConfigError, match="reduction='avg'"):
        loss(x, np.array([[1], [2]]), np.array([2, 2]), np.array([1, 1]), reduction="avg")
