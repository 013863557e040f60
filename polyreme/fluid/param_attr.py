"""ParamAttr with 1.7's parameters."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn import parameter
from polyreme.regularizer import WeightDecayRegularizer


class ParamAttr(parameter.ParamAttr):
    """How to make a parameter. A name that the Program has already shares that parameter.

    gradient_clip: a clip of fluid.clip for this parameter's gradient alone.
    """

    def __init__(
        self,
        name: str | None = None,
        initializer: Any = None,
        learning_rate: float = 1.0,
        regularizer: Any = None,
        trainable: bool = True,
        gradient_clip: Any = None,
        do_model_average: bool = True,
    ) -> None:
        super().__init__(name, initializer, learning_rate, regularizer, trainable, do_model_average)
        self.gradient_clip = gradient_clip


def attribute_of(attr: Any) -> parameter.ParamAttr | None:
    """The ParamAttr that a param_attr or bias_attr stands for; None for False: no parameter.

    None, a bool, a name, an initializer, a regularizer or a ParamAttr. Raises ConfigError for anything else.
    """
    if isinstance(attr, WeightDecayRegularizer):
        return ParamAttr(regularizer=attr)
    if isinstance(attr, (list, tuple)):
        raise ConfigError(f"a list of {len(attr)} parameter attributes belongs to a list of inputs; got one input")
    return parameter.ParamAttr.of(attr)
