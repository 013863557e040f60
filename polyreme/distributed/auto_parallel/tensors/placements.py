"""Placements: how a tensor lies along one dim of a mesh: split, whole, or as addends yet to be joined.

A tensor has one placement per mesh dim, outermost first.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError, PlacementError


class ReduceType(enum.Enum):
    """The reduction of the addends of a Partial tensor."""

    kRedSum = 0
    kRedMax = 1
    kRedMin = 2
    kRedProd = 3
    kRedAvg = 4
    kRedAny = 5
    kRedAll = 6

    def __int__(self) -> int:
        return self.value

    __index__ = __int__

    def __repr__(self) -> str:
        return f"<ReduceType.{self.name}: {self.value}>"


_REDUCE_NAMES = ("SUM", "MAX", "MIN", "PRODUCT", "AVG", "ANY", "ALL")


class Placement:
    """The placement of a tensor along one dim of a mesh: Shard, Replicate or Partial. Equal by value."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """True for Shard; with a dim, for Shard of that tensor dim."""
        return False

    def is_replicated(self) -> bool:
        return False

    def is_partial(self) -> bool:
        return False

    def _value(self) -> tuple:
        return (type(self),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash(self._value())

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Shard(Placement):
    """Along this mesh dim the tensor is split over its dim `dim`; device i of k has the i-th of k pieces.

    A size n that k does not divide is allowed: pieces have ceil(n / k) rows, the last ones fewer or none. split_factor:
    the dim is first cut into as many equal parts, and each device has its piece of every part (a fused weight's
    halves, say). shard_order: where several mesh dims split one tensor dim, their order, outermost first; by default
    the order of the mesh dims.
    """

    __slots__ = ("_dim", "_order", "_split_factor")

    def __init__(self, dim: int, *, split_factor: int = 1, shard_order: int = 0) -> None:
        for what, number, least in (("split_factor", split_factor, 1), ("shard_order", shard_order, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ConfigError(f"Shard: {what}={number!r} must be a whole number of at least {least}")
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise ConfigError(f"Shard: dim={dim!r} must be a whole number, the index of a tensor dim")
        self._dim, self._split_factor, self._order = int(dim), split_factor, shard_order

    def is_shard(self, dim: int | None = None) -> bool:
        """True; with a dim, whether it is the dim that is split."""
        return dim is None or dim == self._dim

    def get_dim(self) -> int:
        """The tensor dim that is split."""
        return self._dim

    def get_split_factor(self) -> int:
        """Equal parts of the dim each of which is split."""
        return self._split_factor

    def get_co_shard_order(self) -> int:
        """Place among the mesh dims that split the same tensor dim."""
        return self._order

    def _value(self) -> tuple:
        return (Shard, self._dim, self._split_factor, self._order)

    def __reduce__(self) -> tuple[Any, ...]:
        return _shard, (self._dim, self._split_factor, self._order)

    def __repr__(self) -> str:
        factor = f", split_factor={self._split_factor}" if self._split_factor != 1 else ""
        order = f", shard_order={self._order}" if self._order else ""
        return f"Shard(dim={self._dim}{factor}{order})"


def _shard(dim: int, split_factor: int, shard_order: int) -> Shard:
    return Shard(dim, split_factor=split_factor, shard_order=shard_order)


class Replicate(Placement):
    """Along this mesh dim every device has a whole copy."""

    __slots__ = ()

    def is_replicated(self) -> bool:
        return True


class Partial(Placement):
    """Along this mesh dim every device has an addend of the whole shape; joined by reduce_type they are the value."""

    __slots__ = ("_reduce_type",)

    def __init__(self, reduce_type: ReduceType = ReduceType.kRedSum) -> None:
        if not isinstance(reduce_type, ReduceType):
            raise ConfigError(f"Partial: reduce_type={reduce_type!r} must be a ReduceType, such as ReduceType.kRedSum")
        self._reduce_type = reduce_type

    def is_partial(self) -> bool:
        return True

    def reduce_type(self) -> ReduceType:
        """The reduction of the addends."""
        return self._reduce_type

    def _value(self) -> tuple:
        return (Partial, self._reduce_type)

    def __reduce__(self) -> tuple[Any, ...]:
        return Partial, (self._reduce_type,)

    def __repr__(self) -> str:
        return f"Partial(reduce_type={_REDUCE_NAMES[self._reduce_type.value]})"


def checked(what: str, placements: Any, mesh: Any, shape: Sequence[int]) -> tuple[Placement, ...]:
    """placements as they count for a tensor of this shape: one per mesh dim (Replicate for those left out), tensor dims
    from 0.

    Raises PlacementError for too many, for what is no Placement, and for a dim the tensor has not.
    """
    if not isinstance(placements, (list, tuple)) or not all(isinstance(p, Placement) for p in placements):
        raise PlacementError(f"{what}: placements={placements!r} must be a list of Shard, Replicate and Partial")
    if len(placements) > mesh.ndim:
        raise PlacementError(
            f"{what}: {len(placements)} placements {list(placements)} for a mesh of {mesh.ndim} dims {mesh.dim_names}; "
            "give one per mesh dim"
        )
    full = [*placements, *[Replicate()] * (mesh.ndim - len(placements))]
    return tuple(_place(what, p, shape) for p in full)


def check_joins(what: str, placements: Sequence[Placement], dtype: Any) -> None:
    """Raises PlacementError for addends that do not join to the value that they were made of, in a dtype."""
    for placement in placements:
        kind = placement.reduce_type() if isinstance(placement, Partial) else None
        if kind in (ReduceType.kRedAny, ReduceType.kRedAll) and dtype != dtypes.bool_:
            raise PlacementError(
                f"{what}: {placement} joins truth values, and the tensor is of {dtype}; cast it to bool"
            )
        if kind in (ReduceType.kRedMax, ReduceType.kRedMin) and dtypes.is_complex(dtype):
            raise PlacementError(f"{what}: {placement} of {dtype}, which has no order; use Partial(ReduceType.kRedSum)")


def _place(what: str, placement: Placement, shape: Sequence[int]) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    dim, ndim = placement.get_dim(), len(shape)
    if not -ndim <= dim < ndim:
        has = f"dims 0..{ndim - 1}" if ndim else "no dims"
        raise PlacementError(f"{what}: {placement} of a tensor of shape {list(shape)}, which has {has}")
    factor = placement.get_split_factor()
    if shape[dim] % factor:
        raise PlacementError(f"{what}: {placement} cuts a dim of size {shape[dim]} into {factor} equal parts")
    return placement if dim >= 0 else _shard(dim + ndim, factor, placement.get_co_shard_order())
