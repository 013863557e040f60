import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyreme.core  # noqa: F401  (configures jax: eight CPU devices, x64)
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels import linear_cross_entropy, linear_cross_entropy_plain

from .tolerance import assert_near

CHUNKED = "polyreme.kernels.linear_cross_entropy"


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request, monkeypatch):
    """Makes small problems run in one chunk, or in a loop over several."""
    if request.param == "chunks":
        monkeypatch.setattr(sys.modules[CHUNKED], "CHUNK_BYTES", 1)


def problem(tokens=256, size=16, vocab=50, dtype=jnp.float32, vocab_first=True, bias=False, weighted=False):
    rng = np.random.default_rng(0)
    hidden, weight = rng.standard_normal((tokens, size)), rng.standard_normal((vocab, size))
    labels = rng.integers(0, vocab, tokens).astype(np.int32)
    labels[::7] = -100
    weight = weight if vocab_first else weight.T
    more = [rng.standard_normal(vocab).astype(dtype)] if bias else []
    more += [rng.uniform(0.5, 2, tokens).astype(dtype)] if weighted else []
    return hidden.astype(dtype), weight.astype(dtype), labels, *more


def value_and_grads(f, hidden, weight, labels, *more, **options):
    shape = jax.eval_shape(lambda h: f(h, weight, labels, *more, **options), hidden).shape
    ct = jnp.asarray(1 + np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3, jnp.promote_types(hidden.dtype, "f4"))
    out, pull = jax.vjp(lambda h, w, *m: f(h, w, labels, *m, **options), hidden, weight, *more)
    return out, pull(ct)


def value_and_grads_at_once(f, *args, **options):
    """value_and_grads as one program: run step by step it would be some fifty."""
    return jax.jit(lambda *a: value_and_grads(f, *a, **options))(*args)


def compare(args, dtype=jnp.float32, **options):
    got, want = (
        value_and_grads_at_once(f, *args, **options) for f in (linear_cross_entropy, linear_cross_entropy_plain)
    )
    assert got[0].dtype == jnp.promote_types(dtype, jnp.float32)
    assert [g.dtype for g in got[1]] == [dtype] * len(got[1])
    assert_near(got, want, dtype, terms=args[0].shape[0])


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("smoothing", "vocab_first", "bias"), [(0.0, True, False), (0.1, False, True)])
def test_equals_twin(reduction, smoothing, vocab_first, bias):
    args = problem(vocab_first=vocab_first, bias=bias, weighted=bias)
    compare(args, reduction=reduction, label_smoothing=smoothing, vocab_first=vocab_first)


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_equals_twin_in_other_dtypes(dtype, reduction):
    compare(problem(dtype=dtype, bias=True, weighted=True), dtype=dtype, reduction=reduction)


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("tokens", "reduction"), [(1, "none"), (251, "none"), (251, "mean")])
def test_odd_numbers_of_tokens(tokens, reduction):
    compare(problem(tokens=tokens, bias=True, weighted=True), reduction=reduction)


@pytest.mark.parametrize("f", [linear_cross_entropy, linear_cross_entropy_plain])
def test_equals_numpy(f):
    hidden, weight, labels = problem(dtype=jnp.float64)
    logits = np.asarray(hidden) @ np.asarray(weight).T
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    is_counted = np.asarray(labels) != -100
    picked = log_probs[np.arange(256), np.where(is_counted, labels, 0)]
    want = np.where(is_counted, -0.8 * picked - 0.2 * log_probs.mean(-1), 0)
    reductions = ("none", "mean", "sum")
    got = jax.jit(lambda *a: {r: f(*a, label_smoothing=0.2, reduction=r) for r in reductions})(hidden, weight, labels)
    assert_near(got["none"], want, jnp.float64, terms=50)
    assert_near(got["sum"], want.sum(), jnp.float64, terms=256)
    assert_near(got["mean"], want.sum() / is_counted.sum(), jnp.float64, terms=256)


def test_large_logits_stay_finite():
    hidden, weight, labels = problem()
    loss, grads = value_and_grads_at_once(linear_cross_entropy, hidden * 100, weight * 100, labels)
    assert all(np.isfinite(np.asarray(x)).all() for x in (loss, *grads))


@pytest.mark.parametrize("f", [linear_cross_entropy, linear_cross_entropy_plain])
def test_all_ignored_gives_zero(f):
    hidden, weight, labels = problem()
    labels = np.full_like(labels, 3)
    loss, grads = value_and_grads_at_once(f, hidden, weight, labels, ignore_index=3, reduction="mean")
    assert float(loss) == 0
    assert all(np.all(np.asarray(g) == 0) for g in grads)


@pytest.mark.parametrize("f", [linear_cross_entropy, linear_cross_entropy_plain])
def test_label_out_of_range_gives_nan(f):
    hidden, weight, labels = problem()
    labels[1:3] = 50, -1
    loss = np.asarray(jax.jit(lambda *a: f(*a))(hidden, weight, labels))
    assert np.isnan(loss[[1, 2]]).all()
    assert np.isfinite(loss[3:]).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_out_of_range_has_the_gradient_of_its_twin(smoothing):
    hidden, weight, labels = problem()
    labels[1:3] = 50, -1
    (_, got), (_, want) = (
        value_and_grads_at_once(f, hidden, weight, labels, label_smoothing=smoothing)
        for f in (linear_cross_entropy, linear_cross_entropy_plain)
    )
    assert_near(got, want, jnp.float32, terms=256)


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivative(reduction):
    hidden, weight, labels, bias, by = problem(tokens=128, dtype=jnp.float64, bias=True, weighted=True)

    def curvature(f):
        loss = lambda h, w, *m: jnp.sin(f(h, w, labels, *m, reduction=reduction, label_smoothing=0.1)).sum()
        norm2 = lambda *a: sum((g**2).sum() for g in jax.grad(loss, (0, 1, 2, 3))(*a))
        return jax.jit(jax.grad(norm2, (0, 1, 2, 3)))(hidden, weight, bias, by)

    assert_near(
        curvature(linear_cross_entropy), curvature(linear_cross_entropy_plain), jnp.float64, terms=128 * 50, steps=8
    )


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_sharded_vocabulary_and_tokens(reduction, monkeypatch):
    monkeypatch.setattr(sys.modules[CHUNKED], "CHUNK_BYTES", 64 * 64 * 4)
    # on each of four devices 258 tokens, in four chunks with two tokens more
    hidden, weight, labels, bias = problem(tokens=4 * 258, size=16, vocab=64, bias=True)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("dp", "mp"))
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    placed = place(hidden, "dp", None), place(weight, "mp", None), place(labels, "dp"), place(bias, "mp")
    call = jax.jit(lambda *a: value_and_grads(linear_cross_entropy, *a, reduction=reduction, ways=4))
    text = call.lower(*placed).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
    want = value_and_grads_at_once(linear_cross_entropy, hidden, weight, labels, bias, reduction=reduction)
    assert_near(call(*placed), want, jnp.float32, terms=1032)


@pytest.mark.parametrize(("reduction", "tokens"), [("none", 4096), ("mean", 4093)])
def test_logits_are_never_whole(reduction, tokens):
    hidden, weight, labels = problem(tokens=tokens, size=8, vocab=8192)
    call = jax.jit(lambda *a: value_and_grads(linear_cross_entropy, *a, reduction=reduction))
    whole = 4096 * 8192 * 4
    assert call.lower(hidden, weight, labels).compile().memory_analysis().temp_size_in_bytes < whole / 4


def test_refuses_what_does_not_fit():
    hidden, weight, labels = problem()
    cases = [
        ((hidden, weight.T, labels), {}, ShapeError, r"needs \[tokens, hidden\], \[vocab, hidden\]"),
        ((hidden, weight, labels), {"vocab_first": False}, ShapeError, r"\[hidden, vocab\]"),
        ((hidden, weight, labels[:3]), {}, ShapeError, r"labels \[3\]"),
        ((hidden, weight, labels, weight[0]), {}, ShapeError, r"bias \[16\] must be \[50\]"),
        ((hidden, weight, labels, None, hidden), {}, ShapeError, r"token_weight \[256, 16\] does not fit"),
        ((hidden, weight, labels.astype(jnp.float32)), {}, DTypeError, "labels have dtype float32"),
        ((hidden, weight, labels), {"label_smoothing": 1.5}, ConfigError, "label_smoothing is 1.5"),
        ((hidden, weight, labels), {"reduction": "max"}, ConfigError, "use 'none', 'mean' or 'sum'"),
    ]
    for f in (linear_cross_entropy, linear_cross_entropy_plain):
        for args, options, error, match in cases:
            with pytest.raises(error, match=match):
                f(*args, **options)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_parts_of_the_tokens_add_up_to_the_whole(reduction):
    rng = np.random.default_rng(5)
    hidden, weight = rng.normal(size=(128, 6)).astype("float32"), rng.normal(size=(9, 6)).astype("float32")
    labels, bias = rng.integers(0, 9, 128), rng.normal(size=9).astype("float32")

    def gradients(ways):
        def loss(h, w, b):
            return linear_cross_entropy(h, w, labels, b, reduction=reduction, ways=ways).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(hidden, weight, bias)

    # sums of 128 terms below 4 in another order
    for got, want in zip(gradients(4), gradients(1), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=128 * 4 * 2.0**-24)


def test_a_scaled_mean_in_float16_keeps_the_gradient_of_rare_classes():
    tokens, vocab, scale = 256, 2048, 2.0**14
    hidden = np.tile(np.float16([1, 0]), (tokens, 1))
    # the label's logit is log(2^18), all others are 0: each has about 2^-18, a hundredth of which float16 still tells
    weight = np.tile(np.float16([0, 1]), (vocab, 1))
    weight[0] = 18 * np.log(2), 0

    @jax.jit
    def gradients(hidden, weight):
        labels = np.zeros(tokens, np.int32)
        _, pull = jax.vjp(lambda h, w: linear_cross_entropy(h, w, labels, reduction="mean"), hidden, weight)
        return pull(jnp.asarray(scale, jnp.float32))

    dhidden, _ = gradients(hidden, weight)
    others = (vocab - 1) / (vocab - 1 + np.exp(float(weight[0, 0])))
    # probabilities are rounded to multiples of 2^-24, the result to 11 bits
    np.testing.assert_allclose(np.asarray(dhidden[:, 1], float), others * scale / tokens, rtol=2.0**-6)
