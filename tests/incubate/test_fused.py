"""The fused functions and layers against what they are made of, in NumPy."""

import numpy as np
import pytest

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.incubate import nn
from polyreme.incubate.nn import functional as I
from polyreme.jit import to_static

EPS = np.finfo("float32").eps
# sums of at most 16 products, norms of 4 and 8 numbers, four maps after each other, of values about 8
CLOSE = {"rtol": 512 * EPS, "atol": 512 * 8 * EPS}
B, S, E, H, D = 2, 3, 8, 2, 4


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def t(x):
    return to_tensor(np.array(x))


def near(got, want):
    np.testing.assert_allclose(got.numpy(), want, **CLOSE)


def layer_norm(x, scale=1.0, bias=0.0, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + bias


def rms_norm(x, scale=1.0, bias=None, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def attend(q, k, v, mask=0.0):
    """[b, s, h, d], [b, t, n, d] twice -> [b, s, h * d]."""
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    weights = np.exp(np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1]) + mask)
    return np.einsum("bhst,bthd->bshd", weights / weights.sum(-1, keepdims=True), v).reshape(*q.shape[:2], -1)


X, Y = random(B, S, E), random(B, S, E, seed=1)


def test_linear_maps_and_activations():
    w, b = random(E, 6, seed=2), random(6, seed=3)
    near(I.fused_linear(t(X), t(w.T), t(b), transpose_weight=True), X @ w + b)
    near(
        I.fused_matmul_bias(t(X[0].T), t(w), t(b), transpose_x=True) if S == E else I.fused_matmul_bias(t(X), t(w)),
        X @ w,
    )
    near(I.fused_matmul_bias(t(X[0]), t(Y[0]), None, True), X[0].T @ Y[0])
    near(I.fused_linear_activation(t(X), t(w), t(b), activation="relu"), np.maximum(X @ w + b, 0))
    near(
        I.fused_bias_act(t(X), t(random(E)), act_method="swiglu"),
        (z := X + random(E))[..., :4] * sigmoid(z[..., :4]) * z[..., 4:],
    )
    with pytest.raises(ConfigError, match="activation='tanh'"):
        I.fused_linear_activation(t(X), t(w), t(b), activation="tanh")
    with pytest.raises(ConfigError, match="activation 'softplus2'"):
        I.fused_bias_act(t(X), act_method="softplus2")
    with pytest.raises(ConfigError, match=r"quant_scale=0.5 cannot"):
        I.fused_bias_act(t(X), quant_scale=0.5)


def test_dropout_add_and_norms():
    near(I.fused_dropout_add(t(X), t(Y), 0.25, training=False, mode="downscale_in_infer"), X * 0.75 + Y)
    w, b = random(E, seed=2), random(E, seed=3)
    summed = X + b + 0.5 * Y
    out, residual, mean, inverse = I.fused_layer_norm(t(X), t(w), t(b), 1e-5, 0.5, 2, t(b), t(Y))
    near(out, layer_norm(summed, w, b))
    near(residual, summed)
    near(mean, summed.mean(-1).ravel())
    near(inverse, 1 / np.sqrt(summed.var(-1).ravel() + 1e-5))
    near(I.fused_layer_norm(t(X), None, None, 1e-5, 0.5, 2, t(b), t(Y))[0], summed)
    out, residual = I.fused_rms_norm(t(X), t(w), t(b), 1e-5, -1)
    near(out, rms_norm(X, w) + b)
    assert residual is None
    for got, want in zip(
        I.fast_ln(t(X), t(w), t(b)),
        (layer_norm(X, w, b), X.mean(-1).ravel(), 1 / np.sqrt(X.var(-1).ravel() + 1e-5)),
        strict=True,
    ):
        near(got, want)
    for fn in (I.fast_rms_norm, I.fused_rms_norm_ext):
        near(fn(t(X), t(w))[0], rms_norm(X, w))
        near(fn(t(X), t(w))[1], 1 / np.sqrt((X * X).mean(-1).ravel() + 1e-5))
    with pytest.raises(ShapeError, match="begin_norm_axis=3"):
        I.fused_layer_norm(t(X), t(w), t(b), 1e-5, begin_norm_axis=3)
    with pytest.raises(ConfigError, match=r"quant_max_bound=127.0 cannot"):
        I.fused_rms_norm(t(X), t(w), t(b), 1e-5, quant_max_bound=127.0)


def values(layer, seed=5):
    """Random values for every parameter, which are then returned by name."""
    for at, p in enumerate(layer.parameters()):
        p.set_value(random(*p.shape, seed=seed + at))
    return {k: v.numpy() for k, v in layer.state_dict().items()}


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("before", [False, True])
def test_the_encoder_layer(before):
    layer = nn.FusedTransformerEncoderLayer(E, H, 12, activation="relu", normalize_before=before)
    p = values(layer)
    layer.eval()
    mask = np.tril(np.ones((S, S), "int64"))
    ln = {k.split(".")[-1]: v for k, v in p.items()}
    normed = layer_norm(X, ln["pre_ln_scale"], ln["pre_ln_bias"]) if before else X
    q, k, v = np.moveaxis(np.einsum("bse,nhde->bsnhd", normed, ln["qkv_weight"]) + ln["qkv_bias"], 2, 0)
    out = X + attend(q, k, v, np.where(mask, 0, -np.inf)) @ ln["linear_weight"] + ln["linear_bias"]
    out = out if before else layer_norm(out, ln["ln_scale"], ln["ln_bias"])
    normed = layer_norm(out, ln["_ln1_scale"], ln["_ln1_bias"]) if before else out
    want = (
        out
        + np.maximum(normed @ ln["_linear1_weight"] + ln["_linear1_bias"], 0) @ ln["_linear2_weight"]
        + ln["_linear2_bias"]
    )
    want = want if before else layer_norm(want, ln["_ln2_scale"], ln["_ln2_bias"])
    near(layer(t(X), t(mask)), want)
    # place by place with a cache is the same as all at once under a causal mask
    cache, rows = t(np.zeros((2, B, H, 0, D), "float32")), []
    for i in range(S):
        row, cache = layer(t(X[:, i : i + 1]), cache=cache)
        rows.append(row.numpy())
    np.testing.assert_allclose(np.concatenate(rows, 1), want, **CLOSE)
    layer.train()
    layer(t(X)).sum().backward()
    assert all(w.grad is not None for w in layer.parameters())


def test_small_layers_and_what_they_refuse():
    near((layer := nn.FusedLinear(E, 4, transpose_weight=True))(t(X)), X @ layer.weight.numpy().T)
    layer = nn.FusedBiasDropoutResidualLayerNorm(E)
    p = values(layer)
    layer.eval()
    near(layer(t(X), t(Y)), layer_norm(X + p["linear_bias"] + Y, p["ln_scale"], p["ln_bias"]))
    drop = nn.FusedDropoutAdd(0.5)
    drop.eval()
    near(drop(t(X), t(Y)), X + Y)
    layer = nn.FusedMultiHeadAttention(E, H, 0.0, 0.5, transpose_qkv_wb=True)
    p = values(layer)
    layer.eval()
    q, k, v = np.moveaxis((X @ p["qkv_weight"] + p["qkv_bias"]).reshape(B, S, 3, H, D), 2, 0)
    near(
        layer(t(X)),
        layer_norm(X + attend(q, k, v) @ p["linear_weight"] + p["linear_bias"], p["ln_scale"], p["ln_bias"]),
    )
    out = I.fused_multi_head_attention(
        t(X),
        t(p["qkv_weight"]),
        t(np.eye(E, dtype="float32")),
        qkv_bias=t(p["qkv_bias"]),
        attn_dropout_rate=0.5,
        dropout_rate=0.0,
        training=False,
        mode="downscale_in_infer",
        pre_layer_norm=False,
        add_residual=False,
        num_heads=H,
        transpose_qkv_wb=True,
    )
    near(out, layer_norm(attend(q, k, v) / 2))
    for make, match in (
        (lambda: nn.FusedMultiHeadAttention(E, 3), "not a multiple"),
        (lambda: nn.FusedMultiHeadAttention(E, 2, need_weights=True), "need_weights=True"),
        (lambda: nn.FusedFeedForward(E, 4, nranks=2), "nranks=2"),
        (lambda: nn.FusedFeedForward(E, 4)(t(X), cache=t(X)), "cache given"),
        (lambda: layer(t(X), t(Y)), "key or value differs"),
        (lambda: I.fused_multi_head_attention(t(X), t(X), t(X), transpose_qkv_wb=True), "num_heads=-1"),
        (lambda: I.fused_feedforward(t(X), t(X), t(X), ring_id=0), "ring_id=0"),
        (lambda: nn.FusedMultiTransformer(E, H, 4), "num_layers=-1"),
        (lambda: nn.FusedMultiTransformer(E, 3, 4, num_layers=1), "not a multiple"),
        (lambda: nn.FusedMultiTransformer(E, H, 4, num_layers=2, qkv_weight_attrs=[None]), "1 attrs for 2 layers"),
    ):
        with pytest.raises(ConfigError, match=match):
            make()
    with pytest.raises(ShapeError, match="qkv_weight"):
        I.fused_multi_head_attention(t(X), t(random(3, H, D, 5)), t(X))


def turned(x, cos, sin):
    """Neighbours of [b, s, h, d] by angles [s, d]."""
    y = np.zeros(x.shape)
    y[..., ::2] = x[..., ::2] * cos[:, None, ::2] - x[..., 1::2] * sin[:, None, ::2]
    y[..., 1::2] = x[..., 1::2] * cos[:, None, 1::2] + x[..., ::2] * sin[:, None, 1::2]
    return y


def stack(x, p, layers, norm, before, gated, n, mask, alpha=1.0, cos=None, sin=None):
    def at(kind, i):
        return p.get(f"{kind}.{i}", 0.0)

    for i in range(layers):
        normed = norm(x, at("ln_scales", i), at("ln_biases", i)) if before else x
        w = at("qkv_weights", i)
        qkv = (normed @ w.reshape(-1, E).T + np.ravel(at("qkv_biases", i))).reshape(*x.shape[:2], -1, D)
        q, k, v = qkv[:, :, : -2 * n], qkv[:, :, -2 * n : -n], qkv[:, :, -n:]
        q, k = (q, k) if cos is None else (turned(q, cos, sin), turned(k, cos, sin))
        x = alpha * x + attend(q, k, v, mask) @ at("linear_weights", i) + at("linear_biases", i)
        x = x if before else norm(x, at("ln_scales", i), at("ln_biases", i))
        normed = norm(x, at("ffn_ln_scales", i), at("ffn_ln_biases", i)) if before else x
        hidden = normed @ at("ffn1_weights", i) + at("ffn1_biases", i)
        half = hidden.shape[-1] // 2
        hidden = (
            hidden[..., :half] * sigmoid(hidden[..., :half]) * hidden[..., half:] if gated else np.maximum(hidden, 0)
        )
        x = alpha * x + hidden @ at("ffn2_weights", i) + at("ffn2_biases", i)
        x = x if before else norm(x, at("ffn_ln_scales", i), at("ffn_ln_biases", i))
    return x


CAUSAL = np.where(np.tril(np.ones((S, S), bool)), 0, -np.inf).astype("float32").reshape(1, 1, S, S)


@pytest.mark.slow_cases("True-True")
@pytest.mark.parametrize(("before", "captured"), [(True, True), (False, False)])
def test_the_stack_at_once_and_token_by_token(before, captured):
    options = (
        {"norm_type": "rmsnorm", "activation": "swiglu", "gqa_group_size": 1}
        if before
        else {
            "activation": "relu",
            "residual_alpha": 0.5,
            "ln_bias_attrs": [True, True],
            "qkv_bias_attrs": [True, True],
        }
    )
    options = {k: [None, None] if isinstance(v, list) else v for k, v in options.items()}
    layer = nn.FusedMultiTransformer(E, H, 6, normalize_before=before, num_layers=2, **options)
    p = values(layer)
    layer.eval()
    cos, sin = random(6, D, seed=8), random(6, D, seed=9)
    rotary = np.broadcast_to(np.stack([cos, sin])[:, None, None], (2, B, 1, 6, D)).astype("float32")
    n = 1 if before else H
    want = stack(
        X, p, 2, rms_norm if before else layer_norm, before, before, n, CAUSAL, 1.0 if before else 0.5, cos[:S], sin[:S]
    )
    near(layer(t(X), t(CAUSAL), rotary_embs=t(rotary), rotary_emb_dims=1), want)
    caches = [t(np.zeros((2, B, n, 5, D), "float32")) for _ in range(2)]
    first, _ = layer(t(X[:, :1]), caches=caches, rotary_embs=t(rotary), rotary_emb_dims=1)
    near(first, want[:, :1])

    def step(x, place):
        return layer(x, caches=caches, rotary_embs=t(rotary), rotary_emb_dims=1, time_step=place)[0]

    step = to_static(step) if captured else step
    for i in range(1, S):
        near(step(t(X[:, i : i + 1]), t(np.array([i], "int32"))), want[:, i : i + 1])


def test_the_stack_with_lengths_prefixes_and_refusals():
    layer = nn.FusedMultiTransformer(E, H, 6, num_layers=1, activation="relu")
    p = values(layer)
    layer.eval()
    hidden = np.where(np.arange(S) < np.array([[2], [3]]), 0, -np.inf).reshape(B, 1, 1, S)
    near(layer(t(X), seq_lens=t(np.array([2, 3], "int32"))), stack(X, p, 1, layer_norm, True, False, H, hidden))
    # a prefix given apart is a prefix that went before
    whole, cache = layer(t(X), t(CAUSAL), caches=[t(np.zeros((2, B, H, 4, D), "float32"))])
    prefix = t(cache[0].numpy()[:, :, :, :1])
    apart, grown = layer(
        t(X[:, 1:]), t(CAUSAL[:, :, 1:]), caches=[t(np.zeros((2, B, H, 4, D), "float32"))], pre_caches=[prefix]
    )
    near(apart, whole.numpy()[:, 1:])
    near(grown[0], cache[0].numpy())
    for settings, match in (
        ({"rotary_emb_dims": 2}, "rotary_emb_dims=2"),
        ({"time_step": t(np.array([0]))}, "time_step needs cache_kvs"),
        ({"beam_offset": t(np.array([0]))}, "beam_offset"),
    ):
        with pytest.raises(ConfigError, match=match):
            layer(t(X), **settings)
    with pytest.raises(IndexError, match="3 more after 0"):
        layer(t(X), caches=[t(np.zeros((2, B, H, 2, D), "float32"))])
    with pytest.raises(ConfigError, match="norm_type='batch'"):
        nn.FusedMultiTransformer(E, H, 6, num_layers=1, norm_type="batch")(t(X))
