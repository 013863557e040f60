"""Weights of a model pruned to n of m, which no optimizer's step brings back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.incubate.asp.masks import ALGORITHMS, create_mask
from polyreme.nn.layer import Layer
from polyreme.nn.layers.conv import Conv1D, Conv2D, Conv3D
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import Parameter

PruningFunction = Callable[[np.ndarray, int, int, str, str], tuple[np.ndarray, np.ndarray]]
"""(weight, n, m, algorithm, name of the parameter) -> the pruned weight and its mask."""


def _prune(weight: np.ndarray, n: int, m: int, mask_algo: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Along the inputs, over which products add: [in, out] of a Linear, [out, in, ...] of a convolution."""
    inputs = 0 if weight.ndim == 2 else 1
    last = np.moveaxis(weight, inputs, -1)
    mask = np.moveaxis(create_mask(last, mask_algo, n, m), -1, inputs)
    return weight * mask, mask


class _Registry:
    """Which layers are pruned, how, and which are not."""

    def __init__(self) -> None:
        self.functions: dict[type | str, PruningFunction] = dict.fromkeys((Linear, Conv1D, Conv2D, Conv3D), _prune)
        self.excluded: set[str] = set()

    def function_of(self, layer: Layer) -> PruningFunction | None:
        """What prunes a layer's weight; None for one that stays as it is."""
        return self.functions.get(type(layer)) or self.functions.get(layer.full_name())


_registry = _Registry()


class Mask:
    """A parameter's mask, put on it again after each update."""

    parameter: Parameter
    mask: Tensor

    def __init__(self, parameter: Parameter, mask: Tensor) -> None:
        self.parameter, self.mask = parameter, mask

    def __call__(self, skip: Any = None) -> None:
        with no_grad():
            state.write(self.parameter, state.read(self.parameter.detach() * self.mask))


def add_supported_layer(layer: Layer | type[Layer] | str, pruning_func: PruningFunction | None = None) -> None:
    """Prune the `weight` of a layer, of all of a class, or of the one with this full_name() too, by pruning_func: as
    that of a Linear if None. Raises ConfigError for what is none of them."""
    if isinstance(layer, Layer):
        layer = layer.full_name()
    if not isinstance(layer, str) and not (isinstance(layer, type) and issubclass(layer, Layer)):
        raise ConfigError(f"add_supported_layer: {layer!r} is neither a Layer, nor a class of them, nor a name")
    _registry.functions[layer] = pruning_func or _prune


def set_excluded_layers(param_names: Sequence[str], main_program: Any = None) -> None:
    """Leave alone parameters with these names, or of layers with these full_name()s or names in their model, until
    reset_excluded_layers."""
    _refuse_program(main_program, "set_excluded_layers")
    _registry.excluded |= set(param_names)


def reset_excluded_layers(main_program: Any = None) -> None:
    """Leave nothing alone any more."""
    _refuse_program(main_program, "reset_excluded_layers")
    _registry.excluded.clear()


def decorate(optimizer: Any) -> Any:
    """The optimizer: masks of prune_model are put on again after every optimizer's updates, captured ones too, so that
    there is nothing to add. For scripts that call it."""
    return optimizer


def prune_model(
    model: Layer, n: int = 2, m: int = 4, mask_algo: str = "mask_1d", with_mask: bool = True
) -> dict[str, Tensor]:
    """Keep at most n of every m weights that a product adds over, the largest; the masks, by names of parameters.

    mask_algo: mask_1d, mask_2d_greedy or mask_2d_best (asp.masks). with_mask: pruned weights then stay 0 in training,
    whatever optimizer updates them. Of Linear, convolutions and layers of add_supported_layer, those with fewer than m
    inputs left alone. Raises ConfigError for another algorithm and for a static Program.

    >>> model = Linear(8, 4)
    >>> masks = prune_model(model)
    >>> [float((mask == 0).astype("float32").mean()) for mask in masks.values()]
    [0.5]
    """
    if not isinstance(model, Layer):
        raise ConfigError(f"prune_model: {type(model).__name__} is no Layer; prune the model before it is recorded")
    if mask_algo not in ALGORITHMS:
        raise ConfigError(f"prune_model: unknown mask_algo {mask_algo!r}; give one of {', '.join(ALGORITHMS)}")
    masks = {}
    for parameter, prune in _prunable(model, m):
        weight, mask = prune(parameter.numpy(), n, m, mask_algo, parameter.name)
        parameter.set_value(weight)
        masks[parameter.name] = to_tensor(mask.astype(parameter.dtype))
        if with_mask:
            parameter.after_update = Mask(parameter, masks[parameter.name])
    return masks


def _prunable(model: Layer, m: int) -> Iterator[tuple[Parameter, PruningFunction]]:
    for path, layer in model.named_sublayers(include_self=True):
        prune = _registry.function_of(layer)
        weight = getattr(layer, "weight", None)
        if prune is None or not isinstance(weight, Parameter) or weight.ndim < 2:
            continue
        if {path, layer.full_name(), weight.name} & _registry.excluded:
            continue
        inputs = weight.shape[0 if weight.ndim == 2 else 1]
        if prune is not _prune or inputs >= m:
            yield weight, prune


def _refuse_program(main_program: Any, what: str) -> None:
    if main_program is not None:
        raise ConfigError(f"{what}: main_program is of static Programs; names are of Layers here, leave it out")
