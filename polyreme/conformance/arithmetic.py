"""What a device says of its arithmetic, which of a row's results it concerns, and what it is measured to be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.conformance.case import Case, flat, tensors
from polyreme.core import rng
from polyreme.core.engine import plugins

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"})
"""Primitives whose float32 factors a device may round first."""
FACTOR_BITS = {"cpu": 24, "gpu": 11, "tpu": 8}
"""Significant bits of a factor of a float32 product: float32 itself, tf32, bfloat16."""


def factor_bits(name: str) -> int:
    """Of a device's platform: as its plugin declares, else as XLA's default precision has it."""
    plugin = plugins.registered().get(name)
    return plugin.factor_bits if plugin else FACTOR_BITS.get(name, 24)


def for_device(case: Case, bits: int) -> Case:
    """The row with the tolerance of a device that rounds factors to so many bits, if the row has products."""
    if bits >= FACTOR_BITS["cpu"] or not _has_products(case):
        return case
    return replace(case, factor_eps=2.0 ** (1 - bits))


def _has_products(case: Case) -> bool:
    if case.host:  # it cannot be traced
        return True
    args, run = tensors(case.arguments()), case.call if case.no_grad else case.call_with_gradients

    def call() -> list[Any]:
        return [t._array for t in flat(run(args))]

    try:
        return any(name in PRODUCTS for name in _primitives(jax.make_jaxpr(call)().jaxpr))
    finally:
        rng.seed(7)  # tracing has left its own value in the generator


def _primitives(jaxpr: Any) -> Iterator[str]:
    """Names of all primitives of a jaxpr, of those inside others too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner)


def measured_bits() -> float:
    """Significant bits that the factors of a float32 product on the default device keep: less 1 where they are cut off.

    Multiplied by the unit matrix, a factor comes back as it was rounded, whatever the order of sums.
    """
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    got = np.asarray(jax.jit(jnp.matmul)(x, np.eye(256, dtype=np.float32)))
    error = float(np.max(np.abs(got - x) / np.abs(x)))
    return float(-np.log2(max(error, 2.0**-24)))
