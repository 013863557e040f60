"""Replicas of parameters and optimizer state, compared bit by bit: what one device computes or stores wrongly shows."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.core.meshes import HOST
from polyreme.distributed.checkpoint.parts import everyone_says
from polyreme.errors import NumericsError

_SHOWN = 5  # arrays in a message before it says how many more


def check_replicas(arrays: Mapping[str, Any], step: int) -> None:
    """Raise NumericsError, naming arrays and devices, if parts that several devices hold are not the same on each.

    What is no array, such as state on disk, has no replicas. With several processes each must call it. A digest of each
    part is computed where it lies, 4 bytes of it come here.
    """
    arrays = {name: array for name, array in arrays.items() if isinstance(array, jax.Array)}
    shared = {name: places for name, array in arrays.items() if (places := _shared_places(array))}
    pending = {name: _digests([part.data for part in arrays[name].addressable_shards]) for name in shared}
    rows = [
        [name, place, str(part.device), int(digest)]
        for name, digests in pending.items()
        for part, digest in zip(arrays[name].addressable_shards, np.asarray(digests), strict=True)
        if (place := _place(part.index, arrays[name].shape)) in shared[name]
    ]
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


def _digests(parts: list[jax.Array]) -> jax.Array | np.ndarray:
    """uint32 [parts], of parts of one shape that lie on a device each, or in the host's memory near it."""
    shape = parts[0].shape
    mesh = Mesh(np.array([part.device for part in parts]), ("part",))
    spec = PartitionSpec("part") if shape else PartitionSpec()
    sharding = NamedSharding(mesh, spec, memory_kind=parts[0].sharding.memory_kind)
    # the parts as one array, so that a shape has one program for all devices, not one for each
    together = (len(parts) * shape[0], *shape[1:]) if shape else ()
    array = jax.make_array_from_single_device_arrays(together, sharding, parts)
    if sharding.memory_kind == HOST:
        # one array at a time: a device has no room for all that is kept off it
        return np.asarray(_program(mesh, spec)(jax.device_put(array, sharding.with_memory_kind("device"))))
    return _program(mesh, spec)(array)


@functools.cache
def _program(mesh: Mesh, spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
    """An array whose parts lie on mesh -> the digest of each part."""
    over_parts = jax.shard_map(
        lambda part: _digest(part)[None], mesh=mesh, in_specs=spec, out_specs=PartitionSpec("part"), check_vma=False
    )
    return jax.jit(over_parts)


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
