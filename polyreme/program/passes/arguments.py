"""The arguments of recorded calls by parameter."""

from __future__ import annotations

from typing import Any

from polyreme.fusion import arguments
from polyreme.program.operation import Call


def arguments_of(call: Call) -> dict[str, Any] | None:
    """Every argument of a call by parameter, defaults filled in; None where that cannot be said."""
    return arguments.arguments_of(call.name, call.args, call.kwargs)
