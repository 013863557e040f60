"""Quanters for training: what passes is rounded, and its range followed."""

from __future__ import annotations

from typing import Any

from polyreme.core import state
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError
from polyreme.nn.initializer import Constant
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr
from polyreme.ops.quantization import fake_quantize
from polyreme.quantization.factory import QuanterFactory
from polyreme.quantization.quanter import BaseQuanter


class FakeQuanterWithAbsMaxObserver(QuanterFactory):
    """Settings of a FakeQuanterWithAbsMaxObserverLayer: what passes is rounded under a scale that follows its largest
    number."""

    def __init__(
        self, moving_rate: float = 0.9, bit_length: int = 8, dtype: Any = "float32", name: str | None = None
    ) -> None:
        super().__init__(moving_rate=moving_rate, bit_length=bit_length, dtype=dtype, name=name)

    def _get_class(self) -> type[BaseQuanter]:
        return FakeQuanterWithAbsMaxObserverLayer


class FakeQuanterWithAbsMaxObserverLayer(BaseQuanter):
    """x rounded to bit_length bits and back (ops.quantization.fake_quantize), the gradient passing by.

    scale = accum / state; while training each call first moves accum = moving_rate accum + max |x| and
    state = moving_rate state + 1, both 1 at first. As PaddlePaddle's.
    """

    def __init__(
        self,
        layer: Layer,
        moving_rate: float = 0.9,
        bit_length: int = 8,
        dtype: Any = "float32",
        name: str | None = None,
    ) -> None:
        super().__init__(dtype=dtype)
        if not 0 <= moving_rate <= 1:
            raise ConfigError(f"FakeQuanterWithAbsMaxObserver: moving_rate={moving_rate}; give a number from 0 to 1")
        self._moving_rate, self._bit_length = moving_rate, bit_length
        for part, start in (("_scale", 0.001), ("_state", 1.0), ("_accum", 1.0)):
            attr = ParamAttr(initializer=Constant(start), trainable=False)
            parameter = self.create_parameter([1], attr)
            parameter.is_statistic = True
            self.add_parameter(part, parameter)

    def forward(self, input: Any) -> Any:
        if self.training:
            with no_grad():
                top = input.detach().abs().max().astype(self._dtype)
                count = self._state * self._moving_rate + 1
                total = self._accum * self._moving_rate + top
                for kept, value in ((self._state, count), (self._accum, total), (self._scale, total / count)):
                    state.write(kept, state.read(value))
        return fake_quantize(input, self._scale, self._bit_length)

    def scales(self) -> Any:
        return self._scale

    def zero_points(self) -> None:
        return None

    def quant_axis(self) -> int:
        return -1

    def bit_length(self) -> int:
        return self._bit_length


__all__ = ["FakeQuanterWithAbsMaxObserver"]
