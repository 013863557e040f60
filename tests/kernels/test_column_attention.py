"""Attention by columns against NumPy with the mask made whole; what it skips and what memory it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import polyreme.core  # noqa: F401  (configures jax: eight CPU devices, x64)
from polyreme.errors import ConfigError
from polyreme.kernels import Columns, column_attention, column_attention_plain, select
from polyreme.kernels.attention_blocked import AttentionSpec, draw_of
from polyreme.kernels.columns import FULL, HIDDEN, kinds, without_empty

from .test_attention import normal, qkv, reference
from .tolerance import assert_near

S = 300  # two whole blocks and a part
ALL, NONE = (0, S), (S, S)


def bounds_of(rows):
    """Each key's (first, last, hidden from, hidden to, hidden from, hidden to), the last ones empty if left out."""
    return np.array([[*row, *NONE, *NONE][:6] for row in rows], np.int32)


DOCUMENT = [0, 100, 100, 128, 256, 290]
STARTS = np.repeat(DOCUMENT, np.diff([*DOCUMENT, S]))
STOPS = np.repeat([*DOCUMENT[1:], S], np.diff([*DOCUMENT, S]))
KEYS = range(S)
PATTERNS = {
    "all": [ALL for _ in KEYS],
    "none": [NONE for _ in KEYS],
    "causal": [(j, S) for j in KEYS],
    "causal documents": [(j, STOPS[j]) for j in KEYS],
    "documents": [(STARTS[j], STOPS[j]) for j in KEYS],
    "sliding window": [(j, min(S, j + 40)) for j in KEYS],
    "prefix": [(0 if j < 150 else j, S) for j in KEYS],
    "global tokens and a window": [(0, S) if j < 4 else (max(4, j - 8), min(S, j + 9)) for j in KEYS],
    "a question shared by answers": [(j, S) if j < 90 else (j, S, 200, 250) for j in KEYS],
    "rows hidden in the middle": [(0, S, 20, 260, 270, 280) for j in KEYS],
    "every other key": [ALL if j % 2 else NONE for j in KEYS],
    "rows without a key": [(min(j + 5, S), 290, 128, 256) for j in KEYS],
}


def shown(bounds):
    """[..., t, 2 + 2 i] -> [..., s, t], one key at a time."""
    mask = np.zeros((*bounds.shape[:-2], S, bounds.shape[-2]), bool)
    for at in np.ndindex(bounds.shape[:-1]):
        column = mask[(*at[:-1], slice(None), at[-1])]
        (first, last), *hidden = bounds[at].reshape(-1, 2)
        column[first:last] = True
        for begin, end in hidden:
            column[begin:end] = False
    return mask


@functools.cache
def compiled(heads, blocks=False):
    """Output, logsumexp and gradients by columns, one program for all bounds of so many mask heads."""

    def call(args, ct, bounds, blocks):
        out, pull, lse = jax.vjp(lambda *a: column_attention(*a, Columns(bounds, blocks)), *args, has_aux=True)
        return out, lse, pull(ct)

    return jax.jit(call)


ARGS, CT = qkv(S, S, h=4, n=2, d=4, b=1), normal(9, 1, S, 4, 4)


def compare(bounds, blocks=None):
    """bounds [m, t, 6]: equal to NumPy, forward, backward and in the logsumexp."""
    mask = shown(bounds)[None]
    if blocks is not None:
        mask &= blocks.repeat(128, 2).repeat(128, 3)[..., :S, :S]
    mask = mask.repeat(4 // len(bounds), 1)
    out, lse, grads = compiled(len(bounds), blocks is not None)(ARGS, CT, bounds[None], blocks)
    assert_near((out, grads), reference(*ARGS, CT, causal=False, mask=mask), jnp.float32, terms=2 * S)
    q, k, _ = (np.asarray(x, np.float64) for x in ARGS)
    scores = np.where(mask, np.einsum("bshd,bthd->bhst", q, k.repeat(2, 2)) / 2, -np.inf)
    with np.errstate(divide="ignore"):
        want = np.log(np.exp(scores).sum(-1))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want))
    assert_near(np.where(np.isneginf(want), 0, lse), np.where(np.isneginf(want), 0, want), jnp.float32, terms=S)


@pytest.mark.slow_cases("all")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_equals_the_whole_mask(pattern):
    compare(bounds_of(PATTERNS[pattern])[None])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("heads", [2, 4])
def test_each_mask_head_has_its_own_pattern(heads):
    names = ["causal documents", "global tokens and a window", "none", "prefix"]
    compare(np.stack([bounds_of(PATTERNS[name]) for name in names[:heads]]))


def test_blocks_hide_besides():
    blocks = np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1]], bool)[None, None]
    compare(bounds_of(PATTERNS["causal"])[None], blocks)


ROW = st.integers(0, S)
RUNS = st.lists(st.tuples(st.integers(1, S), st.lists(ROW, min_size=6, max_size=6)), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(RUNS)
@example([(S, [300, 0, 0, 0, 0, 0])])
@example([(128, [0, 128, 0, 0, 0, 0]), (128, [128, 256, 128, 256, 0, 0]), (44, [256, 300, 300, 0, 299, 300])])
def test_any_bounds_equal_the_whole_mask(runs):
    rows = np.concatenate([np.tile(np.array(row, np.int32), (count, 1)) for count, row in runs])
    bounds = np.resize(rows, (S, 6))
    compare(bounds[None])
    compare_kinds(bounds)


def compare_kinds(bounds):
    """A block called hidden or full is."""
    tidy = np.asarray(without_empty(bounds))
    mask = shown(bounds)
    for start in range(0, S, 128):
        for key in range(0, S, 128):
            block, rows = tidy[key : key + 128], slice(start, min(start + 128, S))
            kind = int(kinds(block.min(0), block.max(0), rows.start, rows.stop))
            part = mask[rows, key : key + 128]
            assert not (kind == HIDDEN and part.any())
            assert not (kind == FULL and not part.all())


def test_blocks_that_are_seen_nowhere_or_whole_are_known():
    tidy = without_empty(bounds_of(PATTERNS["documents"])).reshape(-1, 6)[:256].reshape(2, 128, 6)
    # keys 0 to 127 are documents [0, 100) and [100, 128), keys 128 to 255 are one
    known = [[int(kind) for kind in kinds(tidy.min(1), tidy.max(1), start, start + 128)] for start in (0, 128)]
    assert known == [[0, HIDDEN], [HIDDEN, FULL]]


def test_hidden_blocks_are_not_computed():
    q, k, v = (np.array(x) for x in ARGS)
    k[:, 128:256], v[:, 128:256] = np.nan, np.nan
    rows = bounds_of(PATTERNS["causal"])
    rows[128:256] = [*NONE] * 3
    out, _, (dq, dk, dv) = compiled(1)((q, k, v), CT, rows[None, None], None)
    # a product with a probability of 0 would be NaN
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_equals_the_twin_in_other_dtypes_with_dropout(dtype):
    args, ct = qkv(140, 140, h=4, n=2, d=4, b=2, dtype=dtype, width=6), normal(9, 2, 140, 4, 6, dtype=dtype)
    first = np.arange(140, dtype=np.int32) // 40 * 40
    columns = Columns(np.stack([np.stack([first, first + 60], -1), np.stack([first, first + 40], -1)])[None])
    key, rate = jax.random.key(5), 0.25
    spec, draw = AttentionSpec(False, 0.5, rate), draw_of(key)
    kernels = (
        lambda *a: column_attention(*a, columns, dropout_key=key, dropout_rate=rate)[0],
        lambda *a: column_attention_plain(*a, columns, spec=spec, draw=draw)[0],
    )

    def pulled(f, args, ct):
        out, pull = jax.vjp(f, *args)
        return out, *pull(ct)

    got, want = (jax.jit(functools.partial(pulled, f))(args, ct) for f in kernels)
    assert all(x.dtype == dtype for x in got)
    assert_near(got, want, dtype, terms=280)


def test_second_derivative_of_output_and_logsumexp():
    args = qkv(140, 140, h=2, n=1, d=4, b=1, dtype=jnp.float64)
    rows = np.arange(140, dtype=np.int32)
    bounds = np.stack([rows // 2, np.minimum(rows + 90, 139)], -1)[None, None]  # the last row sees nothing
    spec = AttentionSpec(False, 0.5, 0.0)
    kernels = (
        lambda *a: column_attention(*a, Columns(bounds)),
        lambda *a: column_attention_plain(*a, Columns(bounds), spec=spec, draw=None),
    )

    def curvature(f):
        def norm2(*a):
            def value(*b):
                out, lse = f(*b)
                return jnp.sin(out).sum() + jnp.cos(lse[..., :-1]).sum()

            return sum((g**2).sum() for g in jax.grad(value, (0, 1, 2))(*a))

        return jax.jit(jax.grad(norm2, (0, 1, 2)))(*args)

    got, want = map(curvature, kernels)
    assert all(np.isfinite(np.asarray(g)).all() for g in got)
    assert_near(got, want, jnp.float64, terms=140 * 140)


def scratch(s):
    """Bytes of scratch memory of forward and backward with s tokens, compiled and not run."""
    shape = jax.ShapeDtypeStruct((1, s, 2, 16), jnp.float32)
    bounds = jax.ShapeDtypeStruct((1, 1, s, 2), jnp.int32)

    def call(q, k, v, bounds, ct):
        return jax.vjp(lambda *a: column_attention(*a, Columns(bounds))[0], q, k, v)[1](ct)

    compiled = jax.jit(call).lower(shape, shape, shape, bounds, shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_doubles_with_the_length():
    short, long = scratch(4096), scratch(8192)
    assert long < 2.2 * short
    # ten arrays like q, not one with a byte a pair
    assert long < 10 * 8192 * 2 * 16 * 4 < 8192 * 8192


def test_the_choice_of_kernels_is_heeded():
    args = qkv(8, 8, h=2, n=2)
    columns = Columns(np.full((1, 1, 8, 2), [0, 8], np.int32))
    free = column_attention(*args, columns)
    with select.attention_only(("math",)):
        assert "custom_vjp" not in str(jax.make_jaxpr(lambda *a: column_attention(*a, columns))(*args))
        assert_near(column_attention(*args, columns), free, jnp.float32, terms=8)
    with select.attention_only(("flash",)), pytest.raises(ConfigError, match="FLASH_ATTENTION takes no mask"):
        column_attention(*args, columns)


def test_no_keys_give_zero():
    q, k, v = qkv(8, 0, h=2, n=2)
    out, lse = column_attention(q, k, v, Columns(np.zeros((1, 1, 0, 2), np.int32)))
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()
