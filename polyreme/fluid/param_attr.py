"""ParamAttr with 1.7's parameters."""

from __future__ import annotations

from typing import Any

from polyreme.nn import parameter


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
