"""Weights of which n of every m are zero, and stay so while they are trained."""

from polyreme.incubate.asp.masks import calculate_density
from polyreme.incubate.asp.pruning import (
    add_supported_layer,
    decorate,
    prune_model,
    reset_excluded_layers,
    set_excluded_layers,
)

__all__ = [
    "add_supported_layer",
    "calculate_density",
    "decorate",
    "prune_model",
    "reset_excluded_layers",
    "set_excluded_layers",
]
