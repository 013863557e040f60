"""Where persistable values are: on one device for a plain run, a copy on each for a run over several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from polyreme.core.state import TensorState
from polyreme.eager.tensor import Tensor
from polyreme.program.scope import Scope
from polyreme.program.training import Optimize

AXIS = "dp"


class HasValues(Protocol):
    """What is asked of a Program (program.program.Program) for the values it outlives a run with."""

    captured: dict[str, Tensor]

    @property
    def random_seed(self) -> int: ...
    def global_block(self) -> Any: ...
    def every_op(self) -> Iterator[Any]: ...
    def list_vars(self) -> Iterator[Tensor]: ...


def state_of(program: HasValues, scope: Scope) -> list[Tensor]:
    """The persistable values that a Program reads or writes and the scope has, the state of optimizers included."""
    names = dict.fromkeys(n for op in program.every_op() for n in (*op.reads(), *op.writes()))
    held = [t for t in map(program.captured.get, names) if t is not None]
    return held + [t for t in map(scope.find, names) if t is not None] + updated(program, scope)


def updated(program: HasValues, scope: Scope) -> list[Tensor]:
    """What the Program's optimizers change."""
    tensors: list[Tensor] = []
    for op in program.global_block().ops:
        if isinstance(op, Optimize):
            for name, _ in op.pairs:
                if scope.find(name) is None and name in program.captured:
                    scope.adopt(name, program.captured[name])
            tensors += [t for t in (scope.find(name) for name, _ in op.pairs) if t is not None]
            tensors += scope.optimizer(op).state_tensors(op.key).values()
    return tensors


def spread(tensors: Iterable[TensorState], everywhere: NamedSharding) -> None:
    """Put a copy of these values on each device; those that have one stay."""
    for tensor in tensors:
        if tensor._array.sharding != everywhere:
            tensor._array = jax.device_put(tensor._array, everywhere, may_alias=False)


def gather(tensors: Iterable[TensorState]) -> None:
    """Put values that a data-parallel run left on several devices on the default one; others stay.

    They are then nowhere in particular again, as before that run, so that what was compiled before it serves.
    """
    for tensor in tensors:
        sharding = tensor._array.sharding
        if type(sharding) is NamedSharding and _is_copied(sharding):
            tensor._array = jnp.array(np.asarray(tensor._array))


def _is_copied(sharding: NamedSharding) -> bool:
    return sharding.mesh.axis_names == (AXIS,) and sharding.mesh.size > 1 and sharding.is_fully_replicated
