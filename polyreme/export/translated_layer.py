"""jit.load: an artefact as a Layer, which runs and trains without the code it was saved from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.core.kernel import Kernel
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CaptureError, CheckpointError, ConfigError, GradError, ShapeError
from polyreme.export.artifact import Artifact, ArtifactFunction
from polyreme.export.manifest import MAIN
from polyreme.export.nesting import from_json
from polyreme.export.reading import read
from polyreme.jit.structure import LEAF, Spec, flatten, rebuild
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter


class TranslatedLayer(Layer):
    """A Layer that runs a saved program. Made by jit.load.

    Parameters and buffers have the names they were saved under. It acts as in eval mode, whatever train() says (dropout
    does not drop, batch norm uses its running statistics); gradients flow to parameters and inputs all the same, so it
    can be fine-tuned. Methods that were saved beside forward are methods here.
    """

    def __init__(self, artifact: Artifact) -> None:
        super().__init__()
        self.training = False
        self._artifact = artifact
        self._tensors: dict[str, Tensor] = {}
        kinds = artifact.manifest.extra.get("state", {})
        for name, array in artifact.state.items():
            self._tensors[name] = self._register(name, array, kinds.get(name, {}))
        self._calls: dict[str, _SavedFunction] = {n: _SavedFunction(f, artifact) for n, f in artifact.functions.items()}
        for name in self._calls:
            if name != MAIN:
                object.__setattr__(self, name, self._method(name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The saved forward."""
        if MAIN not in self._calls:
            raise CheckpointError(
                f"{self._artifact.prefix}: forward was not saved, only {', '.join(self._calls)}; call one of these"
            )
        return self._calls[MAIN](self._tensors, args, kwargs)

    def train(self, mode: bool = True) -> Self:
        """Notes the mode, which the saved program does not depend on.

        Raises GradError where the program was saved without gradients.
        """
        why = self._artifact.manifest.differentiable
        if mode and why is not True:
            raise GradError(
                f"{self._artifact.prefix} was saved without gradients"
                f"{f' ({why})' if why else ''}, so it cannot be trained; "
                + ("train the model it came from" if why else "save it with differentiable=True")
            )
        return super().train(mode)

    def __deepcopy__(self, memo: dict[Any, Any]) -> TranslatedLayer:
        """Another Layer over the same program, with parameters and buffers of its own."""
        made = memo[id(self)] = TranslatedLayer(self._artifact)
        for name, tensor in self._tensors.items():
            made._tensors[name].set_value(tensor)
            made._tensors[name].stop_gradient = tensor.stop_gradient
        return made

    @property
    def artifact(self) -> Artifact:
        """The artefact that was read: manifest, inputs, outputs, platforms."""
        return self._artifact

    def _method(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._calls[name](self._tensors, args, kwargs)

        return call

    def _register(self, name: str, array: jax.Array, kind: dict[str, Any]) -> Tensor:
        """Puts a state array where its dotted name says, through plain Layers."""
        *path, last = name.split(".")
        owner: Layer = self
        for step in path:
            if step not in owner._sub_layers:
                owner.add_sublayer(step, Layer(name_scope="translated"))
            owner = owner._sub_layers[step]
            owner.training = False
        if kind.get("parameter"):
            frozen = kind["stop_gradient"] or self._artifact.manifest.differentiable is not True
            parameter = Parameter(array, trainable=not frozen, name=name)
            owner._parameters[last] = parameter
            return parameter
        buffer = Tensor(array)
        buffer.name = name
        buffer.persistable = kind.get("persistable", True)
        owner._buffers[last] = buffer
        if not buffer.persistable:
            owner._non_persistable_buffer_names_set.add(last)
        return buffer


class _SavedFunction:
    """One saved function: its arguments put in order, its program run as one op, its result put together."""

    def __init__(self, function: ArtifactFunction, artifact: Artifact) -> None:
        self.function = function
        self.differentiable = artifact.manifest.differentiable is True
        extra = function.extra
        names = list(artifact.manifest.state)
        self.reads: list[str] = extra.get("reads", names)
        # what the program does not read it is given all the same, as it was saved
        self._rest = {n: artifact.stored[n] for n in names if n not in set(self.reads)}
        arguments = extra.get("arguments")
        if arguments is None:  # written by export.write: tensors in, a list of tensors out
            arguments = {"names": [s.name for s in function.inputs], "structure": None}
            arguments["leaves"] = [{"tensor": True}] * len(function.inputs)
            self.nesting: Spec = (tuple, None, (LEAF,) * len(function.inputs))
            self.result: Spec = (list, None, (LEAF,) * len(function.outputs))
            self.result_leaves = [{"tensor": True}] * len(function.outputs)
        else:
            self.nesting = from_json(arguments["structure"])
            self.result = from_json(extra["result"]["structure"])
            self.result_leaves = extra["result"]["leaves"]
        self.names: list[str] = arguments["names"]
        self.leaves: list[dict[str, Any]] = arguments["leaves"]
        self.kernel = Kernel(lambda *arrays: self._run(*arrays), function.name)

    def __call__(self, tensors: dict[str, Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if state.recording():
            raise CaptureError(
                f"{self.function.name}: a loaded program cannot be recorded into another; run it with an Executor "
                "(static.load_inference_model), or call the Layer outside static mode"
            )
        inputs = [as_tensor(x) for x in self._inputs(args, kwargs)]
        self.function.check([t._array for t in inputs])
        self.function.program_for([tuple(t._array.shape) for t in inputs])
        every = [*(tensors[n] for n in self.reads), *inputs]
        edges = tuple(tape.edge_of(t) if self.differentiable else None for t in every)
        outs = iter(tape.apply(self.kernel, tuple(state.read(t) for t in every), edges))
        leaves = [next(outs) if "tensor" in leaf else leaf["value"] for leaf in self.result_leaves]
        return rebuild(self.result, iter(leaves))

    def _run(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        count = len(self.reads)
        stored = dict(self._rest) | {n: _store(a) for n, a in zip(self.reads, arrays[:count], strict=True)}
        inputs = list(arrays[count:])
        return tuple(self.function.program_for([a.shape for a in inputs]).call(stored, inputs))

    def _inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The tensors among the arguments, which may come one by one where they were saved in a list or dict; raises
        ShapeError or ConfigError for other arguments than were saved."""
        is_one_by_one = len(args) == len(self.leaves) and all(isinstance(a, (TensorState, np.ndarray)) for a in args)
        if is_one_by_one and not kwargs and self._is_plain:
            return list(args)
        values: list[Any] = []
        given = self._in_order(args, kwargs)
        nesting = flatten(given, values)
        if nesting != self.nesting:
            raise ShapeError(
                f"{self.function.name}: the arguments are nested otherwise than when it was saved; it takes "
                f"({', '.join(self.names)}) with tensors {', '.join(map(str, self.function.inputs))}"
            )
        for leaf, value in zip(self.leaves, values, strict=True):
            if "value" in leaf and leaf["value"] != value:
                raise ConfigError(
                    f"{self.function.name}: {value!r} is given where {leaf['value']!r} was saved as part of the program"
                )
        return [value for leaf, value in zip(self.leaves, values, strict=True) if "tensor" in leaf]

    @cached_property
    def _is_plain(self) -> bool:
        """True if all leaves are tensors and every dict has its keys in order, so that there is one order of them."""
        return all("tensor" in leaf for leaf in self.leaves) and _in_key_order(self.nesting)

    def _in_order(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple:
        unknown = [n for n in kwargs if n not in self.names or self.names.index(n) < len(args)]
        if unknown or len(args) > len(self.names):
            raise TypeError(
                f"{self.function.name}() takes ({', '.join(self.names)}), got {len(args)} arguments and {list(kwargs)}"
            )
        missing = [n for n in self.names[len(args) :] if n not in kwargs]
        if missing:
            raise TypeError(f"{self.function.name}() needs {', '.join(missing)} too")
        return (*args, *(kwargs[n] for n in self.names[len(args) :]))


def _in_key_order(nesting: Any) -> bool:
    if nesting == LEAF:
        return True
    cls, keys, parts = nesting
    return (not issubclass(cls, dict) or list(keys) == sorted(keys)) and all(map(_in_key_order, parts))


def as_tensor(value: Any) -> Any:
    """A Tensor for an ndarray or jax array; a Tensor as it is. Raises TypeError for anything else."""
    if isinstance(value, TensorState):
        return value
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return to_tensor(value)
    raise TypeError(f"a tensor is needed, got {type(value).__name__}; give a Tensor or an ndarray")


def _store(array: jax.Array) -> jax.Array:
    if dtypes.is_complex(np.dtype(array.dtype)):
        return jnp.stack([jnp.real(array), jnp.imag(array)], axis=-1)
    return array


def load(path: str | os.PathLike[str], **configs: Any) -> TranslatedLayer:
    """The Layer that jit.save wrote to this path, or PaddlePaddle's jit.save; imports no code of the model.

    PaddlePaddle's is PATH.pdmodel with PATH.pdiparams, which is run by the ops here. Raises CheckpointError for files
    that are missing or changed, ConfigError for options, of which there are none.
    """
    if configs:
        raise ConfigError(f"jit.load: unknown options {', '.join(configs)}; files are found by the path alone")
    return TranslatedLayer(read(path))
