"""Gradient clipping: by value, by each gradient's norm, by the norm of all of them.

`arrays` is the pure form that optimizers compile into their update; calling a clip works on
(parameter, gradient) pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from polyreme.core import state
from polyreme.core.meshes import beside
from polyreme.core.op import op
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError


class GradientClip:
    """Base of the clips.

    one_by_one: each gradient is clipped by itself, so that it makes no difference which others there are.
    writes_gradients: a call writes what it gives into the gradients of the pairs, as PaddlePaddle's does.
    """

    one_by_one: ClassVar[bool] = False
    writes_gradients: ClassVar[bool] = False

    def arrays(self, grads: Sequence[jax.Array]) -> list[jax.Array]:
        """The gradients, clipped together."""
        raise NotImplementedError

    def __call__(self, params_grads: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """(parameter, clipped gradient) pairs; pairs without gradient or with need_clip=False are passed on."""
        return self._dygraph_clip(params_grads)

    def _dygraph_clip(self, params_grads: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """What PaddlePaddle's subclasses define: the clip on pairs of Tensors. An optimizer then calls it at each step,
        in the place of `arrays`."""
        chosen = [i for i, (p, g) in enumerate(params_grads) if g is not None and getattr(p, "need_clip", True)]
        clipped = self.arrays([state.read(params_grads[i][1]) for i in chosen])
        done = list(params_grads)
        for i, array in zip(chosen, clipped, strict=True):
            parameter, grad = params_grads[i]
            if self.writes_gradients:
                state.write(grad, array)
            done[i] = (parameter, grad if self.writes_gradients else Tensor(array))
        return done


def is_written_on_pairs(clip: Any) -> bool:
    """True for a clip whose class says with Tensors what it does, and not with `arrays`."""
    own = type(clip)
    return isinstance(clip, GradientClip) and (
        own._dygraph_clip is not GradientClip._dygraph_clip or own.__call__ is not GradientClip.__call__
    )


class ClipGradByValue(GradientClip):
    """Every element into [min, max]; min is -max unless given."""

    max: float
    min: float

    one_by_one: ClassVar[bool] = True

    def __init__(self, max: float, min: float | None = None) -> None:
        self.max = float(max)
        self.min = float(-max if min is None else min)
        if self.min > self.max:
            raise ConfigError(f"ClipGradByValue: min {self.min} is above max {self.max}")

    def __str__(self) -> str:
        return f"Clip Gradient By Value, min = {self.min:f}, max={self.max:f}"

    def arrays(self, grads: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.clip(g, self.min, self.max) for g in grads]


class ClipGradByNorm(GradientClip):
    """Each gradient scaled down to an L2 norm of at most clip_norm."""

    clip_norm: float

    one_by_one: ClassVar[bool] = True

    def __init__(self, clip_norm: float) -> None:
        self.clip_norm = _positive(clip_norm)

    def __str__(self) -> str:
        return f"Gradient Clip By Norm, clip_norm={self.clip_norm:f}"

    def arrays(self, grads: Sequence[jax.Array]) -> list[jax.Array]:
        return [_scale(g, self.clip_norm, jnp.sqrt(squared_norm([g]))) for g in grads]


class ClipGradByGlobalNorm(GradientClip):
    """All gradients scaled by one factor, so that the L2 norm of all of them together is at most clip_norm.

    A call on pairs writes into their gradients. group_name and auto_skip_clip are accepted for scripts that give them;
    groups of parameters are the optimizer's.
    """

    clip_norm: float

    writes_gradients: ClassVar[bool] = True

    def __init__(self, clip_norm: float, group_name: str = "default_group", auto_skip_clip: bool = False) -> None:
        self.clip_norm = _positive(clip_norm)
        self.group_name = group_name
        self.auto_skip_clip = auto_skip_clip

    def __str__(self) -> str:
        return f"Gradient Clip By GlobalNorm, global_norm={self.clip_norm:f}"

    def arrays(self, grads: Sequence[jax.Array]) -> list[jax.Array]:
        return self.scaled(grads, jnp.sqrt(squared_norm(grads)))

    def scaled(self, grads: Sequence[jax.Array], norm: jax.Array) -> list[jax.Array]:
        """The gradients clipped, when the norm of all of them, others that are not here included, is `norm`."""
        return [_scale(g, self.clip_norm, beside(norm, g)) for g in grads]


@op(amp="fp32", method=False)
def global_norm(tensors: list[jax.Array]) -> jax.Array:
    """The L2 norm of all elements of all tensors together, 0-D float32 (float64 if a tensor is)."""
    return jnp.sqrt(squared_norm(tensors))


def squared_norm(grads: Sequence[jax.Array]) -> jax.Array:
    """Sum of squares of all elements, in at least float32, on the first one's devices."""
    total = jnp.zeros((), jnp.float32)
    for g in grads:
        wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
        total = total + beside(jnp.sum(jnp.real(wide * jnp.conj(wide))), total)
    return total


def _scale(g: jax.Array, limit: float, norm: jax.Array) -> jax.Array:
    # limit / max(norm, limit) is 1 below the limit and never divides by zero
    factor = jnp.asarray(limit, norm.dtype) / jnp.maximum(norm, jnp.asarray(limit, norm.dtype))
    return g * factor.astype(g.dtype)


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"clip_norm is a number above 0, got {value!r}")
    return float(value)
