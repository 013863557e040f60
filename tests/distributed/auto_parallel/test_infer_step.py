"""Training steps of models whose dims were inferred: equal to one device, with parameters really split."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyreme as paddle
from polyreme import nn
from polyreme.core import rng
from polyreme.distributed.auto_parallel.dims.constrain import constrain_layers, constraints
from polyreme.distributed.auto_parallel.dims.infer import infer_dims
from polyreme.distributed.comm_report import find_collectives
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.models.decoders import gpt
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.parts import decoder
from polyreme.nn import functional as F
from polyreme.optimizer import SGD
from polyreme.vision.models import VisionTransformer
from tests.distributed.auto_parallel.plain_models import Experts, Language, strip

MIXED = Plan.from_degrees(dp=2, mp=2, sharding=2, sharding_stage=3)


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


def step_of(model, loss):
    optimizer = SGD(0.5, parameters=model.parameters())

    def step(x, y):
        found = loss(model(x), y)
        found.backward()
        optimizer.step()
        optimizer.clear_grad()
        return found

    return step


def check_step(make, loss, x, y, plan):
    """One step on one device and one under the plan give the same loss and parameters; -> name -> shape of a shard."""
    rng.seed(1)
    alone = make()
    want = float(to_static(step_of(alone, loss))(paddle.to_tensor(x), paddle.to_tensor(y)))
    rng.seed(1)
    model = make()
    inferred = infer_dims(strip(model), [x], [y], loss)
    inferred.set_dims(plan)
    constrain_layers(model, constraints(inferred))
    layout = apply_plan(plan, model)
    batch = [shard_batch(layout, v, "batch", *[None] * (v.ndim - 1)) for v in (x, y)]
    got = float(to_static(step_of(model, loss))(*batch))
    # a step sums at most a few hundred float32 terms in another order
    assert np.isclose(got, want, rtol=1e-5)
    other = dict(alone.named_parameters())
    for name, p in model.named_parameters():
        assert np.allclose(p.numpy(), other[name].numpy(), rtol=1e-4, atol=2e-5), name
    return {name: p._array.addressable_shards[0].data.shape for name, p in model.named_parameters()}


def flat_loss(logits, labels):
    return F.cross_entropy(logits.reshape([-1, logits.shape[-1]]), labels.reshape([-1]))


@pytest.mark.slow
def test_a_language_model_of_every_kind_of_attention():
    tokens = np.random.RandomState(0).randint(0, 48, (4, 12))
    kinds = ("repeat", "fused", "layer")
    shapes = check_step(lambda: Language(kinds, kv_heads=2), flat_loss, tokens, np.roll(tokens, -1, 1), MIXED)
    want = {
        "tokens.weight": (24, 8),  # vocab over mp, width over sharding
        "blocks.0.attention.q.weight": (8, 8),
        "blocks.0.attention.o.weight": (8, 8),
        "blocks.1.attention.qkv.weight": (8, 24),
        "blocks.1.attention.o.weight": (8, 8),
        "blocks.0.attention.k.weight": (8, 4),
        "blocks.2.attention.q_proj.weight": (8, 8),
        "blocks.0.mlp.up.weight": (8, 24),
        "blocks.0.mlp.down.weight": (12, 8),
        "blocks.2.mlp.0.weight": (8, 12),
        "blocks.2.mlp.2.weight": (12, 8),
    }
    assert {name: shapes[name] for name in want} == want


@pytest.mark.slow
def test_a_vision_transformer():
    images = np.random.RandomState(0).randn(4, 3, 8, 8).astype("float32")
    shapes = check_step(
        lambda: VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=4, num_classes=6),
        F.cross_entropy, images, np.arange(4), MIXED,
    )  # fmt: skip
    assert shapes["blocks.0.attn.qkv.weight"] == (8, 24)
    assert shapes["blocks.0.attn.proj.weight"] == (8, 8)
    assert shapes["blocks.0.mlp.fc1.weight"] == (8, 32)


@pytest.mark.slow
def test_experts_over_three_axes():
    x = np.random.RandomState(0).randn(4, 3, 8).astype("float32")
    plan = Plan.from_degrees(dp=2, ep=2, mp=2)
    held = check_step(Experts, lambda y, want: ((y - want) ** 2).mean(), x, x[::-1].copy(), plan)
    assert held["up"] == (2, 8, 6)
    assert held["down"] == (2, 6, 8)
    assert held["gate.weight"] == (8, 4)


class Wired(nn.Layer):
    """Layers put together by a list of choices: a chain with residual additions, products and norms."""

    def __init__(self, sizes, wires):
        super().__init__()
        ends = [6, *sizes]
        self.layers = nn.LayerList([nn.Linear(a, b) for a, b in zip(ends, sizes, strict=False)])
        self.norms = nn.LayerList([nn.LayerNorm(n) for n in sizes])
        self.wires = wires

    def forward(self, x):
        seen = [x]
        for layer, norm, wire in zip(self.layers, self.norms, self.wires, strict=True):
            y = layer(seen[-1])
            if wire == "norm":
                y = norm(y)
            elif wire == "gelu":
                y = F.gelu(y)
            elif wire == "halves" and y.shape[-1] % 2 == 0:
                y = paddle.concat(y.chunk(2, -1)[::-1], -1)
            others = [s for s in seen if s.shape == y.shape]
            if wire == "add" and others:
                y = y + others[0]
            elif wire == "times" and others:
                y = y * F.sigmoid(others[-1])
            seen.append(y)
        return seen[-1]


WIRES = st.sampled_from(["plain", "norm", "gelu", "halves", "add", "times"])


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from([2, 4, 6]), WIRES), min_size=1, max_size=5))
def test_any_graph_of_linears_trains_as_on_one_device(parts):
    sizes, wires = zip(*parts, strict=True)
    x = np.random.RandomState(0).randn(4, 6).astype("float32")
    y = np.ones((4, sizes[-1]), "float32")
    check_step(lambda: Wired(sizes, wires), lambda out, want: ((out - want) ** 2).mean(), x, y, MIXED)
    clear_plan()


def collectives_of(plan, by_hand, monkeypatch):
    """Wire bytes and number of collectives, by kind and axes, of a step of GPT."""
    model = GPT(GPTConfig.nano(num_layers=1))
    rows = np.zeros((8, 16), np.int64)
    if not by_hand:
        inferred = infer_dims(strip(model), [rows], [rows])
        inferred.set_dims(plan)
        constrain_layers(model, constraints(inferred))
        for module in (gpt, decoder):
            monkeypatch.setattr(module, "constrain", lambda x, *dims: x)
    layout = apply_plan(plan, model)
    batch = [shard_batch(layout, rows, "batch", None) for _ in range(2)]
    optimizer = SGD(0.1, parameters=model.parameters())

    @to_static
    def step(x, y):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    found = Counter()
    for each in find_collectives(step.compiled(*batch).as_text(), plan.mesh):
        found[each.kind, each.axes] += each.total_wire
    clear_plan()
    return found


@pytest.mark.slow
def test_an_inferred_gpt_communicates_no_more_than_one_marked_by_hand(monkeypatch):
    plan = Plan.from_degrees(dp=2, mp=2, sharding=2, sharding_stage=3, sequence_parallel=True)
    want = collectives_of(plan, True, monkeypatch)
    got = collectives_of(plan, False, monkeypatch)
    assert want.total() > 0
    assert all(got[key] <= want[key] for key in got), (got, want)
