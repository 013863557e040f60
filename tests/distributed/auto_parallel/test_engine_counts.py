"""Losses that are no mean by rows, over microbatches: what one device makes of the whole batch."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed.fleet import auto
from polyreme.nn import functional as F

X = np.random.default_rng(0).normal(size=(3, 8, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, (3, 8, 1))
Y[0, :3] = Y[1, 0] = Y[1, 5:] = Y[2] = -100  # of a microbatch all, some or no labels count, of a batch none
SOFT = np.random.default_rng(2).random((3, 8, 3)).astype(np.float32)
RARE = paddle.to_tensor([0.1, 1.0, 3.0])


class Own(nn.MSELoss):
    """A loss whose forward does not ask its settings: a mean by rows."""

    def forward(self, out, label):
        return F.mse_loss(out, label)


LOSSES = {
    "ignored": (F.cross_entropy, Y),
    "weights": (nn.CrossEntropyLoss(weight=RARE, label_smoothing=0.2), Y),
    "soft weights": (nn.CrossEntropyLoss(weight=RARE, soft_label=True), SOFT),
    "sum": (nn.MSELoss(reduction="sum"), SOFT),
    "log likelihood": (nn.NLLLoss(weight=RARE), Y[..., 0]),
    "of its own": (Own(reduction="sum"), SOFT),
}


def trained(strategy, loss, labels):
    """Losses of three batches, of an evaluation with outputs and one without, and the weights."""
    paddle.seed(3)
    layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.LogSoftmax())
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    made = auto.Engine(layer, loss, optimizer, strategy=auto.Strategy(strategy))
    found = [made.run([x, y], mode="train")["loss"] for x, y in zip(X, labels, strict=True)]
    found += [made.run([X[1], labels[1]], mode="eval", fetch_list=ask)["loss"] for ask in ([], ["outputs"])]
    return found, [p.numpy() for p in layer.parameters()]


# without stages "sum" is counted as weights are
@pytest.mark.one_in(2)
@pytest.mark.slow_cases("weights-1")
@pytest.mark.parametrize(("name", "degree"), [*((name, 2) for name in LOSSES), ("weights", 1), ("sum", 1)])
def test_microbatches_give_the_loss_of_the_batch(name, degree):
    """Sums of at most 24 float32 terms of size about 1, over 3 steps."""
    pipeline = {"pipeline": {"enable": True, "pp_degree": degree, "accumulate_steps": 3}}
    (losses, weights), (want, after) = trained(pipeline, *LOSSES[name]), trained({}, *LOSSES[name])
    np.testing.assert_allclose(losses, want, rtol=3 * 24 * 1.2e-7, atol=1e-7)
    for ours, theirs in zip(weights, after, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=3 * 24 * 1.2e-7, atol=3 * 24 * 1.2e-7)
