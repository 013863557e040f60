"""Inputs and outputs of a program: names, dtypes, and shapes of which some dims are open."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError, did_you_mean

BATCH = "batch"
"""The symbol of an open leading dim, which all inputs share."""
LEAST = (4, 32)
"""The sizes from which on open dims are, where code does not take smaller ones."""
STEPS = (8, 16, 32, 64)
"""Of what open sizes are multiples, where code does not take all of them: 3 to 6 halvings."""
Sizes = dict[str, dict[int, int]]
"""input -> dim -> size: what a program fixes of the open dims."""

# one scope for all programs: op kernels are cached by attributes, and symbols of two scopes cannot be compared
_scope = jax_export.SymbolicScope()


_MULTIPLE, _SUM = re.compile(r"(\d+)\*\w+"), re.compile(r"\w+ \+ (\d+)")


@dataclass(frozen=True)
class ArraySpec:
    """One input or output. shape: None where the size is open; symbols: for each dim the name of its size, or None."""

    name: str
    dtype: np.dtype
    shape: tuple[int | None, ...]
    symbols: tuple[str | None, ...] = ()

    @property
    def open_dims(self) -> list[int]:
        """The dims whose sizes are open."""
        return [dim for dim, size in enumerate(self.shape) if size is None]

    def __str__(self) -> str:
        sizes = [s if n is None else str(n) for n, s in zip(self.shape, self.symbols or self.shape, strict=True)]
        return f"{self.name} {self.dtype.name}[{', '.join('?' if s is None else str(s) for s in sizes)}]"


def as_specs(values: Sequence[Any], what: str) -> list[ArraySpec]:
    """Specs of InputSpec-like values (shape, dtype, and a name if they have one; None or -1 is an open size).

    Raises ConfigError for two inputs of one name, a dim that is no size, or a value without shape and dtype.
    """
    specs: list[ArraySpec] = []
    for index, spec in enumerate(values):
        if not hasattr(spec, "shape") or not hasattr(spec, "dtype"):
            raise ConfigError(
                f"{what} {index} is {spec!r}; give InputSpecs, Tensors or arrays, which have shape and dtype"
            )
        name = getattr(spec, "name", None) or f"x{index}"
        shape = tuple(_size(dim, f"{what} {name!r}, dim {i}") for i, dim in enumerate(spec.shape))
        if any(name == other.name for other in specs):
            raise ConfigError(f"two of the {what}s are named {name!r}; give each InputSpec a name of its own")
        specs.append(ArraySpec(name, dtypes.as_dtype(spec.dtype), shape))
    return specs


def _size(dim: Any, where: str) -> int | None:
    if dim is None or dim == -1:
        return None
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or dim < 0:
        raise ConfigError(f"{where} is {dim!r}; give a size, or None where it is open")
    return int(dim)


def combinations(specs: Sequence[ArraySpec], buckets: Mapping[str, Mapping[int, Sequence[int]]] | None) -> list[Sizes]:
    """The sizes that each program fixes, one program per combination of buckets; [{}] without buckets.

    Raises ConfigError for a bucket of an input or dim that is not open.
    """
    slots = []
    for name, dims in (buckets or {}).items():
        spec = next((s for s in specs if s.name == name), None)
        if spec is None:
            raise ConfigError(f"buckets: there is no input {name!r}{did_you_mean(name, [s.name for s in specs])}")
        for dim, sizes in dims.items():
            if dim not in spec.open_dims:
                raise ConfigError(f"buckets: dim {dim} of {name!r} is not open in its shape {list(spec.shape)}")
            if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
                raise ConfigError(f"buckets: dim {dim} of {name!r} has sizes {list(sizes)}; give whole numbers from 1")
            slots.append([(name, dim, size) for size in sorted(set(sizes))])
    result = []
    for chosen in itertools.product(*slots):
        fixes: Sizes = {}
        for name, dim, size in chosen:
            fixes.setdefault(name, {})[dim] = size
        result.append(fixes)
    return result


def fixed(specs: Sequence[ArraySpec], sizes: Sizes) -> list[ArraySpec]:
    """The specs with these open dims filled in."""
    return [
        ArraySpec(s.name, s.dtype, tuple(sizes.get(s.name, {}).get(dim, size) for dim, size in enumerate(s.shape)))
        for s in specs
    ]


def symbol_plans(specs: Sequence[ArraySpec]) -> Iterator[list[ArraySpec]]:
    """The same specs with symbols for their open dims, the most useful way first.

    One symbol for all leading dims and one for every other; then one for each position, so that [batch, seq] inputs may
    be added; then one for every dim of every input. Then sizes from a few on, as windows and topk need; at last sizes
    that are multiples, as networks need that halve and double them.
    """
    seen = set()
    some = [_from(low) for low in LEAST] + [_multiple_of(step) for step in STEPS]
    for name in (_own_but_batch, _by_position, _symbol_of, *some):
        plan = [
            ArraySpec(s.name, s.dtype, s.shape, tuple(name(s, d) if n is None else None for d, n in enumerate(s.shape)))
            for s in specs
        ]
        key = tuple(s.symbols for s in plan)
        if key not in seen:
            seen.add(key)
            yield plan


def _symbol_of(spec: ArraySpec, dim: int) -> str:
    return f"{re.sub(r'[^0-9a-zA-Z_]', '_', spec.name)}_{dim}".lstrip("_0123456789") or f"dim_{dim}"


def _own_but_batch(spec: ArraySpec, dim: int) -> str:
    return _symbol_of(spec, dim) if dim else BATCH


def _by_position(spec: ArraySpec, dim: int) -> str:
    return f"dim{dim}" if dim else BATCH


def _multiple_of(step: int) -> Callable[[ArraySpec, int], str]:
    return lambda spec, dim: f"{step}*{_symbol_of(spec, dim)}" if dim else BATCH


def _from(low: int) -> Callable[[ArraySpec, int], str]:
    return lambda spec, dim: f"{_symbol_of(spec, dim)} + {low - 1}" if dim else BATCH


def sizes_of(symbol: str | None) -> tuple[int, int]:
    """(the least size of an input's dim, what its sizes are multiples of), by its symbol.

    (4, 1) for "x_2 + 3", (32, 32) for "32*x_2", (1, 1) for "x_2".
    """
    multiple, sum_of = _MULTIPLE.fullmatch(symbol or ""), _SUM.fullmatch(symbol or "")
    step = int(multiple[1]) if multiple else 1
    return (int(sum_of[1]) + 1 if sum_of else step), step


def aval(spec: ArraySpec) -> jax.ShapeDtypeStruct:
    """The abstract array that jax traces for a spec whose open dims have symbols."""
    sizes = [s if n is None else str(n) for n, s in zip(spec.shape, spec.symbols, strict=True)]
    shape = jax_export.symbolic_shape(", ".join(str(s) for s in sizes), scope=_scope) if spec.shape else ()
    return jax.ShapeDtypeStruct(shape, spec.dtype)


def described(name: str, value: Any) -> ArraySpec:
    """The spec of an output that jax worked out: a size that is an expression of symbols is open."""
    symbolic = [jax_export.is_symbolic_dim(n) for n in value.shape]
    shape = tuple(None if s else int(n) for n, s in zip(value.shape, symbolic, strict=True))
    symbols = tuple(str(n) if s else None for n, s in zip(value.shape, symbolic, strict=True))
    return ArraySpec(name, np.dtype(value.dtype), shape, symbols)
