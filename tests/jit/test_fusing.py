"""Captured calls that fit a pattern give what they give uncaptured, to any order, whatever else looks at them."""

import gc
import re
import weakref

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
BIAS = RNG.normal(size=CLASSES).astype("float32")
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
    "layer": lambda h, w, y: paddle.nn.CrossEntropyLoss(axis=1)(
        h.reshape([-1, SIZE]).matmul(w, transpose_y=True), rows(y)
    ),
    "log-probabilities": lambda h, w, y: F.nll_loss(
        F.log_softmax(paddle.matmul(h, w, transpose_y=True).reshape([-1, CLASSES])), rows(y)
    ),
}  # fmt: skip


def run(loss, capture, labels=LABELS, arrays=(HIDDEN, WEIGHT)):
    """(loss, gradients of the leaves made of arrays), and the patterns applied."""
    inputs = leaves(*arrays)

    def step(y):
        value = loss(*inputs, y)
        value.backward()
        return value

    step = to_static(step) if capture else step
    value = step(paddle.to_tensor(labels))
    return [t.numpy() for t in (value, *(t.grad for t in inputs))], step.fusions if capture else []


def agree(loss, labels=LABELS, fused=("linear_cross_entropy",), tolerance=TOLERANCE, arrays=(HIDDEN, WEIGHT)):
    captured, names = run(loss, True, labels, arrays)
    assert names == list(fused)
    for a, b in zip(captured, run(loss, False, labels, arrays)[0], strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("spelling", LOSSES)
def test_the_loss_of_a_linear_map_is_fused_however_it_is_written(spelling):
    agree(LOSSES[spelling], np.where(LABELS < 0, 7, LABELS) if spelling == "matmul, cast" else LABELS)


BIASED = {
    "layer": lambda h, w, b, y: F.cross_entropy(F.linear(h, w.T, b).reshape([-1, CLASSES]), rows(y)),
    "tied": lambda h, w, b, y: F.cross_entropy(b + paddle.matmul(h, w, transpose_y=True), y, reduction="none").sum(),
}  # fmt: skip


@pytest.mark.parametrize("spelling", BIASED)
def test_the_loss_of_a_linear_map_with_a_bias_is_fused(spelling):
    agree(BIASED[spelling], arrays=(HIDDEN, WEIGHT, BIAS))


def shifted(h, w, b, y):
    logits = F.linear(h, w.T, b)[:, :-1]
    return F.cross_entropy(logits.reshape([-1, logits.shape[-1]]), rows(y[:, 1:]))


SLICED = {
    "shifted": shifted,
    "another library's": lambda h, w, b, y: F.cross_entropy(
        F.linear(h, w.T, b).astype("float32")[..., :-1, :].contiguous().view([-1, CLASSES]), rows(y[..., 1:])
    ),
    "slice": lambda h, w, b, y: F.cross_entropy(
        paddle.slice(F.linear(h, w.T, b), [1, -3], [1, 0], [4, 2]), y[:2, :-1], reduction="none"
    ).mean(),
    "stepped": lambda h, w, b, y: F.cross_entropy(F.linear(h, w.T, b)[1:, ::2].flatten(0, 1), rows(y[1:, ::2])),
    "nothing": lambda h, w, b, y: F.cross_entropy(F.linear(h, w.T, b)[:, 4:], y[:, 4:], reduction="sum"),
}  # fmt: skip


@pytest.mark.slow_cases("shifted", "stepped", "nothing")
@pytest.mark.parametrize("spelling", SLICED)
def test_the_loss_of_a_part_of_the_logits_is_fused(spelling):
    agree(SLICED[spelling], arrays=(HIDDEN, WEIGHT, BIAS))


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


def of_part(part):
    def loss(h, w, y):
        logits = part(paddle.matmul(h, w, transpose_y=True))
        return F.cross_entropy(logits, y.reshape([-1])[: logits[..., 0].size].reshape(logits.shape[:-1]))

    return loss


def of_weighted_classes(**options):
    return lambda h, w, k, y: F.cross_entropy(paddle.matmul(h, w, transpose_y=True), y, k, **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.2}])
def test_weights_of_classes(options):
    loss = of_weighted_classes(**options)
    agree(lambda *a: loss(*a).sum(), arrays=(HIDDEN, WEIGHT, np.abs(BIAS)))


def test_small_weights_of_classes_survive_float16():
    def loss(h, w, k, y):
        with paddle.amp.auto_cast(dtype="float16"):
            return of_weighted_classes()(h, w, k, y) * 2**12  # as a scaler does

    # 11 bits of SIZE products; weights below what float16 tells from 0
    rounded = 2.0**-11 * SIZE * 2**12
    agree(loss, tolerance=rounded, arrays=(HIDDEN, WEIGHT, np.abs(BIAS) * np.float32(1e-9)))


NOT_FUSED = {
    "one row": of_part(lambda z: z[:, -1]),
    "rows by a list": of_part(lambda z: z[[2, 0]]),
    "rows backward": of_part(lambda z: z.flatten(0, 1).slice([0], [1], [9])[:, ::-1]),
    "a new dim": of_part(lambda z: z[None]),
    "classes in another order": of_part(lambda z: z[..., ::-1]),
    "bits": of_part(lambda z: z.astype("float16").view("bfloat16").astype("float32")),
    "soft labels": of_classes(soft_label=True),
    "probabilities": lambda h, w, y: F.cross_entropy(
        F.softmax(paddle.matmul(h, w, transpose_y=True)), y, use_softmax=False
    ),
    "another axis": lambda h, w, y: F.cross_entropy(
        paddle.matmul((w * h.mean())[None], w, transpose_y=True), paddle.arange(CLASSES)[None], axis=1
    ),
    "changed in place": changed_in_place,
    "changed weight": changed_weight,
    "few classes": small,
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_FUSED)
def test_what_has_no_one_call_stays(case):
    agree(NOT_FUSED[case], np.clip(LABELS, 0, None) if case == "probabilities" else LABELS, fused=())


def test_looking_for_patterns_leaves_no_array_to_the_collector():
    weight = paddle.to_tensor(WEIGHT)
    before = weakref.ref(weight._array)

    @to_static
    def step(h, y):
        loss = LOSSES["whole"](h, weight, y)
        weight.set_value(weight * 2)
        return loss

    gc.disable()
    try:
        step(paddle.to_tensor(HIDDEN), paddle.to_tensor(LABELS))
        assert step.fusions == ["linear_cross_entropy"]
        assert before() is None
    finally:
        gc.enable()


def test_the_flag_turns_it_off_and_on_again(unfused):
    h, w = leaves(HIDDEN, WEIGHT)
    step = to_static(lambda y: LOSSES["whole"](h, w, y))
    labels = paddle.to_tensor(LABELS)
    fused = step(labels)
    unfused()
    off = step(labels)
    assert step.fusions == []
    assert step.retraces == ["first call", "FLAGS_fuse_captured: True -> False"]
    np.testing.assert_allclose(fused.numpy(), off.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize("taken", [1024, 1021])
def test_logits_are_never_whole_in_memory(taken):
    h, w, b = leaves(*(np.zeros(shape, "float32") for shape in ((1, 1024, 16), (8192, 16), 8192)))

    @to_static
    def step(y):
        F.cross_entropy((paddle.matmul(h, w, transpose_y=True) + b)[:, :taken], y).backward()

    text = step.compiled(paddle.zeros([1, taken], "int64")).as_text()
    assert not re.search(rf"({taken}|1024),8192\]", text)


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
    results = []
    for capture in (True, False):
        h, w = leaves(HIDDEN, WEIGHT)
        forward = (lambda h, w: LOSSES["whole"](h, w, labels)) if not capture else to_static(
            lambda h, w: LOSSES["whole"](h, w, labels)
        )  # fmt: skip
        (first,) = paddle.grad(forward(h, w), [h], create_graph=True)
        (first * first).sum().backward()
        results.append([t.numpy() for t in (first, h.grad, w.grad)])
    for a, b in zip(*results, strict=True):
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["bfloat16", "float16", "O2"])
def test_models_in_16_bits(how):
    dtype = "bfloat16" if how == "O2" else how
    results = []
    for capture in (True, False):
        head = paddle.nn.Linear(SIZE, CLASSES)
        head.weight.set_value(WEIGHT.T)
        head.bias.set_value(BIAS)
        head = paddle.amp.decorate(head, level="O2", dtype=dtype) if how == "O2" else head.to(dtype=dtype)

        def step(h, y, head=head):
            with paddle.amp.auto_cast(how == "O2", dtype=dtype, level="O2"):
                loss = F.cross_entropy(head(h)[:, :-1].flatten(0, 1), rows(y[:, 1:]))
            loss.backward()
            return loss

        step = to_static(step) if capture else step
        h = paddle.to_tensor(HIDDEN).astype(dtype).detach()
        h.stop_gradient = False
        loss = step(h, paddle.to_tensor(LABELS))
        assert not capture or step.fusions == ["linear_cross_entropy"]
        results.append([loss, h.grad, head.weight.grad, head.bias.grad])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        a, b = a.astype("float32").numpy(), b.astype("float32").numpy()
        # of 8 or 11 bits: SIZE products, the logits, their gradient, the result
        atol = (2.0**-8 if dtype == "bfloat16" else 2.0**-11) * (SIZE + 3)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol * max(1, np.abs(b).max()))


def test_checked_mode_is_told_of_every_call_as_written():
    paddle.set_flags({"FLAGS_check_nan_inf": True})
    try:
        agree(LOSSES["whole"], fused=())
    finally:
        paddle.set_flags({"FLAGS_check_nan_inf": False})


def test_recomputed_blocks():
    def loss(h, w, y):
        return paddle.distributed.fleet.utils.recompute(LOSSES["whole"], h, w, y)

    agree(loss)


def test_both_sides_of_a_branch_on_a_tensor():
    def loss(h, w, y):
        if h.sum() > 0:
            value = LOSSES["whole"](h, w, y)
        else:
            value = LOSSES["turned weight"](h, w, y)
        return value

    agree(loss, fused=["linear_cross_entropy"] * 2)


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
    results = []
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
            results.append([t.numpy() for t in (value, h.grad, w.grad)])
        finally:
            clear_plan()
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE * max(1, np.abs(a).max()))


def test_logits_of_a_sequence_split_over_devices():
    results = []
    for plan in (None, Plan.from_degrees(sep=2, mp=4)):
        head = paddle.nn.Linear(SIZE, CLASSES)
        head.set_state_dict({"weight": WEIGHT.T, "bias": BIAS})
        if plan is not None:
            apply_plan(plan, head)
        try:
            step = to_static(lambda h, y, head=head: F.cross_entropy(head(h)[:, :-1].flatten(0, 1), rows(y[:, 1:])))
            h = paddle.to_tensor(HIDDEN, stop_gradient=False)
            value = step(h, paddle.to_tensor(LABELS))
            value.backward()
            assert step.fusions == ["linear_cross_entropy"]
            results.append([t.numpy() for t in (value, h.grad, head.weight.grad, head.bias.grad)])
        finally:
            clear_plan()
    for a, b in zip(*results, strict=True):
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
