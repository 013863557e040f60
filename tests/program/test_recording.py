"""Programs: what is recorded, with which shapes, and that an Executor gives what eager code gives."""

import threading
import time

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.core import unique_name
from polyreme.errors import CaptureError, ProgramError, ShapeError
from polyreme.jit.control_flow import cond, while_loop

X = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype("float32")
# float32, sums of up to 192 terms, values of order 1
TOLERANCE = {"rtol": 192**0.5 * 2**-23, "atol": 192**0.5 * 2**-23}


def run(fetch, **feed):
    exe = static.Executor()
    exe.run(static.default_startup_program())
    return exe.run(feed=feed, fetch_list=fetch)


def test_sizes_not_known_while_recording_are_known_when_it_runs(static_mode):
    x = static.data("x", [None, 3, 8, None])
    flat = x.reshape([x.shape[0], -1])
    again = paddle.reshape(flat, [paddle.shape(x)[0], 3, -1])
    part = again[:, 1:, ::2]
    assert (flat.shape, again.shape, part.shape) == ([-1, -1], [-1, 3, -1], [-1, 2, -1])
    for n in (4, 2):
        found = run([flat, again, part], x=X[:n])
        want = X[:n].reshape(n, 192), X[:n].reshape(n, 3, 64), X[:n].reshape(n, 3, 64)[:, 1:, ::2]
        for a, b in zip(found, want, strict=True):
            np.testing.assert_array_equal(a, b)


# what is computed of x [-1, -1], its shape, and a size of x that fits
FITTING = {
    "broadcast": (lambda x, w: (x[0] * w[2]).sum(0), [], (1, 4)),
    "both dims": (lambda x, w: x * w, [3, 4], (3, 4)),
    "matmul": (lambda x, w: paddle.matmul(w, x, transpose_y=True), [3, -1], (7, 4)),
    "linear": (lambda x, w: F.linear(x, w.T), [-1, 3], (7, 4)),
    "concat": (lambda x, w: paddle.concat([x, w]), [-1, 4], (2, 4)),
    "reshape": (lambda x, w: x[0].reshape([2, 3]), [2, 3], (1, 6)),
    "expand": (lambda x, w: x[:1].expand([5, 4]), [5, 4], (2, 4)),
    "expand as": (lambda x, w: x.expand_as(w[:1]), [1, 4], (1, 4)),
    "split": (lambda x, w: x.split([2, 3])[1], [3, -1], (5, 2)),
    "three dims": (lambda x, w: x.unsqueeze(2) * x[0] * w.unsqueeze(2).expand([3, 4, 4]), [3, 4, 4], (3, 4)),
    "in place": (lambda x, w: (x + 0).add_(w), [3, 4], (3, 4)),
    "mask": (lambda x, w: F.scaled_dot_product_attention(w.reshape([1, 3, 1, 4]), w[:2].reshape([1, 2, 1, 4]),
                                                         w[:2].reshape([1, 2, 1, 4]), attn_mask=x[None, None]),
             [1, 3, 1, 4], (3, 2)),
    "as many as a list has": (lambda x, w: paddle.histogramdd(x, bins=[2, 3, 4])[0], [2, 3, 4], (5, 3)),
}  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", FITTING)
def test_a_size_not_known_takes_the_size_that_an_op_meets_elsewhere(static_mode, name):
    compute, shape, fed = FITTING[name]
    x = static.data("x", [None, None])
    result = compute(x, paddle.create_parameter([3, 4], "float32"))
    assert result.shape == shape
    assert run([result], x=np.ones(fed, "float32"))[0].ndim == len(shape)


@pytest.mark.parametrize("time_major", [False, True])
def test_recurrent_layers_take_inputs_of_no_known_size(static_mode, time_major):
    x = static.data("x", [None, None, None])
    outputs, _ = paddle.nn.SimpleRNN(3, 4, time_major=time_major)(x)
    assert outputs.shape == [-1, -1, 4]
    exe = static.Executor()
    exe.run(static.default_startup_program())
    assert exe.run(feed={"x": np.ones([2, 5, 3], "float32")}, fetch_list=[outputs])[0].shape == (2, 5, 4)


def test_windows_over_sizes_not_known_take_memory_by_dim(static_mode):
    """All entries of all windows would be 16e9 where a size is not known."""
    x = static.data("x", [None, 1, None, None, None])
    value, index = F.adaptive_max_pool3d(x, [2, 2, 1], return_mask=True)
    assert value.shape == index.shape == [-1, 1, 2, 2, 1]
    fed = np.arange(24, dtype="float32").reshape(1, 1, 2, 4, 3)
    mean = F.avg_pool3d(x, 2, stride=2, padding=[0, 1, 1])
    assert mean.shape == [-1, 1, -1, -1, -1]
    *found, means = run([value, index, mean], x=fed)
    assert [a.ravel().tolist() for a in found] == [[5, 11, 17, 23]] * 2
    # windows of the corners hold one entry of each of two planes: 0 and 12, for the first
    assert means[0, 0, 0, [0, 0, -1, -1], [0, -1, 0, -1]].tolist() == [6, 7.5, 15, 16.5]


def test_a_size_not_known_takes_a_small_one_that_an_op_asks_for(static_mode):
    x, y = static.data("x", [-1, -1]), static.data("y", [-1, -1])
    outs = [paddle.cross(x, y), paddle.cross(x, y, axis=1), paddle.as_complex(x[:, :2])]
    outs += [F.grid_sample(static.data("image", [-1] * 4), x.reshape([1, 1, 2, -1])[..., :2])]
    # where it may be this dim or that, neither is known
    assert [list(out.shape) for out in outs] == [[-1, -1], [-1, 3], [-1], [1, -1, 1, 2]]
    arrays = {"x": np.float32([[1, 2, 3], [4, 5, 7]]), "y": np.float32([[0, 1, 0], [0, 0, 1]])}
    got = static.Executor().run(feed={**arrays, "image": np.ones((1, 2, 3, 3), "float32")}, fetch_list=outs[:2])
    np.testing.assert_array_equal(got, [np.cross(arrays["x"], arrays["y"])] * 2)


def test_sizes_not_known_are_those_that_a_refusal_names(static_mode):
    columns, theta, boxes = (static.data(name, [-1] * ndim) for name, ndim in (("x", 3), ("theta", 3), ("boxes", 2)))
    outs = [F.fold(columns, [4, 4], 2), F.affine_grid(theta, [2, 1, 4, 5]), paddle.vision.ops.nms(boxes, 0.3)]
    assert [list(out.shape) for out in outs] == [[-1, -1, 4, 4], [2, 4, 5, 2], [-1]]
    fed = {"x": (2, 12, 9), "theta": (2, 2, 3), "boxes": (3, 4)}
    folded, grid, kept = run(outs, **{name: np.ones(shape, "float32") for name, shape in fed.items()})
    assert (folded.shape, grid.shape, kept.tolist()) == ((2, 3, 4, 4), (2, 4, 5, 2), [0, 1, 2])
    with pytest.raises(CaptureError, match=r"size 1 of .* give static.data that size"):
        paddle.gather_nd(columns, static.data("index", [-1, -1], "int64"))


def test_lists_of_variables_are_put_together_and_tensors_with_values_are_fetched(static_mode):
    x, known = static.data("x", [2]), paddle.to_tensor([7, 8])
    joined = paddle.to_tensor([[x[1], 3], [x.sum(), 4.5]], dtype="float64", stop_gradient=False)
    assert (joined.dtype, joined.stop_gradient) == ("float64", False)
    got = static.Executor().run(feed={"x": np.float32([1, 2])}, fetch_list=[joined, known, paddle.to_tensor(x)])
    assert [a.tolist() for a in got] == [[[2, 3], [3, 4.5]], [7, 8], [1, 2]]


def test_a_size_not_known_that_nothing_fits_is_refused(static_mode):
    x = static.data("x", [None, 2])
    with pytest.raises(ShapeError, match=r"multiply\(x float32\[-1, 2\], y float32\[3, 4\]\)"):
        x * paddle.create_parameter([3, 4], "float32")
    with pytest.raises(ShapeError, match=r"bins=2 in every dim .* does not say n; give a list"):
        paddle.histogramdd(static.data("points", [4, None]), 2)


def test_loop_variables_may_be_nested(static_mode):
    x = static.data("x", [2])
    start = {"i": paddle.zeros([1], "int64"), "sums": [x, x * 2]}

    def body(now):
        return {"i": now["i"] + 1, "sums": (now["sums"][0] + 1, now["sums"][1] * 2)}

    (end,) = while_loop(lambda now: now["i"] < 3, lambda now: [body(now)], [start])
    found = run([end["i"], *end["sums"]], x=np.array([1.0, 5.0], np.float32))
    assert [a.tolist() for a in found] == [[3], [4.0, 8.0], [16.0, 80.0]]
    with pytest.raises(ProgramError, match="nested in another way"):
        while_loop(lambda now: now["i"] < 3, lambda now: [{"i": now["i"] + 1}], [start])


def build(x):
    """A convolution, batch normalization, a branch and a loop."""
    conv, norm = paddle.nn.Conv2D(3, 4, 3), paddle.nn.BatchNorm2D(4)
    h = F.relu(norm(conv(x)))
    y = cond(h.mean() > 0.1, lambda: h * 2, lambda: h - 1)
    count = paddle.zeros([1], "int64")
    _, total = while_loop(lambda i, a: i < 3, lambda i, a: [i + 1, a * 2], [count, y.mean()], maximum_iterations=5)
    return norm, total


def eager(values, steps):
    """The same model, trained eagerly."""
    paddle.seed(3)
    x = paddle.to_tensor(values)
    conv, norm = paddle.nn.Conv2D(3, 4, 3), paddle.nn.BatchNorm2D(4)
    optimizer = paddle.optimizer.Adam(0.01, parameters=[*conv.parameters(), *norm.parameters()])
    losses = []
    for _ in range(steps):
        h = F.relu(norm(conv(x)))
        y = h * 2 if h.mean().item() > 0.1 else h - 1
        loss = y.mean() * 8
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    return losses, norm._mean.numpy()


def test_training_equals_eager_training_with_statistics_branches_and_loops(static_mode):
    paddle.disable_static()
    want, mean = eager(X, 3)
    paddle.enable_static()
    paddle.seed(3)
    norm, loss = build(static.data("x", [None, 3, 8, 8]))
    paddle.optimizer.Adam(0.01).minimize(loss)
    exe = static.Executor()
    exe.run(static.default_startup_program())
    found = [exe.run(feed={"x": X}, fetch_list=[loss])[0] for _ in range(3)]
    np.testing.assert_allclose(found, want, rtol=1e-5)  # three Adam steps: the sign of small gradients counts
    np.testing.assert_allclose(
        np.asarray(static.global_scope().find_var(norm._mean.name).get_tensor()), mean, **TOLERANCE
    )


def test_a_to_static_function_is_recorded_with_its_control_flow(static_mode):
    @paddle.jit.to_static
    def halved(x, limit):
        steps = paddle.zeros([1])
        while x.sum() > limit:
            x = x / 2
            steps += 1
        if steps > 2:
            x = x - 1
        else:
            x = x + 1
        return x, steps

    x = static.data("x", [2])
    found = halved(x, 1.5)
    for values in ([8.0, 8.0], [1.0, 1.0]):
        got = run(list(found), x=np.array(values, "float32"))
        paddle.disable_static()
        want = halved(paddle.to_tensor(values), 1.5)
        paddle.enable_static()
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b.numpy())


def test_python_objects_changed_in_a_recorded_branch_are_refused(static_mode):
    seen = []

    @paddle.jit.to_static
    def collect(x):
        if x.sum() > 0:
            seen.append(1)
        return x

    with pytest.raises(CaptureError, match=r"test_recording.py:\d+: seen is changed in a branch or loop"):
        collect(static.data("x", [2]))


def test_in_place_ops_give_a_variable_a_new_value(static_mode):
    x = static.data("x", [2, 2])
    y = x * 1
    y[0, 1] = 5.0
    y += 1
    y.add_(x)
    want = X[0, 0, :2, :2] * 1
    want[0, 1] = 5.0
    np.testing.assert_array_equal(run([y, y.name], x=X[0, 0, :2, :2])[1], want + 1 + X[0, 0, :2, :2])


def test_ops_run_as_declared_whatever_their_public_function_arranges(static_mode):
    x = static.data("x", [None], "int64")
    counts = paddle.bincount(x, length=4)
    one = paddle.zeros([1])
    before = one * 1
    two = paddle.increment(one, 2.0)
    three = cond(x.sum() > 0, lambda: paddle.increment(two), lambda: two)
    after = before + one
    found = run([counts, before, two, three, after], x=np.array([0, 1, 1, 3]))
    for value, want in zip(found, [[1, 2, 0, 1], [0], [3], [3], [3]], strict=True):
        np.testing.assert_array_equal(value, want)


def test_gradients_of_gradients(static_mode):
    x = static.data("x", [3])
    x.stop_gradient = False
    (first,) = static.gradients(x * x * x, x)
    (second,) = static.gradients(first, x)
    found = run([first, second], x=np.array([1.0, 2.0, 3.0], "float32"))
    np.testing.assert_array_equal(found, [[3, 12, 27], [6, 12, 18]])


def test_a_penalty_on_gradients_is_differentiated(static_mode):
    x = static.data("x", [3])
    w = paddle.create_parameter([3], "float32", default_initializer=paddle.nn.initializer.Constant(2.0))
    x.stop_gradient = False
    (dx,) = static.gradients((w * x * x).sum(), x)
    [(_, dw)] = static.append_backward((dx * dx).sum())
    values = np.array([1.0, 2.0, 3.0], "float32")
    np.testing.assert_array_equal(run([dw], x=values)[0], 8 * 2 * values**2)  # d/dw of (2 w x)^2


def test_a_layer_built_before_static_mode_is_trained_in_place(static_mode):
    paddle.disable_static()
    layer = paddle.nn.Linear(2, 1)
    before = layer.weight.numpy()
    paddle.enable_static()
    loss = layer(static.data("x", [None, 2])).sum()
    paddle.optimizer.Momentum(0.1).minimize(loss)
    run([loss], x=np.ones((1, 2), "float32"))
    np.testing.assert_allclose(layer.weight.numpy(), before - 0.1, rtol=2**-22)


def test_a_test_clone_evaluates(static_mode):
    main, _ = static_mode
    x = static.data("x", [None, 4])
    out = F.dropout(paddle.nn.Linear(4, 3)(x), 0.5)
    paddle.optimizer.SGD(0.1).minimize(out.sum())
    test = main.clone(for_test=True)
    assert [op.kind for op in test.global_block().ops] == ["linear", "dropout", "sum"]
    exe = static.Executor()
    exe.run(static.default_startup_program())
    a, b = (exe.run(test, feed={"x": np.ones((8, 4), "float32")}, fetch_list=[out])[0] for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert np.count_nonzero(a) == 24


def test_the_rate_of_a_scheduler_reaches_programs(static_mode):
    w = paddle.create_parameter([1], "float32", default_initializer=paddle.nn.initializer.Constant(1.0))
    rate = paddle.optimizer.lr.StepDecay(1.0, 1, gamma=0.5)
    paddle.optimizer.SGD(rate).minimize(w.sum())
    exe = static.Executor()
    exe.run(static.default_startup_program())
    found = []
    for _ in range(3):
        found.append(exe.run(fetch_list=[w])[0].item())
        rate.step()
    assert found == [0.0, -0.5, -0.75]


def test_a_seeded_program_repeats(static_mode):
    main, _ = static_mode
    main.random_seed = 7
    r = paddle.rand([3])
    exe, scopes = static.Executor(), [static.Scope(), static.Scope()]
    draws = [[exe.run(fetch_list=[r], scope=scope)[0].tolist() for _ in range(2)] for scope in scopes]
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1]


@pytest.mark.parametrize(
    ("feed", "match"),
    [
        ({"x": X[:, :2]}, r"'x' has shape \[-1, 3, 8, 8\], got \[4, 2, 8, 8\]"),
        ({"xx": X}, "no variable 'xx'; did you mean 'x'"),
        ({}, r"feed lacks \['x'\]"),
        ({"x": X.astype("float64")}, r"'x' is float32, got float64 .*astype\(\"float32\"\)"),
    ],
)
def test_a_feed_that_does_not_fit_names_the_variable(static_mode, feed, match):
    y = static.data("x", [None, 3, 8, 8]) * 2
    with pytest.raises(ProgramError, match=match):
        static.Executor().run(feed=feed, fetch_list=[y])


def test_a_variable_of_another_program_is_refused(static_mode):
    main, _ = static_mode
    x = static.data("x", [2])
    y = x * 2
    with static.program_guard(main.clone()):
        assert (y + 1).shape == [2]  # which a clone has too
    with static.program_guard(static.Program()):
        with unique_name.guard():
            other = static.data("x", [2]) * 100
        with pytest.raises(ProgramError, match="belongs to another Program"):
            other + y


def test_an_error_of_a_run_names_the_operation(static_mode):
    x = static.data("x", [None])
    y = paddle.reshape(x, [x.shape[0] // 2, 2])
    with pytest.raises(ShapeError) as caught:
        run([y], x=X[0, 0, 0, :3])
    assert any(f"%{y.name}: float32[-1, 2] = reshape(" in note for note in caught.value.__notes__)


def test_threads_record_into_programs_of_their_own():
    def build(count, made):
        paddle.enable_static()
        program = static.Program()
        with static.program_guard(program, static.Program()):
            x = static.data("x", [2])
            for _ in range(count):
                x = x + 1
                time.sleep(0.001)
        made[count] = program.num_ops
        paddle.disable_static()

    programs = {}
    threads = [threading.Thread(target=build, args=(count, programs)) for count in (20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert programs == {20: 20, 30: 30}


def test_what_needs_a_value_is_refused_with_the_line(static_mode):
    x = static.data("x", [1])
    with pytest.raises(CaptureError, match=r"test_recording.py:\d+: bool\(Tensor\).*static.nn.cond"):
        bool(x > 0)
    with pytest.raises(ProgramError, match=r"variable 'linear_0.w_0' has no value .*startup"):
        static.Executor().run(feed={"x": X[0, 0, 0, :1]}, fetch_list=[paddle.nn.Linear(1, 1)(x)])
    with pytest.raises(ProgramError, match="no variable 'nothing'"):
        static.Executor().run(feed={"x": X[0, 0, 0, :1]}, fetch_list=["nothing"])
