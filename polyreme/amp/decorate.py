"""decorate: cast models to float16 or bfloat16 for level O2, with master weights in their optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from polyreme.amp.auto_cast import check_level, low_dtype
from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer
from polyreme.nn.layers.batch_norm import BatchNorm, BatchNorm1D, BatchNorm2D, BatchNorm3D, SyncBatchNorm
from polyreme.nn.layers.norm import InstanceNorm1D, InstanceNorm2D, InstanceNorm3D, LayerNorm
from polyreme.optimizer import Optimizer

# their statistics are sums over a whole batch
_ALWAYS_FLOAT32 = (BatchNorm, BatchNorm1D, BatchNorm2D, BatchNorm3D, SyncBatchNorm)
# squares of activations overflow in float16, whose largest number is 65504; not in bfloat16
_FLOAT32_BESIDE_FLOAT16 = (LayerNorm, InstanceNorm1D, InstanceNorm2D, InstanceNorm3D)


def decorate(
    models: Any,
    optimizers: Any = None,
    level: str = "O1",
    dtype: Any = "float16",
    master_weight: bool | None = None,
    save_dtype: Any = None,
    master_grad: bool = False,
    excluded_layers: Any = None,
) -> Any:
    """Prepare models (and their optimizers) for auto_cast; returns what was given, changed in place.

    O1: nothing changes. O2: floating parameters and buffers become dtype, except those of batch norms, of
    excluded_layers (layers or classes of layers), of layers whose _cast_to_low_precision is False (layers in them are
    cast) and, for float16, of layer and instance norms. Optimizers keep float32 master weights with the values from
    before the cast, or those that are loaded before the first step, unless master_weight=False. master_grad: gradients
    are added up in float32.

    Raises ConfigError for save_dtype: state_dict gives the parameters themselves; save `model.astype(...)` instead.
    """
    check_level("decorate", level, ("O1", "O2"))
    low = low_dtype("decorate", dtype)
    if save_dtype is not None:
        raise ConfigError(
            f"decorate: save_dtype={save_dtype!r} is not supported, state_dict gives the parameters themselves; cast "
            "the values when saving"
        )
    layers, opts = _list("models", models, Layer), _list("optimizers", optimizers, Optimizer)
    excluded = _exclude(excluded_layers)
    if level == "O2":
        for model in layers:
            _cast(model, low, excluded, opts if master_weight is not False else [], master_grad)
    return models if optimizers is None else (models, optimizers)


amp_decorate = decorate


def _list(what: str, given: Any, kind: type) -> list[Any]:
    found = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for each in found:
        if not isinstance(each, kind):
            raise ConfigError(f"decorate: {what} is a {kind.__name__} or a list of them, got {type(each).__name__}")
    return found


def _exclude(given: Any) -> tuple[set[int], tuple[type, ...]]:
    """(ids of excluded layers, excluded classes)."""
    listed = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for each in listed:
        if not isinstance(each, Layer) and not (isinstance(each, type) and issubclass(each, Layer)):
            raise ConfigError(f"decorate: excluded_layers holds layers or classes of layers, got {each!r}")
    inside = {id(s) for each in listed if isinstance(each, Layer) for s in each.sublayers(include_self=True)}
    return inside, tuple(each for each in listed if isinstance(each, type))


def _cast(model: Layer, low: np.dtype, excluded: tuple, optimizers: Iterable[Optimizer], master_grad: bool) -> None:
    layers = [layer for layer in model.sublayers(include_self=True) if not _keeps(layer, low, excluded)]
    tensors = {
        id(t): t
        for layer in layers
        for t in (
            *(p.whole for p in layer.parameters(include_sublayers=False)),
            *layer.buffers(include_sublayers=False),
        )
    }
    tensors = {key: t for key, t in tensors.items() if t.dtype in (dtypes.float32, dtypes.float16, dtypes.bfloat16)}
    for optimizer in optimizers:
        optimizer.keep_masters({key: state.read(t) for key, t in tensors.items()})
    for tensor in tensors.values():
        state.write(tensor, state.read(tensor).astype(low))
        if master_grad:
            add_up_in_float32(tensor)
    for optimizer in optimizers:
        optimizer.watch_masters(tensors.values())
    for layer in layers:
        layer._dtype = low


def add_up_in_float32(parameter: Any) -> None:
    """Let the gradients of a trainable parameter be added up in float32, whatever dtype it has."""
    if not parameter.stop_gradient and not parameter.__dict__.get("_master_grad"):
        parameter._master_grad = True
        parameter.register_hook(lambda g: g.astype("float32"))


def _keeps(layer: Layer, low: np.dtype, excluded: tuple[set[int], tuple[type, ...]]) -> bool:
    if id(layer) in excluded[0] or isinstance(layer, (*_ALWAYS_FLOAT32, *excluded[1])):
        return True
    # gates of mixtures of experts in PaddlePaddle's projects say so
    if getattr(layer, "_cast_to_low_precision", True) is False:
        return True
    return low == dtypes.float16 and isinstance(layer, _FLOAT32_BESIDE_FLOAT16)
