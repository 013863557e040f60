"""Transforms of random variables, chains of them, and the distributions they make of others."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any

from polyreme.distribution.distribution import Distribution
from polyreme.distribution.gamma import masked, supported
from polyreme.distribution.independent import Independent, sum_rightmost
from polyreme.distribution.parameters import as_value
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.math import logaddexp
from polyreme.ops.reduce import all as all_of


class Type(enum.Enum):
    """What a transform may be, as subclasses written for PaddlePaddle say in `_type`."""

    BIJECTION = "bijection"
    INJECTION = "injection"
    SURJECTION = "surjection"
    OTHER = "other"

    @classmethod
    def is_injective(cls, kind: Type) -> bool:
        """Whether no two inputs have one image."""
        return kind in (cls.BIJECTION, cls.INJECTION)


class Transform:
    """A differentiable function y = f(x) that carries the density of x over to y.

    A subclass writes `_forward`, `_inverse` and `_forward_log_det_jacobian` (or `_inverse_log_det_jacobian`), and
    `_forward_shape` and `_inverse_shape` where it changes shapes. domain_rank, codomain_rank: dims of an event going in
    and coming out, 0 for what acts on each element; log determinants have no such dims. `_type`, and `_domain` and
    `_codomain` with an event_rank, say the same as PaddlePaddle's do.

    >>> from polyreme.distribution import AffineTransform
    >>> AffineTransform(1.0, 2.0).forward([3.0]).tolist()
    [7.0]
    """

    domain_rank: int = 0
    codomain_rank: int = 0
    is_injective: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        attributes = vars(cls)
        if "_type" in attributes:
            cls.is_injective = Type.is_injective(attributes["_type"])
        if "_domain" in attributes:
            cls.domain_rank = property(lambda self: self._domain.event_rank)  # type: ignore[assignment]
        if "_codomain" in attributes:
            cls.codomain_rank = property(lambda self: self._codomain.event_rank)  # type: ignore[assignment]

    @classmethod
    def _is_injective(cls) -> bool:
        return cls.is_injective

    def __call__(self, input: Any) -> Any:
        """forward(a Tensor); the transformed distribution of a Distribution; ChainTransform([self, input])."""
        if isinstance(input, Distribution):
            return TransformedDistribution(input, [self])
        return ChainTransform([self, input]) if isinstance(input, Transform) else self.forward(input)

    def forward(self, x: Any) -> Tensor:
        """f(x)."""
        return self._forward(self._event("forward", x, self.domain_rank))

    def inverse(self, y: Any) -> Any:
        """The x with f(x) = y; where there are several of them a tuple."""
        return self._inverse(self._event("inverse", y, self.codomain_rank))

    def forward_log_det_jacobian(self, x: Any) -> Tensor:
        """log |det df/dx| at x. Raises NotImplementedError where f is not one-to-one."""
        x = self._event("forward_log_det_jacobian", x, self.domain_rank)
        if not self.is_injective:
            raise self._lacks("forward_log_det_jacobian: it is not one-to-one")
        if self._writes("_forward_log_det_jacobian"):
            return self._forward_log_det_jacobian(x)
        if self._writes("_inverse_log_det_jacobian"):
            return -self._inverse_log_det_jacobian(self._forward(x))
        raise self._lacks("log determinant: neither _forward_log_det_jacobian nor _inverse_log_det_jacobian is written")

    def inverse_log_det_jacobian(self, y: Any) -> Any:
        """log |det dx/dy| at y, for each x in a tuple where there are several."""
        y = self._event("inverse_log_det_jacobian", y, self.codomain_rank)
        if self._writes("_inverse_log_det_jacobian"):
            return self._inverse_log_det_jacobian(y)
        return -self.forward_log_det_jacobian(self._inverse(y))

    def forward_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of f(x) for an x of this shape."""
        return tuple(self._forward_shape(tuple(shape)))

    def inverse_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of x for an f(x) of this shape."""
        return tuple(self._inverse_shape(tuple(shape)))

    def _forward(self, x: Tensor) -> Tensor:
        raise self._lacks("_forward")

    def _inverse(self, y: Tensor) -> Any:
        raise self._lacks("_inverse")

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        raise self._lacks("_forward_log_det_jacobian")

    def _inverse_log_det_jacobian(self, y: Tensor) -> Any:
        raise self._lacks("_inverse_log_det_jacobian")

    def _forward_shape(self, shape: tuple[int, ...]) -> Sequence[int]:
        return shape

    def _inverse_shape(self, shape: tuple[int, ...]) -> Sequence[int]:
        return shape

    def _image(self, y: Tensor) -> tuple[Tensor, float] | None:
        """(which elements of y can be f(x), a number that can), or None for all: densities are 0 elsewhere."""
        return None

    def _event(self, what: str, value: Any, rank: int) -> Tensor:
        tensor = value if isinstance(value, Tensor) else to_tensor(value)
        if tensor.ndim < rank:
            raise ShapeError(
                f"{type(self).__name__}.{what}: an event has {rank} dims, got a Tensor of shape {list(tensor.shape)}; "
                "give at least that many"
            )
        return tensor

    def _writes(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(Transform, name)

    def _lacks(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {what}")


class ChainTransform(Transform):
    """The transforms one after the other, the first on the list first."""

    transforms: list[Transform]
    is_injective: bool
    domain_rank: int
    codomain_rank: int

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = as_transforms("ChainTransform", transforms)
        self.is_injective = all(t.is_injective for t in self.transforms)
        inward = outward = 0
        for t in reversed(self.transforms):
            inward = max(inward, t.codomain_rank) + t.domain_rank - t.codomain_rank
        for t in self.transforms:
            outward = max(outward, t.domain_rank) + t.codomain_rank - t.domain_rank
        self.domain_rank, self.codomain_rank = inward, outward

    def _forward(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda value, t: t.forward(value), self.transforms, x)

    def _inverse(self, y: Tensor) -> Any:
        for t in reversed(self.transforms):
            if isinstance(y, tuple):
                raise self._lacks("inverse: only the first transform of a chain may have several")
            y = t.inverse(y)
        return y

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        total, rank = None, self.domain_rank
        for t in self.transforms:
            each = sum_rightmost(t.forward_log_det_jacobian(x), rank - t.domain_rank)
            total = each if total is None else total + each
            rank += t.codomain_rank - t.domain_rank
            x = t.forward(x)
        assert total is not None
        return total

    def _forward_shape(self, shape: tuple[int, ...]) -> Sequence[int]:
        return functools.reduce(lambda sizes, t: t.forward_shape(sizes), self.transforms, shape)

    def _inverse_shape(self, shape: tuple[int, ...]) -> Sequence[int]:
        return functools.reduce(lambda sizes, t: t.inverse_shape(sizes), self.transforms[::-1], shape)


class IndependentTransform(Transform):
    """base, its last reinterpreted_batch_rank batch dims counted as event dims: log determinants sum over them."""

    is_injective: bool
    domain_rank: int
    codomain_rank: int

    def __init__(self, base: Transform, reinterpreted_batch_rank: int) -> None:
        (self._base,) = as_transforms("IndependentTransform", [base])
        if not isinstance(reinterpreted_batch_rank, int) or reinterpreted_batch_rank < 1:
            raise ConfigError(
                f"IndependentTransform: reinterpreted_batch_rank={reinterpreted_batch_rank!r}; give at least 1"
            )
        self._rank = reinterpreted_batch_rank
        self.is_injective = base.is_injective
        self.domain_rank = base.domain_rank + reinterpreted_batch_rank
        self.codomain_rank = base.codomain_rank + reinterpreted_batch_rank

    def _forward(self, x: Tensor) -> Tensor:
        return self._base.forward(x)

    def _inverse(self, y: Tensor) -> Any:
        return self._base.inverse(y)

    def _forward_log_det_jacobian(self, x: Tensor) -> Tensor:
        return sum_rightmost(self._base.forward_log_det_jacobian(x), self._rank)

    def _forward_shape(self, shape: tuple[int, ...]) -> Sequence[int]:
        return self._base.forward_shape(shape)

    def _inverse_shape(self, shape: tuple[int, ...]) -> Sequence[int]:
        return self._base.inverse_shape(shape)

    def _image(self, y: Tensor) -> tuple[Tensor, float] | None:
        return self._base._image(y)


class TransformedDistribution(Distribution):
    """The distribution of a draw from base with transforms applied to it, the first on the list first.

    Where a transform takes events of more dims than base has, base's last batch dims count as event dims. A transform
    that broadcasts base to more batch dims makes independent draws in them.

    >>> from polyreme.distribution import ExpTransform, Normal
    >>> log_normal = TransformedDistribution(Normal(0.0, 1.0), [ExpTransform()])
    >>> round(log_normal.log_prob(2.0).item(), 4)
    -1.8523
    """

    def __init__(self, base: Distribution, transforms: Sequence[Transform]) -> None:
        if not isinstance(base, Distribution):
            raise ConfigError(f"TransformedDistribution: base is a {type(base).__name__}; give a Distribution")
        chain = ChainTransform(transforms)
        self._base, self._transforms = base, _flat(chain)
        base_shape = (*base.batch_shape, *base.event_shape)
        if len(base_shape) < chain.domain_rank:
            raise ShapeError(
                f"TransformedDistribution: the transforms take events of {chain.domain_rank} dims, base has "
                f"batch_shape {base.batch_shape} and event_shape {base.event_shape}; give base parameters of more dims"
            )
        shape = chain.forward_shape(base_shape)
        needed = chain.inverse_shape(shape)
        if needed[len(needed) - len(base_shape) :] != base_shape:
            raise ShapeError(
                f"TransformedDistribution: the transforms broadcast draws of shape {base_shape} to {needed}, over "
                "a dim of size 1; give base parameters of that shape"
            )
        self._in_front = needed[: len(needed) - len(base_shape)]
        deeper = chain.domain_rank - len(base.event_shape)
        if deeper > 0:
            self._base = Independent(base, deeper)
        rank = chain.codomain_rank + max(-deeper, 0)
        super().__init__(shape[: len(shape) - rank], shape[len(shape) - rank :])

    def _sample(self, shape: tuple[int, ...]) -> Tensor:
        return self._moved(self._base.sample((*shape, *self._in_front)))

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        return self._moved(self._base.rsample((*shape, *self._in_front)))

    def _moved(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda value, t: t.forward(value), self._transforms, x)

    def log_prob(self, value: Any) -> Tensor:
        """Log density at value: that of base where value came from, less the log determinant; -inf if from nowhere."""
        y = value if isinstance(value, Tensor) else to_tensor(value)
        return self._log_prob(as_value(y, y), self._transforms, len(self.event_shape))

    def _log_prob(self, y: Tensor, transforms: Sequence[Transform], rank: int) -> Tensor:
        """Log density of what the transforms make of base at y, whose events have `rank` dims."""
        if not transforms:
            return sum_rightmost(self._base.log_prob(y), rank - len(self._base.event_shape))
        *rest, last = transforms
        codomain = last._image(y)
        if codomain is not None:
            y = supported(codomain[0], y, codomain[1])
        found = self._before(y, rest, last, rank)
        if codomain is None:
            return found
        inside = codomain[0]
        return masked(all_of(inside, list(range(-rank, 0))) if rank else inside, found)

    def _before(self, y: Tensor, rest: Sequence[Transform], last: Transform, rank: int) -> Tensor:
        before = rank + last.domain_rank - last.codomain_rank
        if last.is_injective:
            x = last.inverse(y)
            jacobian = sum_rightmost(last.forward_log_det_jacobian(x), before - last.domain_rank)
            return self._log_prob(x, rest, before) - jacobian
        if rank:
            raise NotImplementedError(
                f"TransformedDistribution.log_prob: {type(last).__name__} is not one-to-one, and an event of {rank} "
                "dims comes from too many; use it on a distribution with event_shape ()"
            )
        pairs = zip(last.inverse(y), last.inverse_log_det_jacobian(y), strict=True)
        each = [self._log_prob(x, rest, before) + jacobian for x, jacobian in pairs]
        return functools.reduce(logaddexp, each)


def as_transforms(what: str, transforms: Any) -> list[Transform]:
    """A non-empty sequence of Transforms as a list. Raises ConfigError for anything else."""
    if not isinstance(transforms, (list, tuple)) or not transforms:
        raise ConfigError(f"{what}: transforms is {transforms!r}; give a list with at least one Transform")
    for t in transforms:
        if not isinstance(t, Transform):
            raise ConfigError(f"{what}: a transform is a {type(t).__name__}; give Transforms")
    return list(transforms)


def _flat(transform: Transform) -> list[Transform]:
    if isinstance(transform, ChainTransform):
        return [leaf for t in transform.transforms for leaf in _flat(t)]
    return [transform]
