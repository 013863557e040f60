"""LazyGuard, flops and MmapStorage."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.errors import ConfigError, DataError, ShapeError


def test_parameters_are_made_when_asked():
    with paddle.LazyGuard():
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4))
    weight = net[0].weight
    assert (weight.shape, weight.dtype, weight.size) == ([3, 4], paddle.float32, 12)
    with pytest.raises(ConfigError, match=r"made under LazyGuard and has no value yet; call its initialize\(\)"):
        net(paddle.ones([2, 3]))
    with pytest.raises(ConfigError, match="has no value yet"):
        weight.numpy()
    for p in net.parameters():
        p.initialize()
    made = weight.numpy()
    assert net(paddle.ones([2, 3])).shape == [2, 4]
    np.testing.assert_array_equal(weight.initialize(), made)
    assert nn.Linear(3, 4).weight.numpy().any()  # outside the guard


def test_a_lazy_model_takes_a_state_dict():
    whole = nn.Linear(3, 4)
    with paddle.LazyGuard():
        net = nn.Linear(3, 4)
    net.set_state_dict(whole.state_dict())
    np.testing.assert_array_equal(net(paddle.ones([2, 3])), whole(paddle.ones([2, 3])))
    with paddle.LazyGuard():
        net = nn.Linear(3, 4)
    with pytest.raises(ShapeError, match=r"the parameter has shape \[3, 4\], the value \[2\]"):
        net.weight.set_value(np.ones(2))


def test_a_lazy_parameter_starts_where_an_eager_one_does():
    paddle.seed(3)
    want = nn.Linear(3, 4).weight.numpy()
    with paddle.LazyGuard():
        net = nn.Linear(3, 4)
    paddle.seed(3)
    np.testing.assert_array_equal(net.weight.initialize(), want)


@pytest.mark.parametrize(
    ("layer", "shape", "want"),  # want: PaddlePaddle 3.3.1's flops of a Sequential of the layer
    [
        (lambda: nn.Conv1D(3, 4, 3), [1, 3, 8], 240),
        (lambda: nn.Conv2D(4, 4, 3, groups=2, bias_attr=False), [1, 4, 8, 8], 2592),
        (lambda: nn.Conv2DTranspose(3, 4, 3), [1, 3, 8, 8], 11200),
        (lambda: nn.BatchNorm2D(3), [1, 3, 8, 8], 384),
        (lambda: nn.Linear(3, 5), [1, 4, 3], 60),
        (lambda: nn.LeakyReLU(), [1, 3, 8], 24),
        (lambda: nn.AvgPool2D(2), [1, 3, 8, 8], 48),
        (lambda: nn.AdaptiveAvgPool2D(2), [1, 3, 8, 8], 204),
        (lambda: nn.ReLU(), [1, 3, 8], 0),
    ],
)
def test_flops_of_layers(layer, shape, want, capsys):
    assert paddle.flops(nn.Sequential(layer()), shape) == want
    assert f"Total Flops: {want}" in capsys.readouterr().out


def test_flops_of_a_network_with_a_count_of_ones_own(capsys):
    class Twice(nn.Layer):
        def forward(self, x):
            return x * 2

    def count(layer, inputs, output):
        layer.total_ops += output.size

    shared = nn.Linear(3, 3)
    net = nn.Sequential(shared, shared, Twice(), nn.Dropout())
    assert paddle.flops(net, [2, 3], {Twice: count}, print_detail=True) == 2 * 2 * 9 + 6
    printed = capsys.readouterr().out
    assert "Total Flops: 42     Total Params: 12" in printed
    assert printed.count("linear") == 1
    assert net.training
    assert not hasattr(shared, "total_ops")
    with pytest.raises(ConfigError, match="flops counts a Layer, got int"):
        paddle.flops(3, [1])


def test_parts_of_a_file(tmp_path):
    data = np.arange(20, dtype="float32")
    data.tofile(tmp_path / "numbers")
    storage = paddle.MmapStorage(str(tmp_path / "numbers"), data.nbytes)
    np.testing.assert_array_equal(storage.get_slice("float32", 4, 9).reshape([5]), data[4:9])
    np.testing.assert_array_equal(storage.get_slice(dtype=paddle.float32, stop=20, step=7), data[::7])
    assert storage.get_slice(paddle.uint8).shape == [80]
    with pytest.raises(ShapeError, match="elements 0 to 21 in steps of 1; there are 20 of float32"):
        storage.get_slice("float32", 0, 21)
    with pytest.raises(DataError, match="has 80 bytes, 81 were asked for"):
        paddle.MmapStorage(str(tmp_path / "numbers"), 81)
