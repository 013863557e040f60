"""Layers that do the same but for their values, and those that only look so."""

import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.nn.alike import AlikeLayers, are_alike, tensors_of


class Three(nn.Layer):
    """Three maps, those that are named sharing a weight."""

    def __init__(self, tied="", held=None):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))
        if tied:
            getattr(self, tied[1]).weight = getattr(self, tied[0]).weight
        self.held = held


def test_layers_of_other_values_are_alike():
    one, other = Three("ab", [1.0, {"of": (2, None)}]), Three("ab", [1.0, {"of": (2, None)}])
    assert are_alike(one, other)
    assert [list(t.shape) for t in tensors_of(one)] == [list(t.shape) for t in tensors_of(other)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Three("ab"), Three()),
        (Three("ab"), Three("bc")),
        (Three(held=[1.0]), Three(held=[2.0])),
        (Three(held={"of": 0.0}), Three(held={"of": -0.0})),
        # what a Layer does not know of has values of its own
        (Three(held=[nn.Linear(2, 2)]), Three(held=[nn.Linear(2, 2)])),
        (Three(held=(paddle.zeros([2000]),)), Three(held=(paddle.zeros([2000]),))),
    ],
    ids=["tied", "tied otherwise", "another number", "another zero", "layers in a list", "tensors in a tuple"],
)
def test_layers_that_do_other_things_are_not_alike(one, other):
    assert not are_alike(one, other)


@pytest.mark.parametrize(
    "change",
    [
        lambda one, other: setattr(other.a, "weight", one.a.weight),
        lambda one, other: other.held[1]["of"].append(3),
        lambda one, other: other._sub_layers.pop("c"),
        lambda one, other: setattr(other.b.bias, "stop_gradient", True),
        lambda one, other: other.c.register_forward_pre_hook(lambda layer, x: None),
        lambda one, other: other.b.weight.register_hook(lambda gradient: None),
    ],
    ids=["parameter", "setting in place", "sublayer", "frozen", "hook", "gradient hook"],
)
def test_a_change_of_one_is_seen(change):
    layers = [Three("", [1.0, {"of": [2, None]}]) for _ in range(3)]
    alike = AlikeLayers(lambda: [*layers, None, None])
    assert alike.have_changed()
    assert alike.firsts == [0, 0, 0, 3, 4]
    layers[1].a.weight.set_value(paddle.ones([2, 2]))
    assert not alike.have_changed()
    change(layers[0], layers[1])
    assert alike.have_changed()
    assert not alike.have_changed()
    assert alike.firsts == [0, 0 if are_alike(*layers[:2]) else 1, 0, 3, 4]
