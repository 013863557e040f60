"""How kernels are listed by name, and how a setting that means nothing here is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyreme.distributed.communication.group import groups
from polyreme.errors import ConfigError

Kernels = dict[str, Callable[..., Any]]


def listing(kernels: Kernels) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that lists a function `_name` under `name`."""

    def listed(function: Callable[..., Any]) -> Callable[..., Any]:
        kernels[function.__name__[1:]] = function
        return function

    return listed


def refuse(kernel: str, **settings: Any) -> None:
    """Raise ConfigError for a setting that would change the result and has no meaning here."""
    for name, value in settings.items():
        if not (value is None or value is False or (isinstance(value, (str, int, list, tuple)) and not value)):
            shown = value if isinstance(value, (bool, str, int)) else f"a {type(value).__name__}"
            raise ConfigError(f"_C_ops.{kernel}: {name}={shown!r} has no meaning in polyreme; leave it out")


def group_of(ring_id: int) -> Any:
    """The group of a ring; None, all, for an id that no group has."""
    return groups.by_id.get(ring_id)
