"""Segment parallelism: models with the sequence split over devices equal one device and send no more than they need."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
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
from polyreme.mesh.segment import GATHERED_TOKENS
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.nn import functional as F
from polyreme.ops.attention import over_devices

EPS = np.finfo(np.float32).eps
SEQ, ROWS = 16, 4
MODELS = {
    "gpt": lambda: GPT(GPTConfig.nano(num_layers=1, dropout=0.1)),
    "llama": lambda: Llama(LlamaConfig.nano(num_layers=1)),
}
TOKENS = np.random.default_rng(0).integers(0, 128, (2, ROWS, SEQ))


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
    if plan is None:
        batch = [Tensor(a) for a in TOKENS]
    else:
        placed = apply_plan(plan, model, jax.devices()[: plan.mesh.size])
        batch = [shard_batch(placed, a, "batch", "seq") for a in TOKENS]

    @to_static
    def step(tokens, labels):
        loss = model(tokens, labels)
        loss.backward()
        return loss

    loss = step(*batch).item()
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters()}
    compiled = step.compiled(*batch)
    if plan is not None:
        clear_plan()
    return loss, gradients, compiled


@pytest.fixture(scope="module")
def one_device():
    """one_device(name): what train gives there, when first asked for."""
    return functools.cache(train)


PLANS = [
    {"sep": 2},
    {"sep": 4},
    {"sep": 2, "mp": 2},
    {"sep": 2, "sharding": 2, "sharding_stage": 3},
    {"sep": 2, "dp": 2, "mp": 2, "sequence_parallel": True},
    {"sep": 4, "sep_attention": "ring", "recompute": "full"},
    {"sep": 4, "dp": 2, "sep_attention": "gather"},
]


CASES = [
    # each plan with one of the models, in turn; with the others in the slow part
    pytest.param(
        name, settings,
        id=" ".join([name, *(f"{k}{v}" for k, v in settings.items())]),
        marks=[] if at % len(MODELS) == of else [pytest.mark.slow],
    )
    for at, settings in enumerate(PLANS)
    for of, name in enumerate(MODELS)
]  # fmt: skip


@pytest.mark.slow_cases(
    "gpt sep2 dp2 mp2 sequence_parallelTrue",
    "gpt sep2 mp2",
    "gpt sep2",
    "gpt sep4 dp2 sep_attentiongather",
    "llama sep2 sharding2 sharding_stage3",
    "llama sep4 sep_attentionring recomputefull",
)
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_loss_and_every_gradient_equal_one_device(name, settings, one_device):
    want, wanted, _ = one_device(name)
    loss, gradients, _ = train(name, Plan.from_degrees(**settings))
    # the loss is a mean over 64 tokens, each a sum of 128 exponentials of sums of 32 products
    assert abs(loss - want) <= EPS * np.sqrt(ROWS * SEQ + 128 + 32) * want
    for key, gradient in gradients.items():
        # a sum over 64 tokens of products that went through 10 sums of up to 128 terms each
        scale = np.abs(wanted[key]).max()
        assert np.abs(gradient - wanted[key]).max() <= 4 * EPS * np.sqrt(ROWS * SEQ + 10 * 128) * scale, key


def collectives(compiled):
    kinds = r"= .*? (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return Counter(re.findall(kinds, compiled.as_text()))


@pytest.mark.slow_cases("gpt")
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow) if n == "llama" else n for n in MODELS])
def test_a_step_moves_nothing_but_what_attention_needs(name):
    # q, k, v and the result forward, their gradients backward; no activation is gathered, no layer repeats work
    assert collectives(train(name, Plan.from_degrees(sep=2))[2]) == {"all-to-all": 8}
    # k, v once forward; k, v, dk, dv once backward
    ring = Plan.from_degrees(sep=2, sep_attention="ring", sep_order="contiguous")
    assert collectives(train(name, ring)[2]) == {"collective-permute": 2 + 4}


def attend(s=8, t=8, heads=4, kv_heads=4, **options):
    q, k = np.ones((2, s, heads, 4), np.float32), np.ones((2, t, kv_heads, 4), np.float32)
    return F.scaled_dot_product_attention(Tensor(q), Tensor(k), Tensor(k), **options)


def how(heads, kv_heads, seq=8, **settings):
    plan = Plan.from_degrees(**settings)
    with layout.using(Layout(plan, jax.devices()[: plan.mesh.size])):
        found = over_devices.exchange((2, seq, heads, 4), (2, seq, kv_heads, 4))
    return None if found is None else (found.how, found.repeat)


def test_which_exchange_is_taken():
    assert how(4, 4, dp=2) is None
    assert how(4, 4, mp=2, sequence_parallel=True) is None
    assert how(4, 4, sep=4) == ("ulysses", 1)
    assert how(4, 2, sep=4) == ("usp", 1)
    assert how(8, 2, sep=4) == ("gather", 1)
    assert how(3, 3, sep=2) == ("gather", 1)
    assert how(3, 3, seq=2 * GATHERED_TOKENS, sep=2) == ("ring", 1)
    assert how(4, 4, sep=4, sep_attention="ring") == ("ring", 1)
    assert how(4, 4, sep=2, mp=2) == ("ulysses", 1)
    assert how(4, 2, sep=2, mp=2) == ("gather", 1)
    # one key head, which mp cannot split: each query head gets a copy
    assert how(4, 1, sep=2, mp=2) == ("ulysses", 4)
    assert over_devices.exchange((2, 8, 4, 4), (2, 8, 4, 4)) is None


def test_key_heads_that_mp_does_not_divide():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 8, h, 4)).astype(np.float32) for h in (8, 2, 2))
    want = F.scaled_dot_product_attention(Tensor(q), Tensor(k), Tensor(v), is_causal=True).numpy()
    for sep_attention in ("ulysses", "ring", "gather"):
        plan = Plan.from_degrees(mp=4, sep=2, sep_attention=sep_attention)
        with layout.using(Layout(plan)):
            got = F.scaled_dot_product_attention(Tensor(q), Tensor(k), Tensor(v), is_causal=True).numpy()
        # a mean of 8 values of size up to 3
        assert np.abs(got - want).max() <= 3 * 8 * EPS


@pytest.mark.one_in(2)
@pytest.mark.slow_cases("{'sep': 2, 'dp': 2, 'sep_attention': 'gather'}-2", "{'sep': 2, 'sep_attention': 'ring'}-2")
@pytest.mark.slow_cases("{'dp': 2, 'mp': 2}-4")
@pytest.mark.parametrize(
    ("settings", "kv_heads"),
    [
        ({"dp": 2, "mp": 2}, 4),
        ({"sep": 4}, 4),
        ({"sep": 2, "sep_attention": "ring"}, 2),
        ({"sep": 2, "dp": 2, "sep_attention": "gather"}, 2),
        ({"sep": 4, "mp": 2, "sep_attention": "usp", "sep_order": "zigzag"}, 4),
        ({"mp": 4, "sep": 2}, 2),  # mp does not divide the key heads: each query head gets a copy
    ],
    ids=str,
)
def test_attention_by_columns_under_a_plan(settings, kv_heads):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, 16, h, 4)).astype(np.float32) for h in (8, kv_heads, kv_heads))
    ends = np.minimum(np.arange(16) + rng.integers(1, 9, (4, kv_heads, 16)), 16).astype(np.int32)[..., None]

    @to_static
    def call(q, k, v):
        for x in (q, k, v):
            x.stop_gradient = False
        paddle.seed(3)
        out, lse = F.flashmask_attention(q, k, v, Tensor(ends), causal=True, dropout=0.25, return_softmax_lse=True)
        return [out, lse, *paddle.grad([out.sum() + lse.sum()], [q, k, v])]

    want = [x.numpy() for x in call(Tensor(q), Tensor(k), Tensor(v))]
    plan = Plan.from_degrees(**settings)
    with layout.using(Layout(plan, jax.devices()[: plan.mesh.size])):
        results = [x.numpy() for x in call(Tensor(q), Tensor(k), Tensor(v))]
    for got, wanted in zip(results, want, strict=True):
        # sums of 16 values of size up to 4 and, for the gradients, of 16 * 8 / kv_heads such
        assert np.abs(got - wanted).max() <= 16 * 8 * EPS * max(1, np.abs(wanted).max())


def test_eager_attention_with_a_mask_and_without_a_batch():
    rng = np.random.default_rng(1)
    q, mask = rng.standard_normal((8, 4, 4)).astype(np.float32), rng.standard_normal((8, 8)) > 0
    want = F.scaled_dot_product_attention(*[Tensor(q)] * 3, Tensor(mask)).numpy()
    with layout.using(Layout(Plan.from_degrees(sep=8))):
        got = F.scaled_dot_product_attention(*[Tensor(q)] * 3, Tensor(mask)).numpy()
    assert np.abs(got - want).max() <= 3 * 8 * EPS


def test_refuses_what_it_cannot_do():
    with layout.using(Layout(Plan.from_degrees(sep=8))):
        with pytest.raises(
            ShapeError, match=r"12 queries \(dim 'block_seq'\) .* 8 equal parts .* sep; make it 8 or 16"
        ):
            attend(s=12)
        with pytest.raises(ShapeError, match="7 keys"):
            attend(t=7)
    message = r"'ulysses' splits 4 query heads .* 8 devices \(sep\).* choose 'ring'"
    ulysses = Layout(Plan.from_degrees(sep=8, sep_attention="ulysses"))
    with layout.using(ulysses), pytest.raises(ConfigError, match=message):
        attend()
    usp = Layout(Plan.from_degrees(sep=8, sep_attention="usp"))
    with (
        layout.using(usp),
        pytest.raises(ConfigError, match=r"'usp' splits 3 .* 8 devices \(sep\); no part divides both"),
    ):
        attend(heads=3, kv_heads=3)


def test_tokens_joined_by_device_come_apart_again():
    x = jnp.arange(4 * 6 * 3).reshape(4, 6, 3)
    joined = over_devices.join_tokens(x, (2, 3))
    # the first device of each axis holds rows 0 and 1, positions 0 and 1
    np.testing.assert_array_equal(joined[:4], x[:2, :2].reshape(4, 3))
    np.testing.assert_array_equal(over_devices.part_tokens(joined, (4, 6), (2, 3)), x)
    np.testing.assert_array_equal(over_devices.join_tokens(x, (2, 1)), x.reshape(-1, 3))
    labels = over_devices.join_tokens(x[..., 0], (2, 3), kept=0)
    np.testing.assert_array_equal(labels, joined[:, 0])


def test_losses_a_token_keep_their_places():
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal((2, 8, 4)).astype(np.float32)
    weight = rng.standard_normal((4, 10)).astype(np.float32)
    label = Tensor(rng.integers(0, 10, (2, 8)))
    want = F.fused_linear_cross_entropy(Tensor(hidden), Tensor(weight), label, reduction="none").numpy()
    with layout.using(Layout(Plan.from_degrees(dp=2, sep=4))):
        got = F.fused_linear_cross_entropy(Tensor(hidden), Tensor(weight), label, reduction="none").numpy()
    # log of a sum of 10 exponentials of sums of 4 products
    assert np.abs(got - want).max() <= 14 * EPS * np.abs(want).max()
