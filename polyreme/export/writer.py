"""Writes an artefact: StableHLO programs, safetensors weights and a JSON manifest with their digests."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax
import xxhash

from polyreme.errors import CaptureError, CheckpointError, ConfigError
from polyreme.export.manifest import MAIN, ArtifactManifest, File, FunctionRecord, ProgramRecord, digest_of
from polyreme.export.program import PLATFORMS, Call, check_platforms, export
from polyreme.export.spec import ArraySpec, as_specs, combinations, fixed
from polyreme.io import safetensors_file
from polyreme.io.complex_pairs import to_pairs


@dataclass(frozen=True)
class Function:
    """A pure function to export, with its inputs (InputSpec-like), the names of its outputs, and its buckets.

    extra: JSON values kept in the manifest.
    """

    call: Call
    inputs: Sequence[Any]
    outputs: Sequence[str]
    buckets: Mapping[str, Mapping[int, Sequence[int]]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def write(
    prefix: str | os.PathLike[str],
    call: Call,
    state: Mapping[str, Any],
    inputs: Sequence[Any],
    outputs: Sequence[str],
    *,
    platforms: Sequence[str] = PLATFORMS,
    buckets: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
    differentiable: bool = False,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes PREFIX.stablehlo, PREFIX.safetensors and PREFIX.json: all that is needed to run `call` without its code.

    call(state, inputs) -> outputs is pure: arrays in, arrays out. state: name -> array. inputs: InputSpec-like; a None
    or -1 in a shape stays open, and one size is shared by all open leading dims. For several platforms kernels take
    their plain forms. buckets: {input: {dim: sizes}}, one program for each combination, in PREFIX.N.stablehlo.
    differentiable: the programs carry their gradients too, if jax can give them; the manifest says so, or why not.

    Raises CaptureError, naming input and dim, where the code needs a size that is open; ConfigError for specs, buckets
    or platforms that make no sense. Files are replaced one by one, each by a rename, the manifest last: a reader in
    between finds digests that differ.
    """
    functions = {MAIN: Function(call, inputs, outputs, buckets)}
    write_functions(prefix, functions, state, platforms=platforms, differentiable=differentiable, extra=extra)


def write_functions(
    prefix: str | os.PathLike[str],
    functions: Mapping[str, Function],
    state: Mapping[str, Any],
    *,
    platforms: Sequence[str] = PLATFORMS,
    differentiable: bool | str = False,
    extra: dict[str, Any] | None = None,
) -> None:
    """`write` for several functions over one state; all but "forward" are in files PREFIX.NAME.stablehlo.

    differentiable: True, False, or the reason why not, for the manifest.
    """
    base = _base(prefix)
    lowered = check_platforms(platforms)
    blobs: dict[str, bytes] = {}
    records, refusal = {}, ""
    for name, function in functions.items():
        records[name], why = _export_all(base.name, name, function, state, lowered, differentiable is True, blobs)
        refusal = refusal or why
    with _Staged(base) as staged:
        arrays = {n: to_pairs(a) for n, a in state.items()}
        weights = staged.add("safetensors", lambda file: safetensors_file.write(file, arrays, {"format": "np"}))
        for name, data in blobs.items():
            staged.add(name.removeprefix(f"{base.name}."), lambda file, data=data: file.write(data))
        manifest = ArtifactManifest(
            importlib.metadata.version("polyreme"),
            jax.__version__,
            lowered,
            weights,
            {n: ArraySpec(n, a.dtype, tuple(a.shape)) for n, a in state.items()},
            records,
            refusal or differentiable,
            extra or {},
        )
        staged.add("json", lambda file: file.write(manifest.to_json()))
        staged.commit()


def _base(prefix: str | os.PathLike[str]) -> Path:
    if not str(prefix) or str(prefix).endswith(("/", os.sep)) or not Path(prefix).name:
        raise ConfigError(f"path={os.fspath(prefix)!r} names a folder; give FOLDER/NAME, the start of the files' names")
    return Path(prefix)


def _export_all(
    base: str, name: str, function: Function, state: Mapping[str, Any], platforms: tuple[str, ...],
    differentiable: bool, blobs: dict[str, bytes],
) -> tuple[FunctionRecord, str]:  # fmt: skip
    """Exports one function into blobs, by file name -> its record, and why it has no gradients if it has none."""
    specs = as_specs(function.inputs, "input")
    twice = [n for n in function.outputs if list(function.outputs).count(n) > 1]
    if twice:
        raise ConfigError(f"two of the outputs are named {twice[0]!r}; give each a name of its own")
    programs, refusal = [], ""
    chosen = combinations(specs, function.buckets)
    for at, sizes in enumerate(chosen):
        parts = [base, *([] if name == MAIN else [name]), *([str(at)] if len(chosen) > 1 or sizes else []), "stablehlo"]
        file = ".".join(parts)
        exported, ins, outs = export(function.call, state, fixed(specs, sizes), function.outputs, platforms)
        blobs[file], why = _serialize(exported, differentiable)
        refusal = refusal or why
        programs.append(ProgramRecord(_file(file, blobs), sizes, ins, outs))
    ins, outs = (_common([getattr(p, side) for p in programs]) for side in ("inputs", "outputs"))
    return FunctionRecord(ins, outs, programs, function.extra), refusal


def _serialize(exported: Any, differentiable: bool) -> tuple[bytes, str]:
    if differentiable:
        try:
            return bytes(exported.serialize(vjp_order=1)), ""
        except (
            ValueError,
            TypeError,
            NotImplementedError,
            CaptureError,
        ) as error:  # a while loop, say
            return bytes(exported.serialize()), str(error).strip().splitlines()[0][:300]
    return bytes(exported.serialize()), ""


def _common(sides: Sequence[list[ArraySpec]]) -> list[ArraySpec]:
    """The specs over all programs: a size in which they differ is open."""
    common = []
    for specs in zip(*sides, strict=True):
        first = specs[0]
        same = [all(s.shape[d] == n for s in specs) for d, n in enumerate(first.shape)]
        shape = tuple(n if ok else None for n, ok in zip(first.shape, same, strict=True))
        symbols = tuple(s if n is None else None for n, s in zip(shape, first.symbols, strict=True))
        common.append(ArraySpec(first.name, first.dtype, shape, symbols))
    return common


def _file(name: str, blobs: Mapping[str, bytes]) -> File:
    return File(name, len(blobs[name]), xxhash.xxh3_128(blobs[name]).hexdigest())


class _Staged:
    """New files of an artefact, each under another name until all are on disk; commit renames them, the last one added
    last, and deletes files that the artefact had and has no more.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._files: dict[Path, Path] = {}

    def __enter__(self) -> Self:
        self._base.parent.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for temporary in self._files:
            temporary.unlink(missing_ok=True)

    def add(self, suffix: str, fill: Callable[[Any], object]) -> File:
        """Writes BASE.suffix under another name, to the disk."""
        path = self._base.with_name(f"{self._base.name}.{suffix}")
        temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
        self._files[temporary] = path
        with open(temporary, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        return File(path.name, temporary.stat().st_size, digest_of(temporary))

    def commit(self) -> None:
        """Puts the files in their places."""
        old = _files_before(self._base.with_name(f"{self._base.name}.json"))
        for temporary, path in self._files.items():
            os.replace(temporary, path)
        for name in old - {path.name for path in self._files.values()}:
            (self._base.parent / name).unlink(missing_ok=True)


def _files_before(path: Path) -> set[str]:
    """Names of the files of the artefact that is being replaced."""
    if not path.exists():
        return set()
    try:
        return {file.name for file in ArtifactManifest.read(path).files if Path(file.name).name == file.name}
    except CheckpointError:
        return set()
