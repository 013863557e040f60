"""polyreme.compat.nn against NumPy, written from the definitions."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.compat import nn
from polyreme.compat.nn import functional as F
from polyreme.errors import ConfigError, ShapeError

EPS = float(np.finfo("float32").eps)


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32")


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def close(got, want, terms):
    np.testing.assert_allclose(got, want, rtol=4 * terms * EPS, atol=4 * terms * EPS)


def test_linear_has_its_weight_the_other_way_round():
    layer, x = nn.Linear(3, 5), normal(2, 3)
    assert layer.weight.shape == [5, 3]
    assert np.abs(layer.weight.numpy()).max() <= 3**-0.5
    close(layer(paddle.to_tensor(x)), x @ layer.weight.numpy().T + layer.bias.numpy(), 4)
    bare = nn.Linear(3, 5, bias=False, dtype="float64")
    assert bare.bias is None
    assert bare.weight.dtype == paddle.float64


def test_pooling_counts_padding_and_can_be_told_the_divisor():
    x = paddle.ones([1, 1, 2, 2])
    assert nn.AvgPool2d(2, 2, 1)(x).numpy().ravel().tolist() == [0.25] * 4
    assert nn.AvgPool2D(2, 2, 1, count_include_pad=False)(x).numpy().ravel().tolist() == [1.0] * 4
    assert nn.AvgPool2D(2, divisor_override=2)(x).item() == 2.0
    assert nn.AvgPool1D(2, 2, 1)(paddle.ones([1, 1, 2])).numpy().ravel().tolist() == [0.5, 0.5]
    assert nn.AvgPool3d(2, divisor_override=4)(paddle.ones([1, 1, 2, 2, 2])).item() == 2.0


def test_softmax_and_unfold():
    x = paddle.to_tensor(normal(2, 3))
    close(nn.Softmax(1)(x), softmax(normal(2, 3)), 3)
    image = paddle.to_tensor(normal(1, 2, 4, 4))
    for got in (nn.Unfold(2, 1, 0, 2)(image), F.unfold(image, 2, stride=2)):
        np.testing.assert_array_equal(got, paddle.nn.functional.unfold(image, 2, 2))


@pytest.mark.parametrize(("mode", "name"), [("reflect", "reflect"), ("replicate", "edge"), ("circular", "wrap")])
def test_padding_begins_at_the_last_dim(mode, name):
    x = normal(2, 3, 4)
    np.testing.assert_array_equal(F.pad(paddle.to_tensor(x), (1, 2), mode), np.pad(x, [(0, 0), (0, 0), (1, 2)], name))
    got = F.pad(paddle.to_tensor(x), [1, 0, 2, 1], mode)
    np.testing.assert_array_equal(got, np.pad(x, [(0, 0), (2, 1), (1, 0)], name))


def test_padding_with_a_value():
    x = paddle.to_tensor(normal(2, 3))
    np.testing.assert_array_equal(
        F.pad(x, (1, 0, 2, 1), value=3.0), np.pad(normal(2, 3), [(2, 1), (1, 0)], constant_values=3)
    )
    with pytest.raises(ShapeError, match=r"\[1, 2, 3\] for shape \[2, 3\]; give pairs"):
        F.pad(x, [1, 2, 3])
    with pytest.raises(ShapeError, match="0 were asked for"):
        F.pad(x, [], "reflect")


def test_attention_with_heads_before_sequence():
    q, k, v = normal(2, 4, 3, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8)
    mask = normal(2, 4, 3, 5)
    wide_k, wide_v = k.repeat(2, 1), v.repeat(2, 1)
    want = softmax(q @ wide_k.swapaxes(-1, -2) * 0.5 + mask) @ wide_v
    arrays = [paddle.to_tensor(a) for a in (q, k, v, mask)]
    close(F.scaled_dot_product_attention(*arrays, scale=0.5, enable_gqa=True), want, 13)
    with pytest.raises(ShapeError, match="4 heads of query, 2 of key; pass enable_gqa=True"):
        F.scaled_dot_product_attention(*arrays)
    causal = np.where(np.tril(np.ones((3, 3), bool)), q @ q.swapaxes(-1, -2) * 8**-0.5, -np.inf)
    close(F.scaled_dot_product_attention(*[paddle.to_tensor(q)] * 3, is_causal=True), softmax(causal) @ q, 13)
    with pytest.raises(ShapeError, match="takes"):
        F.scaled_dot_product_attention(*[paddle.to_tensor(normal(3, 4))] * 3)


def reference(layer, q, k, v, mask):
    """Batch-first attention with the layer's weights in NumPy: (output, weights of each head)."""
    state = {n: p.numpy() for n, p in layer.named_parameters()}
    e, heads = layer.embed_dim, layer.num_heads
    if "in_proj_weight" in state:
        weights, biases = np.split(state["in_proj_weight"], 3), np.split(state["in_proj_bias"], 3)
    else:
        weights, biases = ([state[f"{n}_proj_{what}"] for n in "qkv"] for what in ("weight", "bias"))
    projected = [x @ w.T + b for x, w, b in zip((q, k, v), weights, biases, strict=True)]
    if "bias_k" in state:
        projected[1:] = [
            np.concatenate([t, np.broadcast_to(state[n], (len(t), 1, e))], 1)
            for t, n in zip(projected[1:], ("bias_k", "bias_v"), strict=True)
        ]
    if layer.add_zero_attn:
        projected[1:] = [np.concatenate([t, np.zeros((len(t), 1, e), "float32")], 1) for t in projected[1:]]
    q, k, v = (t.reshape(*t.shape[:2], heads, -1).swapaxes(1, 2) for t in projected)
    mask = np.concatenate([mask, np.zeros((*mask.shape[:-1], k.shape[2] - mask.shape[-1]), "float32")], -1)
    weights = softmax(q @ k.swapaxes(-1, -2) * (e // heads) ** -0.5 + mask)
    done = (weights @ v).swapaxes(1, 2).reshape(len(q), -1, e)
    return done @ state["out_proj.weight"].T + state["out_proj.bias"], weights


@pytest.mark.slow_cases("{}")
@pytest.mark.parametrize(
    "options", [{}, {"kdim": 6, "vdim": 5, "add_bias_kv": True}, {"add_zero_attn": True, "batch_first": True}], ids=str
)
def test_multihead_attention(options):
    layer = nn.MultiheadAttention(8, 2, **options)
    first = layer.batch_first
    q, k, v = normal(2, 3, 8), normal(2, 4, options.get("kdim", 8)), normal(2, 4, options.get("vdim", 8))
    hides, padding = np.zeros((3, 4), bool), np.zeros((2, 4), bool)
    hides[0, 1] = padding[1, 3] = True
    mask = np.where(hides | padding[:, None, None], -np.inf, 0).astype("float32")
    want, weights = reference(layer, q, k, v, mask)
    inputs = [paddle.to_tensor(t if first else t.swapaxes(0, 1)) for t in (q, k, v)]
    masks = {"key_padding_mask": paddle.to_tensor(padding), "attn_mask": paddle.to_tensor(hides)}
    terms = 32  # sums of 8 in four products one after the other
    done, mean = layer(*inputs, **masks)
    close(done.numpy() if first else done.numpy().swapaxes(0, 1), want, terms)
    close(mean, weights.mean(1), terms)
    close(layer(*inputs, **masks, average_attn_weights=False)[1], weights, terms)
    fast, none = layer(*inputs, **masks, need_weights=False)
    assert none is None
    close(fast, done, terms)
    one, one_weights = layer(*(t[0] if first else t[:, 0] for t in inputs), attn_mask=masks["attn_mask"])
    close(one, want[0], terms)
    assert one_weights.shape == list(weights.shape[2:])


def test_multihead_attention_says_what_is_wrong():
    with pytest.raises(ConfigError, match="embed_dim=8 does not divide by num_heads=3"):
        nn.MultiheadAttention(8, 3)
    layer, x = nn.MultiheadAttention(4, 2), paddle.ones([3, 1, 4])
    with pytest.raises(ShapeError, match=r"attn_mask is \[2, 2\], needs \[3, 3\]"):
        layer(x, x, x, attn_mask=paddle.ones([2, 2]))
    with pytest.raises(ShapeError, match=r"key_padding_mask is \[3\], needs \[1, 3\]"):
        layer(x, x, x, key_padding_mask=paddle.ones([3]))
    with pytest.raises(ConfigError, match="is_causal=True only describes attn_mask"):
        layer(x, x, x, is_causal=True)
