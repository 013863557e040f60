"""What is installed, and what is on its way out: try_import, require_version, deprecated."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from polyreme import version
from polyreme.errors import ConfigError

_VERSION = re.compile(r"\d+(\.\d+){0,3}")
Fn = TypeVar("Fn", bound=Callable[..., Any])


def try_import(module_name: str, err_msg: str | None = None) -> Any:
    """The module of this name; ImportError, with err_msg or how to install it, if it is not there."""
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        hint = f"{module_name} is needed and cannot be imported ({error}); pip install {module_name.partition('.')[0]}"
        raise ImportError(err_msg or hint) from error


def require_version(min_version: str, max_version: str | None = None) -> None:
    """Raise ConfigError unless polyreme's own version lies from min_version to max_version, both included.

    Versions are up to four numbers with dots between. Raises TypeError or ConfigError for what is no version.
    """
    have = version.full_version
    low, high = _numbers("min_version", min_version), _numbers("max_version", max_version)
    own = _numbers("version", (_VERSION.match(have) or [""])[0]) or ()
    if (low is not None and own < low) or (high is not None and own > high):
        wanted = f"at least {min_version}" + (f" and at most {max_version}" if high is not None else "")
        raise ConfigError(
            f"require_version: this is polyreme {have}, {wanted} is asked for (polyreme counts its own versions; its "
            "API is that of PaddlePaddle 3)"
        )


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None and name == "max_version":
        return None
    if not isinstance(text, str):
        raise TypeError(f"require_version: {name} is {type(text).__name__}, needs a text such as '0.1.0'")
    if not _VERSION.fullmatch(text):
        raise ConfigError(f"require_version: {name}={text!r} is no version; write it as '0.1.0'")
    numbers = tuple(int(n) for n in text.split("."))
    return numbers + (0,) * (4 - len(numbers))


def deprecated(update_to: str = "", since: str = "", reason: str = "", level: int = 0) -> Callable[[Fn], Fn]:
    """Mark a function or class as on its way out: said in its docstring and, by level, when it is called.

    level: 0 nothing, 1 a DeprecationWarning, 2 a RuntimeError. Raises ConfigError for another one.

    >>> @deprecated(update_to="polyreme.add", since="0.1", level=2)
    ... def plus(x, y):
    ...     "Their sum."
    >>> plus.__doc__.splitlines()[0]
    'Deprecated since 0.1; use polyreme.add.'
    """
    if level not in (0, 1, 2):
        raise ConfigError(f"deprecated: level={level!r}; give 0 (say nothing), 1 (warn) or 2 (refuse)")
    said = "Deprecated" + (f" since {since}" if since else "") + (f"; use {update_to}" if update_to else "") + "."
    said += f" {reason}" if reason else ""

    def mark(target: Fn) -> Fn:
        message = f"{target.__module__}.{target.__qualname__}: {said}"

        def tell() -> None:
            if level == 2:
                raise RuntimeError(message)
            if level == 1:
                warnings.warn(message, DeprecationWarning, stacklevel=3)

        doc = f"{said}\n\n{inspect.getdoc(target) or ''}".rstrip()
        if inspect.isclass(target):
            start: Any = target.__init__

            @functools.wraps(start)
            def init(self: Any, *args: Any, **kwargs: Any) -> None:
                tell()
                start(self, *args, **kwargs)

            target.__init__ = init  # type: ignore[misc]
            target.__doc__ = doc
            return target  # type: ignore[return-value]

        @functools.wraps(target)
        def run(*args: Any, **kwargs: Any) -> Any:
            tell()
            return target(*args, **kwargs)

        run.__doc__ = doc
        return run  # type: ignore[return-value]

    return mark
