"""Learning rates, clips, penalties and clones of Fluid programs; what is refused; when static mode is switched on."""

import math

import numpy as np
import pytest

import polyreme as paddle
from polyreme.errors import ConfigError, DataError, ProgramError, ShapeError

ONES = np.ones((4, 2), "float32")


def linear(fluid, **attrs):
    """(x, mean of x w) with a weight [2, 1] of ones, whose gradient is [1, 1] for a feed of ones."""
    x = fluid.layers.data("x", [2])
    attr = fluid.ParamAttr(name="w", initializer=fluid.initializer.Constant(1.0), **attrs)
    return x, fluid.layers.mean(fluid.layers.fc(x, 1, param_attr=attr, bias_attr=False))


def weight_after(fluid, steps=1):
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    for _ in range(steps):
        exe.run(feed={"x": ONES})
    return np.array(fluid.global_scope().find_var("w").get_tensor()).ravel()


DECAYS = {
    "exponential": (lambda L: L.exponential_decay(1.0, 2, 0.5), lambda t: 0.5 ** (t / 2)),
    "exponential staircase": (lambda L: L.exponential_decay(1.0, 2, 0.5, True), lambda t: 0.5 ** (t // 2)),
    "natural_exp": (lambda L: L.natural_exp_decay(1.0, 2, 0.5), lambda t: math.exp(-0.5 * t / 2)),
    "inverse_time": (lambda L: L.inverse_time_decay(1.0, 2, 0.5), lambda t: 1 / (1 + 0.5 * t / 2)),
    "polynomial": (lambda L: L.polynomial_decay(1.0, 4, 0.1, 2.0), lambda t: 0.9 * (1 - min(t, 4) / 4) ** 2 + 0.1),
    "polynomial cycle": (
        lambda L: L.polynomial_decay(1.0, 2, 0.1, 1.0, cycle=True),
        lambda t: 0.9 * (1 - t / (2 * max(1, math.ceil(t / 2)))) + 0.1,
    ),
    "piecewise": (lambda L: L.piecewise_decay([1, 3], [1.0, 0.5, 0.25]), lambda t: (1.0, 0.5, 0.25)[(t > 0) + (t > 2)]),
    "cosine": (lambda L: L.cosine_decay(1.0, 2, 4), lambda t: 0.5 * (math.cos(t // 2 * math.pi / 4) + 1)),
    "warmup": (lambda L: L.linear_lr_warmup(0.5, 2, 0.1, 0.3), lambda t: 0.1 + 0.2 * t / 2 if t < 2 else 0.5),
}


def test_learning_rate_decays_equal_formulas(script):
    for rate, _ in DECAYS.values():
        assert rate(script.layers).shape == [1]
    made = [rate(script.layers) for rate, _ in DECAYS.values()]
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    for t in range(6):
        found = np.concatenate(exe.run(fetch_list=made))
        # pow, exp and cos of float32 are right to a few units in the last place
        np.testing.assert_allclose(found, [f(t) for _, f in DECAYS.values()], rtol=8 * np.finfo("f").eps, atol=1e-7)


def test_noam_decay_counts_from_one_and_is_the_rate(script):
    _, loss = linear(script)
    rate = script.layers.noam_decay(4, 2)
    script.optimizer.SGD(rate).minimize(loss)
    want = 1 - sum(0.5 * min(t**-0.5, t * 2**-1.5) for t in (1, 2, 3))
    np.testing.assert_allclose(weight_after(script, 3), want, rtol=1e-6)


def test_a_clone_for_test_does_not_count_for_the_decay(script):
    _, loss = linear(script)
    rate = script.layers.exponential_decay(1.0, 1, 0.5)
    script.optimizer.SGD(rate).minimize(loss)
    test = script.default_main_program().clone(for_test=True)
    exe = script.Executor()
    exe.run(script.default_startup_program())
    exe.run(feed={"x": ONES})
    for _ in range(3):
        exe.run(test, feed={"x": ONES}, fetch_list=[loss])
    assert exe.run(feed={"x": ONES}, fetch_list=[rate])[0].tolist() == [0.5]
    assert "LR_DECAY" not in str(test)


def test_increment_leaves_its_input_unless_in_place(script):
    x = script.layers.fill_constant([1], "int64", 1)
    more = script.layers.increment(x, 2, in_place=False)
    again = script.layers.increment(more)
    found = script.Executor().run(fetch_list=[x, again])
    assert [v.tolist() for v in found] == [[1], [4]]


def lars(p, g, s):
    r = 0.1 * np.linalg.norm(p) / (np.linalg.norm(g) + 0.2 * np.linalg.norm(p))
    s["v"] = 0.9 * s.get("v", 0) + r * 0.5 * (g + 0.2 * p)
    return p - s["v"]


def momentum_alone(p, g, s):
    s["v"] = 0.9 * s.get("v", 0) + 0.5 * g / 4
    return p - s["v"]


def decayed_adagrad(p, g, s):
    s["m"] = 0.8 * s.get("m", 0) + 0.2 * g * g
    return p - 0.5 * g / (np.sqrt(s["m"]) + 1e-6)


def ftrl(p, g, s):
    before = s.get("n", np.zeros(2))
    s["n"] = before + g * g
    s["z"] = s.get("z", 0) + g - (np.sqrt(s["n"]) - np.sqrt(before)) / 0.5 * p
    away = (0.25 * np.sign(s["z"]) - s["z"]) / (np.sqrt(s["n"]) / 0.5 + 0.2)
    return np.where(np.abs(s["z"]) > 0.25, away, 0)


def adadelta(p, g, s):
    s["g"] = 0.9 * s.get("g", 0) + 0.1 * g * g
    move = np.sqrt((s.get("m", 0) + 1e-3) / (s["g"] + 1e-3)) * g
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * move * move
    return p - move


def lamb(p, g, s):
    s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.999 * s.get("v", 0) + 0.001 * g * g
    r = s["m"] / (np.sqrt(s["v"]) + 1e-6)
    return p - 0.1 * np.linalg.norm(p) / np.linalg.norm(r) * r


@pytest.mark.slow_cases("<lambda>-ftrl", "<lambda>-decayed_adagrad")
@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (lambda o: o.LarsMomentum(0.5, 0.9, lars_coeff=0.1, lars_weight_decay=0.2), lars),
        (
            lambda o: o.LarsMomentum(0.5, 0.9, exclude_from_weight_decay=["w", "none"], rescale_grad=0.25),
            momentum_alone,
        ),
        (lambda o: o.DecayedAdagrad(0.5, decay=0.8), decayed_adagrad),
        (lambda o: o.Adadelta(1e-9, 1e-3, 0.9), adadelta),
        (lambda o: o.LambOptimizer(0.1, 0.0), lamb),
        (lambda o: o.Ftrl(0.5, l1=0.25, l2=0.1), ftrl),
    ],
)
def test_update_rules_of_1_7(script, made, rule):
    _, loss = linear(script)
    made(script.optimizer).minimize(loss)
    want, state = np.ones(2), {}
    for _ in range(3):
        want = rule(want, np.ones(2), state)
    np.testing.assert_allclose(weight_after(script, 3), want, rtol=1e-5)


def test_gradient_clips_of_1_7(script):
    _, loss = linear(script)
    script.clip.set_gradient_clip(script.clip.GradientClipByGlobalNorm(0.5))
    script.optimizer.SGD(1.0).minimize(loss)
    np.testing.assert_allclose(weight_after(script), 1 - 0.5 / math.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize(
    ("clip", "moved"),
    [
        (lambda f: f.clip.GradientClipByValue(0.25), 0.25),
        (lambda f: f.clip.GradientClipByNorm(1.0), 1 / math.sqrt(2)),
        (lambda f: f.clip.GradientClipByNorm(9.0), 1.0),
    ],
)
def test_a_clip_of_one_parameter_comes_before_its_penalty(script, clip, moved):
    _, loss = linear(script, gradient_clip=clip(script), regularizer=script.regularizer.L2Decay(0.5))
    script.optimizer.SGD(1.0, regularization=script.regularizer.L1Decay(7.0)).minimize(loss)  # its own counts
    np.testing.assert_allclose(weight_after(script), 1 - moved - 0.5, rtol=1e-6)


def test_a_clip_of_the_optimizer_takes_the_place_of_others_and_comes_before_penalties(script):
    _, loss = linear(script, gradient_clip=script.clip.GradientClipByNorm(0.01))
    clip, penalty = script.clip.GradientClipByGlobalNorm(0.5), script.regularizer.L2Decay(0.5)
    script.optimizer.SGD(1.0, regularization=penalty, grad_clip=clip).minimize(loss)
    np.testing.assert_allclose(weight_after(script), 1 - 0.5 / math.sqrt(2) - 0.5, rtol=1e-6)
    with script.dygraph.guard():
        layer = script.dygraph.Linear(1, 2, bias_attr=False)
        before = layer.weight.numpy()
        sgd = script.optimizer.SGD(1.0, parameter_list=layer.parameters(), grad_clip=clip)
        loss = script.layers.reduce_sum(layer(script.dygraph.to_variable(np.ones((3, 1), "float32"))))
        (slope,) = script.dygraph.grad([loss], [layer.weight], retain_graph=True)
        loss.backward()
        sgd.minimize(loss)
        np.testing.assert_array_equal(slope.numpy(), np.full((1, 2), 3.0))
        np.testing.assert_allclose(before - layer.weight.numpy(), np.full((1, 2), 0.5 / math.sqrt(2)), rtol=1e-5)


def test_two_norms_in_one_group_are_refused(script):
    x, loss = linear(script, gradient_clip=script.clip.GradientClipByGlobalNorm(1.0))
    attr = script.ParamAttr(gradient_clip=script.clip.GradientClipByGlobalNorm(2.0))
    loss = loss + script.layers.mean(script.layers.fc(x, 1, param_attr=attr, bias_attr=False))
    with pytest.raises(ConfigError, match=r"group 'default_group' has clip_norms \[1.0, 2.0\]"):
        script.optimizer.SGD(1.0).minimize(loss)


def test_a_clone_for_test_drops_nothing_out(script):
    x = script.layers.data("x", [2])
    out = script.layers.dropout(x, 0.5)
    test = script.default_main_program().clone(for_test=True)
    exe = script.Executor(script.CPUPlace())
    (train_value,) = exe.run(feed={"x": np.ones((50, 2), "f")}, fetch_list=[out])
    assert set(train_value.ravel().tolist()) == {0.0, 1.0}
    (test_value,) = exe.run(test, feed={"x": ONES}, fetch_list=[out])
    np.testing.assert_array_equal(test_value, ONES / 2)


def test_batch_norm_moves_its_statistics_in_training_alone(script):
    x = script.layers.data("x", [2])
    out = script.layers.batch_norm(x, momentum=0.5, moving_mean_name="mean", moving_variance_name="variance")
    test = script.default_main_program().clone(for_test=True)
    exe, feed = script.Executor(script.CPUPlace()), {"x": np.array([[0, 1], [4, 1]], "f")}
    exe.run(script.default_startup_program())
    exe.run(test, feed=feed, fetch_list=[out])
    mean = script.global_scope().find_var("mean").get_tensor()
    assert np.array(mean).tolist() == [0, 0]
    (value,) = exe.run(feed=feed, fetch_list=[out])
    np.testing.assert_allclose(value, [[-1, 0], [1, 0]], atol=1e-5)  # the variance is 4, epsilon 1e-5
    np.testing.assert_allclose(np.array(mean), [1, 0.5], rtol=1e-6)


def test_static_rnn_is_the_loop_written_out(script):
    fluid, layers = script, script.layers
    x = fluid.data("x", [3, None, 2])
    rnn = layers.StaticRNN()
    with rnn.step():
        word = rnn.step_input(x)
        before = rnn.memory(shape=[-1, 2], batch_ref=word)
        now = layers.fc([word, before], 2, act="tanh", bias_attr=False)
        rnn.update_memory(before, now)
        rnn.step_output(now)
    out = rnn()
    fluid.append_backward(layers.mean(out))
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    value = np.random.RandomState(0).randn(3, 4, 2).astype("f")
    outputs, gradient = exe.run(feed={"x": value}, fetch_list=[out, "fc_0.w_1@GRAD"])
    w, u = (np.array(fluid.global_scope().find_var(f"fc_0.w_{i}").get_tensor()) for i in (0, 1))
    state, states = np.zeros((4, 2), "f"), []
    for row in value:
        state = np.tanh(row @ w + state @ u)
        states.append(state)
    np.testing.assert_allclose(outputs, states, rtol=1e-5, atol=1e-6)
    with fluid.dygraph.guard():
        u_now = paddle.to_tensor(u, stop_gradient=False)
        state, total = paddle.zeros([4, 2]), 0.0
        for row in value:
            state = paddle.tanh(paddle.to_tensor(row) @ paddle.to_tensor(w) + state @ u_now)
            total = total + state.mean() / 3
        total.backward()
    np.testing.assert_allclose(gradient, u_now.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_what_is_recorded_after_minimize_is_in_copies_for_evaluation(script, tmp_path):
    fluid, layers = script, script.layers
    x = fluid.data("x", [None, 2])
    out = layers.fc(x, 1, param_attr="w", bias_attr=False, act="tanh")
    fluid.optimizer.SGD(0.5).minimize(layers.mean(out))
    weight = fluid.default_main_program().global_block().var("w")
    decoded = layers.mul(x, weight)  # of the updated weight
    fluid.optimizer.ExponentialMovingAverage(0.5).update()
    test = fluid.default_main_program().clone(for_test=True)
    exe, feed = fluid.Executor(fluid.CPUPlace()), {"x": np.ones((3, 2), "f")}
    exe.run(fluid.default_startup_program())
    exe.run(feed=feed)
    values = {
        n: np.array(fluid.global_scope().find_var(n).get_tensor()) for n in fluid.global_scope().local_var_names()
    }
    (product,) = exe.run(test, feed=feed, fetch_list=[decoded])
    np.testing.assert_allclose(product, feed["x"] @ values["w"], rtol=2.0**-22)
    for name, before in values.items():
        np.testing.assert_array_equal(np.array(fluid.global_scope().find_var(name).get_tensor()), before, err_msg=name)
    fluid.io.save_inference_model(str(tmp_path), ["x"], [decoded], exe)
    program, _, targets = fluid.io.load_inference_model(str(tmp_path), exe)
    np.testing.assert_array_equal(exe.run(program, feed=feed, fetch_list=targets)[0], product)


def test_a_seeded_initializer_gives_the_same_values(script):
    attrs = [script.ParamAttr(initializer=script.initializer.Uniform(-1, 1, seed=s)) for s in (3, 3, 4)]
    names = [script.layers.create_parameter([5], "float32", attr=a).name for a in attrs]
    script.Executor().run(script.default_startup_program())
    a, b, c = (np.array(script.global_scope().find_var(n).get_tensor()) for n in names)
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()


def test_training_goes_on_from_saved_parameters(script, tmp_path):
    fluid = script
    _, loss = linear(fluid)
    fluid.optimizer.Momentum(0.1, 0.9).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    exe.run(feed={"x": ONES})
    fluid.io.save_persistables(exe, str(tmp_path))
    exe.run(feed={"x": ONES})
    weight = fluid.global_scope().find_var("w").get_tensor()
    want = np.array(weight)
    exe.run(fluid.default_startup_program())
    fluid.io.load_persistables(exe, str(tmp_path))
    exe.run(feed={"x": ONES})
    np.testing.assert_array_equal(np.array(weight), want)


def test_the_first_layer_switches_static_mode_on_and_a_guard_off(script):
    assert paddle.in_dynamic_mode()
    x = script.layers.data("x", [2])
    assert not paddle.in_dynamic_mode()
    assert isinstance(x + 1, script.Variable)
    with script.dygraph.guard():
        assert paddle.in_dynamic_mode()
        assert script.layers.relu(paddle.to_tensor([-1.0, 1.0])).tolist() == [0.0, 1.0]
        with pytest.raises(ProgramError, match=r"fc makes parameters of a Program.*fluid.dygraph"):
            script.layers.fc(paddle.to_tensor([[1.0]]), 2)
    script.enable_dygraph()
    assert script.in_dygraph_mode()
    script.disable_dygraph()
    assert not paddle.in_dynamic_mode()


REFUSED = {
    "no end": (lambda f, x: block_of(f, f.layers.While(below(f, x))), ProgramError, "no new value"),
    "condition": (lambda f, x: f.layers.While(x), ShapeError, "bool Variable of shape"),
    "default first": (lambda f, x: f.layers.Switch().default().__enter__(), ProgramError, "no case before it"),
    "shared": (lambda f, x: [f.layers.fc(x, n, param_attr="w") for n in (2, 3)], ProgramError, "cannot share it"),
    "dropout": (lambda f, x: f.layers.dropout(x, 0.5, dropout_implementation="up"), ConfigError, "there are"),
    "attrs": (lambda f, x: f.layers.fc([x, x], 2, param_attr=["a"]), ConfigError, "1 param_attrs for 2 inputs"),
    "no weight": (lambda f, x: f.layers.fc(x, 2, param_attr=False), ConfigError, "has a weight"),
    "flatten dims": (lambda f, x: f.layers.fc(x, 2, num_flatten_dims=2), ShapeError, "num_flatten_dims=2"),
    "axis": (lambda f, x: f.layers.elementwise_add(x, x[0], axis=2), ShapeError, "from dim axis=2 on"),
    "embedding": (lambda f, x: f.layers.embedding(x, [3, 4]), ShapeError, "does not end in a dim of 1"),
    "pool": (lambda f, x: f.layers.pool2d(x, 2, "sum"), ConfigError, "pool_type='sum'"),
    "boundaries": (lambda f, x: f.layers.piecewise_decay([1], [1.0]), ConfigError, "one value more"),
    "persistable": (lambda f, x: f.layers.create_tensor("float32", persistable=True), ConfigError, "needs a shape"),
    "assign": (lambda f, x: f.layers.assign([1.0]), TypeError, "takes a Variable or an ndarray"),
    "type": (lambda f, x: f.layers.data("z", [1], type="reader"), ConfigError, "what is fed is a tensor"),
    "dtype in another place": (lambda f, x: f.layers.data("z", [1], "int64"), ConfigError, "a dtype is named"),
    "diagonal": (lambda f, x: f.initializer.Uniform(diag_num=2), ConfigError, "NumpyArrayInitializer"),
    "penalty": (lambda f, x: f.optimizer.SGD(0.1, regularization=0.1), TypeError, "L2Decay"),
    "clip": (lambda f, x: f.clip.set_gradient_clip(1.0), TypeError, "takes a clip"),
    "grad_clip": (lambda f, x: f.optimizer.SGD(0.1).minimize(x, grad_clip=1), ConfigError, "set_gradient_clip"),
    "lamb": (lambda f, x: f.optimizer.LambOptimizer(regularization=1), ConfigError, "regularization"),
    "version": (lambda f, x: f.require_version("1.8.0"), ConfigError, "behaves as version 1.7.0"),
    "version text": (lambda f, x: f.require_version("new"), ConfigError, "such as '1.6.0'"),
    "to_variable": (lambda f, x: f.dygraph.to_variable(ONES), ProgramError, "inside `with fluid.dygraph.guard"),
    "feeder": (lambda f, x: f.DataFeeder([x], "cpu").feed([(1, 2)]), DataError, "2 parts, feed_list 1"),
    "nothing fed": (lambda f, x: f.DataFeeder([x], "cpu").feed([]), DataError, "no samples"),
    "loader": (lambda f, x: f.io.DataLoader.from_generator([x]).start(), ProgramError, "this one is iterable"),
    "no generator": (lambda f, x: list(f.io.DataLoader.from_generator([x])), DataError, "no generator is set"),
    "no places": (lambda f, x: f.io.PyReader([x]).decorate_batch_generator(list), ConfigError, "needs places="),
    "rnn": (lambda f, x: f.layers.StaticRNN().step_input(x), ProgramError, "call it inside"),
    "metric": (lambda f, x: f.metrics.Accuracy().eval(), DataError, "nothing was added"),
}  # fmt: skip


def below(fluid, x):
    return fluid.layers.less_than(x[0, :1], x[0, 1:])


def block_of(fluid, loop):
    with loop.block():
        fluid.layers.zeros([1], "float32")


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_to_change(script, name):
    call, kind, says = REFUSED[name]
    with pytest.raises(kind, match=says):
        call(script, script.layers.data("x", [2]))


def test_metrics_equal_counts_by_hand(script):
    chunks = script.metrics.ChunkEvaluator()
    chunks.update(np.array([4]), np.array([5]), np.array([2]))
    np.testing.assert_allclose(chunks.eval(), [0.5, 0.4, 4 / 9])
    edits = script.metrics.EditDistance("edits")
    edits.update(np.array([[0.0], [3.0]]), np.array([2]))
    assert edits.eval() == (1.5, 0.5)
    both = script.metrics.CompositeMetric()
    both.add_metric(script.metrics.Precision())
    both.add_metric(script.metrics.Recall())
    both.update(np.array([[0.9], [0.8], [0.1]]), np.array([[1], [0], [1]]))
    assert both.eval() == [0.5, 0.5]
    average = script.average.WeightedAverage()
    with pytest.raises(DataError, match="nothing was added"):
        average.eval()


def test_a_schedule_of_ones_own_counts_runs(script):
    L = script.layers
    rate = L.create_global_var([1], 0.0, "float32", persistable=True, name="rate")
    step = L.learning_rate_scheduler._decay_step_counter()
    with L.Switch() as switch:
        with switch.case(step < 2):
            L.assign(step / 2, rate)
        with switch.default():
            L.assign(L.polynomial_decay(1.0, 4, 0.0), rate)
    _, loss = linear(script)
    script.optimizer.RMSProp(rate).minimize(loss)
    exe = script.Executor()
    exe.run(script.default_startup_program())
    rates = [exe.run(feed={"x": ONES}, fetch_list=[rate])[0].item() for _ in range(5)]
    assert rates == [0.0, 0.5, 0.5, 0.25, 0.0]


def test_an_operator_puts_the_batch_of_fewer_dims_under_the_batch(script):
    x, column = script.data("x", [None, 2]), script.data("column", [None, 1])
    best, row = script.layers.reduce_max(x, dim=1), script.data("row", [2])
    a = np.array([[1, 3], [5, 2]], "float32")
    feed = {"x": a, "column": a[:, :1], "row": a[0]}
    results = script.Executor().run(feed=feed, fetch_list=[x - best, column * best, x > best, x + row])
    expected = [a - [[3], [5]], [[3], [25]], np.zeros((2, 2), bool), a + a[0]]
    for result, want in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, want)


def test_parameters_of_other_programs_are_left_out_by_name(script, caplog):
    _, loss = linear(script)
    _, pairs = script.optimizer.SGD(0.1).minimize(loss, parameter_list=["w", "other.w_0"])
    assert [p.name for p, _ in pairs] == ["w"]
    assert "no parameters ['other.w_0']" in caplog.text


def test_an_empty_startup_program_is_nothing_to_warn_of(script, caplog):
    exe = script.Executor()
    exe.run(script.default_startup_program())
    assert not caplog.records
    exe.run(script.Program())
    assert "no operations" in caplog.text
