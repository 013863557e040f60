"""Observers: they let pass what a model computes with, and keep its range."""

from __future__ import annotations

from typing import Any

from polyreme.core import state
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer
from polyreme.ops import creation
from polyreme.ops.math import maximum
from polyreme.quantization.factory import QuanterFactory
from polyreme.quantization.quanter import BaseObserver, BaseQuanter


class AbsmaxObserver(QuanterFactory):
    """Settings of an AbsmaxObserverLayer: the largest number of all that passes."""

    def __init__(self, quant_bits: int = 8) -> None:
        super().__init__(quant_bits=quant_bits)

    def _get_class(self) -> type[BaseQuanter]:
        return AbsmaxObserverLayer


class AbsmaxObserverLayer(BaseObserver):
    """Keeps the largest |x| of all calls."""

    def __init__(self, layer: Layer, quant_bits: int = 8) -> None:
        super().__init__()
        self._quant_bits = quant_bits
        # below any |x|: nothing has passed
        self.register_buffer("_max", creation.full([], -1.0, "float32"), persistable=False)

    def forward(self, input: Any) -> Any:
        with no_grad():
            top = maximum(self._max, input.detach().abs().max().astype("float32"))
            state.write(self._max, state.read(top))
        return input

    def cal_thresholds(self) -> None:
        """Nothing is left to compute."""

    def scales(self) -> Any:
        if float(self._max) < 0:
            raise ConfigError("AbsmaxObserver: nothing has passed it; run the model on a few batches before convert()")
        return self._max

    def zero_points(self) -> Any:
        return creation.zeros([])

    def quant_axis(self) -> int:
        return -1

    def bit_length(self) -> int:
        return self._quant_bits


class GroupWiseWeightObserver(QuanterFactory):
    """Settings of a GroupWiseWeightObserverLayer: the largest number of each group of a weight's inputs."""

    def __init__(self, quant_bits: int = 8, group_size: int = 128) -> None:
        super().__init__(quant_bits=quant_bits, group_size=group_size)

    def _get_class(self) -> type[BaseQuanter]:
        return GroupWiseWeightObserverLayer


class GroupWiseWeightObserverLayer(BaseObserver):
    """Keeps the largest |w| of each group_size inputs of each output of a weight [in, out]: [in / group_size, out].

    Raises ConfigError for a weight that groups do not divide.
    """

    def __init__(self, layer: Layer, quant_bits: int = 8, group_size: int = 128) -> None:
        super().__init__()
        self._quant_bits, self._group_size = quant_bits, group_size
        self._max: Any = None

    def forward(self, input: Any) -> Any:
        if len(input.shape) != 2 or input.shape[0] % self._group_size:
            raise ConfigError(
                f"GroupWiseWeightObserver: a weight {list(input.shape)} in groups of {self._group_size} inputs; it "
                "takes matrices whose inputs the groups divide"
            )
        with no_grad():
            groups = input.detach().reshape([-1, self._group_size, input.shape[1]])
            self._max = groups.abs().max(1)
        return input

    def cal_thresholds(self) -> None:
        """Nothing is left to compute."""

    def scales(self) -> Any:
        if self._max is None:
            raise ConfigError("GroupWiseWeightObserver: it has seen no weight; run the model once before convert()")
        return self._max

    def zero_points(self) -> Any:
        return creation.zeros_like(self.scales())

    def quant_axis(self) -> int:
        return -1

    def bit_length(self) -> int:
        return self._quant_bits


__all__ = ["AbsmaxObserver", "GroupWiseWeightObserver"]
