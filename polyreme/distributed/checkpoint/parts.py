"""Saving and restoring with several processes: what they agree on, and how the first collects what the others wrote.

Agreement is by collectives, in the main thread of every process; while files are written in the background
the processes meet in the checkpoint's folder alone, as a collective there would disturb the order of the program's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from polyreme import flags
from polyreme.distributed.checkpoint.folder import write_synced
from polyreme.distributed.checkpoint.manifest import (
    FileEntry,
    TensorEntry,
    check_tiled,
    part_from_json,
    part_to_json,
)
from polyreme.distributed.communication.group import is_initialized
from polyreme.distributed.communication.objects import all_gather_object
from polyreme.errors import CheckpointError, ConfigError

_POLL = 0.02  # seconds between two looks at the folder

Written = tuple[dict[str, TensorEntry], tuple[FileEntry, ...]]


def everyone_says(value: Any) -> list[Any]:
    """The value (plain Python) of every process, by rank; every process must call it. [value] where there is one."""
    if jax.process_count() == 1:
        return [value]
    if not is_initialized():
        raise ConfigError(
            f"checkpoints of {jax.process_count()} processes need polyreme.distributed.init_parallel_env(); call it at "
            "the top of the script"
        )
    found: list[Any] = []
    all_gather_object(found, value)
    return found


def raise_together(error: BaseException | None, what: str) -> None:
    """Raise in every process if one has an error: its own there, CheckpointError naming the rank in the others."""
    texts = everyone_says(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise CheckpointError(f"{what}: rank {rank}: {text}")


def hand_in(folder: Path, written: Written) -> None:
    """Tell the first process what this one wrote."""
    tensors, files = written
    _write_whole(folder / _name(jax.process_index()), part_to_json(tensors, files))


def hand_in_failure(folder: Path, error: BaseException) -> bool:
    """Tell the first process that this one failed; whether it could be told."""
    path = folder / _failed(jax.process_index())
    try:
        path.touch()  # an empty file may still fit on a full disk
        path.write_text(f"{type(error).__name__}: {error}")
    except OSError:
        return path.exists()
    return True


def collect(folder: Path, part: Written, is_abandoned: Callable[[], bool]) -> Written:
    """The parts that all processes wrote, once each has handed in its own; the files of this exchange are deleted.

    Raises CheckpointError if one failed, gives the save up (is_abandoned) or is not done in POLYREME_WATCHDOG_TIMEOUT
    seconds.
    """
    parts = [part]
    end = time.monotonic() + flags.watchdog_timeout()
    for rank in range(1, jax.process_count()):
        path, failed = folder / _name(rank), folder / _failed(rank)
        while not path.exists():
            if failed.exists():
                raise CheckpointError(f"rank {rank} could not write its part: {failed.read_text() or 'disk full'}")
            if is_abandoned():
                raise CheckpointError("the save was given up, as this process ends")
            if time.monotonic() > end:
                raise CheckpointError(
                    f"rank {rank} did not write {path} within {flags.watchdog_timeout():g} s; is {folder} on a disk "
                    "that all processes share?"
                )
            time.sleep(_POLL)
        try:
            parts.append(part_from_json(path.read_bytes()))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path.name}: malformed ({type(error).__name__}: {error})") from error
        path.unlink()
    return merge(parts)


def merge(parts: list[Written]) -> Written:
    """One list of tensors and files from those of each process; a chunk that several wrote is taken from the first."""
    tensors: dict[str, TensorEntry] = {}
    for found, _ in parts:
        for name, tensor in found.items():
            known = tensors.setdefault(name, replace(tensor, chunks=()))
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"{name!r} is {tensor.dtype}{list(tensor.shape)} on one rank and {known.dtype}{list(known.shape)} "
                    "on another; every rank must save the same arrays"
                )
            starts = {chunk.start for chunk in known.chunks}
            new = tuple(chunk for chunk in tensor.chunks if chunk.start not in starts)
            tensors[name] = replace(known, chunks=known.chunks + new)
    try:
        check_tiled(tensors)
    except ValueError as error:
        raise CheckpointError(f"{error}; every rank must save the same arrays") from error
    return tensors, tuple(file for _, files in parts for file in files)


def _name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _failed(rank: int) -> str:
    return f"part-{rank:05d}.failed"


def _write_whole(path: Path, data: bytes) -> None:
    """Written aside and renamed: whoever waits for the file never sees half of it."""
    temporary = path.with_suffix(".tmp")
    write_synced(temporary, data)
    os.replace(temporary, path)
