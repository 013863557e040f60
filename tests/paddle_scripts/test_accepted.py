"""What PaddlePaddle 3.3.1 takes and scripts give: one row each, with what it answers there."""

import json
import logging
import pickle
from operator import add

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme import flags, nn, static
from polyreme.distributed import fleet
from polyreme.errors import CaptureError, ConfigError
from polyreme.incubate import autograd
from polyreme.nn import functional as F
from polyreme.paddle_scripts.internals import framework, signals

t = paddle.to_tensor
X = np.arange(6, dtype="float32").reshape(2, 3)
two, three = np.array([2]), np.array([3], "int32")


@pytest.mark.parametrize(
    ("of", "shown"),
    [
        (lambda s: s, "paddle.Size([2, 3])"),
        (lambda s: f"{s} %s" % s, "'paddle.Size([2, 3]) paddle.Size([2, 3])'"),
        (lambda s: (s == [2, 3], s == (2, 3), s == [2, 3], s == (2, 3)), "(True, True, True, True)"),
        (lambda s: (s != (2, 3), s != [2], s == 2), "(False, True, False)"),
        (lambda s: s + [1] + (1,), "paddle.Size([2, 3, 1, 1])"),
        (lambda s: add([1], s), "paddle.Size([1, 2, 3])"),
        (lambda s: add((1,), s)[1:], "paddle.Size([2, 3])"),
        (lambda s: 2 * s, "paddle.Size([2, 3, 2, 3])"),
        (lambda s: (s.append(4), s.__iadd__([5]), s), "(None, paddle.Size([2, 3, 4, 5]), paddle.Size([2, 3, 4, 5]))"),
        (lambda s: (s.numel(), sum(s), s[-1], s.index(3), list(s)), "(6, 5, 3, 1, [2, 3])"),
        (lambda s: (json.dumps(s), pickle.loads(pickle.dumps(s)), type(s).__mro__[1]),
         "('[2, 3]', paddle.Size([2, 3]), <class 'list'>)"),
        (lambda s: paddle.jit.to_static(lambda x, s: x.reshape(s))(t(X.ravel()), s).shape, "paddle.Size([2, 3])"),
    ],
)  # fmt: skip
def test_shape_is_a_size(of, shown):
    assert repr(of(t(X).shape)) == shown


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("call", "same"),
    [
        (lambda x, *n: paddle.abs(x, *n), lambda x: paddle.abs(x)),
        (lambda x, *n: x.add(x, *n), lambda x: x + x),
        (lambda x, *n: paddle.divide(x, x + 1, *n), lambda x: x / (x + 1)),
        (lambda x, *n: paddle.mean(x, 1, True, *n), lambda x: x.mean(1, keepdim=True)),
        (lambda x, *n: paddle.full([2], 3.0, "float32", *n), lambda x: paddle.full([2], 3.0)),
        (lambda x, *n: paddle.concat([x, x], 1, *n), lambda x: paddle.concat([x, x], 1)),
        (lambda x, *n: paddle.scatter(x, t([0]), x[1:], True, *n), lambda x: paddle.scatter(x, t([0]), x[1:])),
        (lambda x, *n: paddle.bitwise_not(x.astype("int32"), None, *n), lambda x: ~x.astype("int32")),
        (lambda x, *n: paddle.rand([0], "float64", *n), lambda x: paddle.rand([0], "float64")),
    ],
)
@pytest.mark.parametrize("name", ["a_name", None])
def test_the_name_of_the_result_may_stand_last(call, same, name):
    result = call(t(X), name)
    np.testing.assert_array_equal(result, same(t(X)))
    np.testing.assert_array_equal(paddle.jit.to_static(lambda x: call(x, name))(t(X)), result)
    np.testing.assert_array_equal(call(t(X), name), result)


@pytest.mark.parametrize(
    "call", [lambda x: paddle.abs(x, x), lambda x: paddle.add(x, x, 2.0), lambda x: paddle.abs(x, "a", "b", "c")]
)
def test_what_stands_behind_the_parameters_and_is_no_name_is_refused(call):
    with pytest.raises(TypeError, match=r"\(\) takes \d arguments \(x.*\).*, got \d"):
        call(t(X))


def test_shapes_of_variables_are_sizes_too(static_mode):
    x = static.data("x", [-1, 3])
    assert repr((x.shape, add(x.shape[:1], [2]))) == "(paddle.Size([-1, 3]), paddle.Size([-1, 2]))"
    y = x.reshape(add(x.shape[:1], [3, 1]))
    assert run({"x": X}, [y])[0].shape == (2, 3, 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda: paddle.reshape(t(X), [t(three), 2]), [3, 2]),
        (lambda: t(X).view([t(three), t(two)]), [3, 2]),
        (lambda: paddle.ones([t(two), 3]), [2, 3]),
        (lambda: paddle.full([t(two), t(three)], 1.0), [2, 3]),
        (lambda: paddle.full(np.array([2, 3]), t([1.0])), [2, 3]),
        (lambda: paddle.randn([t(two), 3]), [2, 3]),
        (lambda: paddle.randint(0, 4, [t(two), 3]), [2, 3]),
        (lambda: paddle.tile(t(X), [t(two), 3]), [4, 9]),
        (lambda: paddle.expand(t(X), [t(two), 2, 3]), [2, 2, 3]),
        (lambda: paddle.split(t(X), [t([1]), 2], axis=t([1]))[1], [2, 2]),
        (lambda: paddle.slice(t(X), [0], [t([0])], [t([1])]), [1, 3]),
        (lambda: paddle.strided_slice(t(X), [1], [t([0])], [t(three)], [t(two)]), [2, 2]),
        (lambda: paddle.crop(t(X), [t(two), 2], [0, t([1])]), [2, 2]),
        (lambda: paddle.topk(t(X), t(two))[0], [2, 2]),
        (lambda: paddle.kthvalue(t(X), k=t([1]))[0], [2]),
        (lambda: paddle.arange(t([0]), t([6]), t(two)), [3]),
        (lambda: paddle.linspace(t([0.0]), t([1.0]), t(three)), [3]),
        (lambda: paddle.eye(t(two)), [2, 2]),
        (lambda: paddle.mean(t(X), axis=[t([1])]), [2]),
        (lambda: F.one_hot(t([1, 0]), t(three)), [2, 3]),
        (lambda: F.softmax(t(X), axis=t([1])), [2, 3]),
        (lambda: F.pad(t(X[None, None]), [t([1]), 1, 1, 1]), [1, 1, 4, 5]),
        (lambda: F.interpolate(t(X[None, None]), size=[t(three), t([4])]), [1, 1, 3, 4]),
        (lambda: F.adaptive_avg_pool2d(t(X[None, None]), [t([1]), 1]), [1, 1, 1, 1]),
        (lambda: len(paddle.chunk(t(X), t(three), axis=1)), 3),
    ],
)
def test_a_tensor_of_one_element_is_taken_for_a_number(call, shape):
    result = call()
    assert (result if isinstance(shape, int) else result.shape) == shape


def test_a_size_without_a_value_says_what_to_do():
    def ask(x, n):
        return paddle.ones([n, 2]) + x.sum()

    with pytest.raises(CaptureError, match="a Tensor given as an attribute needs the value"):
        paddle.jit.to_static(ask)(t(X), t(two))


def run(feed, fetch):
    exe = static.Executor()
    exe.run(static.default_startup_program())
    return exe.run(feed=feed, fetch_list=fetch)


def test_a_feed_that_no_variable_is_named_after_is_ignored_and_logged_once(static_mode, caplog):
    x = static.data("x", [-1, 3])
    with caplog.at_level(logging.WARNING, "polyreme.program"):
        for _ in range(2):
            for unused in (np.ones(2), [1, 2]):
                assert run({"x": X, "label": unused}, [x + 1])[0].tolist() == (X + 1).tolist()
    assert [r.getMessage() for r in caplog.records if "feed" in r.getMessage()] == [
        "Executor.run: feed 'label' is ignored, the Program has no such variable; it takes ['x']"
    ]


def test_data_may_be_declared_again(static_mode):
    x, again = static.data("x", [3]), static.data("x", [3])
    assert [v.tolist() for v in run({"x": np.ones(3, "float32")}, [x + again, again * 3])] == [[2] * 3, [3] * 3]
    other = static.data("x", [2], "int64")
    assert (other.shape, other.dtype) == ([2], "int64")
    assert static.default_main_program().global_block().var("x") is other


@pytest.mark.parametrize("derive", ["append_backward", "gradients"])
def test_computed_values_that_are_told_to_want_a_gradient_have_one(static_mode, derive):
    x = paddle.full([3], 2.0)
    x.stop_gradient = False
    loss = (x * x).sum()
    if derive == "gradients":
        grads = static.gradients([loss], [x])
    else:
        ((_, *grads),) = static.append_backward(loss, parameter_list=[x])
    assert run({}, grads)[0].tolist() == [4.0] * 3


IDS = np.array([3, 0, 3, 2])


@pytest.mark.parametrize(
    ("build", "feed", "shapes", "values"),
    [
        (lambda v: [paddle.arange(paddle.full([], 0.0), paddle.full([], 3.0), paddle.full([], 1.0))], None, [[3]],
         [[0, 1, 2]]),
        (lambda v: [paddle.tile(v, [paddle.full([1], 2, "int32")])], IDS, [[8]], [[3, 0, 3, 2] * 2]),
        (lambda v: [F.interpolate(paddle.ones([1, 1, 2]), scale_factor=paddle.full([1], 2.0), mode="linear",
                                  data_format="NCW")], None, [[1, 1, 4]], [[[[1] * 4]]]),
        (lambda v: [paddle.take(paddle.shape(v), paddle.full([1], 0, "int32"))], IDS, [[1]], [[4]]),
        (lambda v: [paddle.arange(v[:1]), paddle.ones([v[3], 1]), paddle.topk(v, v[3])[0]], IDS,
         [[-1], [-1, 1], [-1]], [[0, 1, 2], [[1], [1]], [3, 3]]),
        (lambda v: list(paddle.unique(v, return_inverse=True)), IDS, [[-1], [4]], [[0, 2, 3], [2, 0, 2, 1]]),
        (lambda v: [paddle.unique_consecutive(v), paddle.nonzero(v)], IDS, [[-1], [-1, 1]],
         [[3, 0, 3, 2], [[0], [2], [3]]]),
        (lambda v: [v[v > 2] * 2, paddle.repeat_interleave(v, v).sum()], IDS, [[-1], []], [[6, 6], 22]),
        (lambda v: paddle.geometric.sample_neighbors(v, v[1:2].tile([5]), v[1:2]), IDS, [[-1], [-1]], [[], [0]]),
        (lambda v: [static.nn.cond(v.sum() > 3, lambda: v[:1], lambda: v) + 1], IDS, [[-1]], [[4]]),
        (lambda v: [static.nn.cond(v.sum() > 9, lambda: v[:1], lambda: paddle.unique(v))], IDS, [[-1]], [[0, 2, 3]]),
    ],
)  # fmt: skip
def test_shapes_that_depend_on_values_are_seen_on_samples(static_mode, build, feed, shapes, values):
    fetch = build(static.data("v", [4], "int64"))
    assert [list(f.shape) for f in fetch] == shapes
    assert [v.tolist() for v in run({} if feed is None else {"v": feed}, fetch)] == values


def test_what_is_drawn_from_constants_is_drawn_anew(static_mode):
    half = paddle.full([64], 0.5)
    fetch = [paddle.bernoulli(half), F.dropout(half), paddle.normal(half, half), paddle.rand([64])]
    first, second = run({}, fetch), run({}, fetch)
    assert all((a != b).any() for a, b in zip(first, second, strict=True))


def test_training_through_shapes_that_depend_on_values(static_mode):
    x = static.data("x", [3])
    w = static.create_parameter([3], "float32", default_initializer=nn.initializer.Constant(1.0))
    y = paddle.masked_select(x * w, x > 1.0)
    loss = static.nn.cond(y.sum() > 100.0, lambda: y[:1], lambda: y * 2.0).sum()
    paddle.optimizer.SGD(0.5).minimize(loss)
    assert [v.tolist() for v in run({"x": np.array([1, 2, 3], "float32")}, [loss, w])] == [10.0, [1.0, -1.0, -2.0]]


V = np.array([1.0, 2.0], "float32")


@pytest.mark.parametrize(
    ("derive", "values"),
    [
        (
            lambda x: autograd.vjp(lambda a, b: a * b * b, [x, x + 1], paddle.full([2], 2.0)),
            [[4, 18], [8, 18], [8, 24]],
        ),
        (lambda x: autograd.jvp(lambda a: {"y": a * a}["y"], x), [[1, 4], [2, 4]]),
        (lambda x: [autograd.Jacobian(lambda a: a * a * x, x)[:]], [[[2, 0], [0, 8]]]),
        (lambda x: [autograd.Hessian(lambda a: (a**3).sum(), x)[1]], [[0, 12]]),
        (lambda x: [autograd.Jacobian(lambda a: a * a, x.reshape([2, 1]), is_batched=True)[:, 0]], [[[2], [4]]]),
    ],
)
def test_derivatives_of_functions_are_recorded(static_mode, derive, values):
    found = run({"x": V}, jax.tree.leaves(derive(static.data("x", [2]))))
    np.testing.assert_allclose(
        np.concatenate([f.ravel() for f in found]), np.concatenate([np.ravel(v) for v in values])
    )


def test_training_on_a_recorded_hessian(static_mode):
    x = static.data("x", [2])
    w = static.create_parameter([2], "float32", default_initializer=nn.initializer.Constant(0.5))
    loss = autograd.Hessian(lambda a: (a * a * a * w).sum(), x)[:].sum()
    paddle.optimizer.SGD(0.5).minimize(loss)
    assert [v.tolist() for v in run({"x": V}, [loss, w])] == [9.0, [-2.5, -5.5]]


def test_flags_without_effect_are_kept_and_logged_once(caplog):
    name = "FLAGS_use_stride_kernel"
    before = flags.get_flags(name)
    with caplog.at_level(logging.WARNING, "polyreme.flags"):
        paddle.set_flags({name: 0})
        paddle.set_flags({name: 1})
    assert [r.getMessage() for r in caplog.records] == [f"set_flags: {name} has no effect here"]
    assert before == paddle.get_flags([name]) == {name: True}
    kinds = {n: type(v) for n, v in paddle.get_flags(["FLAGS_enable_pir_api", "FLAGS_eager_delete_tensor_gb"]).items()}
    assert kinds == {"FLAGS_enable_pir_api": bool, "FLAGS_eager_delete_tensor_gb": float}


@pytest.mark.parametrize(
    ("act", "result"),
    [
        (lambda: t(X).numpy(False).tolist(), X.tolist()),
        (lambda: f"{t(3.0)} {t(3)} {t(True)}", "3.0 3 True"),
        (lambda: [isinstance(v, static.Variable) for v in (t(1.0), nn.Linear(1, 1).weight, 1)], [True, True, False]),
        (lambda: paddle.full([2], "-inf", "float32").tolist(), [-np.inf] * 2),
        (lambda: paddle.full_like(t(X[:1, :1]), "1e3").tolist(), [[1000.0]]),
        (lambda: t([1]).to(other=t([1.0])).dtype.name, "float32"),
        (lambda: [type(x).__name__ for x in nn.Sequential(nn.ReLU(), nn.ReLU()).insert(1, nn.Tanh())],
         ["ReLU", "Tanh", "ReLU"]),
        (lambda: nn.initializer.KaimingUniform(t([6.0]))(paddle.zeros([50])).abs().max().item() <= 1.0, True),
        (lambda: signals.hamming_window(4, alpha=0.75, beta=0.25).tolist(), [0.5, 0.75, 1.0, 0.75]),
    ],
)  # fmt: skip
def test_accepted(act, result):
    assert act() == result


def test_an_optimizer_takes_the_gradients_that_backward_left():
    w = paddle.create_parameter([1], "float32", default_initializer=nn.initializer.Constant(3.0))
    optimizer = paddle.optimizer.SGD(0.5, [w])
    loss = (w * w).sum()
    loss.backward()
    pairs = optimizer.backward(loss)
    assert [(p.name, g.item()) for p, g in pairs] == [(w.name, 6.0)]
    optimizer.apply_gradients(pairs)
    assert w.item() == 0.0
    w.clear_gradient()
    assert w.gradient() == 0.0
    assert optimizer.minimize((w + 1).sum())[0] == []


def test_what_a_scope_holds_is_saved(static_mode, tmp_path):
    x = static.data("x", [2, 3])
    static.nn.fc(x, 1, weight_attr=paddle.ParamAttr("w", nn.initializer.Constant(2.0)))
    static.Executor().run(static.default_startup_program())
    paddle.save(static.global_scope().find_var("w").get_tensor(), str(tmp_path / "w.pdtensor"))
    assert paddle.load(str(tmp_path / "w.pdtensor")).tolist() == [[2.0]] * 3


def test_fp16_guard_leaves_the_precision_of_models_as_it_is():
    x = paddle.full([2, 2], 1e5)
    with framework.fp16_guard():
        y = x @ x
    assert (y.dtype, y.tolist()) == (paddle.float32, [[2e10, 2e10]] * 2)


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda: fleet.get_hybrid_communicate_group(), AttributeError, "call fleet.init"),
        (lambda: nn.initializer.KaimingUniform(t(X))(paddle.zeros([50])), ConfigError, "fan_in is a number above 0"),
        (lambda: paddle.full([2], "many"), ConfigError, "fill_value='many' is no number"),
        (lambda: nn.Sequential().insert(1, nn.ReLU()), IndexError, "index 1 is outside a list of 0"),
        (lambda: paddle.distribution.Gamma("a", 1.0), TypeError, "concentration is 'a'; give a number"),
        (lambda: paddle.set_flags({"FLAGS_nope": 1}), ValueError, "is no flag"),
    ],
)
def test_refused_as_there(act, error, match):
    with pytest.raises(error, match=match):
        act()
