"""Initial values chosen for a whole program."""

from __future__ import annotations

from polyreme.errors import ConfigError
from polyreme.nn.initializer.base import Initializer


class _GlobalInitializers:
    """Initializers that set_global_initializer chose."""

    __slots__ = ("bias", "weight")

    def __init__(self) -> None:
        self.weight: Initializer | None = None
        self.bias: Initializer | None = None


_chosen = _GlobalInitializers()


def chosen_initializer(is_bias: bool) -> Initializer | None:
    """What set_global_initializer chose for weights or biases, None if nothing."""
    return _chosen.bias if is_bias else _chosen.weight


def set_global_initializer(weight_init: Initializer | None, bias_init: Initializer | None = None) -> None:
    """Default initial values of weights and biases made from now on; None goes back to each layer's own default."""
    for given in (weight_init, bias_init):
        if given is not None and not isinstance(given, Initializer):
            raise ConfigError(f"set_global_initializer takes initializers, got {given!r}")
    _chosen.weight, _chosen.bias = weight_init, bias_init
