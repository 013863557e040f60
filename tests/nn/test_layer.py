"""Layer itself: registering, walking, hooks, modes, state, casts; ParamAttr; errors."""

import numpy as np
import pytest

import polyreme.nn as nn
from polyreme import amp
from polyreme.core import unique_name
from polyreme.core.dtype import set_default_dtype
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, ShapeError
from polyreme.jit import to_static
from polyreme.nn.eval_mode import eval_mode
from polyreme.nn.parameter import Parameter
from polyreme.optimizer import AdamW
from polyreme.regularizer import L2Decay


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 3)
        self.down = nn.Linear(3, 2)
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(2.0))
        self.register_buffer("seen", to_tensor([0.0]))
        self.register_buffer("scratch", to_tensor([0.0]), persistable=False)

    def forward(self, x):
        return self.down(self.up(x)) * self.scale


class Tied(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.again = self.first


X = np.array([[1.0, -2.0]], np.float32)


def test_names_in_order_and_by_dots():
    net = Net()
    assert [n for n, _ in net.named_parameters()] == ["scale", "up.weight", "up.bias", "down.weight", "down.bias"]
    assert [n for n, _ in net.named_parameters("p", include_sublayers=False)] == ["p.scale"]
    assert [n for n, _ in net.named_sublayers(include_self=True)] == ["", "up", "down"]
    assert [n for n, _ in net.named_buffers()] == ["seen", "scratch"]
    assert list(net.state_dict()) == ["scale", "seen", "up.weight", "up.bias", "down.weight", "down.bias"]
    assert "scratch" in net.to_static_state_dict()
    assert {"up", "scale", "seen"} <= set(dir(net))


def test_tied_weights_and_shared_layers_are_listed_once_but_saved_under_each_name():
    net = Tied()
    assert [n for n, _ in net.named_parameters()] == ["first.weight", "first.bias", "second.bias"]
    assert len(list(net.named_parameters(remove_duplicate=False))) == 6
    assert len(net.parameters()) == 3
    assert len(list(net.children())) == 2
    assert list(net.state_dict()) == [f"{a}.{b}" for a in ("first", "second", "again") for b in ("weight", "bias")]


def test_full_names_count_per_class():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    kind, count = a.full_name().rsplit("_", 1)
    assert kind == "linear"
    assert b.full_name() == f"linear_{int(count) + 1}"
    assert a.weight.name == f"{a.full_name()}.w_0"
    assert a.bias.name == f"{a.full_name()}.b_0"
    with unique_name.guard():
        norm = nn.BatchNorm2D(2)
        assert [p.name for p in norm.parameters()] == [f"batch_norm2d_0.{n}" for n in ("w_0", "b_0", "w_1", "w_2")]
        assert [nn.LSTMCell(1, 1).full_name(), nn.ReLU().full_name()] == ["lstm_cell_0", "re_lu_0"]


def test_hooks_change_what_goes_in_and_comes_out_until_removed():
    layer, calls = nn.Linear(2, 2), []
    plain = layer(to_tensor(X)).numpy()
    before = layer.register_forward_pre_hook(lambda it, given: (given[0] * 2,))
    after = layer.register_forward_post_hook(lambda it, given, made: calls.append(len(given)) or made + 1)
    np.testing.assert_allclose(layer(to_tensor(X)).numpy(), 2 * plain + 1, rtol=8 * np.finfo(np.float32).eps)
    assert calls == [1]
    assert before.remove()
    assert after.remove()
    assert not after.remove()
    np.testing.assert_array_equal(layer(to_tensor(X)).numpy(), plain)


def test_train_and_eval_reach_every_sublayer():
    net = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    assert net.eval() is net
    assert [layer.training for layer in net.sublayers(include_self=True)] == [False] * 4
    assert net.train()[1][0].training


def test_apply_visits_sublayers_first():
    seen = []
    net = Net()
    assert net.apply(lambda layer: seen.append(type(layer).__name__)) is net
    assert seen == ["Linear", "Linear", "Net"]


def test_state_dict_shares_tensors_or_detaches_them():
    layer = nn.Linear(2, 2)
    assert layer.state_dict()["weight"] is layer.weight
    apart = layer.state_dict(keep_vars=False)["weight"]
    assert apart is not layer.weight
    assert apart.stop_gradient
    into = {}
    layer.state_dict(destination=into, structured_name_prefix="net.")
    assert list(into) == ["net.weight", "net.bias"]
    assert list(Net().state_dict(include_sublayers=False)) == ["scale", "seen"]


def test_set_state_dict_reports_and_keeps_dtypes(caplog):
    layer = nn.Linear(2, 2)
    missing, unexpected = layer.set_state_dict({"weight": np.ones((2, 2)), "other": np.ones(1)})
    assert (missing, unexpected) == (["bias"], ["other"])
    assert "Linear keeps its own values of bias, which the dict does not have; it has other, which" in caplog.text
    assert layer.weight.dtype == "float32"
    np.testing.assert_array_equal(layer.weight.numpy(), np.ones((2, 2)))
    by_name = {layer.weight.name: np.zeros((2, 2))}
    assert layer.set_state_dict(by_name, use_structured_name=False) == ([layer.bias.name], [])
    np.testing.assert_array_equal(layer.weight.numpy(), np.zeros((2, 2)))


def test_set_state_dict_refuses_names_of_which_none_is_its_own():
    with pytest.raises(ConfigError, match=r"none of the names given \(wait, ...\); it has weight, bias, ..."):
        nn.Linear(2, 2).set_state_dict({"wait": np.ones((2, 2))})
    assert nn.Linear(2, 2).set_state_dict({}) == (["weight", "bias"], [])


def test_set_state_dict_loads_nothing_if_a_shape_does_not_fit():
    layer = nn.Linear(2, 2)
    before = layer.weight.numpy().copy()
    with pytest.raises(ShapeError, match=r"nothing was loaded: bias: expected \[2\], got \[3\]"):
        layer.set_state_dict({"weight": np.ones((2, 2)), "bias": np.ones(3)})
    np.testing.assert_array_equal(layer.weight.numpy(), before)


def test_to_casts_floating_state_only():
    net = Net()
    net.register_buffer("count", to_tensor([3]))
    assert net.to(dtype="bfloat16") is net
    assert {str(p.dtype) for p in net.parameters()} == {"bfloat16"}
    assert net.count.dtype == "int64"
    assert net.seen.dtype == "bfloat16"
    net.float(excluded_layers=[nn.Linear])
    assert net.scale.dtype == "float32"
    assert net.up.weight.dtype == "bfloat16"
    assert net.float16().up.weight.dtype == "float16"
    assert net.astype("float64").create_parameter([1]).dtype == "float64"
    assert net.up.weight is net.up.parameters()[0]


def test_tensors_that_are_attributes_are_buffers_that_are_not_saved():
    net = Net()
    net.up.offsets = to_tensor([1.0, 2.0])
    assert [n for n, _ in net.named_buffers()] == ["seen", "scratch", "up.offsets"]
    assert "up.offsets" not in net.state_dict()
    net.to(dtype="float64")
    assert net.up.offsets.dtype == "float64"
    assert net.bfloat16().up.offsets.dtype == "bfloat16"
    assert amp.decorate(net, level="O2", dtype="float16").up.offsets.dtype == "float16"
    net.up.offsets = None
    assert [n for n, _ in net.named_buffers()] == ["seen", "scratch"]


def test_what_a_captured_call_leaves_in_an_attribute_has_a_value():
    class Remembers(nn.Layer):
        def forward(self, x):
            self.last = x * 2
            return self.last + 1

    net = Remembers()
    assert to_static(net)(to_tensor([1.0])).tolist() == [3.0]
    assert [b.tolist() for b in net.buffers()] == [[2.0]]


def test_second_names_of_methods():
    net = Net()
    assert list(net.modules()) == net.sublayers(include_self=True)
    assert [n for n, _ in net.named_modules()] == ["", "up", "down"]
    net.add_module("act", nn.ReLU())
    net.register_parameter("free", Parameter(np.zeros(1, np.float32)))
    assert net.get_submodule("act") is net.act
    assert net.get_sublayer("") is net
    assert net.get_parameter("up.weight") is net.up.weight
    assert net.get_buffer("seen") is net.seen
    with pytest.raises(AttributeError, match=r"Net has no sublayer 'up\.x': Linear has none"):
        net.get_submodule("up.x")
    with pytest.raises(AttributeError, match="Linear has no parameter 'w'; it has weight, bias"):
        net.get_parameter("up.w")
    assert not any(p.trainable for p in net.requires_grad_(False).parameters())
    net.requires_grad_()(to_tensor(X)).sum().backward()
    net.zero_grad(set_to_none=False)
    assert (net.up.weight.grad.numpy() == 0).all()
    net.zero_grad()
    assert net.up.weight.grad is None
    assert net.half().up.weight.dtype == "float16"
    assert net.double().up.weight.dtype == "float64"
    assert net.type("bfloat16").up.weight.dtype == "bfloat16"
    assert not net.train(False).up.training


def test_clear_gradients():
    net = Net()
    net(to_tensor(X)).sum().backward()
    net.clear_gradients()
    assert all((p.grad.numpy() == 0).all() for p in net.parameters())
    net.clear_gradients(set_to_zero=False)
    assert all(p.grad is None for p in net.parameters())


def test_parameters_follow_their_attribute():
    attr = nn.ParamAttr("mine", nn.initializer.Constant(3.0), 0.5, L2Decay(0.1), trainable=False, need_clip=False)
    weight = nn.Linear(2, 2, weight_attr=attr).weight
    assert weight.name == "mine"
    assert set(weight.numpy().ravel()) == {3.0}
    assert weight.optimize_attr == {"learning_rate": 0.5}
    assert (weight.regularizer, weight.trainable, weight.need_clip) == (L2Decay(0.1), False, False)
    assert nn.Linear(2, 2, weight_attr="named").weight.name == "named"
    assert nn.Linear(2, 2, bias_attr=False).bias is None
    assert set(nn.Linear(2, 2, bias_attr=nn.initializer.Constant(1.0)).bias.numpy()) == {1.0}
    with pytest.raises(ConfigError, match="a parameter attribute is None, False, a name"):
        nn.Linear(2, 2, weight_attr=3)


def test_logical_dims_of_parameters():
    linear = nn.Linear(2, 3, dims=("embed", "ffn"))
    assert (linear.weight.dims, linear.bias.dims) == (("embed", "ffn"), ("ffn",))
    assert nn.LayerNorm(4).weight.dims == nn.RMSNorm(4).weight.dims == ("embed",)
    assert nn.LayerNorm([2, 2]).weight.dims == (None,)
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    assert layer.self_attn.q_proj.weight.dims == ("embed", "heads")
    assert layer.self_attn.out_proj.weight.dims == ("heads", "embed")
    assert (layer.linear1.weight.dims, layer.linear2.weight.dims) == (("embed", "ffn"), ("ffn", "embed"))
    assert nn.MultiHeadAttention(4, 2, kdim=3).k_proj.weight.dims == (None, "heads")
    with pytest.raises(ShapeError, match="has 2 dims"):
        Parameter(np.zeros((2, 2)), dims=("embed",))


def test_attributes_move_between_the_tables():
    net = Net()
    net.up = nn.ReLU()
    assert [n for n, _ in net.named_children()] == ["up", "down"]
    net.up = None
    assert [n for n, _ in net.named_children()] == ["down"]
    net.scale = None
    assert "scale" not in net.state_dict()
    del net.down
    assert not hasattr(net, "down")
    net.seen = to_tensor([5.0])
    assert net.state_dict()["seen"].numpy() == 5.0


@pytest.mark.parametrize(
    ("do", "error", "match"),
    [
        (lambda net: setattr(net, "scale", 3), TypeError, "'scale' is a parameter of Net; assign a Parameter or None"),
        (lambda net: setattr(net, "seen", 3), TypeError, "'seen' is a buffer of Net; assign a Tensor or None"),
        (lambda net: net.nothing, AttributeError, "Net has no attribute 'nothing'"),
        (lambda net: net.add_parameter("a.b", None), KeyError, "without dots"),
        (lambda net: net.add_parameter("w", 3), TypeError, "needs a Parameter, got int"),
        (lambda net: net.add_sublayer("w", 3), TypeError, "needs a Layer, got int"),
        (lambda net: net.register_buffer("w", 3), TypeError, "needs a Tensor, got int"),
        (lambda net: net.register_buffer("up", None), KeyError, "already has an attribute 'up'"),
        (lambda net: nn.Layer()(1), NotImplementedError, r"Layer has no forward\(\)"),
    ],
)
def test_bad_input_says_what_to_change(do, error, match):
    with pytest.raises(error, match=match):
        do(Net())


def test_super_init_must_come_first():
    class Early(nn.Layer):
        def __init__(self):
            self.inner = nn.ReLU()

    with pytest.raises(RuntimeError, match=r"call super\(\).__init__\(\) before assigning 'inner' in Early"):
        Early()


REFUSED = [
    (lambda: nn.Linear(-1, 3), r"Linear\(-1, 3\): both sizes must be at least 0"),
    (lambda: nn.Linear(2.5, 3), r"Linear\(2.5, 3\): both sizes must be integers"),
    (lambda: nn.Embedding(3, 0), r"both sizes must be at least 1"),
    (lambda: nn.Embedding(3, 2, padding_idx=3), "padding_idx 3 is outside the table of 3 rows"),
    (lambda: nn.Embedding(3, 2, weight_attr=False), "leaves no table"),
    (lambda: nn.GroupNorm(3, 4), "4 channels do not split into 3 equal groups"),
    (lambda: nn.GroupNorm(2, 4, affine="x"), "affine is True or False"),
    (lambda: nn.LayerNorm(4, elementwise_affine=None), "elementwise_affine and bias are True or False"),
    (lambda: nn.InstanceNorm2D(3, weight_attr=False), "leave out both scale and bias"),
    (lambda: nn.BatchNorm(3, act="nope"), "act 'nope' is not a function"),
    (lambda: nn.BatchNorm(3, do_model_average_for_mean_and_var=False), "do_model_average_for_mean_and_var=False"),
    (lambda: nn.SpectralNorm([2, 3], dim=2), r"dim 2 is outside weight_shape \[2, 3\]"),
    (lambda: nn.SpectralNorm([2, 3], power_iters=0), "power_iters is at least 1"),
    (lambda: nn.Conv2D(3, 4, 3, groups=2), "in_channels 3 is not a multiple of groups 2"),
    (lambda: nn.Conv2D(0, 4, 3), "are at least 1"),
    (lambda: nn.Conv2D(3, 4, (3, 3, 3)), "kernel_size is a positive integer or 2 of them"),
    (lambda: nn.Conv2D(3, 4, 3, bias="zeros"), "bias is True or False, got 'zeros'"),
    (lambda: nn.Conv2D(3, 4, 3, padding_mode="reflct"), "did you mean 'reflect'"),
    (lambda: nn.Conv2D(3, 4, 3, weight_attr=False), "leaves no kernel"),
    (lambda: nn.Conv2DTranspose(3, 4, 3, weight_attr=False), "leaves no kernel"),
    (
        lambda: nn.Conv2D(1, 1, 3, padding="SAME", padding_mode="circular")(
            to_tensor(np.zeros((1, 1, 4, 4), "float32"))
        ),
        "goes with padding_mode='zeros'",
    ),
    (
        lambda: nn.Conv2D(1, 1, 3, padding=[1, 1, 1], padding_mode="circular")(
            to_tensor(np.zeros((1, 1, 4, 4), "float32"))
        ),
        "takes 2 sizes",
    ),
    (lambda: nn.ReflectionPad2D([1, 2, 3]), r"padding is a number or 4 of them, two a dim .*, got \[1, 2, 3\]"),
    (lambda: nn.Dropout(1.5), "p is a probability from 0 to 1, got 1.5"),
    (lambda: nn.Dropout(0.5, mode="x"), "'upscale_in_train' or 'downscale_in_infer', got 'x'"),
    (lambda: nn.Dropout(0.5, inplace=0), "inplace is True or False, got 0"),
    (lambda: nn.PReLU(weight_attr=False), "no slope to learn"),
    (lambda: nn.Upsample(recompute_scale_factor=True), "recompute_scale_factor=True is not supported"),
]


@pytest.mark.parametrize(
    ("padding", "widths"),
    [([1], [(0, 0), (1, 0)]), ((2,), [(0, 0), (2, 0)]), ([1, 2, 3], [(3, 0), (1, 2)]), ([], [(0, 0), (0, 0)])],
)
def test_a_number_missing_after_a_dim_is_no_padding_there(padding, widths):
    x = np.arange(8.0, dtype="float32").reshape(1, 2, 4)
    want = np.pad(x, [(0, 0), *widths], constant_values=7)
    np.testing.assert_array_equal(nn.Pad1D(padding, value=7.0)(to_tensor(x)).numpy(), want)


@pytest.mark.parametrize(("make", "match"), REFUSED)
def test_layers_refuse_what_they_cannot_do(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


@pytest.mark.parametrize(
    ("layer", "shape", "match"),
    [
        (lambda: nn.BatchNorm2D(3), (2, 3), r"BatchNorm2D takes 4 dims, got shape \[2, 3\]"),
        (lambda: nn.BatchNorm1D(3), (2, 3, 4, 5), "BatchNorm1D takes 2 or 3 dims"),
        (lambda: nn.Softmax2D(), (2, 3), "Softmax2D takes"),
        (lambda: nn.SpectralNorm([2, 3]), (3, 2), r"weight of shape \[2, 3\], got \[3, 2\]"),
    ],
)
def test_layers_refuse_other_shapes(layer, shape, match):
    with pytest.raises(ShapeError, match=match):
        layer()(to_tensor(np.zeros(shape, np.float32)))


def test_embedding_padding_weight_and_freeze():
    table = nn.Embedding(4, 3, padding_idx=-1)
    np.testing.assert_array_equal(table.weight.numpy()[3], np.zeros(3))
    table(to_tensor([3, 0])).sum().backward()
    np.testing.assert_array_equal(table.weight.grad.numpy(), [[1] * 3, [0] * 3, [0] * 3, [0] * 3])
    given = nn.Embedding(2, 2, _weight=np.eye(2), _freeze=True)
    np.testing.assert_array_equal(given(to_tensor([1])).numpy(), [[0, 1]])
    assert not given.weight.trainable


def test_embedding_scales_rows_and_gradients_when_asked():
    table = nn.Embedding(2, 2, max_norm=1.0, scale_grad_by_freq=True, sparse=True, _weight=[[3.0, 4.0], [0.1, 0.0]])
    out = table(to_tensor([0, 0, 1]))
    rtol = 8 * float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(out.numpy(), [[0.6, 0.8], [0.6, 0.8], [0.1, 0.0]], rtol=rtol)
    np.testing.assert_allclose(table.weight.numpy()[0], [0.6, 0.8], rtol=rtol)
    out.sum().backward()
    np.testing.assert_array_equal(table.weight.grad.numpy(), np.ones((2, 2)))


def test_statistics_of_float64_layers_are_float64():
    set_default_dtype("float64")
    try:
        net = nn.BatchNorm1D(2, momentum=0.5)
    finally:
        set_default_dtype("float32")
    x = np.random.default_rng(0).normal(3.0, 2.0, (16, 2))
    net(to_tensor(x))
    assert net._mean.dtype == net._variance.dtype == np.float64
    np.testing.assert_allclose(net._mean.numpy(), 0.5 * x.mean(0), rtol=32 * np.finfo(np.float64).eps)


def test_batch_norm_uses_running_statistics_in_eval_and_sync_shares_them():
    x = np.random.default_rng(0).normal(3.0, 2.0, (16, 4, 3, 3)).astype(np.float32)
    net = nn.Sequential(nn.BatchNorm2D(4, momentum=0.5))
    net(to_tensor(x))
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    rtol = 144 * float(np.finfo(np.float32).eps)  # sums of 144 terms
    np.testing.assert_allclose(net[0]._mean.numpy(), 0.5 * mean, rtol=rtol)
    np.testing.assert_allclose(net[0]._variance.numpy(), 0.5 + 0.5 * var, rtol=rtol)
    old = net.eval()[0]
    want = net(to_tensor(x)).numpy()
    np.testing.assert_array_equal(net(to_tensor(x)).numpy(), want)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert type(converted[0]) is nn.SyncBatchNorm
    assert converted[0]._mean is old._mean
    assert converted[0].weight is old.weight
    np.testing.assert_array_equal(converted(to_tensor(x)).numpy(), want)
    assert list(converted.state_dict()) == ["0.weight", "0.bias", "0._mean", "0._variance"]


def test_padding_mode_with_a_size_for_each_dim_pads_that_dim():
    conv = nn.Conv2D(1, 1, 1, padding=(1, 2), padding_mode="replicate", bias_attr=False)
    conv.weight.set_value(np.ones((1, 1, 1, 1)))
    x = np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)
    np.testing.assert_array_equal(conv(to_tensor(x)).numpy()[0, 0], np.pad(x[0, 0], ((1, 1), (2, 2)), "edge"))


def test_inplace_layers_write_into_their_input():
    x = to_tensor(X)
    assert nn.Silu(inplace=True)(x) is x
    np.testing.assert_allclose(x.numpy(), X / (1 + np.exp(-X)), rtol=8 * np.finfo(np.float32).eps)


def test_dropout_inplace_writes_into_its_input():
    x = to_tensor(np.ones(64, np.float32))
    assert nn.Dropout(0.5, inplace=True)(x) is x
    assert set(x.numpy()) == {0.0, 2.0}


def test_pads_of_fewer_dims_start_with_the_last():
    x = to_tensor(np.arange(4, dtype="float32").reshape(1, 1, 2, 2))
    assert nn.Pad2D([1, 2])(x).tolist() == [[[[0, 0, 1, 0, 0], [0, 2, 3, 0, 0]]]]


def test_trainable_statistics_are_the_batch_s_in_eval_mode_too():
    x = to_tensor(np.float32([[1, 2], [3, 6]]))
    layer = nn.BatchNorm(2, in_place=True, trainable_statistics=True, epsilon=0.0)
    layer.eval()
    np.testing.assert_allclose(layer(x).numpy(), [[-1, -1], [1, 1]], rtol=1e-6)


def test_settings_may_be_tensors_of_one_element():
    assert nn.Dropout(to_tensor([0.25])).p == 0.25
    zeros = nn.functional.dropout(to_tensor(np.ones(3, "float32")), to_tensor([1.0]))
    assert zeros.tolist() == [0, 0, 0]


def test_statistics_are_parameters_that_no_optimizer_moves():
    net = nn.BatchNorm1D(3)
    assert [(n, p.trainable) for n, p in net.named_parameters()] == [
        ("weight", True), ("bias", True), ("_mean", False), ("_variance", False)
    ]  # fmt: skip
    assert net.buffers() == []
    for p in net.parameters():
        p.stop_gradient = False  # as scripts do that freeze and unfreeze whole networks
    optimizer = AdamW(0.1, parameters=net.parameters(), weight_decay=0.5)
    net(to_tensor(np.random.default_rng(0).normal(size=(8, 3)).astype("float32"))).sum().backward()
    moved = net._mean.numpy()
    assert (moved != 0).all()
    optimizer.step()
    np.testing.assert_array_equal(net._mean.numpy(), moved)
    assert {name.split("_moment")[0] for name in optimizer.state_dict() if "_moment1" in name} == {
        net.weight.name, net.bias.name
    }  # fmt: skip


def test_settings_have_paddles_names_and_may_be_read_under_a_second_one():
    conv = nn.Conv2D(4, 6, 3, stride=2, groups=2)
    assert [conv._kernel_size, conv._stride, conv._in_channels, conv._groups] == [[3, 3], [2, 2], 4, 2]
    assert conv.kernel_size is conv._kernel_size
    conv.padding = 1
    assert (conv._padding, "padding" in vars(conv)) == (1, False)
    pool = nn.MaxPool2D(3, 2)
    assert (pool.ksize, pool.stride, "ksize" in dir(pool)) == (3, 2, True)
    pool.stride = 1
    assert pool(to_tensor(np.zeros((1, 1, 5, 5), "float32"))).shape == [1, 1, 3, 3]
    assert nn.Linear(2, 3, name="head").name == "head"
    shrink = nn.Hardshrink(0.3)
    shrink.lambd = 0.6
    assert (shrink._threshold, shrink(to_tensor([0.5])).tolist()) == (0.6, [0.0])
    assert (nn.GLU(1).dim, nn.PairwiseDistance(3.0).norm, nn.AdaptiveMaxPool2D(2, True).return_indices) == (
        1,
        3.0,
        True,
    )
    assert (nn.NLLLoss(ignore_index=3)._ignore_index, nn.LayerNorm(4)._epsilon, nn.GELU()._approximate) == (
        3,
        1e-5,
        False,
    )
    with pytest.raises(AttributeError, match="MaxPool2D has no attribute 'kernel'"):
        _ = pool.kernel


def test_a_subclass_may_give_the_name_of_a_setting_another_meaning():
    class Wide(nn.Linear):
        @property
        def in_features(self):
            return "wide"

    layer = Wide(2, 3)
    assert (layer.in_features, layer._in_features, layer.out_features) == ("wide", 2, 3)
    assert layer(to_tensor(np.ones((1, 2), "float32"))).shape == [1, 3]


def test_a_changed_setting_is_seen_by_captured_code_under_either_name():
    layer = nn.Linear(2, 2)

    @to_static
    def run(x):
        return layer(x) * 0 + layer.out_features

    x = to_tensor(np.ones((1, 2), "float32"))
    assert run(x).tolist() == [[2.0, 2.0]]
    for name, value in (("_out_features", 5), ("out_features", 7)):
        setattr(layer, name, value)
        assert run(x).tolist() == [[value, value]]


def test_hooks_take_keywords_go_first_and_run_after_errors():
    class Scale(nn.Layer):
        def forward(self, x, by=1.0):
            if by == 0:
                raise ZeroDivisionError
            return x * by

    layer, calls = Scale(), []
    layer.register_forward_pre_hook(lambda it, given, named: (given, {"by": named["by"] * 2}), with_kwargs=True)
    layer.register_forward_pre_hook(lambda it, given: calls.append("first"), prepend=True)
    layer.register_forward_hook(
        lambda it, given, named, out: calls.append((named["by"], out is None)), with_kwargs=True
    )
    handle = layer.register_forward_hook(lambda it, given, out: calls.append(out is None), always_call=True)
    assert layer(to_tensor([1.0]), by=3.0).tolist() == [6.0]
    assert calls == ["first", (6.0, False), False]
    calls.clear()
    with pytest.raises(ZeroDivisionError):
        layer(to_tensor([1.0]), by=0)
    assert calls == ["first", True]
    handle.remove()
    with pytest.raises(ZeroDivisionError):
        layer(to_tensor([1.0]), by=0)
    assert calls == ["first", True, "first"]
    layer.register_forward_pre_hook(lambda it, given, named: given, with_kwargs=True)
    with pytest.raises(ConfigError, match=r"a hook with_kwargs returns None or \(inputs, keywords\), got tuple"):
        layer(to_tensor([1.0]), by=1.0)


def test_hooks_on_state_and_loading_strictly():
    net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    inner = net[0].register_state_dict_hook(lambda state: state.update(seen=1))
    assert list(net.state_dict()) == ["0.weight", "0.bias", "seen", "1.weight", "1.bias"]
    assert "seen" not in net.state_dict(use_hook=False)
    inner.remove()
    net.register_state_dict_hook(lambda state: {k: v for k, v in state.items() if k.endswith("bias")})
    assert list(net.state_dict()) == ["0.bias", "1.bias"]
    layer = nn.Linear(1, 2)
    ones = {"weight": np.ones((1, 2), "float32"), "other": np.ones(1)}
    with pytest.raises(CheckpointError, match=r"missing \['bias'\], unexpected \['other'\]; give strict=False"):
        layer.load_state_dict(ones)
    assert layer.load_state_dict(ones, strict=False) == (["bias"], ["other"])
    assert layer.weight.tolist() == [[1.0, 1.0]]
    assert layer.load_state_dict(layer.state_dict()) == ([], [])
    with pytest.raises(ConfigError, match="assign=True is not available"):
        layer.load_state_dict(ones, assign=True)


def test_sublayers_are_replaced_by_dotted_name():
    net = nn.Sequential(nn.Sequential(nn.Linear(1, 2)))
    net.set_sublayer("0.0", nn.Linear(1, 3))
    assert net[0][0].weight.shape == [1, 3]
    with pytest.raises(AttributeError, match="has no sublayer '1'"):
        net.set_submodule("0.1", nn.ReLU(), strict=True)
    with pytest.raises(ConfigError, match="give the name of a sublayer"):
        net.set_sublayer("", nn.ReLU())
    assert list(net._modules) == ["0"]


def test_layers_take_second_names_of_their_settings():
    assert nn.GroupNorm(1, 2, eps=0.5)._epsilon == nn.LayerNorm(2, eps=0.5)._epsilon == 0.5
    assert nn.Hardshrink(lambd=0.25).settings == nn.Softshrink(lambd=0.25).settings == {"threshold": 0.25}
    assert nn.PairwiseDistance(eps=0.5).settings["epsilon"] == 0.5
    assert nn.AdaptiveMaxPool2D(1, return_indices=True).settings["return_mask"]
    assert len(nn.LayerList(modules=[nn.ReLU()])) == len(nn.LayerDict(modules={"a": nn.ReLU()})) == 1
    layers = nn.Sequential(nn.ReLU()).append(module=nn.Tanh()).insert(0, module=nn.GELU())
    assert [type(each).__name__ for each in layers] == ["GELU", "ReLU", "Tanh"]


def test_layers_refuse_settings_when_they_are_made():
    for loss in (nn.MSELoss, nn.CrossEntropyLoss, nn.BCELoss):
        with pytest.raises(ConfigError, match="reduction='average'; choose one of 'mean', 'sum', 'none'"):
            loss(reduction="average")
    assert nn.KLDivLoss(reduction="batchmean")
    with pytest.raises(ConfigError, match="Conv2D: data_format='NHCW'; choose NCHW or NHWC"):
        nn.Conv2D(3, 4, 3, data_format="NHCW")
    with pytest.raises(TypeError, match="both sizes must be integers"):
        nn.Linear("3", 4)
    assert nn.Linear(0, 2)(to_tensor(np.ones((3, 0), "float32"))).shape == [3, 2]


def test_a_parameter_of_a_tensor():
    weight = Parameter.from_tensor(to_tensor([1.0, 1.0]), requires_grad=False)
    assert weight.stop_gradient
    assert weight.tolist() == [1.0, 1.0]


def test_eval_mode_gives_each_layer_its_mode_back():
    """A sublayer that was frozen before stays so, one that is added inside takes the mode of the whole."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    net[1].eval()

    def fail_inside():
        with eval_mode(net):
            assert not net.training
            net.add_sublayer("more", nn.ReLU().eval())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [layer.training for layer in net.sublayers(include_self=True)] == [True, True, False, True]
