"""A plain imperative model cut into the chunks that pipeline stages run, by the runtime that runs a PipelineLayer's.

docs/auto_parallel.md, section "Stages".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.core import amp_policy, state
from polyreme.core import dtype as dtypes
from polyreme.distributed.auto_parallel.layers.split_points import SplitPoint
from polyreme.distributed.auto_parallel.stages.cut import AtEnds, Cut, Slice, slices
from polyreme.distributed.auto_parallel.stages.even import evenly
from polyreme.distributed.auto_parallel.stages.record import Recorded, record, run, signature
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.jit.capture import Capture, parts_of
from polyreme.jit.structure import flatten, rebuild
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import Parameter, Unmade
from polyreme.program.values import Ref


class StageChunk(Layer):
    """A part of a model's forward, the at-th in the order that data flows: what `cut_into_stages` gives.

    The first takes the model's inputs: a Tensor, a tuple of several, or a dict by name; the last gives the model's
    outputs. What passes between is theirs alone. Its parameters and buffers are the model's own.
    """

    def __init__(
        self, forwards: _Forwards, at: int, layers: Mapping[str, Layer], tensors: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self._forwards, self._number = forwards, at
        for name, layer in layers.items():
            self.add_sublayer(name.replace(".", "/"), layer)
        for name, tensor in tensors.items():
            table = self._parameters if isinstance(tensor, Parameter) else self._buffers
            table[name.replace(".", "/")] = tensor

    def forward(self, flow: Any) -> Any:
        return self._forwards.run(self._number, flow)


def cut_into_stages(
    model: Layer, inputs: Any, chunks: int, at: Cut | Mapping[str, SplitPoint] | Sequence[str] | None = None
) -> list[StageChunk]:
    """The model as `chunks` Layers in a row, to be run by distributed.pipeline's Pipeline under any schedule.

    inputs: what the model is called with, for shapes and dtypes alone: Tensors, arrays or InputSpecs of one microbatch,
    several in a tuple, or in a dict by name. at: where it is cut: names of sublayers, each of which ends a chunk (a
    list, or a dict of SplitPoint.END); a rule of cut.py; or None for chunks that cost about the same. chunks is the
    plan's number of stages times its virtual stages, `len(plan.stage_of_chunk)`.

    The model is recorded, not run, in the mode it is in and under the layout and autocast in force, and again for
    microbatches of other shapes and in other modes. Each chunk makes the calls that fall to it. Values that a later
    chunk needs are handed on through those between; a weight that several chunks use is one Parameter, at home on the
    first of them; random numbers are drawn in the order that chunks run.

    Raises ConfigError for a cut that the model has no place for, for what stages cannot share and for parameters of
    LazyGuard that have no values yet, CaptureError for Python control flow that depends on the value of a Tensor.

    >>> import numpy as np
    >>> from polyreme.nn import Linear, Sequential
    >>> parts = cut_into_stages(Sequential(Linear(4, 8), Linear(8, 2)), np.zeros((3, 4), "float32"), 2)
    >>> [[p.shape for p in part.parameters()] for part in parts]
    [[paddle.Size([4, 8]), paddle.Size([8])], [paddle.Size([8, 2]), paddle.Size([2])]]
    """
    if not isinstance(model, Layer):
        raise TypeError(f"cut_into_stages takes a Layer, got {type(model).__name__}")
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ConfigError(f"cut_into_stages: chunks={chunks!r}; give a whole number of at least 1")
    unmade = next((p._array for p in model.parameters() if isinstance(p._array, Unmade)), None)
    if unmade is not None:
        raise unmade.refuse()
    forwards = _Forwards(model, chunks)
    recorded = record(model, signature(inputs))
    forwards.cut = _choose(at, recorded, chunks)
    parts = forwards.keep(signature(inputs), recorded)
    held = _tensors_of_chunks(model, parts)
    return [StageChunk(forwards, k, *_in_layers(model, parts[k], tensors)) for k, tensors in enumerate(held)]


def _choose(cut: Any, recorded: Recorded, chunks: int) -> Cut:
    if cut is None:
        return evenly(recorded, chunks)
    if hasattr(cut, "chunks_of"):
        return cut
    if isinstance(cut, str) or not isinstance(cut, (Mapping, Sequence)):
        raise ConfigError(f"cut_into_stages: at={cut!r}; give a list of layer names, or a dict of SplitPoint.END")
    wrong = {name: p for name, p in cut.items() if p is not SplitPoint.END} if isinstance(cut, Mapping) else {}
    if wrong:
        raise ConfigError(f"cut_into_stages: {wrong}; a model is cut at the end of a layer, SplitPoint.END")
    if len(cut) != chunks - 1:
        raise ConfigError(f"cut_into_stages: {len(cut)} cuts, {list(cut)}, for {chunks} chunks; give {chunks - 1}")
    return AtEnds(tuple((name, 0) for name in cut))


def _tensors_of_chunks(model: Layer, parts: Sequence[Slice]) -> list[dict[str, Tensor]]:
    """The model's parameters and buffers that each chunk reads; what none reads goes where its Layer is called."""
    tensors: list[dict[str, Tensor]] = [{} for _ in parts]
    readers = [{id(t) for t in part.captured} for part in parts]
    callers = [{id(layer) for layer in part.layers} for part in parts]
    owners = {id(t): layer for layer in model.sublayers(include_self=True) for t in _direct_tensors(layer)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        where = [k for k, ids in enumerate(readers) if id(tensor) in ids]
        where = where or [k for k, ids in enumerate(callers) if id(owners[id(tensor)]) in ids][:1] or [0]
        for k in where:
            tensors[k][name] = tensor
    return tensors


def _in_layers(model: Layer, part: Slice, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Layer], dict[str, Tensor]]:
    """Layers called in a chunk that hold nothing but what it holds, by name, and what else it holds: a Layer tells
    whether it trains, which processes that run other chunks must know."""
    ours, called = {id(t) for t in tensors.values()}, {id(layer) for layer in part.layers}
    layers = {
        name: layer
        for name, layer in model.named_sublayers()
        if id(layer) in called and not layer._sub_layers and ours.issuperset(map(id, _direct_tensors(layer)))
    }
    inside = {id(t) for layer in layers.values() for t in _direct_tensors(layer)}
    return layers, {name: t for name, t in tensors.items() if id(t) not in inside}


def _direct_tensors(layer: Layer) -> list[Tensor]:
    return [*layer.parameters(include_sublayers=False), *layer.buffers(include_sublayers=False)]


class _Forwards:
    """A model's recorded forwards, one for each kind of microbatch and mode, and their cut."""

    cut: Cut

    def __init__(self, model: Layer, count: int) -> None:
        self._model, self._count = model, count
        self._known: dict[Any, tuple[Recorded, list[Slice]]] = {}

    def run(self, index: int, flow: Any) -> Any:
        """Run chunk number `at`: its outputs for its inputs."""
        token = signature(flow) if index == 0 else flow[0]
        recorded, parts = self._find(token)
        part = parts[index]
        self._guard(part)
        given = recorded.inputs if index == 0 else part.takes
        outs = run(recorded, part.ops, dict(zip(given, self._taken(index, flow), strict=True)), part.gives)
        if index + 1 < self._count:
            return (token, *outs)
        made = dict(zip(part.gives, outs, strict=True))
        spec, leaves = recorded.outputs
        return rebuild(spec, iter([_output(recorded, made, leaf) for leaf in leaves]))

    @staticmethod
    def _taken(at: int, flow: Any) -> list[Tensor]:
        if at:
            return list(flow[1:])
        leaves: list[Any] = []
        flatten(flow, leaves)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def keep(self, token: str, recorded: Recorded) -> list[Slice]:
        """Cut a forward, and know it from now on."""
        parts = slices(recorded, self.cut.chunks_of(recorded), self._count)
        self._known[self._key(token)] = (recorded, parts)
        return parts

    def _find(self, token: str) -> tuple[Recorded, list[Slice]]:
        key = self._key(token)
        if key not in self._known:
            self.keep(token, record(self._model, token))
        return self._known[key]

    def _key(self, token: str) -> Any:
        layers = self._model.sublayers(include_self=True)
        stopped = tuple(t.stop_gradient for t in (*self._model.parameters(), *self._model.buffers()))
        modes = (amp_policy.active.policy, dtypes.default_dtype(), tuple(layer.training for layer in layers))
        return (token, modes, stopped, tuple(part for layer in layers for part in map(id, parts_of(layer))))

    @staticmethod
    def _guard(part: Slice) -> None:
        """The guard of a captured chunk: it serves as long as its Layers stay in their mode and keep their
        sublayers."""
        capture = state.watch.active
        if isinstance(capture, Capture):
            for layer in part.layers:
                capture.layers.setdefault(id(layer), (layer, layer.training, parts_of(layer)))


def _output(recorded: Recorded, made: Mapping[str, Any], leaf: Any) -> Any:
    if not isinstance(leaf, Ref):
        return leaf
    return made[leaf.name] if leaf.name in made else recorded.captured[leaf.name]
