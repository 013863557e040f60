"""A program of PaddlePaddle's as a function of arrays: its operations one by one, by the table of ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from polyreme.core import state
from polyreme.core.op import OPS
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError, DTypeError, ShapeError
from polyreme.io.paddle_tensors import read_all
from polyreme.paddle_models.call import PaddleCall, Value, as_tensor
from polyreme.paddle_models.control import CONTROL, members
from polyreme.paddle_models.description import PaddleBlock, PaddleOperation, PaddleVariable, read_description
from polyreme.paddle_models.ops import TABLE
from polyreme.paddle_models.pir import is_pir, read_pir

MAX_PROGRAM_BYTES = 1 << 28
"""A program is some hundred bytes for each operation; a longer file is one given by mistake."""


@dataclass(frozen=True)
class PaddleProgram:
    """A program and its parameters.

    inputs, outputs: what it is fed and gives, in order, by name; parameters: arrays by name; where: its file.
    """

    where: str
    block: PaddleBlock
    inputs: tuple[PaddleVariable, ...]
    outputs: tuple[PaddleVariable, ...]
    parameters: Mapping[str, np.ndarray]

    def run(self, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for these Tensors, in order; what depends on shapes and constants alone is computed at once.

        Raises CheckpointError, which names the operation, where it cannot be done as the program says.
        """
        values: dict[str, Value] = dict(parameters)
        values |= dict(zip([v.name for v in self.inputs], inputs, strict=True))
        values = self._run_block(self.block, values)
        lacking = [v.name for v in self.outputs if v.name not in values]
        if lacking:
            raise CheckpointError(f"{self.where}: fetches {lacking[0]!r}, which no operation gives")
        return [_as_declared(as_tensor(values[v.name]), v) for v in self.outputs]

    def _run_block(self, block: PaddleBlock, values: dict[str, Value]) -> dict[str, Value]:
        for operation in block.operations:
            if operation.type in CONTROL:
                values |= self._controlled(operation, values)
            elif operation.type not in _BORDERS:
                values |= self._results(operation, values)
        return values

    def _controlled(self, operation: PaddleOperation, values: dict[str, Value]) -> dict[str, Value]:
        try:
            return CONTROL[operation.type](operation, values, self._run_block)
        except (ConfigError, ShapeError):  # of an operation inside, which says so
            raise
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.where}: {operation}: its block and what is around it do not go together: {error!s:.300}"
            ) from error

    def _results(self, operation: PaddleOperation, values: Mapping[str, Value]) -> dict[str, Value]:
        call = PaddleCall(operation, values, self.where)
        if call.is_known and call.operation.inputs:
            # what jax would trace is asked for as a shape later on, so it is computed now
            with jax.ensure_compile_time_eval():
                results = self._applied(call)
            return {name: np.asarray(state.read(v)) if isinstance(v, Tensor) else v for name, v in results.items()}
        return self._applied(call)

    def _applied(self, call: PaddleCall) -> dict[str, Value]:
        try:
            results = TABLE[call.operation.type](call)
        except (CheckpointError, ConfigError, DTypeError, ShapeError) as error:
            raise type(error)(f"{self.where}: {call.operation}: {error}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.where}: {call.operation}: its inputs and attributes do not go together: {error!s:.300}"
            ) from error
        call.check_all_was_read()
        return call.named(results)


def _as_declared(value: Tensor, variable: PaddleVariable) -> Tensor:
    """A number in the shape [1] where the program says so: those of 1.x and 2.x have none without dims."""
    return OPS["reshape"](value, [1]) if not value.shape and variable.shape == (1,) else value


_BORDERS = {"feed": "feeds", "fetch": "fetches"}


def read_program(program_file: Path, parameter_file: Path | None) -> PaddleProgram:
    """Reads a program and its parameters, None for a program that has none; a folder has a file for each.

    Raises CheckpointError for files that are missing, cut or of another format, and for operations that are not in the
    table, all of them by name.
    """
    where = str(program_file)
    data = _bytes(program_file, MAX_PROGRAM_BYTES)
    block = read_pir(data, where) if is_pir(data[:64]) else read_description(data, where)
    _check_types(block, where)
    names = sorted(name for name, v in block.variables.items() if v.persistable)
    parameters = _parameters(names, parameter_file, where)
    for name, array in parameters.items():
        variable = block.variables[name]
        if array.dtype != variable.dtype or array.shape != variable.shape:
            raise CheckpointError(
                f"{parameter_file}: {name} is {array.dtype}{list(array.shape)}, and {where} has it as "
                f"{variable.dtype}{list(variable.shape)}; they are of two models"
            )
    inputs = _ends(block, "feed", "Out", where)
    return PaddleProgram(where, block, inputs, _ends(block, "fetch", "X", where), parameters)


def _bytes(path: Path, limit: int | None = None) -> bytes:
    try:
        if limit is not None and path.stat().st_size > limit:
            raise CheckpointError(
                f"{path}: {path.stat().st_size:,} bytes is too long for a program (at most {limit:,})"
            )
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _check_types(block: PaddleBlock, where: str) -> None:
    types = {inner.type for op in block.operations for inner in members(op)}
    missing = sorted(types - set(TABLE) - set(CONTROL) - _BORDERS.keys())
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} of its types of operations are not known here: {', '.join(missing[:60])}; known "
            f"are {len(TABLE)}, in polyreme/paddle_models/ops.py"
        )


def _parameters(names: list[str], path: Path | None, where: str) -> dict[str, np.ndarray]:
    if path is None:
        if names:
            raise CheckpointError(
                f"{where}: has {len(names)} parameters ({', '.join(names[:3])}, ...), and no file of them was given"
            )
        return {}
    if not path.is_dir():
        return read_all(_bytes(path), names, str(path))
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: has no file for {len(missing)} parameters of {where}: {', '.join(missing[:3])}; if all are in "
            "one file, give its name: params_filename"
        )
    parameters: dict[str, np.ndarray] = {}
    for name in names:
        parameters |= read_all(_bytes(path / name), [name], str(path / name))
    return parameters


def _ends(block: PaddleBlock, kind: str, slot: str, where: str) -> tuple[PaddleVariable, ...]:
    """The variables that are fed or fetched, in order."""
    marked = [op for op in block.operations if op.type == kind]
    places = [op.attributes.get("col") or 0 for op in marked]
    if not all(isinstance(place, int) for place in places):
        raise CheckpointError(f"{where}: {_BORDERS[kind]} at places {places[:9]!s:.80}, which are no numbers")
    ends = []
    for _, op in sorted(zip(places, marked, strict=True), key=lambda pair: pair[0]):
        (name,) = op.inputs.get(slot, op.outputs.get(slot, ())) or ("",)
        variable = block.variables.get(name)
        if variable is None or variable.dtype is None:
            raise CheckpointError(f"{where}: {_BORDERS[kind]} {name!r}, which is no Tensor of the program")
        ends.append(variable)
    if not ends:
        raise CheckpointError(f"{where}: {_BORDERS[kind]} nothing; it is a program for training: save it for inference")
    if len({v.name for v in ends}) < len(ends) and kind == "feed":
        raise CheckpointError(f"{where}: feeds {ends[0].name!r} twice")
    return tuple(ends)
