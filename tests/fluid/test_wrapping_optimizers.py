"""ModelAverage, LookaheadOptimizer and RecomputeOptimizer in Programs, against NumPy and what they wrap."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.errors import ConfigError, ProgramError
from polyreme.incubate.optimizer import ModelAverage as DynamicModelAverage

X = np.random.RandomState(0).randn(8, 3).astype("float32")
RATE = 0.125


def regression(fluid, hidden=False):
    """(loss, what may be a checkpoint): of weights "w" that start at 0, with a hidden layer in front if asked."""
    x = fluid.data("x", [None, 3])
    h = fluid.layers.fc(x, 3, act="tanh", param_attr="h") if hidden else x
    attr = fluid.ParamAttr("w", initializer=fluid.initializer.Constant(0.0))
    y = fluid.layers.fc(h, 1, param_attr=attr, bias_attr=False)
    return fluid.layers.mean(fluid.layers.square(y - 1.0)), h


def weights(fluid, exe, steps):
    """The values of "w" after each step."""
    exe.run(fluid.default_startup_program())
    values = []
    for _ in range(steps):
        exe.run(feed={"x": X})
        values.append(np.array(fluid.global_scope().find_var("w").get_tensor()))
    return values


def sgd(w):
    return w - RATE * 2 * X.T @ (X @ w - 1) / len(X)


def test_a_model_average_is_the_mean_of_its_window(script):
    fluid = script
    loss, _ = regression(fluid)
    fluid.optimizer.SGD(RATE).minimize(loss)
    average = fluid.optimizer.ModelAverage(0.5, min_average_window=2, max_average_window=3)
    moving = fluid.optimizer.ExponentialMovingAverage(0.5)
    moving.update()
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    with pytest.raises(ProgramError, match="no update"), average.apply(exe):
        pass
    values = weights(fluid, exe, 7)
    # the same window, counted by the one of dynamic code
    with fluid.dygraph.guard():
        parameter = paddle.create_parameter([3, 1], "float32")
        other = DynamicModelAverage(0.5, [parameter], min_average_window=2, max_average_window=3)
        for value in values:
            parameter.set_value(value)
            other.step()
        with other.apply():
            want = parameter.numpy()
    assert not np.allclose(want, values[-1])
    weight = fluid.global_scope().find_var("w").get_tensor()
    with average.apply(exe):
        np.testing.assert_allclose(np.array(weight), want, rtol=1e-5)
    np.testing.assert_array_equal(np.array(weight), values[-1])
    with moving.apply(exe):  # weights of 2^-7, ..., 2^-1, which add up to 1 - 2^-7
        latest = sum(v * 2.0 ** (i - 7) for i, v in enumerate(values)) / (1 - 2.0**-7)
        np.testing.assert_allclose(np.array(weight), latest, rtol=1e-5)
    with average.apply(exe, need_restore=False):
        pass
    np.testing.assert_allclose(np.array(weight), want, rtol=1e-5)
    average.restore(exe)
    np.testing.assert_array_equal(np.array(weight), values[-1])
    with pytest.raises(ConfigError, match="belongs to the optimizer"):
        fluid.optimizer.ModelAverage(0.5, regularization=fluid.regularizer.L2Decay(0.1))


def test_parameters_may_be_left_out_of_a_model_average(script):
    fluid = script
    x = fluid.data("x", [None, 3])
    left_out = fluid.ParamAttr("h", do_model_average=False)
    y = fluid.layers.fc(fluid.layers.fc(x, 3, param_attr=left_out), 1, param_attr="w", bias_attr=False)
    fluid.optimizer.SGD(RATE).minimize(fluid.layers.mean(fluid.layers.square(y - 1.0)))
    average = fluid.optimizer.ModelAverage(1.0, min_average_window=3, max_average_window=3)
    exe = fluid.Executor(fluid.CPUPlace())
    weights(fluid, exe, 3)
    latest = {name: np.array(fluid.global_scope().find_var(name).get_tensor()) for name in ("h", "w")}
    with average.apply(exe):
        averaged = {name: np.array(fluid.global_scope().find_var(name).get_tensor()) for name in latest}
    np.testing.assert_array_equal(averaged["h"], latest["h"])
    assert not np.allclose(averaged["w"], latest["w"])
    with fluid.dygraph.guard():
        attr = paddle.ParamAttr(do_model_average=False)
        apart, other = paddle.create_parameter([1], "float32", attr=attr), paddle.create_parameter([1], "float32")
        both = DynamicModelAverage(1.0, [apart, other], min_average_window=2, max_average_window=2)
        for value in (1.0, 3.0):
            apart.set_value(np.float32([value]))
            other.set_value(np.float32([value]))
            both.step()
        with both.apply():
            assert (apart.item(), other.item()) == (3.0, 2.0)


def test_lookahead_steps_back_every_k_steps(script):
    fluid = script
    loss, _ = regression(fluid)
    fluid.optimizer.LookaheadOptimizer(fluid.optimizer.SGD(RATE), alpha=0.25, k=2).minimize(loss)
    got = weights(fluid, fluid.Executor(fluid.CPUPlace()), 5)
    slow = fast = np.zeros((3, 1), "float32")
    for step, value in enumerate(got, 1):
        fast = sgd(fast)
        if step % 2 == 0:
            slow = fast = slow + 0.25 * (fast - slow)
        # a step sums 8 products of float32, and 5 of them follow each other
        np.testing.assert_allclose(value, fast, rtol=0, atol=5 * 8 * 2.0**-23)
    for arguments in ({"alpha": 2}, {"k": 0}):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            fluid.optimizer.LookaheadOptimizer(fluid.optimizer.SGD(RATE), **arguments)


def test_recompute_gives_the_same_steps(script):
    fluid = script
    got = {}
    for wrapped in (False, True):
        main, startup = fluid.Program(), fluid.Program()
        main.random_seed = startup.random_seed = 1
        with fluid.program_guard(main, startup), fluid.unique_name.guard(), fluid.scope_guard(fluid.Scope()):
            loss, hidden = regression(fluid, hidden=True)
            step = fluid.optimizer.Adam(RATE)
            if wrapped:
                step = fluid.optimizer.RecomputeOptimizer(step)
                with pytest.raises(ConfigError, match="call _set_checkpoints"):
                    step.minimize(loss)
                step._set_checkpoints([hidden])
            _, pairs = step.minimize(loss)
            assert len(pairs) == 3
            got[wrapped] = weights(fluid, fluid.Executor(fluid.CPUPlace()), 3)
    np.testing.assert_allclose(got[True], got[False], rtol=1e-5)


def test_weight_norm_trapezoids_and_initial_values(script):
    fluid = script
    x = fluid.data("x", [None, 3])
    attr = fluid.WeightNormParamAttr(dim=1, initializer=fluid.initializer.Constant(2.0))
    with fluid.initializer.init_on_cpu():
        out = fluid.layers.fc(x, 2, param_attr=attr, bias_attr=False)
    assert fluid.initializer.force_init_on_cpu() is False
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    (got,) = exe.run(feed={"x": X}, fetch_list=[out])
    np.testing.assert_allclose(got, X @ np.full((3, 2), 2.0), rtol=1e-5, atol=6 * 2.0**-23)
    assert len(fluid.default_main_program().all_parameters()) == 2
    assert fluid.metrics.Auc.trapezoid_area(3.0, 1.0, 2.0, 4.0) == 6.0
    with pytest.raises(ConfigError, match="set_gradient_clip"):
        fluid.WeightNormParamAttr(gradient_clip=1)
