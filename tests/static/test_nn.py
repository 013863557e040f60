"""static.nn: layer functions against NumPy and eager functionals, parameters by name, refusals."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.errors import ConfigError, ProgramError, ShapeError

RNG = np.random.default_rng(0)
EPS = 2.0**-23


def array(*shape):
    return RNG.normal(size=shape).astype("float32")


def run(fetch, **feed):
    exe = static.Executor()
    exe.run(static.default_startup_program())
    return exe.run(feed=feed, fetch_list=fetch)


def value(name):
    return np.asarray(static.global_scope().find_var(name).get_tensor())


def parameters():
    return {p.name: p.shape for p in static.default_main_program().all_parameters()}


def close(got, want, terms):
    """Sums of so many float32 terms of order 1."""
    np.testing.assert_allclose(got, want, rtol=8 * terms**0.5 * EPS, atol=8 * terms**0.5 * EPS)


def test_fc_adds_up_its_inputs_products(static_mode):
    x, y = static.data("x", [None, 2, 3]), static.data("y", [None, 4])
    out = static.nn.fc([x, y], 5, activation="tanh")
    kept = static.nn.fc(x, 2, num_flatten_dims=-1, bias_attr=False, name="last")
    assert parameters() == {"fc_0.w_0": [6, 5], "fc_0.w_1": [4, 5], "fc_0.b_0": [5], "last.w_0": [3, 2]}
    assert (out.shape, kept.shape) == ([-1, 5], [-1, 2, 2])
    a, b = array(7, 2, 3), array(7, 4)
    found = run([out, kept], x=a, y=b)
    close(found[0], np.tanh(a.reshape(7, 6) @ value("fc_0.w_0") + b @ value("fc_0.w_1") + value("fc_0.b_0")), 10)
    close(found[1], a @ value("last.w_0"), 3)


def test_parameters_of_one_name_are_shared_and_trained_together(static_mode):
    ids = static.data("ids", [None, 2], "int64")
    rows = [static.nn.embedding(ids[:, i], [5, 3], param_attr="table") for i in range(2)]
    padded = static.nn.embedding(ids, [5, 3], padding_idx=-1, param_attr=paddle.ParamAttr(name="table"))
    pairs = static.append_backward(rows[0].sum() + 2 * rows[1].sum())
    assert parameters() == {"table": [5, 3]}
    found = run([padded, pairs[0][1]], ids=np.array([[0, 4], [1, 0]]))
    np.testing.assert_array_equal(found[0], [[value("table")[0], np.zeros(3)], value("table")[[1, 0]]])
    np.testing.assert_array_equal(found[1][:, 0], [3, 1, 0, 0, 2])
    with pytest.raises(ProgramError, match=r"already has table: float32\[5, 3\].*another name"):
        static.nn.fc(padded, 3, num_flatten_dims=2, weight_attr="table")


def test_convolutions_are_the_functional_ones(static_mode):
    x, z = static.data("x", [None, 4, 6, 6]), static.data("z", [None, 2, 3, 3, 3])
    outs = [
        static.nn.conv2d(x, 6, 3, stride=2, padding=1, groups=2, act="relu"),
        static.nn.conv2d_transpose(x, 2, filter_size=3, stride=2, bias_attr=False, name="up"),
        static.nn.conv2d_transpose(x, 2, output_size=[13, 13], stride=2, bias_attr=False),
        static.nn.conv3d(z, 3, [2, 2, 1], bias_attr=False),
        static.nn.conv3d_transpose(z, 3, filter_size=2, bias_attr=False),
        static.nn.deform_conv2d(x, static.data("moves", [None, 18, 4, 4]), None, 3, 3, bias_attr=False),
    ]
    assert list(parameters()) == [
        "conv2d_0.w_0", "conv2d_0.b_0", "up.w_0", "conv2d_transpose_0.w_0", "conv3d_0.w_0", "conv3d_transpose_0.w_0",
        "deform_conv2d_0.w_0",
    ]  # fmt: skip
    a, b = array(3, 4, 6, 6), array(3, 2, 3, 3, 3)
    outputs = run(outs, x=a, z=b, moves=np.zeros((3, 18, 4, 4), "float32"))
    paddle.disable_static()
    t, u, w = paddle.to_tensor(a), paddle.to_tensor(b), lambda name: paddle.to_tensor(value(f"{name}.w_0"))
    want = [
        F.relu(F.conv2d(t, w("conv2d_0"), paddle.to_tensor(value("conv2d_0.b_0")), 2, 1, 1, 2)),
        F.conv2d_transpose(t, w("up"), None, 2),
        F.conv2d_transpose(t, w("conv2d_transpose_0"), None, 2),
        F.conv3d(u, w("conv3d_0")),
        F.conv3d_transpose(u, w("conv3d_transpose_0")),
        F.conv2d(t, w("deform_conv2d_0")),  # nothing is moved
    ]
    for got, expected in zip(outputs, want, strict=True):
        close(got, expected.numpy(), 36)


def test_normalizations_are_the_functional_ones_and_batch_norm_moves_statistics(static_mode):
    x = static.data("x", [None, 4, 3, 3])
    outs = [
        static.nn.batch_norm(x, act="relu", momentum=0.5, moving_variance_name="spread"),
        static.nn.layer_norm(x, begin_norm_axis=2, shift=False),
        static.nn.group_norm(x, 2),
        static.nn.instance_norm(x),
    ]
    shapes = parameters()
    assert shapes["batch_norm_0.w_1"] == shapes["spread"] == [4]
    assert shapes["layer_norm_0.w_0"] == [9]
    assert "layer_norm_0.b_0" not in shapes
    a = array(5, 4, 3, 3)
    test = static.default_main_program().clone(for_test=True)
    outputs = run(outs, x=a)

    def unit(dims):
        return (a - a.mean(dims, keepdims=True)) / np.sqrt(a.var(dims, keepdims=True) + 1e-5)

    close(outputs[0], np.maximum(unit((0, 2, 3)), 0), 45)
    close(outputs[1], unit((2, 3)), 9)
    groups = a.reshape(5, 2, 18)
    by_group = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-5)
    close(outputs[2], by_group.reshape(a.shape), 18)
    close(outputs[3], unit((2, 3)), 9)
    mean, spread = value("batch_norm_0.w_1"), value("spread")
    close(mean, 0.5 * a.mean((0, 2, 3)), 45)
    close(spread, 0.5 + 0.5 * a.var((0, 2, 3)), 45)
    (tested,) = static.Executor().run(test, feed={"x": a}, fetch_list=[outs[0]])
    column = (slice(None), None, None)
    close(tested, np.maximum((a - mean[column]) / np.sqrt(spread[column] + 1e-5), 0), 45)
    np.testing.assert_array_equal(value("spread"), spread)


def test_prelu_bilinear_and_spectral_norm(static_mode):
    x = static.data("x", [None, 2, 3, 3])
    flat = x.reshape([-1, 18])
    slopes = [static.nn.prelu(x, mode) for mode in ("all", "channel", "element")]
    product = static.nn.bilinear_tensor_product(flat, flat, 2)
    weight = paddle.create_parameter([4, 3], "float32")
    unit = static.nn.spectral_norm(weight, power_iters=30)
    assert [parameters()[f"prelu_{i}.w_0"] for i in range(3)] == [[1], [1, 2, 1, 1], [1, 2, 3, 3]]
    a = array(5, 2, 3, 3)
    outputs = run([*slopes, product, unit], x=a)
    for got in outputs[:3]:
        np.testing.assert_array_equal(got, np.where(a > 0, a, np.float32(0.25) * a))
    rows = a.reshape(5, 18)
    want = np.einsum("ni,oij,nj->no", rows, value("bilinear_tensor_product_0.w_0"), rows)
    close(outputs[3], want, 324)
    # the power iteration ends within float32 of the largest singular value, which is 1 then
    assert abs(np.linalg.svd(outputs[4])[1][0] - 1) < 1e-4


def test_nce_counts_true_and_drawn_classes(static_mode):
    x, label = static.data("x", [None, 3]), static.data("label", [None, 1], "int64")
    loss = static.nn.nce(x, label, 4, num_neg_samples=3, sampler="custom_dist", custom_dist=[0, 1, 0, 0])
    many = static.nn.nce(x, label, 4, num_neg_samples=1000, sampler="log_uniform", bias_attr=False, name="many")
    a, classes = array(2, 3), np.array([[2], [1]])
    outputs = run([loss, many], x=a, label=classes)
    scores = 1 / (1 + np.exp(-(a @ value("nce_0.w_0").T + value("nce_0.b_0").T)))
    true, drawn = np.take_along_axis(scores, classes, 1)[:, 0], scores[:, 1]  # class 1 is always drawn, 3 times
    chance = np.array([0.0, 3.0])
    want = (np.log1p(chance / true) + 3 * np.log1p(drawn / 3)) / 4
    close(outputs[0][:, 0], want, 8)
    chances = np.log((np.arange(4) + 2) / (np.arange(4) + 1)) / np.log(5) * 1000
    scores = 1 / (1 + np.exp(-(a @ value("many.w_0").T)))
    picked = np.take_along_axis(scores, classes, 1)[:, 0]
    want = (np.log1p(chances[classes[:, 0]] / picked) + (chances * np.log1p(scores / chances)).sum(1)) / 1001
    # 1000 draws: a mean of terms that differ by about as much as they are, within five standard deviations
    np.testing.assert_allclose(outputs[1][:, 0], want, rtol=5 / 1000**0.5)


def test_a_normalized_weight_is_direction_times_length(static_mode):
    x = static.data("x", [None, 3])
    out = static.nn.fc(x, 4, weight_attr=static.WeightNormParamAttr(dim=1), bias_attr=False)
    whole = static.nn.fc(x, 4, weight_attr=static.WeightNormParamAttr(name="w"), bias_attr=False)
    assert parameters() == {
        "fc_0.weight_norm_v_0": [3, 4], "fc_0.weight_norm_g_0": [4], "w_v": [3, 4], "w_g": [1]
    }  # fmt: skip
    a = array(2, 3)
    run([], x=a)
    for name in ("fc_0.weight_norm_v_0", "w_v"):
        v = static.global_scope().find_var(name).get_tensor()
        v.set(value(name) * 2)  # the direction stays, and so does the length
    found = static.Executor().run(feed={"x": a}, fetch_list=[out, whole])
    close(found[0], a @ value("fc_0.weight_norm_v_0") / 2, 16)
    close(found[1], a @ value("w_v") / 2, 16)
    with pytest.raises(ConfigError, match="a parameter attribute is"):
        paddle.nn.Linear(2, 2, weight_attr=static.WeightNormParamAttr())


def test_control_flow_is_recorded(static_mode):
    x = static.data("x", [1])
    chosen = static.nn.case([(x > 2, lambda: x * 10), (x > 1, lambda: x * 100)], default=lambda: -x)
    by_index = static.nn.switch_case(x.astype("int64"), [lambda: x + 1, lambda: x + 2])
    found = [run([chosen, by_index], x=np.array([v], "float32")) for v in (3.0, 1.5, 0.0)]
    assert [[a.item() for a in pair] for pair in found] == [[30, 5], [150, 3.5], [0, 1]]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: static.nn.fc(x, 3, activation="nothing"), ConfigError, "no activation 'nothing'"),
        (lambda x: static.nn.fc(x, 3, num_flatten_dims=3), ShapeError, r"num_flatten_dims=3 .*shape \[-1, 4, -1\]"),
        (
            lambda x: static.nn.fc(x, 3),
            ShapeError,
            r"shape \[-1, 3\]; give the sizes that are -1 where",
        ),
        (lambda x: static.nn.fc(x, 3, weight_attr=False), ConfigError, "nothing to multiply by"),
        (lambda x: static.nn.fc([x, x], 3, weight_attr=["a"]), ConfigError, "1 weight attributes for 2 inputs"),
        (lambda x: static.nn.embedding(x, [5, 3], is_distributed=True), ConfigError, "no parameter server"),
        (lambda x: static.nn.embedding(x, [5]), ConfigError, r"size is \[rows, width\], got \[5\]"),
        (lambda x: static.nn.sparse_embedding(x, [5, 3], entry=1), ConfigError, "setting of a parameter server"),
        (lambda x: static.nn.conv2d(x, 3, 3), ShapeError, "conv2d takes 4 dims"),
        (lambda x: static.nn.batch_norm(x, data_layout="CN"), ConfigError, "data format 'CN'"),
        (
            lambda x: static.nn.batch_norm(x, do_model_average_for_mean_and_var=False),
            ConfigError,
            "do_model_average_for_mean_and_var='False' cannot be honoured",
        ),
        (lambda x: static.nn.instance_norm(x, param_attr=False), ConfigError, "leave out both scale and bias"),
        (lambda x: static.nn.layer_norm(x, begin_norm_axis=3), ShapeError, "give 1 to 2"),
        (lambda x: static.nn.prelu(x, "some"), ConfigError, "mode='some'"),
        (lambda x: static.nn.nce(x[0], x[0], 4, sampler="custom_dist"), ConfigError, "custom_dist goes with"),
        (
            lambda x: static.nn.nce(x[0], x[0], 2, sampler="custom_dist", custom_dist=[1, 1]),
            ConfigError,
            r"add up to 1, got \[1.0, 1.0\]",
        ),
        (
            lambda x: static.nn.fc(x[0], 2, weight_attr=static.WeightNormParamAttr(dim=2)),
            ShapeError,
            "give the sizes that are -1 where",
        ),
        (lambda x: static.nn.deform_conv2d(x, x, None, 3, 3), ShapeError, "deform_conv2d takes 4 dims"),
        (lambda x: static.nn.fcc, AttributeError, "no name 'fcc'"),
    ],
)
def test_what_cannot_be_done_is_refused(static_mode, call, error, match):
    with pytest.raises(error, match=match):
        call(static.data("x", [None, 4, None]))


def test_kernels_that_cannot_be_found_are_refused(static_mode):
    x = static.data("x", [None, 4, None, 5])
    with pytest.raises(ConfigError, match="give filter_size, output_size or both"):
        static.nn.conv2d_transpose(x, 2)
    with pytest.raises(ConfigError, match=r"cannot be found from output_size \[9, 9\]"):
        static.nn.conv2d_transpose(x, 2, output_size=9)
    with pytest.raises(ConfigError, match="groups=3 must divide the 4 channels"):
        static.nn.conv2d(x, 3, 3, groups=3)
    with pytest.raises(ConfigError, match="leaves no kernel"):
        static.nn.conv2d(x, 3, 3, param_attr=False)


def test_layer_functions_belong_to_static_mode():
    with pytest.raises(ProgramError, match=r"fc makes parameters of a Program.*enable_static"):
        static.nn.fc(paddle.ones([2, 3]), 4)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("leaky_relu", [-0.02, 2.0]),
        ("hardsigmoid", [0.3, 0.9]),
        ("hard_sigmoid", [0.3, 0.9]),
        ("silu", [-0.26894142, 1.76159416]),
    ],
)
def test_activations_have_the_constants_of_paddles_operators(static_mode, name, want):
    x = static.data("x", [1, 2])
    eye = paddle.nn.initializer.Assign(np.eye(2, dtype="float32"))
    out = static.nn.fc(x, 2, weight_attr=eye, activation=name)
    close(run([out], x=np.array([[-1.0, 2.0]], "float32"))[0], [want], 2)


def test_row_conv_of_sequences_side_by_side(static_mode):
    """Numbers of PaddlePaddle 3.3.1."""
    x = static.data("x", [None, 4, 6])
    start = paddle.nn.initializer.Assign(np.arange(18, dtype="float32").reshape(3, 6))
    rows = static.nn.row_conv(x, 2, param_attr=paddle.ParamAttr(initializer=start))
    exe = static.Executor()
    exe.run(static.default_startup_program())
    (got,) = exe.run(feed={"x": np.arange(48, dtype="float32").reshape(2, 4, 6)}, fetch_list=[rows])
    assert got[..., 0].tolist() == [[180, 288, 108, 0], [612, 720, 252, 0]]
