"""Attention and Transformer beyond the table: caches give what a whole pass gives, masks, attributes, errors."""

import numpy as np
import pytest

import polyreme.nn as nn
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from tests.nn.table import wave

EPS = float(np.finfo(np.float32).eps)
X, MEMORY = wave((2, 4, 8), 1), wave((2, 3, 8), 2)
# two layers of sums over 8 to 16 terms, with norms between: 512 roundings
CLOSE = {"rtol": 512 * EPS, "atol": 512 * EPS}


def causal(n):
    return to_tensor(np.tril(np.ones((n, n), bool)))


def test_a_growing_cache_gives_what_a_causal_pass_gives():
    layer = nn.MultiHeadAttention(8, 2).eval()
    want = layer(to_tensor(X), attn_mask=causal(4)).numpy()
    cache = layer.gen_cache(to_tensor(X))
    assert cache.k.shape == [2, 2, 0, 4]
    for at in range(4):
        one, cache = layer(to_tensor(X[:, at : at + 1]), cache=cache)
        np.testing.assert_allclose(one.numpy()[:, 0], want[:, at], **CLOSE)
    assert cache.v.shape == [2, 2, 4, 4]


def test_a_static_cache_gives_what_keys_and_values_give():
    layer = nn.MultiHeadAttention(8, 2).eval()
    memory = to_tensor(MEMORY)
    want = layer(to_tensor(X), memory, memory).numpy()
    cache = layer.gen_cache(memory, memory, nn.MultiHeadAttention.StaticCache)
    got, same = layer(to_tensor(X), memory, memory, cache=cache)
    assert same is cache
    np.testing.assert_allclose(got.numpy(), want, **CLOSE)
    given = layer.gen_cache(cache.k, cache.v)
    assert isinstance(given, nn.MultiHeadAttention.Cache)
    with pytest.raises(ConfigError, match="Cache or StaticCache, got type=<class 'int'>"):
        layer.gen_cache(memory, type=int)


def test_masks_of_every_kind_say_the_same():
    layer = nn.MultiHeadAttention(8, 2).eval()
    keep = np.tril(np.ones((4, 4), bool))
    kinds = [
        keep,
        keep.astype(np.int64),
        np.where(keep, 0, -1e9).astype(np.float32),
        np.broadcast_to(keep, (2, 2, 4, 4)).copy(),
    ]
    outs = [layer(to_tensor(X), attn_mask=to_tensor(m)).numpy() for m in kinds]
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], **CLOSE)
    assert not np.allclose(outs[0], layer(to_tensor(X)).numpy())


@pytest.mark.parametrize("hook", ["_prepare_qkv", "compute_kv"])
def test_a_subclass_has_heads_of_its_own(hook):
    class Turned(nn.MultiHeadAttention):
        pass

    def heads(self, *args):
        q, *rest = getattr(super(Turned, self), hook)(*args)
        return (q * 2, *rest)

    setattr(Turned, hook, heads)
    layer, plain = Turned(8, 2).eval(), nn.MultiHeadAttention(8, 2).eval()
    plain.set_state_dict(layer.state_dict())
    # queries, or keys, twice as large are those of projections twice as large
    doubled = plain.q_proj if hook == "_prepare_qkv" else plain.k_proj
    for parameter in doubled.parameters():
        parameter.set_value(parameter * 2)
    x = to_tensor(X)
    np.testing.assert_allclose(layer(x).numpy(), plain(x).numpy(), **CLOSE)
    out, cache = layer(x[:, :2], cache=layer.gen_cache(x))
    out, cache = layer(x[:, 2:], cache=cache)
    want, _ = plain(x[:, 2:], cache=plain(x[:, :2], cache=plain.gen_cache(x))[1])
    np.testing.assert_allclose(out.numpy(), want.numpy(), **CLOSE)
    fixed = (x, x, x, None, layer.gen_cache(x, type=layer.StaticCache))
    np.testing.assert_allclose(layer(*fixed)[0].numpy(), layer(x).numpy(), **CLOSE)


def test_weights_are_a_distribution_and_do_not_change_the_output():
    plain, with_weights = nn.MultiHeadAttention(8, 2).eval(), nn.MultiHeadAttention(8, 2, need_weights=True).eval()
    with_weights.set_state_dict(plain.state_dict())
    out, weights = with_weights(to_tensor(X))
    np.testing.assert_allclose(out.numpy(), plain(to_tensor(X)).numpy(), **CLOSE)
    np.testing.assert_allclose(weights.numpy().sum(-1), 1.0, rtol=8 * EPS)


def test_encoder_and_decoder_caches():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2).eval()
    want = encoder(to_tensor(X), causal(4)).numpy()
    caches = encoder.gen_cache(to_tensor(X))
    for position in range(4):
        one, caches = encoder(to_tensor(X[:, position : position + 1]), cache=caches)
        np.testing.assert_allclose(one.numpy()[:, 0], want[:, position], **CLOSE)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2, nn.LayerNorm(8)).eval()
    memory = to_tensor(MEMORY)
    want = decoder(to_tensor(X), memory, causal(4)).numpy()
    caches = decoder.gen_cache(memory)
    for position in range(4):
        one, caches = decoder(to_tensor(X[:, position : position + 1]), memory, cache=caches)
        np.testing.assert_allclose(one.numpy()[:, 0], want[:, position], **CLOSE)
    grown, fixed = decoder.gen_cache(memory, do_zip=True)
    assert [type(c) for c in grown] == [nn.MultiHeadAttention.Cache] * 2
    assert [type(c) for c in fixed] == [nn.MultiHeadAttention.StaticCache] * 2


def test_stacked_layers_start_from_values_of_their_own():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
    assert not np.array_equal(encoder.layers[0].linear1.weight.numpy(), encoder.layers[1].linear1.weight.numpy())


def test_attributes_for_attention_and_feed_forward():
    one, two, three = (nn.initializer.Constant(v) for v in (1.0, 2.0, 3.0))
    model = nn.Transformer(8, 2, 1, 1, 16, weight_attr=[one, two, three], bias_attr=False)
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[0]
    assert encoder.self_attn.q_proj.weight.numpy()[0, 0] == 1.0
    assert encoder.linear1.weight.numpy()[0, 0] == 3.0
    assert decoder.cross_attn.q_proj.weight.numpy()[0, 0] == 2.0
    assert decoder.linear2.bias is None
    two_entries = nn.TransformerDecoderLayer(8, 2, 16, weight_attr=[one, three])
    assert two_entries.cross_attn.q_proj.weight.numpy()[0, 0] == 1.0
    assert two_entries.linear1.weight.numpy()[0, 0] == 3.0


def test_subsequent_mask():
    mask = nn.Transformer(8, 2, 1, 1, 16).generate_square_subsequent_mask(3).numpy()
    np.testing.assert_array_equal(mask, np.triu(np.full((3, 3), -np.inf), 1))


class Odd(nn.Layer):
    def forward(self, x, mask=None):
        return x


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.MultiHeadAttention(8, 3), "embed_dim 8 is not a multiple of num_heads 3"),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="rellu"), "activation 'rellu' is not in"),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, weight_attr=[None] * 3), "has 2 entries here, got 3"),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 0), "num_layers is at least 1, got 0"),
        (lambda: nn.TransformerEncoder(Odd(), 2), "Odd does not say how it was made"),
    ],
)
def test_bad_input_says_what_to_change(make, match):
    with pytest.raises(ConfigError, match=match):
        make()
