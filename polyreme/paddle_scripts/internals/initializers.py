"""Attributes of PaddlePaddle's initializers and penalties that subclasses and models read and set."""

from __future__ import annotations

from typing import Any

from polyreme.nn import parameter
from polyreme.nn.initializer.base import fans


def _second_name(private: str, public: str) -> property:
    """An attribute by PaddlePaddle's private name; a subclass may keep something of its own there."""

    def read(self: Any) -> Any:
        own = vars(self)
        return own[private] if private in own else getattr(self, public)

    def write(self: Any, value: Any) -> None:
        vars(self)[public if public in vars(self) else private] = value

    return property(read, write)


class InitializerNames:
    """Attributes of Initializer."""

    _seed = 0
    _value = _second_name("_value", "value")
    _mean, _std_dev = _second_name("_mean", "mean"), _second_name("_std_dev", "std")
    _low, _high = _second_name("_low", "low"), _second_name("_high", "high")
    _a, _b = _second_name("_a", "a"), _second_name("_b", "b")
    _gain, _mode, _groups = (
        _second_name("_gain", "gain"),
        _second_name("_mode", "mode"),
        _second_name("_groups", "groups"),
    )
    _fan_in, _fan_out = _second_name("_fan_in", "fan_in"), _second_name("_fan_out", "fan_out")

    def _compute_fans(self, var: Any) -> tuple[int, int]:
        """Fan-in and fan-out of a parameter."""
        return fans(var.shape)


class WeightDecayNames:
    """Attributes of L1Decay and L2Decay."""

    _coeff = _second_name("_coeff", "coeff")


class LazyInitialization:
    """Whether parameters are made without values: what nn.LazyGuard switches on, by PaddlePaddle's private names."""

    @property
    def state(self) -> bool:
        """True inside a LazyGuard, and between enable() and disable()."""
        return parameter.making.lazily

    _state = state

    def enable(self) -> None:
        """Make parameters without values from here on in this thread."""
        parameter.making.lazily = True

    def disable(self) -> None:
        """Make them with values again."""
        parameter.making.lazily = False


_lazy_initialization = LazyInitialization()


def lazy_init_helper() -> LazyInitialization:
    """The one of this process."""
    return _lazy_initialization
