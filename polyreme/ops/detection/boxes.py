"""Boxes around objects: overlap, the boxes a detector starts from, and boxes as offsets from those.

A box is (x1, y1, x2, y2). "Not normalized" boxes are in whole pixels, both ends inside: one more wide and
high than the difference of their corners.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from polyreme.core.dtype import promote_floating
from polyreme.core.op import op
from polyreme.errors import ConfigError, ShapeError


def overlaps(one: np.ndarray, other: np.ndarray, extra: float = 0.0) -> np.ndarray:
    """Intersection over union of boxes [..., 4] with boxes [..., 4], broadcast; 0 where there is no union.

    extra: 1 for boxes in whole pixels; those that do not touch still overlap by nothing.
    """
    wide, high = (
        np.minimum(one[..., d + 2], other[..., d + 2]) - np.maximum(one[..., d], other[..., d]) for d in (0, 1)
    )
    both = np.where((wide >= 0) & (high >= 0), (wide + extra) * (high + extra), 0)
    union = areas(one, extra) + areas(other, extra) - both
    return both / np.where(union > 0, union, np.inf)


def areas(boxes: np.ndarray, extra: float = 0.0) -> np.ndarray:
    """Areas of boxes [..., 4]; 0 for one whose corners are the wrong way round."""
    wide, high = boxes[..., 2] - boxes[..., 0], boxes[..., 3] - boxes[..., 1]
    return np.where((wide < 0) | (high < 0), 0, (wide + extra) * (high + extra))


@op(amp="fp32", method=False, real=True)
def prior_box(
    input: Array,
    image: Array,
    min_sizes: Any,
    max_sizes: Any = None,
    aspect_ratios: Any = (1.0,),
    variance: Any = (0.1, 0.1, 0.2, 0.2),
    flip: bool = False,
    clip: bool = False,
    steps: Any = (0.0, 0.0),
    offset: float = 0.5,
    min_max_aspect_ratios_order: bool = False,
) -> tuple[Array, Array]:
    """Boxes to start from at each place of a feature map, and their variances: both [H, W, boxes, 4].

    input [n, C, H, W] and image [n, C', H', W'] give sizes only; boxes are fractions of the image, kept inside by clip.
    Per min_size (pixels): one box an aspect ratio (1 first; flip adds 1 / ratio), and a square of sqrt(min max) for the
    max_size at the same place, last, or second with min_max_aspect_ratios_order. steps: (x, y) pixels of the image from
    place to place; 0 divides it evenly. offset: of centres, in steps. Source: Liu et al., 2015, arXiv:1512.02325, 2.2.
    """
    mins, maxes = _several(min_sizes), _several(max_sizes)
    if (
        not mins
        or min(mins) <= 0
        or (maxes and len(maxes) != len(mins))
        or any(big <= small for small, big in zip(mins, maxes, strict=False))
    ):
        raise ConfigError(f"prior_box: min_sizes={mins}, max_sizes={maxes}; give positive ones, each max above its min")
    if input.ndim != 4 or image.ndim != 4:
        raise ShapeError(f"prior_box: input {list(input.shape)}, image {list(image.shape)}; both need 4 dims")
    size = np.array([image.shape[3], image.shape[2]])
    places = (input.shape[3], input.shape[2])
    step = [s or z / p for s, z, p in zip(steps, size, places, strict=True)]
    centre = np.stack(np.meshgrid(*((np.arange(p) + offset) * s for p, s in zip(places, step, strict=True))), -1)
    half = np.array(_prior_sizes(mins, maxes, _ratios(aspect_ratios, flip), min_max_aspect_ratios_order)) / 2
    boxes = np.concatenate([centre[:, :, None] - half, centre[:, :, None] + half], -1) / np.tile(size, 2)
    boxes = np.clip(boxes, 0, 1) if clip else boxes
    dtype = promote_floating(input)[0].dtype
    return jnp.asarray(boxes, dtype), jnp.broadcast_to(jnp.asarray(variance, dtype), boxes.shape)


def _several(value: Any) -> tuple:
    return () if value is None else tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _ratios(given: Any, flip: bool) -> list[float]:
    """1, then the others without repetitions, each followed by its inverse if flip."""
    found = [1.0]
    for ratio in _several(given):
        if all(abs(ratio - have) >= 1e-6 for have in found):
            found += [ratio, 1 / ratio] if flip else [ratio]
    return found


def _prior_sizes(mins: tuple, maxes: tuple, ratios: list[float], squares_first: bool) -> list[tuple[float, float]]:
    """(width, height) of the boxes at one place, in order."""
    sizes = []
    for at, small in enumerate(mins):
        shaped = [(small * r**0.5, small / r**0.5) for r in ratios]
        square = [((small * maxes[at]) ** 0.5,) * 2] if maxes else []
        sizes += [shaped[0], *square, *shaped[1:]] if squares_first else [*shaped, *square]
    return sizes


@op(amp="fp32", method=False, real=True)
def box_coder(
    prior_box: Array,
    prior_box_var: Array | None,
    target_box: Array,
    code_type: str = "encode_center_size",
    box_normalized: bool = True,
    axis: int = 0,
) -> Array:
    """Boxes as (dx, dy, dw, dh) from priors, or back.

    "encode_center_size": target_box [n, 4], prior_box [m, 4] -> [n, m, 4] with dx = (centre - prior's) / prior's width,
    dw = log(width / prior's), all divided by prior_box_var ([m, 4], [4] or None). "decode_center_size": target_box [n,
    m, 4] of such offsets -> boxes; priors stand along axis 1 (axis=0), or along axis 0 (axis=1). Source: Girshick et
    al., 2013, arXiv:1311.2524, appendix C. Raises ConfigError for another code_type or axis.
    """
    if code_type not in ("encode_center_size", "decode_center_size") or axis not in (0, 1):
        raise ConfigError(
            f"box_coder: code_type={code_type!r}, axis={axis}; give 'encode_center_size' or 'decode_...', 0 or 1"
        )
    encode = code_type.startswith("encode")
    prior, target = promote_floating(prior_box, target_box)
    if prior.shape[1:] != (4,) or target.ndim != (2 if encode else 3) or target.shape[-1] != 4:
        raise ShapeError(f"box_coder: prior_box {list(prior.shape)}, target_box {list(target.shape)}; see {code_type}")
    variance = jnp.ones((1, 4), prior.dtype) if prior_box_var is None else prior_box_var.astype(prior.dtype)
    variance = variance.reshape(-1, 4)
    extra = 0 if box_normalized else 1
    size = prior[:, 2:] - prior[:, :2] + extra
    centre = prior[:, :2] + size / 2
    if encode:
        other = target[:, None]
        middle = ((other[..., :2] + other[..., 2:]) / 2 - centre) / size
        ratio = jnp.log(jnp.abs((other[..., 2:] - other[..., :2] + extra) / size))
        return jnp.concatenate([middle, ratio], -1) / variance
    size, centre, variance = (v[None] if axis == 0 else v[:, None] for v in (size, centre, variance))
    move = target * variance
    middle, half = move[..., :2] * size + centre, jnp.exp(move[..., 2:]) * size / 2
    return jnp.concatenate([middle - half, middle + half - extra], -1)


ALIASES: dict[str, str] = {}
