"""Other spellings of a call: second names of parameters (dim for axis), sizes given one by one: reshape(x, 2, 3), and
the name of the result as the last argument.

An op with a parameter of that very name keeps it; a second name stands for the first of its choices that
the op has. Looked up only where a call would otherwise be an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from polyreme.keyword_names import check_keywords

F = TypeVar("F", bound=Callable[..., Any])

SECOND_NAMES: dict[str, tuple[str, ...]] = {
    "x": ("input", "arr"),
    "y": ("other",),
    "axis": ("dim",),
    "input": ("x", "arr", "values"),
    "self": ("x",),
    "A": ("x",),
    "x1": ("x",),
    "obj": ("x",),
    "tensors": ("x", "inputs"),
    "elements": ("x",),
    "test_elements": ("test_x",),
    "other": ("y",),
    "B": ("y",),
    "mat2": ("y",),
    "tensor": ("y",),
    "vec2": ("y",),
    "x2": ("y",),
    "exponent": ("y",),
    "dim": ("axis",),
    "keepdims": ("keepdim",),
    "ord": ("p",),
    "dim0": ("axis0",),
    "dim1": ("axis1",),
    "dim2": ("axis2",),
    "start_dim": ("start_axis",),
    "end_dim": ("stop_axis",),
    "size": ("shape",),
    "sizes": ("shape",),
    "dims": ("repeat_times", "perm", "axis"),
    "dtype": ("shape_or_dtype",),
    "split_size_or_sections": ("num_or_sections",),
    "indices_or_sections": ("num_or_indices",),
    "indices": ("num_or_indices",),
    "boundaries": ("sorted_sequence",),
    "source": ("value",),
    "eps": ("epsilon",),
    "n": ("num_rows",),
    "m": ("num_columns",),
    "end": ("stop",),
    "steps": ("num",),
    "recurse": ("include_sublayers",),
    "lambd": ("lam", "threshold"),
    "return_indices": ("return_mask",),
    "dimension": ("axis",),
    "from": ("min",),
    "to": ("max",),
    "modules": ("sublayers",),
    "kernel_size": ("kernel_sizes",),
    "stride": ("strides",),
    "padding": ("paddings",),
    "dilation": ("dilations",),
}
"""Second name of a parameter -> what ops may call it."""

SIZES_ONE_BY_ONE = frozenset({"expand", "flip", "permute", "reshape", "tile", "transpose", "view"})
"""Ops (x, list of integers) that take the integers as arguments of their own too."""


def parameter(name: str, names: Iterable[str]) -> str | None:
    """The one of an op's parameters that a second name stands for, or None."""
    return next((n for n in SECOND_NAMES.get(name, ()) if n in names), None)


def renamed(kwargs: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """kwargs with second names replaced by those of a function's parameters."""
    if all(key in names for key in kwargs):
        return kwargs
    changed = {key if key in names else parameter(key, names) or key: value for key, value in kwargs.items()}
    return changed if len(changed) == len(kwargs) else kwargs  # axis= and dim= at once: Python says so


def takes_second_names(function: F) -> F:
    """Decorates a function or constructor that is no op: it takes second names of its parameters as ops do."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs = renamed(kwargs, names)
            check_keywords(function.__qualname__.removesuffix(".__init__"), function, kwargs)
        return function(*args, **kwargs)

    call.__dict__["checks_keywords"] = True
    return cast("F", call)


def gathered(op_name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """(x, (2, 3)) for (x, 2, 3), where the op takes sizes one by one; args as they are otherwise.

    transpose(x, i, j) swaps two dims, as only a permutation of all dims could mean anything else.
    """
    sizes = args[1:]
    if op_name not in SIZES_ONE_BY_ONE or not all(isinstance(n, int) for n in sizes):
        return args
    if op_name == "transpose" and len(sizes) == 2:
        return args[0], _swap(getattr(args[0], "ndim", 2), *sizes)
    return args[0], sizes


def without_name(args: tuple, most: int) -> tuple:
    """args without what stands behind the first `most` of them: the name of the result, or None for it and for out.

    PaddlePaddle's functions take these last.
    """
    rest = args[most:]
    return args[:most] if len(rest) <= 2 and all(r is None or isinstance(r, str) for r in rest) else args


def _swap(ndim: int, i: int, j: int) -> tuple[int, ...]:
    dims = list(range(ndim))
    if -ndim <= i < ndim and -ndim <= j < ndim:
        dims[i], dims[j] = dims[j], dims[i]
        return tuple(dims)
    return (i, j)  # the op says that there is no such dim
