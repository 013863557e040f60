"""Optimizer state under a plan: split over devices as the strategy says, and the same numbers as on one device."""

import numpy as np
import pytest

from polyreme.amp import GradScaler
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter
from tests.compilations import counted_compilations
from tests.optimizer.table_optimizers import PLAIN

CASES = {c.name: c for c in PLAIN}
SHAPES = {"up": (8, 16), "up_bias": (16,), "down": (16, 8)}
DIMS = {"up": ("embed", "ffn"), "up_bias": ("ffn",), "down": ("ffn", "embed")}
STEPS = 5
# so that five steps move the parameters by some percent of their size
RATES = {"sgd": 1.0, "momentum": 1.0, "asgd": 1.0, "radam": 1.0, "adadelta": 10.0, "rprop": 0.05}
# these take steps as long as the gradient; RAdam does so in its first five
UNSCALED = {"sgd", "momentum", "asgd", "radam"}


class Block(Layer):
    def __init__(self):
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            values = np.random.default_rng(i).normal(size=shape) / 4
            setattr(self, name, Parameter(values, "float32", name=name, dims=DIMS[name]))

    def forward(self, x):
        return (x.matmul(self.up) + self.up_bias).tanh().matmul(self.down)


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


def trained(case, plan=None, captured=True, scaler=None):
    """(model, optimizer, number of compilations after the first step)."""
    model = Block()
    if plan is not None:
        apply_plan(plan, model)
    optimizer = case.make(model.parameters(), learning_rate=RATES.get(case.name, 0.01))

    def step(x):
        loss = (model(x) ** 2).mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.clear_grad()
        return loss

    step = to_static(step) if captured else step
    batches = [to_tensor(np.random.default_rng(50 + t).normal(size=(4, 8)).astype("float32")) for t in range(STEPS)]
    for x in batches[:1]:
        step(x)
    with counted_compilations() as compiled:
        for x in batches[1:]:
            step(x)
    return model, optimizer, len(compiled)


def check(case, plan, captured=True, scaler=None):
    one, _, _ = trained(case, scaler=scaler and GradScaler())
    many, optimizer, compiled = trained(case, plan, captured, scaler)
    for p in many.parameters():
        for kind in ("param", "state"):
            assert p.sharding_of(kind) is not None
        tensors = {n: optimizer.state_dict()[f"{p.name}_{n}_0"] for n in optimizer.slots}
        for tensor in tensors.values():
            want = p.sharding_of("state").shard_shape(tuple(p.shape))
            assert {s.data.shape for s in tensor._array.addressable_shards} == {want}
        want = p.sharding_of("param").shard_shape(tuple(p.shape))
        assert {s.data.shape for s in p._array.addressable_shards} == {want}
        # gradients are sums of up to 4 x 16 terms in another order: each is off by 64 eps of the largest, and a step
        # of length 0.01 made of one a thousand times smaller than that by 64,000 eps of its length. those of
        # UNSCALED do not divide: gradients below 0.1, added up over the steps at rate 1
        adaptive = case.name not in UNSCALED
        atol = STEPS * 2.0**-24 * (0.01 * 64 * 1000 if adaptive else STEPS * 0.1 * 64)
        alone, start = dict(one.named_parameters())[p.name].numpy(), dict(Block().named_parameters())[p.name].numpy()
        assert np.abs(alone - start).max() > 50 * atol
        np.testing.assert_allclose(p.numpy(), alone, rtol=0, atol=atol)
    return many, optimizer, compiled


# by hand, for a mesh dp 2 x sharding 2 x mp 2: mp splits ffn, sharding splits another dim that divides
@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("stage", "param", "state"),
    [(1, (8, 8), (4, 8)), (2, (8, 8), (4, 8)), (3, (4, 8), (4, 8))],
)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_every_sharding_stage_equals_one_device(stage, param, state, captured):
    plan = Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=stage)
    many, optimizer, compiled = check(CASES["adamw"], plan, captured)
    assert many.up._array.addressable_shards[0].data.shape == param
    moment = optimizer.state_dict()["up_moment1_0"]._array
    assert moment.addressable_shards[0].data.shape == state
    assert len(moment.addressable_shards) == 8
    if captured:
        assert compiled == 0


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", [c for c in PLAIN if c.name != "adamw"], ids=lambda c: c.name)
def test_every_optimizer_sharded(case):
    check(case, Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=2))


def test_a_scaled_step_under_a_plan():
    _, _, compiled = check(
        CASES["adamw"], Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=2), scaler=GradScaler()
    )
    assert compiled == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_are_laid_out_as_the_strategy_says(stage):
    model = Block()
    apply_plan(Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=stage), model)
    for _ in range(2):
        (model(to_tensor(np.ones((4, 8), "float32"))) ** 2).mean().backward()
    for p in model.parameters():
        want = p.sharding_of("grad").shard_shape(tuple(p.shape))
        assert p.grad._array.addressable_shards[0].data.shape == want
