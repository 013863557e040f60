"""A layer's weight made a function of other parameters: by its direction and length, or by its largest singular value.

The layer becomes one of a class of its own, whose attribute of the weight's name computes it each time, so
that nothing computed is kept and captured code sees the parameters themselves.
"""

from __future__ import annotations

from typing import Any

from polyreme.core import state
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.nn.initializer import Normal
from polyreme.nn.layer import Layer
from polyreme.nn.layers.spectral_norm import over_singular_value, resolve_dim, vector_sizes
from polyreme.nn.parameter import Parameter
from polyreme.ops.matrices.norms import vector_norm


def weight_norm(layer: Layer, name: str = "weight", dim: int | None = 0) -> Layer:
    """The layer, its parameter `name` replaced by name_g * name_v / |name_v|, which train instead; returns it.

    |name_v| is over all dims but dim, and name_g has one number for each of its places; with dim None or -1 it is over
    all, and name_g is a scalar. Both start so that the weight is unchanged, and have the layer's next names, as
    optimizers of PaddlePaddle know them. Source: arXiv:1602.07868.
    """
    weight = _parameter(layer, name, "weight_norm")
    dim = None if dim == -1 else dim
    if dim is not None and not -weight.ndim <= dim < weight.ndim:
        raise ConfigError(
            f"weight_norm: dim={dim} of {name!r} with shape {list(weight.shape)}; choose a dim it has, or None"
        )
    over = None if dim is None else [d for d in range(weight.ndim) if d != dim % weight.ndim]

    def length(v: Any) -> Any:
        # a vector's places are numbers themselves
        return v.abs() if over == [] else vector_norm(v, 2.0, over, over is not None)

    start = length(weight.detach()).reshape([] if dim is None else [weight.shape[dim]])

    def compute(layer: Any) -> Any:
        v, g = getattr(layer, f"{name}_v"), getattr(layer, f"{name}_g")
        size = length(v)
        return v * (g.reshape(size.shape) / size)

    if state.recorder() is None:
        weight.name = layer._next_name("w")
    _replace(layer, name, compute, {"v": weight, "g": Parameter(start, name=layer._next_name("w"))})
    return layer


def remove_weight_norm(layer: Layer, name: str = "weight") -> Layer:
    """Undo weight_norm: the weight it computes becomes a parameter again; ConfigError for a layer without it."""
    cls = type(layer)
    if f"{name}_g" not in layer._parameters or getattr(cls, "computed", None) != name:
        raise ConfigError(f"remove_weight_norm: {cls.__name__} has no weight_norm of {name!r}")
    value = getattr(layer, name).detach()
    for part in ("v", "g"):
        delattr(layer, f"{name}_{part}")
    layer.__class__ = cls.__mro__[1]
    layer.add_parameter(name, Parameter(value, name=layer._next_name("w")))
    return layer


def spectral_norm(
    layer: Layer, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None
) -> Layer:
    """The layer, its parameter `name` divided by its largest singular value wherever it is used; returns it.

    name_orig trains instead. The weight is taken as a matrix whose rows are its dim `dim`, by default 1 for layers with
    weights [in, out] (Linear and transposed convolutions), else 0. The singular value is tracked by power iteration
    from the buffers name_u and name_v, n_power_iterations steps each time the weight is used while training.
    Source: arXiv:1802.05957.
    """
    weight = _parameter(layer, name, "spectral_norm")
    if dim is None:
        kind = type(layer).__name__
        dim = 1 if kind == "Linear" or kind.endswith("Transpose") else 0
    dim = resolve_dim("spectral_norm", weight.shape, dim, n_power_iterations)

    def compute(layer: Any) -> Any:
        original, u, v = (getattr(layer, f"{name}_{part}") for part in ("orig", "u", "v"))
        return over_singular_value(original, u, v, dim, n_power_iterations if layer.training else 0, eps)

    _replace(layer, name, compute, {"orig": weight})
    for part, size in vector_sizes(weight.shape, dim).items():
        layer.register_buffer(f"{name}_{part}", Tensor(Normal().values([size], weight.dtype)))
    return layer


def _parameter(layer: Layer, name: str, what: str) -> Parameter:
    parameter = layer._parameters.get(name)
    if parameter is None:
        raise ConfigError(
            f"{what}: {type(layer).__name__} has no parameter {name!r}; it has {', '.join(layer._parameters) or 'none'}"
        )
    return parameter


def _replace(layer: Layer, name: str, compute: Any, parts: dict[str, Parameter]) -> None:
    """Drop a parameter for parts of it, and compute it from them on demand."""
    delattr(layer, name)
    for part, parameter in parts.items():
        layer.add_parameter(f"{name}_{part}", parameter)
    cls = type(layer)
    layer.__class__ = type(cls.__name__, (cls,), {name: property(compute), "computed": name, "__doc__": cls.__doc__})
