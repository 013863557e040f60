"""Attention over a sequence split in two: heads are dealt out among the inner devices, keys go round the outer ones.

Source: arXiv:2405.07719 (unified sequence parallelism). The plain twin is that of kernels.ring_attention. Shape legend:
b batch, h heads, s sequence, d head dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax import lax

from polyreme.errors import ConfigError
from polyreme.kernels.columns import Columns
from polyreme.kernels.ring_attention import (
    Split,
    check_split,
    over_devices,
    ring_attention,
    ring_column_attention,
)
from polyreme.kernels.zigzag import into_zigzag, out_of_zigzag


def usp_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, split: Split, **options: Any) -> jax.Array:
    """ring_attention, with its options, of q [b, s, h, d], k and v [b, t, n, d] split by `split` -> [b, s, h, d].

    An all-to-all along split.inner gives each device the part of the sequence that it and the others there have, of
    some of the heads; the ring goes round the other axes of the sequence; an all-to-all turns the result back. Raises
    as the ring does, and ConfigError for heads that do not divide.
    """
    _check_heads(q, k, split)
    out = ring_attention(*(_dealt(x, split) for x in (q, k, v)), split=_outer(split), **options)
    return _collected(out, split)


def usp_column_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, columns: Columns, *, split: Split, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """ring_column_attention as usp_attention has it -> out split as q, logsumexp [b, h, s] split alike."""
    _check_heads(q, k, split)
    q, k, v = (_dealt(x, split) for x in (q, k, v))
    out, lse = ring_column_attention(q, k, v, columns, split=_outer(split), **options)
    return _collected(out, split), _collected(lse, split, is_logsumexp=True)


def _outer(split: Split) -> Split:
    """The layout of arrays while they go round the ring."""
    outer = tuple(axis for axis in split.seq if axis not in split.inner)
    return replace(split, seq=outer, heads=split.heads + split.inner, inner=())


def _check_heads(q: jax.Array, k: jax.Array, split: Split) -> None:
    check_split(q, k, split)
    ways = split.ways(split.heads) * split.ways(split.inner)
    if q.ndim == k.ndim == 4 and (q.shape[2] % ways or k.shape[2] % ways):
        raise ConfigError(
            f"usp_attention: {q.shape[2]} query heads and {k.shape[2]} key heads over {ways} devices "
            f"({'+'.join(split.heads + split.inner)}); make them multiples of {ways}, or use the ring"
        )


def _dealt(x: jax.Array, split: Split) -> jax.Array:
    """x [b, s, h, d], split by split, split by _outer of it."""

    def local(x: jax.Array) -> jax.Array:
        x = lax.all_to_all(x, split.inner, split_axis=2, concat_axis=1, tiled=True)
        # the devices' early chunks are a chunk of the outer zigzag, and so are the late ones, last first
        return out_of_zigzag(x, split.ways(split.inner), 1) if split.zigzag else x

    return over_devices(split, local, (split.spec,), _outer(split).spec)(x)


def _collected(x: jax.Array, split: Split, is_logsumexp: bool = False) -> jax.Array:
    """The inverse of _dealt, of [b, s, h, d] or of a logsumexp [b, h, s]."""
    seq, heads = (2, 1) if is_logsumexp else (1, 2)
    outer = _outer(split)
    specs = [s.logsumexp_spec(s.heads, s.seq) if is_logsumexp else s.spec for s in (outer, split)]

    def local(x: jax.Array) -> jax.Array:
        x = into_zigzag(x, split.ways(split.inner), seq) if split.zigzag else x
        return lax.all_to_all(x, split.inner, split_axis=seq, concat_axis=heads, tiled=True)

    return over_devices(split, local, (specs[0],), specs[1])(x)
