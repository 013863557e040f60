"""Captured calls that fit a pattern give what they give uncaptured, to any order, whatever else looks at them."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.nn.parameter import Parameter

EPS = 2.0**-24  # float32
TOKENS, SIZE, CLASSES = 12, 8, 1024
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(3, 4, SIZE)).astype("float32")
WEIGHT = RNG.normal(size=(CLASSES, SIZE)).astype("float32")
LABELS = RNG.integers(0, CLASSES, (3, 4))
LABELS[1, :2] = -100
# a loss adds up CLASSES exponentials of logits of SIZE terms, then TOKENS of them; values are about log(CLASSES)
TOLERANCE = 2 * EPS * (CLASSES**0.5 + SIZE + TOKENS) * np.log(CLASSES)


@pytest.fixture
def unfused():
    """A way to run something with the flag off."""
    yield lambda: paddle.set_flags({"FLAGS_fuse_captured": False})
    paddle.set_flags({"FLAGS_fuse_captured": True})


def leaves(*arrays):
    return [paddle.to_tensor(a, stop_gradient=False) for a in arrays]


def rows(labels):
    return labels.reshape([-1])


LOSSES = {
    "matmul, reshaped": lambda h, w, y: F.cross_entropy(
        paddle.matmul(h, w, transpose_y=True).reshape([-1, CLASSES]), rows(y)
    ),
    "whole": lambda h, w, y: F.cross_entropy(paddle.matmul(h, w, transpose_y=True), y.unsqueeze(-1)),
    "turned weight": lambda h, w, y: F.cross_entropy(h @ w.T, y, reduction="sum"),
    "linear, flattened": lambda h, w, y: F.cross_entropy(
        F.linear(h, w.reshape([SIZE, CLASSES])).flatten(0, 1), rows(y), label_smoothing=0.1
    ),
    "matmul, cast": lambda h, w, y: F.cross_entropy(
        (h @ w.reshape([SIZE, CLASSES])).astype("float32").reshape([-1, CLASSES]), rows(y), ignore_index=7
    ),
    "unreduced": lambda h, w, y: F.softmax_with_cross_entropy(
        paddle.matmul(h, w, transpose_y=True), y.unsqueeze(-1)
    ).mean(),
    "layer": lambda h, w, y: paddle.nn.CrossEntropyLoss()(h.reshape([-1, SIZE]).matmul(w, transpose_y=True), rows(y)),
}  # fmt: skip


def run(loss, capture, labels=LABELS):
    """(loss, gradient of the hidden values, of the weight), and the patterns applied."""
    h, w = leaves(HIDDEN, WEIGHT)

    def step(y):
        value = loss(h, w, y)
        value.backward()
        return value

    step = to_static(step) if capture else step
    value = step(paddle.to_tensor(labels))
    return [t.numpy() for t in (value, h.grad, w.grad)], step.fusions if capture else []


def agree(loss, labels=LABELS, fused=("linear_cross_entropy",), tolerance=TOLERANCE):
    captured, names = run(loss, True, labels)
    assert names == list(fused)
    for a, b in zip(captured, run(loss, False, labels)[0], strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.parametrize("spelling", LOSSES)
def test_the_loss_of_a_linear_map_is_fused_however_it_is_written(spelling):
    agree(LOSSES[spelling], np.where(LABELS < 0, 7, LABELS) if spelling == "matmul, cast" else LABELS)


def of_classes(**options):
    def loss(h, w, y):
        logits = paddle.matmul(h, w, transpose_y=True)
        if options.get("soft_label"):
            y = F.one_hot(paddle.clip(y, 0), CLASSES)
        return F.cross_entropy(logits, y, **options)

    return loss


def changed_in_place(h, w, y):
    logits = paddle.matmul(h, w, transpose_y=True)
    logits.add_(logits * 0.5)
    return F.cross_entropy(logits, y)


def changed_weight(h, w, y):
    twice = w * 2
    logits = paddle.matmul(h, twice, transpose_y=True)
    twice.add_(w)
    return F.cross_entropy(logits, y) + twice.mean()


def small(h, w, y):
    return F.cross_entropy(paddle.matmul(h, w[:1000], transpose_y=True), paddle.clip(y, 0, 999))


NOT_FUSED = {
    "weights of classes": of_classes(weight=paddle.to_tensor(np.linspace(0.5, 2, CLASSES).astype("float32"))),
    "soft labels": of_classes(soft_label=True),
    "probabilities": lambda h, w, y: F.cross_entropy(
        F.softmax(paddle.matmul(h, w, transpose_y=True)), y, use_softmax=False
    ),
    "changed in place": changed_in_place,
    "changed weight": changed_weight,
    "few classes": small,
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_FUSED)
def test_what_has_no_one_call_stays(case):
    agree(NOT_FUSED[case], np.clip(LABELS, 0, None) if case == "probabilities" else LABELS, fused=())


def test_the_flag_turns_it_off_and_on_again(unfused):
    h, w = leaves(HIDDEN, WEIGHT)
    step = to_static(lambda y: LOSSES["whole"](h, w, y))
    labels = paddle.to_tensor(LABELS)
    on = step(labels)
    unfused()
    off = step(labels)
    assert step.fusions == []
    assert step.retraces == ["first call", "FLAGS_fuse_captured: True -> False"]
    np.testing.assert_allclose(on.numpy(), off.numpy(), atol=TOLERANCE)


def test_logits_are_never_whole_in_memory():
    h, w = leaves(np.zeros((1024, 16), "float32"), np.zeros((8192, 16), "float32"))

    @to_static
    def step(y):
        F.cross_entropy(paddle.matmul(h, w, transpose_y=True), y).backward()

    compiled = step.compiled(paddle.zeros([1024], "int64"))
    assert "[1024,8192]" not in compiled.as_text()


def test_logits_with_other_readers_have_their_own_way_back():
    def loss(h, w, y):
        logits = paddle.matmul(h, w, transpose_y=True)
        normalizer = paddle.logsumexp(logits, -1)
        return F.cross_entropy(logits, y) + 1e-2 * (normalizer**2).mean() + logits.max() * 0.1

    agree(loss)


@pytest.mark.parametrize("watcher", ["hook", "hook later", "retain_grads"])
def test_hooks_on_logits_see_and_change_their_gradient(watcher):
    seen = {}

    def loss(h, w, y):
        logits = paddle.matmul(h, w, transpose_y=True)
        if watcher == "hook":
            logits.register_hook(lambda g: g * 2)
        if watcher == "retain_grads":
            logits.retain_grads()
        value = F.cross_entropy(logits, y)
        if watcher == "hook later":
            logits.register_hook(lambda g: g * 3)
        seen["logits"] = logits
        return value

    agree(loss)


def test_gradients_of_and_blocked_at_logits():
    def grads(y):
        h, w = inputs
        logits = paddle.matmul(h, w, transpose_y=True)
        value = F.cross_entropy(logits, y) + logits.mean()
        (of_logits,) = paddle.grad(value, [logits], retain_graph=True)
        (blocked,) = paddle.grad(value, [h], retain_graph=True, allow_unused=True, no_grad_vars=[logits])
        assert blocked is None
        (whole,) = paddle.grad(value, [h])
        return of_logits, whole

    inputs = leaves(HIDDEN, WEIGHT)
    step, labels = to_static(grads), paddle.to_tensor(LABELS)
    for a, b in zip(step(labels), grads(labels), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=TOLERANCE)
    assert step.fusions == ["linear_cross_entropy"]


def test_second_derivatives():
    def loss(h, w, y):
        value = F.cross_entropy(paddle.matmul(h, w, transpose_y=True), y)
        (g,) = paddle.grad(value, [h], create_graph=True)
        return value + (g * g).sum()

    agree(loss)


def test_a_captured_forward_trains_like_the_layer_and_is_differentiated_twice():
    labels = paddle.to_tensor(LABELS)
    found = []
    for capture in (True, False):
        h, w = leaves(HIDDEN, WEIGHT)
        forward = (lambda h, w: LOSSES["whole"](h, w, labels)) if not capture else to_static(
            lambda h, w: LOSSES["whole"](h, w, labels)
        )  # fmt: skip
        (first,) = paddle.grad(forward(h, w), [h], create_graph=True)
        (first * first).sum().backward()
        found.append([t.numpy() for t in (first, h.grad, w.grad)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE * max(1, np.abs(b).max()))


def test_a_second_backward_needs_retain_graph_as_ever():
    def step(y, retain):
        h, w = leaves(HIDDEN, WEIGHT)
        value = F.cross_entropy(paddle.matmul(h, w, transpose_y=True), y)
        value.backward(retain_graph=retain)
        value.backward()
        return h.grad

    labels = paddle.to_tensor(LABELS)
    np.testing.assert_allclose(to_static(step)(labels, True).numpy(), step(labels, True).numpy(), atol=TOLERANCE)
    with pytest.raises(paddle.errors.GradError, match="a second time"):
        to_static(step)(labels, False)


def test_logits_without_gradient_stay_so():
    h, w = leaves(HIDDEN, WEIGHT)

    @to_static
    def step(y):
        with paddle.no_grad():
            logits = paddle.matmul(h, w, transpose_y=True)
        stopped = paddle.matmul(h, w, transpose_y=True)
        stopped.stop_gradient = True
        return F.cross_entropy(logits, y).stop_gradient, F.cross_entropy(stopped, y).stop_gradient

    assert step(paddle.to_tensor(LABELS)) == (True, True)
    assert step.fusions == []
    with paddle.no_grad():
        value = to_static(lambda y: LOSSES["whole"](h, w, y))(paddle.to_tensor(LABELS))
    np.testing.assert_allclose(value.numpy(), LOSSES["whole"](h, w, paddle.to_tensor(LABELS)).numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("which", ["weight starts", "weight stops", "a part of the way stops"])
def test_gradients_switched_between_the_calls_go_where_they_went(which):
    def step(h, w, y):
        w.stop_gradient = which == "weight starts"
        table = w + h.sum() if which == "a part of the way stops" else w
        logits = paddle.matmul(h, table, transpose_y=True)
        table.stop_gradient = which != "weight starts"
        F.cross_entropy(logits, y).backward()
        w.stop_gradient = False
        return [t.grad for t in (h, w)]

    labels = paddle.to_tensor(LABELS)
    eager = step(*leaves(HIDDEN, WEIGHT), labels)
    h, w = leaves(HIDDEN, WEIGHT)
    captured = to_static(lambda y: step(h, w, y))
    for a, b in zip(captured(labels), eager, strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            np.testing.assert_allclose(a.numpy(), b.numpy(), atol=TOLERANCE * max(1, np.abs(b.numpy()).max()))
    assert captured.fusions == []


def test_no_grad_fuses_too():
    h, w = leaves(HIDDEN, WEIGHT)

    @to_static
    def evaluate(y):
        with paddle.no_grad():
            return LOSSES["whole"](h, w, y)

    value = evaluate(paddle.to_tensor(LABELS))
    assert evaluate.fusions == ["linear_cross_entropy"]
    np.testing.assert_allclose(value.numpy(), LOSSES["whole"](h, w, paddle.to_tensor(LABELS)).numpy(), atol=TOLERANCE)


def test_autocast_fuses_what_runs_in_one_policy():
    def loss(h, w, y):
        with paddle.amp.auto_cast(dtype="bfloat16"):
            return F.cross_entropy(paddle.matmul(h, w, transpose_y=True), y)

    def apart(h, w, y):
        with paddle.amp.auto_cast(dtype="bfloat16"):
            logits = paddle.matmul(h, w, transpose_y=True)
        return F.cross_entropy(logits.astype("float32"), y)

    def listed(h, w, y):
        with paddle.amp.auto_cast(dtype="bfloat16", custom_black_list={"matmul"}):
            return F.cross_entropy(paddle.matmul(h, w, transpose_y=True), y)

    rounded = 2.0**-8 * SIZE  # each of SIZE products, and the logits where they are made: 8 bits
    agree(loss, tolerance=rounded)
    agree(apart, fused=(), tolerance=rounded)
    agree(listed, fused=())


def test_checked_mode_is_told_of_every_call_as_written():
    paddle.set_flags({"FLAGS_check_nan_inf": True})
    try:
        agree(LOSSES["whole"], fused=())
    finally:
        paddle.set_flags({"FLAGS_check_nan_inf": False})


def test_recomputed_blocks():
    def loss(h, w, y):
        return paddle.distributed.fleet.utils.recompute(LOSSES["whole"], h, w, y)

    captured = run(loss, True)[0]
    for a, b in zip(captured, run(loss, False)[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * max(1, np.abs(b).max()))


def test_attention_written_out():
    q, k, v = leaves(*RNG.normal(size=(3, 2, 4, 2, 8)).astype("float32"))
    mask = paddle.to_tensor(np.where(np.tril(np.ones((4, 4))), 0, -1e9).astype("float32"))

    def attend():
        for t in (q, k, v):
            t.clear_grad()
        q4, k4, v4 = (paddle.transpose(t, [0, 2, 1, 3]) for t in (q, k, v))
        scores = paddle.matmul(q4, k4, transpose_y=True) * 8**-0.5 + mask
        probabilities = F.dropout(F.softmax(scores, -1), 0.0)
        out = paddle.transpose(paddle.matmul(probabilities, v4), [0, 2, 1, 3])
        (out**2).sum().backward()
        return out, probabilities, q.grad, k.grad, v.grad

    step = to_static(attend)
    captured = [t.numpy() for t in step()]
    assert step.fusions == ["attention"]
    for a, b in zip(captured, attend(), strict=True):
        # sums of 8 products, then of 4 keys
        np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=2 * EPS * (8 + 4) * max(1, np.abs(b.numpy()).max()) * 8)


@pytest.mark.parametrize("training", [1, np.True_])
def test_dropout_told_to_train_by_another_true_is_not_idle(training):
    q, k, v = (paddle.to_tensor(a) for a in RNG.normal(size=(3, 1, 4, 2, 8)).astype("float32"))

    def attend():
        q4, k4, v4 = (paddle.transpose(t, [0, 2, 1, 3]) for t in (q, k, v))
        probabilities = F.dropout(F.softmax(paddle.matmul(q4, k4, transpose_y=True), -1), 0.5, training=training)
        return paddle.transpose(paddle.matmul(probabilities, v4), [0, 2, 1, 3])

    step = to_static(attend)
    paddle.seed(2)
    captured = step()
    paddle.seed(2)
    np.testing.assert_allclose(captured.numpy(), attend().numpy(), atol=2 * EPS * (8 + 4) * 8)
    assert step.fusions == []


@pytest.mark.parametrize("ignored", [-100, 2**32 + 3])
def test_labels_beyond_32_bits_are_what_they_are(ignored):
    labels = np.where(LABELS < 0, 2**32 + 3, LABELS)
    h, w = leaves(HIDDEN, WEIGHT)
    step = to_static(lambda y: of_classes(ignore_index=ignored)(h, w, y))
    value = step(paddle.to_tensor(labels))
    assert step.fusions == ["linear_cross_entropy"]
    if ignored < 0:
        assert np.isnan(value.numpy())  # out of range, where a captured function cannot raise
    else:
        eager = of_classes()(h, w, paddle.to_tensor(LABELS))
        np.testing.assert_allclose(value.numpy(), eager.numpy(), atol=TOLERANCE)


def test_a_vocabulary_split_over_devices():
    found = []
    for plan in (None, Plan.from_degrees(dp=2, mp=4)):
        w = Parameter(WEIGHT, "float32", dims=("vocab", "embed"))
        net = paddle.nn.Layer()
        net.w = w
        if plan is not None:
            apply_plan(plan, net)
        try:
            step = to_static(lambda h, y, w=w: LOSSES["matmul, reshaped"](h, w, y))
            h = paddle.to_tensor(np.repeat(HIDDEN, 2, 0), stop_gradient=False)
            value = step(h, paddle.to_tensor(np.repeat(LABELS, 2, 0)))
            value.backward()
            assert step.fusions == ["linear_cross_entropy"]
            found.append([t.numpy() for t in (value, h.grad, w.grad)])
        finally:
            clear_plan()
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE * max(1, np.abs(a).max()))


def test_a_program_run_by_an_executor_is_fused_too(unfused):
    static = paddle.static
    results = []
    for turn_off in (lambda: None, unfused):
        turn_off()
        main, startup, scope, exe = static.Program(), static.Program(), static.Scope(), static.Executor()
        with static.program_guard(main, startup):
            paddle.enable_static()
            try:
                h, y = static.data("h", [None, 4, SIZE]), static.data("y", [None, 4], "int64")
                w = paddle.create_parameter([CLASSES, SIZE], "float32")
                value = LOSSES["matmul, reshaped"](h, w, y)
                pairs = static.append_backward(value)
            finally:
                paddle.disable_static()
        paddle.seed(3)
        exe.run(startup, scope=scope)
        fetched = exe.run(main, {"h": HIDDEN, "y": LABELS}, [value, pairs[0][1]], scope=scope)
        results.append(fetched)
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE)
