"""Ring and Ulysses attention over a mesh against the plain twin on one device."""

import functools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.core.engine import backend  # configures jax: eight CPU devices, x64
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels import (
    Columns,
    attention,
    attention_blocked,
    attention_plain,
    column_attention_plain,
    gather_attention,
    gather_column_attention,
    into_zigzag,
    move_into_zigzag,
    move_out_of_zigzag,
    out_of_zigzag,
    ring_attention,
    ring_column_attention,
    ulysses_attention,
    ulysses_column_attention,
    usp_attention,
    usp_column_attention,
)
from polyreme.kernels.attention_blocked import AttentionSpec, draw_of, dropout_scale, part_of
from polyreme.kernels.ring_attention import Split

from .tolerance import assert_near

BOTH = pytest.mark.parametrize("kernel", [ring_attention, ulysses_attention], ids=["ring", "ulysses"])
KEY = jax.random.PRNGKey(3)


def split(**degrees):
    """A Split over a mesh of these degrees: batch over dp, the sequence over sep (and cp), heads over mp."""
    names, sizes = tuple(degrees), tuple(degrees.values())
    count = int(np.prod(sizes))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(sizes), names)

    def live(*axes):
        return tuple(a for a in axes if degrees.get(a, 1) > 1)

    return Split(mesh, live("dp"), live("sep", "cp"), live("mp"))


def normal(seed, *shape, dtype=jnp.float32):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def qkv(s=48, t=None, h=8, n=4, d=4, b=2, dtype=jnp.float32, width=None):
    t = t or s
    shapes = (s, h, d), (t, n, d), (t, n, width or d)
    return tuple(normal(seed, b, *shape, dtype=dtype) for seed, shape in enumerate(shapes))


def pulled(f, args, mask, ct, **options):
    """Output and gradients; a float mask has one too."""
    floating = mask is not None and mask.dtype != jnp.bool_
    primals = (*args, mask) if floating else args

    def call(*x):
        return f(*x[:3], mask=x[3] if floating else mask, **options)

    out, pull = jax.vjp(call, *primals)
    return out, *pull(ct)


@functools.cache
def twin(causal, dropout_rate):
    """pulled of the plain twin, compiled: one for all meshes and both kernels."""
    return jax.jit(lambda *a: pulled(attention_plain, *a, causal=causal, **dropout(dropout_rate)))


def dropout(rate):
    return {"dropout_key": KEY, "dropout_rate": rate} if rate else {}


def compare(kernel, over, args, mask=None, terms=None, dtype=jnp.float32, steps=4, *, causal, dropout_rate=0.0):
    ct = normal(9, *args[0].shape[:3], args[2].shape[3], dtype=dtype)
    options = {"split": over, "causal": causal, **dropout(dropout_rate)}
    got = jax.jit(lambda *a: pulled(kernel, *a, **options))(args, mask, ct)
    want = twin(causal, dropout_rate)(args, mask, ct)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert_near(got, want, dtype, terms or args[0].shape[1] * args[0].shape[2] // args[1].shape[2], steps)


MESH = {"dp": 2, "sep": 2, "mp": 2}


@pytest.mark.one_in(6)
@pytest.mark.slow_cases("{'sep': 2, 'cp': 2, 'dp': 2}-True-ring")
@BOTH
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("degrees", [MESH, {"sep": 4}, {"sep": 2, "cp": 2, "dp": 2}], ids=str)
def test_equals_the_twin(kernel, causal, degrees):
    compare(kernel, split(**degrees), qkv(), causal=causal)


MASKS = {
    "scores": normal(4, 1, 8, 48, 48),
    "keys": normal(5, 2, 1, 1, 48),
    "queries": normal(6, 2, 1, 48, 1),
    "bool": normal(7, 48, 48) > 0,
    "a query that sees nothing": jnp.arange(48)[:, None] > jnp.zeros(48),
}


@pytest.mark.one_in(5)
@BOTH
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_and_their_gradients(kernel, mask):
    # a gradient of the mask of keys is a sum over batch, heads and queries: 2 * 8 * 48 terms
    compare(kernel, split(**MESH), qkv(), mask, causal=mask.dtype == jnp.bool_, terms=768)


@pytest.mark.slow
@pytest.mark.slow_cases("{'sep': 4}-ring")
@BOTH
@pytest.mark.parametrize("degrees", [MESH, {"sep": 4}], ids=str)
def test_dropout_is_that_of_one_device(kernel, degrees):
    compare(kernel, split(**degrees), qkv(), causal=True, dropout_rate=0.25)


@BOTH
def test_other_lengths_of_keys_and_widths_of_values(kernel):
    compare(kernel, split(sep=2), qkv(s=8, t=24, width=6), causal=False, terms=24)


@pytest.mark.one_in(4)
@BOTH
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_equals_whole_attention_in_other_dtypes(kernel, dtype):
    compare(kernel, split(sep=2, mp=2), qkv(dtype=dtype), causal=True, dtype=dtype)


@BOTH
def test_a_softcap_is_that_of_one_device(kernel):
    capped = functools.partial(kernel, split=split(sep=2, mp=2), causal=True, softcap=0.8)
    args, ct = qkv(), normal(9, 2, 48, 8, 4)
    got = jax.jit(lambda *a: pulled(capped, *a))(args, None, ct)
    want = jax.jit(lambda *a: pulled(attention_plain, *a, causal=True, softcap=0.8))(args, None, ct)
    assert_near(got, want, jnp.float32, 96)


@pytest.mark.slow
def test_a_batch_that_is_not_split_over_an_axis_of_the_mesh():
    for kernel in (ring_attention, ulysses_attention):
        over = split(dp=2, sep=2)
        whole = Split(over.mesh, (), over.seq, over.heads)
        compare(kernel, whole, qkv(b=1), causal=True)


def columns(heads, s=48):
    """A mask of columns that differs by batch entry and head, with rows that see nothing."""
    rng = np.random.default_rng(heads)
    first = rng.integers(0, s // 2, (2, heads, s))
    limits = np.stack([first, first + rng.integers(0, s, first.shape), first + 5, first + 9], -1)
    return Columns(np.minimum(limits, s - 1).astype(np.int32))


@pytest.mark.one_in(5)
@pytest.mark.slow_cases("{'sep': 4}-1-0.0-ring")
@pytest.mark.parametrize("kernel", [ring_column_attention, ulysses_column_attention], ids=["ring", "ulysses"])
@pytest.mark.parametrize(
    ("degrees", "heads", "dropout_rate"),
    [(MESH, 4, 0.25), ({"sep": 4}, 1, 0.0), ({"sep": 2, "mp": 2}, 8, 0.0)],
    ids=str,
)
def test_columns_equal_the_twin(kernel, degrees, heads, dropout_rate):
    args, mask, over = qkv(), columns(heads), split(**degrees)
    cotangents = normal(9, 2, 48, 8, 4), normal(8, 2, 8, 48)
    spec = AttentionSpec(False, 0.5, dropout_rate)

    def pulled_with_logsumexp(f, args, cotangents):
        def finite(*a):
            out, lse = f(*a)
            return out, jnp.where(jnp.isfinite(lse), lse, 0)

        both, pull = jax.vjp(finite, *args)
        return both, pull(cotangents)

    def twin(*a):
        return column_attention_plain(*a, mask, spec=spec, draw=draw_of(KEY) if dropout_rate else None)

    def here(*a):
        return kernel(*a, mask, split=over, **dropout(dropout_rate))

    got, want = (jax.jit(functools.partial(pulled_with_logsumexp, f))(args, cotangents) for f in (here, twin))
    assert_near(got, want, jnp.float32, terms=96)


def in_zigzag(kernel, over):
    """kernel over a split in zigzag order, of arrays in their own order."""
    over, ways = replace(over, zigzag=True), over.ways(over.seq)

    def call(q, k, v, *columns, **options):
        result = kernel(*(into_zigzag(x, ways, 1) for x in (q, k, v)), *columns, split=over, **options)
        outs = result if isinstance(result, tuple) else (result,)
        outs = [out_of_zigzag(x, ways, dim) for x, dim in zip(outs, (1, 2), strict=False)]
        return tuple(outs) if isinstance(result, tuple) else outs[0]

    return call


@pytest.mark.one_in(2)
@pytest.mark.slow_cases("{'sep': 2}-False-scores", "{'sep': 4}-True-None")
@pytest.mark.parametrize(
    ("degrees", "causal", "mask"),
    [(MESH, True, None), ({"sep": 4}, True, "scores"), ({"sep": 2}, False, "scores"), ({"sep": 4}, True, None)],
    ids=str,
)
def test_zigzag_equals_the_twin(degrees, causal, mask):
    kernel = in_zigzag(ring_attention, split(**degrees))
    rate = 0.25 if mask is None else 0.0
    ct, mask = normal(9, 2, 48, 8, 4), MASKS.get(mask)
    got = jax.jit(lambda *a: pulled(kernel, *a, causal=causal, **dropout(rate)))(qkv(), mask, ct)
    assert_near(got, twin(causal, rate)(qkv(), mask, ct), jnp.float32, terms=768, steps=4)


def in_two(**degrees):
    """A Split whose devices along cp deal heads out, while keys go round sep."""
    return replace(split(**degrees), inner=("cp",))


@pytest.mark.one_in(6)
@pytest.mark.slow_cases("gather-True-None", "usp-False-None", "gather-True-bool", "usp-False-scores", "usp-True-scores")
@pytest.mark.parametrize("mask", [None, "scores", "bool"])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(
    ("kernel", "over"),
    [(gather_attention, split(sep=2, mp=2)), (usp_attention, in_two(sep=2, cp=2, mp=2))],
    ids=["gather", "usp"],
)
def test_keys_gathered_and_heads_dealt_out_in_a_part_equal_the_twin(kernel, over, zigzag, mask):
    kernel = in_zigzag(kernel, over) if zigzag else functools.partial(kernel, split=over)
    rate, causal = 0.25 if mask is None else 0.0, mask != "bool"
    ct, mask = normal(9, 2, 48, 8, 4), MASKS.get(mask)
    got = jax.jit(lambda *a: pulled(kernel, *a, causal=causal, **dropout(rate)))(qkv(), mask, ct)
    assert_near(got, twin(causal, rate)(qkv(), mask, ct), jnp.float32, terms=768, steps=4)


@pytest.mark.slow_cases("ring", "gather")
@pytest.mark.parametrize(
    ("kernel", "over"),
    [
        (ring_column_attention, split(sep=2)),
        (gather_column_attention, split(sep=2)),
        (usp_column_attention, in_two(sep=2, cp=2)),
    ],
    ids=["ring", "gather", "usp"],
)
def test_columns_in_zigzag_equal_the_twin(kernel, over):
    args, mask = qkv(), columns(4)
    out, lse = jax.jit(functools.partial(in_zigzag(kernel, over), **dropout(0.25)))(*args, mask)
    spec = AttentionSpec(False, 0.5, 0.25)
    want, sums = jax.jit(lambda *a: column_attention_plain(*a, mask, spec=spec, draw=draw_of(KEY)))(*args)
    assert_near(out, want, jnp.float32, terms=48)
    seen = jnp.isfinite(sums)
    np.testing.assert_array_equal(jnp.isfinite(lse), seen)
    assert_near(jnp.where(seen, lse, 0), jnp.where(seen, sums, 0), jnp.float32, terms=48)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ways", [2, 3])
def test_a_sequence_moves_into_zigzag_and_back(ways):
    mesh = Mesh(np.array(jax.devices()[:ways]), ("sep",))
    x, spec = jnp.arange(2 * 4 * ways).reshape(2, 4 * ways), PartitionSpec(None, "sep")
    moved = move_into_zigzag(x, mesh, spec)
    np.testing.assert_array_equal(moved, into_zigzag(x, ways, 1))
    np.testing.assert_array_equal(moved[0, :4], [0, 1, 4 * ways - 2, 4 * ways - 1])
    np.testing.assert_array_equal(move_out_of_zigzag(moved, mesh, spec), x)


@pytest.mark.parametrize("zigzag", [True, False])
def test_pairs_that_each_device_computes(monkeypatch, zigzag):
    ways, s = 4, 32
    over, pairs = replace(split(sep=ways), zigzag=zigzag), Counter()

    def counting(spec, q, k, *rest):
        rows, keys = q.shape[1], k.shape[1]
        seen = rows * (rows + 1) // 2 if spec.causal else rows * keys
        jax.debug.callback(lambda rank: pairs.update({int(rank): seen}), jax.lax.axis_index("sep"))
        return forward(spec, q, k, *rest)

    forward = attention_blocked.forward
    monkeypatch.setattr(attention_blocked, "forward", counting)
    jax.block_until_ready(jax.jit(functools.partial(ring_attention, split=over, causal=True))(*qkv(s=s, h=2, n=1)))
    jax.effects_barrier()
    own = s // ways
    each = [rank * own**2 + own * (own + 1) // 2 for rank in range(ways)]
    assert sum(each) == s * (s + 1) // 2
    # each pair that is seen is computed once; without the zigzag the last device has (2 P - 1) / P of the mean
    assert dict(sorted(pairs.items())) == dict(enumerate([sum(each) // ways] * ways if zigzag else each))


def test_blocks_of_columns_travel_with_their_keys():
    s = 256
    args = qkv(s=s, h=2, n=2, b=1)
    blocks = Columns(np.full((1, 1, s, 2), [0, s], np.int32), np.array([[[[1, 0], [1, 1]]]], bool))
    got = jax.jit(functools.partial(ring_column_attention, split=split(sep=2)))(*args, blocks)
    want = column_attention_plain(*args, blocks, spec=AttentionSpec(False, 0.5, 0.0), draw=None)
    assert_near(got, want, jnp.float32, terms=s)
    with pytest.raises(ShapeError, match=r"256 queries and 256 keys over 4 devices; make them multiples of 512"):
        ring_column_attention(*args, blocks, split=split(sep=4))


@pytest.mark.slow
def test_columns_send_what_attention_does():
    """Split over batch and heads: nothing. By Ulysses: q, k, v and the result forward, their gradients backward."""
    args, mask, ct = qkv(), columns(1), normal(9, 2, 48, 8, 4)

    def sent(over):
        def call(args, ct):
            out, pull = jax.vjp(lambda *a: ulysses_column_attention(*a, mask, split=over)[0], *args)
            return out, pull(ct)

        place = NamedSharding(over.mesh, over.spec)
        placed = [jax.device_put(x, place) for x in (*args, ct)]
        text = jax.jit(call).lower(tuple(placed[:3]), placed[3]).compile().as_text()
        kinds = "all-gather|all-reduce|all-to-all|collective-permute"
        return Counter(re.findall(rf"= .*? ({kinds})(?:-start)?\(", text))

    over = split(dp=2, mp=2)
    assert not over.seq
    assert not sent(over)
    assert sent(split(sep=2)) == {"all-to-all": 8}


@pytest.mark.slow
def test_derivatives_of_second_order():
    over, args = split(sep=2), qkv(s=8, h=2, n=2)

    def penalty(f):
        return lambda q: (jax.grad(lambda q: (f(q, *args[1:], causal=True) ** 2).sum())(q) ** 2).sum()

    want = jax.jit(jax.grad(penalty(attention_plain)))(args[0])
    for kernel in (ring_attention, ulysses_attention):
        got = jax.jit(jax.grad(penalty(lambda *a, kernel=kernel, **o: kernel(*a, split=over, **o))))(args[0])
        # three passes, each a sum of at most 8 keys x 4 numbers; values up to the third power of the first
        assert_near(got, want, jnp.float32, terms=32 * 3, steps=16)


def test_dropout_depends_on_the_place_alone():
    spec = AttentionSpec(False, 1.0, 0.5)
    whole = dropout_scale(spec, draw_of(KEY), (2, 2, 2, 6, 8))
    # batch entry 1, heads 2 and 3 of 4, queries 2 to 5, keys 4 to 7
    part = dropout_scale(spec, draw_of(KEY, jnp.asarray([1, 2, 2, 4, 4], jnp.uint32)), (1, 1, 2, 4, 4))
    np.testing.assert_array_equal(part[0, 0], whole[1, 1, :, 2:, 4:])
    later = dropout_scale(spec, part_of(draw_of(KEY), 4, row=3), (2, 2, 2, 3, 8))
    np.testing.assert_array_equal(later, whole[..., 3:, :])


def test_dropout_keeps_the_rate_and_draws_apart():
    spec = AttentionSpec(False, 1.0, 0.25)
    scale = np.asarray(dropout_scale(spec, draw_of(KEY), (4, 2, 2, 64, 64)))
    assert set(np.unique(scale)) == {0, np.float32(1 / 0.75)}
    kept = scale > 0
    # 65536 draws of probability 3/4: five standard deviations
    assert abs(kept.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / kept.size)
    rows = kept.reshape(-1, 64)
    agree = (rows[1:] == rows[:-1]).mean()
    # neighbours agree with probability 0.625 when they are independent
    assert abs(agree - 0.625) < 5 * np.sqrt(0.625 * 0.375 / rows[1:].size)


def collectives(f, *args):
    text = jax.jit(f, compiler_options=backend.step_options()).lower(*args).compile().as_text()
    kinds = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
    return {k: text.count(f" {k}(") + text.count(f" {k}-start(") for k in kinds if f" {k}" in text}


@pytest.mark.slow
def test_collectives_are_the_ones_the_formula_names():
    over, args = split(sep=4), qkv(s=64, h=4, n=4)
    args = tuple(jax.device_put(x, jax.sharding.NamedSharding(over.mesh, over.spec)) for x in args)

    def gradients(kernel):
        def both(q, k, v):
            out, pull = jax.vjp(lambda *a: kernel(*a, split=over, causal=True), q, k, v)
            return out, pull(2 * q)

        return both

    # k and v pass 3 times forward; k, v, dk, dv pass 3 times backward
    assert collectives(gradients(ring_attention), *args) == {"collective-permute": 6 + 12}
    # q, k, v and the result forward; their gradients backward
    assert collectives(gradients(ulysses_attention), *args) == {"all-to-all": 8}
    # k and v, forward and backward; their gradients
    assert collectives(gradients(gather_attention), *args) == {"all-gather": 4, "reduce-scatter": 2}
    # Ulysses' and those of a ring of two
    over = in_two(sep=2, cp=2)
    args = tuple(jax.device_put(x, jax.sharding.NamedSharding(over.mesh, over.spec)) for x in args)
    assert collectives(gradients(usp_attention), *args) == {"all-to-all": 8, "collective-permute": 2 + 4}


@pytest.mark.slow
@pytest.mark.parametrize("zigzag", [False, True])
def test_memory_of_the_ring_falls_with_its_length(zigzag):
    def scratch(ways):
        over = replace(split(sep=ways), zigzag=zigzag)
        spec = jax.sharding.NamedSharding(over.mesh, PartitionSpec(None, "sep"))
        q = jax.ShapeDtypeStruct((1, 4096, 2, 16), jnp.float32, sharding=spec)

        def step(q, k, v):
            return jax.vjp(lambda *a: ring_attention(*a, split=over, causal=True), q, k, v)[1](q)

        return (
            jax.jit(step, compiler_options=backend.step_options())
            .lower(q, q, q)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    two, eight = scratch(2), scratch(8)
    # activations are a quarter and a block of scores a quarter as wide
    assert eight < 0.4 * two


Q, K, V = qkv(s=12, h=4, n=2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f(Q[:, :11], K, V, split=split(sep=4), causal=False), ShapeError, "11 queries .*; make it 8 or 12"),
        (lambda f: f(Q, K[:, :10], V[:, :10], split=split(sep=4), causal=False), ShapeError, "10 keys"),
        (lambda f: f(Q, K, V[:, :3], split=split(sep=2), causal=False), ShapeError, "k and v of one shape"),
        (lambda f: f(Q, K, V, split=split(sep=2), causal=False, mask=jnp.ones(12, int)), DTypeError, "mask has dtype"),
        (lambda f: f(Q, K, V, split=split(sep=2), causal=False, dropout_rate=0.5), ConfigError, "needs a dropout_key"),
    ],
)  # fmt: skip
@BOTH
def test_refuses_what_it_cannot_do(kernel, call, error, message):
    with pytest.raises(error, match=message):
        call(kernel)


def test_what_only_one_of_them_refuses():
    with pytest.raises(ConfigError, match=r"4 query heads and 2 key heads over 4 devices \(sep\).*use the ring"):
        ulysses_attention(Q, K, V, split=split(sep=4), causal=True)
    with pytest.raises(ConfigError, match=r"usp_attention: 4 query heads and 2 key heads over 4 devices \(mp\+cp\)"):
        usp_attention(Q, K, V, split=in_two(sep=2, cp=2, mp=2), causal=True)
    with pytest.raises(ShapeError, match="gather_attention: causal with 12 queries and 8 keys; they must be equally"):
        gather_attention(Q, K[:, :8], V[:, :8], split=split(sep=4), causal=True)
    over = replace(split(sep=4), zigzag=True)
    with pytest.raises(ShapeError, match=r"12 tokens .* 8 equal chunks of a zigzag over 4 devices; make it 8 or 16"):
        ring_attention(Q, K, V, split=over, causal=True)
    assert attention(Q, K, V, causal=True).shape == Q.shape
