"""The arguments of a traced function that its results depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

_CALLS = ("jit", "pjit", "closed_call", "core_call")


def used_arguments(jaxpr: Any, used: Sequence[bool]) -> list[bool]:
    """Whether each argument of a jaxpr is needed by a result marked in `used`.

    Looks into jitted functions; any other operation is taken to need all of its operands.
    """
    live = {v for v, wanted in zip(jaxpr.outvars, used, strict=True) if wanted and not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        wanted = [v in live for v in eqn.outvars]
        if any(wanted) or eqn.effects:
            live.update(
                v for v, needed in zip(eqn.invars, _operands(eqn, wanted), strict=True)
                if needed and not isinstance(v, Literal)
            )  # fmt: skip
    return [v in live for v in jaxpr.invars]


def _operands(eqn: Any, wanted: list[bool]) -> list[bool]:
    inner = eqn.params.get("jaxpr") if eqn.primitive.name in _CALLS else None
    return [True] * len(eqn.invars) if inner is None else used_arguments(inner.jaxpr, wanted)
