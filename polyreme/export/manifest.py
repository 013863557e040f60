"""The JSON manifest of an artefact: what its functions take and give, which files hold them, and their digests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from polyreme.core import dtype as dtypes
from polyreme.errors import CheckpointError, DTypeError
from polyreme.export.spec import ArraySpec, Sizes
from polyreme.io.safetensors_file import parse_json

FORMAT, VERSION = "polyreme.artifact", 1
MAIN = "forward"
"""The function that an artefact's own call runs."""
CONVENTION = (
    "main(state, inputs) -> outputs: state is a dict of the arrays in the weights file by name, inputs and outputs are "
    "lists in the order given here; a complex array of the state is stored and passed as [..., 2], real and imaginary"
)
_BLOCK = 16 << 20  # bytes read at a time


@dataclass(frozen=True)
class File:
    """A file of the artefact, by its name in the artefact's folder; nbytes: its length in bytes."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True)
class ProgramRecord:
    """One exported program. sizes: the open sizes that it fixes."""

    file: File
    sizes: Sizes
    inputs: list[ArraySpec]
    outputs: list[ArraySpec]


@dataclass(frozen=True)
class FunctionRecord:
    """A function: what it takes whichever program serves the call, and its programs."""

    inputs: list[ArraySpec]
    outputs: list[ArraySpec]
    programs: list[ProgramRecord]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ArtifactManifest:
    """The whole manifest. state: name -> (dtype, shape); differentiable: True, or why there are no gradients."""

    polyreme: str
    jax: str
    platforms: tuple[str, ...]
    weights: File
    state: dict[str, ArraySpec]
    functions: dict[str, FunctionRecord]
    differentiable: bool | str
    extra: dict[str, Any]

    @property
    def files(self) -> list[File]:
        """Every file but the manifest."""
        return [self.weights, *(p.file for f in self.functions.values() for p in f.programs)]

    def to_json(self) -> bytes:
        """The manifest as a file."""
        body = {
            "format": FORMAT,
            "format_version": VERSION,
            "polyreme_version": self.polyreme,
            "jax_version": self.jax,
            "platforms": list(self.platforms),
            "calling_convention": CONVENTION,
            "differentiable": self.differentiable,
            "weights": _file_json(self.weights),
            "state": {n: {"dtype": s.dtype.name, "shape": list(s.shape)} for n, s in self.state.items()},
            "functions": {name: _function_json(f) for name, f in self.functions.items()},
            "extra": self.extra,
        }
        return json.dumps({**body, "digest": _digest(body)}, indent=1).encode()

    @classmethod
    def read(cls, path: Path) -> ArtifactManifest:
        """Reads and checks; raises CheckpointError for a file that is missing, changed or of a later format."""
        try:
            body = parse_json(path.read_bytes().decode())
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path}: no such file; give the prefix that was saved to, without a suffix"
            ) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a JSON manifest ({error})") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointError(f"{path}: not the manifest of an artefact (format is not {FORMAT!r})")
        if body.get("format_version") != VERSION:
            raise CheckpointError(
                f"{path}: format_version {body.get('format_version')!r}; this polyreme reads {VERSION}, upgrade it"
            )
        expected = body.pop("digest", None)
        if expected != (got := _digest(body)):
            raise CheckpointError(f"{path}: changed since it was written: digest expected {expected}, got {got}")
        try:
            return cls._of(body)
        except (KeyError, TypeError, ValueError, AttributeError, DTypeError) as error:
            raise CheckpointError(f"{path}: the manifest has no or a wrong {error}") from error

    @classmethod
    def _of(cls, body: Mapping[str, Any]) -> ArtifactManifest:
        return cls(
            body["polyreme_version"],
            body["jax_version"],
            tuple(body["platforms"]),
            _file_of(body["weights"]),
            {n: ArraySpec(n, dtypes.as_dtype(s["dtype"]), tuple(s["shape"])) for n, s in body["state"].items()},
            {name: _function_of(f) for name, f in body["functions"].items()},
            body["differentiable"],
            body["extra"],
        )


def digest_of(path: Path) -> str:
    """xxh3_128 of a file."""
    found = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def check(folder: Path, file: File) -> Path:
    """The path of a file of the artefact; raises CheckpointError if it is missing or differs from what was written."""
    path = folder / file.name
    if path.name != file.name or not path.is_file():
        raise CheckpointError(f"{path}: missing; the manifest beside it names it, copy all files of an artefact")
    nbytes = path.stat().st_size
    if nbytes != file.nbytes:
        raise CheckpointError(f"{path}: corrupt: expected {file.nbytes} bytes, got {nbytes}")
    got = digest_of(path)
    if got != file.digest:
        raise CheckpointError(f"{path}: corrupt: digest expected {file.digest}, got {got}; copy or export it again")
    return path


def _digest(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _file_json(file: File) -> dict[str, Any]:
    return {"file": file.name, "bytes": file.nbytes, "xxh3_128": file.digest}


def _file_of(body: Mapping[str, Any]) -> File:
    return File(body["file"], body["bytes"], body["xxh3_128"])


def _spec_json(spec: ArraySpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype.name, "shape": list(spec.shape), "symbols": list(spec.symbols)}


def _spec_of(body: Mapping[str, Any]) -> ArraySpec:
    return ArraySpec(body["name"], dtypes.as_dtype(body["dtype"]), tuple(body["shape"]), tuple(body["symbols"]))


def _function_json(function: FunctionRecord) -> dict[str, Any]:
    return {
        "inputs": [_spec_json(s) for s in function.inputs],
        "outputs": [_spec_json(s) for s in function.outputs],
        "programs": [_program_json(p) for p in function.programs],
        "extra": function.extra,
    }


def _function_of(body: Mapping[str, Any]) -> FunctionRecord:
    return FunctionRecord(
        [_spec_of(s) for s in body["inputs"]],
        [_spec_of(s) for s in body["outputs"]],
        [_program_of(p) for p in body["programs"]],
        body["extra"],
    )


def _program_json(program: ProgramRecord) -> dict[str, Any]:
    sizes = {name: {str(dim): size for dim, size in dims.items()} for name, dims in program.sizes.items()}
    return {
        **_file_json(program.file),
        "sizes": sizes,
        "inputs": [_spec_json(s) for s in program.inputs],
        "outputs": [_spec_json(s) for s in program.outputs],
    }


def _program_of(body: Mapping[str, Any]) -> ProgramRecord:
    sizes = {name: {int(dim): size for dim, size in dims.items()} for name, dims in body["sizes"].items()}
    inputs, outputs = ([_spec_of(s) for s in body[key]] for key in ("inputs", "outputs"))
    return ProgramRecord(_file_of(body), sizes, inputs, outputs)
