"""Transforms that act on whole events: reshaping, softmax, stacking, stick breaking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.distribution.transform import Transform, as_transforms
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn.functional import log_sigmoid, softmax, softplus
from polyreme.ops.creation import arange, ones_like, zeros_like
from polyreme.ops.manipulation import concat, reshape, stack, unbind
from polyreme.ops.math import log, sigmoid
from polyreme.ops.reduce import sum as sum_of
from polyreme.ops.scan import cumprod, cumsum


class ReshapeTransform(Transform):
    """The elements of an event of shape in_event_shape in out_event_shape; both hold equally many."""

    domain_rank: int
    codomain_rank: int

    def __init__(self, in_event_shape: Sequence[int], out_event_shape: Sequence[int]) -> None:
        self._in, self._out = tuple(in_event_shape), tuple(out_event_shape)
        if math.prod(self._in) != math.prod(self._out):
            raise ShapeError(
                f"ReshapeTransform: {list(self._in)} holds {math.prod(self._in)} elements, {list(self._out)} holds "
                f"{math.prod(self._out)}; give shapes of equally many"
            )
        self.domain_rank, self.codomain_rank = len(self._in), len(self._out)

    @property
    def in_event_shape(self) -> tuple[int, ...]:
        """The shape of an event going in."""
        return self._in

    @property
    def out_event_shape(self) -> tuple[int, ...]:
        """The shape of an event coming out."""
        return self._out

    def _forward(self, x: Tensor) -> Tensor:
        return reshape(x, list(self._forward_shape(tuple(x.shape))))

    def _inverse(self, y: Tensor) -> Tensor:
        return reshape(y, list(self._inverse_shape(tuple(y.shape))))

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        flat = reshape(x, [*x.shape[: x.ndim - len(self._in)], -1])
        return zeros_like(sum_of(flat, -1))

    def _forward_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return _exchange(shape, self._in, self._out)

    def _inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return _exchange(shape, self._out, self._in)


def _exchange(shape: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    cut = len(shape) - len(old)
    if cut < 0 or shape[cut:] != old:
        raise ShapeError(f"ReshapeTransform: shape {list(shape)} does not end in {list(old)}")
    return (*shape[:cut], *new)


class SoftmaxTransform(Transform):
    """y = softmax(x) over the last dim; inverse gives log(y), one of the many x. There is no log determinant."""

    domain_rank = codomain_rank = 1

    def _forward(self, x: Tensor) -> Tensor:
        return softmax(x, -1)

    def _inverse(self, y: Tensor) -> Tensor:
        return log(y)


class StackTransform(Transform):
    """Transforms side by side: the i-th acts on slice i along axis, which has as many slices."""

    is_injective: bool
    domain_rank: int
    codomain_rank: int

    def __init__(self, transforms: Sequence[Transform], axis: int = 0) -> None:
        self._transforms = as_transforms("StackTransform", transforms)
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise ConfigError(f"StackTransform: axis={axis!r}; give an int")
        self._axis = axis
        self.is_injective = all(t.is_injective for t in self._transforms)
        self.domain_rank = max(t.domain_rank for t in self._transforms)
        self.codomain_rank = max(t.codomain_rank for t in self._transforms)

    @property
    def transforms(self) -> list[Transform]:
        """The transforms, one for each slice."""
        return self._transforms

    @property
    def axis(self) -> int:
        """The dim along which slices are taken."""
        return self._axis

    def _by_slice(self, method: str, x: Tensor) -> Tensor:
        dim = self._axis if self._axis >= 0 else self._axis + x.ndim
        if not 0 <= dim < x.ndim or x.shape[dim] != len(self._transforms):
            raise ShapeError(
                f"StackTransform: {len(self._transforms)} transforms along axis {self._axis} of a Tensor of shape "
                f"{list(x.shape)}; give as many transforms as there are slices"
            )
        slices = unbind(x, dim)
        return stack([getattr(t, method)(part) for t, part in zip(self._transforms, slices, strict=True)], dim)

    def _forward(self, x: Tensor) -> Tensor:
        return self._by_slice("forward", x)

    def _inverse(self, y: Tensor) -> Any:
        if not self.is_injective:
            raise self._lacks("inverse: a transform in it is not one-to-one")
        return self._by_slice("inverse", y)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return self._by_slice("forward_log_det_jacobian", x)


class StickBreakingTransform(Transform):
    """A vector [k] to a point of the simplex [k + 1]: each element says what share of what is left is broken off.

    Share i is sigmoid(x_i - log(k - i)), so that x = 0 gives equal parts.
    """

    domain_rank = codomain_rank = 1

    def _forward(self, x: Tensor) -> Tensor:
        share = sigmoid(x - self._offset(x))
        left = cumprod(1 - share, -1)
        first = ones_like(x[..., :1])
        return concat([share, first], -1) * concat([first, left], -1)

    def _inverse(self, y: Tensor) -> Tensor:
        parts = y[..., :-1]
        # summed from the end: 1 - cumsum would cancel
        left = (cumsum(y.flip([-1]), -1).flip([-1]))[..., 1:]
        return log(parts) - log(left) + self._offset(parts)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        shifted = x - self._offset(x)
        # dy_i / dx_i = share_i * (1 - share_i) * what is left before i, which is a product of (1 - share)
        kept = -softplus(shifted)
        before = cumsum(kept, -1) - kept
        return sum_of(log_sigmoid(shifted) + kept + before, -1)

    def _offset(self, x: Tensor) -> Tensor:
        return log(arange(x.shape[-1], 0, -1, dtype=x.dtype))

    def _forward_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] + 1)

    def _inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] - 1)
