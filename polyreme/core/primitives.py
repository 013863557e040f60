"""The primitives that a jaxpr is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core as jex


def primitives(jaxpr: Any) -> Iterator[str]:
    """Names of the primitives of a jaxpr and of those inside it, in order, each as often as it is there."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from primitives(inner)
