"""Attention to caches of keys and values against one query at a time in NumPy."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import static
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.incubate.nn import functional as I
from polyreme.jit import to_static

EPS = np.finfo("float32").eps
# sums of at most 8 products and 8 probabilities, each rounded, of values about 4
CLOSE = {"rtol": 64 * EPS, "atol": 64 * 4 * EPS}
B, H, N, D = 2, 4, 2, 4


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def t(x):
    return to_tensor(np.array(x))


def ints(*values):
    return to_tensor(np.array(values, "int32"))


def one(q, keys, values, added=0.0):
    """Queries [h, d] of one token, keys and values [places, n, d] -> [h, d]."""
    out = np.zeros(q.shape)
    for h in range(len(q)):
        n = h * keys.shape[1] // len(q)
        weights = np.exp(keys[:, n] @ q[h] / np.sqrt(q.shape[1]) + added)
        out[h] = weights @ values[:, n] / weights.sum()
    return out


def parts(token):
    token = token.reshape(H + 2 * N, D)
    return token[:H], token[H : H + N], token[H + N :]


@pytest.mark.parametrize("captured", [False, True])
def test_masked_attention_writes_the_token_and_attends_to_those_before(captured):
    x, cache, bias, mask = (
        random(B, (H + 2 * N) * D),
        random(2, B, N, 6, D, seed=1),
        random(H + 2 * N, D, seed=2),
        random(B, 1, 1, 5, seed=3),
    )
    positions, cache_tensor = np.array([[2], [4]], "int32"), t(cache)

    def call(x, cache):
        return I.masked_multihead_attention(x, cache, t(bias), t(mask), sequence_lengths=t(positions))

    out, new = (to_static(call) if captured else call)(t(x), cache_tensor)
    for b in range(B):
        q, k, v = parts(x[b] + bias.ravel())
        m = positions[b, 0]
        cache[0, b, :, m], cache[1, b, :, m] = k, v
        keys, values = cache[:, b, :, : m + 1].swapaxes(1, 2)
        np.testing.assert_allclose(out.numpy()[b].reshape(H, D), one(q, keys, values, mask[b, 0, 0, : m + 1]), **CLOSE)
    np.testing.assert_allclose(new.numpy(), cache, **CLOSE)
    np.testing.assert_array_equal(cache_tensor.numpy(), new.numpy())


def test_masked_attention_without_lengths_takes_the_place_of_the_masks_last_key():
    x, cache = random(1, 3 * N * D), random(2, 1, N, 4, D, seed=1)
    by_mask = I.masked_multihead_attention(t(x), t(cache), src_mask=t(np.zeros((1, 1, 1, 3), "float32")))
    by_length = I.masked_multihead_attention(t(x), t(cache), sequence_lengths=ints([2]))
    for a, b in zip(by_mask, by_length, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), **CLOSE)


def test_masked_attention_refuses_a_full_cache_and_what_it_cannot_honour():
    x, cache = t(random(1, 3 * N * D)), t(random(2, 1, N, 4, D))
    with pytest.raises(IndexError, match=r"1 more after 4 at .* has 4 places"):
        I.masked_multihead_attention(x, cache, sequence_lengths=ints([4]))
    with pytest.raises(ConfigError, match=r"out_scale=2.0 cannot be honoured"):
        I.masked_multihead_attention(x, cache, sequence_lengths=ints([1]), out_scale=2.0)
    with pytest.raises(ConfigError, match="quant_round_type=0 cannot be honoured"):
        I.masked_multihead_attention(x, cache, sequence_lengths=ints([1]), quant_round_type=0)
    with pytest.raises(ConfigError, match="needs cache_kv"):
        I.masked_multihead_attention(x, cache)
    with pytest.raises(ShapeError, match="numbers a token"):
        I.masked_multihead_attention(t(random(1, 2 * N * D)), cache, sequence_lengths=ints([1]))


def turned(x, cos, sin, neox):
    y = np.zeros(x.shape)
    for i in range(D // 2):
        a, b = (i, i + D // 2) if neox else (2 * i, 2 * i + 1)
        y[:, a] = x[:, a] * cos[i] - x[:, b] * sin[i]
        y[:, b] = x[:, b] * cos[i] + x[:, a] * sin[i]
    return y


ENCODER, DECODER, NOW = [3, 0, 2], [0, 4, 0], [3, 1, 2]
TABLES = np.array([[5, 2, -1], [0, 4, 1], [3, -1, -1]], "int32")


def blocks(qkv, keys, values, **options):
    ends = np.cumsum([0, *NOW]).astype("int32")
    lengths = (t(np.array(x, "int32")[:, None]) for x in (ENCODER, DECODER, NOW))
    return I.block_multihead_attention(
        qkv, keys, values, *lengths, None, None, t(ends[:, None]), None, t(TABLES), block_size=2, **options
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("neox", "captured", "masked"), [(False, False, False), (True, True, False), (False, False, True)]
)
def test_block_attention_of_new_and_continued_sequences(neox, captured, masked):
    tokens = sum(NOW)
    qkv, keys, values = random(tokens, (H + 2 * N) * D), random(6, N, 2, D, seed=1), random(6, N, 2, D, seed=2)
    rope, bias, before = (
        random(2, 1, 6, 1, D // 2, seed=3),
        random((H + 2 * N) * D, seed=4),
        random(2, 3, N, 2, D, seed=5),
    )
    mask, tgt = random(3, 1, 3, 3, seed=6), random(3, 1, 1, 6, seed=7)
    extra = (
        {"mask": t(mask), "tgt_mask": t(tgt)}
        if masked
        else {"pre_key_cache": t(before[0]), "pre_value_cache": t(before[1])}
    )
    tensors = t(qkv), t(keys), t(values)

    def call(*given):
        return blocks(*given, rope_emb=t(rope), qkv_bias=t(bias), use_neox_style=neox, **extra)

    got = [x.numpy() for x in (to_static(call) if captured else call)(*tensors)]
    token = 0
    for b in range(3):
        for i in range(NOW[b]):
            position = DECODER[b] + i
            q, k, v = parts(qkv[token] + bias)
            q, k = (turned(x, rope[0, 0, position, 0], rope[1, 0, position, 0], neox) for x in (q, k))
            np.testing.assert_allclose(got[1][token], np.concatenate([q, k, v]).ravel(), **CLOSE)
            keys[TABLES[b, position // 2], :, position % 2], values[TABLES[b, position // 2], :, position % 2] = k, v
            ks, vs = (np.stack([x[TABLES[b, j // 2], :, j % 2] for j in range(position + 1)]) for x in (keys, values))
            added = 0.0
            if masked:
                row = mask[b, 0, i] if ENCODER[b] else tgt[b, 0, 0]
                added = np.pad(row, (0, 6 - len(row)))[: position + 1]
            else:
                ks, vs = (np.concatenate([p[b].swapaxes(0, 1), x]) for p, x in zip(before, (ks, vs), strict=True))
            np.testing.assert_allclose(got[0][token].reshape(H, D), one(q, ks, vs, added), **CLOSE)
            token += 1
    for x, now, want in zip(tensors[1:], got[2:], (keys, values), strict=True):
        np.testing.assert_allclose(now, want, **CLOSE)
        np.testing.assert_array_equal(x.numpy(), now)


def test_block_attention_refuses_what_does_not_fit():
    arguments = [t(random(sum(NOW), (H + 2 * N) * D)), t(random(5, N, 2, D)), t(random(5, N, 2, D))]
    with pytest.raises(IndexError, match="block: 5 at"):
        blocks(*arguments)
    with pytest.raises(ShapeError, match="block_size=2"):
        blocks(arguments[0], *(t(random(6, N, 4, D)) for _ in range(2)))
    with pytest.raises(ConfigError, match="use_dynamic_cachekv_quant=True"):
        blocks(*arguments, use_dynamic_cachekv_quant=True)
    with pytest.raises(ConfigError, match=r"rope_theta=5000\.0; the angles are those of rope_emb"):
        blocks(*arguments, rope_theta=5000.0)
    with pytest.raises(ConfigError, match=r"quant_max_bound=448\.0"):
        blocks(*arguments, quant_max_bound=448.0)
    with pytest.raises(ConfigError, match="pre_key_cache with a mask"):
        blocks(*arguments, pre_key_cache=arguments[1], mask=arguments[1])
    full = [ints([0]), ints([2]), ints([1])]
    with pytest.raises(IndexError, match="sequence 0 has 2 cached tokens"):
        I.block_multihead_attention(
            arguments[0][:1], *arguments[1:], *full, None, None, ints(0, 1), None, ints([0]), block_size=2
        )


def test_longest_lengths():
    longest = I.blha_get_max_len(ints([3], [0]), ints([1], [7]), ints(2))
    assert [x.numpy().tolist() for x in longest] == [[3], [7]]


def test_variable_lengths():
    q, k, v, mask = (
        random(B, H, 3, D),
        random(B, N, 5, D, seed=1),
        random(B, N, 5, D, seed=2),
        random(B, 1, 3, 5, seed=3),
    )
    got = I.variable_length_memory_efficient_attention(
        t(q), t(k), t(v), ints([2], [3]), ints([4], [5]), t(mask), None, True, 2
    ).numpy()
    for b, i in np.ndindex(B, 3):
        seen = min((4, 5)[b], i + 3)
        keys, values = (x[b, :, :seen].swapaxes(0, 1) for x in (k, v))
        want = one(q[b, :, i], keys, values, mask[b, 0, i, :seen]) if i < (2, 3)[b] else np.zeros((H, D))
        np.testing.assert_allclose(got[b, :, i], want, **CLOSE)


def test_a_recorded_program_gives_the_same():
    x, cache, positions = random(B, 3 * N * D), random(2, B, N, 5, D, seed=1), np.array([[1], [3]], "int32")
    want = I.masked_multihead_attention(t(x), t(cache), sequence_lengths=t(positions))
    paddle.enable_static()
    try:
        program = static.Program()
        with static.program_guard(program):
            given = {
                n: static.data(n, list(v.shape), v.dtype.name)
                for n, v in (("x", x), ("cache", cache), ("at", positions))
            }
            fetched = I.masked_multihead_attention(given["x"], given["cache"], sequence_lengths=given["at"])
        got = static.Executor().run(program, feed={"x": x, "cache": cache, "at": positions}, fetch_list=list(fetched))
    finally:
        paddle.disable_static()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b.numpy(), **CLOSE)
