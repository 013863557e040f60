"""Positional arguments in the order that layers had before PaddlePaddle 3.3, which subclasses in projects pass on."""

import numpy as np
import pytest

import polyreme.nn as nn

FLAT = nn.initializer.Constant(0.5)


class Conv(nn.Conv2D):
    """A subclass that names nothing, as speech projects have it."""

    def __init__(self, *args):
        super().__init__(*args)


def test_layers_take_both_orders():
    conv = Conv(2, 4, 3, 1, 0, 1, 1, "reflect", FLAT, False, "NHWC")
    assert (conv._padding_mode, conv.bias, conv._data_format) == ("reflect", None, "NHWC")
    np.testing.assert_array_equal(conv.weight.numpy(), np.full((4, 2, 3, 3), 0.5, "float32"))
    assert Conv(2, 4, 3, 1, 0, 1, 1, False, "reflect")._padding_mode == "reflect"
    norm = nn.LayerNorm(4, 1e-5, FLAT, False)
    assert (norm.weight.tolist(), norm.bias) == ([0.5] * 4, None)
    assert nn.LayerNorm(4, 1e-5, True, False).bias is None
    assert nn.GroupNorm(2, 4, 1e-5, None, False).bias is None
    assert nn.Dropout(0.5, 1).axis == 1
    table = nn.Embedding(3, 2, None, True, FLAT)
    assert (table._sparse, table._max_norm, table.weight.tolist()) == (True, None, [[0.5, 0.5]] * 3)
    assert nn.Embedding(3, 2, None, 1.5)._max_norm == 1.5


def test_one_too_many_and_one_twice_are_refused():
    with pytest.raises(TypeError, match="LayerNorm: takes 5 positional arguments, 6 were given"):
        nn.LayerNorm(4, 1e-5, None, None, None, None)
    with pytest.raises(TypeError, match="Conv1D: padding_mode was given by position and by name"):
        nn.Conv1D(2, 4, 3, 1, 0, 1, 1, "reflect", padding_mode="zeros")
