"""A pure function exported as StableHLO for several platforms, with open sizes where its code allows."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import malt
import numpy as np
from jax import export as jax_export

from polyreme.core import dtype as dtypes
from polyreme.core import layout
from polyreme.errors import CaptureError, ConfigError, HostValueError
from polyreme.export.spec import BATCH, ArraySpec, aval, described, sizes_of, symbol_plans
from polyreme.jit import host_calls
from polyreme.kernels import select

_log = logging.getLogger("polyreme.export")

Call = Callable[[dict[str, Any], list[Any]], Sequence[Any]]
PLATFORMS = ("cpu", "cuda", "tpu")
_KNOWN = (*PLATFORMS, "rocm")
# what code that branches on a size, or counts with one, raises when the size is a symbol
OPEN_SIZE_ERRORS = (
    jax.errors.InconclusiveDimensionOperation, TypeError, ValueError, IndexError, NotImplementedError, CaptureError,
)  # fmt: skip
# a size for dims that are tried out one at a time
_TRIAL = 4
_HERE = Path(__file__).resolve().parent.parent
_OPS = tuple(f"{_HERE / package}{os.sep}" for package in ("core", "eager", "kernels", "nn", "ops"))
_OTHERS = (*(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (jax, malt)), contextlib.__file__)
_ENGINE = (*_OPS, *(f"{_HERE / package}{os.sep}" for package in ("export", "jit")), *_OTHERS)
"""Files whose lines say nothing about a model."""


def check_platforms(platforms: Sequence[str]) -> tuple[str, ...]:
    """The platforms a program is lowered for, checked; "gpu" is cuda."""
    found = tuple(dict.fromkeys("cuda" if p == "gpu" else p for p in platforms))
    if isinstance(platforms, str) or not found or any(p not in _KNOWN for p in found):
        raise ConfigError(f"platforms={platforms!r}: give some of {', '.join(_KNOWN)} as a sequence")
    return found


def export(
    call: Call, state: Mapping[str, Any], specs: Sequence[ArraySpec], outputs: Sequence[str], platforms: tuple[str, ...]
) -> tuple[jax_export.Exported, list[ArraySpec], list[ArraySpec]]:
    """Export a function: (the exported program, its inputs, its outputs), both with their symbols.

    state: name -> array as it is stored (stored_aval). Raises CaptureError, naming the input and the dim, where the
    code needs a size that is left open.
    """
    first: Exception | None = None
    for plan in symbol_plans(specs):
        if first is not None and _limits(plan) and not _is_of_an_op(first):
            break  # code that asks for a size itself would have but one of its branches
        try:
            exported = _export(call, state, plan, platforms)
        except OPEN_SIZE_ERRORS as error:
            first = first or error
            continue
        if len(exported.out_avals) != len(outputs):
            raise ConfigError(f"export: the function gave {len(exported.out_avals)} arrays for outputs {list(outputs)}")
        made = [described(name, out) for name, out in zip(outputs, exported.out_avals, strict=True)]
        _say_limits(plan, first)
        return exported, plan, made
    if first is None or not any(s.open_dims for s in specs):
        raise first or ConfigError("export: nothing to export")
    raise _refuse(call, state, specs, platforms, first) from first


def _limits(plan: Sequence[ArraySpec]) -> dict[tuple[str, int], tuple[int, int]]:
    """(input, dim) -> the least size and what sizes are multiples of, for open dims that do not take every size."""
    sizes = {(s.name, d): sizes_of(symbol) for s in plan for d, symbol in enumerate(s.symbols)}
    return {place: limit for place, limit in sizes.items() if limit > (1, 1)}


def _is_of_an_op(error: Exception) -> bool:
    """Whether an operation did not take an open size; not code that compares one, nor one that wants a value."""
    files = [f.f_code.co_filename for f, _ in traceback.walk_tb(error.__traceback__)]
    own = [file for file in files if not file.startswith(_OTHERS)]
    return not isinstance(error, CaptureError) and bool(own) and own[-1].startswith(_OPS)


def _say_limits(plan: Sequence[ArraySpec], reason: Exception | None) -> None:
    limits = _limits(plan)
    if limits and reason is not None:
        dims = ", ".join(f"dim {dim} of {name!r}" for name, dim in limits)
        least, step = next(iter(limits.values()))
        _log.warning(
            "export: %s takes %s, not every size: %s needs that (%s)", dims,
            f"multiples of {step}" if step > 1 else f"sizes from {least} on", _line_of(reason), _first_line(reason),
        )  # fmt: skip


def _export(
    call: Call, state: Mapping[str, Any], specs: Sequence[ArraySpec], platforms: tuple[str, ...]
) -> jax_export.Exported:
    def main(state: dict[str, jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        return list(call({name: from_stored(array, dtype[name]) for name, array in state.items()}, inputs))

    dtype = {name: np.dtype(array.dtype) for name, array in state.items()}
    with lowering_for(platforms):
        stored = {name: stored_aval(array) for name, array in state.items()}
        return jax_export.export(jax.jit(main), platforms=platforms)(stored, [aval(s) for s in specs])


@contextlib.contextmanager
def lowering_for(platforms: tuple[str, ...]) -> Iterator[None]:
    """What is traced inside runs on one device of any of these platforms, whatever plan is in force."""
    default = jax.default_backend()
    # a program for one platform, the one at hand, may have the kernels made for it
    here = platforms == ("cuda" if default == "gpu" else default,)
    with select.portable(not here), layout.using(None), host_calls.left_out():
        yield


def _refuse(
    call: Call, state: Mapping[str, Any], specs: Sequence[ArraySpec], platforms: tuple[str, ...], first: Exception
) -> Exception:
    """The error for sizes that cannot stay open: says which, by leaving one open at a time. A value that code wants on
    the host whatever the sizes are is no matter of theirs: then the error is that one."""
    if isinstance(first, HostValueError):
        try:
            _export(call, state, [_tried(spec, ()) for spec in specs], platforms)
        except HostValueError as error:
            return error
        except OPEN_SIZE_ERRORS:  # the sizes that were tried do not fit
            pass
    groups: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for spec in specs:
        for dim in spec.open_dims:
            groups.setdefault((BATCH, 0) if dim == 0 else (spec.name, dim), []).append((spec.name, dim))
    guilty: list[tuple[str, int]] = []
    reason = first
    for places in groups.values():
        trial = [_tried(spec, places) for spec in specs]
        try:
            _export(call, state, next(symbol_plans(trial)), platforms)
        except OPEN_SIZE_ERRORS as error:
            reason = error if not guilty else first
            guilty.append(places[0])
    # none of them alone: what fails is how they meet
    (name, dim), *others = guilty[::-1] or [next(iter(groups.values()))[-1]]
    more = "".join(f" (nor dim {d} of {n!r})" for n, d in others)
    return CaptureError(
        f"export: dim {dim} of input {name!r} cannot be left open{more}: {_line_of(reason)} needs its size "
        f"({_first_line(reason)}); give a size in its InputSpec, or buckets={{{name!r}: {{{dim}: [32, 64]}}}} for one "
        "program per size"
    )


def _tried(spec: ArraySpec, left_open: Sequence[tuple[str, int]]) -> ArraySpec:
    """The spec with its open dims given a size, all but these."""
    sizes = [_TRIAL if n is None and (spec.name, d) not in left_open else n for d, n in enumerate(spec.shape)]
    return ArraySpec(spec.name, spec.dtype, tuple(sizes))


def _line_of(error: Exception) -> str:
    """The line of the model at which an error arose: the innermost one that is not the engine's."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [f"{f.f_code.co_filename}:{line}" for f, line in frames if not f.f_code.co_filename.startswith(_ENGINE)]
    return f"the code at {lines[-1]}" if lines else "the code"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300].rstrip(".") if text else type(error).__name__


def stored_aval(array: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a state array in the file: a complex one is [..., 2] of its real and imaginary parts."""
    dtype = np.dtype(array.dtype)
    if dtypes.is_complex(dtype):
        return jax.ShapeDtypeStruct((*array.shape, 2), np.finfo(dtype).dtype)
    return jax.ShapeDtypeStruct(tuple(array.shape), dtype)


def from_stored(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """The state array of a stored one; traced."""
    return jax.lax.complex(array[..., 0], array[..., 1]) if dtypes.is_complex(dtype) else array
