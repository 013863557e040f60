"""Contract rows of ops/attention/caches.py."""

import numpy as np
import scipy.special as sp

from polyreme.conformance._tables.attention import floats, then
from polyreme.conformance.case import Case
from polyreme.errors import ShapeError

START = np.array([1, 3], "int32")
ENDS = np.array([0, 2, 5], "int32")
TABLES = np.array([[3, 0], [1, -1]], "int32")
SEQUENCE, PLACE = np.array([0, 0, 1, 1, 2], "int32"), np.array([1, 2, 0, 3, 0], "int32")
ONES = np.ones((1, 1, 1, 2), "float32")
SINKS = np.linspace(-1, 2, 4, dtype="float32")
BIASES = np.linspace(-1, 2, 24, dtype="float32").reshape(4, 6)
CACHED = "a loop of as many rounds as the data say; texts that are written are not trained on"
WHERE = "places and masks have no gradient"


def written(cache, keys, values, start):
    out = cache.copy()
    for b, s in np.ndindex(keys.shape[:2]):
        if start[b] + s < cache.shape[3]:
            out[0, b, :, start[b] + s], out[1, b, :, start[b] + s] = keys[b, s], values[b, s]
    return out


def tokens(cache, new, start):
    out = cache.copy()
    for b, s in np.ndindex(new.shape[:2]):
        if start[b] + s < cache.shape[2]:
            out[b, :, start[b] + s] = new[b, s]
    return out


def codes(x):
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.round(x / np.where(scale == 0, 1, scale)).astype("int8"), scale


def attend(
    query, keys, values, start, window=0, scale=None, key_scales=None, value_scales=None, softcap=0, place_bias=None,
    sinks=None,
):  # fmt: skip
    """One query at a time: softmax over the places up to its own, and over a sink, which gives nothing."""
    if key_scales is not None:
        keys, values = keys * key_scales, values * value_scales
    out = np.zeros((*query.shape[:3], values.shape[-1]))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for b, s, h in np.ndindex(query.shape[:3]):
        end, n = start[b] + s + 1, h * keys.shape[1] // query.shape[2]
        seen = slice(max(end - window, 0) if window else 0, end)
        scores = keys[b, n, seen].astype("float64") @ query[b, s, h] * scale
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        scores = scores if place_bias is None else scores + place_bias[h, seen]
        sink = np.full(1, -np.inf) if sinks is None else sinks[h : h + 1]
        out[b, s, h] = sp.softmax(np.concatenate([scores, sink]))[:-1] @ values[b, n, seen]
    return out


def mask(start, s, keys, added=None):
    seen = np.array([[[[j <= at + i for j in range(keys)] for i in range(s)]] for at in start])
    return (
        seen if added is None else np.where(seen, np.pad(added, [(0, 0)] * 3 + [(0, keys - added.shape[-1])]), -np.inf)
    )


def into_blocks(cache, new, tables, sequence, place):
    out, size = cache.copy(), cache.shape[2]
    for t, (b, at) in enumerate(zip(sequence, place, strict=True)):
        if b < len(tables) and tables[b, at // size] >= 0:
            out[tables[b, at // size], :, at % size] = new[t]
    return out


def from_blocks(cache, tables):
    return np.stack([np.concatenate([cache[max(t, 0)].swapaxes(0, 1) for t in row]) for row in tables])


def attend_in_blocks(
    query, keys, values, tables, start, window=0, scale=None, key_scales=None, value_scales=None, softcap=0, bias=None,
    sinks=None,
):  # fmt: skip
    if key_scales is not None:
        keys, values = keys * key_scales, values * value_scales
    whole = (from_blocks(x, tables).swapaxes(1, 2) for x in (keys, values))
    return attend(query, *whole, start, window, scale, softcap=softcap, place_bias=bias, sinks=sinks)


def in_codes(*shapes):
    """Samples of a query, and of keys and values with their scales, as token_codes gives them."""

    def sample(rng, *more):
        query, keys, values = floats(*shapes)(rng)
        (key_codes, key_scales), (value_codes, value_scales) = codes(keys), codes(values)
        return query, key_codes, value_codes, *more, 0, None, key_scales, value_scales

    return sample


def angles(rope, sequence, place, adjacent=True):
    rows = np.stack([rope[:, min(b, rope.shape[1] - 1), p, 0] for b, p in zip(sequence, place, strict=True)], 1)
    full = np.repeat(rows, 2, -1) if adjacent else np.concatenate([rows, rows], -1)
    return full[0][:, None], full[1][:, None]


CASES = [
    Case("cache_written", then(floats((2, 2, 1, 4, 3), (2, 2, 1, 3), (2, 2, 1, 3)), START), written, bad=((ONES[None], ONES, ONES, START), ShapeError, "cache .* needs")),
    Case("tokens_cached", then(floats((2, 1, 4, 3), (2, 2, 1, 3)), START), tokens, bad=((ONES, ONES, START), ShapeError, r"from \[2\] on .* needs \[1, 1, places, 2\] and \[1\]")),
    Case("tokens_cached", then(floats((1, 2, 4, 3), (1, 1, 2, 3)), START[1:]), tokens, tag="one"),
    Case("tokens_cached", then(floats((1, 2, 4, 3), (1, 1, 2, 3)), START[1:] + 1), tokens, tag="past-the-end"),
    Case("rows_put", then(floats((4, 2), (3, 2)), np.array([2, -1, 0], "int32")), lambda held, new, rows: np.stack([new[2], held[1], new[0], held[3]]), bad=((ONES, ONES, START), ShapeError, r"into \[2\] rows of .* needs \[b, \.\.\.\]")),
    Case("attend_cached", then(floats((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2)), START), attend, terms=24, bad=((ONES, ONES, ONES, START), ShapeError, r"start \[2\]; needs")),
    Case("attend_cached", then(floats((2, 2, 2, 3), (2, 2, 5, 3), (2, 2, 5, 3)), START, 2, 0.5), attend, kwargs={"softcap": 0.7}, terms=24, tag="window"),
    Case("attend_cached", then(floats((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2)), START, 0, None, None, None, 0.0, BIASES), attend, terms=24, tag="bias"),
    Case("attend_cached", then(floats((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2)), START, 2, None, None, None, 0.0, None, SINKS), attend, terms=24, tag="sinks"),
    Case("sink_share", floats((2, 3, 4), (3,)), lambda lse, sinks: np.exp(lse) / (np.exp(lse) + np.exp(sinks[:, None])), bad=((ONES, ONES), ShapeError, r"needs \[b, h, s\] and \[h\]")),
    Case("token_codes", lambda rng: (np.array([[[0.5, -2, 1], [0, 0, 0]], [[254, 127, -1], [3, 1e-3, 0]]], "float32"),), codes, no_grad="rounding"),
    Case("attend_cached", lambda rng: in_codes((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2))(rng, START), attend, terms=24, no_grad="codes are not trained", tag="codes"),
    Case("cache_mask", lambda rng: (START, 2, 5), mask, no_grad=WHERE, bad=((START, 1, 1, ONES), ShapeError, "cache of 1 places")),
    Case("cache_mask", then(lambda rng: (START, 2, 5), np.arange(16, dtype="float32").reshape(2, 1, 2, 4)), mask, no_grad="minus infinity", tag="added"),
    Case("token_places", lambda rng: (ENDS, START, 6), lambda ends, start, n: (np.array([0, 0, 1, 1, 1, 2]), np.array([1, 2, 3, 4, 5, 3])), no_grad=WHERE),
    Case("blocks_written", then(floats((4, 1, 2, 3), (5, 1, 3)), TABLES, SEQUENCE, PLACE), into_blocks),
    Case("blocks_gathered", then(floats((4, 1, 2, 3)), TABLES), from_blocks),
    Case("attend_blocks", then(floats((2, 1, 4, 3), (4, 2, 2, 3), (4, 2, 2, 2)), TABLES, START - 1), attend_in_blocks, terms=24, no_grad=CACHED, bad=((ONES, ONES, ONES, TABLES, START), ShapeError, r"start \[2\]; needs")),
    Case("attend_blocks", then(floats((2, 2, 2, 3), (4, 2, 1, 3), (4, 2, 1, 3)), np.array([[3, 0, 1, -1, -1], [0, 1, 2, 3, 3]], "int32"), START, 2, 0.5), attend_in_blocks, kwargs={"softcap": 0.7}, terms=24, no_grad=CACHED, tag="window"),
    Case("attend_blocks", lambda rng: in_codes((2, 1, 4, 3), (4, 2, 2, 3), (4, 2, 2, 2))(rng, TABLES, START - 1), attend_in_blocks, terms=24, no_grad=CACHED, tag="codes"),
    Case("attend_blocks", then(floats((2, 1, 4, 3), (4, 2, 2, 3), (4, 2, 2, 2)), TABLES, START - 1, 0, None, None, None, 0.0, BIASES), attend_in_blocks, terms=24, no_grad=CACHED, tag="bias"),
    Case("attend_blocks", then(floats((2, 1, 4, 3), (4, 2, 2, 3), (4, 2, 2, 2)), TABLES, START - 1, 2, None, None, None, 0.0, None, SINKS), attend_in_blocks, terms=24, no_grad=CACHED, tag="sinks"),
    Case("block_angles", then(floats((2, 1, 4, 1, 2)), SEQUENCE, PLACE), angles, bad=((ONES, SEQUENCE, PLACE), ShapeError, r"rope_emb \[1, 1, 1, 2\]")),
    Case("block_angles", then(floats((2, 3, 4, 1, 2)), SEQUENCE, PLACE, False), angles, tag="halves"),
    Case("stage_mask", then(lambda rng: (np.array([[2], [0]], "int32"), (3, 4)), *floats((2, 1, 2, 5), (2, 1, 1, 3))(np.random.default_rng(0))), lambda new, _, m, n: np.stack([np.pad(m[0], [(0, 0), (0, 1), (0, 0)])[..., :4], np.pad(np.repeat(n[1], 3, 1), [(0, 0), (0, 0), (0, 1)])])),
    Case("padded_seen", lambda rng: (START[:, None], START[:, None], (4, 5), True, 1), lambda a, b, n, *_: (np.array([[[[j < m and j <= i + 1 for j in range(5)] for i in range(4)]] for m in b[:, 0]]), np.arange(4)[:, None] < a.reshape(2, 1, 1, 1)), no_grad=WHERE),
]  # fmt: skip
