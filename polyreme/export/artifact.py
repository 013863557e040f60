"""Reads an artefact and runs it: no code of the model is needed, or imported."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax import export as jax_export

from polyreme.errors import CheckpointError, DTypeError, ShapeError, did_you_mean
from polyreme.export.manifest import MAIN, ArtifactManifest, FunctionRecord, ProgramRecord, check
from polyreme.export.program import stored_aval
from polyreme.export.spec import ArraySpec, sizes_of
from polyreme.io import safetensors_file
from polyreme.io.complex_pairs import from_pairs


class ArtifactProgram(Protocol):
    """A program for one set of shapes: call(stored state, list of arrays) -> list of arrays, to be traced by jax."""

    record: ProgramRecord
    inputs: list[ArraySpec]
    outputs: list[ArraySpec]

    @property
    def call(self) -> Callable[..., Any]: ...
    def fits(self, shapes: Sequence[tuple[int, ...]]) -> bool: ...


class ExportedProgram:
    """One exported program: call(stored state, list of arrays) -> list of arrays, to be traced by jax."""

    inputs: list[ArraySpec]
    outputs: list[ArraySpec]

    def __init__(self, record: ProgramRecord, data: bytes) -> None:
        self.record = record
        self.inputs, self.outputs = record.inputs, record.outputs
        try:
            self.exported = jax_export.deserialize(bytearray(data))
        except ValueError as error:  # a calling convention that this jax has dropped, or does not have yet
            raise CheckpointError(
                f"{record.file.name}: jax {jax.__version__} cannot read it ({error}); export it again with this "
                "jax, or use the one that the manifest names"
            ) from error
        self.call: Callable[..., Any] = self.exported.call

    def fits(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether arrays of these shapes are what it takes."""
        return not any(misfit(spec, shape) for spec, shape in zip(self.inputs, shapes, strict=True))


class ArtifactFunction:
    """One function of an artefact. inputs, outputs: Specs, None where a size is open."""

    inputs: list[ArraySpec]
    outputs: list[ArraySpec]
    extra: dict[str, Any]

    def __init__(self, name: str, record: FunctionRecord, programs: Sequence[ArtifactProgram]) -> None:
        self.name = name
        self.inputs, self.outputs, self.extra = record.inputs, record.outputs, record.extra
        self.programs = programs

    def program_for(self, shapes: Sequence[tuple[int, ...]]) -> ArtifactProgram:
        """The program that takes arrays of these shapes. Raises ShapeError, naming input and dim, if none does."""
        program = next((p for p in self.programs if p.fits(shapes)), None)
        if program is None:
            raise self._no_program(shapes)
        sizes: dict[str, tuple[int, str, int]] = {}
        for spec, shape in zip(program.inputs, shapes, strict=True):
            for dim, (symbol, size) in enumerate(zip(spec.symbols, shape, strict=True)):
                if symbol is None:
                    continue
                known, other, at = sizes.setdefault(symbol, (size, spec.name, dim))
                if known != size:
                    raise ShapeError(
                        f"dim {dim} of input {spec.name!r} is {size}, but dim {at} of {other!r} is {known}: "
                        f"both are {symbol!r}; give equal sizes"
                    )
        return program

    def _no_program(self, shapes: Sequence[tuple[int, ...]]) -> ShapeError:
        for index, (spec, shape) in enumerate(zip(self.inputs, shapes, strict=True)):
            wrong = misfit(spec, shape)
            if wrong:
                return ShapeError(f"input {spec.name!r} {wrong}; give {spec}")
            for dim, size in enumerate(shape):
                have = sorted({p.inputs[index].shape[dim] or 0 for p in self.programs})
                if 0 not in have and size not in have:
                    return ShapeError(
                        f"input {spec.name!r} has size {size} in dim {dim}, and there are programs for {have} only; "
                        "pad it to one of these, or export with a bucket of this size"
                    )
        return ShapeError(f"no program takes inputs of shapes {[list(s) for s in shapes]} together")

    def check(self, arrays: Sequence[Any]) -> None:
        """Raises unless there are as many arrays as inputs, of the right dtypes."""
        if len(arrays) != len(self.inputs):
            raise ShapeError(
                f"{len(arrays)} inputs given, {len(self.inputs)} needed: {', '.join(map(str, self.inputs))}"
            )
        for spec, array in zip(self.inputs, arrays, strict=True):
            if array.dtype != spec.dtype:
                raise DTypeError(
                    f"input {spec.name!r} is {array.dtype}, the program takes {spec.dtype}; convert it first"
                )


def misfit(spec: ArraySpec, shape: tuple[int, ...]) -> str:
    """The mismatch of an array's shape in words; "" if it fits."""
    if len(shape) != len(spec.shape):
        return f"has shape {list(shape)}, of {len(shape)} dims instead of {len(spec.shape)}"
    for dim, (want, have) in enumerate(zip(spec.shape, shape, strict=True)):
        if want is not None and want != have:
            return f"has size {have} in dim {dim}, which takes {want}"
        if want is None and have < 1:
            return f"has size 0 in dim {dim}, which takes 1 or more"
        least, step = sizes_of(spec.symbols[dim] if spec.symbols else None)
        if want is None and (have < least or have % step):
            more = f"multiples of {step}" if step > 1 else f"{least} or more"
            return f"has size {have} in dim {dim}, which takes {more}"
    return ""


class Artifact:
    """What `read_own` returns: an exported function with its weights.

    inputs, outputs: Specs of the main function; state: name -> array; functions: all functions by name; manifest: all
    that the file says.
    """

    def __init__(
        self, prefix: Path, manifest: ArtifactManifest, stored: dict[str, np.ndarray], functions: dict[str, Any]
    ) -> None:
        self.prefix = prefix
        self.manifest = manifest
        self.stored: dict[str, Any] = stored
        self.functions: Mapping[str, ArtifactFunction] = functions
        self._jitted: dict[int, Any] = {}

    @property
    def inputs(self) -> list[ArraySpec]:
        """The inputs of the main function."""
        return self.function(MAIN).inputs

    @property
    def outputs(self) -> list[ArraySpec]:
        """The outputs of the main function."""
        return self.function(MAIN).outputs

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms it runs on, by jax's names."""
        return self.manifest.platforms

    @functools.cached_property
    def state(self) -> dict[str, jax.Array]:
        """Every array that the functions take from the weights file, on the default device."""
        return {n: jax.numpy.asarray(from_pairs(self.stored[n], s.dtype)) for n, s in self.manifest.state.items()}

    def function(self, name: str) -> ArtifactFunction:
        """A function by name; raises CheckpointError for one that was not exported."""
        if not self.functions:
            raise CheckpointError(
                f"{self.prefix}: holds a static Program and no compiled function (it is fed sequences, or was saved "
                "with program_only); run it with static.load_inference_model and an Executor"
            )
        if name not in self.functions:
            raise CheckpointError(f"{self.prefix}: no function {name!r}{did_you_mean(name, self.functions)}")
        return self.functions[name]

    def call(self, inputs: Sequence[Any], function: str = MAIN) -> list[jax.Array]:
        """The outputs for these arrays, in the order of `inputs`; compiled once for each shape.

        Raises ShapeError or DTypeError, naming the input, for an array that does not fit.
        """
        chosen = self.function(function)
        arrays = [a if hasattr(a, "dtype") else np.asarray(a) for a in inputs]
        chosen.check(arrays)
        program = chosen.program_for([tuple(a.shape) for a in arrays])
        jitted = self._jitted.get(id(program))
        if jitted is None:
            jitted = self._jitted[id(program)] = jax.jit(program.call)
        return list(jitted(self._placed, arrays))

    @functools.cached_property
    def _placed(self) -> dict[str, jax.Array]:
        return jax.device_put(self.stored)


def read_own(prefix: str | os.PathLike[str]) -> Artifact:
    """Reads what `write` wrote to this prefix, checking every digest; runs no code of the model.

    Raises CheckpointError for a file that is missing or changed (which, the digest expected and the one found).
    """
    base = Path(prefix)
    manifest = ArtifactManifest.read(base.with_name(f"{base.name}.json"))
    path = check(base.parent, manifest.weights)
    with open(path, "rb") as file:
        stored, _ = safetensors_file.read(file, str(path))
    _check_state(path, manifest, stored)
    functions = {
        name: ArtifactFunction(name, record, [_program(base.parent, p) for p in record.programs])
        for name, record in manifest.functions.items()
    }
    return Artifact(base, manifest, {n: stored[n] for n in manifest.state}, functions)


def _program(folder: Path, record: ProgramRecord) -> ExportedProgram:
    return ExportedProgram(record, check(folder, record.file).read_bytes())


def _check_state(path: Path, manifest: ArtifactManifest, stored: Mapping[str, np.ndarray]) -> None:
    for name, spec in manifest.state.items():
        want = stored_aval(spec)
        have = stored.get(name)
        if have is None or have.shape != want.shape or have.dtype != want.dtype:
            found = "missing" if have is None else f"{have.dtype}{list(have.shape)}"
            raise CheckpointError(f"{path}: {name} is {found}, the manifest says {want.dtype}{list(want.shape)}")
