"""A model that PaddlePaddle saved for inference, as the same kind of thing as an artefact of our own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from polyreme import version
from polyreme.core import dtype as dtypes
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.export.artifact import Artifact, ArtifactFunction, misfit
from polyreme.export.manifest import MAIN, ArtifactManifest, File, FunctionRecord, ProgramRecord, digest_of
from polyreme.export.nesting import to_json
from polyreme.export.program import PLATFORMS, from_stored
from polyreme.export.spec import BATCH, ArraySpec
from polyreme.io.complex_pairs import to_pairs
from polyreme.jit.capture import Capture, watching
from polyreme.jit.structure import LEAF, Spec
from polyreme.paddle_models import PaddleProgram, PaddleVariable, read_program


class PaddleFunction:
    """A PaddlePaddle program as an exported one: call(stored state, list of arrays) -> list of arrays, to be traced.

    An ArtifactProgram.
    """

    inputs: list[ArraySpec]
    outputs: list[ArraySpec]

    def __init__(self, program: PaddleProgram, record: ProgramRecord) -> None:
        self.record = record
        self.inputs, self.outputs = record.inputs, record.outputs
        self._program = program

    def call(self, stored: dict[str, Any], inputs: Sequence[Any]) -> list[jax.Array]:
        """The outputs, in order."""
        parameters = self._program.parameters
        with watching(Capture()) as capture, tape.GradEnabled(False):
            tensors = {n: Tensor(from_stored(stored[n], array.dtype)) for n, array in parameters.items()}
            return [capture.read(t) for t in self._program.run(tensors, [Tensor(x) for x in inputs])]

    def fits(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether arrays of these shapes are what it takes."""
        return not any(misfit(spec, shape) for spec, shape in zip(self.inputs, shapes, strict=True))


class PaddleArtifact(Artifact):
    """A model of PaddlePaddle's files. prefix: the program's file without its suffix."""


def read_paddle(program_file: Path, parameter_file: Path | None) -> PaddleArtifact:
    """Reads a program and its parameters' file, or folder of files, None for a program that has none.

    Raises CheckpointError for files that are missing, damaged, or hold operations that are not known here.
    """
    program = read_program(program_file, parameter_file)
    inputs = [_spec(v, _input_symbol(v.name, len(program.inputs))) for v in program.inputs]
    outputs = [_spec(v, lambda dim, name=v.name: _symbol_of(name, dim)) for v in program.outputs]
    file = _file(program_file)
    weights = file if parameter_file is None or parameter_file.is_dir() else _file(parameter_file)
    names = [s.name for s in inputs]
    record = ProgramRecord(file, {}, inputs, outputs)
    manifest = ArtifactManifest(
        polyreme=version.full_version,
        jax=jax.__version__,
        platforms=PLATFORMS,
        weights=weights,
        state={n: ArraySpec(n, a.dtype, a.shape) for n, a in program.parameters.items()},
        functions={MAIN: FunctionRecord(inputs, outputs, [record], _calling(names, len(outputs)))},
        differentiable=True,
        extra={"state": {n: _kind(program.block.variables[n]) for n in program.parameters}},
    )
    stored = {n: to_pairs(a) for n, a in program.parameters.items()}
    function = ArtifactFunction(MAIN, manifest.functions[MAIN], [PaddleFunction(program, record)])
    return PaddleArtifact(program_file.with_suffix(""), manifest, stored, {MAIN: function})


def _calling(names: list[str], num_outputs: int) -> dict[str, Any]:
    """How the function is called: its inputs in order; one output as it is, several in a list."""
    arguments: Spec = (tuple, None, (LEAF,) * len(names))
    result: Spec = LEAF if num_outputs == 1 else (list, None, (LEAF,) * num_outputs)
    tensor = {"tensor": True}
    return {
        "arguments": {"names": names, "structure": to_json(arguments, "a program"), "leaves": [tensor] * len(names)},
        "result": {"structure": to_json(result, "a program"), "leaves": [tensor] * num_outputs},
    }


def _spec(variable: PaddleVariable, symbol: Any) -> ArraySpec:
    shape = tuple(None if n < 0 else n for n in variable.shape)
    symbols = tuple(symbol(dim) if n is None else None for dim, n in enumerate(shape))
    assert variable.dtype is not None  # read_program fetches and feeds Tensors alone
    return ArraySpec(variable.name, variable.dtype, shape, symbols)


def _input_symbol(name: str, num_inputs: int) -> Any:
    # leading dims of several inputs need not be one batch: rows of boxes beside images
    return lambda dim: BATCH if dim == 0 and num_inputs == 1 else _symbol_of(name, dim)


def _symbol_of(name: str, dim: int) -> str:
    return f"{re.sub(r'[^0-9a-zA-Z_]', '_', name)}_{dim}"


def _kind(variable: PaddleVariable) -> dict[str, Any]:
    # files of older releases do not say which are parameters; statistics of norms are not trained
    is_statistic = bool(re.search(r"norm.*\.w_[12]$", variable.name))
    has_numbers = variable.dtype is not None and dtypes.is_inexact(variable.dtype)
    is_parameter = has_numbers and (variable.is_parameter or not is_statistic)
    return {"parameter": is_parameter, "stop_gradient": is_statistic, "persistable": True}


def _file(path: Path) -> File:
    return File(path.name, path.stat().st_size, digest_of(path))
