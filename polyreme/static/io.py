"""Saving and loading in static mode: Programs, the values of their variables, models for inference.

Nothing is pickled: Programs are JSON, values safetensors, a model for inference an artefact of
polyreme.export, which polyreme.inference serves and Executors run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from polyreme import export
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError, ProgramError, did_you_mean
from polyreme.export.manifest import MAIN
from polyreme.export.program import PLATFORMS
from polyreme.io.paddle_pickle import is_pickle
from polyreme.io.serialization import load as load_file
from polyreme.jit.capture import Capture, watching
from polyreme.program import serial, stored
from polyreme.program.block import Variable as BlockVariable
from polyreme.program.current import defaults
from polyreme.program.encoding import Arrays
from polyreme.program.open_sizes import results_of
from polyreme.program.passes.dead import prune
from polyreme.program.program import Program
from polyreme.program.scope import Scope, global_scope
from polyreme.sequences import lod as lods
from polyreme.static.loaded_model import LoadedModel

__all__ = [
    "deserialize_persistables",
    "deserialize_program",
    "load",
    "load_from_file",
    "load_inference_model",
    "load_program_state",
    "normalize_program",
    "save",
    "save_inference_model",
    "save_to_file",
    "serialize_persistables",
    "serialize_program",
    "set_program_state",
]

_PARAMETERS, _TRAINING, _PERSISTABLES = "polyreme.parameters", "polyreme.training", "polyreme.persistables"
_OF = "parameters"  # metadata of .pdopt: which .pdparams it was saved with

# a Program and its values


def save(program: Program, model_path: str | os.PathLike[str], protocol: int = 4, **configs: Any) -> None:
    """Save a Program and what it needs to be trained on, from the scope in force.

    MODEL_PATH.pdmodel: the Program, as JSON. MODEL_PATH.pdparams: persistable variables (parameters, statistics) and
    the Tensors that the Program holds. MODEL_PATH.pdopt, if there is something in it: the state of optimizers and of
    their schedules, and where the Program's stream of random numbers is, if it is trained and has a random_seed. (With
    random_seed 0 numbers come from the default generator, which is the process's: see get_rng_state.) Values are
    safetensors.

    Raises ProgramError for variables without value and for what no file can hold. protocol takes its default only.
    """
    if protocol != 4 or configs:
        raise ConfigError(f"static.save: protocol={protocol!r}, {configs}: nothing is pickled here, leave these out")
    base, scope = stored.file_prefix("static.save", model_path), global_scope()
    text = _program("static.save", program).to_json()
    arrays, schedules = stored.training_state(program, scope) if stored.optimizers(program) else ({}, {})
    parameters = stored.packed(stored.values_of(program, scope, stored.persistables(program)), _PARAMETERS)
    stored.write_file(f"{base}.pdmodel", text.encode())
    if arrays or schedules:
        metadata = {_OF: _digest(parameters), **stored.schedules_as(schedules)}
        stored.write_file(f"{base}.pdopt", stored.packed(arrays, _TRAINING, metadata))
    else:
        Path(f"{base}.pdopt").unlink(missing_ok=True)
    stored.write_file(f"{base}.pdparams", parameters)


def load(
    program: Program, model_path: str | os.PathLike[str], executor: Any = None, var_list: Sequence[Any] | None = None
) -> None:
    """Give a Program's variables what static.save wrote, in the scope in force, so that training continues exactly.

    The startup program need not have run. var_list: these only, Variables or names, and nothing of optimizers;
    otherwise names must be the same in file and Program. executor is for the signature: variables that have a value
    keep their place. Schedules of the Program's optimizers continue too.

    Raises CheckpointError, naming what, for a file that is missing or changed, for names, shapes and dtypes that do not
    fit, and for a .pdopt that was saved with another .pdparams. Files that PaddlePaddle wrote are read as well.
    """
    _program("static.load", program)
    base, scope = stored.file_prefix("static.load", model_path), global_scope()
    if _is_pickle(f"{base}.pdparams"):
        names = None if var_list is None else [_name_of(v) for v in var_list]
        stored.put_paddle_state(program, scope, _pickled_state(base), f"{base}.pdparams", names)
        return
    arrays, digest = _parameters_in(base)
    if var_list is not None:
        names = [_name_of(v) for v in var_list]
        stored.check_names(f"{base}.pdparams, of var_list,", (n for n in names if n in arrays), names)
        stored.put(program, scope, {n: arrays[n] for n in names}, f"{base}.pdparams")
        return
    stored.check_names(f"{base}.pdparams", arrays, stored.persistables(program))
    trains = bool(stored.optimizers(program))
    training = _training_in(base, digest) if trains else None  # a clone for evaluation has no use for it
    stored.put(program, scope, arrays, f"{base}.pdparams")
    if training is not None:
        stored.put_training_state(program, scope, *training, f"{base}.pdopt")


def load_program_state(
    model_path: str | os.PathLike[str], var_list: Sequence[Any] | None = None
) -> dict[str, np.ndarray]:
    """Values by name that static.save wrote, those of optimizers too; var_list: of these only. PaddlePaddle's files of
    these names are read as well, and a folder in which it wrote one for each variable.

    Raises CheckpointError for files that are missing or changed, and for names that are not there.
    """
    if os.path.isdir(model_path) and not os.path.exists(f"{os.fspath(model_path)}.pdparams"):
        base, arrays = os.fspath(model_path), stored.paddle_folder(model_path)
    else:
        base = stored.file_prefix("load_program_state", model_path)
        if _is_pickle(f"{base}.pdparams"):
            arrays = _pickled_state(base)
        else:
            arrays, digest = _parameters_in(base)
            if os.path.exists(f"{base}.pdopt"):
                arrays.update(_training_in(base, digest)[0])
    if var_list is None:
        return arrays
    names = [_name_of(v) for v in var_list]
    stored.check_names(f"{base}, of var_list,", (n for n in names if n in arrays), names)
    return {n: arrays[n] for n in names}


def set_program_state(program: Program, state_dict: dict[str, Any]) -> list[str]:
    """Give variables of the Program values by name, in the scope in force; returns the names that were of no use.

    What state_dict does not have stays as it is: the rest of a Program may be initialized by its startup program.
    Raises CheckpointError for a shape or dtype that does not fit, ProgramError if no name fits.
    """
    return stored.set_state(_program("set_program_state", program), global_scope(), state_dict, "set_program_state")


def _pickled_state(base: str) -> Arrays:
    """Arrays by name in BASE.pdparams and, if there is one, BASE.pdopt, as PaddlePaddle writes them."""
    arrays: Arrays = {}
    for path in (f"{base}.pdparams", *[f"{base}.pdopt"] * os.path.exists(f"{base}.pdopt")):
        loaded = load_file(path, return_numpy=True)
        arrays |= {name: value for name, value in loaded.items() if isinstance(value, np.ndarray)}
    return arrays


def _is_pickle(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return is_pickle(file.read(12))


def _parameters_in(base: str) -> tuple[Arrays, str]:
    data = stored.read_file(f"{base}.pdparams")
    return stored.unpacked(data, _PARAMETERS, f"{base}.pdparams")[0], _digest(data)


def _training_in(base: str, digest: str) -> tuple[Arrays, dict[str, Any]]:
    where = f"{base}.pdopt"
    arrays, metadata = stored.unpacked(stored.read_file(where), _TRAINING, where)
    if metadata.get(_OF) != digest:
        raise CheckpointError(
            f"{where} was saved with another {base}.pdparams than the one beside it: saving was interrupted, or one of "
            "them was replaced; restore both, or delete the .pdopt and load parameters by var_list"
        )
    return arrays, stored.schedules_in(metadata, where)


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def _name_of(variable: Any) -> str:
    return variable if isinstance(variable, str) else variable.name


def _program(what: str, program: Any) -> Program:
    if not isinstance(program, Program):
        raise TypeError(f"{what} takes a Program, got {type(program).__name__}")
    return program


# a Program for inference


def normalize_program(program: Program, feed_vars: Any, fetch_vars: Any, **kwargs: Any) -> Program:
    """The part of a Program that computes fetch_vars from feed_vars, as it acts in evaluation.

    skip_prune_program=True: all of its forward. Raises ProgramError where something else would have to be fed.
    """
    skip = kwargs.pop("skip_prune_program", False)
    if kwargs:
        raise ConfigError(f"normalize_program: unknown options {', '.join(kwargs)}")
    feeds, fetches = _variables("feed_vars", feed_vars), _variables("fetch_vars", fetch_vars)
    test = _program("normalize_program", program).clone(for_test=True)
    for v in fetches:
        if test.global_block().find_var(v.name) is None and v.name not in test.captured:
            raise ProgramError(f"fetch_vars: {v.name!r} is not in the Program's forward part; give what it computes")
    pruned = test if skip else prune(test, [v.name for v in fetches], [v.name for v in feeds])
    block, fed = pruned.global_block(), {v.name for v in feeds}
    for v in feeds:
        for beside in lods.fed_beside(v):
            fed.add(beside.name)
            block.vars.setdefault(beside.name, test.global_block().vars[beside.name])
    needed = {n for op in block.ops for n in op.reads()}
    missing = [
        n for n, v in block.vars.items() if isinstance(v, BlockVariable) and v.is_data and n in needed and n not in fed
    ]
    if missing:
        raise ProgramError(
            f"{[v.name for v in fetches]} need {missing} to be fed, which feed_vars {sorted(fed)} lacks; add them"
        )
    return pruned


def _variables(what: str, given: Any) -> list[Tensor]:
    result = list(given) if isinstance(given, (list, tuple)) else [given]
    if not result and what == "fetch_vars":
        raise ConfigError("fetch_vars is empty; give the Variables that the model computes")
    for v in result:
        if not isinstance(v, TensorState):
            raise TypeError(f"{what} holds Variables, got {type(v).__name__}: {v!r}")
    return result  # type: ignore[return-value]


def serialize_program(feed_vars: Any, fetch_vars: Any, **kwargs: Any) -> bytes:
    """The Program from feed_vars to fetch_vars, as bytes. program: the default main one unless given."""
    return normalize_program(
        _main(kwargs, "serialize_program", fetch_vars), feed_vars, fetch_vars
    ).serialize_to_string()


def deserialize_program(data: bytes) -> Program:
    """The Program of what serialize_program gave; raises CheckpointError."""
    return Program.parse_from_string(data)


def serialize_persistables(feed_vars: Any, fetch_vars: Any, executor: Any, **kwargs: Any) -> bytes:
    """The values, in the scope in force, of the persistable variables between feed_vars and fetch_vars, as bytes."""
    program = normalize_program(_main(kwargs, "serialize_persistables", fetch_vars), feed_vars, fetch_vars)
    return stored.packed(stored.values_of(program, global_scope(), stored.persistables(program)), _PERSISTABLES)


def deserialize_persistables(program: Program, data: bytes, executor: Any) -> None:
    """Give the Program's variables what serialize_persistables gave, in the scope in force.

    Raises CheckpointError unless names, shapes and dtypes fit.
    """
    where = "deserialize_persistables: data"
    arrays, _ = stored.unpacked(data, _PERSISTABLES, where)
    stored.check_names(where, arrays, stored.persistables(program))
    stored.put(program, global_scope(), arrays, where)


def save_to_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write bytes to a file, which appears whole or not at all."""
    if not isinstance(content, bytes):
        raise TypeError(f"save_to_file writes bytes, got {type(content).__name__}")
    stored.write_file(path, content)


def load_from_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file; raises CheckpointError if it cannot be read."""
    return stored.read_file(path)


def _main(options: dict[str, Any], what: str, fetch_vars: Any) -> Program:
    """The Program meant: the one given, or that of the Variables, which is mostly the default main one."""
    program = options.pop("program", None)
    for ignored in ("legacy_format", "clip_extra"):  # of one format, and without extra attributes: no difference
        options.pop(ignored, None)
    if options:
        known = ("program", "legacy_format", "clip_extra")
        raise ConfigError(f"{what}: unknown option {next(iter(options))!r}{did_you_mean(next(iter(options)), known)}")
    if program is not None:
        return program
    first = next(iter(_variables("fetch_vars", fetch_vars)))
    return first.block.program if isinstance(first, BlockVariable) else defaults.main


_EXPORTED = ("platforms", "buckets", "program_only", "differentiable")


def save_inference_model(
    path_prefix: str | os.PathLike[str], feed_vars: Any, fetch_vars: Any, executor: Any, **kwargs: Any
) -> None:
    """Write the part of a Program from feed_vars to fetch_vars, with its values, as an artefact.

    PATH_PREFIX.stablehlo, .safetensors and .json (see export.write), which polyreme.inference serves and jax alone can
    run; the manifest holds the Program too, so that load_inference_model gives it back, to be run, cloned, trained on.
    Everything is under digests. Random numbers are refused, and operations that change persistable values.

    Options: program (default: that of fetch_vars); platforms, buckets, differentiable (as in export.write; with
    differentiable=True what jit.load gives can be trained on); program_only=True leaves out the StableHLO, so that only
    an Executor can run it. So it is, too, where sequences are fed (lod_level > 0): their offsets have sizes of their
    own. executor is for the signature.

    Raises CaptureError, naming input and dim, where an open size (-1) cannot be left open.
    """
    options = {name: kwargs.pop(name) for name in _EXPORTED if name in kwargs}
    program = _main(kwargs, "save_inference_model", fetch_vars)
    feeds, fetches = _variables("feed_vars", feed_vars), _variables("fetch_vars", fetch_vars)
    base = stored.file_prefix("save_inference_model", path_prefix)
    _write_model(base, program, feeds, fetches, options)


def _write_model(
    base: str, program: Program, feeds: list[Tensor], fetches: list[Tensor], options: dict[str, Any]
) -> None:
    pruned = normalize_program(program, feeds, fetches)
    changed = {n for op in pruned.every_op() for n in op.writes()}
    if changed:
        raise ProgramError(
            f"save_inference_model: what fetch_vars need changes {sorted(changed)} in place, and a model for inference "
            "has no state that changes; fetch what does not depend on it"
        )
    arrays: Arrays = {}
    feed, fetch = [v.name for v in feeds], [v.name for v in fetches]
    body = serial.to_body(pruned, arrays)
    arrays |= stored.values_of(pruned, global_scope(), stored.persistables(pruned))
    model = {"program": body, "feed": feed, "fetch": fetch}
    inputs = [_FedInput(v) for v in feeds]
    call = _pure(pruned, list(stored.persistables(pruned)), feed, fetch)
    only = options.pop("program_only", False) or any(getattr(v, "lod", ()) for v in feeds)
    unused = [name for name in ("platforms", "buckets", "differentiable") if only and options.get(name)]
    if unused:
        raise ConfigError(
            f"save_inference_model: {', '.join(unused)} are of the StableHLO, which program_only=True and sequences "
            "(lod_level > 0) leave out; leave them out too"
        )
    functions = {} if only else {MAIN: export.Function(call, inputs, fetch, options.pop("buckets", None))}
    platforms = options.pop("platforms", PLATFORMS)
    parameters = {p.name: {"parameter": True, "stop_gradient": not p.trainable} for p in pruned.all_parameters()}
    export.write_functions(
        base,
        functions,
        arrays,
        platforms=platforms,
        differentiable=options.pop("differentiable", False),
        extra={"static": model, "state": parameters},
    )


class _FedInput:
    """A fed Variable as export.write takes it."""

    def __init__(self, variable: Tensor) -> None:
        self.name, self.shape, self.dtype = variable.name, [int(s) for s in variable.shape], variable.dtype


class _Serving(Capture):
    """A capture that refuses random numbers."""

    def touch(self, tensor: TensorState) -> None:
        """A Tensor that is about to be read or changed; of a generator, its key."""
        if not isinstance(tensor, Tensor) and id(tensor) not in self.created_ids:
            raise ProgramError(
                "save_inference_model: what fetch_vars need takes random numbers even in evaluation, and what a model "
                "for inference computes depends on its inputs alone; feed the random numbers"
            )
        super().touch(tensor)


def _pure(program: Program, names: list[str], feed: list[str], fetch: list[str]) -> Callable[[dict, list], list]:
    """The Program as a function of arrays."""
    wanted = [program.global_block().vars[n]._array.name if n in program.global_block().vars else n for n in fetch]

    def call(arrays: dict[str, Any], inputs: list[Any]) -> list[jax.Array]:
        with watching(_Serving()), tape.GradEnabled(False):
            scope = Scope()
            for name in names:
                scope.adopt(name, Tensor(arrays[name]))
            given = dict(zip(feed, map(Tensor, inputs), strict=True))
            return [state.read(t) for t in results_of(program, scope, given, wanted)]

    return call


def _loaded(artifact: export.Artifact) -> list[Any]:
    model = LoadedModel(artifact)
    return [model, model.feeds, model.fetches]


def load_inference_model(path_prefix: str | os.PathLike[str], executor: Any, **kwargs: Any) -> list[Any]:
    """-> [Program, names to feed, Variables to fetch] of what save_inference_model wrote; values go into the scope in
    force. Needs no code of the model. executor is for the signature.

    Of PATH_PREFIX.pdmodel and PATH_PREFIX.pdiparams, which PaddlePaddle wrote, it gives a LoadedModel in the place of
    the Program, which an Executor runs and which keeps its own values. model_filename, params_filename: names of such
    files in the folder path_prefix; without params_filename each parameter has a file there, as 1.x writes them.

    >>> import tempfile
    >>> from polyreme.program.executor import Executor
    >>> from polyreme.program.mode import data, disable_static, enable_static
    >>> enable_static()
    >>> x, prefix = data("x_of_example", [None, 2]), tempfile.mkdtemp() + "/doubled"
    >>> save_inference_model(prefix, [x], [x * 2], None)
    >>> disable_static()
    >>> program, feed, fetch = load_inference_model(prefix, None)
    >>> Executor().run(program, feed={feed[0]: np.ones([1, 2], "float32")}, fetch_list=fetch)[0].tolist()
    [[2.0, 2.0]]

    Raises CheckpointError for files that are missing or changed (which), and for artefacts of jit.save.
    """
    model_file, parameter_file = (kwargs.pop(name, None) for name in ("model_filename", "params_filename"))
    if kwargs or (model_file is None and parameter_file is not None):
        raise ConfigError(
            f"load_inference_model: {', '.join(kwargs) or 'params_filename without model_filename'}: files are "
            "found by path_prefix alone, or by their names in the folder path_prefix"
        )
    if model_file is not None:
        parameters = os.path.join(path_prefix, str(parameter_file or ""))
        return _loaded(export.read(os.path.join(path_prefix, str(model_file)), parameters))
    base = stored.file_prefix("load_inference_model", path_prefix)
    artifact = export.read(base)
    if isinstance(artifact, export.PaddleArtifact):
        return _loaded(artifact)
    model = artifact.manifest.extra.get("static")
    if model is None:
        raise CheckpointError(
            f"{base}: holds no static Program; it was written by jit.save, so load it with jit.load or "
            "polyreme.inference"
        )
    arrays = {n: np.asarray(a) for n, a in artifact.state.items()}
    program = Program()
    serial.fill(program, serial.checked(model["program"]), arrays)
    block, own = program.global_block(), [n for n in stored.persistables(program) if n not in program.captured]
    stored.put(program, global_scope(), {n: arrays[n] for n in own}, base)
    fetch = [program.captured[n] if n in program.captured else block.var(n) for n in model["fetch"]]
    return [program, list(model["feed"]), fetch]
