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
    for made in (nn.Sequential(a, b), nn.Sequential([a, b])):
        assert list(made) == [a, b]
        assert list(made.state_dict()) == ["0.weight", "0.bias"]
    for made in (nn.Sequential(("up", a), ("act", b)), nn.Sequential({"up": a, "act": b})):
        assert list(made.state_dict()) == ["up.weight", "up.bias"]
        assert made["act"] is b
        assert made.up is a


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
    held = nn.LayerList(layers)
    assert list(held) == layers
    assert held[-1] is layers[2]
    assert list(held[:2]) == layers[:2]
    held.insert(1, nn.ReLU())
    assert [type(x) for x in held] == [nn.Linear, nn.ReLU, nn.Linear, nn.Linear]
    assert list(held.state_dict())[2] == "2.weight"
    del held[0]
    assert next(iter(held.state_dict())) == "1.weight"
    held[0] = layers[0]
    assert held[0] is layers[0]
    with pytest.raises(IndexError, match="index 7 is outside a list of 3"):
        held.insert(7, nn.ReLU())
    with pytest.raises(TypeError, match="indices are integers, got 'a'"):
        held["a"]
    with pytest.raises(TypeError, match="needs a Layer, got int"):
        held.append(3)


def test_layer_dict():
    a, b = nn.Linear(1, 1), nn.ReLU()
    held = nn.LayerDict({"a": a})
    held["b"] = b
    assert list(held) == ["a", "b"]
    assert list(held.items()) == [("a", a), ("b", b)]
    assert "a" in held
    assert held.pop("a") is a
    assert list(held.values()) == [b]
    held.update([("c", a)])
    del held["b"]
    assert list(held.keys()) == ["c"]
    held.clear()
    assert len(held) == 0
    with pytest.raises(ConfigError, match=r"LayerDict takes a mapping or \(name, value\) pairs"):
        nn.LayerDict([a])


def test_parameter_list_and_dict():
    held = nn.ParameterList([parameter(1.0)])
    held.append(parameter(2.0))
    held[0] = parameter(3.0)
    assert [p.numpy()[0] for p in held] == [3.0, 2.0]
    assert list(held.state_dict()) == ["0", "1"]
    assert len(held) == 2
    named = nn.ParameterDict({"w": parameter(1.0)})
    named["b"] = parameter(2.0)
    assert list(named.state_dict()) == ["w", "b"]
    assert list(named) == list(named.keys()) == ["w", "b"]
    del named["w"]
    assert len(list(named.values())) == len(named) == 1
    assert "w" not in named
    with pytest.raises(TypeError, match="needs a Parameter, got int"):
        held.append(3)
    with pytest.raises(ConfigError, match="ParameterDict takes a mapping"):
        nn.ParameterDict([parameter(1.0)])
