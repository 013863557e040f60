"""Selective state spaces: what a state, which decays and takes in a sequence, shows at each place.

b batch, s seq, c channels, h heads, p width of a head, n numbers of a state, g groups. A place whose step is 0 neither
decays the state nor is taken in.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from polyreme.core.op import op
from polyreme.errors import ShapeError


@op(amp="fp32", saves=True, method=False)
def selective_scan(
    x: Array, steps: Array, decay: Array, into: Array, out_of: Array, state: Array, chunk: int = 64
) -> tuple[Array, Array]:
    """h_t = exp(steps_t decay) h_{t-1} + steps_t into_t x_t, y_t = out_of_t . h_t -> (y [b, s, c], the last h).

    x, steps [b, s, c], decay [c, n], into, out_of [b, s, n], state [b, c, n], which is h before the first place.
    Computed in chunks of places, of which all states are held at once, by a parallel scan. Source: arXiv:2312.00752,
    equation 2 and section 3.3.2. Raises ShapeError for dims that do not fit.
    """
    b, s, c = x.shape
    n = decay.shape[-1]
    if steps.shape != x.shape or decay.shape != (c, n) or state.shape != (b, c, n):
        raise ShapeError(
            f"selective_scan: x {list(x.shape)}, steps {list(steps.shape)}, decay {list(decay.shape)}, state "
            f"{list(state.shape)}; needs [b, s, c] twice, [c, n] and [b, c, n]"
        )
    if into.shape != (b, s, n) or out_of.shape != (b, s, n):
        raise ShapeError(
            f"selective_scan: into {list(into.shape)} and out_of {list(out_of.shape)}; needs {[b, s, n]} for both"
        )

    def step(before: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        x, steps, into, out_of = parts  # [chunk, b, ...]
        kept = jnp.exp(steps[..., None] * decay)
        taken = (steps * x)[..., None] * into[:, :, None]
        shares, states = lax.associative_scan(_then, (kept, taken))
        states = states + shares * before
        return states[-1], jnp.einsum("sbcn,sbn->sbc", states, out_of)

    last, y = lax.scan(jax.checkpoint(step), state, _in_chunks((x, steps, into, out_of), min(chunk, s)))
    return _whole(y, s), last


@op(amp="fp32", saves=True, method=False)
def head_state_scan(
    x: Array, steps: Array, decay: Array, into: Array, out_of: Array, state: Array, chunk: int = 64
) -> tuple[Array, Array]:
    """selective_scan where all of a head decays alike -> (y [b, s, h, p], the last state).

    x [b, s, h, p], steps [b, s, h], decay [h], into, out_of [b, s, g, n], each of h / g heads, state [b, h, p, n].
    Within a chunk by products of matrices, as attention whose scores decay with the distance. Source:
    arXiv:2405.21060, section 6. Raises ShapeError for dims that do not fit.
    """
    b, s, h, p = x.shape
    g, n = into.shape[2:]
    if steps.shape != (b, s, h) or decay.shape != (h,) or state.shape != (b, h, p, n) or h % g:
        raise ShapeError(
            f"head_state_scan: x {list(x.shape)}, steps {list(steps.shape)}, decay {list(decay.shape)}, state "
            f"{list(state.shape)}, {g} groups; needs [b, s, h, p], [b, s, h], [h], [b, h, p, n], g dividing h"
        )
    if into.shape != (b, s, g, n) or out_of.shape != into.shape:
        raise ShapeError(
            f"head_state_scan: into {list(into.shape)} and out_of {list(out_of.shape)}; needs {[b, s, g, n]} for both"
        )

    def step(before: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        x, steps, into, out_of = parts  # [chunk, b, ...]
        into, out_of = (jnp.repeat(part, h // g, 2) for part in (into, out_of))
        falls = jnp.cumsum(steps * decay, 0)  # [chunk, b, h], the logarithm of what is left of the state
        between = falls[:, None] - falls[None]
        size = x.shape[0]
        is_before = jnp.arange(size)[:, None] >= jnp.arange(size)
        # what lies after a place would grow, and its gradient be no number
        left = jnp.exp(jnp.where(is_before[..., None, None], between, -jnp.inf))
        scores = jnp.einsum("tbhn,sbhn->tsbh", out_of, into) * left * steps
        y = jnp.einsum("tsbh,sbhp->tbhp", scores, x)
        y = y + jnp.einsum("tbhn,bhpn->tbhp", out_of, before) * jnp.exp(falls)[..., None]
        taken = jnp.einsum("sbhp,sbhn->bhpn", x * (steps * jnp.exp(falls[-1] - falls))[..., None], into)
        return before * jnp.exp(falls[-1])[..., None, None] + taken, y

    last, y = lax.scan(jax.checkpoint(step), state, _in_chunks((x, steps, into, out_of), min(chunk, s)))
    return _whole(y, s), last


def _then(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """What two stretches of places do to a state, one after the other: the share of it that stays, what is taken in."""
    return first[0] * second[0], first[1] * second[0] + second[1]


def _in_chunks(parts: tuple[Array, ...], size: int) -> tuple[Any, ...]:
    """[b, s, ...] as [chunks, size, b, ...], filled up by places whose step is 0."""
    missing = -parts[0].shape[1] % size

    def cut(part: Array) -> Array:
        padded = jnp.pad(part, [(0, 0), (0, missing), *[(0, 0)] * (part.ndim - 2)])
        return jnp.moveaxis(padded, 1, 0).reshape(-1, size, part.shape[0], *part.shape[2:])

    return tuple(map(cut, parts))


def _whole(y: Array, s: int) -> Array:
    """[chunks, size, b, ...] as [b, s, ...]."""
    return jnp.moveaxis(y.reshape(-1, *y.shape[2:])[:s], 0, 1)
