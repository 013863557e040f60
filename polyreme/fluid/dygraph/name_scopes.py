"""Layers by the parameters of 1.3 to 1.5: a name_scope in front, and sizes that the first input says."""

from __future__ import annotations

import inspect
import math
from typing import Any

from polyreme.fluid.dygraph.layers import Layer
from polyreme.ops.arithmetic import matmul
from polyreme.ops.manipulation import flatten
from polyreme.program.activations import activate


class ByScope:
    """Inherited by layers whose first parameter was a name_scope: given a text there, they are made at their first
    call, by what they were given then."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        scope = args[0] if args else kwargs.get("name_scope")
        if not isinstance(scope, str):
            return super().__new__(cls)
        named = {name: value for name, value in kwargs.items() if name != "name_scope"}
        return LateLayer(scope, cls, args[1:] if args else (), named)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # what a class shows is its __init__, not the __new__ above
        cls.__signature__ = inspect.Signature(list(inspect.signature(cls.__init__).parameters.values())[1:])

    @classmethod
    def of_scope(cls, input: Any, *args: Any, **kwargs: Any) -> Any:
        """The layer for an input, of what stood behind the name_scope."""
        return cls(*args, **kwargs)


class OfChannels(ByScope):
    """ByScope, of layers that ask for the number of channels, dim 1 of the input, since 1.6."""

    @classmethod
    def of_scope(cls, input: Any, *args: Any, **kwargs: Any) -> Any:
        """The layer for an input; num_channels may be said too, as in 1.3 and 1.4."""
        channels = kwargs.pop("num_channels", input.shape[1])
        return cls(channels, *args, **kwargs)


class LateLayer(Layer):
    """A layer that is made at its first call; from then on its attributes are this one's too."""

    def __init__(self, name_scope: str, kind: type[ByScope], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(name_scope)
        self._made_of = kind, args, kwargs

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        if "layer" not in self._sub_layers:
            kind, given, named = self._made_of
            self.layer = kind.of_scope(input, *given, **named)
            self.layer.training = self.training
        return self.layer(input, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        layer = self.__dict__.get("_sub_layers", {}).get("layer")
        if name == "layer" or layer is None or not hasattr(layer, name):
            return super().__getattr__(name)
        return getattr(layer, name)


class FC(Layer):
    """act(x W + b) of x flattened from dim num_flatten_dims on; W is made at the first call. is_test: no effect."""

    def __init__(
        self, name_scope: str, size: int, num_flatten_dims: int = 1, param_attr: Any = None, bias_attr: Any = None,
        act: str | None = None, is_test: bool = False, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        super().__init__(name_scope)
        self._settings = size, num_flatten_dims, param_attr, bias_attr, act, dtype

    def forward(self, input: Any) -> Any:
        size, dims, param_attr, bias_attr, act, dtype = self._settings
        if "weight" not in self._parameters:
            rows = math.prod(input.shape[dims:])
            self.weight = self.create_parameter([rows, size], attr=param_attr, dtype=dtype)
            self.bias = self.create_parameter([size], attr=bias_attr, dtype=dtype, is_bias=True)
        out = matmul(flatten(input, dims, -1), self.weight)
        return activate(out if self.bias is None else out + self.bias, act)


__all__ = ["FC"]
