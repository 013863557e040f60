"""Replicas of parameters and optimizer state, compared bit by bit: what one device computes or stores wrongly shows."""

from __future__ import annotations

from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.distributed.checkpoint.parts import everyone_says
from polyreme.errors import NumericsError

_SHOWN = 5  # arrays in a message before it says how many more


def check_replicas(arrays: dict[str, jax.Array], step: int) -> None:
    """Raise NumericsError, naming arrays and devices, if parts that several devices hold are not the same on each.

    With several processes each must call it. A digest of each part is computed where it lies, 4 bytes of it come here.
    """
    pending = [
        (name, _place(part.index, array.shape), str(part.device), _digest(part.data))
        for name, array in arrays.items()
        for shared in [_shared_places(array)]
        for part in (array.addressable_shards if shared else ())
        if _place(part.index, array.shape) in shared
    ]
    rows = [[name, place, device, int(digest)] for name, place, device, digest in pending]
    if jax.process_count() > 1:
        rows = [row for rows_of_one in everyone_says(rows) for row in rows_of_one]
    parts: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for name, place, device, digest in rows:
        parts[name, place][device] = digest
    wrong = [
        _describe(name, place, digests) for (name, place), digests in parts.items() if len({*digests.values()}) > 1
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise NumericsError(
            f"step {step}: replicas of the same values differ: {'; '.join(wrong[:_SHOWN])}{more}. A device computes or "
            "stores wrongly: leave it out, and go on from the last checkpoint"
        )


def _shared_places(array: jax.Array) -> set[str]:
    """Parts of an array that more than one device holds."""
    places = array.sharding.devices_indices_map(array.shape).values()
    counts = Counter(_place(index, array.shape) for index in places)
    return {place for place, count in counts.items() if count > 1}


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """A part as text, such as [0:4, 8:16]."""
    bounds = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


def _describe(name: str, place: str, digests: dict[str, int]) -> str:
    counts = Counter(digests.values())
    (usual, most), *others = counts.most_common()
    if most > sum(count for _, count in others):
        odd = [device for device, digest in digests.items() if digest != usual]
        return f"{name} {place} on {', '.join(odd)}, against {most} others"
    return f"{name} {place} between {', '.join(digests)}"


@jax.jit
def _digest(part: jax.Array) -> jax.Array:
    """uint32, another one if any bit differs: a sum of the words, each times an odd number, modulo 2**32."""
    if jnp.issubdtype(part.dtype, jax.dtypes.prng_key):
        part = jax.random.key_data(part)
    if part.dtype == jnp.bool_:
        part = part.astype(jnp.uint8)
    if jnp.issubdtype(part.dtype, jnp.complexfloating):
        part = jnp.stack([part.real, part.imag])
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(part.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(part, bits).reshape(-1).astype(jnp.uint32)
    odd = jax.lax.iota(jnp.uint32, words.size) * np.uint32(2654435762) + np.uint32(1)
    return jnp.sum(words * odd, dtype=jnp.uint32)
