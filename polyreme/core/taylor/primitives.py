"""The primitives that a jaxpr is made of: their names in order, and those that compute element by element."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core as jex

ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj
convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not or
polygamma population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta name
bitcast_convert_type
"""
"""Primitives whose results at a place follow from their inputs at that place."""
REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
"""Primitives that sum, or the like, over dims."""


def primitives(jaxpr: Any) -> Iterator[str]:
    """Names of the primitives of a jaxpr and of those inside it, in order, each as often as it is there."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from primitives(inner)
