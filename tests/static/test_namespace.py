"""polyreme.static beside Programs and layers: Python functions, metrics, averages, mixed precision, places, sizes."""

import re

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.autograd import PyLayer
from polyreme.core import unique_name
from polyreme.errors import CaptureError, ConfigError, DeviceError, GradError, ProgramError, ShapeError

PUBLIC = {
    "paddle.static": """
BuildStrategy CompiledProgram Executor ExponentialMovingAverage InputSpec IpuCompiledProgram IpuStrategy Print
Program Variable WeightNormParamAttr accuracy append_backward auc cpu_places create_global_var
create_parameter ctr_metric_bundle cuda_places data default_main_program default_startup_program
deserialize_persistables deserialize_program device_guard global_scope gradients ipu_shard_guard load
load_from_file load_inference_model load_program_state name_scope normalize_program program_guard py_func save
save_inference_model save_to_file scope_guard serialize_persistables serialize_program set_ipu_shard
set_program_state xpu_places
""",
    "paddle.static.nn": """
batch_norm bilinear_tensor_product case cond conv2d conv2d_transpose conv3d conv3d_transpose deform_conv2d
embedding fc group_norm instance_norm layer_norm nce prelu py_func row_conv sequence_conv sequence_expand
sequence_first_step sequence_last_step sequence_pool sequence_softmax sparse_embedding spectral_norm
static_pylayer switch_case while_loop
""",
}
"""Names of the public API."""
X = np.random.default_rng(0).normal(size=(2, 3)).astype("float32")


def run(fetch, main=None, **feed):
    return static.Executor().run(main, feed=feed, fetch_list=fetch)


def start():
    static.Executor().run(static.default_startup_program())


def value(name):
    return np.asarray(static.global_scope().find_var(name).get_tensor())


def wanting_gradient(shape=(None, 3), name="x"):
    x = static.data(name, list(shape))
    x.stop_gradient = False
    return x


# printing and Python functions


def test_print_shows_values_and_gradients_as_often_as_asked(static_mode, capfd):
    x = wanting_gradient()
    y = static.Print(x * 2, message="twice", summarize=2, first_n=1)
    size = static.Print(paddle.shape(x), print_tensor_name=False, print_tensor_layout=False, print_phase="forward")
    flat = paddle.reshape(y, [size[0] * 3])
    (gradient,) = static.gradients(flat.sum(), x)
    assert capfd.readouterr().out == ""
    for _ in range(2):
        run([flat, gradient], x=np.ones((2, 3), "float32"))
    out = capfd.readouterr().out
    once = "\n  - message: twice\n  - shape: [2, 3]\n  - layout: row-major\n  - dtype: float32\n  - data: "
    assert out.count(f"Variable: multiply_0.tmp_0{once}[2.0 2.0 ...]\n") == 1
    assert out.count(f"Variable: multiply_0.tmp_0@GRAD{once}[1.0 1.0 ...]\n") == 1
    assert out.count("Variable\n  - shape: [2]\n  - dtype: int64\n  - data: [2 3]\n") == 2
    with pytest.raises(ConfigError, match="print_phase='never'"):
        static.Print(x, print_phase="never")


def test_py_func_runs_on_the_host_with_its_own_backward(static_mode):
    x = wanting_gradient()
    block = static.default_main_program().current_block()
    out, free = (block.create_var(name=n, dtype="float32", shape=[-1, 3]) for n in ("out", "free"))
    seen = []
    static.py_func(np.tanh, x, out, lambda y, dy: dy * (1 - y * y), skip_vars_in_backward_input=x)
    static.py_func(lambda a: a + 1, [x], [free])
    static.py_func(lambda a: seen.append(a.shape), x, None)
    assert (out.stop_gradient, free.stop_gradient) == (False, True)
    (gradient,) = static.gradients((out * 3 + free).sum(), x)
    found = run([out, free, gradient], x=X)
    np.testing.assert_array_equal(found[0], np.tanh(X))
    np.testing.assert_array_equal(found[1], X + 1)
    # two roundings of NumPy's against one product here
    np.testing.assert_allclose(found[2], 3 * (1 - np.tanh(X) ** 2), rtol=4 * 2.0**-23, atol=4 * 2.0**-23)
    assert seen == [(2, 3)]


def test_py_func_says_what_does_not_fit(static_mode):
    x = static.data("x", [2, 3])
    block = static.default_main_program().current_block()
    wrong = block.create_var(dtype="float32", shape=[2, 2], type="lod_tensor", lod_level=0)
    with pytest.raises(ConfigError, match=r"lod_level=1 for 'cut'; a Variable of sequences is made by data"):
        block.create_var("cut", [-1, 2], "float32", lod_level=1)
    static.py_func(lambda a: a, x, wrong)
    with pytest.raises(Exception, match=r"returned float32\[2, 3\], declared is float32\[2, 2\]"):
        run([wrong], x=X)
    with pytest.raises(ConfigError, match=r"size 0 of out .* is not known, and x has only known sizes"):
        static.py_func(lambda a: a, x, block.create_var(dtype="float32", shape=[-1]))
    with pytest.raises(ConfigError, match="skip_vars_in_backward_input has 'other'"):
        static.py_func(lambda a: a, x, wrong, skip_vars_in_backward_input=["other"])
    with pytest.raises(TypeError, match="backward_func is a function, got int"):
        static.py_func(lambda a: a, x, wrong, 3)
    with pytest.raises(TypeError, match=r"out is made of Variables of the Program, got \['str'\]"):
        static.py_func(lambda a: a, x, "out")
    paddle.disable_static()
    with pytest.raises(ProgramError, match="call enable_static"):
        static.py_func(lambda a: a, x, wrong)


class Cube(PyLayer):
    """x^3, with seven times its gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensor()
        return g * 21 * x * x


def test_functions_with_their_own_backward_are_recorded(static_mode):
    x = wanting_gradient()
    y = static.nn.static_pylayer(lambda a: a * a, [x], lambda g: g * 5)
    z = static.nn.static_pylayer(lambda a: a * a, [x])
    assert z.stop_gradient
    grads = static.gradients((Cube.apply(x) + y + z).sum(), x)
    found = run(grads, x=X)
    np.testing.assert_allclose(found[0], 21 * X * X + 5, rtol=4 * 2.0**-23)
    with pytest.raises(TypeError, match="backward_fn is a function"):
        static.nn.static_pylayer(lambda a: a, [x], "no")


# variables, metrics, averages


def test_global_variables_keep_their_values_between_runs_if_persistable(static_mode):
    kept = static.create_global_var([2], 1.5, "float32", persistable=True, name="kept")
    fresh = static.create_global_var([2], 1, "int64", name="fresh")
    paddle.assign(kept * 2, output=kept)
    fresh.add_(fresh)
    start()
    found = [[a.tolist() for a in run(["kept", "fresh"])] for _ in range(2)]
    assert found == [[[3, 3], [2, 2]], [[6, 6], [2, 2]]]
    with pytest.raises(ProgramError, match=r"already has kept: float32\[2\]"):
        static.create_global_var([3], 0.0, "float32", persistable=True, name="kept")


def test_accuracy_counts(static_mode):
    scores, label = static.data("scores", [None, 3]), static.data("label", [None, 1], "int64")
    right, seen = (static.create_global_var([1], 0, "int64", persistable=True) for _ in range(2))
    best, two = static.accuracy(scores, label, correct=right, total=seen), paddle.metric.accuracy(scores, label, k=2)
    start()
    given = np.array([[3, 2, 1], [1, 2, 2], [0, 1, 2], [2, 2, 2]], "float32")
    found = run([best, two, right, seen], scores=given, label=np.array([[0], [2], [0], [1]]))
    assert [a.tolist() for a in found] == [0.25, 0.75, [1], [4]]
    with pytest.raises(ShapeError, match=r"input has shape \[-1, 3\] and label \[-1, 3\]"):
        static.accuracy(scores, scores)
    with pytest.raises(ConfigError, match="k=0"):
        static.accuracy(scores, label, k=0)


def test_auc_of_all_batches_and_of_the_last_two(static_mode):
    scores, label = static.data("scores", [None, 2]), static.data("label", [None, 1], "int64")
    whole, last, counts = static.auc(scores, label, num_thresholds=9, slide_steps=2)
    start()
    rng = np.random.default_rng(1)
    batches = [(rng.random((6, 1), "float32"), rng.integers(0, 2, (6, 1))) for _ in range(4)]

    def area(some):
        metric = paddle.metric.Auc(num_thresholds=9)
        for p, y in some:
            metric.update(np.concatenate([1 - p, p], 1), y)
        return metric.accumulate()

    for at, (p, y) in enumerate(batches):
        found = run([whole, last], scores=np.concatenate([1 - p, p], 1), label=y)
        want = area(batches[: at + 1]), area(batches[max(at - 1, 0) : at + 1])
        np.testing.assert_allclose(found, want, rtol=1e-14)  # float64 sums of ten terms
    assert [c.shape for c in counts] == [[2, 10], [2, 10], [1, 10], [1, 10]]
    with pytest.raises(ConfigError, match="curve='PR'"):
        static.auc(scores, label, curve="PR")
    with pytest.raises(ShapeError, match=r"label|input has shape \[-1, 1\]"):
        static.auc(label, label)
    with pytest.raises(ConfigError, match="num_thresholds=0"):
        static.auc(scores, label, num_thresholds=0)


def test_averages_of_parameters_can_be_applied_and_undone(static_mode):
    w = paddle.create_parameter([2], "float32", default_initializer=paddle.nn.initializer.Constant(1.0))
    paddle.optimizer.SGD(0.1).minimize(w.sum())
    average = static.ExponentialMovingAverage(0.9)
    average.update()
    exe, sums = static.Executor(), 0.0
    start()
    with pytest.raises(ProgramError, match=r"no update\(\) has run"), average.apply(exe):
        pass
    for _ in range(3):
        exe.run()
        sums = 0.9 * sums + 0.1 * value(w.name)
    trained = value(w.name)
    with average.apply(exe):
        np.testing.assert_allclose(value(w.name), sums / (1 - 0.9**3), rtol=16 * 2.0**-23)
    np.testing.assert_array_equal(value(w.name), trained)
    with pytest.raises(ProgramError, match="nothing was replaced"):
        average.restore(exe)
    test = static.default_main_program().clone(for_test=True)
    exe.run(test)
    np.testing.assert_array_equal(value(w.name), trained)
    with pytest.raises(ConfigError, match="decay=1"):
        static.ExponentialMovingAverage(1)


# mixed precision


def regression():
    return paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 1))


def test_decorated_optimizers_scale_as_eager_ones(static_mode):
    target = X[:, :1]
    settings = {"init_loss_scaling": 2.0**18, "incr_every_n_steps": 2}
    paddle.disable_static()
    with unique_name.guard():
        paddle.seed(3)
        model = regression()
        optimizer, scaler = paddle.optimizer.SGD(0.1, parameters=model.parameters()), paddle.amp.GradScaler(**settings)
    want = []
    for _ in range(5):
        with paddle.amp.auto_cast():
            loss = F.mse_loss(model(paddle.to_tensor(X)), paddle.to_tensor(target))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        want.append((loss.item(), scaler.get_loss_scaling().item()))
    paddle.enable_static()
    paddle.seed(3)
    x, y = static.data("x", [None, 3]), static.data("y", [None, 1])
    loss = F.mse_loss(regression()(x), y)
    optimizer = static.amp.decorate(paddle.optimizer.SGD(0.1), **settings)
    with pytest.raises(ProgramError, match="call minimize or backward first"):
        optimizer.get_loss_scaling()
    optimizer.minimize(loss)
    assert "autocast O1 float16" in str(static.default_main_program())
    start()
    found = [[a.item() for a in run([loss, optimizer.get_loss_scaling()], x=X, y=target)] for _ in range(5)]
    moves = np.diff([2.0**18, *(scale for _, scale in want)])
    assert min(moves) < 0 < max(moves)  # steps were left out, others were not
    np.testing.assert_allclose(found, want, rtol=2.0**-9)  # float16 has 11 bits
    test = static.default_main_program().clone(for_test=True)
    a, b = (run([loss], test, x=X, y=target)[0] for _ in range(2))
    assert a == b


def test_decorate_refuses_what_it_cannot_do():
    sgd = paddle.optimizer.SGD(0.1, parameters=[paddle.ones([1])])
    assert static.amp.bf16.decorate_bf16(sgd).get_lr() == sgd.get_lr()
    for settings, match in (
        ({"use_amp_guard": True}, "use_amp_guard=True cannot be honoured: record the part"),
        ({"level": "O2", "use_promote": True}, "take level O1"),
        ({"level": "O3"}, "level='O3'"),
    ):
        with pytest.raises(ConfigError, match=match):
            static.amp.decorate(sgd, **settings)
    with pytest.raises(ConfigError, match="name ops in custom_black_list"):
        static.amp.CustomOpLists(custom_black_varnames=["x"])
    with pytest.raises(AttributeError, match="no fp16_guard: record the part"):
        static.amp.fp16_guard  # noqa: B018


# sizes that are not known


def test_arithmetic_on_an_unknown_size_is_done_when_it_runs(static_mode):
    x = static.data("x", [None, 3])
    n = x.shape[0]
    outs = [
        paddle.concat([x, x]).reshape([2 * n, 3]),
        paddle.zeros([n * n + 1, x.shape[1]]),
        x[: n // 2],
        x.sum() / (n * 3),
        paddle.arange(n - 1),
        x.reshape([-1]).reshape([n, 3]),
    ]
    assert [o.shape for o in outs] == [[-1, 3], [-1, 3], [-1, 3], [], [-1], [-1, 3]]
    assert (n < 0, n == -1, x.size.shape) == (True, True, [])
    for rows in (X, np.repeat(X, 2, 0)):
        found, m = run(outs, x=rows), len(rows)
        assert [a.shape for a in found] == [(2 * m, 3), (m * m + 1, 3), (m // 2, 3), (), (m - 1,), (m, 3)]
        np.testing.assert_allclose(found[3], rows.mean(), rtol=16 * 2.0**-23, atol=16 * 2.0**-23)
    with pytest.raises(CaptureError, match=r"size 0 of x: .* above or below 4; give static.data that size"):
        bool(n > 4)
    paddle.disable_static()
    with pytest.raises(CaptureError, match="compute with it in static mode"):
        n * 2


# what belongs to eager code


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x, y, layer: y.register_hook(lambda g: g), GradError, "gradients have no hooks"),
        (lambda x, y, layer: layer.weight.register_hook(lambda g: g), GradError, "gradients have no hooks"),
        (lambda x, y, layer: y.sum().backward(), GradError, r"backward\(\) runs now.*static.gradients"),
        (lambda x, y, layer: paddle.grad(y.sum(), x), GradError, r"grad\(\) runs now"),
        (lambda x, y, layer: paddle.optimizer.SGD(0.1).step(), GradError, "call minimize"),
        (lambda x, y, layer: paddle.amp.GradScaler().scale(y.sum()), GradError, "static.amp.decorate"),
        (lambda x, y, layer: layer.to(dtype="float64"), ProgramError, "no values to move or cast"),
        (lambda x, y, layer: layer.bfloat16(), ProgramError, "no values to move or cast"),
    ],
)
def test_what_runs_at_once_is_refused_in_static_mode(static_mode, call, error, match):
    layer, x = paddle.nn.Linear(3, 2), wanting_gradient()
    with pytest.raises(error, match=match):
        call(x, layer(x), layer)


def test_embeddings_start_as_eager_ones(static_mode):
    table = np.arange(6, dtype="float32").reshape(3, 2)
    given, padded = paddle.nn.Embedding(3, 2, _weight=table), paddle.nn.Embedding(3, 2, padding_idx=1)
    start()
    np.testing.assert_array_equal(value(given.weight.name), table)
    assert (value(padded.weight.name) != 0).all(1).tolist() == [True, False, True]


def test_values_given_to_parameters_hold(static_mode):
    layer, ones = paddle.nn.Linear(2, 2), np.ones((2, 2), "float32")
    with pytest.raises(ProgramError, match=r"set_value: 'linear_0.w_0' has no value in this scope .*Assign"):
        layer.weight.set_value(ones)
    paddle.nn.initializer.Constant(3.0)(layer.weight)
    start()
    np.testing.assert_array_equal(value("linear_0.w_0"), 3 * ones)
    layer.set_state_dict({"weight": ones})
    np.testing.assert_array_equal(value("linear_0.w_0"), ones)


# places and names


def test_cpu_places_follow_cpu_num(monkeypatch):
    monkeypatch.setenv("CPU_NUM", "3")
    assert [p.index for p in static.cpu_places()] == [0, 1, 2]
    assert len(static.cpu_places(1)) == 1
    with pytest.raises(ConfigError, match="device_count=0"):
        static.cpu_places(0)
    with pytest.raises(DeviceError, match="no GPU is available"):
        static.cuda_places()
    with pytest.raises(DeviceError, match="xpu"):
        static.xpu_places()
    with static.device_guard("cpu"), static.device_guard("gpu:all"), static.device_guard():
        pass
    with pytest.raises(ConfigError, match="'moon' names no device"), static.device_guard("moon"):
        pass


def test_operations_and_variables_tell_what_they_are(static_mode):
    main, _ = static_mode
    x = static.data("x", [None, 3])
    y = F.softmax(paddle.nn.Linear(3, 2)(x), axis=-1)
    with static.name_scope("tail"), static.name_scope():
        x + 1
    linear, softmax, last = main.global_block().ops
    assert (linear.scope, last.scope.strip("/")) == ("", "tail")
    assert (linear.type, linear.input_arg_names) == ("linear", ["x", "linear_0.w_0", "linear_0.b_0"])
    assert softmax.output_arg_names == [y.name]
    assert (softmax.attr_names, softmax.attr("axis"), softmax.has_attr("dtype")) == (["axis"], -1, False)
    assert (x.type, main.current_block() is main.global_block()) == ("lod_tensor", True)
    with pytest.raises(ProgramError, match="operation 'softmax' has no attribute 'axes'; did you mean 'axis'"):
        softmax.attr("axes")


@pytest.mark.parametrize("module", [static, static.nn], ids=["static", "static.nn"])
def test_every_public_name_is_there_or_says_why_not(module):
    names = set(PUBLIC["paddle" + module.__name__.removeprefix("polyreme")].split())
    missing = {n for n in names if n not in module.__all__}
    assert missing == set(module.LEFT_OUT) & names
    for name in missing:
        with pytest.raises(AttributeError, match=re.escape(f"no {name}: ")):
            getattr(module, name)
