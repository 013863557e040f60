"""A plan that compiles each block once: the step of one program, in programs whose number does not grow with depth."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import polyreme.optimizer as opt
from polyreme import nn
from polyreme.core import rng
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.planned_step import PlannedStep
from polyreme.errors import ConfigError
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.nn.functional import mse_loss
from polyreme.nn.layers.linear import Linear
from polyreme.training import MixedPrecision, StepPolicy

CONFIG = GPTConfig(vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, seq_len=8, dropout=0.1)
# float32 sums of up to 512 terms taken in another order, over three steps
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def _no_plan_after():
    yield
    clear_plan()


def planned(layers=2, level="O0", **words):
    clear_plan()
    rng.seed(3)
    plan = Plan.from_degrees(**words)

    def make_optimizer(model):
        return opt.AdamW(0.01, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(0.5))

    policy = StepPolicy(MixedPrecision(level, "bfloat16"), non_finite="skip")
    model = GPT(replace(CONFIG, num_layers=layers))
    return PlannedStep(model, plan, make_optimizer, policy, jax.devices()[: plan.mesh.size])


def tokens(step):
    ids = np.random.default_rng(step).integers(0, 64, (4, 9))
    return ids[:, :-1], ids[:, 1:]


def three_steps(step):
    results = [[float(v) for v in step(*tokens(i))[:2]] for i in range(3)]
    results += [float(step.evaluate(*tokens(9)))]
    return np.hstack(results), {n: p.numpy().astype("float32") for n, p in step.model.named_parameters()}


@pytest.mark.slow_cases("O1 recomputed", "sharded")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param({"num_microbatches": 2}, id="one"),
        pytest.param({"level": "O1", "recompute": "full"}, id="O1 recomputed"),
        pytest.param({"dp": 2, "sharding": 2, "mp": 2, "sharding_stage": 3}, id="sharded"),
    ],
)
def test_blocks_train_as_one_program_does(words):
    whole, whole_weights = three_steps(planned(**words))
    step = planned(**words, compile="blocks")
    assert isinstance(step.step, PipelineStep)
    blocks, weights = three_steps(step)
    close = 2**-7 if words.get("level") == "O1" else CLOSE
    np.testing.assert_allclose(blocks, whole, rtol=close)
    for name, weight in weights.items():
        # Adam divides by the root of a square: a small gradient's rounding moves a step of up to the rate
        np.testing.assert_allclose(weight, whole_weights[name], rtol=close, atol=3e-4, err_msg=name)


@pytest.mark.slow
def test_depth_adds_no_programs():
    def programs(layers):
        step = planned(layers, compile="blocks")
        step(*tokens(0))
        called = [call for _, _, call in step.step.pipeline.programs()]
        return len({id(call) for call in called}), len(called)

    shared, all_calls = programs(2)
    assert programs(4) == (shared, all_calls + 2 * 2)


class Block(nn.Layer):
    """x + scale (x w), dropped out."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.scale = nn.Linear(4, 4), nn.Dropout(0.5), 1.0

    def forward(self, x):
        return x + self.dropout(self.linear(x)) * self.scale


CHANGES = {
    "mode": lambda block: block.eval(),
    "setting": lambda block: setattr(block, "scale", 3.0),
    "layer hook": lambda block: block.register_forward_post_hook(lambda layer, x, y: 2 * y),
    "gradient hook": lambda block: block.linear.weight.register_hook(lambda g: 0 * g),
    "frozen": lambda block: setattr(block.linear.weight, "stop_gradient", True),
}


@pytest.mark.slow_cases("layer hook", "gradient hook", "frozen")
@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_changes_does_so_alone(change):
    def train(compile):
        clear_plan()
        rng.seed(1)
        model = PipelineLayer([*(Block() for _ in range(4)), nn.Linear(4, 4)], num_stages=1, loss_fn=mse_loss)

        def make_optimizer(model):
            return opt.SGD(0.1, parameters=model.parameters())

        plan = Plan.from_degrees(compile=compile)
        step = PlannedStep(model, plan, make_optimizer, StepPolicy(), jax.devices()[:1])
        x, y = np.random.default_rng(0).standard_normal((2, 4, 4)).astype("float32")
        losses = [float(step(x, y).loss)]
        CHANGES[change](model.chunk(0).items[1].layer)
        return [*losses, float(step(x, y).loss), float(step(x, y).loss)], step

    blocks, step = train("blocks")
    np.testing.assert_allclose(blocks, train("step")[0], rtol=CLOSE)
    # two each of the first block, whose input wants no gradient, of the changed one, of both others, of the end
    assert len({id(call) for _, _, call in step.step.pipeline.programs()}) == 8


def test_what_has_no_blocks_is_refused():
    plan = Plan.from_degrees(compile="blocks")
    with pytest.raises(ConfigError, match=r"compile=blocks needs a model in chunks; make Linear a PipelineLayer"):
        PlannedStep(Linear(2, 2), plan, lambda m: opt.SGD(0.1, parameters=m.parameters()), StepPolicy())
    with pytest.raises(ConfigError, match="set compile to 'step'"):
        PlannedStep(
            GPT(CONFIG),
            plan,
            lambda m: opt.SGD(0.1, parameters=m.parameters()),
            StepPolicy(),
            jax.devices()[:1],
            lambda model, inputs, labels: model(inputs, labels),
        )
    with pytest.raises(ConfigError, match="recompute_share in plan with compile 'blocks'"):
        Plan.from_degrees(compile="blocks", recompute="full", recompute_share=0.5)
    with pytest.raises(ConfigError, match=r"each stage of a pipeline is compiled as a whole.*set pp to 1"):
        Plan.from_degrees(pp=2, num_microbatches=2, compile="blocks")
    with pytest.raises(ConfigError, match=r"unknown compile 'block' in plan.*did you mean 'blocks'"):
        Plan.from_degrees(compile="block")
