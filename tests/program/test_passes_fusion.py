"""Fusion patterns: each applies where it should, not where it must not, and changes values only by rounding."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.errors import ConfigError
from polyreme.static import passes

EPS = 2.0**-24  # float32
RNG = np.random.default_rng(0)
B, S, H, D = 2, 4, 2, 8


def kinds(program):
    return [op.kind for op in program.global_block().ops]


def param(*shape):
    return paddle.create_parameter(shape, "float32")


def grads(loss):
    return [g for _, g in static.append_backward(loss)]


def run(program, fetch, feed):
    paddle.seed(5)
    scope, exe = static.Scope(), static.Executor()
    exe.run(static.default_startup_program(), scope=scope)
    return exe.run(program, feed, fetch, scope=scope)


def near(program, changed, fetch, feed, terms):
    """Equal but for the order of sums of `terms` terms: each adds up to terms roundings of the largest one."""
    for a, b in zip(run(program, fetch, feed), run(changed, fetch, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=terms * 2 * EPS * max(np.abs(a).max(), 1))


@pytest.mark.parametrize(
    "product", [paddle.matmul, F.linear], ids=["matmul", "linear"]
)  # fmt: skip
def test_a_product_and_its_bias_become_linear(static_mode, product):
    main, _ = static_mode
    x, w, b = static.data("x", [None, 3, 8]), param(8, 5), param(5)
    y = F.relu(b + product(x, w))
    loss = y.mean()
    gs = grads(loss)
    changed = passes.fusion(main, [y, *gs])
    assert kinds(changed) == ["linear", "relu", "mean", "backward"]
    assert f"linear(%x, %{w.name}, %{b.name})" in passes.show(main, "fusion", [y])
    # x: 8 terms forward; weights: 6 rows backward
    near(main, changed, [y, *gs], {"x": RNG.normal(size=(2, 3, 8)).astype("float32")}, 8 + 6)


def test_what_looks_like_linear_stays(static_mode):
    main, _ = static_mode
    x, w, b, moved = static.data("x", [None, 8]), param(8, 8), param(8), param(8)
    read_twice = paddle.matmul(x, w)
    plus_zero = paddle.matmul(x, w) + 0
    fetched = paddle.matmul(x, w)
    stopped = paddle.matmul(x, w)
    stopped.stop_gradient = True
    written = paddle.matmul(x, w)
    with paddle.no_grad():
        apart = paddle.matmul(x, w)
        paddle.assign(moved * 2, moved)
    results = [
        read_twice + b, read_twice * 2, plus_zero, fetched + b, stopped + b, apart + b, written + moved,
        paddle.matmul(x, w) + param(1, 8),  # not a vector
        paddle.matmul(x, w) + param(1),  # broadcasts
        paddle.matmul(x, w, transpose_y=True) + b,
        paddle.add(paddle.matmul(x, w), b, alpha=2),
    ]  # fmt: skip
    with paddle.amp.auto_cast(dtype="bfloat16"):
        results.append(paddle.matmul(x, w) + b)  # float32, where a bfloat16 linear would give bfloat16
        mixed = paddle.matmul(x, w)
    results.append(mixed + b)
    assert "linear" not in kinds(passes.fusion(main, [*results, fetched]))
    assert kinds(passes.fusion(main, results)).count("linear") == 1


def heads(x):
    return paddle.transpose(x, [0, 2, 1, 3])


def scores(q, k, how, c):
    before = {
        "query multiplied": lambda: q * c,
        "query divided": lambda: q / c,
        "query scaled": lambda: paddle.scale(q, c),
    }
    q = before[how]() if how in before else q
    s = q @ paddle.transpose(k, [0, 1, 3, 2]) if how == "divided" else paddle.matmul(q, k, transpose_y=True)
    after = {"multiplied": lambda: s * c, "divided": lambda: s / c, "scaled": lambda: paddle.scale(s, c)}
    return after[how]() if how in after else s


def qkv():
    return [static.data(n, [None, S, H, D]) for n in "qkv"]


FEED = {n: RNG.normal(size=(B, S, H, D)).astype("float32") for n in "qkv"}
MASK = np.where(np.tril(np.ones((S, S))), 0, -1e9).astype("float32")


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("how", "masked", "dropping"),
    [("none", False, False), ("multiplied", True, True), ("divided", True, False), ("scaled", False, True),
     ("query multiplied", False, False), ("query divided", True, True), ("query scaled", False, False)],
)  # fmt: skip
def test_attention_as_it_is_usually_written_becomes_one_call(static_mode, how, masked, dropping):
    main, _ = static_mode
    q, k, v = qkv()
    for each in (q, k, v):
        each.stop_gradient = False
    c = D**0.5 if how.endswith("divided") else D**-0.5
    s = scores(heads(q), heads(k), how, c)
    s = s + static.data("mask", [S, S]) if masked else s
    a = F.softmax(s)
    a = F.dropout(a, 0.5, training=False) if dropping else a
    out = heads(a @ heads(v))
    gs = static.gradients((out * out).sum(), [q, k, v])
    changed = passes.fusion(main, [out, *gs])
    assert kinds(changed) == ["scaled_dot_product_attention", "multiply", "sum", "backward"]
    # scores: D terms, probabilities: S, values: S; gradients pass each twice more
    feed = FEED | ({"mask": MASK} if masked else {})
    near(main, changed, [out, *gs], feed, 3 * (D + 2 * S))


def test_attention_with_keys_turned_at_once_and_read_elsewhere(static_mode):
    main, _ = static_mode
    q, k, v = qkv()
    turned, v4 = paddle.transpose(k, [0, 2, 3, 1]), heads(v)
    out = heads(F.softmax(heads(q) @ turned * 0.5) @ v4)
    cache = turned + 0
    changed = passes.fusion(main, [out, cache, v4])
    assert kinds(changed) == ["transpose", "transpose", "scaled_dot_product_attention", "add"]
    near(main, changed, [out, cache, v4], FEED, D + 2 * S)


def test_what_looks_like_attention_stays(static_mode):
    main, _ = static_mode
    q, k, v = qkv()
    number = static.data("c", [1])
    allowed = static.data("allowed", [S, S], "bool")

    def attention(s, a=lambda a: a):
        return heads(a(F.softmax(s)) @ heads(v))

    plain = paddle.matmul(heads(q), heads(k), transpose_y=True)
    results = [
        attention(paddle.matmul(heads(q), heads(k), transpose_y=True) * number),  # the factor is no number
        attention(paddle.matmul(heads(q), heads(k), transpose_y=True) + allowed),  # adds 0 and 1
        attention(paddle.matmul(heads(q), heads(k), transpose_y=True), lambda a: F.dropout(a, 0.5)),
        attention(paddle.matmul(heads(q), heads(k), transpose_y=True), lambda a: a * 2),
        attention(plain),
        plain * 2,
    ]
    assert "scaled_dot_product_attention" not in kinds(passes.fusion(main, results))


def test_dropped_probabilities_are_fused_on_request_and_disturb_no_other_numbers(static_mode):
    main, _ = static_mode
    q, k, v = qkv()
    a = F.dropout(F.softmax(paddle.matmul(heads(q), heads(k), transpose_y=True)), 0.25)
    out = heads(a @ heads(v))
    after = paddle.rand([3])
    assert kinds(passes.fusion(main, [out])) == kinds(main)
    changed = passes.fusion(main, [out, after], patterns="attention_dropout")
    assert kinds(changed) == ["scaled_dot_product_attention", "rand"]
    feed = FEED | {"v": np.ones((B, S, H, D), "float32")}
    (_, want), (found, same) = (run(p, [out, after], feed) for p in (main, changed))
    np.testing.assert_array_equal(want, same)
    # each value is a mean of 4 / 3 or 0 by the probabilities: 1 on average over 2 * 2 * 4 rows, deviation below 0.6
    assert abs(found[..., 0].mean() - 1) < 4 * 0.6 / 16**0.5
    other = passes.fusion(main, patterns=["linear", "attention"])
    assert kinds(other) == kinds(main)
    with pytest.raises(ConfigError, match="there is no pattern 'atention'; did you mean 'attention'"):
        passes.fusion(main, patterns="atention")


def test_another_draw_between_keeps_dropout_apart(static_mode):
    main, _ = static_mode
    q, k, v = qkv()
    a = F.dropout(F.softmax(paddle.matmul(heads(q), heads(k), transpose_y=True)), 0.25)
    drawn = paddle.rand([3])
    out = heads(a @ heads(v))
    assert kinds(passes.fusion(main, [out, drawn], patterns="attention_dropout")) == kinds(main)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("spelling", ["linear", "matmul", "tied", "linear, bias", "tied, bias", "linear, sliced"])
def test_a_loss_over_a_vocabulary_never_has_whole_logits(static_mode, spelling):
    main, _ = static_mode
    vocab = 1024
    seq = None if spelling == "linear, sliced" else 3
    h, label = static.data("h", [None, seq, 8]), static.data("label", [None, seq], "int64")
    tied, b = spelling.startswith("tied"), param(vocab) if spelling.endswith("bias") else None
    w = param(vocab, 8) if tied else param(8, vocab)
    logits = F.linear(h, w, b) if spelling.startswith("linear") else paddle.matmul(h, w, transpose_y=tied)
    logits = logits + b if spelling == "tied, bias" else logits
    logits, label = (logits[:, :-1], label[:, 1:]) if spelling == "linear, sliced" else (logits, label)
    loss = F.cross_entropy(logits, label, ignore_index=7, label_smoothing=0.1)
    gs = grads(loss)
    changed = passes.fusion(main, [loss, *gs])
    assert kinds(changed)[-2:] == ["fused_linear_cross_entropy", "backward"]
    assert not {"linear", "matmul", "add"}.intersection(kinds(changed))
    assert kinds(static.Program.parse_from_string(changed.serialize_to_string())) == kinds(changed)
    labels = RNG.integers(0, vocab, (2, 3))
    labels[0, 1] = 7
    # sums over the vocabulary: pairwise in blocks, far below vocab roundings; over 8 in each logit
    feed = {"h": RNG.normal(size=(2, 3, 8)).astype("float32"), "label": labels}
    near(main, changed, [loss, *gs], feed, 8 + vocab**0.5)


def test_other_losses_keep_their_logits(static_mode):
    main, _ = static_mode
    h, label = static.data("h", [None, 8]), static.data("label", [None, 1], "int64")
    few, many, bias = param(8, 10), param(8, 1024), param(1)
    results = [
        F.cross_entropy(h @ few, label),
        F.cross_entropy(h @ many + bias, label),
        F.softmax_with_cross_entropy(h @ many, label[:, 0]),  # [N, 1], where the one call gives [N]
        F.cross_entropy(F.softmax(h @ many), label, use_softmax=False),
    ]
    assert "fused_linear_cross_entropy" not in kinds(passes.fusion(main, results))
