"""Whole-step capture: to_static, its switches, control flow on Tensors; and, loaded on first use, jit.save and load.

What is loaded is a Layer, so these stand on the floor of layers, in polyreme.export.
"""

import importlib
from typing import Any

from polyreme.errors import nearest
from polyreme.jit.control_flow import case, cond, switch_case, while_loop
from polyreme.jit.convert import ignore_module
from polyreme.jit.to_static import StaticFunction, enable_to_static, not_to_static, to_static
from polyreme.jit.verbosity import set_code_level, set_verbosity

_LATE = {
    "TranslatedLayer": "polyreme.export.translated_layer",
    "load": "polyreme.export.translated_layer",
    "save": "polyreme.export.save",
}

__all__ = [
    "StaticFunction",
    "TranslatedLayer",
    "case",
    "cond",
    "enable_to_static",
    "ignore_module",
    "load",
    "not_to_static",
    "save",
    "set_code_level",
    "set_verbosity",
    "switch_case",
    "to_static",
    "while_loop",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"polyreme.jit has no name {name!r}{nearest(name, __all__)}")
    value = globals()[name] = getattr(importlib.import_module(_LATE[name]), name)
    return value
