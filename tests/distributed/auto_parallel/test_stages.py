"""Plain models cut into stages: the same loss, gradients and updated weights as on one device."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.core import layout as layouts
from polyreme.core import rng
from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.split_points import SplitPoint
from polyreme.distributed.auto_parallel.stages import cut_into_stages
from polyreme.distributed.pipeline.batch import cut
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.update import StagedUpdate
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.distributed.prove import Bound
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.models.gpt import GPT, GPTConfig
from polyreme.models.llama import Llama, LlamaConfig
from polyreme.optimizer import Momentum

F = nn.functional
RATE = 0.1
DRAW = np.random.default_rng(0)
TOKENS = DRAW.integers(0, 16, (8, 7))
ROWS = DRAW.standard_normal((8, 4)).astype("float32")


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


def alone(build, inputs, steps):
    """Per step: the loss, gradients, weights and buffers after it, of the model's own loss on one device."""
    clear_plan()
    rng.seed(3)
    model = build()
    optimizer = Momentum(RATE, parameters=model.parameters())

    @to_static
    def gradients(*parts):
        loss = model(*parts) / len(ROWS) * len(parts[0])
        loss.backward()
        return loss

    rng.seed(4)
    found = []
    for count in steps:
        rows = len(ROWS) // count
        total = 0.0
        for i, key in enumerate(rng.default_generator.branches(count)):
            with rng.default_generator.starting_at(key):
                total += float(gradients(*[paddle.to_tensor(x[i * rows : (i + 1) * rows]) for x in inputs]))
        found.append(noted(model, optimizer, total))
    return found


def noted(model, optimizer, loss):
    grads = {n: np.asarray(p.grad._array) for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    optimizer.clear_grad()
    return loss, grads, {n: np.asarray(t._array) for n, t in model.state_dict().items()}


def staged(build, inputs, steps, plan, at=None):
    """The same over the stages of a plan."""
    clear_plan()
    rng.seed(3)
    model = build()
    devices = jax.devices()[: plan.mesh.size]
    rows = len(inputs[0]) // plan.num_microbatches
    with layouts.using(Layout(plan, devices).stages[0]):
        chunks = cut_into_stages(model, tuple(x[:rows] for x in inputs), len(plan.stage_of_chunk), at)
    pipeline = Pipeline(chunks, [lambda loss, _: loss], apply_plan(plan, model, devices, chunks))
    optimizer = Momentum(RATE, parameters=model.parameters())
    update = StagedUpdate(optimizer)
    rng.seed(4)
    found = []
    for count in steps:
        batch = cut([tuple(inputs), ()], count, None)
        losses = pipeline.train(batch, rng.default_generator.branches(count))
        found.append(noted(model, SimpleNamespace(step=update.step, clear_grad=optimizer.clear_grad), 0))
        found[-1] = (float(pipeline.mean(losses, batch)), *found[-1][1:])
    return found, chunks, pipeline


def assert_same(ours, want, inputs):
    """As far as rounding explains: prove's bounds, which a step after the first passes on to the next."""
    weights = want[-1][2]
    bound = Bound.of(SimpleNamespace(weights=lambda: weights, amp=None), inputs)
    for step, ((loss, grads, after), (want_loss, want_grads, want_after)) in enumerate(zip(ours, want, strict=True), 1):
        assert abs(loss - want_loss) <= step * bound.loss(np.asarray(want_loss))
        assert grads.keys() == want_grads.keys()
        largest = max(map(bound.largest, want_grads.values()))
        for name, grad in want_grads.items():
            assert np.abs(grads[name] - grad).max() <= step * bound.gradient(grad, largest), name
        for name, value in want_after.items():
            # a weight moves by the rate times its gradient, a buffer is a mean over the batch
            moved = (
                RATE * bound.gradient(want_grads[name], largest) if name in want_grads else bound.gradient(value, 1.0)
            )
            assert np.abs(after[name] - value).max() <= 2 * step * moved + 2.0**-23 * bound.largest(value), name


class Skips(nn.Layer):
    """A skip over the cut, a mask that later layers read, BatchNorm, and a table that follows from constants."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1D(6)
        self.second = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.25)
        self.third = nn.Linear(6, 6)
        self.last_norm = nn.BatchNorm1D(6)
        self.head = nn.Linear(6, 1)

    def forward(self, x, keep):
        table = paddle.arange(6).astype("float32") / 6
        start = self.norm(self.first(x))
        x = F.relu(self.second(start)) * keep
        x = self.drop(self.third(x) + table) + start
        out = self.head(self.last_norm(x) * keep)
        return (out**2).mean()


class Translates(nn.Layer):
    """An encoder whose output every decoder layer reads, and an embedding that gives the output weights too."""

    def __init__(self, vocab=16, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1)
        self.decoders = nn.LayerList([nn.TransformerDecoderLayer(width, 2, 16, dropout=0.1) for _ in range(2)])

    def forward(self, source, target):
        memory = self.encoder(self.embed(source))
        x = self.embed(target[:, :-1])
        for decoder in self.decoders:
            x = decoder(x, memory)
        logits = x.matmul(self.embed.weight, transpose_y=True)
        return F.cross_entropy(logits.reshape([-1, logits.shape[-1]]), target[:, 1:].reshape([-1]))


CASES = {
    "gpt, 1F1B, evenly": (
        lambda: GPT(GPTConfig.nano(vocab_size=16, hidden_size=8, num_heads=2, seq_len=8, dropout=0.1)),
        (TOKENS[:, :-1], TOKENS[:, 1:]),
        {"pp": 2, "dp": 2},
        None,
    ),
    "llama, ZBH1, by names": (
        lambda: Llama(LlamaConfig.nano(vocab_size=16, hidden_size=8, num_heads=2, num_kv_heads=2, num_layers=2)),
        (TOKENS[:, :-1], TOKENS[:, 1:]),
        {"pp": 2, "mp": 2, "schedule": "ZBH1"},
        {"blocks.0": SplitPoint.END},
    ),
    "skips, 1F1B": (Skips, (ROWS, (ROWS[:, :1] > 0).astype("float32")), {"pp": 2, "dp": 2}, ["second"]),
    "encoder and decoder": (Translates, (TOKENS[:, :5], TOKENS), {"pp": 2, "dp": 2}, ["decoders.0"]),
    "skips, ZBVPP, sharded": (
        Skips,
        (ROWS, (ROWS[:, :1] > 0).astype("float32")),
        {"pp": 2, "sharding": 2, "sharding_stage": 3, "schedule": "ZBVPP"},
        ["first", "second", "third"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_stages_equal_one_device(case):
    build, inputs, degrees, at = CASES[case]
    plan = Plan.from_degrees(num_microbatches=2, **degrees)
    want = alone(build, inputs, [2, 2])
    ours, _, _ = staged(build, inputs, [2, 2], plan, at)
    assert_same(ours, want, inputs)
