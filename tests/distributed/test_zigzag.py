"""Sequences in zigzag order: models and attention equal one device, whoever wrote them, and send what they did."""

import functools
import re
from collections import Counter

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme.core import layout
from polyreme.core.layout import Layout
from polyreme.core.rng import default_generator
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from polyreme.nn import functional as F
from polyreme.ops.attention import over_devices

EPS = np.finfo(np.float32).eps
TOKENS = np.random.default_rng(0).integers(0, 128, (2, 4, 16))


class NoWordOfOrder(Llama):
    """A model of a user's, which does not say that it asks where its tokens are."""


MODELS = {
    "llama": lambda: Llama(LlamaConfig.nano(num_layers=1)),
    "gpt": lambda: GPT(GPTConfig.nano(num_layers=1)),
    "mixtral": lambda: Mixtral(MixtralConfig.nano(num_layers=1)),
    "a user's": lambda: NoWordOfOrder(LlamaConfig.nano(num_layers=1)),
}


@pytest.fixture(autouse=True)
def own_generator():
    """The key moves onto the mesh; later tests get theirs back where it was."""
    holder = default_generator.key_state()
    before = holder._array + 0
    yield
    holder._array = before
    layout.active.layout = None


def train(name, plan=None):
    """(loss, gradients, compiled program) of one captured step."""
    paddle.seed(3)
    model = MODELS[name]()
    batch = [Tensor(a) for a in TOKENS]
    if plan is not None:
        placed = apply_plan(plan, model, jax.devices()[: plan.mesh.size])
        batch = [shard_batch(placed, a, "batch", None) for a in TOKENS]

    @to_static
    def step(tokens, labels):
        loss = model(tokens, labels)
        loss.backward()
        return loss

    loss = step(*batch)
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters()}
    compiled = step.compiled(*batch)
    clear_plan()
    return loss.item(), gradients, compiled


def collectives(compiled):
    kinds = r"= .*? (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return Counter(re.findall(kinds, compiled.as_text()))


@pytest.mark.slow
@pytest.mark.slow_cases("gpt", "mixtral")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_one_device(name):
    want, wanted, _ = train(name)
    plan = Plan.from_degrees(dp=2, sep=2, sep_attention="ring", sep_order="zigzag")
    loss, gradients, compiled = train(name, plan)
    # as in test_segment_parallel.py
    assert abs(loss - want) <= EPS * np.sqrt(64 + 128 + 32) * want
    for key, gradient in gradients.items():
        scale = np.abs(wanted[key]).max()
        assert np.abs(gradient - wanted[key]).max() <= 4 * EPS * np.sqrt(64 + 10 * 128) * scale, key
    # the ring's alone: tokens, labels and positions go nowhere; else two permutes of q, k, v, the result and their
    # gradients
    moves = 6 if name != "a user's" else 6 + 16
    assert name == "mixtral" or collectives(compiled) == {"collective-permute": moves}


@pytest.mark.slow
def test_outputs_are_in_their_own_order():
    def outputs(model, tokens):
        return to_static(lambda tokens: (model.hidden(tokens), model(tokens)))(tokens)

    paddle.seed(3)
    model = MODELS["llama"]()
    want = outputs(model, Tensor(TOKENS[0]))
    placed = apply_plan(Plan.from_degrees(dp=2, sep=4), model)
    results = outputs(model, shard_batch(placed, TOKENS[0], "batch", "seq"))
    assert model.token_order(16) == 4
    for got, wanted in zip(results, want, strict=True):
        # normed, so of size 1, after 10 sums of up to 128 terms
        assert np.abs(got.numpy() - wanted.numpy()).max() <= 4 * EPS * np.sqrt(10 * 128) * np.abs(wanted.numpy()).max()


def test_when_models_keep_their_tokens_in_zigzag():
    def ways(model, seq=16, **settings):
        plan = Plan.from_degrees(**{"sep": 4, **settings})
        with layout.using(Layout(plan, jax.devices()[: plan.mesh.size])):
            return model.token_order(seq)

    llama = MODELS["llama"]()  # 4 query heads, 2 key heads
    assert ways(llama) == 4
    assert ways(llama, sep_order="contiguous") == 1
    assert ways(llama, seq=12) == 1
    assert ways(llama, sep=2) == 1  # by Ulysses
    assert ways(llama, sep=2, sep_order="zigzag") == 2
    assert ways(llama, sep=2, sep_attention="ring") == 2
    assert ways(llama, sep_attention="gather") == 4
    assert ways(llama, sep_attention="usp") == 4
    assert llama.token_order(16) == 1
    assert ways(MODELS["a user's"]()) == 1
    ring = {"sep": 4, "sep_attention": "ring"}
    assert ways(MODELS["gpt"](), **ring) == 4
    # numbers of dropout, and a capacity that the first tokens take, belong to places in a row
    assert ways(GPT(GPTConfig.nano(dropout=0.1)), **ring) == 1
    assert ways(Mixtral(MixtralConfig.nano(capacity_factor=1.5)), **ring) == 1
    with pytest.raises(ShapeError, match=r"20 tokens .* 8 equal chunks of a zigzag over 4 devices; make it 16 or 24"):
        ways(llama, seq=20, sep_order="zigzag")


@functools.cache
def attention_inputs():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 16, h, 4)).astype(np.float32) for h in (4, 2, 2))
    # three documents in a row, others in the second row
    ends = np.stack([np.repeat([5, 11, 16], [5, 6, 5]), np.repeat([2, 16], [2, 14])]).astype(np.int32)
    return q, k, v, ends[:, None, :, None], rng.standard_normal((16, 16)).astype(np.float32)


def packed(q, k, v, ends, mask):
    return F.flashmask_attention(q, k, v, ends, causal=True, return_softmax_lse=True)


def masked(q, k, v, ends, mask):
    return [F.scaled_dot_product_attention(q, k, v, mask, is_causal=True, dropout_p=0.25)]


@pytest.mark.slow_cases("packed")
@pytest.mark.parametrize("attend", [packed, masked])
def test_attention_of_code_that_knows_of_no_order(attend):
    @to_static
    def call(q, k, v, ends, mask):
        for x in (q, k, v, mask):
            x.stop_gradient = False
        paddle.seed(3)
        outs = attend(q, k, v, ends, mask)
        weights = paddle.arange(16, dtype="float32").reshape([1, 16, 1, 1])
        wanted = [q, k, v] if attend is packed else [q, k, v, mask]
        return [*outs, *paddle.grad([(outs[0] * weights).sum()], wanted)]

    want = [x.numpy() for x in call(*map(Tensor, attention_inputs()))]
    plan = Plan.from_degrees(sep=2, mp=2, sep_order="zigzag")
    with layout.using(Layout(plan, jax.devices()[:4])):
        over = over_devices.exchange((2, 16, 4, 4), (2, 16, 2, 4), causal=True)
        results = [x.numpy() for x in call(*map(Tensor, attention_inputs()))]
    assert over.reorders
    assert over.split.zigzag
    for got, wanted in zip(results, want, strict=True):
        # sums of 16 values of size up to 4 and, for the gradients, of 32 such
        assert np.abs(got - wanted).max() <= 4 * 32 * EPS * max(1, np.abs(wanted).max())


def test_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match=r"'zigzag' .* sep=1 .* set sep"):
        Plan.from_degrees(sep_order="zigzag")
    with pytest.raises(ConfigError, match=r"'zigzag' .* 'ulysses', .* set sep_attention to 'ring'"):
        Plan.from_degrees(sep=2, sep_attention="ulysses", sep_order="zigzag")
    with pytest.raises(ConfigError, match=r"sep_order 'zig' .*did you mean 'zigzag'"):
        Plan.from_degrees(sep=2, sep_order="zig")
    q = Tensor(np.ones((1, 12, 2, 4), np.float32))
    placed = Layout(Plan.from_degrees(sep=4, sep_order="zigzag"), jax.devices()[:4])
    with layout.using(placed):
        with pytest.raises(ShapeError, match="make it 8 or 16, or set sep_order to contiguous"):
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert F.scaled_dot_product_attention(q, q, q).shape == [1, 12, 2, 4]  # whole, so in its own order
    with layout.using(placed.in_zigzag(4)), pytest.raises(ShapeError, match="12 queries in zigzag order and 4 keys"):
        F.scaled_dot_product_attention(q, q[:, :4], q[:, :4])
