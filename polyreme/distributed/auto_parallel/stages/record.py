"""Recorded: a model's forward as operations that can be run again, with the calls of its Layers: what is cut into
stages.

The operations are those of a static Program (docs/decisions/0008): calls of public functions, with names in
place of Tensors, so that a stage makes the very calls the model makes, tape, autocast and layouts included. trace.py,
for inference of dims, notes ops as they compute, inside composites and off any mesh, which nothing could run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.autograd.recompute import Keep, run_again
from polyreme.call_site import user_line
from polyreme.core import dtype as dtypes
from polyreme.core import layout as layouts
from polyreme.core import mode, rng, state, unique_name
from polyreme.core.state import TensorState
from polyreme.distributed.auto_parallel.tensors.form import Form
from polyreme.distributed.auto_parallel.tensors.reshard import form_for, reshard
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, GradError, ProgramError
from polyreme.jit.capture import Capture
from polyreme.jit.convert import converted
from polyreme.jit.structure import Spec, flatten, rebuild
from polyreme.nn.layer import Layer
from polyreme.ops.layout import sharding_constraint
from polyreme.program import values
from polyreme.program.branches import Cond, Recompute, While
from polyreme.program.current import defaults, program_guard
from polyreme.program.frame import Frame
from polyreme.program.listing import line
from polyreme.program.operation import Assign, Call, Operation
from polyreme.program.program import Program
from polyreme.program.recorder import Recorder
from polyreme.program.scope import Scope
from polyreme.program.values import Ref

_REMEDY = "or describe the model as a PipelineLayer, whose layers run as they are written"
_CONTAINERS: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict}


@dataclass(frozen=True, eq=False)
class RecordedLayerCall:
    """The number-th call of a Layer, and its operations: first up to, not including, last. is_whole: False for one
    inside a branch, a loop or a recomputed part, which is one operation."""

    name: str
    number: int
    layer: Layer
    first: int
    last: int
    is_whole: bool


@dataclass(eq=False)
class Recorded:
    """One forward of a model.

    inputs: names of the values that are given, in order. outputs: (structure, Refs and plain values). random: indexes
    of operations that draw random numbers. held: the Tensors that were met, by name: parameters, buffers, constants.
    mesh: that of the layout in force, which what operations say of layouts is for.
    """

    program: Program
    inputs: list[str]
    outputs: tuple[Spec, list[Any]]
    calls: list[RecordedLayerCall]
    random: frozenset[int]
    mesh: Mesh | None
    _moved: dict[Mesh, Program] = field(default_factory=dict)

    def over(self, mesh: Mesh | None) -> Program:
        """The operations with layouts over another mesh of the same axes: those of another stage."""
        if mesh is None or self.mesh is None or mesh == self.mesh or not _says_layout(self.program, self.mesh):
            return self.program
        if mesh not in self._moved:
            self._moved[mesh] = _move(self.program, self.mesh, mesh)
        return self._moved[mesh]

    @property
    def ops(self) -> list[Operation]:
        """The operations, in order."""
        return self.program.global_block().ops

    @property
    def captured(self) -> dict[str, Any]:
        """Tensors with values that operations read, by name."""
        return self.program.captured

    def value(self, name: str) -> Any:
        """The shape and dtype of a value: a Symbol, or a held Tensor's array."""
        found = self.program.global_block().find_var(name)
        return (self.captured[name] if found is None else found)._array


# what a forward is recorded for


def signature(inputs: Any) -> str:
    """Text that tells structure, shapes and dtypes of inputs (Tensors, InputSpecs, arrays), and plain values, apart.

    Every process makes the same one of the same inputs. Raises ConfigError for a value that is neither.
    """
    leaves: list[Any] = []
    spec = flatten(inputs, leaves)
    return json.dumps([_plain(spec), [_describe(leaf) for leaf in leaves]])


def _plain(spec: Spec) -> Any:
    if spec is None:
        return None
    cls, keys, children = spec
    if _CONTAINERS.get(cls.__name__) is not cls:
        raise ConfigError(
            f"the inputs of a model in stages hold a {cls.__name__}; give Tensors, tuples, lists and dicts"
        )
    return [cls.__name__, None if keys is None else list(keys), [_plain(child) for child in children]]


def _describe(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise ConfigError(
            f"the inputs of a model in stages hold {leaf!r}; give Tensors, arrays, InputSpecs, numbers or text"
        )
    sizes = [None if n is None else int(n) for n in leaf.shape]
    if any(n is None or n < 0 for n in sizes):
        raise ConfigError(
            f"an input of shape {list(leaf.shape)} leaves a size open; give the shape of a microbatch, rows included: "
            "what the model does may depend on it"
        )
    return [dtypes.as_dtype(leaf.dtype).name, sizes]


def _spec(plain: Any) -> Spec:
    if plain is None:
        return None
    name, keys, children = plain
    return (_CONTAINERS[name], None if keys is None else tuple(keys), tuple(_spec(child) for child in children))


# recording


def record(model: Layer, token: str) -> Recorded:
    """The forward of model on inputs that `signature` gave this token for, recorded without running it.

    A tuple or list of inputs is given as arguments, a dict by name, anything else as the one argument. The model runs
    in the mode it is in, under the autocast and the layout in force.

    Raises CaptureError for control flow that depends on the value of a Tensor and cannot be converted, ConfigError for
    a model that makes parameters or takes gradients in its forward.
    """
    main, startup = Program(), Program()
    drawn, outer = rng.default_generator.drawn, state.watch.active
    with _uncaptured(), unique_name.guard(), program_guard(main, startup), tape.GradEnabled(True):
        recorder = _Recorder(model)
        state.watch.active = recorder
        try:
            inputs, names = _declare(main, token)
            args, kwargs = _as_arguments(inputs)
            leaves: list[Any] = []
            spec = flatten(model(*args, **kwargs), leaves)
            gives = [Ref(recorder.name_of(v)) if isinstance(v, TensorState) else v for v in leaves]
        except (CaptureError, GradError, ProgramError) as error:
            raise CaptureError(f"{type(model).__name__} cannot be cut into stages: {error}; {_REMEDY}") from error
        finally:
            state.watch.active = outer
            rng.default_generator.drawn = drawn
    _check(model, main, startup)
    mesh = layouts.active.layout.mesh if layouts.active.layout is not None else None
    return Recorded(main, names, (spec, gives), recorder.calls, frozenset(recorder.random), mesh)


@contextmanager
def _uncaptured() -> Iterator[None]:
    """Inside the block, state has the values that it had before the capture in progress, if there is one, began, and
    shapes are found as for plain Tensors."""
    generator, capture = rng.default_generator, state.watch.active
    before = list(capture.before.values()) if isinstance(capture, Capture) else []
    now, bound = [b.tensor._array for b in before], generator.is_bound
    for b in before:
        b.tensor._array = b.array
    generator.is_bound = False
    try:
        with jax.ensure_compile_time_eval(), mode.using(mode.current.plain):
            yield
    finally:
        generator.is_bound = bound
        for b, array in zip(before, now, strict=True):
            b.tensor._array = array


def _declare(program: Program, token: str) -> tuple[Any, list[str]]:
    """The inputs a token stands for, as Variables of the Program, and their names."""
    plain, told = json.loads(token)
    names: list[str] = []
    leaves: list[Any] = []
    for entry in told:
        if not isinstance(entry, list):
            leaves.append(entry)
            continue
        names.append(f"input@{len(names)}")
        leaves.append(program.global_block().create_var(names[-1], entry[1], entry[0]))
    return rebuild(_spec(plain), iter(leaves)), names


def _as_arguments(inputs: Any) -> tuple[tuple, dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _check(model: Layer, main: Program, startup: Program) -> None:
    made = [name for op in startup.global_block().ops for name in op.writes()]
    if made:
        raise ConfigError(
            f"{type(model).__name__} makes parameters in its forward ({', '.join(made[:5])}); make them in __init__, "
            "or call the model once before it is cut into stages"
        )
    other = next((op for op in main.every_op() if not isinstance(op, (Call, Assign, Cond, While, Recompute))), None)
    if other is not None:
        raise ConfigError(
            f"the forward of {type(model).__name__} records {other.kind!r}, which no stage can run; take gradients and "
            "updates out of the forward"
        )


@dataclass
class _Open:
    name: str | None
    layer: Layer
    first: int
    is_whole: bool


class _Recorder(Recorder):
    """Records a model in stages: notes calls of its Layers, and which operations draw random numbers."""

    def __init__(self, model: Layer) -> None:
        super().__init__()
        self.calls: list[RecordedLayerCall] = []
        self.random: set[int] = set()
        self._names = {id(layer): name for name, layer in model.named_sublayers(include_self=True)}
        self._open: list[_Open] = []
        self._numbers: dict[str, int] = {}
        self._drawn = rng.default_generator.drawn

    def entered(self, layer: Any) -> Callable[..., Any]:
        self._open.append(_Open(self._names.get(id(layer)), layer, self._position, not defaults.main.entered))
        return converted(layer.forward)

    def left(self) -> None:
        call = self._open.pop()
        name = "" if call.name is None else call.name
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        # a Layer that the model does not hold has no name to be cut at
        whole = call.is_whole and call.name is not None
        self.calls.append(RecordedLayerCall(name, number, call.layer, call.first, self._position, whole))

    @property
    def _position(self) -> int:
        """Operations recorded so far, each branch, loop or recomputed part being one."""
        return len(defaults.main.global_block().ops)

    def defined(self, op: Operation, results: Sequence[Any], prefix: str) -> Any:
        result = super().defined(op, results, prefix)
        if not defaults.main.entered:
            now = rng.default_generator.drawn
            if now != self._drawn:
                self.random.add(self._position - 1)
            self._drawn = now
        return result

    def host_read(self, tensor: TensorState, what: str) -> None:
        if not self.has_value(tensor):
            raise CaptureError(
                f"{user_line()}: {what} needs the value of a Tensor, and the forward is recorded without running it; "
                "use ops whose result has a shape that does not depend on values (where, masked_fill), cond and "
                "while_loop"
            )


# running again


def run(recorded: Recorded, indexes: Sequence[int], values: Mapping[str, Tensor], names: Sequence[str]) -> list[Any]:
    """Run these operations on given values, under the layout in force; -> the values of these names.

    They run as on plain Tensors: a weight that is marked on another stage's mesh is read as a copy here.
    """
    placed = layouts.active.layout
    program = recorded.over(placed.mesh if placed is not None else None)
    block = program.global_block()
    frame = Frame(block, Scope())
    frame.values.update(values)
    with mode.using(mode.current.plain):
        for index in indexes:
            op = block.ops[index]
            try:
                _run(op, frame)
            except Exception as error:
                error.add_note(f"in the recorded operation: {line(op, block)}")
                raise
    return [frame.get(name) for name in names]


def _run(op: Operation, frame: Frame) -> None:
    target = moved_to(op)
    if target is not None:
        frame.define(op.outputs[0], _laid_out(frame.get(op.reads()[0]), target))
    elif isinstance(op, Recompute):
        block: Any = op.block
        given = tuple(frame.get(name) for name in op.inputs)
        placed = layouts.active.layout
        # the plan says how the inputs are kept, which a Program does not know
        keep = Keep(offload=placed is not None and "act" in placed.plan.offload)
        results = run_again(lambda *now: frame.inside(block, now), given, {}, keep)
        for name, result in zip(op.outputs, results, strict=True):
            frame.define(name, result)
    else:
        op.run(frame)


def moved_to(op: Operation) -> Form | None:
    """The target placement of a recorded reshard; None for any other operation."""
    if not isinstance(op, Call) or op.name != reshard.__name__:
        return None
    given = dict(zip(("dist_tensor", "mesh", "placements"), op.args, strict=False)) | op.kwargs
    return Form(given["mesh"], tuple(given["placements"]), ())


def _laid_out(tensor: Tensor, target: Form) -> Tensor:
    """A Tensor of the stage in force, split as a reshard says, and left as it is where that splits nothing: what says
    Replicate for want of knowing would undo how the stage before had it."""
    placed, mesh = layouts.active.layout, target.mesh
    if placed is None or set(placed.mesh.devices.flat) != set(mesh.jax_mesh.devices.flat):
        return tensor
    form = form_for("reshard", mesh, target.placements, tensor.shape)
    if not form.plain or form.pieces == 1:
        return tensor
    spec = [entry or PartitionSpec.UNCONSTRAINED for entry in (*form.spec, *[None] * (tensor.ndim - len(form.spec)))]
    return sharding_constraint(tensor, NamedSharding(mesh.jax_mesh, PartitionSpec(*spec)))


def _says_layout(program: Program, mesh: Mesh) -> bool:
    """Whether an operation was given a layout over this mesh."""
    given = [(op.args, op.kwargs) for op in program.every_op() if isinstance(op, Call)]
    return any(s.mesh == mesh for s in values.leaves(given, NamedSharding)) or mesh in values.leaves(given, Mesh)


def _move(program: Program, here: Mesh, there: Mesh) -> Program:
    """The Program with layouts over another mesh, of the same axes, in the place of one."""

    def sharding(found: NamedSharding) -> NamedSharding:
        return NamedSharding(there, found.spec, memory_kind=found.memory_kind) if found.mesh == here else found

    def change(ops: list[Operation]) -> list[Operation]:
        changed = []
        for op in ops:
            if isinstance(op, Call):
                given = values.replace((op.args, op.kwargs), NamedSharding, sharding)
                args, kwargs = values.replace(given, Mesh, lambda mesh: there if mesh == here else mesh)
                op = replace(op, args=args, kwargs=kwargs)
            changed.append(op)
        return changed

    return program.rewritten(change)
