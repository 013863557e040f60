"""Plain models cut into stages: the same loss, gradients and updated weights as on one device."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.core import rng
from polyreme.distributed.auto_parallel.layers.split_points import SplitPoint
from polyreme.distributed.auto_parallel.stages.chunks import cut_into_stages
from polyreme.distributed.placement import clear_plan
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.training.microbatches import cut
from tests.distributed.auto_parallel.one_device import ROWS, TOKENS, alone, assert_same, bound_of, in_stages, staged

F = nn.functional


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


class Skips(nn.Layer):
    """A skip over the cut, a mask and noise that later layers read too, BatchNorm, and a table of constants."""

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
        table, noise = paddle.arange(6).astype("float32") / 6, paddle.rand([6])
        start = self.norm(self.first(x)) + noise
        x = F.relu(self.second(start)) * keep
        x = self.drop(self.third(x) + table) + start * noise
        out = self.head(self.last_norm(x) * keep)
        return (out**2).mean()


class Reads(nn.Layer):
    """x, and what it attends to of memory."""

    def __init__(self, width):
        super().__init__()
        self.out, self.drop = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x, memory):
        weights = F.softmax(x.matmul(memory, transpose_y=True), -1)
        return x + self.drop(self.out(weights.matmul(memory)))


class Translates(nn.Layer):
    """An encoder whose output every decoder layer reads, and an embedding that gives the output weights too."""

    def __init__(self, vocab=16, width=8):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(vocab, width), nn.Linear(width, width)
        self.decoders = nn.LayerList([Reads(width) for _ in range(2)])

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
    "encoder and decoder, VPP": (
        Translates,
        (TOKENS[:, :5], TOKENS),
        {"pp": 2, "dp": 2, "schedule": "VPP"},
        ["encoder", "decoders.0", "decoders.1"],
    ),
    "skips, ZBVPP, sharded": (
        Skips,
        (ROWS, (ROWS[:, :1] > 0).astype("float32")),
        {"pp": 2, "sharding": 2, "sharding_stage": 3, "schedule": "ZBVPP"},
        ["first", "second", "third"],
    ),
}


# Llama is cut as GPT is; that a model is cut evenly: test_engine
@pytest.mark.one_in(3)
@pytest.mark.slow_cases("gpt, 1F1B, evenly")
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if "V" in c else []) for c in CASES])
def test_stages_equal_one_device(case):
    build, inputs, degrees, at = CASES[case]
    plan = Plan.from_degrees(num_microbatches=2, **degrees)
    want = alone(build, inputs, [2, 2])
    ours = staged(build, inputs, [2, 2], plan, at)
    assert_same(ours, want, inputs)


class Small(nn.Layer):
    """What behaves differently in training and evaluation, and a parameter on either side of the cut."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 3),
            nn.BatchNorm1D(3),
            nn.Dropout(0.5),
            nn.Linear(3, 1),
        )

    def forward(self, x):
        return (self.last(self.drop(self.norm(self.first(x)))) ** 2).mean()


@pytest.mark.slow
def test_modes_shapes_and_frozen_parameters_are_followed():
    """One Pipeline: its model trained, then frozen in part, evaluated and trained with other numbers of rows."""
    rng.seed(3)
    model = Small()
    chunks, pipeline = in_stages(model, (ROWS,), Plan.from_degrees(pp=2, num_microbatches=2), ["norm"])
    assert [len([p for p in chunk.parameters() if p.trainable]) for chunk in chunks] == [4, 2]
    keys = rng.default_generator.branches(2)
    pipeline.train(cut([(ROWS,), ()], 2, None), keys)
    values = {n: np.asarray(t._array, np.float64) for n, t in model.state_dict().items()}
    bound = bound_of({n: v.astype("float32") for n, v in values.items()}, (ROWS,))
    # the statistics of both microbatches, one after another; before them the mean was 0
    hidden = [x.astype("float64") @ values["first.weight"] for x in (ROWS[:4], ROWS[4:])]
    mean = 0.1 * (0.9 * hidden[0].mean(0) + hidden[1].mean(0))
    assert np.abs(values["norm._mean"] - mean).max() <= bound.gradient(mean, 1.0)

    model.eval()
    scale = values["norm.weight"] / np.sqrt(values["norm._variance"] + 1e-5)
    normed = (ROWS.astype("float64") @ values["first.weight"] - values["norm._mean"]) * scale
    out = normed @ values["last.weight"]
    want = 2 * normed.T @ out / len(ROWS)

    def assert_evaluates(losses, ends):
        for loss, part in zip(losses, np.split(out, ends), strict=True):
            assert abs(float(loss) - (part**2).mean()) <= bound.loss((part**2).mean())

    model.last.weight.clear_grad()
    assert_evaluates(pipeline.train(cut([(ROWS,), ()], 2, None), keys), [4])
    assert np.abs(np.asarray(model.last.weight.grad._array) - want).max() <= bound.gradient(want, 1.0)

    for p in (model.first.weight, model.last.bias):
        p.clear_grad(set_to_zero=False)
        p.stop_gradient = True
    model.last.weight.clear_grad()
    uneven = cut([[(ROWS[:5],), (ROWS[5:],)], [(), ()]], 2, None)
    assert_evaluates([loss for ([loss], _) in pipeline.evaluate(uneven, keys)], [5])
    assert_evaluates(pipeline.train(uneven, keys), [5])
    assert model.first.weight.grad is None
    assert model.last.bias.grad is None
    assert np.abs(np.asarray(model.last.weight.grad._array) - want).max() <= bound.gradient(want, 1.0)


@pytest.mark.slow
def test_an_even_cut_balances_arithmetic():
    """Four layers cost what one of four times their size does; a wide cut would cost more to send than it balances."""
    model = nn.Sequential(*[nn.Linear(512, size) for size in (512, 512, 512, 512, 2048)])
    parts = cut_into_stages(model, np.zeros((4, 512), "float32"), 2)
    assert [len(part.parameters()) for part in parts] == [8, 2]
