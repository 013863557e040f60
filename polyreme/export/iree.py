"""Artefacts compiled by IREE, a second compiler: for processors here, and the way to Vulkan and embedded targets.

The module takes the weights of PREFIX.safetensors, in the order of the program, then the inputs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.errors import CheckpointError, ConfigError
from polyreme.export.artifact import Artifact, ArtifactFunction, ExportedProgram
from polyreme.export.manifest import MAIN
from polyreme.export.reading import read

TARGET = "llvm-cpu"
_PACKAGES = ("iree-base-compiler", "iree-base-runtime")
_MAX_PROBLEM = 400  # characters of what the compiler says


def compile_artifact(artifact: Artifact) -> list[Path]:
    """Compile the programs of an artefact's main function for this processor; returns the files, PREFIX.N.vmfb.

    Beside them PREFIX.iree.json says which programs they are of. Raises ConfigError where IREE is not installed, for a
    program with open sizes or of several platforms, and for one with an operation that IREE does not take.
    """
    check_installed()
    compiler = import_module("iree.compiler")
    records, files = [], []
    for number, program in enumerate(_programs(artifact)):
        file = program.record.file
        words = ["--iree-llvmcpu-target-cpu=host"]
        try:
            code = compiler.compile_str(
                bytes(program.exported.mlir_module_serialized), target_backends=[TARGET], extra_args=words
            )
        except compiler.CompilerToolError as error:
            raise ConfigError(f"{file.name}: IREE {version()} does not compile it: {_problem(str(error))}") from None
        path = artifact.prefix.with_name(f"{artifact.prefix.name}.{number}.vmfb")
        path.write_bytes(code)
        files.append(path)
        records.append({"program": file.name, "digest": file.digest, "module": path.name})
    index = {"iree": version(), "target": TARGET, "modules": records}
    _index(artifact.prefix).write_text(json.dumps(index, indent=1) + "\n")
    return files


class IreeModel:
    """A compiled artefact to run, as compile_artifact wrote it: the weights lie on the device, once for all of its
    programs."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """Raises CheckpointError for modules that are missing, or of other programs than the artefact has now."""
        check_installed()
        artifact = read(prefix)
        self._runtime: Any = import_module("iree.runtime")
        self._function: ArtifactFunction = artifact.function(MAIN)
        programs = _programs(artifact)
        modules = _modules(artifact, programs)
        self._config = self._runtime.Config("local-task")
        device = self._config.device
        weights = [artifact.stored[name] for name in sorted(artifact.stored)]  # as jax orders a dict
        placed = [self._runtime.asdevicearray(device, np.ascontiguousarray(array)) for array in weights]
        self._programs: list[tuple[ExportedProgram, Any, list[Any], list[int]]] = []
        for program, module in zip(programs, modules, strict=True):
            context = self._runtime.SystemContext(config=self._config)
            loaded = self._runtime.VmModule.copy_buffer(context.instance, module)
            context.add_vm_module(loaded)
            kept = program.exported.module_kept_var_idx
            taken = [placed[at] for at in kept if at < len(placed)]
            inputs = [at - len(placed) for at in kept if at >= len(placed)]
            self._programs.append((program, context.modules[loaded.name]["main"], taken, inputs))

    def __call__(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs for these arrays. Raises ShapeError or DTypeError, naming the input, where one does not fit."""
        self._function.check(inputs)
        chosen = self._function.program_for([array.shape for array in inputs])
        _, main, weights, places = next(row for row in self._programs if row[0] is chosen)
        outputs = main(*weights, *(np.ascontiguousarray(inputs[at]) for at in places))
        return [each.to_host() for each in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]


def check_installed() -> None:
    """Raise ConfigError where IREE is not."""
    if find_spec("iree") is None or find_spec("iree.compiler") is None or find_spec("iree.runtime") is None:
        raise ConfigError(f"IREE is not installed ({', '.join(_PACKAGES)}); run pip install polyreme[iree]")


def version() -> str:
    """The version of the compiler."""
    return metadata.version(_PACKAGES[0])


def _programs(artifact: Artifact) -> list[ExportedProgram]:
    """The programs of the main function, each checked to be fit for compilation."""
    chosen: list[ExportedProgram] = []
    for program in artifact.function(MAIN).programs:
        if not isinstance(program, ExportedProgram):
            raise ConfigError(
                f"{artifact.prefix}: IREE takes artefacts of polyreme's own; export this model with jit.save"
            )
        name = program.record.file.name
        if len(program.exported.platforms) > 1:
            raise ConfigError(
                f"{name}: one program for {', '.join(program.exported.platforms)}, and IREE takes one for cpu alone; "
                'save it with platforms=("cpu",)'
            )
        for spec in program.inputs:
            if spec.open_dims:
                raise ConfigError(
                    f"{name}: input {spec.name!r} has open sizes, and IREE takes none; give every size in its "
                    "InputSpec, or --batch and --length"
                )
        chosen.append(program)
    return chosen


def _modules(artifact: Artifact, programs: Sequence[ExportedProgram]) -> list[bytes]:
    index, remedy = _index(artifact.prefix), "compile it again (polyreme export --to iree)"
    try:
        records = json.loads(index.read_text())["modules"]
        compiled = {record["digest"]: artifact.prefix.with_name(Path(record["module"]).name) for record in records}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not what IREE's modules are listed in ({error}); {remedy}") from None
    modules = []
    for program in programs:
        file = program.record.file
        path = compiled.get(file.digest)
        if path is None or not path.is_file():
            raise CheckpointError(f"{index}: has no module of {file.name} as it is now; {remedy}")
        modules.append(path.read_bytes())
    return modules


def _index(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.iree.json")


def _problem(text: str) -> str:
    """The compiler's first error, without the program that it quotes."""
    lines = [line.strip() for line in text.splitlines() if "error:" in line]
    return (lines[0].partition("error:")[2].strip() if lines else " ".join(text.split()))[:_MAX_PROBLEM]
