"""A step of a model as a Layer of its own, so that a model can be given to a pipeline as a sequence of layers.

Floor: 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.nn import Layer


class Part(Layer):
    """Calls a method of a model; sublayers: the Layers of the model that it uses, whose parameters are then this Part's
    too.

    >>> from polyreme.nn import Linear
    >>> Part(abs, unused=Linear(2, 3)).parameters()[0].shape
    [2, 3]
    """

    def __init__(self, call: Callable[[Any], Any], **sublayers: Layer) -> None:
        super().__init__()
        self.call = call
        for name, layer in sublayers.items():
            self.add_sublayer(name, layer)

    def forward(self, x: Any) -> Any:
        return self.call(x)
