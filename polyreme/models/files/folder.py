"""Folders of published weights: config.json beside safetensors files, whole or in parts with an index."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from polyreme.core.devices.transfer import in_c_order
from polyreme.errors import CheckpointError
from polyreme.io import safetensors_file
from polyreme.models.files.published import Index, WeightSource

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
_JSON_BYTES = 64 << 20
_BLOCK_BYTES = 16 << 20
# of weights in formats that are not read
_OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file: a WeightSource."""

    file: safetensors_file.Slices
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        return self.file.entries[self.name].shape

    @property
    def dtype(self) -> np.dtype:
        """Its dtype in the file."""
        return self.file.entries[self.name].dtype

    def __str__(self) -> str:
        return f"{self.file.path}: {self.name}"

    def read(self, index: Index) -> np.ndarray:
        """The part that the slices name."""
        return self.file.read(self.name, index)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file. Raises CheckpointError for a file that cannot be read or holds something else."""
    value = _parsed(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return value


def read_json_list(path: Path) -> list[Any]:
    """A JSON list of a file. Raises CheckpointError for a file that cannot be read or holds something else."""
    value = _parsed(path)
    if not isinstance(value, list):
        raise CheckpointError(f"{path}: holds no JSON list")
    return value


def _parsed(path: Path) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return safetensors_file.parse_json(file.read(_JSON_BYTES))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name} in it; give a folder of published weights") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file ({error})") from None


def has_weights(folder: Path) -> bool:
    """Whether there are weights in it, in a format that is read or not."""
    return any((folder / name).exists() for name in (WEIGHTS, INDEX, *_OTHERS))


def open_weights(folder: Path) -> dict[str, WeightSource]:
    """Every tensor of the folder by its name; nothing of them is read yet.

    Raises CheckpointError for a folder without safetensors files, and for an index that does not fit its files.
    """
    if (folder / INDEX).is_file():
        names = read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise CheckpointError(f"{folder / INDEX}: weight_map is no object of file names")
        for file in {*names.values()}:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{folder / INDEX}: {file!r} is not the name of a safetensors file beside it")
        files = {file: safetensors_file.Slices(folder / file) for file in sorted({*names.values()})}
        lost = [name for name, file in names.items() if name not in files[file].entries]
        if lost:
            raise CheckpointError(f"{folder / INDEX}: {lost[0]} is not in {names[lost[0]]}, of {len(lost)} such names")
        return {name: Stored(files[file], name) for name, file in names.items()}
    if not (folder / WEIGHTS).is_file():
        others = [name for name in _OTHERS if (folder / name).exists()]
        what = (
            f"only {', '.join(others)}, which can run code when loaded or is no format of these" if others else "none"
        )
        raise CheckpointError(
            f"{folder}: weights are read from {WEIGHTS} or {INDEX}, and there is {what}; save the model as safetensors"
        )
    whole = safetensors_file.Slices(folder / WEIGHTS)
    return {name: Stored(whole, name) for name in whole.entries}


def check_digests(folder: Path) -> int:
    """How many of its safetensors files have a digest. Raises CheckpointError for one whose data has another."""
    return sum(safetensors_file.Slices(file).check_digest() for file in sorted(folder.glob("*.safetensors")))


def weights_digest(path: Path) -> str:
    """xxh3_128 of the weights of a folder, or of a file, as they lie on disk; 32 hex digits.

    Raises CheckpointError for a folder without safetensors files.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CheckpointError(f"{path}: no safetensors files in it")
    state = xxhash.xxh3_128()
    for file in files:
        with open(file, "rb") as stream:
            for block in iter(functools.partial(stream.read, _BLOCK_BYTES), b""):
                state.update(block)
    return state.hexdigest()


def write_weights(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], max_shard_bytes: int) -> None:
    """Write tensors into safetensors files of at most so many bytes, or one tensor, each, with an index if several.

    As each is full it is written, so that memory holds one of them.
    """
    metadata = {"format": "pt"}
    names: list[list[str]] = []
    part: dict[str, np.ndarray] = {}
    nbytes = total = 0

    def flush() -> None:
        with open(folder / f"part-{len(names)}.tmp", "wb") as file:
            safetensors_file.write(file, part, metadata)
        names.append([*part])
        part.clear()

    for name, array in tensors:
        if part and nbytes + array.nbytes > max_shard_bytes:
            flush()
            nbytes = 0
        part[name] = in_c_order(np.asarray(array))
        nbytes += array.nbytes
        total += array.nbytes
    flush()
    count = len(names)
    files = [WEIGHTS] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for stale in (*folder.glob("model-*-of-*.safetensors"), folder / WEIGHTS, folder / INDEX):
        stale.unlink(missing_ok=True)
    for number, file in enumerate(files):
        (folder / f"part-{number}.tmp").replace(folder / file)
    if count > 1:
        index = {name: file for file, inside in zip(files, names, strict=True) for name in inside}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
