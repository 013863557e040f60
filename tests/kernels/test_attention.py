from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyreme.core  # noqa: F401  (configures jax: eight CPU devices, x64)
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels import attention, attention_blocked, attention_plain, select
from polyreme.kernels.attention_blocked import AttentionSpec, spans

from .tolerance import assert_near


def normal(seed, *shape, dtype=jnp.float32):
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def qkv(s, t, h=4, n=4, d=8, b=2, dtype=jnp.float32, width=None):
    shapes = (s, h, d), (t, n, d), (t, n, width or d)
    return tuple(normal(seed, b, *shape, dtype=dtype) for seed, shape in enumerate(shapes))


def value_and_pull(f, args, ct):
    out, pull = jax.vjp(f, *args)
    return out, pull(ct)


def value_and_pull_at_once(f, args, ct):
    """value_and_pull as one program: run step by step it would be some sixty."""
    return jax.jit(lambda args, ct: value_and_pull(f, args, ct))(args, ct)


def compare(args, terms, dtype=jnp.float32, steps=4, **options):
    ct = normal(9, *args[0].shape, dtype=dtype)
    results = []
    for f in (attention, attention_plain):
        call = jax.jit(lambda *a, f=f: value_and_pull(lambda *b: f(*b, **options), a[:-1], a[-1]))
        results.append(call(*args, ct))
    assert all(x.dtype == dtype for x in jax.tree.leaves(results[0]))
    assert_near(*results, dtype, terms, steps)


def reference(q, k, v, ct, causal, mask=None):
    """float64 NumPy: the output, and the gradients of its sum times ct."""
    q, k, v, ct = (np.asarray(x, np.float64) for x in (q, k, v, ct))
    (b, s, h, d), (t, n) = q.shape, k.shape[1:3]
    wide_k, wide_v = k.repeat(h // n, 2), v.repeat(h // n, 2)
    seen = np.tri(s, t, t - s, bool) if causal else np.ones((s, t), bool)
    seen = np.broadcast_to(seen if mask is None else seen & mask, (b, h, s, t))
    scores = np.where(seen, np.einsum("bshd,bthd->bhst", q, wide_k) / np.sqrt(d), -np.inf)
    some = seen.any(-1, keepdims=True)
    weights = np.where(seen, np.exp(scores - np.where(some, scores.max(-1, keepdims=True), 0)), 0)
    weights /= np.where(some, weights.sum(-1, keepdims=True), 1)
    dweights = np.einsum("bshd,bthd->bhst", ct, wide_v)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) / np.sqrt(d)
    dk, dv = (np.einsum("bhst,bshd->bthd", x, y) for x, y in ((dscores, q), (weights, ct)))
    return (
        np.einsum("bhst,bthd->bshd", weights, wide_v),
        (np.einsum("bhst,bthd->bshd", dscores, wide_k), *(x.reshape(b, t, n, h // n, -1).sum(3) for x in (dk, dv))),
    )


def compare_with_numpy(f, args, terms, **options):
    ct = normal(9, *args[0].shape[:3], args[2].shape[3])
    got = value_and_pull_at_once(lambda *a: f(*a, **options), args, ct)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got))
    assert_near(got, reference(*args, ct, **options), jnp.float32, terms)


LENGTHS = [(1, 1), (1, 7), (64, 64), (130, 130), (37, 101), (101, 37), (600, 600)]


@pytest.mark.slow_cases("True-600-600", "False-600-600")
@pytest.mark.one_in(6)
@pytest.mark.parametrize(("s", "t"), LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
def test_equals_numpy(s, t, causal):
    compare_with_numpy(attention, qkv(s, t), terms=max(s, t), causal=causal)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("s", "t"), [(5, 5), (3, 70), (70, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_twin_equals_numpy(s, t, causal):
    compare_with_numpy(attention_plain, qkv(s, t, n=2, width=5), terms=2 * max(s, t), causal=causal)


@pytest.mark.parametrize("n", [1, 2])
def test_grouped_heads_and_values_of_another_width(n):
    compare_with_numpy(attention, qkv(70, 70, h=4, n=n, width=5), terms=70 * 4 // n, causal=True)


def test_a_scale_equals_twin():
    compare(qkv(70, 70), terms=70, causal=False, scale=0.5)


@pytest.mark.parametrize("masked", [False, True])
def test_a_softcap_equals_twin(masked):
    """Of several blocks; a mask that is added comes after it, with a gradient of its own."""
    mask = {"mask": normal(5, 130, 130)} if masked else {}
    compare(qkv(130, 130), terms=130, causal=True, scale=2.0, softcap=0.8, **mask)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64])
def test_equals_twin_in_other_dtypes(dtype):
    compare(qkv(70, 70, dtype=dtype), terms=70, dtype=dtype, causal=True)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("shape", [(70, 70), (2, 1, 1, 70), (2, 4, 70, 70), (1, 4, 70, 1)])
@pytest.mark.parametrize(("kind", "causal"), [("bool", True), ("added", False)])
def test_masks_equal_twin(shape, kind, causal):
    values = np.asarray(normal(5, *shape))
    mask = jax.device_put(values > -0.5 if kind == "bool" else values)
    compare(qkv(70, 70, n=2), terms=140, causal=causal, mask=mask)


@pytest.mark.one_in(2)
@pytest.mark.slow_cases("shape0-True")
@pytest.mark.parametrize(
    ("shape", "causal"), [((1, 1, 1, 70), True), ((2, 4, 600, 70), True), ((4, 600, 70), False), ((1,), False)]
)
def test_gradient_of_added_mask(shape, causal):
    args, bias, ct = qkv(600, 70, n=2), normal(5, *shape), normal(9, 2, 600, 4, 8)
    got, want = (
        value_and_pull_at_once(lambda m, f=f: f(*args, causal=causal, mask=m), (bias,), ct)
        for f in (attention, attention_plain)
    )
    assert_near(got, want, jnp.float32, terms=2 * 4 * 600)


@pytest.mark.slow_cases("attention-False")
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("f", [attention, attention_plain])
def test_rows_that_see_nothing_give_zero_and_no_gradient(f, added):
    q, k, v = qkv(70, 70)
    seen = np.ones((70, 70), bool)
    seen[[3, 69]] = False
    mask = np.where(seen, 0.0, -np.inf).astype(np.float32) if added else seen
    ones = np.ones(q.shape, np.float32)
    out, grads = value_and_pull_at_once(lambda *a: f(*a, causal=True, mask=jnp.asarray(mask)), (q, k, v), ones)
    assert np.all(np.asarray(out)[:, [3, 69]] == 0)
    assert np.all(np.asarray(grads[0])[:, [3, 69]] == 0)
    assert_near((out, grads), reference(q, k, v, ones, True, seen), jnp.float32, terms=70)


def test_more_queries_than_keys_leaves_the_first_without_keys():
    args = qkv(200, 10)
    ones = np.ones(args[0].shape, np.float32)
    out, (dq, _, _) = value_and_pull_at_once(lambda *a: attention(*a, causal=True), args, ones)
    assert np.all(np.asarray(out)[:, :190] == 0)
    assert np.all(np.asarray(dq)[:, :190] == 0)


@pytest.mark.one_in(2)
@pytest.mark.slow_cases("600-True")
@pytest.mark.parametrize(("s", "causal"), [(70, True), (70, False), (600, True)])
def test_dropout_equals_twin(s, causal):
    compare(qkv(s, s), terms=s, causal=causal, dropout_key=jax.random.key(3), dropout_rate=0.25)


BY_HEAD = {
    "causal": ({"causal": True}, None),
    "dropout": ({"causal": False, "dropout_key": jax.random.key(3), "dropout_rate": 0.25}, (2, 1, 1, 120)),
    "added for each head": ({"causal": True}, (1, 4, 150, 1)),
    "added for each entry": ({"causal": False, "softcap": 2.0}, (2, 1, 150, 120)),
}
"""Options, and the dims of a mask: with dropout a bool one."""


@pytest.mark.slow_cases("dropout", "added for each head")
@pytest.mark.parametrize(("options", "shape"), BY_HEAD.values(), ids=BY_HEAD)
def test_by_head_equals_twin_with_every_gradient(options, shape, monkeypatch):
    """A block of 128 of two query heads' rows, and a rest."""
    monkeypatch.setattr(select, "on_few_cores", lambda: True)
    args, ct = qkv(150, 120, n=2), normal(9, 2, 150, 4, 8)
    mask = None if shape is None else normal(5, *shape)
    if "dropout_key" in options:
        options, mask = {**options, "mask": mask > -0.5}, None
    inputs = args if mask is None else (*args, mask)
    texts, results = [], []
    for f in (attention, attention_plain):

        def run(q, k, v, mask=None, f=f):
            return f(q, k, v, **(options if mask is None else {**options, "mask": mask}))

        call = jax.jit(lambda inputs, ct, run=run: value_and_pull(run, inputs, ct)).lower(inputs, ct)
        texts.append(call.as_text())
        results.append(call.compile()(inputs, ct))
    one_of_four = "tensor<4x1x1x"
    assert one_of_four in texts[0]
    assert one_of_four not in texts[1]
    assert_near(*results, jnp.float32, terms=120 * 4)


def test_which_sizes_are_walked_by_head():
    suits = attention_blocked.suits_head
    assert suits((8, 256, 8, 32), (8, 256, 8, 32))
    assert not suits((8, 127, 8, 32), (8, 256, 8, 32))  # few queries
    assert not suits((8, 256, 8, 32), (8, 256, 2, 32))  # four heads times 256 keys
    assert not suits((8, 257, 8, 32), (8, 257, 8, 32))


def test_dropout_takes_raw_keys_and_keeps_the_mean():
    q, k, _ = qkv(64, 256)
    call = jax.jit(partial(attention, causal=False, dropout_key=jax.random.PRNGKey(0), dropout_rate=0.5))
    out = np.asarray(call(q, k, np.ones(k.shape, np.float32)))
    # each of 64 * 8 outputs is a mean of 256 factors of deviation 1 with unequal weights; five deviations of it all
    assert abs(float(out.mean()) - 1) < 5 / np.sqrt(64 * 8)


@pytest.mark.slow_cases("options0", "options1", "options3")
@pytest.mark.parametrize("options", [{}, {"mask": "bool"}, {"dropout_rate": 0.25}, {"mask": "empty row"}])
def test_second_derivative(options):
    args = qkv(70, 70, h=2, n=1, d=4, b=1, dtype=jnp.float64)
    options = dict(options)
    if options.get("mask") == "bool":
        options["mask"] = normal(5, 70, 70) > -0.5
    if options.get("mask") == "empty row":
        options["mask"] = jnp.ones((70, 70), bool).at[3].set(False)
    if "dropout_rate" in options:
        options["dropout_key"] = jax.random.key(1)

    def curvature(f):
        def norm2(*a):
            grads = jax.grad(lambda *b: jnp.sin(f(*b, causal=True, **options)).sum(), (0, 1, 2))(*a)
            return sum((g**2).sum() for g in grads)

        return jax.jit(jax.grad(norm2, (0, 1, 2)))(*args)

    got = curvature(attention)
    assert all(np.isfinite(np.asarray(g)).all() for g in got)
    assert_near(got, curvature(attention_plain), jnp.float64, terms=70 * 70)


def test_first_derivative_equals_finite_differences():
    args = qkv(66, 66, h=2, n=1, d=4, b=1, dtype=jnp.float64)
    f = jax.jit(lambda *a: jnp.sin(attention(*a, causal=True)).sum())
    grads = [np.asarray(g) for g in jax.jit(jax.grad(f, (0, 1, 2)))(*args)]
    args = [np.asarray(a) for a in args]
    step = 1e-5  # central differences: step^2 for truncation, eps / step for rounding
    for i, grad in enumerate(grads):
        direction = np.asarray(normal(20 + i, *grad.shape, dtype=jnp.float64))
        moved = [[a + sign * step * direction if j == i else a for j, a in enumerate(args)] for sign in (1, -1)]
        numeric = (f(*moved[0]) - f(*moved[1])) / (2 * step)
        assert abs(float(numeric - (grad * direction).sum())) < 1e-6


@pytest.mark.slow_cases("1024")
@pytest.mark.parametrize("s", [128, 1024])
def test_sharded_over_batch_and_heads_without_gathering(s):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("dp", "mp"))
    args = [*qkv(s, s, h=4, n=2, b=4, d=4), normal(9, 4, s, 4, 4)]
    place = NamedSharding(mesh, P("dp", None, "mp", None))
    call = jax.jit(lambda q, k, v, ct: value_and_pull(lambda *a: attention(*a, causal=True), (q, k, v), ct))
    placed = [jax.device_put(x, place) for x in args]
    text = call.lower(*placed).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    got = call(*placed)
    assert all(x.sharding.is_equivalent_to(place, 4) for x in jax.tree.leaves(got))
    assert_near(got, call(*args), jnp.float32, terms=s)


@pytest.mark.slow
def test_memory_grows_with_blocks_not_with_all_scores():
    args = [*qkv(2048, 2048, h=2, n=2, b=1, d=8), normal(9, 1, 2048, 2, 8)]
    call = jax.jit(lambda q, k, v, ct: value_and_pull(lambda *a: attention(*a, causal=True), (q, k, v), ct))
    temporary = call.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 2 * 2048 * 2048 * 4  # one float32 array of all scores of both heads


@pytest.mark.parametrize("s", [1, 63, 64, 65, 511, 512, 513, 2000])
@pytest.mark.parametrize("t", [1, 64, 700])
def test_spans_cover_the_queries_once_and_hold_the_keys_each_needs(s, t):
    cut = spans(AttentionSpec(True, 1.0, 0.0), s, t)
    assert [q for span in cut for q in range(span.start, span.stop)] == list(range(s))
    for span in cut:
        assert span.start + span.blocks * span.rows == span.stop
        assert span.keys == max(0, min(t, span.stop + t - s))


def test_gpu_takes_cudnn_where_it_can(monkeypatch):
    calls = []
    monkeypatch.setattr(select, "backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **kw: calls.append(kw) or q)
    call = lambda *args, **options: jax.eval_shape(partial(attention, **options), *args)
    half = qkv(16, 16, dtype=jnp.bfloat16)
    call(*half, causal=True)
    assert calls == [{"scale": 8**-0.5, "is_causal": True, "implementation": "cudnn"}]
    call(*half, causal=True, mask=jnp.ones((16, 16), bool))
    call(*qkv(16, 16), causal=True)
    call(*qkv(16, 20, dtype=jnp.bfloat16), causal=True)
    call(*half, causal=True, dropout_rate=0.5, dropout_key=jax.random.key(0))
    call(*qkv(16, 16, d=12, dtype=jnp.bfloat16), causal=True)
    assert len(calls) == 1


def test_refuses_what_does_not_fit():
    q, k, v = qkv(4, 4)
    key = jax.random.key(0)
    cases = [
        ((q[0], k, v), {}, ShapeError, "needs 4 dims"),
        ((q, k, v[:, :2]), {}, ShapeError, "k and v of one shape"),
        ((q, k[..., :4], v[..., :4]), {}, ShapeError, "batch and head_dim must be equal"),
        ((q, k[:, :, :3], v[:, :, :3]), {}, ShapeError, "4 query heads over 3 key heads"),
        ((q, k, v), {"dropout_rate": 1.0, "dropout_key": key}, ConfigError, r"it must lie in \[0, 1\)"),
        ((q, k, v), {"dropout_rate": 0.5}, ConfigError, "needs a dropout_key"),
        ((q, k, v), {"mask": jnp.ones((4, 4), jnp.int32)}, DTypeError, "mask has dtype int32"),
        ((q, k, v), {"mask": jnp.ones((4, 3), bool)}, ShapeError, "does not broadcast"),
    ]
    for f in (attention, attention_plain):
        for args, options, error, match in cases:
            with pytest.raises(error, match=match):
                f(*args, causal=True, **options)
