"""Static mode: whether code of this thread is recorded; and the Variables that are fed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.devices import place as places
from polyreme.core.engine import backend
from polyreme.core.symbol import PROBES
from polyreme.errors import ConfigError, ProgramError
from polyreme.program.block import Block, Variable
from polyreme.program.current import defaults
from polyreme.program.recorder import Recorder


def enable_static() -> None:
    """Record what is called from now on in this thread into the default main Program; an Executor runs it."""
    if state.recording():
        return
    backend.take_cpu_num()
    if state.watch.active is not None:
        raise ProgramError("enable_static() inside captured code; call it outside")
    state.watch.active = Recorder()


def disable_static(place: Any = None) -> None:
    """Run what is called as it is called again, on place if given."""
    if state.recording():
        state.watch.active = None
    if place is not None:
        places.set_device(place)


def in_dynamic_mode() -> bool:
    """True if code runs as it is called, False in static mode."""
    return not state.recording()


def data(name: str, shape: Sequence[int | None], dtype: Any = None, lod_level: int = 0) -> Variable:
    """A Variable of the main Program that Executor.run is fed under this name.

    shape: whole, with None or -1 for a size that may differ from run to run. dtype: the default one if None.
    lod_level: how many levels of sequences its rows are cut into; then it is fed LoDTensors.
    Called again with the same name, shape and dtype it gives the same Variable; with another shape or dtype a Variable
    that takes the place of the former, so that one feed serves both. Raises ProgramError outside static mode and for a
    name that is taken by a value of another kind, ConfigError for an impossible shape.
    """
    if not state.recording():
        raise ProgramError(f"static.data({name!r}) belongs to static mode; call enable_static() first")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"static.data: name is a non-empty string, got {name!r}")
    sizes: list[int | None] = [shape] if isinstance(shape, int) else list(shape)
    if not all(s is None or (type(s) is int and s >= -1) for s in sizes):
        raise ConfigError(f"static.data({name!r}): shape holds sizes, None or -1, got {sizes}")
    block = defaults.main.global_block()
    variable = _declared(block, name, sizes, dtypes.as_dtype(dtype or dtypes.default_dtype()))
    if len(variable.lod) != lod_level:
        variable.lod = tuple(_declared(block, f"{name}@LOD{i}", [None], dtypes.int64, 1) for i in range(lod_level))
    return variable


def _declared(block: Block, name: str, sizes: list[int | None], dtype: np.dtype, more: int = 0) -> Variable:
    """The Variable that is fed under this name: the one there is, if it is alike, else a new one in its place.

    more: by how much a size that is not known is larger than what stands for a batch.
    """
    former = block.vars.get(name)
    if isinstance(former, Variable) and former.is_data:
        if former.shape == [-1 if s is None else s for s in sizes] and former.dtype == dtype:
            return former
        del block.vars[name]
    probed = tuple(tuple(probe + more if s in (None, -1) else int(s) for s in sizes) for probe in PROBES)
    variable = block.create_var(name, sizes, dtype, probed=probed if more else None)
    variable.is_data = True
    return variable
