"""summary: counts, the printed table, ways to say the inputs."""

from dataclasses import dataclass

import numpy as np
import pytest

import polyreme.nn as nn
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn.summary import summary


@dataclass
class Spec:
    """What has a shape and a dtype, as an InputSpec has."""

    shape: list
    dtype: str


def convnet():
    return nn.Sequential(nn.Conv2D(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10))


def test_counts_and_lines(capsys):
    net = convnet()
    net[3].bias.trainable = False
    # 6 * 9 + 6 of the convolution, 96 * 10 + 10 of the linear layer
    assert summary(net, (1, 1, 4, 4)) == {"total_params": 1030, "trainable_params": 1020}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["Conv2D-1", "[[1,", "1,", "4,", "4]]", "[1,", "6,", "4,", "4]", "60"] in lines
    assert ["Linear-1", "[[1,", "96]]", "[1,", "10]", "970"] in lines
    assert ["-" * 75] == lines[0] == lines[-1]
    assert ["Total", "params:", "1,030"] in lines
    assert ["Non-trainable", "params:", "10"] in lines


def test_a_recurrent_layer_is_one_line(capsys):
    # two directions of 4 * 8 rows for 4 inputs and 8 states, and two biases
    assert summary(nn.LSTM(4, 8, direction="bidirect"), (2, 5, 4))["total_params"] == 2 * (32 * 4 + 32 * 8 + 2 * 32)
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "-1 " in line or "-2 " in line]
    assert rows == ["LSTM-1"]
    summary(nn.RNN(nn.GRUCell(4, 8)), (2, 5, 4))
    assert "RNN-1" in capsys.readouterr().out


def test_leaves_modes_hooks_and_statistics_alone(capsys):
    net = nn.Sequential(nn.BatchNorm1D(2), nn.Dropout(0.5))
    net[1].eval()
    summary(net, (-1, 2))
    assert (net.training, net[0].training, net[1].training) == (True, True, False)
    assert not net[0]._forward_pre_hooks
    np.testing.assert_array_equal(net[0]._mean.numpy(), [0, 0])


def test_several_inputs_their_dtypes_and_given_tensors(capsys):
    assert summary(nn.Bilinear(2, 3, 4), [(1, 2), (1, 3)])["total_params"] == 28
    assert summary(nn.Embedding(5, 2), (1, 3), dtypes="int64")["total_params"] == 10
    assert summary(nn.Embedding(5, 2), Spec([None, 3], "int64"))["total_params"] == 10
    assert summary(nn.Embedding(5, 2), [Spec([None, 3], "int64")])["total_params"] == 10
    assert summary(nn.Linear(2, 2), input=to_tensor(np.ones((1, 2), np.float32)))["total_params"] == 6


@pytest.mark.parametrize(("inputs", "second"), [((1, 2), 1), ([1, 2], 1), ({"a": 1, "b": 2}, "b")])
def test_input_is_the_one_argument_of_forward(inputs, second, capsys):
    class Takes(nn.Layer):
        def forward(self, values):
            assert (type(values), values[second]) == (type(inputs), 2)
            return to_tensor([1.0])

    assert summary(Takes(), input=inputs)["total_params"] == 0


def test_a_layer_called_twice_is_counted_once(capsys):
    shared = nn.Linear(2, 2)
    assert summary(nn.Sequential(shared, shared), (1, 2))["total_params"] == 6
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines() if "Linear-" in line] == ["6", "0"]


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({}, ConfigError, "give the inputs' shapes as input_size=, or the inputs themselves"),
        ({"input_size": [(1, 2)], "dtypes": ["float32", "int64"]}, ConfigError, "1 input shapes but 2 dtypes"),
        ({"input_size": (0, 2)}, ShapeError, r"positive sizes .* got \(0, 2\)"),
    ],
)
def test_bad_input_says_what_to_change(kwargs, error, match):
    with pytest.raises(error, match=match):
        summary(nn.Linear(2, 2), **kwargs)
