"""Evaluation mode for the length of a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyreme.nn.layer import Layer


@contextmanager
def eval_mode(layer: Layer) -> Iterator[None]:
    """Inside the block the layer and its sublayers are in evaluation mode; after it each is in the mode it had.

    Sublayers added inside the block then take the mode of the layer.
    """
    training, modes = layer.training, [(sublayer, sublayer.training) for sublayer in layer.sublayers(include_self=True)]
    layer.eval()
    try:
        yield
    finally:
        for sublayer in layer.sublayers(include_self=True):
            sublayer.training = training
        for sublayer, mode in modes:
            sublayer.training = mode
