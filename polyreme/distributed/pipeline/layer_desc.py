"""Descriptions of layers to be built, and of weights that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter


class LayerDesc:
    """A Layer to be built: its class and arguments.

    >>> from polyreme.nn import Linear
    >>> LayerDesc(Linear, 2, 3)
    Linear(2, 3)
    """

    def __init__(self, layer_class: type[Layer], *inputs: Any, **kwargs: Any) -> None:
        if not (isinstance(layer_class, type) and issubclass(layer_class, Layer)):
            raise TypeError(f"{type(self).__name__}: the layer is a class derived from nn.Layer, got {layer_class!r}")
        self.layer_class = layer_class
        self.inputs = inputs
        self.kwargs = kwargs

    def build_layer(self) -> Layer:
        """The Layer."""
        return self.layer_class(*self.inputs, **self.kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.inputs), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.layer_class.__name__}({', '.join(given)})"


class SharedLayerDesc(LayerDesc):
    """A Layer that shares weights with the others of the same key, such as an embedding and the output projection.

    Descriptions of one key and class stand for one Layer; one of another class is a Layer of its own whose
    shared_weight_attr (a name or a list of names) are the first one's Parameters. forward_func(layer, x) replaces the
    call.
    """

    shared_weight_attr: list[str]

    def __init__(
        self,
        key: str,
        layer_class: type[Layer],
        forward_func: Callable[[Layer, Any], Any] | None = None,
        shared_weight_attr: str | Sequence[str] = "weight",
        *inputs: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer_class, *inputs, **kwargs)
        if forward_func is not None and not callable(forward_func):
            raise TypeError(f"SharedLayerDesc {key!r}: forward_func is a function (layer, x), got {forward_func!r}")
        self.layer_name = key
        self.forward_func = forward_func
        self.shared_weight_attr = [shared_weight_attr] if isinstance(shared_weight_attr, str) else [*shared_weight_attr]


def tie(desc: SharedLayerDesc, layer: Layer, first: SharedLayerDesc, origin: Layer) -> None:
    """Make the shared parameters of `layer` those of `origin`, made from the first description of the same key."""
    check_shared(desc, layer)
    key = desc.layer_name
    if len(desc.shared_weight_attr) != len(first.shared_weight_attr):
        raise ConfigError(
            f"SharedLayerDesc {key!r}: {first} shares {first.shared_weight_attr} and {desc} shares "
            f"{desc.shared_weight_attr}; name as many of one as of the other"
        )
    for ours, theirs in zip(desc.shared_weight_attr, first.shared_weight_attr, strict=True):
        have, want = getattr(layer, ours), getattr(origin, theirs)
        if tuple(have.shape) != tuple(want.shape):
            raise ConfigError(
                f"SharedLayerDesc {key!r}: {theirs} of {first} has shape {list(want.shape)}, {ours} of {desc} "
                f"{list(have.shape)}; a shared weight has one shape"
            )
        setattr(layer, ours, want)


def check_shared(desc: SharedLayerDesc, layer: Layer) -> None:
    """Raises ConfigError if the layer lacks a parameter that its description shares."""
    for name in desc.shared_weight_attr:
        if not isinstance(getattr(layer, name, None), Parameter):
            raise ConfigError(
                f"SharedLayerDesc {desc.layer_name!r}: {desc} has no parameter {name!r}; set shared_weight_attr to one "
                f"of {[n for n, _ in layer.named_parameters(include_sublayers=False)]}"
            )


def check_same_arguments(desc: SharedLayerDesc, first: SharedLayerDesc) -> None:
    """Raises ConfigError if descriptions of one Layer differ in their arguments, as far as those can be compared."""
    a = dict(enumerate(desc.inputs)) | desc.kwargs
    b = dict(enumerate(first.inputs)) | first.kwargs
    plain = (int, float, str, type(None))
    differing = [n for n in {**a, **b} if n not in a or n not in b]
    differing += [n for n in a if n in b and isinstance(a[n], plain) and isinstance(b[n], plain) and a[n] != b[n]]
    if differing:
        raise ConfigError(
            f"SharedLayerDesc {desc.layer_name!r}: {first} and {desc} stand for one Layer but differ in their "
            "arguments; give both the same"
        )
