"""Gradient clips under 1.7's names: attached to parameters, recorded between backward and the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError
from polyreme.fluid.absent import refusing
from polyreme.nn.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, GradientClip, global_norm
from polyreme.ops import arithmetic as ar
from polyreme.ops.math import clip as clipped
from polyreme.ops.math import maximum
from polyreme.program.current import defaults
from polyreme.program.program import Program


class GradientClipByValue(ClipGradByValue):
    """Every element of a gradient into [min, max]; min is -max unless given."""


class GradientClipByNorm(ClipGradByNorm):
    """Each gradient scaled down to an L2 norm of at most clip_norm."""


class GradientClipByGlobalNorm(ClipGradByGlobalNorm):
    """All gradients of a group scaled by one factor, so that their L2 norm together is at most clip_norm."""

    def __init__(self, clip_norm: float, group_name: str = "default_group") -> None:
        super().__init__(clip_norm, group_name)


GradientClipBase = GradientClip


def set_gradient_clip(clip: Any, param_list: Sequence[Any] | None = None, program: Program | None = None) -> None:
    """Clip the gradients of these parameters (Variables or names; all of the Program's if None) from the next minimize.

    Raises TypeError for what is no clip.
    """
    if not isinstance(clip, GradientClip):
        raise TypeError(f"set_gradient_clip takes a clip such as GradientClipByNorm(1.0), got {clip!r}")
    block = (defaults.main if program is None else program).global_block()
    chosen = block.all_parameters() if param_list is None else param_list
    for p in chosen:
        found = block.var(p) if isinstance(p, str) else p
        found.gradient_clip_attr = clip  # type: ignore[attr-defined]


def clip_recorded(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(parameter, gradient) pairs with the clips of their parameters recorded.

    Raises ConfigError for a group with two norms.
    """
    done, groups = list(pairs), dict[str, list[int]]()
    for index, (p, g) in enumerate(pairs):
        clip = getattr(p, "gradient_clip_attr", None)
        if isinstance(clip, ClipGradByGlobalNorm):
            groups.setdefault(clip.group_name, []).append(index)
        elif isinstance(clip, ClipGradByNorm):
            done[index] = (p, _scale(g, clip.clip_norm, global_norm([g])))
        elif isinstance(clip, ClipGradByValue):
            done[index] = (p, clipped(g, clip.min, clip.max))
    for name, places in groups.items():
        limit, *others = {pairs[i][0].gradient_clip_attr.clip_norm for i in places}
        if others:
            raise ConfigError(
                f"gradient clip group {name!r} has clip_norms {sorted([limit, *others])}; a group has one"
            )
        norm = global_norm([pairs[i][1] for i in places])
        for i in places:
            done[i] = (pairs[i][0], _scale(pairs[i][1], limit, norm))
    return done


def _scale(gradient: Any, limit: float, norm: Any) -> Any:
    return ar.multiply(gradient, ar.cast(ar.divide(limit, maximum(norm, limit)), gradient.dtype))


__all__ = [
    "GradientClipBase", "GradientClipByGlobalNorm", "GradientClipByNorm", "GradientClipByValue", "set_gradient_clip",
]  # fmt: skip

__getattr__ = refusing("fluid.clip", __name__)
