"""Gradients in float32 beside 16-bit parameters, by the names of fleet.utils.mix_precision_utils.

Gradients of such parameters are float32 themselves here, in `grad`: there is no second one in `main_grad`.
"""

from __future__ import annotations

from typing import Any

from polyreme.amp.auto_cast import low_dtype
from polyreme.amp.decorate import add_up_in_float32
from polyreme.nn.layer import Layer


class MixPrecisionLayer(Layer):
    """A model whose parameters' gradients are added up in float32; its state dict is that of the model."""

    def __init__(self, layers: Layer, dtype: str = "float16") -> None:
        super().__init__()
        low_dtype("MixPrecisionLayer", dtype)
        self._layers = layers
        for parameter in layers.parameters():
            add_up_in_float32(parameter)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._layers(*inputs, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._layers.state_dict(*args, **kwargs)

    def set_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._layers.set_state_dict(*args, **kwargs)


class MixPrecisionOptimizer:
    """The optimizer itself: it steps by the float32 gradients as they are."""

    def __new__(cls, optimizer: Any) -> Any:
        return optimizer


class MixPrecisionScaler:
    """The scaler itself: it unscales the float32 gradients as they are."""

    def __new__(cls, scaler: Any) -> Any:
        return scaler
