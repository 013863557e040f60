"""ImperativeQuantAware, beside NumPy."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.errors import AbsentError, ConfigError
from polyreme.paddle_scripts import lookup
from polyreme.paddle_scripts.internals import quantization
from polyreme.paddle_scripts.internals.quantization import ImperativeQuantAware


def rounded(x, scale):
    return np.round(np.clip(x, -scale, scale) / scale * 127) * scale / 127


def test_a_rounded_layer_trains_and_is_saved(tmp_path):
    x = np.random.default_rng(0).standard_normal((4, 3)).astype("float32")
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    net.add_sublayer("head", nn.Linear(2, 2))
    net.head.skip_quant = True
    weight, bias = net[0].weight.numpy(), net[0].bias.numpy()
    quantizer = ImperativeQuantAware(["Linear"], "channel_wise_abs_max", onnx_format=True)
    assert quantizer.quantize(net) is net
    assert isinstance(net.head, nn.Linear)
    names = [n.removeprefix("0._layer.") for n in net.state_dict() if n.startswith("0._layer._fake")]
    assert names == ["_fake_quant_weight._scale"] + [f"_fake_quant_input.{n}" for n in ("_scale", "_state", "_accum")]

    out = net[0](paddle.to_tensor(x))
    top = (0.9 + np.abs(x).max()) / 1.9  # accum and state begin at 1
    want = rounded(x, top) @ rounded(weight, np.abs(weight).max(0)) + bias
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-5, atol=1e-6)  # 3 products, after a grid of 127 steps
    np.testing.assert_allclose(net[0]._ma_output_scale._scale.numpy(), [np.abs(want).max()], rtol=1e-5)
    out.sum().backward()
    np.testing.assert_allclose(net[0]._layer.weight.grad.numpy()[:, 0], rounded(x, top).sum(0), rtol=1e-5)

    spec = [paddle.static.InputSpec([None, 3], "float32")]
    quantizer.save_quantized_model(net, str(tmp_path / "net"), input_spec=spec)
    loaded = paddle.jit.load(str(tmp_path / "net"))(paddle.to_tensor(x))
    np.testing.assert_allclose(loaded.numpy(), net(paddle.to_tensor(x)).numpy(), rtol=1e-6)


def test_every_kind_of_layer_is_rounded():
    class Half(nn.Layer):
        def forward(self, x):
            return x / 2

    kinds = {"act_preprocess_layer": Half, "activation_quantize_type": "abs_max"}
    net = nn.Sequential(nn.Conv2D(2, 3, 3, padding=1, padding_mode="reflect"), nn.Conv2DTranspose(3, 2, 2, stride=2))
    x = paddle.rand([1, 2, 4, 4])
    exact = net[1](net[0](x / 2) / 2)
    ImperativeQuantAware(**kinds).quantize(net)
    assert [type(n._layer).__name__ for n in net] == ["FakeQuantizedConv2D", "FakeQuantizedConv2DTranspose"]
    # each of at most 18 products is off by half a step of 127 in both factors, twice
    np.testing.assert_allclose(net(x).numpy(), exact.numpy(), atol=18 * 2 / 127 * float(exact.abs().max()))
    assert len(net.parameters()) > 4
    assert net[0]._layer._fake_quant_weight._scale.shape == [1]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"fuse_conv_bn": True}, "fuse_conv_bn=True"),
        ({"weight_quantize_type": "range_abs_max"}, "weight_quantize_type='range_abs_max'; give one of"),
        ({"quantizable_layer_type": ["Lineer"]}, "no layer type 'Lineer' is rounded; did you mean 'Linear'"),
    ],
)
def test_what_is_not_honoured_is_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        ImperativeQuantAware(**settings)
    with pytest.raises(ConfigError, match="takes a Layer, got int"):
        ImperativeQuantAware().quantize(3)


def test_slots_of_operations_that_can_be_rounded():
    weights = quantization.SUPPORT_WEIGHT_QUANTIZATION_OP_DICT
    assert weights["conv2d"] == [["Input", "Filter"], ["Output"]]
    assert weights["mul"] == [["X", "Y"], ["Out"]]
    assert quantization.SUPPORT_ACT_QUANTIZATION_OP_DICT["batch_norm"] == [["X"], ["Y"]]
    assert set(weights) < set(quantization.SUPPORT_QUANTIZATION_OP_DICT)


def test_older_classes_for_quantization_after_training_say_what_to_use():
    for module, name in (("quantization", "KLQuantizer"), ("quantization.imperative.ptq", "ImperativePTQ")):
        with pytest.raises(AbsentError, match=r"use paddle.quantization.PTQ with an observer"):
            lookup.find(module, name)()
