"""Parameters as one vector, gradients clipped in place, and weights that are computed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from polyreme.core import state
from polyreme.core.meshes import beside
from polyreme.core.state import TensorState
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, NumericsError, ShapeError
from polyreme.module_names import suggest_names
from polyreme.nn.reweighted import remove_weight_norm, spectral_norm, weight_norm
from polyreme.ops.manipulation import concat, reshape


def parameters_to_vector(parameters: Iterable[Any], name: str | None = None) -> Any:
    """All parameters flattened and joined -> [number of elements]; gradients flow back to them."""
    return concat([reshape(p, [-1]) for p in _list(parameters)], axis=0)


def vector_to_parameters(vec: Any, parameters: Iterable[Any], name: str | None = None) -> None:
    """Write a vector's elements into parameters, in the order of parameters_to_vector.

    Raises ShapeError, writing nothing, unless vec has exactly as many elements.
    """
    listed = _list(parameters)
    counts = [math.prod(p.shape) for p in listed]
    if list(vec.shape) != [sum(counts)]:
        raise ShapeError(
            f"vector_to_parameters: the parameters have {sum(counts)} elements, vec has shape {list(vec.shape)}"
        )
    array, at = state.read(vec), 0
    for p, count in zip(listed, counts, strict=True):
        state.write(p, array[at : at + count].reshape(p.shape).astype(p.dtype))
        at += count


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients by one factor so that their norm together is at most max_norm; returns the norm before.

    norm_type: p of the norm, inf for the largest element. Raises NumericsError for a norm that is NaN or infinite, if
    asked to: this reads the value and so cannot be captured.
    """
    grads = [p.grad for p in _list(parameters) if p.grad is not None]
    if not grads:
        return Tensor(jnp.zeros((), jnp.float32))
    norm = _norm([state.read(g) for g in grads], float(norm_type))
    total = Tensor(norm)
    if error_if_nonfinite and not math.isfinite(float(total)):
        raise NumericsError(
            f"clip_grad_norm_: the norm of the gradients is {float(total)}; look for NaN or inf before it"
        )
    # the 1e-6 keeps a norm of 0 from dividing
    factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    for g in grads:
        array = state.read(g)
        state.write(g, array * beside(factor, array).astype(array.dtype))
    return total


def clip_grad_value_(parameters: Any, clip_value: float) -> None:
    """Clip every element of the gradients into [-clip_value, clip_value]; raises ConfigError for a negative one."""
    limit = float(clip_value)
    if not limit >= 0:
        raise ConfigError(f"clip_grad_value_: clip_value is a number of at least 0, got {clip_value!r}")
    for p in _list(parameters):
        if p.grad is not None:
            state.write(p.grad, jnp.clip(state.read(p.grad), -limit, limit))


def _norm(arrays: list[Any], p: float) -> Any:
    if not p > 0:
        raise ConfigError(f"clip_grad_norm_: norm_type is a number above 0 or inf, got {p}")
    wide = [jnp.abs(a.astype(jnp.promote_types(a.dtype, jnp.float32))) for a in arrays]
    # brought together on the first one's devices, if they lie on several meshes
    if math.isinf(p):
        return jnp.max(jnp.stack([beside(jnp.max(a), wide[0]) for a in wide]))
    return jnp.sum(jnp.stack([beside(jnp.sum(a**p), wide[0]) for a in wide])) ** (1.0 / p)


def _list(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, TensorState) else list(parameters)


__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "parameters_to_vector",
    "remove_weight_norm",
    "spectral_norm",
    "vector_to_parameters",
    "weight_norm",
]

suggest_names(__name__)
