"""What to say of a name or module that a Paddle script asks for and polyreme does not have there."""

from __future__ import annotations

import difflib
import functools
import importlib
import re
import sys
from pathlib import Path
from types import TracebackType

_NAMES = Path(__file__).resolve().parent / "paddle_names.txt"
_FLUID = "paddle.fluid"
_MOST = 3  # places worth naming
# how Python, and polyreme's own root, say that a name is missing
_MISSING = (
    re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<module>(?:polyreme|paddle)[\w.]*)'"),
    re.compile(r"module '(?P<module>(?:polyreme|paddle)[\w.]*)' has no attribute '(?P<name>\w+)'"),
    re.compile(r"(?P<module>polyreme) has no name '(?P<name>\w+)'"),
)


@functools.cache
def paddle_names() -> dict[str, frozenset[str]]:
    """Public names of PaddlePaddle by module."""
    lines = (line for line in _NAMES.read_text().splitlines() if not line.startswith("#"))
    return {module: frozenset(names.split()) for module, _, names in (line.partition(":") for line in lines)}


def missing_module(fullname: str) -> str:
    """The message for a module that does not exist.

    >>> missing_module("paddle.moon")
    "polyreme has no module for 'paddle.moon', and PaddlePaddle's public modules have none of that name"
    """
    known = paddle_names()
    if fullname in known:
        count = len(known[fullname])
        return f"polyreme has no module for {fullname!r}, a public module of PaddlePaddle with {count} names"
    parent, _, name = fullname.rpartition(".")
    if name in known.get(parent, ()):
        where = f"in PaddlePaddle {name} is a name in {parent}, import it from there"
        return f"polyreme has no module for {fullname!r}: {where}"
    inner = [module.removeprefix("paddle.") for module in known]
    close = difflib.get_close_matches(fullname.removeprefix("paddle."), inner, n=1, cutoff=0.7)
    hint = f"; did you mean 'paddle.{close[0]}'?" if close else ""
    return f"polyreme has no module for {fullname!r}, and PaddlePaddle's public modules have none of that name{hint}"


def missing_name(module: str, name: str) -> str:
    """What to add to the message for a name that a polyreme module lacks: where PaddlePaddle and polyreme have it.

    >>> missing_name("polyreme.nn", "cross_entropy")
    'PaddlePaddle has cross_entropy in paddle.nn.functional; so does polyreme'
    """
    asked = f"{module.replace('polyreme', 'paddle', 1)}.{name}"
    if asked in paddle_names():
        return f"{asked} is a module of PaddlePaddle; polyreme does not have it"
    found = sorted((m for m, names in paddle_names().items() if name in names), key=lambda m: (m.count("."), m))
    # a Fluid script is told of Fluid, any other one of what is not
    is_fluid = asked.startswith(_FLUID)
    places = [m for m in found if m.startswith(_FLUID) is is_fluid] or found
    if not places:
        return f"PaddlePaddle has no public name {name!r} either"
    here = [place for place in places if _has(place, name)]
    shown = ", ".join((here or places)[:_MOST])
    if here:
        return f"PaddlePaddle has {name} in {shown}; so does polyreme"
    return f"PaddlePaddle has {name} in {shown}; polyreme does not have it"


def _has(place: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(place.replace("paddle", "polyreme", 1)), name)
    except ModuleNotFoundError:
        return False


def explained(error: BaseException) -> None:
    """Add to an error about a missing name where that name is."""
    if not isinstance(error, (ImportError, AttributeError)) or getattr(error, "__notes__", None):
        return
    for pattern in _MISSING:
        found = pattern.search(str(error))
        if found:
            error.add_note(missing_name(found["module"], found["name"]))
            return


def install() -> None:
    """Explain errors that end the process, with the hook that shows them."""
    shown = sys.excepthook
    if getattr(shown, "explains", False):
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explained(error)
        shown(kind, error, trace)

    show.explains = True  # type: ignore[attr-defined]
    sys.excepthook = show
