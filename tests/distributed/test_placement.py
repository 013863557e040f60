"""A model under a plan: what lies where, and that every plan trains as one device does."""

import functools

import numpy as np
import pytest

from polyreme.core import layout, rng
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch
from polyreme.eager.tensor import to_tensor
from polyreme.errors import PlacementError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.nn import BatchNorm1D, Linear, Sequential
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.optimizer import AdamW

STEPS = 3
PLANS = {
    "dp8": Plan.from_degrees(dp=8),
    "mp2_dp4": Plan.from_degrees(dp=4, mp=2),
    "zero1": Plan.from_degrees(dp=2, sharding=4, sharding_stage=1),
    "zero2_mp": Plan.from_degrees(sharding=4, mp=2, sharding_stage=2),
    "zero3_dp_mp": Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=3),
    "zero3_mp_sequence": Plan.from_degrees(sharding=4, mp=2, sharding_stage=3, sequence_parallel=True),
}


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


def build(family):
    rng.seed(3)
    return GPT(GPTConfig.nano(num_layers=1, dropout=0.1)) if family == "gpt" else Llama(LlamaConfig.nano(num_layers=1))


def train(family, plan):
    """Losses and final parameters after a few captured steps, with dropout, clipping and decay."""
    model = build(family)
    place = to_tensor
    if plan is not None:
        bound = apply_plan(plan, model)
        place = lambda batch: shard_batch(bound, batch, "batch", None)
    optimizer = AdamW(1e-2, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(1.0))

    @to_static
    def step(tokens, labels):
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    rng.seed(11)
    data = np.random.default_rng(0).integers(0, 128, (STEPS, 16, 17))
    losses = [float(step(place(rows[:, :-1]), place(rows[:, 1:]))) for rows in data]
    assert step.retraces == ["first call"]
    return losses, {n: p.numpy() for n, p in model.named_parameters()}, model, optimizer


@pytest.fixture(scope="module")
def alone():
    """alone(family): losses and parameters on one device, trained when first asked for."""
    return functools.cache(lambda family: train(family, None)[:2])


# what the others have of each of these is in the long suite
SLOW = {("gpt", "dp8"), ("gpt", "mp2_dp4"), ("gpt", "zero1"), ("gpt", "zero3_mp_sequence")}
CASES = [*(("gpt", name) for name in PLANS), ("llama", "mp2_dp4"), ("llama", "zero3_dp_mp")]


@pytest.mark.slow
@pytest.mark.slow_cases("gpt-zero2_mp", "gpt-zero3_dp_mp", "llama-zero3_dp_mp")
@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES]
)
def test_every_plan_trains_as_one_device_does(alone, family, name):
    want_losses, want = alone(family)
    losses, parameters, _, _ = train(family, PLANS[name])
    # float32 sums of up to 2048 terms in another order, amplified by Adam's division by a root
    tolerance = 2.0**-23 * np.sqrt(2048) * 64
    np.testing.assert_allclose(losses, want_losses, rtol=tolerance)
    for key, value in want.items():
        np.testing.assert_allclose(parameters[key], value, atol=STEPS * 1e-2 * 0.05, err_msg=key)


# test_group_sharded, test_odd_shapes_fall_back and test_beside_tensor_parallel_layers look at each stage too
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "split"), [(1, (False, True)), (2, (False, True)), (3, (True, True))])
def test_stages_split_what_they_say(stage, split):
    _, _, model, optimizer = train("gpt", Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=stage))
    weight = model.blocks[0].ffn.up.weight
    moment = optimizer.state_arrays({id(p): n for n, p in model.named_parameters()})["moment1/blocks.0.ffn.up.weight"]
    ways = [array.addressable_shards[0].data.size for array in (weight._array, moment)]
    # mp always halves the ffn dim; the sharding axis halves what its stage covers
    assert ways == [weight.size // 2 // (1 + s) for s in split]


def test_statistics_stay_whole_and_follow_a_captured_step():
    net = Sequential(Linear(8, 16), BatchNorm1D(16))
    apply_plan(Plan.from_degrees(dp=4, sharding=2, sharding_stage=3), net)
    norm = net[1]
    optimizer = AdamW(0.1, parameters=net.parameters())
    x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    hidden = x @ net[0].weight.numpy() + net[0].bias.numpy()

    @to_static
    def step(x):
        net(x).sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    step(to_tensor(x))
    assert [p._array.addressable_shards[0].data.size for p in norm.parameters()] == [8, 8, 16, 16]
    bound = 2.0**-23 * 64  # sums of 8 terms
    np.testing.assert_allclose(norm._mean.numpy(), 0.1 * hidden.mean(0), rtol=bound, atol=bound)


def test_a_dim_that_does_not_divide_is_refused_naming_the_parameter():
    model = GPT(GPTConfig.nano(ffn_size=100, vocab_size=128))
    with pytest.raises(PlacementError, match=r"parameter .*ffn.*8"):
        apply_plan(Plan.from_degrees(mp=8), model)
    assert layout.active.layout is None
