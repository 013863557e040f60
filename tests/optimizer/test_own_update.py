"""Subclasses that say with Tensors what an optimizer or a clip does: a step calls them, or refuses them by name."""

import copy

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.errors import CaptureError, ConfigError
from polyreme.utils import unique_name

EPS = float(np.finfo(np.float32).eps)


class HeavyBall(paddle.optimizer.Optimizer):
    """Momentum as PaddlePaddle's guide has users write it."""

    def _create_accumulators(self, block, parameters):
        for p in parameters:
            self._add_accumulator("velocity", p)

    def _append_optimize_op(self, block, param_and_grad):
        p, g = param_and_grad
        velocity = self._get_accumulator("velocity", p)
        velocity.set_value(velocity * 0.5 + g)
        p.set_value(p - self._create_param_lr(param_and_grad) * velocity)


class FrozenBias(paddle.optimizer.Momentum):
    """The rule of its class for some parameters only."""

    def _append_optimize_op(self, block, param_and_grad):
        if param_and_grad[0].ndim > 1:
            super()._append_optimize_op(block, param_and_grad)


class Tenth(nn.ClipGradByGlobalNorm):
    """A clip on pairs; it leaves the method of its base class unused."""

    def _dygraph_clip(self, params_grads):
        return [(p, g * 0.1) for p, g in params_grads]


def _net():
    net = nn.Linear(3, 2)
    rng = np.random.default_rng(0)
    for p in net.parameters():
        p.set_value(rng.standard_normal(p.shape).astype("float32"))
    return net


def _trained(make, steps=3, captured=False, scaled=False, prepare=lambda net, optimizer: None):
    with unique_name.guard():
        net = _net()
    optimizer = make(net.parameters())
    prepare(net, optimizer)
    scaler = paddle.amp.GradScaler(init_loss_scaling=128.0)

    def step(x):
        loss = (net(x) ** 2).mean()
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.clear_grad()
        return loss

    run = paddle.jit.to_static(step) if captured else step
    for _ in range(steps):
        run(paddle.ones([4, 3]))
    return [p.numpy() for p in net.parameters()], net, optimizer


CLIP = {"grad_clip": nn.ClipGradByGlobalNorm(0.5), "weight_decay": 0.1}
PAIRS = {
    "an update": (
        lambda ps: HeavyBall(0.1, parameters=ps, **CLIP),
        lambda ps: paddle.optimizer.Momentum(0.1, 0.5, parameters=ps, **CLIP),
    ),
    "a rule for some": (
        lambda ps: FrozenBias(0.1, 0.5, parameters=ps, **CLIP),
        lambda ps: paddle.optimizer.Momentum(
            0.1, 0.5, parameters=[{"params": ps[:1]}, {"params": ps[1:], "learning_rate": 0.0}], **CLIP
        ),
    ),
    "a clip": (
        lambda ps: paddle.optimizer.SGD(0.1, parameters=ps, grad_clip=Tenth(1.0)),
        lambda ps: paddle.optimizer.SGD(0.01, parameters=ps),
    ),
}


@pytest.mark.parametrize(("own", "rule"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("captured", [False, True])
def test_what_a_subclass_says_with_tensors_is_what_a_step_does(own, rule, captured):
    got, want = _trained(own, captured=captured)[0], _trained(rule)[0]
    for a, b in zip(got, want, strict=True):
        # 3 steps of a few roundings each, in another order
        np.testing.assert_allclose(a, b, rtol=0, atol=32 * EPS * np.abs(b).max())


def test_what_it_keeps_goes_into_files_and_copies():
    make = PAIRS["an update"][0]
    want, *_ = _trained(make, steps=4)
    _, net, optimizer = _trained(make, steps=2)
    saved = {name: tensor.numpy() for name, tensor in optimizer.state_dict().items()}
    assert sorted(saved) == sorted(f"{p.name}_velocity_0" for p in net.parameters())

    def restore(fresh, into):
        fresh.set_state_dict(net.state_dict())
        into.set_state_dict(saved)

    got, *_ = _trained(make, steps=2, prepare=restore)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    copied = copy.deepcopy((net, optimizer))[1].state_dict()
    for a, b in zip(copied.values(), saved.values(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b)
    optimizer.set_state_dict({})
    assert not any(np.any(tensor.numpy()) for tensor in optimizer.state_dict().values())


def test_a_scaler_leaves_out_its_step_and_a_capture_says_that_it_cannot():
    make = PAIRS["an update"][0]
    got, want = _trained(make, scaled=True)[0], _trained(make)[0]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=32 * EPS * np.abs(b).max())
    with pytest.raises(CaptureError, match="needs the value on the host"):
        _trained(make, captured=True, scaled=True)


def test_a_pure_rule_is_asked_for_where_updates_are_programs():
    net = _net()
    for optimizer in (
        HeavyBall(0.1, parameters=net.parameters()),
        paddle.optimizer.SGD(0.1, parameters=net.parameters(), grad_clip=Tenth(1.0)),
    ):
        with pytest.raises(ConfigError, match=r"does not run in static Programs; write the update as rule\(\)"):
            optimizer.over(net.parameters())
        with pytest.raises(ConfigError, match="does not run in pipelines"):
            optimizer.groups_by_mesh()
