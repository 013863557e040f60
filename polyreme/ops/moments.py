"""The statistics that norms divide by, for callers that want them beside the norm."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from polyreme.core.dtype import floating
from polyreme.core.op import op
from polyreme.ops.activation import wide


def _rows(x: Array, dims: int) -> Array:
    rows = wide(floating(x)).reshape(*x.shape[: x.ndim - dims], -1)
    return rows.reshape(-1, rows.shape[-1])


@op(amp="fp32", method=False)
def layer_norm_moments(x: Array, dims: int = 1, epsilon: float = 1e-5) -> tuple[Array, Array]:
    """Mean and 1 / sqrt(variance + epsilon) over the last `dims` dims, [rows] each, in at least float32."""
    rows = _rows(x, dims)
    mean = rows.mean(-1)
    return mean, lax.rsqrt(jnp.square(rows - mean[:, None]).mean(-1) + epsilon)


@op(amp="fp32", method=False)
def rms_norm_moments(x: Array, dims: int = 1, epsilon: float = 1e-5) -> Array:
    """1 / sqrt(mean(x^2) + epsilon) over the last `dims` dims, [rows], in at least float32."""
    return lax.rsqrt(jnp.square(_rows(x, dims)).mean(-1) + epsilon)


ALIASES: dict[str, str] = {}
