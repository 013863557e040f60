"""The image classifier of families whose stages have widths of their own: scores of the last stage's mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyreme.models.parts.encoder import linear
from polyreme.models.pretrained import Pretrained
from polyreme.nn import Layer
from polyreme.nn import functional as F
from polyreme.nn.layers.linear import Linear


class MeanClassifier(Pretrained, Layer):
    """Images [batch, channels, height, width] -> scores [batch, num_labels]; with labels [batch], the mean
    cross-entropy (0-D).

    encoder_class: made of a config with hidden_sizes and num_labels; images -> (map, its mean [batch, embed]).
    """

    encoder_class: type[Any]
    encoder: Any
    classifier: Linear

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.encoder = self.encoder_class(config)
        self.classifier = linear(config.hidden_sizes[-1], config.num_labels, ("embed", None))

    def forward(self, pixel_values: Any, labels: Any = None) -> Any:
        """As the class says."""
        scores = self.classifier(self.encoder(pixel_values)[1])
        return scores if labels is None else F.cross_entropy(scores, labels)

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: an image."""
        return self.encoder.example_inputs(rng, length)
