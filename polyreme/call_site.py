"""Where in the user's program this is: the layer whose call is running, and the innermost line that is the user's.

Read from the interpreter's frames when it is asked, so that calls pay nothing for it.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import linecache
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_LAYER_CALL, _LAYERS = "Layer.__call__", "polyreme.nn.layer"  # nn stands above


@functools.cache
def _packages() -> tuple[str, ...]:
    """Folders whose frames are never the user's."""
    specs = [importlib.util.find_spec(name) for name in ("jax", "malt")]
    return (str(Path(__file__).resolve().parent), *(str(Path(s.origin).parent) for s in specs if s and s.origin))


def user_frame() -> FrameType | None:
    """The innermost frame that belongs to no package of ours, or None."""
    frame: FrameType | None = sys._getframe(1)
    packages = _packages()
    while frame is not None and frame.f_code.co_filename.startswith(packages):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """file:line of the innermost frame that is the user's."""
    frame = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "unknown line"


def where_defined(fn: Callable[..., Any]) -> str:
    """name (file:line) of a function, for messages."""
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__qualname__", type(fn).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def layers_here() -> list[Any]:
    """The layers whose calls this is inside, outermost first."""
    return list(_layers(sys._getframe(1)))[::-1]


def _layers(frame: FrameType | None) -> Iterator[Any]:
    while frame is not None:
        if frame.f_code.co_qualname == _LAYER_CALL and frame.f_globals["__name__"] == _LAYERS:
            yield frame.f_locals["self"]
        frame = frame.f_back


def layer_note() -> str:
    """What is said of an error here: the layer by its path in the model, and the user's line; empty outside of layers.

    A layer that is called by one which does not hold it (an argument, say) is named by its class.
    """
    layers = layers_here()
    if not layers:
        return ""
    names = [name_within(layer, parent) for parent, layer in itertools.pairwise(layers)]
    model, kind = type(layers[0]).__name__, type(layers[-1]).__name__
    inside = f"in layer {'.'.join(names)} ({kind}) of {model}" if names else f"in layer {model}"
    frame = user_frame()
    if frame is None:
        return inside
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{inside}, {user_line()}{f': {source}' if source else ''}"


def name_within(layer: Any, parent: Any) -> str:
    """A layer's dotted name within the layer that calls it; its class where that one does not hold it."""
    # read from their tables: an error is told, whatever named_sublayers, __eq__ or __hash__ of a user's layer do
    waiting, seen = deque([("", parent)]), {id(parent)}
    while waiting:
        prefix, holder = waiting.popleft()
        for name, sublayer in vars(holder).get("_sub_layers", {}).items():
            if sublayer is layer:
                return f"{prefix}{name}"
            if sublayer is not None and id(sublayer) not in seen:
                seen.add(id(sublayer))
                waiting.append((f"{prefix}{name}.", sublayer))
    return type(layer).__name__
