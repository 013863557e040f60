"""Helpers of paddle.framework.io and paddle.io.reader that trainers call themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ProgramError
from polyreme.io import serialization
from polyreme.io.sent_objects import as_imported
from polyreme.io.serialization import SavedRecord
from polyreme.program.scope import global_scope


def load(path: Any, **configs: Any) -> Any:
    """polyreme.load, with objects of settings as trainers saved them, where they have imported the class."""
    return _with_classes(serialization.load(path, **configs))


def _with_classes(value: Any) -> Any:
    if isinstance(value, SavedRecord):
        for name, attribute in vars(value).items():
            setattr(value, name, _with_classes(attribute))
        return as_imported(value)
    if isinstance(value, dict):
        for key, entry in value.items():
            value[key] = _with_classes(entry)
        return value
    if type(value) in (list, tuple):
        return type(value)(map(_with_classes, value))
    return value


def _to_LodTensor(ndarray: Any) -> Tensor:
    return to_tensor(ndarray)


def _transformed_from_lodtensor(obj: Any) -> Any:
    """obj itself: what is loaded are Tensors."""
    return obj


def _parse_every_object(obj: Any, condition_func: Callable[[Any], bool], convert_func: Callable[[Any], Any]) -> Any:
    """obj with the values of its lists, tuples and dicts that meet a condition converted."""
    if condition_func(obj):
        return convert_func(obj)
    if isinstance(obj, dict):
        return type(obj)((k, _parse_every_object(v, condition_func, convert_func)) for k, v in obj.items())
    if isinstance(obj, (list, tuple)):
        return type(obj)(_parse_every_object(v, condition_func, convert_func) for v in obj)
    return obj


def use_pinned_memory(*args: bool) -> bool | None:
    """Asked without an argument, False: transfers manage their own pinned memory. One that is given changes nothing."""
    return None if args else False


def _fetch_var(name: str, scope: Any = None, return_numpy: bool = True) -> Any:
    """The value of a persistable Variable of a scope, the global one unless given; ProgramError if there is none."""
    tensor = (global_scope() if scope is None else scope).find_var(name)
    if tensor is None:
        raise ProgramError(f"_fetch_var: the scope has no variable {name!r}; run the startup Program first")
    return np.asarray(tensor.get_tensor()) if return_numpy else tensor.get_tensor()


def as_numpy(tensor: Any, copy: bool = False) -> Any:
    """Tensors as arrays of NumPy, in a list, tuple or dict the same; None stays None."""
    if isinstance(tensor, (list, tuple)):
        return [as_numpy(t, copy) for t in tensor]
    if isinstance(tensor, dict):
        return {k: as_numpy(t, copy) for k, t in tensor.items()}
    if tensor is None:
        return None
    return np.array(tensor) if copy else np.asarray(tensor)
