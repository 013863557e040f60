"""Data-parallel runs of Programs: what is cut and how, what is refused, and where values are afterwards."""

import jax
import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import fluid, static
from polyreme.errors import ProgramError
from polyreme.fluid.lod_tensor import create_lod_tensor
from polyreme.program.parallel import MEAN, ParallelRun
from polyreme.program.parts import joined_offsets, parts_of
from polyreme.static.compiled import CompiledProgram

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
THREE = ["cpu:0", "cpu:1", "cpu:2"]


def compiled(**given):
    return CompiledProgram(static.default_main_program()).with_data_parallel(**given)


def test_sequences_of_two_levels_are_cut_at_the_outer_one(static_mode):
    static.data("x", [None, 1], lod_level=2)
    x = create_lod_tensor(np.arange(7.0, dtype="float32").reshape(7, 1), [[2, 1, 1], [1, 2, 3, 1]], "cpu")
    feeds = parts_of(static_mode[0], {"x": x}, 2)
    shapes = [dict(s) for s in feeds.shapes]
    assert [s["x"] for s in shapes] == [(3, 1), (4, 1)]
    assert feeds.arrays["x"].ravel().tolist() == [0, 1, 2, 0, 3, 4, 5, 6]
    assert feeds.arrays["x@LOD0"].tolist() == [0, 2, 0, 0, 1, 2]
    assert feeds.arrays["x@LOD1"].tolist() == [0, 1, 3, 0, 3, 4]
    assert joined_offsets([np.array([0, 2]), np.array([0, 1, 2])]).tolist() == x.lod()[0][:2] + x.lod()[0][2:]


@pytest.mark.slow
def test_uneven_parts_train_as_each_would_alone_with_statistics_and_dropout(static_mode):
    main, startup = static_mode
    norm = paddle.nn.BatchNorm1D(4, momentum=0.0)
    main.random_seed = startup.random_seed = 5
    h = F.dropout(norm(static.data("x", [None, 4])), 0.5)
    loss = paddle.nn.Linear(4, 2)(h).square().mean()
    paddle.optimizer.SGD(0.0).minimize(loss)
    exe, program = static.Executor(), compiled(loss_name=loss.name, places=THREE)
    exe.run(startup)
    names = [h, "linear_0.w_0@GRAD", loss, "linear_0.w_0", "linear_0.b_0"]
    outputs, gradient, losses, weight, bias = exe.run(program, feed={"x": X[:7]}, fetch_list=names)
    parts = (X[:2], X[2:4], X[4:7])
    want, at = [], 0
    for part, value in zip(parts, losses, strict=True):
        unit = (part - part.mean(0)) / np.sqrt(part.var(0) + 1e-5)
        mine, at = outputs[at : at + len(part)], at + len(part)
        # dropped to 0, or kept and doubled
        assert np.all((mine == 0) | (np.abs(mine - 2 * unit) < 1e-4))
        assert 0 < np.count_nonzero(mine) < mine.size
        out = mine @ weight[:4] + bias[:2]
        np.testing.assert_allclose(value, np.square(out).mean(), rtol=1e-5)
        want.append(mine.T @ (2 * out / out.size))
    np.testing.assert_allclose(gradient[:4], np.mean(want, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(gradient[:4], gradient[8:])
    kept = static.global_scope().find_var(norm._mean.name).get_tensor()
    np.testing.assert_allclose(np.asarray(kept), X[:2].mean(0), atol=1e-6)


def test_what_uneven_parts_cannot_run_is_refused(static_mode):
    x = static.data("x", [None, 4])
    first, second = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 1)
    loss = second(first(x)).mean()
    paddle.optimizer.SGD(0.1, parameters=first.parameters()).minimize(loss)
    again = second(x).mean()
    paddle.optimizer.SGD(0.1, parameters=second.parameters()).minimize(again)
    exe = static.Executor()
    exe.run(static_mode[1])
    program = compiled(loss_name=loss.name, places=THREE)
    assert exe.run(program, feed={"x": X[:6]}, fetch_list=[loss])[0].shape == (3,)
    with pytest.raises(ProgramError, match=r"different sizes, .*: a optimize comes before the last gradients"):
        exe.run(program, feed={"x": X[:7]}, fetch_list=[loss])


def test_uneven_values_after_the_gradients_are_refused(static_mode):
    x = static.data("x", [None, 4])
    out = paddle.nn.Linear(4, 1)(x)
    paddle.optimizer.SGD(0.1).minimize(out.mean())
    late = out * 2
    exe = static.Executor()
    exe.run(static_mode[1])
    loss = static_mode[0].global_block().ops[1].outputs[0]
    with pytest.raises(ProgramError, match=r"'linear_0.tmp_0', whose size differs, is used after the gradients"):
        exe.run(compiled(loss_name=loss, places=THREE), feed={"x": X[:7]}, fetch_list=[late])


def test_gradients_of_feeds_stay_each_devices_own(static_mode):
    x = static.data("x", [None, 4])
    x.stop_gradient = False
    loss = (x * x).mean()
    (gradient,) = static.gradients(loss, x)
    (found,) = static.Executor().run(
        compiled(loss_name=loss.name, places=THREE), feed={"x": X[:6]}, fetch_list=[gradient]
    )
    np.testing.assert_allclose(found, 2 * X[:6] / 8, rtol=1e-6)  # a mean over the 8 numbers of a part


def test_differentiated_gradients_of_parameters_are_refused(static_mode):
    layer = paddle.nn.Linear(4, 1)
    loss = layer(static.data("x", [None, 4])).square().mean()
    (gradient,) = static.gradients(loss, layer.weight)
    penalized = loss + gradient.square().sum()
    paddle.optimizer.SGD(0.1).minimize(penalized)
    exe = static.Executor()
    exe.run(static_mode[1])
    with pytest.raises(ProgramError, match=r"gradients of \['linear_0.w_0'\] are differentiated in turn"):
        exe.run(compiled(loss_name=penalized.name, places=THREE), feed={"x": X[:6]}, fetch_list=[loss])


def test_a_program_that_needs_values_on_the_host_is_refused(static_mode):
    x = fluid.data("x", [None, 1], lod_level=1)
    wide = fluid.layers.sequence_expand(x, fluid.data("y", [None, 1], lod_level=1))
    feed = {n: create_lod_tensor(X[:6, :1], [[2, 2, 2]], "cpu") for n in "xy"}
    with pytest.raises(ProgramError, match=r"cannot be compiled, run it plain: a value is needed while it runs"):
        static.Executor().run(compiled(places=THREE), feed=feed, fetch_list=[wide])


def test_a_branch_runs_on_each_device(static_mode):
    x = static.data("x", [None, 4])
    y = static.nn.cond(x.sum() > 0, lambda: x * 2, lambda: x - 1)
    feed = np.concatenate([np.ones((2, 4)), -np.ones((2, 4))]).astype("float32")
    (found,) = static.Executor().run(compiled(places=THREE[:2]), feed={"x": feed}, fetch_list=[y])
    np.testing.assert_array_equal(found, np.concatenate([feed[:2] * 2, feed[2:] - 1]))


def test_feeds_are_split_on_the_way_and_fetches_stay_on_the_devices(static_mode):
    y = static.data("x", [None, 4]) * 2
    devices = tuple(jax.devices()[:4])
    feeds = parts_of(static_mode[0], {"x": X}, 4)
    run = ParallelRun(static_mode[0], static.global_scope(), feeds, [y.name], devices, MEAN, False)
    (out,) = run(feeds)
    assert [s.data.shape for s in out.addressable_shards] == [(2, 4)] * 4
    np.testing.assert_array_equal(out, X * 2)


def test_the_learning_rate_and_values_set_by_hand_reach_all_devices(static_mode):
    w = paddle.create_parameter([1], "float32", default_initializer=paddle.nn.initializer.Constant(1.0))
    rate = paddle.optimizer.lr.StepDecay(1.0, 1, gamma=0.5)
    loss = (w * static.data("x", [None, 1])).mean()
    paddle.optimizer.SGD(rate).minimize(loss)
    exe, program = static.Executor(), compiled(loss_name=loss.name, places=THREE)
    exe.run(static_mode[1])
    weights = []
    for _ in range(3):
        weights.append(exe.run(program, feed={"x": np.ones((3, 1), "float32")}, fetch_list=[w])[0].tolist())
        rate.step()
    assert weights == [[0.0] * 3, [-0.5] * 3, [-0.75] * 3]
    static.global_scope().find_var(w.name).get_tensor().set(np.array([2], "float32"))
    (weights,) = exe.run(program, feed={"x": np.ones((3, 1), "float32")}, fetch_list=[w])
    assert weights.tolist() == [2 - 0.125] * 3
