"""Quantization of layers: quanters and observers, who gets which, QAT, PTQ, what is converted and saved.

Numbers of PaddlePaddle 3.3.1 were taken by hand from the same calls.
"""

import sys

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.errors import ConfigError
from polyreme.nn.quant import Stub
from polyreme.quantization import PTQ, QAT, BaseQuanter, QuantConfig, quanter
from polyreme.quantization.observers import AbsmaxObserver, GroupWiseWeightObserver
from polyreme.quantization.quanters import FakeQuanterWithAbsMaxObserver
from polyreme.quantization.wrappers import ConvertibleQuantedLayer, ObserveWrapper, QuantedLinear

ROWS = np.sin(np.arange(24)).reshape(3, 8).astype("float32")


def linear():
    layer = nn.Linear(8, 6)
    layer.weight.set_value(np.linspace(-1, 1.5, 48).reshape(8, 6).astype("float32"))
    layer.bias.set_value(np.arange(6).astype("float32") / 10)
    return layer


def test_a_quanter_follows_the_range_and_passes_gradients():
    layer = FakeQuanterWithAbsMaxObserver(moving_rate=0.9)._instance(nn.Linear(2, 2))
    step = paddle.jit.to_static(lambda x: layer(x))
    outputs = []
    for call, row in ((layer, [-1.0, 0.3, 2.0, 0.77]), (step, [-4.0, 0.3, 2.0, 0.77])):
        x = paddle.to_tensor(row, stop_gradient=False)
        y = call(x)
        (y * paddle.to_tensor([1.0, 2, 3, 4])).sum().backward()
        assert x.grad.tolist() == [1, 2, 3, 4]
        outputs.append(y.tolist())
    np.testing.assert_allclose(
        outputs, [[-0.997513, 0.300456, 1.526316, 0.769167], [-2.439114, 0.30729, 1.997385, 0.768225]], atol=1e-6
    )
    state = [layer.state_dict()[name].item() for name in ("_scale", "_state", "_accum")]
    np.testing.assert_allclose(state, [2.439114, 2.71, 6.61], atol=1e-5)
    layer.eval()
    np.testing.assert_allclose(layer(paddle.to_tensor([-10.0, 0.0])), [-layer.scales().item(), 0], rtol=1e-6)
    assert layer.scales().item() == pytest.approx(2.439114)
    assert [p for p in layer.parameters() if p.trainable] == []


def test_qat_computes_as_paddle_does_and_converts():
    quanter = FakeQuanterWithAbsMaxObserver(moving_rate=0.9)
    model = nn.Sequential(linear(), nn.ReLU(), nn.Linear(6, 2))
    config = QuantConfig(activation=None, weight=None)
    config.add_layer_config([model[0]], activation=quanter, weight=quanter)
    qat = QAT(config)
    quantized = qat.quantize(model)
    assert [type(layer).__name__ for layer in quantized] == ["QuantedLinear", "ReLU", "Linear"]
    assert isinstance(model[0], nn.Linear)
    first = quantized[0](paddle.to_tensor(ROWS))
    np.testing.assert_allclose(first[0], [-1.129624, -1.015213, -0.940118, -0.826413, -0.731503, -0.656407], atol=2e-6)
    # the optimizer moves the weight, not what the forward moves
    optimizer = paddle.optimizer.SGD(0.0, parameters=quantized.parameters())
    quantized(paddle.to_tensor(ROWS)).sum().backward()
    before = quantized[0].activation_quanter.scales().item()
    optimizer.step()
    assert quantized[0].activation_quanter.scales().item() == before
    quantized.eval()
    again = quantized[0](paddle.to_tensor(ROWS)).numpy()
    np.testing.assert_allclose(again[0], [-1.133757, -1.00445, -0.875144, -0.773636, -0.679079, -0.584522], atol=2e-6)
    converted = qat.convert(quantized)
    np.testing.assert_allclose(converted[0](paddle.to_tensor(ROWS)), again, atol=2e-6)
    whole = converted[0].weight.numpy()
    np.testing.assert_array_equal(whole, np.round(whole))
    kept = qat.convert(quantized, remain_weight=True)
    np.testing.assert_array_equal(kept[0].weight, model[0].weight)


def test_ptq_measures_and_converts_as_paddle_does(tmp_path):
    observer = AbsmaxObserver(quant_bits=8)
    model = nn.Sequential(linear(), nn.ReLU())
    with pytest.raises(ConfigError, match="training mode; call model"):
        PTQ(QuantConfig(activation=observer, weight=observer)).quantize(model)
    model.eval()
    ptq = PTQ(QuantConfig(activation=observer, weight=observer))
    observed = ptq.quantize(model)
    with pytest.raises(ConfigError, match="nothing has passed"):
        ptq.convert(observed)
    np.testing.assert_allclose(observed(paddle.to_tensor(ROWS)), model(paddle.to_tensor(ROWS)))
    observed(paddle.to_tensor(ROWS / 2))
    assert isinstance(observed[1], ObserveWrapper)
    converted = ptq.convert(observed)
    got = converted(paddle.to_tensor(ROWS)).numpy()
    want = [[0.0] * 6, [0.778394, 0.960019, 1.128671, 1.310296, 1.465975, 1.6476]]
    np.testing.assert_allclose(got[:2], want, atol=2e-6)
    assert converted[0].weight.numpy().ravel()[:4].tolist() == [-85, -80, -76, -71]
    np.testing.assert_allclose(converted[0].weight_quanter._dequanter._scales.item(), 1.5)
    spec = [paddle.static.InputSpec([None, 8], "float32")]
    paddle.jit.save(converted, str(tmp_path / "model"), input_spec=spec)
    np.testing.assert_allclose(paddle.jit.load(str(tmp_path / "model"))(paddle.to_tensor(ROWS)), got, atol=1e-6)


def test_the_nearest_configuration_holds():
    first, second, third, fourth = (FakeQuanterWithAbsMaxObserver(moving_rate=rate) for rate in (0.1, 0.2, 0.3, 0.4))
    model = nn.LayerDict(
        {
            "block": nn.LayerDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Conv2D(2, 2, 1)}),
            "head": nn.Linear(4, 4),
            "last": nn.Linear(4, 4),
            "stub": Stub(),
            "own": Stub(third),
        }
    )
    config = QuantConfig(activation=first, weight=None)
    config.add_layer_config(model["block"], activation=second, weight=second)
    config.add_type_config(nn.Linear, weight=fourth)
    config.add_name_config(model["block"]["b"].full_name(), activation=third)
    config.add_layer_config(model["last"], activation=second)
    quantized = QAT(config).quantize(model)
    rates = {
        name: {part: q._moving_rate for part in ("activation", "weight") if (q := getattr(layer, f"{part}_quanter"))}
        for name, layer in quantized.named_sublayers()
        if isinstance(layer, ConvertibleQuantedLayer)
    }
    assert rates == {
        "block.a": {"weight": 0.4},  # its type before its parent
        "block.b": {"activation": 0.3},  # its name before its type
        "block.c": {"activation": 0.2, "weight": 0.2},
        "head": {"weight": 0.4},
        "last": {"activation": 0.2},  # itself before its type
    }
    assert quantized["stub"]._observer._moving_rate == 0.1
    assert quantized["own"]._observer._moving_rate == 0.3
    assert "Type config" in config.details()


def test_groups_of_a_weight_have_scales_of_their_own():
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(8, 6))
    model.eval()
    ptq = PTQ(QuantConfig(activation=None, weight=GroupWiseWeightObserver(quant_bits=4, group_size=4)))
    observed = ptq.quantize(model)
    x = paddle.to_tensor(ROWS)
    observed(x)
    weight = model[0].weight.numpy()
    top = np.abs(weight.reshape(2, 4, 6)).max(1)
    np.testing.assert_array_equal(observed[0].weight_quanter.scales(), top)
    step = np.repeat(top / 7, 4, 0)
    want = ROWS @ (np.round(weight / step) * step) + model[0].bias.numpy()
    np.testing.assert_allclose(ptq.convert(observed)(x), want, atol=8e-7 * 8)
    with pytest.raises(ConfigError, match=r"a weight \[8, 6\] in groups of 3"):
        PTQ(QuantConfig(activation=None, weight=GroupWiseWeightObserver(4, 3))).quantize(model)(x)


class Leaf(nn.Layer):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)


class Doubled(QuantedLinear):
    def _compute(self, x, weight):
        return super()._compute(x, weight) * 2


def test_leaves_and_mappings_of_ones_own():
    @quanter("Passing")
    class PassingLayer(BaseQuanter):
        def __init__(self, layer, tag=""):
            super().__init__()
            self.tag = tag

        def forward(self, x):
            return x

    passing = sys.modules[__name__].Passing(tag="mine")
    config = QuantConfig(activation=passing, weight=None)
    config.add_customized_leaf(Leaf)
    config.add_qat_layer_mapping(nn.Linear, Doubled)
    model = nn.Sequential(Leaf(), nn.Conv2D(2, 3, 3, padding=1, padding_mode="reflect"))
    quantized = QAT(config).quantize(model)
    assert quantized[0]._observer.tag == "mine"
    x = paddle.randn([2, 4])
    np.testing.assert_allclose(quantized[0](x), model[0](x) * 2, rtol=1e-6)
    image = paddle.randn([1, 2, 5, 5])
    np.testing.assert_allclose(quantized[1](image), model[1](image), rtol=1e-6)


def test_a_layer_in_two_places_stays_one():
    shared = nn.Linear(2, 2)
    config = QuantConfig(activation=None, weight=FakeQuanterWithAbsMaxObserver())
    quantized = QAT(config).quantize(nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared)))
    assert quantized[0] is quantized[2][0]
    assert isinstance(quantized[0], QuantedLinear)


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="3 is no factory of quanters"):
        QuantConfig(activation=3, weight=None)
    model = nn.Sequential(nn.Linear(2, 2))
    config = QuantConfig(activation=None, weight=None)
    config.add_name_config("linaer_0", weight=AbsmaxObserver())
    with pytest.raises(ConfigError, match="no layer is called 'linaer_0'"):
        QAT(config).quantize(model)
    config = QuantConfig(activation=None, weight=None)
    config.add_layer_config(nn.Linear(2, 2), weight=AbsmaxObserver())
    with pytest.raises(ConfigError, match="is not in the model"):
        QAT(config).quantize(model)
    with pytest.raises(ConfigError, match=r"moving_rate=2\.0; give a number from 0 to 1"):
        QAT(QuantConfig(None, FakeQuanterWithAbsMaxObserver(moving_rate=2.0))).quantize(model)
    with pytest.raises(ConfigError, match="no class of Layers"):
        config.add_type_config(3)
    model.eval()
    with pytest.raises(ConfigError, match="evaluation mode; call model"):
        QAT(QuantConfig(None, None)).quantize(model)


@pytest.mark.slow
def test_training_in_4_bits_loses_less_than_rounding_afterwards():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 16)).astype("float32")
    y = np.tanh(x @ rng.standard_normal((16, 8)) / 4) @ rng.standard_normal((8, 2))
    x, y = paddle.to_tensor(x), paddle.to_tensor(y.astype("float32"))

    def error(model):
        return ((model(x) - y) ** 2).mean()

    def train(model, steps, rate):
        optimizer = paddle.optimizer.Adam(rate, parameters=model.parameters())

        @paddle.jit.to_static
        def step():
            loss = error(model)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()

        for _ in range(steps):
            step()
            if not isinstance(rate, float):
                rate.step()

    paddle.seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    train(model, 300, 1e-2)
    qat = QAT(QuantConfig(None, FakeQuanterWithAbsMaxObserver(bit_length=4)))
    trained = qat.quantize(model)
    train(trained, 300, paddle.optimizer.lr.CosineAnnealingDecay(1e-2, 300))
    trained.eval()
    model.eval()
    ptq = PTQ(QuantConfig(None, AbsmaxObserver(quant_bits=4)))
    observed = ptq.quantize(model)
    observed(x)
    after = float(error(ptq.convert(observed)))
    assert float(error(model)) < 0.2 * after
    assert float(error(qat.convert(trained))) < 0.5 * after
