"""Executor: what was seen before is looked up, and whatever could change its result is noticed."""

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme import static
from polyreme.errors import ProgramError

X = np.arange(8, dtype="float32").reshape(2, 4)


def test_a_run_is_compiled_once_for_its_shapes_and_fetches(static_mode):
    x = static.data("x", [None, 4])
    out = paddle.nn.Linear(4, 3)(x)
    paddle.optimizer.Adam(0.1).minimize(out.sum())
    exe = static.Executor()
    exe.run(static.default_startup_program())
    start = len(exe._compiled)
    for feed, fetch, more in (
        (X, [out], 1),
        (X, [out], 1),
        (X, out, 1),
        (X, [out.name], 2),  # by name: looked up once
        (X, (out.name,), 2),
        (X[:1], [out], 3),
        (jax.numpy.asarray(X), [out], 3),
        (X.tolist(), [out], 3),
        (X, None, 4),
        (X, [], 4),
    ):
        before = list(exe._compiled.values())
        exe.run(feed={"x": feed}, fetch_list=fetch)
        assert list(exe._compiled.values())[: len(before)] == before
        assert len(exe._compiled) == start + more


def test_a_feed_is_checked_however_often_another_was_run(static_mode):
    y = static.data("x", [None, 4]) * 2
    exe = static.Executor()
    for _ in range(2):
        exe.run(feed={"x": X}, fetch_list=[y])
        with pytest.raises(ProgramError, match="'x' is float32, got float64"):
            exe.run(feed={"x": X.astype("float64")}, fetch_list=[y])
        with pytest.raises(ProgramError, match="feed lacks"):
            exe.run(fetch_list=[y])
        with pytest.raises(ProgramError, match="feed is a dict of name"):
            exe.run(feed=[X], fetch_list=[y])


def test_a_change_of_the_program_or_the_scope_is_noticed(static_mode):
    x = static.data("x", [None, 4])
    y = x * 2
    shift = paddle.create_parameter([4], "float32", default_initializer=paddle.nn.initializer.Constant(1.0))
    z = y + shift
    exe = static.Executor()
    exe.run(static.default_startup_program())
    np.testing.assert_array_equal(exe.run(feed={"x": X}, fetch_list=[z])[0], X * 2 + 1)
    static.global_scope().erase([shift.name])
    static.global_scope().var(shift.name).get_tensor().set(np.full(4, 5, "float32"))
    np.testing.assert_array_equal(exe.run(feed={"x": X}, fetch_list=[z])[0], X * 2 + 5)
    y.add_(x)
    np.testing.assert_array_equal(exe.run(feed={"x": X}, fetch_list=[y])[0], X * 3)


def test_a_place_says_where_it_runs(static_mode):
    y = static.data("x", [None, 4]) * 2
    exe = static.Executor(paddle.CPUPlace(3))
    (out,) = exe.run(feed={"x": X}, fetch_list=[y], return_numpy=False)
    assert out._array.devices() == {jax.devices()[3]}


def test_a_closed_executor_and_what_is_no_program_are_refused(static_mode):
    exe = static.Executor()
    with pytest.raises(TypeError, match="takes a Program or a CompiledProgram, got str"):
        exe.run("main")
    exe.close()
    with pytest.raises(ProgramError, match="after close"):
        exe.run()


def test_float64_parameters_are_moved_by_the_whole_rate(static_mode):
    x = static.data("x", [None, 4], "float64")
    weight = static.create_parameter([4, 1], "float64")
    optimizer = paddle.optimizer.SGD(0.1)  # it does not know yet of what
    optimizer.minimize(paddle.matmul(x, weight).sum())
    exe = static.Executor()
    exe.run(static.default_startup_program())
    steps = []
    for rate in (0.1, 0.3):
        optimizer.set_lr(rate)
        start = np.array(static.global_scope().find_var(weight.name).get_tensor())
        exe.run(feed={"x": X.astype("float64")}, fetch_list=[])
        steps.append(start - np.array(static.global_scope().find_var(weight.name).get_tensor()))
    for rate, step in zip((0.1, 0.3), steps, strict=True):
        np.testing.assert_allclose(step[:, 0], rate * X.sum(0, "float64"), rtol=16 * 2.0**-52)
