"""State dicts to a folder and back, whatever mesh and placements the Tensors have on either side.

The folder is a CheckpointStore's: a step of it for each unique_id, with data in safetensors files and a
manifest that holds a digest of every shard. Nothing is pickled.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.distributed.checkpoint.conversion import ConversionRules
from polyreme.distributed.checkpoint.match import mismatches, report
from polyreme.distributed.checkpoint.sharded_weight import ShardedWeight
from polyreme.distributed.checkpoint.shards import ShardBox
from polyreme.distributed.checkpoint.store import CheckpointStore, CheckpointWarning
from polyreme.distributed.communication.group import Group
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, CheckpointError, ConfigError, did_you_mean
from polyreme.io.safetensors_file import Slices

COMM_METHODS = ("send_recv", "broadcast", "multi_group_broadcast", "grouped_send_recv", "parallel_broadcast")
_PLAIN = (bool, int, float, str, type(None), list)


class _Background:
    """Stores whose save is under way, by folder: one writer a folder, whose error the next call there raises."""

    def __init__(self) -> None:
        self.stores: dict[Path, CheckpointStore] = {}

    def finish(self, path: Path | None = None) -> None:
        """Wait for the save under way in a folder, or in all of them."""
        for each in [path] if path is not None else list(self.stores):
            store = self.stores.pop(each, None)
            if store is not None:
                store.close()


_background = _Background()
atexit.register(_background.finish)


def save_state_dict(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    process_group: Group | None = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool = False,
    safetensors: bool = False,
    save_replicas: bool = False,
) -> None:
    """Write a state dict (dicts may be nested; Tensors, ShardedWeights and plain JSON values) into the folder path.

    unique_id: one of the states a folder may hold; by default the largest that is there, which is replaced, or 0.
    async_save: returns once the Tensors are copied to the host; an error of the writing is raised by the next call for
    that folder. Every shard is written once, whatever number of devices hold it; files are safetensors either way, so
    safetensors changes nothing. With several processes all call it, and the disk is shared.

    Raises ConfigError for a process_group that is not everyone, a coordinator_rank that is none, save_replicas (copies
    are not kept: every shard has a digest) and values of other kinds; CheckpointError as CheckpointStore.save does.
    """
    _check_group("save_state_dict", process_group, coordinator_rank)
    if save_replicas:
        raise ConfigError("save_state_dict: save_replicas=True; a shard is written once, with a digest: leave it out")
    flat = dict(_flat(state_dict, "save_state_dict"))
    arrays = {key: _save(key, value) for key, (_, value) in flat.items() if not isinstance(value, _PLAIN)}
    plain = {key: value for key, (_, value) in flat.items() if isinstance(value, _PLAIN)}
    meta = {"flat_mapping": {key: list(names) for key, (names, _) in flat.items()}, "values": plain}
    where = Path(path).resolve()
    _background.finish(where)
    store = CheckpointStore(where, files="safetensors")
    try:
        number = (store.latest_step() or 0) if unique_id is None else _check_id("save_state_dict", unique_id)
        store.save(number, arrays, meta, overwrite="alone", blocking=not async_save)
    except BaseException:
        store.close()
        raise
    if async_save:
        _background.stores[where] = store
    else:
        store.close()


def load_state_dict(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    process_group: Group | None = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    offload: bool = False,
    mw_name_compatibility: bool = True,
    aoa_config: Mapping[str, Any] | None = None,
    safetensors: bool = False,
    worker_groups: Any = None,
    comm_method: str = "broadcast",
) -> None:
    """Fill the Tensors of state_dict in place from the folder path, each laid out as it is now.

    unique_id: by default the largest there. Plain values are replaced in their dicts. Warns (CheckpointWarning) of keys
    that the checkpoint lacks, which stay as they are; what it has beyond state_dict is left alone. Each device's box is
    read from the files on the host, so there is nothing to communicate: comm_method is checked, and it, offload and
    mw_name_compatibility (an optimizer's names are the same in every mode) change nothing.

    aoa_config: rules by which Tensors are made of those of a checkpoint with other names and layouts, see
    checkpoint.ConversionRules. safetensors: the folder may be one of *.safetensors files alone, as transformers writes.

    Raises CheckpointError, changing nothing, for shapes or dtypes that differ and for bits that do; ConfigError for
    rules that cannot be read, worker_groups, an unknown comm_method, and as save_state_dict does.
    """
    _check_group("load_state_dict", process_group, coordinator_rank)
    if worker_groups is not None:
        raise ConfigError("load_state_dict: worker_groups; nothing is communicated between workers: leave it out")
    if comm_method not in COMM_METHODS:
        raise ConfigError(f"load_state_dict: comm_method={comm_method!r}{did_you_mean(comm_method, COMM_METHODS)}")
    if state.capturing():
        raise CaptureError("load_state_dict inside a captured function; call it outside")
    flat = dict(_flat(state_dict, "load_state_dict"))
    if aoa_config is not None or _is_plain(path, safetensors):
        _load_converted(flat, _tensors(path, unique_id, safetensors), aoa_config or {}, path)
        return
    store, number = _open(path, unique_id)
    manifest = store.manifest(number)
    saved = manifest.meta.get("values", {})
    wanted = {key: value for key, (_, value) in flat.items() if not isinstance(value, _PLAIN)}
    missing = [key for key in flat if key not in (manifest.tensors if key in wanted else saved)]
    targets = {key: _target(value) for key, value in wanted.items() if key in manifest.tensors}
    _compare(targets, manifest.tensors, path)
    arrays, _ = store.restore(targets, number, partial=True)
    for key, array in arrays.items():
        _fill(wanted[key], array)
    for key, (names, value) in flat.items():
        if isinstance(value, _PLAIN) and key in saved:
            _holder(state_dict, names)[names[-1]] = saved[key]
    if missing:
        warnings.warn(f"{path} lacks {len(missing)} keys, left as they are: {missing[:10]}", CheckpointWarning, 2)


def _load_converted(
    flat: Mapping[str, tuple[tuple[str, ...], Any]], tensors: Mapping[str, Any], rules: Mapping[str, Any], path: Any
) -> None:
    """Fill Tensors from others that the rules name; plain values have none."""
    wanted = {key: value for key, (_, value) in flat.items() if not isinstance(value, _PLAIN)}
    conversion = ConversionRules(rules, tensors)
    arrays = conversion.convert(tensors, list(wanted))
    targets = {key: _target(wanted[key]) for key in arrays}
    _compare(targets, arrays, path)
    for key, array in arrays.items():
        where = targets[key].sharding
        _fill(wanted[key], array if where is None else jax.device_put(array, where))
    missing = [key for key in wanted if key not in arrays and key not in conversion.left_alone]
    if missing:
        warnings.warn(f"{path} lacks {len(missing)} keys, left as they are: {missing[:10]}", CheckpointWarning, 3)


def _compare(targets: dict[str, jax.ShapeDtypeStruct], tensors: Mapping[str, Any], path: Any) -> None:
    wrong = mismatches(targets, {key: tensors[key] for key in targets})
    if wrong:
        raise CheckpointError(
            f"load_state_dict: {len(wrong)} Tensors do not fit those in {path}, nothing was loaded:\n"
            f"{report(wrong, targets, dict(tensors))}"
        )


class _StoredTensors(Mapping[str, Any]):
    """The tensors of a state in a store, each read when it is asked for."""

    def __init__(self, store: CheckpointStore, number: int) -> None:
        self._store, self._number, self._entries = store, number, store.manifest(number).tensors

    def __getitem__(self, key: str) -> Any:
        entry = self._entries[key]
        target = {key: jax.ShapeDtypeStruct(entry.shape, entry.dtype)}
        return self._store.restore(target, self._number, partial=True)[0][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _FileTensors(Mapping[str, Any]):
    """The tensors of all *.safetensors files of a folder, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Slices] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = Slices(path)
            for name in file.entries:
                if name in self._file_of:
                    raise CheckpointError(
                        f"{folder}: {name!r} is in {self._file_of[name].path.name} and in {path.name}"
                    )
                self._file_of[name] = file

    def __getitem__(self, key: str) -> Any:
        file = self._file_of[key]
        return file.read(key, tuple(slice(0, n) for n in file.entries[key].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _is_plain(path: str | os.PathLike[str], safetensors: bool) -> bool:
    """Whether a folder holds safetensors files and no state of a store."""
    folder = Path(path)
    return safetensors and folder.is_dir() and any(folder.glob("*.safetensors"))


def _tensors(path: str | os.PathLike[str], unique_id: int | None, safetensors: bool) -> Mapping[str, Any]:
    return _FileTensors(Path(path)) if _is_plain(path, safetensors) else _StoredTensors(*_open(path, unique_id))


def load_merged_state_dict(
    path: str | os.PathLike[str],
    prefix: str | None = None,
    unique_id: int | None = None,
    offload: bool = False,
    aoa_config: Mapping[str, Any] | None = None,
    safetensors: bool = False,
) -> dict[str, Any]:
    """The whole content of a checkpoint folder, in this process: dotted key -> Tensor (or plain value).

    prefix: only the keys inside this dict of the saved state dict, without it ("model": "model.w" becomes "w").
    offload: Tensors stay in host memory, as they do on a CPU. Raises as load_state_dict does, and CheckpointError for a
    prefix that no key has.
    """
    host = jax.devices("cpu")[0] if offload else None
    depth = 0 if prefix is None else len(prefix.split("."))
    if aoa_config is not None or _is_plain(path, safetensors):
        tensors = _tensors(path, unique_id, safetensors)
        arrays = ConversionRules(aoa_config or {}, tensors).convert(tensors)
        chosen = {key: ".".join(key.split(".")[depth:]) for key in arrays if _is_within(key.split("."), prefix)}
        _check_prefix(chosen, prefix, path)
        return {chosen[key]: Tensor(jax.device_put(arrays[key], host)) for key in chosen}
    store, number = _open(path, unique_id)
    manifest = store.manifest(number)
    chosen = {key: ".".join(names[depth:]) for key, names in _names_of(manifest).items() if _is_within(names, prefix)}
    _check_prefix(chosen, prefix, path)
    shapes = {key: jax.ShapeDtypeStruct(t.shape, t.dtype) for key, t in manifest.tensors.items() if key in chosen}
    arrays, meta = store.restore(shapes, number, partial=True)
    found = {chosen[key]: Tensor(jnp.asarray(array) if host is None else jax.device_put(array, host))
             for key, array in arrays.items()}  # fmt: skip
    return found | {chosen[key]: value for key, value in meta.get("values", {}).items() if key in chosen}


def _is_within(names: list[str], prefix: str | None) -> bool:
    depth = 0 if prefix is None else len(prefix.split("."))
    return prefix is None or (".".join(names[:depth]) == prefix and len(names) > depth)


def _check_prefix(chosen: Mapping[str, str], prefix: str | None, path: Any) -> None:
    if prefix is not None and not chosen:
        raise CheckpointError(f"load_merged_state_dict: no key of {path} lies in {prefix!r}")


def _names_of(manifest: Any) -> dict[str, list[str]]:
    """Key -> the names on its path, also for a checkpoint that was not written from a state dict."""
    mapped = manifest.meta.get("flat_mapping", {})
    return {key: mapped.get(key, [key]) for key in [*manifest.tensors, *manifest.meta.get("values", {})]}


def _flat(state_dict: Any, what: str) -> Iterator[tuple[str, tuple[tuple[str, ...], Any]]]:
    """(dotted key, (names on its path, value)) of nested dicts."""
    if not isinstance(state_dict, Mapping):
        raise ConfigError(f"{what} takes a dict, got {type(state_dict).__name__}")
    seen: set[str] = set()
    for names, value in _leaves(state_dict, ()):
        key = ".".join(names)
        if not isinstance(value, (Tensor, ShardedWeight, *_PLAIN)):
            raise ConfigError(f"{what}: {key!r} is a {type(value).__name__}; values are Tensors, ShardedWeights, plain "
                              "numbers, texts and lists of them, or dicts of such")  # fmt: skip
        if key in seen:
            raise ConfigError(f"{what}: two entries are both {key!r} once nested names are joined by dots; rename one")
        seen.add(key)
        yield key, (names, value)


def _leaves(values: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        names = (*above, str(name))
        if isinstance(value, Mapping):
            yield from _leaves(value, names)
        else:
            yield names, value


def _holder(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    for name in names[:-1]:
        values = values[name]
    return values


def _save(key: str, value: Tensor | ShardedWeight) -> Any:
    """The array to write for a value, or a box of a tensor."""
    if isinstance(value, Tensor):
        return state.read(value)
    if value.is_flattened:
        raise ConfigError(
            f"save_state_dict: ShardedWeight {key!r} is flattened, part of a row and not a box; give the Tensor as it "
            "was before"
        )
    if jax.process_count() == 1 and value.local_shape != value.global_shape:
        raise ConfigError(
            f"save_state_dict: ShardedWeight {key!r} is {list(value.local_shape)} of {list(value.global_shape)}, and "
            "there is no other process to save the rest; give the whole Tensor"
        )
    return ShardBox(np.asarray(state.read(value.local_tensor)), value.global_offset, value.global_shape)


def _target(value: Tensor | ShardedWeight) -> jax.ShapeDtypeStruct:
    """Shape, dtype and layout that a value is read with; no layout for what was never put on a device on purpose."""
    if isinstance(value, ShardedWeight):
        return jax.ShapeDtypeStruct(value.global_shape, value.local_tensor.dtype)
    array = state.read(value)
    where = array.sharding if getattr(array, "committed", False) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)


def _fill(value: Tensor | ShardedWeight, array: Any) -> None:
    if isinstance(value, Tensor):
        state.write(value, jnp.asarray(array))
        return
    box = tuple(slice(start, start + n) for start, n in zip(value.global_offset, value.local_shape, strict=True))
    part = array[box]
    if value.is_flattened:
        part = part.reshape(-1)[value.flattened_range]
    value.local_tensor.set_value(part)


def _open(path: str | os.PathLike[str], unique_id: int | None) -> tuple[CheckpointStore, int]:
    """The folder to read, once what is being written into it is there, and the state asked for."""
    where = Path(path).resolve()
    _background.finish(where)
    store = CheckpointStore(where, read_only=True)
    if unique_id is not None:
        return store, _check_id("load_state_dict", unique_id)
    latest = store.latest_step()
    if latest is None:
        raise CheckpointError(f"no checkpoint in {path}; check the path")
    return store, latest


def _check_id(what: str, unique_id: Any) -> int:
    if type(unique_id) is not int or unique_id < 0:
        raise ConfigError(f"{what}: unique_id={unique_id!r}; give a whole number of at least 0, or None")
    return unique_id


def _check_group(what: str, group: Group | None, coordinator_rank: Any) -> None:
    if group is not None and (group.axes or group.nranks != jax.process_count()):
        raise ConfigError(
            f"{what}: process_group {group.name} is not all {jax.process_count()} processes; leave it out"
        )
    count = jax.device_count()
    if type(coordinator_rank) is not int or not 0 <= coordinator_rank < count:
        raise ConfigError(f"{what}: coordinator_rank={coordinator_rank!r}; give a rank, 0 .. {count - 1}")
    if jax.devices()[coordinator_rank].process_index != 0:
        raise ConfigError(f"{what}: coordinator_rank={coordinator_rank}; the first process coordinates, give 0")
