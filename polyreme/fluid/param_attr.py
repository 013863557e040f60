"""ParamAttr with 1.7's parameters."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn import parameter
from polyreme.program import parameters


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


class WeightNormParamAttr(parameters.WeightNormParamAttr):
    """ParamAttr for layers whose weight is direction times length, of each index of dim: arXiv:1602.07868.

    Raises ConfigError for gradient_clip: the weight has two gradients, of its direction and of its length.
    """

    def __init__(
        self, dim: int | None = None, name: str | None = None, initializer: Any = None, learning_rate: float = 1.0,
        regularizer: Any = None, trainable: bool = True, gradient_clip: Any = None, do_model_average: bool = False,
    ) -> None:  # fmt: skip
        if gradient_clip is not None:
            raise ConfigError("WeightNormParamAttr: gradient_clip cannot be honoured; call clip.set_gradient_clip")
        super().__init__(dim, name, initializer, learning_rate, regularizer, trainable, do_model_average)
