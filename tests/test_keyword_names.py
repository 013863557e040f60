"""Arguments that a constructor does not have are answered with what to write; PyTorch's spellings among them."""

import re

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn, optimizer

WEIGHT = nn.Linear(2, 2).parameters()


class Net(nn.Layer):
    def __init__(self, width, *, depth=1):
        super().__init__()


class Anything(nn.Layer):
    def __init__(self, **settings):
        super().__init__()
        self.settings = settings


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: nn.Linear(2, 2, bias=False),
            "Linear() has no parameter 'bias'; write bias_attr=False for none. It has",
        ),
        (lambda: nn.BatchNorm2D(4, eps=1e-3), "BatchNorm2D() has no parameter 'eps'; write epsilon="),
        (lambda: nn.LSTM(2, 3, batch_first=True), "write time_major=, its opposite"),
        (lambda: nn.LSTM(2, 3, bidirectional=True), "write direction='bidirectional'"),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), "leave it out: inputs are [batch, length,"),
        (
            lambda: nn.LayerNorm(4, epsilom=1e-3),
            "LayerNorm() has no parameter 'epsilom'; did you mean 'epsilon'. It has",
        ),
        (lambda: Net(4, depht=2), "Net() has no parameter 'depht'; did you mean 'depth'. It has width, depth"),
        (lambda: optimizer.AdamW(lr=1e-3, parameters=WEIGHT), "AdamW() has no parameter 'lr'; write learning_rate="),
        (lambda: optimizer.SGD(1e-3, params=WEIGHT), "SGD() has no parameter 'params'; write parameters="),
        (lambda: optimizer.SGD(1e-3, WEIGHT, momentum=0.9), "optimizer.Momentum has it"),
        (
            lambda: optimizer.AdamW(1e-3, WEIGHT),
            "beta1 is a number in [0, 1), got a list of Tensors; write parameters=",
        ),
        (lambda: optimizer.lr.StepDecay(optimizer=1, step_size=3), "give the rate itself, and the schedule to the"),
        (lambda: nn.Conv2D(3, 4), "Conv2D() needs 'kernel_size'. It has in_channels, out_channels"),
        (lambda: Net(depth=2), "Net() needs 'width'. It has width, depth"),
        (lambda: nn.Linear(2, 2).parameters(recursive=False), "Layer.parameters() has no parameter 'recursive'"),
    ],
)
def test_what_to_write_instead(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


def test_constructors_with_any_keywords_and_of_other_bases_are_left_alone():
    assert Anything(lr=1).settings == {"lr": 1}

    class Numbered:
        def __new__(cls, number):
            self = super().__new__(cls)
            self.number = number
            return self

    class Both(nn.Layer, Numbered):
        def __init__(self, number):
            super().__init__()

    assert Both(number=3).number == 3


def test_second_names_of_constructors_and_methods():
    assert nn.LayerNorm(4, eps=1e-3).epsilon == nn.GroupNorm(2, 4, eps=1e-3).epsilon == 1e-3
    net = nn.Sequential(nn.Linear(2, 2))
    assert (
        net.parameters(recurse=False) == list(net.named_parameters(recurse=False)) == net.buffers(recurse=False) == []
    )
    adam = optimizer.Adam(parameters=net.parameters())
    net(paddle.ones([1, 2])).sum().backward()
    adam.zero_grad()
    assert net[0].weight.grad is None


def test_arguments_in_pytorchs_order():
    x = paddle.arange(6).reshape([2, 3])
    at = paddle.to_tensor([2, 0])
    for picked in (x.index_select(1, at), paddle.index_select(x, dim=1, index=at), x.index_select(at, 1)):
        assert picked.tolist() == [[2, 0], [5, 3]]
    rows = paddle.io.TensorDataset(x, at)
    assert [part.tolist() for part in rows[1]] == [[3, 4, 5], 0]
    assert len(paddle.io.TensorDataset(x)) == 2


def test_to_takes_dtypes_and_devices_in_any_place():
    x = paddle.ones([2])
    assert x.to("cpu", non_blocking=True) is not None
    assert x.to(x.dtype) is x
    assert x.to(x.dtype, copy=True) is not x
    net = nn.Linear(2, 2)
    assert net.to("bfloat16").weight.dtype == paddle.bfloat16
    assert net.to("cpu", "float64", non_blocking=True).weight.dtype == paddle.float64


def test_initial_values_are_written_in_place():
    layer = nn.Linear(400, 300)
    assert nn.init.kaiming_normal_(layer.weight, nonlinearity="relu") is layer.weight
    # 120,000 values of standard deviation sqrt(2 / 400): theirs is within 4 of its own standard deviations
    assert abs(layer.weight.numpy().std() / np.sqrt(2 / 400) - 1) < 4 / np.sqrt(2 * 120_000)
    assert not nn.init.zeros_(layer.bias).numpy().any()
