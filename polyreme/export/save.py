"""jit.save: a Layer or function written as an artefact."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyreme.call_site import where_defined
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, did_you_mean
from polyreme.export.manifest import MAIN
from polyreme.export.nesting import leaf_names, plain, to_json
from polyreme.export.program import PLATFORMS, check_platforms, lowering_for
from polyreme.export.spec import ArraySpec, as_specs, combinations
from polyreme.export.tracing import TracedFunction, eval_mode
from polyreme.export.writer import Function, write_functions
from polyreme.jit.structure import flatten, rebuild
from polyreme.jit.to_static import StaticFunction
from polyreme.nn.layer import Layer

Buckets = Mapping[str, Mapping[int, Sequence[int]]]


@dataclass(frozen=True)
class _Options:
    """What may follow input_spec. Those of Paddle's that change nothing here take only the value they stand for."""

    platforms: Sequence[str] = PLATFORMS
    buckets: Buckets = field(default_factory=dict)
    differentiable: bool = True
    with_hook: bool = False
    skip_forward: bool = False
    clip_extra: bool = True
    skip_prune_program: bool = False  # what is saved holds just what its results need
    combine_params: bool = True
    output_spec: Any = None
    input_names_after_prune: Any = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> _Options:
        """Checked options; ConfigError for one that is unknown or cannot be honoured."""
        for name in settings:
            if name not in cls.__dataclass_fields__:
                raise ConfigError(f"jit.save: unknown option {name!r}{did_you_mean(name, cls.__dataclass_fields__)}")
        options = cls(**settings)
        if options.output_spec is not None or options.input_names_after_prune is not None:
            raise ConfigError(
                "jit.save: output_spec and input_names_after_prune cut a recorded program; here, save a function that "
                "takes and returns just what is wanted"
            )
        if not options.combine_params:
            raise ConfigError("jit.save: combine_params=False (a file per parameter) is not supported; leave it out")
        return options


def save(layer: Any, path: str | os.PathLike[str], input_spec: Sequence[Any] | None = None, **configs: Any) -> None:
    """Writes a Layer or function as PATH.stablehlo, PATH.safetensors and PATH.json, to be run by jit.load, by
    polyreme.inference, or by jax alone.

    Layers are saved as they act in eval mode, whatever mode they are in, and are left in that mode. input_spec: one
    entry for each argument: an InputSpec (None or -1 where a size is open), a Tensor or ndarray for its shape and
    dtype, a list, tuple or dict of these, or a plain value, which becomes part of the program. Left out, a to_static
    function gives its own, or the arguments of the only call it has seen. Other methods of a Layer that are to_static
    are saved too.

    Options: platforms=("cpu", "cuda", "tpu"); buckets={input name: {dim: sizes}}, a program for each combination;
    differentiable=True: what is loaded can be trained on, if jax can differentiate it; with_hook=False: leave out the
    forward hooks of `layer` itself (those of its sublayers always run); skip_forward=False: leave out forward.

    Raises ConfigError for options and specs that make no sense, CaptureError for code that cannot become a pure program
    (host reads, random numbers, changed state), naming its line.

    >>> import tempfile
    >>> from polyreme.nn import Linear
    >>> from polyreme.jit import load, save
    >>> from polyreme.eager.tensor import to_tensor
    >>> path = tempfile.mkdtemp() + "/net"
    >>> save(Linear(4, 2), path, [to_tensor([[1.0, 2.0, 3.0, 4.0]])])
    >>> load(path)(to_tensor([[1.0, 2.0, 3.0, 4.0]])).shape
    paddle.Size([1, 2])
    """
    options = _Options.of(configs)
    functions = _functions_of(layer, input_spec, options)
    _check_buckets(options.buckets, functions.values())
    root = layer if isinstance(layer, Layer) else getattr(_plain(layer), "__self__", None)
    layers = root.sublayers(include_self=True) if isinstance(root, Layer) else []
    with eval_mode(layers), lowering_for(check_platforms(options.platforms)):
        refusal = _discover(functions.values(), options.buckets)
        names = _names(root, functions.values())
        tensors = {name: t for t, name in names.values()}
        by_id = {key: name for key, (_, name) in names.items()}
        write_functions(
            path,
            {name: _export(f, by_id, options.buckets) for name, f in functions.items()},
            {name: state.read(t) for name, t in tensors.items()},
            platforms=options.platforms,
            differentiable=refusal or options.differentiable,
            extra={"layer": type(root).__name__ if root is not None else None, "state": _kinds(root, tensors)},
        )


def _functions_of(layer: Any, input_spec: Any, options: _Options) -> dict[str, TracedFunction]:
    if not isinstance(layer, Layer):
        if not callable(layer):
            raise ConfigError(f"jit.save: {layer!r} is neither a Layer nor a function")
        return {MAIN: _trace(layer, input_spec, options)}
    functions = {}
    if not options.skip_forward:
        functions[MAIN] = _trace(layer.forward, input_spec, options, layer if options.with_hook else None)
    for name in dir(type(layer)):
        if name != MAIN and isinstance(inspect.getattr_static(type(layer), name), StaticFunction):
            functions[name] = _trace(getattr(layer, name), None, options)
    if not functions:
        raise ConfigError("jit.save: skip_forward=True, and no other method is to_static; there is nothing to save")
    return functions


def _plain(fn: Any) -> Any:
    return fn.fn if isinstance(fn, StaticFunction) else fn


def _trace(fn: Any, input_spec: Any, options: _Options, run: Any = None) -> TracedFunction:
    """fn: the function that says what is taken; run: what is called in its stead."""
    spec = input_spec if input_spec is not None else _known_spec(fn)
    if isinstance(spec, (str, bytes, Mapping)) or not isinstance(spec, Sequence):
        raise ConfigError(f"jit.save: input_spec is {type(spec).__name__}; give a list with an entry for each argument")
    plain_fn = _plain(fn)
    arguments = _argument_names(plain_fn, len(spec))
    leaves: list[Any] = []
    nesting = flatten(tuple(spec), leaves)
    paths = leaf_names(nesting, arguments, "x")
    inputs = iter(as_specs([_Named(n, x) for n, x in zip(paths, leaves, strict=True) if _is_input(x)], "input"))
    filled = [next(inputs) if _is_input(x) else plain(x, "jit.save: input_spec") for x in leaves]
    where = where_defined(getattr(plain_fn, "__func__", plain_fn))
    return TracedFunction(run or plain_fn, where, arguments, nesting, filled, options.differentiable)


@dataclass(frozen=True)
class _Named:
    """An input's spec under its own name if it was given one, else under its argument's."""

    path: str
    spec: Any

    @property
    def name(self) -> str:
        own = None if isinstance(self.spec, TensorState) else getattr(self.spec, "name", None)
        return own or self.path

    @property
    def shape(self) -> Any:
        return self.spec.shape

    @property
    def dtype(self) -> Any:
        return self.spec.dtype


def _is_input(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _known_spec(fn: Any) -> Sequence[Any]:
    """The input_spec of a to_static function, or the arguments of its only call so far."""
    where = where_defined(_plain(fn))
    if isinstance(fn, StaticFunction) and fn.input_spec is not None:
        return fn.input_spec
    seen = {key[:2] for key in fn.programs} if isinstance(fn, StaticFunction) else set()
    if len(seen) != 1:
        have = f"it has been called with {len(seen)} kinds of arguments" if seen else "it has not been captured"
        raise ConfigError(
            f"jit.save: no input_spec for {where}, and {have}; give input_spec=[InputSpec([None, 4], 'float32'), ...] "
            "with an entry for each argument"
        )
    nesting, signature = seen.pop()
    leaves = [ArraySpec("", entry[2], entry[1]) if entry[0] == "tensor" else entry[1] for entry in signature]
    args, kwargs = rebuild(nesting, iter(leaves))
    if kwargs:
        raise ConfigError(f"jit.save: {where} was called with keywords {list(kwargs)}; give input_spec, in order")
    return args


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(fn).parameters.values())
    names = [p.name for p in parameters if p.kind in kinds]
    variadic = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    if count > len(names):
        if variadic is None:
            raise ConfigError(
                f"jit.save: input_spec has {count} entries, {where_defined(fn)} takes {len(names)}: {', '.join(names)}"
            )
        names += [f"{variadic}_{i}" for i in range(count - len(names))]
    needed = [p.name for p in parameters[count:] if p.kind in kinds and p.default is inspect.Parameter.empty]
    if needed:
        raise ConfigError(
            f"jit.save: input_spec has {count} entries, {where_defined(fn)} needs {', '.join(needed)} too"
        )
    return names[:count]


def _discover(functions: Iterable[TracedFunction], buckets: Buckets) -> str:
    """Lets every function learn its state; returns why one of them cannot be differentiated, if so."""
    refusal = ""
    for function in functions:
        function.discover(combinations(function.inputs, _own_buckets(function, buckets)))
        refusal = refusal or function.refusal
    return refusal


def _names(root: Any, functions: Iterable[TracedFunction]) -> dict[int, tuple[Tensor, str]]:
    """id -> (state Tensor, its name): structured names for what the Layer holds, Tensors' own names for the rest."""
    named: dict[int, tuple[Tensor, str]] = {}
    read = {id(t): t for f in functions for t in f.reads}
    if isinstance(root, Layer):
        for name, tensor in root.to_static_state_dict().items():
            # a table that is not in checkpoints is not wanted either unless it is read
            if id(tensor) in read or name in root.state_dict():
                named.setdefault(id(tensor), (tensor, name))
        for name, tensor in root.named_parameters():
            named.setdefault(id(tensor), (tensor, name))
    taken = {name for _, name in named.values()}
    for key, tensor in read.items():
        if key not in named:
            name = tensor.name if tensor.name not in taken else f"{tensor.name}_{len(named)}"
            taken.add(name)
            named[key] = (tensor, name)
    return named


def _kinds(root: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    parameters = {id(p) for p in root.parameters()} if isinstance(root, Layer) else set()
    saved = root.state_dict() if isinstance(root, Layer) else {}
    return {
        name: {
            "parameter": id(t) in parameters or (not isinstance(root, Layer) and not t.stop_gradient),
            "stop_gradient": t.stop_gradient,
            "persistable": name in saved or id(t) in parameters or not isinstance(root, Layer),
        }
        for name, t in tensors.items()
    }


def _own_buckets(function: TracedFunction, buckets: Buckets) -> Buckets:
    own = {s.name for s in function.inputs}
    return {name: dims for name, dims in buckets.items() if name in own}


def _check_buckets(buckets: Buckets, functions: Iterable[TracedFunction]) -> None:
    known = {s.name for f in functions for s in f.inputs}
    for name in buckets:
        if name not in known:
            raise ConfigError(f"jit.save: buckets: there is no input {name!r}{did_you_mean(name, known)}")


def _export(function: TracedFunction, names: Mapping[int, str], buckets: Buckets) -> Function:
    return Function(
        function.call(names),
        function.inputs,
        function.outputs,
        _own_buckets(function, buckets),
        {
            "reads": [names[id(t)] for t in function.reads],
            "arguments": {
                "names": function.arguments,
                "structure": to_json(function.nesting, f"{function.where}: input_spec"),
                "leaves": [{"tensor": True} if isinstance(x, ArraySpec) else {"value": x} for x in function.leaves],
            },
            "result": function.result,
        },
    )
