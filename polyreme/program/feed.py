"""What a run is given and asked for: feeds checked against their Variables, and the names to fetch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core.symbol import DYNAMIC, Symbol
from polyreme.eager.tensor import Tensor
from polyreme.errors import ProgramError, did_you_mean
from polyreme.program.block import Variable
from polyreme.program.program import Program

_log = logging.getLogger("polyreme.program")
_ARRAYS = (np.ndarray, jax.Array)


def fetch_key(fetch_list: Any) -> tuple[Any, ...] | None:
    """What tells fetch lists apart, without looking into the Program; None for a list that has to be looked up."""
    if fetch_list is None:
        return ()
    key = []
    for entry in fetch_list if isinstance(fetch_list, (list, tuple)) else (fetch_list,):
        if isinstance(entry, str):
            key.append(entry)
        elif isinstance(entry, Tensor) and isinstance(entry._array, Symbol):
            key.append((entry._array.name,))
        else:
            return None
    return tuple(key)


def arrays_of(feed: Any) -> dict[str, Any] | None:
    """The feed if it is a dict of arrays and Tensors with values; None if it has to be looked at."""
    if feed.__class__ is not dict:
        return None
    arrays = {}
    for name, value in feed.items():
        array = value._array if isinstance(value, Tensor) else value
        if not isinstance(array, _ARRAYS):
            return None
        arrays[name] = array
    return arrays


def without_unused(program: Program, feed: Any) -> Any:
    """The feed without names that the Program has no Variable of; a Program says so of such a name once."""
    known = program.global_block().vars
    if not isinstance(feed, Mapping) or feed.keys() <= known.keys():
        return feed
    for name in feed:
        if name not in known and name not in program.unused_feeds:
            program.unused_feeds.add(name)
            _log.warning(
                "Executor.run: feed %r is ignored, the Program has no such variable; it takes %s",
                name,
                sorted(n for n, v in known.items() if isinstance(v, Variable) and v.is_data),
            )
    return {name: value for name, value in feed.items() if name in known}


def shapes_in(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a program is compiled for: names, shapes and dtypes."""
    return tuple([(n, a.shape, a.dtype) for n, a in given.items()])


def fetched(program: Program, fetch_list: Any) -> list[str]:
    """Names of the values to fetch; ProgramError for what is no Variable of the Program."""
    if fetch_list is None:
        return []
    listed = fetch_list if isinstance(fetch_list, (list, tuple)) else [fetch_list]
    names = []
    for entry in listed:
        if isinstance(entry, str):
            names.append(current_name(program, entry, "fetch_list"))
        elif isinstance(entry, (list, tuple)):
            names += fetched(program, entry)
        elif isinstance(entry, Tensor) and isinstance(entry._array, Symbol):
            names.append(entry._array.name)
        elif isinstance(entry, Tensor):
            names.append(program.hold(entry))
        else:
            raise ProgramError(f"fetch_list holds Variables and names, got {type(entry).__name__}: {entry!r}")
    return names


def current_name(program: Program, name: str, what: str) -> str:
    """What the Variable of this name stands for now; in-place ops give it a new value."""
    block = program.global_block()
    found = block.vars.get(name)
    if found is not None:
        return found._array.name
    known = {*block.vars, *(n for op in block.ops for n in op.outputs), *program.captured}
    if name in known:
        return name
    raise ProgramError(f"{what}: the Program has no variable {name!r}{did_you_mean(name, known)}")


def fed(program: Program, feed: Any) -> dict[str, Any]:
    """The feed as arrays by name, each checked against its Variable."""
    if not isinstance(feed, Mapping):
        raise ProgramError(f"feed is a dict of name -> array, got {type(feed).__name__}")
    block = program.global_block()
    data = {n: v for n, v in block.vars.items() if isinstance(v, Variable) and v.is_data}
    computed = {n for op in block.ops for n in op.outputs}
    changed = {n for op in program.every_op() for n in op.writes()}
    arrays: dict[str, Any] = {}
    for name, value in feed.items():
        variable = block.vars.get(name)
        if variable is None:
            continue
        if name in computed:
            raise ProgramError(
                f"feed: {name!r} is computed by the Program, which would replace what is fed; feed {sorted(data)}"
            )
        if name in changed:
            raise ProgramError(
                f"feed: {name!r} is changed by the Program, from the value that the scope holds; set it there: "
                f"global_scope().find_var({name!r}).get_tensor().set(...)"
            )
        arrays[name] = _check(variable, value)
        if isinstance(variable, Variable):
            arrays.update(_offsets(variable, value))
    needed = {n for op in block.ops for n in op.reads()}
    missing = [n for n in data if n in needed and n not in arrays]
    if missing:
        spare = "".join(f"; it has no variable {n!r}{did_you_mean(n, data)}" for n in sorted(program.unused_feeds))
        raise ProgramError(f"feed lacks {missing}, which the Program reads; it was given {sorted(feed)}{spare}")
    return arrays


def _offsets(variable: Variable, value: Any) -> dict[str, Any]:
    """The offsets of a LoDTensor, under the names of the Variables that hold them."""
    if not variable.lod:
        return {}
    lod = value.lod() if hasattr(value, "lod") else []
    if len(lod) != len(variable.lod):
        raise ProgramError(
            f"feed: {variable.name!r} has lod_level {len(variable.lod)}, the value {len(lod)} levels of sequences; "
            "feed a LoDTensor made by create_lod_tensor"
        )
    return {v.name: np.asarray(level, v.dtype) for v, level in zip(variable.lod, lod, strict=True)}


def _check(variable: Tensor, value: Any) -> Any:
    array = value._array if isinstance(value, Tensor) else value
    if isinstance(array, Symbol):
        raise ProgramError(
            f"feed: {variable._array.name!r} is given the Variable {array!r}, which has no value; feed an ndarray"
        )
    if not isinstance(array, (np.ndarray, jax.Array)):
        array = _from_python(variable, array)
    name, want = variable._array.name, list(variable.shape)
    if array.dtype != variable.dtype:
        raise ProgramError(
            f"feed: {name!r} is {variable.dtype.name}, got {array.dtype.name} of shape {list(array.shape)}; convert it "
            f'with .astype("{variable.dtype.name}")'
        )
    if len(want) != array.ndim or any(w not in (DYNAMIC, s) for w, s in zip(want, array.shape, strict=True)):
        raise ProgramError(f"feed: {name!r} has shape {want}, got {list(array.shape)}; -1 stands for any size")
    return array


def _from_python(variable: Tensor, value: Any) -> np.ndarray:
    """Python numbers, which have no dtype of their own, in the Variable's; anything else in the one NumPy gives it."""
    name, dtype = variable._array.name, variable.dtype
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ProgramError(f"feed: {name!r} is given {type(value).__name__} that is no array: {error}") from error
    if array.dtype.kind in "OUS":
        raise ProgramError(
            f"feed: {name!r} is {dtype.name}, got {type(value).__name__} {str(value)[:60]}; give numbers"
        )
    if array.dtype == dtype or array.dtype.kind not in "iufcb" or not _widens(array, dtype):
        return array
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    lost = np.isfinite(array) & ~np.isfinite(converted) if dtypes.is_inexact(dtype) else converted != array
    if np.any(lost):
        raise ProgramError(
            f"feed: {name!r} is {dtype.name}, which cannot hold {array[lost].flat[0]}; give a wider dtype"
        )
    return converted


def _widens(array: np.ndarray, dtype: np.dtype) -> bool:
    """Whether numbers as NumPy makes them of Python ones can go into dtype."""
    if array.dtype.kind == "c":
        return dtypes.is_complex(dtype)
    return dtypes.is_inexact(dtype) or (array.dtype.kind in "iub" and dtypes.is_integer(dtype))
