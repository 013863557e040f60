"""Containers: order, names, indexing, changing."""

import numpy as np
import pytest

import polyreme.nn as nn
from polyreme.errors import ConfigError
from polyreme.nn.parameter import Parameter


def parameter(value):
    return Parameter(np.full(2, value, np.float32))


def test_sequential_takes_layers_pairs_lists_and_dicts():
    a, b = nn.Linear(2, 3), nn.ReLU()
    for sequential in (nn.Sequential(a, b), nn.Sequential([a, b])):
        assert list(sequential) == [a, b]
        assert list(sequential.state_dict()) == ["0.weight", "0.bias"]
    for sequential in (nn.Sequential(("up", a), ("act", b)), nn.Sequential({"up": a, "act": b})):
        assert list(sequential.state_dict()) == ["up.weight", "up.bias"]
        assert sequential["act"] is b
        assert sequential.up is a


def test_sequential_indexing_slices_and_changes():
    layers = [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]
    net = nn.Sequential(*layers)
    assert net[-1] is layers[2]
    assert list(net[1:]) == layers[1:]
    assert len(net) == 3
    net[1] = nn.Tanh()
    assert type(net[1]) is nn.Tanh
    del net[0]
    assert list(net) == [net[0], layers[2]]
    net.append(nn.Tanh()).extend([nn.ReLU()])
    assert len(net) == 4
    with pytest.raises(IndexError, match="index 9 is outside a list of 4"):
        net[9]
    assert list(net[1:3]._sub_layers) == ["0", "1"]
    assert net.insert(-1, layers[0]) is net
    assert [*net._sub_layers] == ["0", "1", "2", "3", "4"]
    assert net[3] is layers[0]
    with pytest.raises(IndexError, match=r"Sequential.insert: index 6 is outside a list of 5"):
        net.insert(6, nn.ReLU())
    with pytest.raises(TypeError, match=r"Sequential.insert needs a Layer, got str"):
        net.insert(0, "relu")
    assert len(net) == 5


def test_sequential_with_one_named_pair():
    assert list(nn.Sequential(("only", nn.Linear(1, 1))).state_dict()) == ["only.weight", "only.bias"]


def test_sequential_keeps_every_layer_when_one_was_deleted_before_append():
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Tanh())
    del net[0]
    net.append(nn.Sigmoid())
    assert [type(layer) for layer in net] == [nn.ReLU, nn.Tanh, nn.Sigmoid]
    assert len(list(net.named_children())) == 3


def test_sequential_refuses_two_layers_of_one_name():
    with pytest.raises(ConfigError, match="two layers are named 'a'"):
        nn.Sequential(("a", nn.ReLU()), ("a", nn.Tanh()))


def test_layer_list():
    layers = [nn.Linear(1, 1) for _ in range(3)]
    layer_list = nn.LayerList(layers)
    assert list(layer_list) == layers
    assert layer_list[-1] is layers[2]
    assert list(layer_list[:2]) == layers[:2]
    layer_list.insert(1, nn.ReLU())
    assert [type(x) for x in layer_list] == [nn.Linear, nn.ReLU, nn.Linear, nn.Linear]
    assert list(layer_list.state_dict())[2] == "2.weight"
    del layer_list[0]
    assert next(iter(layer_list.state_dict())) == "1.weight"
    layer_list[0] = layers[0]
    assert layer_list[0] is layers[0]
    with pytest.raises(IndexError, match="index 7 is outside a list of 3"):
        layer_list.insert(7, nn.ReLU())
    joined = layer_list + nn.LayerList([nn.ReLU()])
    joined += [nn.Tanh()]
    assert (len(layer_list), len(joined), type(joined)) == (3, 5, nn.LayerList)
    assert type(joined.pop(-1)) is nn.Tanh
    assert [type(x) for x in joined.pop(slice(1, 3))] == [nn.Linear, nn.Linear]
    assert list(joined._sub_layers) == ["0", "1"]
    with pytest.raises(TypeError, match="indices are integers, got 'a'"):
        layer_list["a"]
    with pytest.raises(TypeError, match="needs a Layer, got int"):
        layer_list.append(3)


def test_layer_dict():
    a, b = nn.Linear(1, 1), nn.ReLU()
    layer_dict = nn.LayerDict({"a": a})
    layer_dict["b"] = b
    assert list(layer_dict) == ["a", "b"]
    assert list(layer_dict.items()) == [("a", a), ("b", b)]
    assert "a" in layer_dict
    assert layer_dict.pop("a") is a
    assert list(layer_dict.values()) == [b]
    layer_dict.update([("c", a)])
    del layer_dict["b"]
    assert list(layer_dict.keys()) == ["c"]
    layer_dict.clear()
    assert len(layer_dict) == 0
    with pytest.raises(ConfigError, match=r"LayerDict takes a mapping or \(name, value\) pairs"):
        nn.LayerDict([a])


def test_parameter_list_and_dict():
    parameters = nn.ParameterList([parameter(1.0)])
    parameters.append(parameter(2.0))
    parameters[0] = parameter(3.0)
    assert [p.numpy()[0] for p in parameters] == [3.0, 2.0]
    assert list(parameters.state_dict()) == ["0", "1"]
    assert len(parameters) == 2
    named = nn.ParameterDict({"w": parameter(1.0)})
    named["b"] = parameter(2.0)
    assert list(named.state_dict()) == ["w", "b"]
    assert list(named) == list(named.keys()) == ["w", "b"]
    del named["w"]
    assert len(list(named.values())) == len(named) == 1
    assert "w" not in named
    with pytest.raises(TypeError, match="needs a Parameter, got int"):
        parameters.append(3)
    with pytest.raises(ConfigError, match="ParameterDict takes a mapping"):
        nn.ParameterDict([parameter(1.0)])
