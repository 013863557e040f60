"""The fused mixtures of experts against NumPy, token by token."""

import numpy as np
import pytest
import scipy.special as sp

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.incubate.nn import FusedEcMoe
from polyreme.incubate.nn import functional as I
from polyreme.jit import to_static

EPS = np.finfo("float32").eps
# sums of at most 32 products, two maps after each other, of values about 8
CLOSE = {"rtol": 256 * EPS, "atol": 256 * 8 * EPS}
T, D, F, E, K = 6, 4, 3, 4, 2
RNG = np.random.default_rng(0)
X, LOGITS = RNG.standard_normal((T, D), "float32"), RNG.standard_normal((T, E), "float32")
UP, DOWN = RNG.standard_normal((E, D, 2 * F), "float32"), RNG.standard_normal((E, F, D), "float32")
UP_BIAS, DOWN_BIAS = RNG.standard_normal((E, 1, 2 * F), "float32"), RNG.standard_normal((E, 1, D), "float32")
GATE = RNG.standard_normal((D, E), "float32")


def expert(x, e, bias=UP_BIAS, last=DOWN_BIAS):
    gate, up = np.split(x @ UP[e] + (0 if bias is None else bias[e, 0]), 2)
    return (gate * sp.expit(gate) * up) @ DOWN[e] + (0 if last is None else last[e, 0])


def chosen(logits, groups=False):
    """[t, K] experts and weights."""
    if groups:
        parts = sp.softmax(logits.reshape(-1, K, E // K), -1)
        return parts.argmax(-1) + np.arange(0, E, E // K), parts.max(-1)
    share = sp.softmax(logits, -1)
    best = np.argsort(-share, -1)[:, :K]
    return best, np.take_along_axis(share, best, -1)


def mixed(logits, groups=False, normalize=True):
    best, weights = chosen(logits, groups)
    weights = weights / weights.sum(-1, keepdims=True) if normalize else weights
    return np.stack(
        [sum(w * expert(x, e) for e, w in zip(*at, strict=True)) for x, *at in zip(X, best, weights, strict=True)]
    )


def moe(gate, **options):
    arrays = (X[None], gate, UP, DOWN, UP_BIAS, None, DOWN_BIAS)
    x, *weights = (None if a is None else to_tensor(a) for a in arrays)
    return I.fused_moe(x, *weights, **options).numpy()[0]


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("groups", [False, True])
def test_fused_moe_takes_a_gate_s_weight_or_its_logits(groups):
    np.testing.assert_allclose(moe(GATE, group_moe=groups), mixed(X @ GATE, groups), **CLOSE)
    options = {"norm_topk_prob": False, "group_moe": groups}
    np.testing.assert_allclose(moe(LOGITS[None], **options), mixed(LOGITS, groups, False), **CLOSE)


@pytest.mark.parametrize("groups", [False, True])
def test_dispatch_experts_and_reduction_are_fused_moe(groups):
    rows, counts, place, weights, experts = I.moe_dispatch(to_tensor(X), to_tensor(LOGITS), K, groups)
    best, share = chosen(LOGITS, groups)
    assert experts.tolist() == best.tolist()
    assert counts.tolist() == np.bincount(best.reshape(-1), minlength=E).tolist()
    np.testing.assert_allclose(weights.numpy(), share, **CLOSE)
    np.testing.assert_array_equal(rows.numpy()[place.numpy().T], np.broadcast_to(X[:, None], (T, K, D)))
    in_order = np.take_along_axis(experts.numpy(), np.arange(K)[None], 1)
    assert np.all(np.diff(in_order.reshape(-1)[np.argsort(place.numpy().T.reshape(-1))]) >= 0)
    out = I.moe_ffn(rows, counts, to_tensor(UP), to_tensor(DOWN), to_tensor(UP_BIAS))
    mix = I.moe_reduce(out, weights, place, experts, to_tensor(DOWN_BIAS), True, 2.5)
    np.testing.assert_allclose(mix.numpy(), 2.5 * mixed(LOGITS, groups), **CLOSE)


def test_an_expert_without_rows_and_rows_without_an_expert():
    counts = to_tensor(np.array([2, 0, 3, 0]))
    out = I.moe_ffn(to_tensor(X), counts, to_tensor(UP), to_tensor(DOWN)).numpy()
    owners = [0, 0, 2, 2, 2]
    np.testing.assert_allclose(out[:5], [expert(x, e, None, None) for x, e in zip(X[:5], owners, strict=True)], **CLOSE)
    assert not out[5:].any()


def test_scores_may_be_probabilities_already():
    share = sp.softmax(LOGITS, -1)
    by_share, by_logits = (
        I.moe_dispatch(to_tensor(X), to_tensor(g), K, topk_only_mode=mode)
        for g, mode in ((share, True), (LOGITS, False))
    )
    for a, b in zip(by_share, by_logits, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), **CLOSE)


def test_experts_choose_their_tokens():
    layer = FusedEcMoe(D, F, E, "relu")
    assert list(layer.state_dict()) == ["bmm_weight0", "bmm_bias0", "bmm_weight1", "bmm_bias1"]
    x, gate = RNG.standard_normal((2, 35, D), "float32"), RNG.standard_normal((2, 35, E), "float32")
    share, want = sp.softmax(gate, -1), x.copy()
    up, _, down, _ = (p.numpy() for p in layer.parameters())
    layer.bmm_bias1.set_value(DOWN_BIAS)
    for b, e in np.ndindex(2, E):
        for s in np.argsort(-share[b, :, e])[: 35 // 16]:
            want[b, s] += share[b, s, e] * (np.maximum(x[b, s] @ up[e], 0) @ down[e] + DOWN_BIAS[e, 0])
    tensors = to_tensor(x), to_tensor(gate)
    np.testing.assert_allclose(layer(*tensors).numpy(), want, **CLOSE)
    np.testing.assert_allclose(to_static(layer)(*tensors).numpy(), want, **CLOSE)


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(ConfigError, match="fused_moe: quant_method='weight_only_int8'; weights are not quantized"):
        moe(GATE, quant_method="weight_only_int8")
    with pytest.raises(ConfigError, match="moe_ffn: quant_method='None', ffn2_scale; weights are not"):
        I.moe_ffn(to_tensor(X), to_tensor([T]), to_tensor(UP[:1]), to_tensor(DOWN[:1]), ffn2_scale=to_tensor(GATE))
    with pytest.raises(ShapeError, match=r"fused_moe: gate_weight \[6, 4\] for x \[1, 6, 4\] and 4 experts|do not fit"):
        moe(LOGITS)
    with pytest.raises(ConfigError, match="moe_topk=3 groups of 4 experts"):
        moe(GATE, moe_topk=3, group_moe=True)
    with pytest.raises(ShapeError, match=r"moe_dispatch: x \[1, 6, 4\]"):
        I.moe_dispatch(to_tensor(X[None]), to_tensor(LOGITS), K)
    with pytest.raises(ConfigError, match="FusedEcMoe: act_type='silu'; give 'gelu' or 'relu'"):
        FusedEcMoe(D, F, E, "silu")
    with pytest.raises(ConfigError, match="bias_attr=False; its experts have biases"):
        FusedEcMoe(D, F, E, "relu", bias_attr=False)
    layer, gate = FusedEcMoe(D, F, E, "relu"), to_tensor(LOGITS[None])
    with pytest.raises(ShapeError, match=r"fused_ec_moe: x \[1, 6, 4\]; needs .* seq of at least 16"):
        layer(to_tensor(X[None]), gate)
    with pytest.raises(ConfigError, match="fused_ec_moe: act_type='tanh'"):
        I.fused_ec_moe(to_tensor(X[None]), gate, *layer.parameters(), "tanh")
