"""fluid.io: variables in files, one for each or one for all, models for inference, and fluid.save and fluid.load.

Files are safetensors under a digest, never pickles: a file of one variable is named after it, as in 1.7,
but its contents are this project's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError, ProgramError, did_you_mean
from polyreme.export.reading import is_paddle
from polyreme.fluid.reader import DataLoader, PyReader
from polyreme.io.paddle_tensors import is_record, read_all
from polyreme.nn.parameter import Parameter
from polyreme.program import stored
from polyreme.program.current import defaults
from polyreme.program.encoding import Arrays
from polyreme.program.program import Program
from polyreme.program.scope import Scope, global_scope
from polyreme.reader import batch, buffered, cache, chain, compose, firstn, map_readers, shuffle, xmap_readers
from polyreme.static import io as static_io
from polyreme.static.io import load_program_state, set_program_state

__all__ = [
    "DataLoader",
    "PyReader",
    "batch",
    "buffered",
    "cache",
    "chain",
    "compose",
    "firstn",
    "get_program_parameter",
    "get_program_persistable_vars",
    "is_parameter",
    "is_persistable",
    "load",
    "load_inference_model",
    "load_params",
    "load_persistables",
    "load_program_state",
    "load_vars",
    "map_readers",
    "save",
    "save_inference_model",
    "save_params",
    "save_persistables",
    "save_vars",
    "set_program_state",
    "shuffle",
    "xmap_readers",
]

_KIND = "polyreme.variables"
_SCHEDULE = "@LR_SCHEDULE_"
_MODEL = "__model__"

# which variables


def is_parameter(var: Any) -> bool:
    """Whether a variable is a parameter: a predicate for save_vars and load_vars."""
    return isinstance(var, Parameter)


def is_persistable(var: Any) -> bool:
    """Whether a variable outlives a run: a predicate for save_vars and load_vars."""
    return bool(var.persistable)


def get_program_parameter(program: Program) -> list[Tensor]:
    """The parameters of a Program, those of Layers with values that it uses included."""
    return [v for v in stored.persistables(program).values() if isinstance(v, Parameter)]


def _parameter_names(program: Program) -> list[str]:
    return [n for n, v in stored.persistables(program).items() if isinstance(v, Parameter)]


def get_program_persistable_vars(program: Program) -> list[Tensor]:
    """The variables of a Program that outlive a run."""
    return list(stored.persistables(program).values())


def _choose(
    what: str, program: Program, scope: Scope, vars: Sequence[Any] | None, predicate: Callable[[Any], bool] | None
) -> list[str]:
    """Names of the variables asked for; ProgramError for what is none of the Program's, or not persistable."""
    known = _variables(program, scope)
    if vars is None:
        if predicate is None:
            raise ConfigError(f"{what}: give vars, a list of Variables, or predicate, a function that chooses them")
        return [name for name, variable in known.items() if predicate(variable)]
    names = [v if isinstance(v, str) else v.name for v in vars]
    for name in names:
        if name not in known:
            raise ProgramError(
                f"{what}: {name!r} is no persistable variable of the Program{did_you_mean(name, known)}; only those "
                "have values between runs"
            )
    return names


def _variables(program: Program, scope: Scope) -> dict[str, Any]:
    """Persistable variables, and the state of optimizers where their parameters have values."""
    result: dict[str, Any] = dict(stored.persistables(program))
    for name, tensor in _optimizer_state(program, scope).items():
        result[name] = _StateVariable(name, tensor)
    return result


def _optimizer_state(program: Program, scope: Scope) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for op in stored.optimizers(program):
        if all(scope.find(p) is not None for p, _ in op.pairs):
            found.update(scope.optimizer(op).state_tensors(op.key))
    return found


class _StateVariable:
    """What a predicate is given of a variable that an optimizer keeps."""

    persistable = True

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.shape, self.dtype = name, tensor.shape, tensor.dtype


def _plain(program: Any) -> Program:
    """The Program meant: the default main one, that of a CompiledProgram, or the one given."""
    if program is None:
        return defaults.main
    found = program if isinstance(program, Program) else getattr(program, "_program", None)
    if not isinstance(found, Program):
        raise TypeError(f"main_program is a Program, got {type(program).__name__}")
    return found


# variables in files


def save_vars(
    executor: Any, dirname: str | os.PathLike[str], main_program: Any = None, vars: Sequence[Any] | None = None,
    predicate: Callable[[Any], bool] | None = None, filename: str | None = None,
) -> None:  # fmt: skip
    """Write the values, in the scope in force, of variables: DIRNAME/<variable> each, or all in DIRNAME/FILENAME.

    vars: Variables or names; None takes those for which predicate(variable) is true. The state of optimizers counts
    among the variables. Each file appears whole or not at all. executor is for the signature.
    """
    program, scope = _plain(main_program), global_scope()
    names = _choose("save_vars", program, scope, vars, predicate)
    _write(dirname, _values(program, scope, names), filename)


def save_params(
    executor: Any, dirname: str | os.PathLike[str], main_program: Any = None, filename: str | None = None
) -> None:
    """save_vars of every parameter; in Programs made by fluid.layers the statistics of normalization are parameters."""
    program = _plain(main_program)
    save_vars(executor, dirname, program, _parameter_names(program), None, filename)


def save_persistables(
    executor: Any, dirname: str | os.PathLike[str], main_program: Any = None, filename: str | None = None
) -> None:
    """save_vars of all that training needs to continue: persistable variables, the state of optimizers and schedules,
    and where the Program's stream of random numbers is, if it has a random_seed.
    """
    program, scope = _plain(main_program), global_scope()
    arrays = stored.values_of(program, scope, stored.persistables(program))
    if stored.optimizers(program):
        state, schedules = stored.training_state(program, scope)
        arrays |= state | {f"{_SCHEDULE}{key}": _as_bytes(kept) for key, kept in schedules.items()}
    _write(dirname, arrays, filename)


def load_vars(
    executor: Any, dirname: str | os.PathLike[str], main_program: Any = None, vars: Sequence[Any] | None = None,
    predicate: Callable[[Any], bool] | None = None, filename: str | None = None,
) -> None:  # fmt: skip
    """Give variables the values that save_vars and the like wrote, in the scope in force; the others stay as they are.

    So training starts from parameters made elsewhere: run the startup program, load those there are, and go on:
    `load_vars(exe, d, main, predicate=lambda v: os.path.exists(os.path.join(d, v.name)))`.

    Files that PaddlePaddle wrote are read too: one a variable, or one of all variables that are asked for. Raises
    CheckpointError, naming them, for files or variables that are missing or changed, and for shapes and dtypes that do
    not fit.
    """
    program, scope = _plain(main_program), global_scope()
    names = _choose("load_vars", program, scope, vars, predicate)
    arrays = _read(dirname, names, filename)
    _put(program, scope, arrays, os.fspath(dirname))


def load_params(
    executor: Any, dirname: str | os.PathLike[str], main_program: Any = None, filename: str | None = None
) -> None:
    """load_vars of every parameter. A single file must hold just these; a folder may hold more."""
    program, scope = _plain(main_program), global_scope()
    names = _parameter_names(program)
    _put(program, scope, _read(dirname, names, filename, strict=True), os.fspath(dirname))


def load_persistables(
    executor: Any, dirname: str | os.PathLike[str], main_program: Any = None, filename: str | None = None
) -> None:
    """What save_persistables wrote, so that training continues exactly; the startup program need not have run.

    Files that PaddlePaddle wrote are read too, with the state of optimizers.
    """
    program, scope = _plain(main_program), global_scope()
    where, declared = os.fspath(dirname), stored.persistables(program)
    if _is_from_paddle(dirname, filename, declared):
        from_folder = filename is None
        arrays = stored.paddle_folder(dirname) if from_folder else stored.paddle_file(program, _path(dirname, filename))
        stored.put_paddle_state(program, scope, arrays, where)
        return
    everything = None if filename is None else _open(_path(dirname, filename), declared)
    stored.put(program, scope, _take(where, declared, everything, dirname), where)
    training = list(_optimizer_state(program, scope))
    schedules = [op.key for op in stored.optimizers(program) if op.optimizer._scheduler is not None]
    extras = [f"{_SCHEDULE}{key}" for key in schedules]
    stream = f"{stored.STREAM}_{program.random_seed}"
    if program.random_seed and stored.optimizers(program) and _has(dirname, stream, everything):
        training.append(stream)
    if everything is not None:
        stored.check_names(_path(dirname, str(filename)), everything, [*declared, *training, *extras])
    if training:
        kept = _take(where, extras, everything, dirname)
        state = {key: _from_bytes(kept[f"{_SCHEDULE}{key}"], where) for key in schedules}
        arrays = _take(where, training, everything, dirname)
        stored.put_training_state(program, scope, arrays, state, where)


def _is_from_paddle(dirname: Any, filename: str | None, declared: Iterable[str]) -> bool:
    name = next(map(_file_of, declared), None) if filename is None else filename
    if name is None or not os.path.isfile(path := _path(dirname, name)):
        return False
    with open(path, "rb") as file:
        return is_record(file.read(12))


def _take(where: str, names: Iterable[str], everything: Arrays | None, dirname: Any) -> Arrays:
    if everything is None:
        return _read(dirname, list(names), None)
    missing = [n for n in names if n not in everything]
    if missing:
        raise CheckpointError(f"{where} lacks {', '.join(map(repr, missing[:8]))}")
    return {n: everything[n] for n in names}


def _has(dirname: Any, name: str, everything: Arrays | None) -> bool:
    return os.path.exists(_path(dirname, _file_of(name))) if everything is None else name in everything


def _values(program: Program, scope: Scope, names: Sequence[str]) -> Arrays:
    state = _optimizer_state(program, scope)
    arrays = stored.values_of(program, scope, [n for n in names if n not in state])
    return arrays | {n: np.asarray(state[n].numpy()) for n in names if n in state}


def _put(program: Program, scope: Scope, arrays: Mapping[str, np.ndarray], where: str) -> None:
    declared = stored.persistables(program)
    stored.put(program, scope, {n: a for n, a in arrays.items() if n in declared}, where)
    stored.put_into(_optimizer_state(program, scope), {n: a for n, a in arrays.items() if n not in declared}, where)


def _as_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _from_bytes(array: np.ndarray, where: str) -> Any:
    try:
        return json.loads(array.tobytes())
    except ValueError as error:
        raise CheckpointError(f"{where}: the state of a schedule is malformed ({error})") from error


def _write(dirname: str | os.PathLike[str], arrays: Arrays, filename: str | None) -> None:
    if filename is not None:
        stored.write_file(_path(dirname, filename), stored.packed(arrays, _KIND))
        return
    for name, array in arrays.items():
        stored.write_file(_path(dirname, _file_of(name)), stored.packed({name: array}, _KIND))


def _read(dirname: Any, names: Sequence[str], filename: str | None, strict: bool = False) -> Arrays:
    """The values of these variables. strict: a single file holds nothing else."""
    if filename is not None:
        path = _path(dirname, filename)
        everything = _open(path, names)
        if strict:
            stored.check_names(path, everything, names)
        return _take(path, names, everything, dirname)
    missing = [n for n in names if not os.path.isfile(_path(dirname, _file_of(n)))]
    if missing:
        raise CheckpointError(
            f"{os.fspath(dirname)} has no file for {', '.join(map(repr, missing[:8]))}"
            f"{f' and {len(missing) - 8} more' if len(missing) > 8 else ''}; give filename if all are in one file"
        )
    values = {}
    for name in names:
        path = _path(dirname, _file_of(name))
        stored.check_names(path, read := _open(path, [name]), [name])
        values[name] = read[name]
    return values


def _open(path: str, names: Iterable[str]) -> Arrays:
    """The values in a file; in one that PaddlePaddle wrote they have no names, and stand in the order of names."""
    data = stored.read_file(path)
    if data[:4] == bytes(4):  # the version of a record; a file of ours begins with its length
        return read_all(data, sorted(names), path)
    return stored.unpacked(data, _KIND, path)[0]


def _path(dirname: str | os.PathLike[str], filename: str) -> str:
    if not os.fspath(dirname) or Path(filename).name != filename:
        raise ConfigError(f"dirname {os.fspath(dirname)!r} and filename {filename!r}: give a folder, and a name in it")
    return os.path.join(dirname, filename)


def _file_of(name: str) -> str:
    """A variable's file: its name, with what cannot be in a file's name written as %2F is."""
    return quote(name, safe="@:+ ")


# models for inference


def save_inference_model(
    dirname: str | os.PathLike[str], feeded_var_names: str | Sequence[str], target_vars: Any, executor: Any,
    main_program: Any = None, model_filename: str | None = None, params_filename: str | None = None,
    export_for_deployment: bool = True, program_only: bool = False,
) -> list[str]:  # fmt: skip
    """static.save_inference_model to DIRNAME/__model__ (or DIRNAME/MODEL_FILENAME); returns the names of target_vars.

    Values are in one file beside it whatever params_filename says. Raises ConfigError for export_for_deployment=False
    (use fluid.save) and program_only=True (use static.serialize_program).
    """
    if not export_for_deployment or program_only:
        raise ConfigError(
            "save_inference_model: export_for_deployment=False keeps what training needs, so use fluid.save; "
            "program_only=True keeps no values, so use static.serialize_program"
        )
    program, block = _plain(main_program), _plain(main_program).global_block()
    names = [feeded_var_names] if isinstance(feeded_var_names, str) else list(feeded_var_names)
    targets = list(target_vars) if isinstance(target_vars, (list, tuple)) else [target_vars]
    feeds = [block.var(n) for n in names]
    static_io.save_inference_model(_path(dirname, model_filename or _MODEL), feeds, targets, executor, program=program)
    return [v.name for v in targets]


def load_inference_model(
    dirname: str | os.PathLike[str], executor: Any, model_filename: str | None = None,
    params_filename: str | None = None, pserver_endpoints: Any = None,
) -> list[Any]:  # fmt: skip
    """-> [Program, names to feed, Variables to fetch] of what save_inference_model wrote; of a program and parameters
    that PaddlePaddle wrote, in one file or one each, what static.load_inference_model gives.

    Raises CheckpointError for files that are missing or changed, ConfigError for pserver_endpoints.
    """
    if pserver_endpoints is not None:
        raise ConfigError("load_inference_model: there are no parameter servers here; leave pserver_endpoints out")
    model = model_filename or _MODEL
    if is_paddle(Path(_path(dirname, model))):
        return static_io.load_inference_model(dirname, executor, model_filename=model, params_filename=params_filename)
    return static_io.load_inference_model(_path(dirname, model), executor)


# Programs and all their values


def save(program: Program, model_path: str | os.PathLike[str]) -> None:
    """static.save: MODEL_PATH.pdmodel, .pdparams, and .pdopt if there are optimizers."""
    static_io.save(_plain(program), model_path)


def load(
    program: Program, model_path: str | os.PathLike[str], executor: Any = None, var_list: Sequence[Any] | None = None
) -> None:
    """static.load: what save wrote to this path."""
    static_io.load(_plain(program), model_path, executor, var_list)
