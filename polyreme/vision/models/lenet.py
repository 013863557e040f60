"""LeNet for 28 x 28 grey images.

Source: LeCun et al., 1998 (LeNet-5), with ReLU and max pooling, the first kernel 3 x 3 with padding, and
three linear layers without activations between them, as Paddle's vision.models.LeNet has it: parameters have the same
names and shapes.
"""

from __future__ import annotations

from typing import Any

from polyreme.nn import Conv2D, Layer, Linear, MaxPool2D, ReLU, Sequential


class LeNet(Layer):
    """Images [batch, 1, 28, 28] -> scores [batch, num_classes]; with num_classes=0, features [batch, 16, 5, 5]."""

    features: Sequential
    fc: Sequential

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.features = Sequential(
            Conv2D(1, 6, 3, stride=1, padding=1), ReLU(), MaxPool2D(2, 2),
            Conv2D(6, 16, 5, stride=1, padding=0), ReLU(), MaxPool2D(2, 2),
        )  # fmt: skip
        if num_classes > 0:
            self.fc = Sequential(Linear(400, 120), Linear(120, 84), Linear(84, num_classes))

    def forward(self, inputs: Any) -> Any:
        x = self.features(inputs)
        return self.fc(x.flatten(1)) if self.num_classes > 0 else x
