"""Use of the devices' memory by part, and the error for an allocation that fails.

Who keeps arrays says which of the process's objects do, by `part`; that is asked for only when an
allocation has failed, so that nothing is counted while all goes well.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from polyreme.call_site import where_defined
from polyreme.core.devices.abstract import Abstract
from polyreme.errors import DeviceMemoryError, is_out_of_memory
from polyreme.units import bytes_text

PARTS = ("parameters", "gradients", "optimizer state", "activations")
"""In the order that an array of several is counted by; what is in none of them is "other"."""
Find = Callable[[Any], Iterable[Any]]
_finders: dict[str, dict[type, Find]] = {}
_ASKED = re.compile(r"(?:allocating|allocate) (\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|TiB|[KMGT]?B)?")
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "b": 1}


class _LatestProgram:
    """program: a weak reference to the captured program with state that was called last, which may fail later, where
    its values are waited for; its fn is what it was made of."""

    __slots__ = ("program",)

    def __init__(self) -> None:
        self.program: Callable[[], Any] = lambda: None


running: _LatestProgram = _LatestProgram()


class Saving(NamedTuple):
    """A change that would save memory; nbytes: a device, predicted."""

    what: str
    nbytes: int


def part(name: str, kind: type) -> Callable[[Find], Find]:
    """Declare that objects of a class keep arrays of one of PARTS: those that the function gives of one. What is
    declared of a subclass goes before."""
    assert name in PARTS

    def declare(find: Find) -> Find:
        _finders.setdefault(name, {})[kind] = find
        return find

    return declare


def by_part(failed: int = 0, donated: Sequence[jax.Array] = ()) -> tuple[Any, dict[str, int]]:
    """The fullest device, and the bytes on it of each part that there is, "other" last; None without any array.

    failed: bytes that could not be allocated; an array of so many is the one that they were for, and is not there.
    donated: arrays that the failed program took for its own, which are deleted and lay there until it failed.
    """
    owner: dict[int, str] = {}
    keepers = _keepers()
    for name in PARTS:
        for one, find in keepers[name]:
            with contextlib.suppress(AttributeError):  # it is being made
                for array in find(one):
                    owner.setdefault(id(array), name)
    # by device and part; the arrays themselves are what jax knows to be alive
    sizes: dict[Any, dict[str, int]] = {}
    for array in (*(a for a in jax.live_arrays() if not a.is_deleted()), *donated):
        for device, nbytes in _bytes_of(array):
            if failed and nbytes == failed:
                continue
            parts = sizes.setdefault(device, dict.fromkeys((*PARTS, "other"), 0))
            parts[owner.get(id(array), "other")] += nbytes
    if not sizes:
        return None, {}
    device = max(sizes, key=lambda d: sum(sizes[d].values()))
    return device, {name: nbytes for name, nbytes in sizes[device].items() if nbytes}


def _keepers() -> dict[str, list[tuple[Any, Find]]]:
    """The objects of this process that hold arrays, by part, each with the function that lists its arrays."""
    keepers: dict[str, list[tuple[Any, Find]]] = {name: [] for name in PARTS}
    finds_of: dict[int, list[tuple[str, Find]]] = {}
    for one in gc.get_objects():
        # by type(): a proxy asked for its __class__ may raise, a weak one whose object is gone, say
        kind = type(one)
        finds = finds_of.get(id(kind))
        if finds is None:
            finds = finds_of[id(kind)] = list(_finds(kind))
        for name, find in finds:
            keepers[name].append((one, find))
    return keepers


def _finds(kind: type) -> Iterator[tuple[str, Find]]:
    for name in PARTS:
        finders = _finders.get(name, {})
        find = next((finders[base] for base in kind.__mro__ if base in finders), None)
        if find is not None:
            yield name, find


def _bytes_of(array: jax.Array) -> Iterator[tuple[Any, int]]:
    if isinstance(array, Abstract):
        return
    nbytes = array.dtype.itemsize
    for size in array.sharding.shard_shape(array.shape):
        nbytes *= size
    for device in array.sharding.addressable_devices:
        yield device, nbytes


def raise_explained(
    error: BaseException, what: str, *, waited: bool = False, donated: Sequence[jax.Array] = ()
) -> NoReturn:
    """Raise an error of XLA again: as a DeviceMemoryError if an allocation failed in `what`, else as it is. waited:
    what failed had been started before; the captured program that was called last is named. donated: as for by_part.
    """
    if not is_out_of_memory(error):
        raise error
    program = running.program() if waited else None
    if program is not None:
        what += f", after the call of {where_defined(program.fn)}"
    asked = _requested_bytes(str(error))
    device, parts = by_part(asked, donated)
    lines = [f"out of memory in {what}: {bytes_text(asked)} more asked for" if asked else f"out of memory in {what}"]
    if device is not None:
        total = f"{bytes_text(sum(parts.values()))}{_of_limit(device)}"
        shares = ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in parts.items())
        lines.append(f"On {device} lie {total}: {shares}")
    found, advice = changes(asked, parts), ""
    if found:
        numbered = (f"{i}) {c.what}: about {bytes_text(c.nbytes)} less" for i, c in enumerate(found, 1))
        advice = f"The cheapest changes: {'; '.join(numbered)}"
    raise DeviceMemoryError(". ".join(lines), asked, parts, advice) from error


def changes(asked: int, parts: dict[str, int], most: int = 3) -> list[Saving]:
    """Changes that would help where activations, gradients and state are this large, the least loss of speed first.

    Predicted from what is there: what a step still has to allocate counts as activations.
    """
    waiting = parts.get("activations", 0) + asked
    state, count = parts.get("optimizer state", 0), jax.device_count()
    trains = bool(parts.get("activations") or state or parts.get("gradients"))
    choices = [
        Saving("amp.auto_cast(dtype='bfloat16'), activations in 16 bits", waiting // 2),
        Saving("half the batch, twice as many microbatches or accumulated steps", waiting // 2),
        Saving(f"sharding_degree={count} (stage 1), the optimizer's state split", state * (count - 1) // count),
        Saving("recompute of each block (fleet.utils.recompute), a third more time", waiting * 3 // 4 if trains else 0),
        Saving("the optimizer's state in host memory (offload)", state),
    ]
    return [choice for choice in choices if choice.nbytes][:most]


def _requested_bytes(message: str) -> int:
    """Bytes that a message of XLA says were asked for, 0 if it does not."""
    found = _ASKED.search(message)
    if found is None:
        return 0
    return int(float(found[1]) * _UNITS[(found[2] or "B")[0]])


def _of_limit(device: Any) -> str:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return f" of {bytes_text(limit)}" if limit else ""
