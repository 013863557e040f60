"""What a Program is a list of: operations. Each reads values by name, runs ordinary eager code, and names what comes
out.

Operations run inside one compiled program (program.executor), on Tensors whose arrays are tracers. So none
of them has a kernel or a gradient of its own: an op is its one declaration, backward is the tape, the update is the
optimizer's, a branch is jit's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import eval_context
from jax.export import is_symbolic_dim

from polyreme.core import amp_policy, mode, state
from polyreme.core import dtype as dtypes
from polyreme.core.arguments import arguments_of, parameters_of
from polyreme.core.op import KEY, OPS, function_of
from polyreme.core.state import TensorState, Tracer
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ProgramError, did_you_mean
from polyreme.program import values
from polyreme.program.values import Ref, refs

_OF_SHAPES = ("shape", "rank", "numel")
_FOLDED = 64  # elements; integers up to so many that follow from shapes are computed while compiling


class OperationBlock(Protocol):
    """What operations know of a block (program.block.Block)."""

    idx: int
    ops: list[Operation]
    takes: list[str]
    gives: list[Any]

    def free(self) -> list[str]: ...
    def find_var(self, name: str) -> Tensor | None: ...


class OperationFrame(Protocol):
    """What operations know of the run they are part of (program.frame.Frame)."""

    scope: Any
    reduced: Callable[[str, Tensor], Tensor]

    def get(self, name: str) -> Tensor: ...
    def persistable(self, name: str) -> Tensor: ...
    def define(self, name: str, tensor: Tensor) -> None: ...
    def inside(self, block: Any, given: Sequence[Any]) -> list[Any]: ...


@dataclass(kw_only=True)
class Operation:
    """Base of all operations. outputs: names of what it defines. scope: the name_scope it was recorded in. of_training:
    whether a copy for evaluation leaves it out. origin: the layer and the user's line that it was recorded in, for
    errors; of this process, and in no file."""

    outputs: list[str] = field(default_factory=list)
    scope: str = ""
    of_training: bool = False
    origin: str = field(default="", compare=False, repr=False)

    @property
    def kind(self) -> str:
        """What a listing calls it."""
        return type(self).__name__.lower()

    @property
    def blocks(self) -> list[OperationBlock]:
        """Blocks it runs."""
        return []

    @property
    def type(self) -> str:
        """kind, by its name in Paddle."""
        return self.kind

    @property
    def input_arg_names(self) -> list[str]:
        """Names of what it reads."""
        return self.reads()

    @property
    def output_arg_names(self) -> list[str]:
        """Names of what it defines, and of the persistable values it changes."""
        return [*self.outputs, *self.writes()]

    def all_attrs(self) -> dict[str, Any]:
        """Its arguments that are not values, by parameter."""
        return {}

    @property
    def attr_names(self) -> list[str]:
        """Names of all_attrs()."""
        return list(self.all_attrs())

    def has_attr(self, name: str) -> bool:
        """Whether all_attrs() has it."""
        return name in self.all_attrs()

    def attr(self, name: str) -> Any:
        """One of all_attrs(); ProgramError if there is none of this name."""
        found = self.all_attrs()
        if name not in found:
            raise ProgramError(f"operation {self.kind!r} has no attribute {name!r}{did_you_mean(name, found)}")
        return found[name]

    def reads(self) -> list[str]:
        """Names it needs, those that its blocks take from outside included."""
        raise NotImplementedError

    def writes(self) -> list[str]:
        """Persistable values it changes."""
        return [name for block in self.blocks for op in block.ops for name in op.writes()]

    def run(self, frame: OperationFrame) -> None:
        """Do it."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Call(Operation):
    """An op, composite or Tensor method called on values.

    args, kwargs: with a Ref for every Tensor. changes: persistable values it writes in place. policy: the autocast
    policy in force, taped: whether no_grad was off.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    policy: amp_policy.Policy | None = None
    taped: bool = True

    @property
    def kind(self) -> str:
        return self.name

    def reads(self) -> list[str]:
        return refs((self.args, self.kwargs))

    def writes(self) -> list[str]:
        return self.changes

    def all_attrs(self) -> dict[str, Any]:
        """Its arguments that are not values, by parameter."""
        given = dict(zip(parameters_of(self.name), self.args, strict=False)) | self.kwargs
        return {name: value for name, value in given.items() if not refs(value)}

    def results(self, get: Callable[[str], Tensor]) -> list[Tensor]:
        """What the call gives on the values that get says."""
        args, kwargs = values.resolve((self.args, self.kwargs), get)
        with autocast(self.policy), tape.GradEnabled(self.taped and tape.grad_mode.enabled):
            return values.tensors(call(self.name, args, kwargs))

    def run(self, frame: OperationFrame) -> None:
        for name, tensor in zip(self.outputs, self.results(frame.get), strict=True):
            frame.define(name, tensor)

    def by_parameter(self) -> dict[str, Any] | None:
        """Every argument by parameter, defaults filled in; None where that cannot be said."""
        return arguments_of(self.name, self.args, self.kwargs)

    def with_argument(self, parameter: str, value: Any) -> Call:
        """The same call with another value for a parameter; itself if the function has no such parameter."""
        names = parameters_of(self.name)
        if parameter not in names:
            return self
        at = names.index(parameter)
        if at < len(self.args):
            return replace(self, args=(*self.args[:at], value, *self.args[at + 1 :]))
        return replace(self, kwargs={**self.kwargs, parameter: value})


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function by name; what follows from shapes alone has a value even while a program is compiled."""
    if name in _OF_SHAPES:
        with jax.ensure_compile_time_eval():
            return Tensor(OPS[name].op.fn(state.read((*args, *kwargs.values())[0])))  # type: ignore[attr-defined]
    public, inputs = function_of(name), values.tensors((args, kwargs))
    function = _runs(public)
    if not state.capturing() or getattr(public, "acts", False) or not all(_is_folded(t) for t in inputs):
        return function(*args, **kwargs)
    if _may_draw(public) and not (inputs and all(is_exact(t._array.dtype) for t in inputs)):
        return function(*args, **kwargs)
    if any(map(is_symbolic_dim, jax.tree.leaves((args, kwargs)))):  # a size that an export leaves open
        return function(*args, **kwargs)
    if not inputs:
        result = function(*args, **kwargs)
        if not _is_small_constant(result):
            return result
    try:
        # outside of what is traced: a trace that folds constants would compile their ops while it is being lowered
        with eval_context():
            return function(*args, **kwargs)
    except (jax.errors.JAXTypeError, CaptureError):  # it takes more than it is given, such as a stream's key
        return function(*args, **kwargs)


def _may_draw(public: Callable[..., Any]) -> bool:
    """Whether a call may draw random numbers, as far as its declaration says; a composite may do anything."""
    declared = getattr(public, "op", None)
    return declared is None or KEY in declared.kinds


def _is_small_constant(result: Any) -> bool:
    """Whether what a call gave is one small Tensor."""
    if not isinstance(result, TensorState):
        return False
    return not any(map(is_symbolic_dim, result._array.shape)) and result._array.size <= _FOLDED


def _runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the arguments that were recorded: an op as it is declared; its public function may arrange them."""
    declared = getattr(function, "op", None)
    return function if declared is None else lambda *args, **kwargs: mode.current.mode.run(declared, args, kwargs)


def is_folded(array: Any) -> bool:
    """True for numbers with values known while compiling, few enough to compute with."""
    return (
        not isinstance(array, (Tracer, jax.ShapeDtypeStruct)) and array.size <= _FOLDED and array.dtype.kind in "iubf"
    )


def _is_folded(tensor: TensorState) -> bool:
    return is_folded(tensor._array) and (tensor.stop_gradient or is_exact(tensor._array.dtype))


@contextmanager
def autocast(policy: amp_policy.Policy | None) -> Iterator[None]:
    """Run ops under this autocast policy, None for none."""
    outer, amp_policy.active.policy = amp_policy.active.policy, policy
    try:
        yield
    finally:
        amp_policy.active.policy = outer


@dataclass(kw_only=True)
class Assign(Operation):
    """target = source, where target is persistable; no gradient flows through it."""

    target: str
    source: Any

    def reads(self) -> list[str]:
        return refs(self.source)

    def writes(self) -> list[str]:
        return [self.target]

    def run(self, frame: OperationFrame) -> None:
        tensor = frame.persistable(self.target)
        now = state.read(tensor)
        source = state.read(frame.get(self.source.name)) if isinstance(self.source, Ref) else self.source
        if tuple(source.shape) != tuple(now.shape):
            raise ProgramError(
                f"assign: {self.target!r} has shape {list(now.shape)}, the value {list(source.shape)}; a persistable "
                "variable keeps its shape"
            )
        state.write(tensor, jnp.asarray(source, now.dtype))


@dataclass(kw_only=True)
class Initialize(Operation):
    """Make a persistable variable in the scope, with values of an initializer; template: what it is to be like."""

    target: str
    initializer: Any
    template: Tensor

    def reads(self) -> list[str]:
        return []

    def writes(self) -> list[str]:
        return [self.target]

    def run(self, frame: OperationFrame) -> None:
        shape, dtype = self.template.shape, self.template.dtype
        frame.scope.create(self.target, self.initializer.values(shape, dtype), self.template)


def depends(ops: Sequence[Operation], start: set[str]) -> set[str]:
    """Names whose values depend on any of start, start included, following what ops define and write."""
    reached = set(start)
    for op in ops:
        if not reached.isdisjoint(op.reads()):
            reached |= {*op.outputs, *op.writes()}
    return reached


def is_exact(dtype: Any) -> bool:
    """True for a dtype without gradients."""
    return not dtypes.is_inexact(dtype)
