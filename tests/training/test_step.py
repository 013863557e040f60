"""The training step on one device: microbatches and their shares, random streams, what is not finite, loss scaling."""

import numpy as np
import pytest

from polyreme.core import rng
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from polyreme.nn import Linear
from polyreme.nn import functional as F
from polyreme.optimizer import SGD
from polyreme.training import (
    Microbatch,
    MixedPrecision,
    SpikePolicy,
    StepPolicy,
    TrainingStep,
    cut,
)

X = np.arange(14, dtype=np.float32).reshape(7, 2) / 14
Y = np.ones((7, 1), np.float32)
# seven rows of products and sums of numbers below 1
CLOSE = 16 * 2.0**-23
FLOAT16 = MixedPrecision("O1", "float16", scaler={"init_loss_scaling": 4.0})


def make(policy, drop=0.0):
    model = Linear(2, 1)
    model.weight.set_value(np.array([[0.5], [-0.25]], np.float32))

    def output(x):
        return F.dropout(model(x), drop)

    def forward(x, y):
        out = output(x)
        return [F.mse_loss(out, y)], out

    return model, TrainingStep(forward, SGD(0.1, parameters=model.parameters()), policy, output=output)


def tensors(parts):
    return [Microbatch(to_tensor(p.inputs), to_tensor(p.labels), p.rows) for p in parts]


def weights(model):
    return np.concatenate([np.asarray(p._array).ravel() for p in model.parameters()])


@pytest.mark.parametrize("run", [lambda f: f, to_static], ids=["eager", "captured"])
def test_microbatches_count_by_their_rows(run):
    whole, parts = make(StepPolicy(non_finite="halt")), make(StepPolicy(non_finite="halt"))
    want = run(whole[1])(tensors(cut([X, Y], 1, None)))
    got = run(parts[1])(tensors(cut([X, Y], 3, None)))  # 3, 3 and 1 rows
    assert [loss.shape for losses, _ in got.parts for loss in losses] == [[]] * 3
    np.testing.assert_allclose(float(got.loss), float(want.loss), rtol=CLOSE)
    np.testing.assert_allclose(float(got.grad_norm), float(want.grad_norm), rtol=CLOSE)
    np.testing.assert_allclose(weights(parts[0]), weights(whole[0]), rtol=CLOSE)
    assert not np.array_equal(weights(parts[0])[:2], [0.5, -0.25])


def test_microbatches_draw_from_branches_and_one_piece_from_the_stream():
    def outputs(accumulates, count):
        rng.seed(3)
        _, step = make(StepPolicy(accumulates=accumulates), drop=0.5)
        return [np.asarray(out._array) for _, out in step.gradients(tensors(cut([X, Y], count, None)))[1]]

    rng.seed(3)
    by_hand = F.dropout(make(StepPolicy())[0](to_tensor(X)), 0.5).numpy()
    np.testing.assert_array_equal(outputs(False, 1)[0], by_hand)
    first, second = outputs(True, 2)
    rng.seed(3)
    model, _ = make(StepPolicy())
    one, other = rng.default_generator.branches(2)
    for key, x, got in ((other, X[4:], second), (one, X[:4], first)):  # in whatever order
        with rng.default_generator.starting_at(key):
            np.testing.assert_array_equal(F.dropout(model(to_tensor(x)), 0.5).numpy(), got)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("run", [lambda f: f, to_static], ids=["eager", "captured"])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_evaluation_is_the_forward_of_gradients(drop, run):
    """Under the policy's autocast and with its random numbers; the stream advances only where some are drawn."""
    _, step = make(StepPolicy(MixedPrecision("O1", "bfloat16")), drop)
    batch, generator = tensors(cut([X, Y], 2, None)), rng.default_generator
    rng.seed(3)
    start = generator.get_state()
    want = [([float(loss) for loss in losses], out.numpy()) for losses, out in step.gradients(batch)[1]]
    after = generator.get_state()
    evaluate = run(step.evaluate)
    for asked in ({"outputs": True}, {}, {"losses": False, "outputs": True}):
        generator.set_state(start)
        parts = evaluate(batch, **asked)
        np.testing.assert_array_equal(generator.get_state(), after if drop else start)
        for (losses, out), (want_losses, want_out) in zip(parts, want, strict=True):
            assert [float(loss) for loss in losses] == (want_losses if asked.get("losses", True) else [])
            assert all(loss.stop_gradient for loss in losses)
            assert (out is not None) == asked.get("outputs", False)
            if out is not None:
                np.testing.assert_array_equal(out.numpy(), want_out)


@pytest.mark.parametrize(("non_finite", "after"), [("apply", None), ("skip", True), ("halt", False)])
def test_what_is_not_finite(non_finite, after):
    """after: whether the next, finite step changes the parameters."""
    model, step = make(StepPolicy(non_finite=non_finite))
    before = weights(model)
    bad = step(tensors([Microbatch(X * np.nan, Y, 7)]))
    assert (bad.grad_norm is None) == (bad.key is None) == (non_finite == "apply")
    assert np.isnan(weights(model)).all() == (after is None)
    if after is not None:
        np.testing.assert_array_equal(weights(model), before)
        assert np.isfinite(float(step(tensors([Microbatch(X, Y, 7)])).grad_norm))
        assert np.array_equal(weights(model), before) != after


def test_spikes_are_left_out_or_scaled_down():
    rng_ = np.random.default_rng(0)
    batches = [Microbatch(X + 0.01 * rng_.standard_normal(X.shape).astype("float32"), Y, 7) for _ in range(6)]
    after = {}
    for action in ("skip", "clip"):
        model, step = make(StepPolicy(spikes=SpikePolicy(action, sigmas=10.0, window=5, warmup=4)))
        step = to_static(step)
        flags = [bool(step(tensors([batch])).spike) for batch in batches]
        assert not any(flags)
        before = weights(model)
        result = step(tensors([Microbatch(100 * X, Y, 7)]))
        assert (bool(result.spike), bool(result.skipped)) == (True, action == "skip")
        after[action] = np.abs(weights(model) - before).max()
        if action == "skip":  # a new level is learnt: each spike widens what is usual
            assert not all(bool(step(tensors([Microbatch(100 * X, Y, 7)])).spike) for _ in range(20))
    assert after["skip"] == 0
    assert 0 < after["clip"] < 1  # unscaled it moves by 1000
    with pytest.raises(ConfigError, match="spikes with a loss scaler"):
        StepPolicy(FLOAT16, spikes=SpikePolicy("skip"))
    for bad in ({"action": "no"}, {"action": "skip", "sigmas": 0}, {"action": "skip", "warmup": 0}):
        with pytest.raises(ConfigError, match="SpikePolicy: "):
            SpikePolicy(**bad)


def test_the_statistic_is_that_of_numpy():
    values = np.random.default_rng(1).random((12, 2)).astype("float32")
    policy, statistic = SpikePolicy("skip", sigmas=1e6, window=100), SpikePolicy.start()
    for loss, norm in values:
        statistic, is_spike, factor = policy.judge(statistic, np.float32(loss), np.float32(norm))
        assert (bool(is_spike), float(factor)) == (False, 1.0)
    count, mean, variance = np.asarray(statistic)
    assert count.tolist() == [12, 12]
    np.testing.assert_allclose(mean, values.mean(0), rtol=12 * 2.0**-23)
    np.testing.assert_allclose(variance, values.var(0), rtol=4 * 12 * 2.0**-23)
    before = np.asarray(statistic)
    after, is_spike, _ = policy.judge(statistic, np.float32("nan"), np.float32(1))
    np.testing.assert_array_equal(np.asarray(after), before)
    assert not is_spike


def test_a_scaler_scales_skips_and_adapts():
    plain, scaled = make(StepPolicy()), make(StepPolicy(FLOAT16))
    for step in (plain[1], scaled[1]):
        step.gradients(tensors([Microbatch(X, Y, 7)]))
    ratio = np.asarray(scaled[0].bias.grad._array) / np.asarray(plain[0].bias.grad._array)
    np.testing.assert_allclose(ratio, 4, rtol=7 * 2.0**-11)  # float16 products, their sum over seven rows
    before = weights(scaled[0])
    loss, _ = scaled[1].gradients(tensors([Microbatch(np.full_like(X, np.inf), Y, 7)]))
    scaled[1].update(loss)
    np.testing.assert_array_equal(weights(scaled[0]), before)
    assert float(scaled[1].scaler.get_loss_scaling()) == 2


def test_losses_are_added_up_and_returned_without_history():
    model, step = make(StepPolicy())
    one = step.forward
    step.forward = lambda x, y: (one(x, y)[0] * 2, None)
    loss, [(losses, _)] = step.gradients(tensors([Microbatch(X, Y, 7)]))
    assert isinstance(loss, Tensor)
    assert float(loss) == float(losses[0]) + float(losses[1])
    assert all(each.stop_gradient for each in losses)
    assert model.weight.grad is not None


def test_outputs_without_losses_need_a_function_for_them():
    step = TrainingStep(lambda x, y: ([F.mse_loss(x, y)], x), None, StepPolicy())
    with pytest.raises(ConfigError, match="make it with output, a function of inputs"):
        step.evaluate([Microbatch(to_tensor(X), None, 7)], losses=False)


def test_a_policy_that_contradicts_itself_is_refused():
    with pytest.raises(ConfigError, match=r"non_finite='stop'; give one of apply, skip, halt"):
        StepPolicy(non_finite="stop")
    with pytest.raises(ConfigError, match="'halt' with a loss scaler"):
        StepPolicy(FLOAT16, non_finite="halt")
