"""Losses of alignment against NumPy in float64, and what is known of them in closed form."""

import math

import numpy as np
import pytest

from polyreme.eager.tensor import to_tensor
from polyreme.recipes.preference_losses import LOSSES
from polyreme.training.preference import (
    PairLogProbs,
    PreferenceSettings,
    kto_loss,
    policy_loss,
    reward_loss,
    soft_label_loss,
)

SETTINGS = PreferenceSettings(beta=0.3, label_smoothing=0.1, simpo_gamma=0.4, dpop_lambda=2.0)
RNG = np.random.default_rng(0)
PAIRS = PairLogProbs(
    *(-RNG.uniform(1, 30, 6) for _ in range(4)), *(RNG.integers(2, 9, 6).astype(float) for _ in range(2))
)
# float32 functions of sums of four terms of up to 30, dpop's times lambda, squares of those
TOLERANCE = {"rtol": 64 * 2.0**-23, "atol": 30 * 8 * 2.0**-23}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def smooth(x, s=SETTINGS.label_smoothing):
    return -np.log(sigmoid(x)) * (1 - s) - np.log(sigmoid(-x)) * s


def expected(name, c, r, rc, rr, nc, nr):
    """The loss of each pair as its paper writes it."""
    beta = SETTINGS.beta
    a, b = c - rc, r - rr
    return {
        "sigmoid": lambda: smooth(beta * (a - b)),
        "hinge": lambda: np.maximum(0, 1 - beta * (a - b)),
        "ipo": lambda: (a / nc - b / nr - 1 / (2 * beta)) ** 2,
        "kto_pair": lambda: 2 - sigmoid(beta * (a - max(b.mean(), 0))) - sigmoid(beta * (max(a.mean(), 0) - b)),
        "sppo_hard": lambda: (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2,
        "nca_pair": lambda: (
            -np.log(sigmoid(beta * a)) - 0.5 * np.log(sigmoid(-beta * a)) - 0.5 * np.log(sigmoid(-beta * b))
        ),
        "dpop": lambda: -np.log(sigmoid(beta * (a - b - 2.0 * np.maximum(0, rc - c)))),
        "orpo": lambda: (
            -c / nc
            - beta
            * np.log(
                sigmoid(np.log(np.exp(c / nc) / (1 - np.exp(c / nc))) - np.log(np.exp(r / nr) / (1 - np.exp(r / nr))))
            )
        ),
        "simpo": lambda: smooth(beta * (c / nc - r / nr) - 0.4),
    }[name]()


def as_tensors(values):
    return PairLogProbs(*(to_tensor(np.asarray(v, np.float32)) for v in values))


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_its_papers(name):
    got = LOSSES[name](as_tensors(PAIRS), SETTINGS).numpy()
    np.testing.assert_allclose(got, expected(name, *PAIRS), **TOLERANCE)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", LOSSES)
def test_the_first_step_has_a_gradient(name):
    """Where the model is its reference the loss of DPO is ln 2, and no loss is flat."""
    chosen, rejected = (to_tensor(np.float32([-9, -4]), stop_gradient=False) for _ in range(2))
    count = to_tensor(np.float32([3, 2]))
    pairs = PairLogProbs(chosen, rejected, chosen.detach(), rejected.detach(), count, count)
    loss = LOSSES[name](pairs, PreferenceSettings()).mean()
    loss.backward()
    assert (chosen.grad.numpy() < 0).all()
    if name != "orpo":  # whose better answer alone is learnt where the odds are even
        assert (rejected.grad.numpy() > 0).all()
    if name == "sigmoid":
        assert float(loss) == pytest.approx(math.log(2), abs=2.0**-22)
        np.testing.assert_allclose(chosen.grad.numpy(), -0.1 / 2 / 2, rtol=1e-6)  # beta / 2, of two pairs


def test_only_losses_that_need_a_reference_read_it():
    other = PAIRS._replace(reference_chosen=PAIRS.reference_chosen + 3)
    for name, loss in LOSSES.items():
        same = np.array_equal(*(loss(as_tensors(pairs), SETTINGS).numpy() for pairs in (PAIRS, other)))
        assert same != loss.needs_reference, name


def test_kto_judges_answers_beside_the_others():
    ratio, other = RNG.normal(size=5), RNG.normal(size=5) + 1
    good = np.array([1.0, 0, 1, 1, 0])
    point = max(other.mean(), 0)
    want = np.where(good, 2 * (1 - sigmoid(0.5 * (ratio - point))), 3 * (1 - sigmoid(0.5 * (point - ratio))))
    tensors = (to_tensor(value.astype("float32")) for value in (ratio, other, good))
    np.testing.assert_allclose(kto_loss(*tensors, 0.5, 2.0, 3.0).numpy(), want, **TOLERANCE)


def test_rewards_are_compared():
    chosen, rejected = np.array([1.0, -2]), np.array([0.5, 3])
    got = reward_loss(to_tensor(chosen.astype("float32")), to_tensor(rejected.astype("float32"))).numpy()
    np.testing.assert_allclose(got, np.log1p(np.exp(rejected - chosen)), **TOLERANCE)


def test_soft_labels_are_a_divergence():
    student, teacher = RNG.normal(size=(2, 3, 7)), RNG.normal(size=(2, 3, 7))
    counted = np.array([[1.0, 0, 1], [0, 0, 1]])

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    logs, wanted = log_softmax(student / 2), log_softmax(teacher / 2)
    cost = (np.exp(wanted) * (wanted - logs)).sum(-1)
    want = 4 * (cost * counted).sum() / 3
    tensors = [to_tensor(value.astype("float32")) for value in (student, teacher, counted)]
    assert float(soft_label_loss(*tensors, 2.0)) == pytest.approx(want, rel=1e-5)
    assert float(soft_label_loss(tensors[1], tensors[1], tensors[2], 2.0)) == pytest.approx(0, abs=1e-6)


def test_the_policy_gains_no_more_than_its_clip():
    new, old, reference = (RNG.normal(size=(2, 4)) - 2 for _ in range(3))
    counted, advantages = np.array([[1.0, 1, 1, 0], [1, 1, 0, 0]]), np.array([1.0, -0.5])
    ratio = np.exp(new - old)
    gain = np.minimum(ratio * advantages[:, None], np.clip(ratio, 0.8, 1.2) * advantages[:, None])
    gain -= 0.04 * (np.exp(reference - new) - (reference - new) - 1)
    want = -(gain * counted).sum(1) / counted.sum(1)
    tensors = [to_tensor(v.astype("float32")) for v in (new, old, reference, advantages, counted)]
    np.testing.assert_allclose(policy_loss(*tensors, 0.2, 0.04).numpy(), want, rtol=1e-4, atol=1e-5)
