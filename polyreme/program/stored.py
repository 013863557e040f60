"""The values of a Program as files: persistable variables, the state of optimizers, streams of random numbers.

Files are safetensors, with a digest; each appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyreme.core import state
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError, ProgramError, did_you_mean
from polyreme.io import paddle_tensors, safetensors_file
from polyreme.io.complex_pairs import from_pairs, to_pairs
from polyreme.program.encoding import Arrays
from polyreme.program.placing import HasValues, updated
from polyreme.program.scope import Scope
from polyreme.program.training import Optimize

STREAM = "@RANDOM_STREAM"
"""The name of a Program's stream of random numbers among the state of its training, followed by its seed."""
_SCHEDULES = "schedules"
_SHOWN = 8  # names that a message lists

# what there is


def persistables(program: HasValues) -> dict[str, Tensor]:
    """Every variable that outlives a run, by name, and every Tensor that the Program holds."""
    found = {v.name: v for v in program.list_vars() if v.persistable}
    return {**found, **program.captured}


def optimizers(program: HasValues) -> list[Optimize]:
    """The Program's updates."""
    return [op for op in program.every_op() if isinstance(op, Optimize)]


def current(scope: Scope, name: str, program: HasValues) -> Tensor:
    """The Tensor with a variable's value; ProgramError if it has none in this scope."""
    value = scope.find(name)
    value = program.captured.get(name) if value is None else value
    if value is None:
        raise ProgramError(
            f"variable {name!r} has no value in this scope; run the startup program in it first: "
            "exe.run(static.default_startup_program())"
        )
    return value


def values_of(program: HasValues, scope: Scope, names: Iterable[str]) -> Arrays:
    """The values of these variables."""
    with state.outside_capture():
        return {name: np.asarray(current(scope, name, program).numpy()) for name in names}


def training_state(program: HasValues, scope: Scope) -> tuple[Arrays, dict[str, Any]]:
    """What training needs besides persistable variables: (arrays by name, the state of schedules by optimizer)."""
    tensors = _optimizer_tensors(program, scope)
    with state.outside_capture():
        arrays = {name: np.asarray(t.numpy()) for name, t in tensors.items()}
        seed = program.random_seed
        if seed and seed in scope.generators:
            arrays[f"{STREAM}_{seed}"] = scope.generator(seed).get_state()
    schedules = {op.key: op.optimizer._scheduler for op in optimizers(program)}
    return arrays, {key: s.state_dict() for key, s in schedules.items() if s is not None}


def _optimizer_tensors(program: HasValues, scope: Scope) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    updated(program, scope)  # brings Tensors that the Program holds into the scope
    for op in optimizers(program):
        of_op = scope.optimizer(op).state_tensors(op.key)
        twice = tensors.keys() & of_op.keys()
        if twice:
            raise ProgramError(
                f"two optimizers of the Program have state named {_some(twice)}; let one of them update a parameter"
            )
        tensors.update(of_op)
    return tensors


# putting back


def check_names(where: str, have: Iterable[str], wanted: Iterable[str]) -> None:
    """Raises CheckpointError unless these are the same names."""
    have, wanted = set(have), set(wanted)
    if have == wanted:
        return
    missing, extra = wanted - have, have - wanted
    parts = [f"lacks {_some(missing)}" if missing else "", f"has {_some(extra)} too" if extra else ""]
    hint = did_you_mean(min(missing), extra) if missing and extra else ""
    raise CheckpointError(
        f"{where} {' and '.join(p for p in parts if p)}{hint}; build the Program as the one that was saved was "
        "built (under utils.unique_name.guard(), if others were built before), or load some of them by name"
    )


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(repr, listed[:_SHOWN])) + more


def put(program: HasValues, scope: Scope, arrays: Mapping[str, Any], where: str) -> None:
    """Give variables of the Program these values, in the scope; nothing changes unless all of them fit."""
    declared = persistables(program)
    unknown = arrays.keys() - declared.keys()
    if unknown:
        raise CheckpointError(f"{where} has {_some(unknown)}, which is no persistable variable of the Program")
    for name, array in arrays.items():
        _check(where, name, array, declared[name])
    with state.outside_capture():
        for name, array in arrays.items():
            have = scope.find(name)
            have = program.captured.get(name) if have is None else have
            if have is None:
                scope.create(name, jnp.asarray(array), declared[name])
            else:
                have.set_value(np.asarray(array))


def set_state(program: HasValues, scope: Scope, state_dict: Mapping[str, Any], where: str) -> list[str]:
    """Give variables of a Program values by name, in a scope; returns the names that were of no use.

    Raises CheckpointError for a shape or dtype that does not fit, ProgramError if no name fits.
    """
    declared = persistables(program)
    arrays = {n: np.asarray(v.numpy() if isinstance(v, Tensor) else v) for n, v in state_dict.items()}
    used = {n: a for n, a in arrays.items() if n in declared}
    if not used:
        raise ProgramError(
            f"{where}: no name in {sorted(arrays)[:8]} is a persistable variable of the Program, which has "
            f"{sorted(declared)[:8]}"
        )
    put(program, scope, used, where)
    for op in optimizers(program):
        if all(scope.find(p) is not None for p, _ in op.pairs):
            tensors = scope.optimizer(op).state_tensors(op.key)
            matching = {n: a for n, a in arrays.items() if n in tensors}
            put_into(tensors, matching, where)
            used |= matching
    return [n for n in arrays if n not in used]


def put_into(tensors: Mapping[str, Tensor], arrays: Mapping[str, Any], where: str) -> None:
    """Give some of these Tensors values by name; nothing changes unless all of them fit."""
    unknown = arrays.keys() - tensors.keys()
    if unknown:
        raise CheckpointError(f"{where} has {_some(unknown)}, which nothing of the Program is named")
    for name, array in arrays.items():
        _check(where, name, array, tensors[name])
    with state.outside_capture():
        for name, array in arrays.items():
            tensors[name].set_value(np.asarray(array))


def put_training_state(
    program: HasValues, scope: Scope, arrays: Mapping[str, Any], schedules: Mapping[str, Any], where: str
) -> None:
    """Continue from what training_state gave, parameters being in the scope; raises CheckpointError for what does not
    fit, changing nothing.
    """
    tensors = _optimizer_tensors(program, scope)
    stream = f"{STREAM}_{program.random_seed}"
    check_names(where, {n for n in arrays if not n.startswith(STREAM)}, tensors)
    for name, tensor in tensors.items():
        _check(where, name, arrays[name], tensor)
    ours = {op.key: op.optimizer._scheduler for op in optimizers(program) if op.optimizer._scheduler is not None}
    check_names(f"{where}: state of schedules", schedules, ours)
    with state.outside_capture():
        for key, scheduler in ours.items():
            scheduler.set_state_dict(schedules[key])
        for op in optimizers(program):
            if op.rate is None and op.key not in ours:
                op.optimizer.set_lr(float(arrays[f"{op.key}_learning_rate"]))
        for name, tensor in tensors.items():
            tensor.set_value(np.asarray(arrays[name]))
        if stream in arrays:
            scope.generator(program.random_seed).set_state(arrays[stream])


def put_paddle_state(
    program: HasValues, scope: Scope, arrays: Mapping[str, Any], where: str, names: Sequence[str] | None = None
) -> None:
    """Continue from values by the names that PaddlePaddle's Programs have for them: persistable variables, slots of
    optimizers, powers of betas and the learning rate; what the Program has no use for is left out. names: these alone.

    Raises CheckpointError for variables that are missing, and for what does not fit.
    """
    wanted = persistables(program) if names is None else names
    missing = {name for name in wanted if name not in arrays}
    if missing:
        raise CheckpointError(f"{where} lacks {_some(missing)}; load some of the variables by name")
    put(program, scope, {name: arrays[name] for name in wanted}, where)
    if names is not None:
        return
    updated(program, scope)
    rates = [np.asarray(a) for name, a in arrays.items() if re.fullmatch(r"learning_rate_\d+", name)]
    for op in optimizers(program):
        parameters = {name for name, _ in op.pairs}
        entries = {k: v for k, v in arrays.items() if k not in wanted and _is_entry_of(k, parameters)}
        scope.optimizer(op).set_state_dict(entries)
        if op.rate is None and op.optimizer._scheduler is None and len(rates) == 1:
            op.optimizer.set_lr(float(rates[0].reshape(())))


def paddle_file(program: HasValues, path: str | os.PathLike[str]) -> Arrays:
    """The values in a file of all, which PaddlePaddle wrote in the order of their names, and without these: variables
    alone, or with the state of optimizers too, and a learning rate that is a number.
    """
    arrays = paddle_tensors.read_every(read_file(path), os.fspath(path))
    names = set(persistables(program))
    entries = {
        f"{p}_{slot}_0" for op in optimizers(program) for p, _ in op.pairs for slot in op.optimizer.paddle_entries()
    }
    for known in (names | entries | {"learning_rate_0"}, names | entries, names):
        if len(known) == len(arrays):
            return dict(zip(sorted(known), arrays, strict=True))
    raise CheckpointError(
        f"{os.fspath(path)}: holds {len(arrays)} Tensors, without names; the Program has {len(names)} persistable "
        f"variables, and {len(entries)} of its optimizers: it is of another program"
    )


def paddle_folder(folder: str | os.PathLike[str]) -> Arrays:
    """The values in a folder in which PaddlePaddle wrote a file for each variable, by its names."""
    arrays: Arrays = {}
    for path in sorted(Path(folder).iterdir()):
        if path.is_file() and paddle_tensors.is_record((data := read_file(path))[:12]):
            arrays |= paddle_tensors.read_all(data, [path.name], str(path))
    if not arrays:
        raise CheckpointError(f"{os.fspath(folder)}: holds no file of a variable that PaddlePaddle wrote")
    return arrays


def _is_entry_of(entry: str, parameters: Collection[str]) -> bool:
    """Whether an optimizer's entry is one of these parameters'."""
    parts = entry.split("_")
    return any("_".join(parts[:n]) in parameters for n in range(1, len(parts)))


def _check(where: str, name: str, array: Any, declared: Tensor) -> None:
    if tuple(array.shape) != tuple(declared.shape) or array.dtype != declared.dtype:
        raise CheckpointError(
            f"{where}: {name!r} is {array.dtype}{list(array.shape)}, the Program's is "
            f"{declared.dtype.name}{list(declared.shape)}"
        )


# files


def packed(arrays: Mapping[str, np.ndarray], kind: str, metadata: Mapping[str, str] | None = None) -> bytes:
    """Arrays as the bytes of a safetensors file; kind: what it is a file of, which `unpacked` checks."""
    complex_ones = [n for n, a in arrays.items() if a.dtype.kind == "c"]
    file = BytesIO()
    stored = {n: to_pairs(a.astype(a.dtype.newbyteorder("="), copy=False)) for n, a in arrays.items()}
    more = {"format": kind, "complex": json.dumps(complex_ones), **(metadata or {})}
    safetensors_file.write(file, stored, more)
    return file.getvalue()


def unpacked(data: bytes, kind: str, where: str) -> tuple[Arrays, dict[str, str]]:
    """(arrays, metadata) of what `packed` gave; raises CheckpointError for anything else, and for changed bytes."""
    arrays, metadata = safetensors_file.read(BytesIO(data), where)  # type: ignore[arg-type]
    if metadata.get("format") != kind:
        raise CheckpointError(f"{where}: holds {metadata.get('format')!r}, not {kind!r}")
    try:
        complex_ones = set(json.loads(metadata["complex"]))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{where}: its metadata is malformed ({error})") from error
    wide = {np.dtype("float32"): np.dtype("complex64"), np.dtype("float64"): np.dtype("complex128")}
    return {n: from_pairs(a, wide[a.dtype]) if n in complex_ones else a for n, a in arrays.items()}, metadata


def schedules_in(metadata: Mapping[str, str], where: str) -> dict[str, Any]:
    """The state of schedules among a file's metadata."""
    try:
        return json.loads(metadata.get(_SCHEDULES, "{}"))
    except ValueError as error:
        raise CheckpointError(f"{where}: its metadata is malformed ({error})") from error


def schedules_as(schedules: Mapping[str, Any]) -> dict[str, str]:
    """The state of schedules as metadata."""
    return {_SCHEDULES: json.dumps(schedules)}


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, whole or not at all; its folder is made. Raises CheckpointError where the system refuses."""
    where = Path(path)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=where.parent, prefix=f".{where.name}.")
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, where)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be written: {error.strerror}; it needs {len(data)} bytes") from error


def read_file(path: str | os.PathLike[str]) -> bytes:
    """A file's bytes; raises CheckpointError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error.strerror}") from error


def file_prefix(what: str, path: Any) -> str:
    """path, which must be the start of file names, FOLDER/NAME; raises ConfigError for a folder."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if not text or text.endswith(("/", os.sep)) or os.path.isdir(text):
        raise ConfigError(f"{what}: path {path!r} names a folder; give FOLDER/NAME, the start of the files' names")
    return text
