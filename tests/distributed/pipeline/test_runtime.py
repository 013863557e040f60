"""The pipeline runtime: every schedule gives the losses and gradients of one device, whatever passes between stages."""

import functools
import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.core import layout, rng
from polyreme.core.layout import Layout
from polyreme.distributed.pipeline import run
from polyreme.distributed.pipeline.chunks import in_chunks
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.errors import ConfigError, GradError, PlacementError, ShapeError
from polyreme.mesh import Plan
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.parts.decoder import BlockPart, Part
from polyreme.training.microbatches import cut

DATA = np.random.default_rng(0).integers(0, 128, (8, 17))


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


def pipeline(model_items, losses, plan, **options):
    """(PipelineLayer, Pipeline) of items under a plan, on as many devices as its mesh has."""
    is_v = plan.schedule_kind.is_v
    layers = PipelineLayer(
        model_items,
        num_stages=plan.mesh.pp,
        num_virtual_pipeline_stages=None if is_v else plan.virtual_stages,
        use_dualpipev=is_v,
        **options,
    )
    return layers, placed(layers, losses, plan)


def placed(layers, losses, plan):
    """The Pipeline of a PipelineLayer under a plan."""
    bound = apply_plan(plan, layers, jax.devices()[: plan.mesh.size], chunks=layers.get_model_chunks())
    return Pipeline(layers.get_model_chunks(), losses, bound)


def train(model, plan, microbatches, rows=None):
    """Losses and gradients of one batch."""
    pipe = placed(in_chunks(model, plan), [model.pipeline_loss], plan)
    rng.seed(9)
    batch = cut([DATA[:rows, :-1], DATA[:rows, 1:]], microbatches, None)
    losses = pipe.train(batch, rng.default_generator.branches(microbatches))
    return [float(v) for v in losses], {n: p.grad.numpy() for n, p in model.named_parameters()}


class Chain(nn.Layer):
    """Blocks with dropout between an embedding and its transpose: what schedules meet in a GPT, in few ops."""

    def __init__(self, num_blocks, width=16):
        super().__init__()
        self.tokens, self.drop = nn.Embedding(128, width), nn.Dropout(0.1)
        self.blocks = nn.LayerList([nn.Linear(width, width) for _ in range(num_blocks)])

    def embed(self, tokens):
        return self.tokens(tokens)

    def run_block(self, block, x):
        return x + self.drop(block(x))

    def logits(self, x):
        return x.matmul(self.tokens.weight, transpose_y=True)

    def pipeline_items(self):
        blocks = [BlockPart(self.run_block, block) for block in self.blocks]
        return [Part(self.embed, tokens=self.tokens), *blocks, Part(self.logits, tokens=self.tokens)]

    def pipeline_loss(self, logits, labels):
        return nn.functional.cross_entropy(logits, labels.unsqueeze(-1))


def chain():
    paddle.seed(5)
    return Chain(num_blocks=6)


@pytest.fixture(scope="module")
def alone():
    """alone(microbatches): losses and gradients on one device, trained when first asked for."""

    @functools.cache
    def train_alone(microbatches):
        results = train(chain(), Plan(num_microbatches=microbatches), microbatches)
        clear_plan()
        return results

    return train_alone


def check(found, want, terms):
    # float32 sums of so many terms in another order, in numbers of at most 8
    tolerance = 8 * 2.0**-23 * np.sqrt(terms)
    np.testing.assert_allclose(found[0], want[0], rtol=tolerance)
    assert found[1].keys() == want[1].keys()
    for name, value in want[1].items():
        np.testing.assert_allclose(found[1][name], value, atol=tolerance, err_msg=name)


@pytest.mark.one_in(2)
@pytest.mark.slow_cases(
    "3-pp2-scheduleVPP-virtual_stages3",
    "4-pp2-scheduleFThenB-dp2",
    "4-pp4-schedule1F1B-sharding2-sharding_stage2",
    "4-pp3-scheduleZBVPP",
    "4-pp2-scheduleDualPipeV-dp2",
)
@pytest.mark.parametrize(
    ("microbatches", "degrees"),
    [
        (4, {"pp": 2, "schedule": "FThenB", "dp": 2}),
        (4, {"pp": 4, "schedule": "1F1B", "sharding": 2, "sharding_stage": 2}),
        (3, {"pp": 2, "schedule": "VPP", "virtual_stages": 3}),
        (4, {"pp": 2, "schedule": "ZBH1", "sharding": 2, "sharding_stage": 3}),
        (3, {"pp": 2, "schedule": "ZBVPP", "chunk_items": (1, 4, 1, 2), "stage_devices": ("cpu", "cpu")}),
        (4, {"pp": 3, "schedule": "ZBVPP"}),
        (4, {"pp": 2, "schedule": "DualPipeV", "dp": 2}),
        pytest.param(1, {"pp": 2, "schedule": "ZBVPP", "recompute": "full"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_every_schedule_equals_one_device(alone, microbatches, degrees):
    plan = Plan.from_degrees(num_microbatches=microbatches, **degrees)
    rows = 8 if 8 % microbatches == 0 else None
    want = alone(microbatches)
    check(train(chain(), plan, microbatches, rows), want, terms=8 * 16 * 128)


@pytest.mark.slow
def test_llama_over_stages_equals_llama_whole():
    def build():
        paddle.seed(2)
        return Llama(LlamaConfig.nano())

    want = train(build(), Plan(num_microbatches=2), 2)
    found = train(build(), Plan.from_degrees(pp=2, mp=2, num_microbatches=2), 2)
    check(found, want, terms=8 * 16 * 128)


class Split(nn.Layer):
    """x -> two Tensors that want gradients, one of integers and None."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        values, ids, missing, factor = x
        assert missing is None
        return self.a(values) * factor, {"b": self.b(values), "ids": ids}, None


class Join(nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1D(4)

    def forward(self, x):
        a, rest, missing = x
        assert missing is None
        return self.norm(a) + rest["b"] * rest["ids"].astype("float32").unsqueeze(-1)


def several(value):
    return value[0], value[1], None, 2.0


@pytest.mark.slow_cases("1F1B")
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_several_values_none_and_an_uneven_last_microbatch(schedule):
    def run(plan):
        paddle.seed(1)
        items = [Split(), Join(), nn.Linear(4, 3)]
        layers, pipe = pipeline(items, [lambda out, y: nn.functional.mse_loss(out, y)], plan)
        g = np.random.default_rng(3)
        x, y = g.standard_normal((9, 4)).astype("float32"), g.standard_normal((9, 3)).astype("float32")
        parts = [slice(0, 4), slice(4, 8), slice(8, 9)]  # the last does not divide over replicas
        ids = np.arange(9)
        batch = cut([[several((x[p], ids[p])) for p in parts], [y[p] for p in parts]], 3, None)
        losses = pipe.train(batch, rng.default_generator.branches(3))
        mean = float(pipe.mean(losses, batch))
        values = {n: p.grad.numpy() for n, p in layers.named_parameters() if p.trainable}
        return mean, [float(v) for v in losses], values, layers.state_dict()["1.norm._mean"].numpy()

    mean, losses, grads, running = run(Plan.from_degrees(pp=2, dp=2, schedule=schedule, num_microbatches=3))
    clear_plan()
    want = run(Plan(num_microbatches=3))
    tolerance = 2.0**-23 * 64  # sums of at most 12 terms, of values below 8
    assert mean == pytest.approx(np.average(losses, weights=[4, 4, 1]), rel=tolerance)
    np.testing.assert_allclose(losses, want[1], rtol=tolerance)
    np.testing.assert_allclose(running, want[3], rtol=tolerance, atol=tolerance)
    for name, value in want[2].items():
        np.testing.assert_allclose(grads[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def test_gradients_of_a_float64_model_are_exact_to_float64():
    paddle.seed(1)
    g = np.random.default_rng(5)
    x, y = g.standard_normal((7, 4)), g.standard_normal((7, 2))
    items = [nn.Linear(4, 3).to(dtype="float64"), nn.Linear(3, 2).to(dtype="float64")]
    layers, pipe = pipeline(items, [nn.functional.mse_loss], Plan.from_degrees(pp=2, num_microbatches=3))
    pipe.train(cut([x, y], 3, None), rng.default_generator.branches(3))
    w, b, v, c = [p.numpy() for p in layers.parameters()]
    h = x @ w + b
    d = 2 * (h @ v + c - y) / y.size
    # shares of 3/7 and 1/7, which float32 would round by 2**-26; sums of 7 terms below 8
    for p, want in zip(layers.parameters(), [x.T @ d @ v.T, (d @ v.T).sum(0), h.T @ d, d.sum(0)], strict=True):
        np.testing.assert_allclose(p.grad.numpy(), want, rtol=0, atol=2.0**-53 * 64)


def double_gradient(layers):
    layers.parameters()[0].register_hook(lambda g: g * 2)


def halve_output(layers):
    layers.sublayers()[0].register_forward_post_hook(lambda layer, inputs, out: out * 0.5)


def replace_bias(layers):
    layers.sublayers()[0].bias = None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", [double_gradient, halve_output, replace_bias])
def test_a_model_changed_between_two_steps_is_captured_again(change):
    g = np.random.default_rng(5)
    batch = cut([g.standard_normal((4, 4), np.float32), g.standard_normal((4, 2), np.float32)], 2, None)

    def grads(change_at):
        paddle.seed(1)
        plan = Plan.from_degrees(pp=2, num_microbatches=2)
        layers, pipe = pipeline([nn.Linear(4, 3), nn.Linear(3, 2)], [nn.functional.mse_loss], plan)
        for step in range(2):
            if step == change_at:
                change(layers)
            layers.clear_gradients()
            pipe.train(batch, rng.default_generator.branches(2))
        return {n: p.grad.numpy() for n, p in layers.named_parameters()}

    want, late, never = grads(0), grads(1), grads(2)
    assert want.keys() == late.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(late[name], value, err_msg=name)
    assert want.keys() != never.keys() or any((never[name] != value).any() for name, value in want.items())


def test_gradients_are_of_the_mean_over_all_rows():
    paddle.seed(1)
    layer = nn.Linear(4, 1)
    _, pipe = pipeline([layer, nn.Identity()], [lambda out, y: (out * y).mean()], Plan.from_degrees(pp=2))
    x, y = np.random.default_rng(3).standard_normal((2, 7, 4)).astype("float32")
    batch = cut([[x[:5], x[5:]], [y[:5, :1], y[5:, :1]]], 2, None)
    pipe.train(batch, rng.default_generator.branches(2), scale=paddle.to_tensor(4.0)._array)
    close = {"rtol": 2.0**-20, "atol": 2.0**-20}  # float32 sums of 7 terms
    np.testing.assert_allclose(layer.weight.grad.numpy(), 4 * (x * y[:, :1]).mean(0)[:, None], **close)
    pipe.train(batch, rng.default_generator.branches(2))
    np.testing.assert_allclose(layer.bias.grad.numpy(), 5 * y[:, :1].mean(0), **close)


def test_as_many_activations_are_held_as_the_schedule_says(monkeypatch):
    live, most = [0, 0], [0, 0]
    plan = Plan.from_degrees(pp=2, schedule="1F1B", num_microbatches=6)
    _, pipe = pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], [lambda out, y: out.mean()], plan)
    do = run.Run.do

    def counted(self, task):
        do(self, task)
        for stage, k in itertools.product(range(2), range(2)):
            if stage == k:
                live[stage] = sum(chunk == k for chunk, _ in self._done)
                most[stage] = max(most[stage], live[stage])

    monkeypatch.setattr(run.Run, "do", counted)
    x = np.ones((6, 4), np.float32)
    pipe.train(cut([x, x], 6, None), rng.default_generator.branches(6))
    schedule = pipe.schedule(6)
    assert most == [schedule.peak_live(0), schedule.peak_live(1)] == [2, 1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.ones(4), "a batch is .inputs, labels., got a ndarray"),
        ([np.ones((6, 2)), np.ones((4, 2))], "rows"),
        ([np.ones((6, 2)), np.ones((6, 2))], "6 rows, a batch has 8: 2 microbatches of 4"),
        ([[np.ones((4, 2))], np.ones((8, 2))], "a list of 1 microbatches, there must be 2"),
        ([(np.ones((8, 2)), np.ones((7, 2))), np.ones((8, 2))], r"\[7, 8\] rows"),
        (iter([[np.ones((4, 2)), np.ones((4, 2))]]), "ended after 1"),
    ],
)
def test_a_batch_that_is_none_is_refused(data, message):
    with pytest.raises(ShapeError, match=message):
        cut(data, 2, 4)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out, y: out, r"one element, got shape \[2, 4\]"),
        (lambda out, y: (out.mean(), y), "got a tuple"),
        (lambda out, y: y.mean(), "stop_gradient=True"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss, message):
    x = np.ones((2, 4), np.float32)
    _, pipe = pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], [loss], Plan.from_degrees(pp=2))
    with pytest.raises(GradError, match=message) as caught:
        pipe.train(cut([x, x], 1, None), rng.default_generator.branches(1))
    assert any("F of microbatch 0, chunk 1 on stage 1" in note for note in caught.value.__notes__)


def test_shares_that_are_not_the_model_s_are_refused():
    plan = Plan.from_degrees(pp=2, num_microbatches=2, chunk_items=[3, 2])
    with pytest.raises(ConfigError, match=r"chunk_items=\[3, 2\] are 5 items, Chain has 8; make them 8"):
        in_chunks(chain(), plan)
    with pytest.raises(ConfigError, match="for a PipelineLayer, which is cut by its seg_method; leave them out"):
        in_chunks(PipelineLayer([nn.ReLU(), nn.ReLU()], num_stages=2), plan)


def test_stages_take_devices_of_their_kinds():
    plan = Plan.from_degrees(pp=2, dp=2, num_microbatches=2, stage_devices=["cpu", "cpu"], order=("dp", "pp"))
    stages = Layout(plan).stages
    assert [[device.id for device in stage.mesh.devices.flat] for stage in stages] == [[0, 1], [2, 3]]
    with pytest.raises(PlacementError, match=r"needs 4 devices of 'cpu', 3 are there; have fewer stages on them"):
        Layout(plan, jax.devices()[:3])
    with pytest.raises(PlacementError, match=r"needs 2 devices of 'gpu', 0 are there"):
        Layout(replace(plan, stage_devices=("cpu", "gpu")))


def test_a_model_that_is_not_in_chunks_is_refused():
    with pytest.raises(PlacementError, match="needs a model in 2 chunks, Linear has 0"):
        apply_plan(Plan.from_degrees(pp=2), nn.Linear(2, 2), jax.devices()[:2])
    assert layout.active.layout is None


def test_a_gradient_that_is_no_plain_sum_over_rows_is_summed_as_it_is_made(caplog):
    g = np.random.default_rng(5)
    batch = cut([g.standard_normal((8, 4), np.float32), g.standard_normal((8, 2), np.float32)], 2, None)

    def grads(**degrees):
        paddle.seed(1)
        plan = Plan.from_degrees(num_microbatches=2, **degrees)
        layers, pipe = pipeline([nn.Linear(4, 3), nn.Linear(3, 2)], [nn.functional.mse_loss], plan)
        layers.parameters()[0].register_hook(lambda gradient: gradient.tanh())  # of the sum over rows, not of addends
        for _ in range(2):
            pipe.train(batch, rng.default_generator.branches(2))
        return {name: p.grad.numpy() for name, p in layers.named_parameters()}

    want = grads()
    clear_plan()
    with caplog.at_level("INFO", logger="polyreme.jit"):
        gradients = grads(pp=2, dp=2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "gradients of 1 of 2 parameters are summed over devices by every microbatch" in line
    for name, value in want.items():
        # two steps of 8 rows, below 8
        np.testing.assert_allclose(gradients[name], value, rtol=0, atol=2.0**-23 * 64, err_msg=name)


class Attend(nn.Layer):
    """Attention as its formula says."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (t.transpose([0, 2, 1, 3]) for t in self.qkv(x).reshape([x.shape[0], x.shape[1], 2, 12]).chunk(3, -1))
        scores = paddle.matmul(q, k, transpose_y=True) * 0.5
        out = paddle.matmul(nn.functional.softmax(scores), v).transpose([0, 2, 1, 3])
        return x + out.reshape(x.shape)


def next_token_loss(logits, ids):
    return nn.functional.cross_entropy(logits[:, :-1].reshape([-1, 1024]), ids[:, 1:].reshape([-1]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("degrees", [{"schedule": "1F1B", "dp": 2}, {"schedule": "ZBH1", "mp": 2}])
def test_plain_layers_of_stages_are_fused(degrees, caplog):
    g = np.random.default_rng(5)
    ids = g.integers(0, 1024, (8, 6))

    def grads(fuse, **degrees):
        paddle.seed(1)
        plan = Plan.from_degrees(num_microbatches=2, **degrees)
        items = [nn.Embedding(1024, 8), Attend(), Attend(), nn.Linear(8, 1024)]
        layers, pipe = pipeline(items, [next_token_loss], plan)
        paddle.set_flags({"FLAGS_fuse_captured": fuse})
        try:
            losses = pipe.train(cut([ids, ids], 2, None), rng.default_generator.branches(2))
        finally:
            paddle.set_flags({"FLAGS_fuse_captured": True})
        assert pipe.fusions() == (["attention", "attention", "linear_cross_entropy"] if fuse else [])
        return [float(v) for v in losses], {name: p.grad.numpy() for name, p in layers.named_parameters()}

    want = grads(False)
    clear_plan()
    with caplog.at_level("INFO", logger="polyreme.jit"):
        found = grads(True, pp=2, **degrees)
    assert not caplog.records  # no gradient is summed over devices by every microbatch
    check(found, want, terms=8 * 6 * 1024)
