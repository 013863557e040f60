"""Recorder: watches code in static mode, and appends what it calls to the current Program instead of running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from polyreme.call_site import layer_note, user_line
from polyreme.core import amp_policy, state, unique_name
from polyreme.core.state import TensorState
from polyreme.core.symbol import DynamicSize, Symbol
from polyreme.eager import tape
from polyreme.eager.dispatch import rebind_each
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ProgramError, ShapeError
from polyreme.jit.convert import converted
from polyreme.nn.initializer import Initializer
from polyreme.program import control, gradient, infer, recurrence, values
from polyreme.program.block import Variable
from polyreme.program.current import defaults
from polyreme.program.infer import InferredTensor
from polyreme.program.operation import Assign, Call, Initialize, Operation, call
from polyreme.program.scope import global_scope
from polyreme.program.values import Ref, SizeOf


class _Everything:
    """Holds whatever is asked for: a Variable belongs to the Program, wherever it was made."""

    def __contains__(self, _: object) -> bool:
        return True


class Given(Initializer):
    """An initializer: these very values."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def values(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """The value, on the device in force."""
        return jnp.asarray(self.value, dtype)


class Recorder:
    """What `state.watch.active` is in static mode: every op, composite or Tensor method called in this thread comes to
    `call`, every write of a Tensor to `write`. as_in_1x: operators align, and Variables are true, as in 1.x.
    """

    created_ids: _Everything
    as_in_1x: bool

    stages: ClassVar[bool] = True
    records: ClassVar[Literal[True]] = True

    def __init__(self) -> None:
        self.created_ids = _Everything()
        self.as_in_1x = False
        self._rebound: list[dict[int, tuple[Variable, Symbol]]] = []

    # what the state under Tensors asks

    def created(self, tensor: TensorState) -> None:
        """A new Tensor is nobody's state."""

    def touch(self, tensor: TensorState) -> None:
        """Nothing is put back later."""

    def read(self, tensor: TensorState) -> Any:
        """The Tensor's array, or what stands for it."""
        return tensor._array

    def write(self, tensor: TensorState, array: Any) -> None:
        """Replace the Tensor's value: an assignment if it is persistable or has a value, else a new name for it."""
        if not isinstance(tensor._array, Symbol) and not isinstance(array, Symbol):
            tensor._array = array
            return
        if isinstance(tensor, Variable) and not tensor.persistable:
            symbol = array if isinstance(array, Symbol) else self._symbol_of(array)
            self._note_rebound(tensor)
            tensor._array = symbol
            return
        if isinstance(tensor._array, Symbol) and not isinstance(array, Symbol):
            self._set(tensor, array)
            return
        source = Ref(array.name)
        scope = "/".join(defaults.scopes)
        defaults.block.append(
            Assign(target=self.name_of(tensor), source=source, scope=scope, of_training=defaults.of_training)
        )

    @staticmethod
    def _set(tensor: TensorState, array: Any) -> None:
        """Give a persistable variable a value in the scope in force, at once."""
        if tuple(array.shape) != tuple(tensor._array.shape):
            raise ShapeError(
                f"set_value: {tensor._array.name!r} has shape {list(tensor._array.shape)}, the value "
                f"{list(array.shape)}"
            )
        variable = global_scope().find_var(tensor._array.name)
        if variable is None:
            raise ProgramError(
                f"set_value: {tensor._array.name!r} has no value in this scope that could be replaced, and the startup "
                "program would replace this one; run that first, or make the parameter with initializer.Assign(value)"
            )
        variable.get_tensor().set(np.asarray(array, tensor._array.dtype))

    def _symbol_of(self, array: Any) -> Symbol:
        return self.call("assign", (Tensor(array),), {})._array

    converted = staticmethod(converted)
    """What a to_static function runs as: its control flow on Variables is recorded too."""

    def changes(self, what: str) -> None:
        """Refuse a change of a Python object in a recorded branch or loop: it would happen once, whatever runs."""
        if self._rebound:
            raise CaptureError(
                f"{user_line()}: {what} is changed in a branch or loop of a static Program, which is recorded once and "
                "may run any number of times; give Variables new values there instead"
            )

    def entered(self, layer: Any) -> Callable[..., Any]:
        """A Layer runs as it is written."""
        return layer.forward

    def left(self) -> None:
        """Nothing was noted of the Layer."""

    def has_value(self, tensor: TensorState) -> bool:
        """False for a Variable."""
        return not isinstance(tensor._array, Symbol)

    def sizes_of(self, tensor: TensorState) -> None:
        """None: an Executor knows what follows from shapes."""

    def host_read(self, tensor: TensorState, what: str) -> None:
        """Refuse to read a Variable."""
        if isinstance(tensor._array, Symbol):
            raise CaptureError(
                f"{user_line()}: {what} needs a value, but {tensor._array!r} belongs to a static Program, which has "
                "none before Executor.run; fetch it, use static.nn.cond or while_loop instead of Python control flow, "
                "or leave static mode with disable_static()"
            )

    # recording

    def name_of(self, tensor: TensorState) -> str:
        """The name a Tensor has as an input: a value's Tensor is held by the Program, and shared with it."""
        if isinstance(tensor._array, Symbol):
            if isinstance(tensor, Variable) and not tensor.persistable:
                _check_here(tensor)
            return tensor._array.name
        return defaults.main.hold(tensor)  # type: ignore[arg-type]

    def size_of(self, size: DynamicSize) -> Any:
        """A dynamic size as a Variable."""
        sizes = self.call("shape", (TensorState(size.symbol),), {})
        return self.call("Tensor.__getitem__", (sizes, size.dim), {})

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call; returns what it will give, with Variables for Tensors."""
        kwargs = {k: v for k, v in kwargs.items() if k != "name"}
        out = kwargs.pop("out", None)
        by_name: dict[str, TensorState] = {}

        def named(tensor: TensorState) -> Ref:
            found = self.name_of(tensor)
            by_name[found] = tensor
            return Ref(found)

        def sized(size: DynamicSize) -> SizeOf:
            by_name.setdefault(size.symbol.name, TensorState(size.symbol))
            return SizeOf(size.symbol.name, size.dim)

        args, kwargs = values.replace(values.replace((args, kwargs), TensorState, named), DynamicSize, sized)
        recorded = Call(
            name=name,
            args=tuple(args),
            kwargs=kwargs,
            policy=amp_policy.active.policy,
            taped=tape.grad_mode.enabled,
            scope="/".join(defaults.scopes),
            origin=layer_note(),
        )
        results, recorded.changes = infer.call_results(recorded, by_name)
        result = self.defined(recorded, results, name.rpartition(".")[2].strip("_"))
        return result if out is None else rebind_each(out, result, name)

    def defined(self, op: Operation, results: Sequence[Any], prefix: str) -> Any:
        """Append op, with a Variable for each Tensor seen in results (one for each probe); returns the result."""
        first, other = results[0], results[-1]
        counts = [sum(1 for _ in values.leaves(r, InferredTensor)) for r in (first, other)]
        if counts[0] != counts[1]:
            raise ProgramError(
                f"{prefix}: how many Tensors it gives depends on a size that is not known while recording; give that "
                "size in static.data, or index the Variable instead"
            )
        others = values.leaves(other, InferredTensor)
        base = unique_name.generate(prefix, "op")

        def variable(seen: InferredTensor) -> Variable:
            twin = next(others)
            result = defaults.block.create_var(
                f"{base}.tmp_{len(op.outputs)}",
                infer.shape_of(seen.array, twin.array),
                seen.array.dtype,
                stop_gradient=seen.stop_gradient,
                known=infer.known_of(seen.array, twin.array),
                probed=(tuple(seen.array.shape), tuple(twin.array.shape)),
                weak_type=getattr(seen.array, "weak_type", False),
            )
            result._node = op  # it is no leaf
            op.outputs.append(result.name)
            return result

        result = values.replace(first, InferredTensor, variable)
        op.of_training = defaults.of_training
        defaults.block.append(op)
        return result

    def declare(self, name: str, template: Tensor, initializer: Any) -> Tensor:
        """Declare a persistable variable in both Programs, and its initial value in the startup Program.

        Returns template, or what was declared under this name before, with the same shape and dtype: it is shared.
        """
        main, startup = defaults.main.global_block(), defaults.startup.global_block()
        have = main.vars.get(name)
        if have is not None:
            if not have.persistable or (have.shape, have.dtype) != (template.shape, template.dtype):
                raise ProgramError(
                    f"the Program already has {have._array!r}; {template._array!r} cannot share it, give it another "
                    "name"
                )
            return have
        main.vars[name] = startup.vars[name] = template
        startup.append(Initialize(target=name, initializer=initializer, template=template))
        defaults.main.changed()
        return template

    def initialize(self, variable: TensorState, initializer: Any) -> None:
        """Let the startup Program fill a variable anew with this initializer's values."""
        name = self.name_of(variable)
        startup = defaults.startup.global_block()
        startup.append(Initialize(target=name, initializer=initializer, template=startup.var(name)))

    def declare_buffer(self, name: str, tensor: Tensor) -> Variable:
        """A persistable Variable that starts from tensor's value."""
        if isinstance(tensor._array, Symbol):
            tensor = self._value_of(name, tensor)
        variable = Variable.__new__(Variable)
        Tensor.__init__(
            variable, Symbol(name, tensor._array.shape, tensor._array.dtype), stop_gradient=tensor.stop_gradient
        )
        variable.name, variable.persistable, variable.block = name, True, defaults.main.global_block()
        return self.declare(name, variable, Given(tensor.numpy()))  # type: ignore[return-value]

    def _value_of(self, name: str, variable: Tensor) -> Tensor:
        """The value of a Variable that depends on nothing, such as zeros([2])."""
        op = variable._node
        if not isinstance(op, Call) or op.reads() or variable._array.is_dynamic:
            raise ProgramError(
                f"buffer {name!r} is given {variable._array!r}, which has no value before the Program runs; give what "
                "to_tensor() or a creation op without Variables makes"
            )
        outer, state.watch.active = state.watch.active, None
        try:
            return call(op.name, op.args, op.kwargs)
        finally:
            state.watch.active = outer

    # blocks

    def cond(self, pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        """Record both branches; returns their result."""
        return control.cond(self, pred, true_fn, false_fn)

    def while_loop(
        self, test: Callable[..., Any], body: Callable[..., Any], init: Sequence[Any], maximum: int | None
    ) -> list[Any]:
        """Record a loop; returns what it ends with."""
        return control.while_loop(self, test, body, init, maximum)

    def over_rows(self, step: Callable[..., Any], x: Any, states: Any, reverse: bool) -> tuple[Any, Any]:
        """Record a step over rows; returns (outputs, last states)."""
        return recurrence.over_rows(self, step, x, states, reverse)

    def until_finished(
        self, advance: Callable[..., Any], idle: Callable[[Any], Any], start: Any, last: int | None, is_test: bool
    ) -> tuple[Any, Any]:
        """Record a step of decoding; returns (outputs, where it ends)."""
        return recurrence.until_finished(self, advance, idle, start, last, is_test)

    def recompute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call that backward runs again."""
        return control.recompute(self, function, args, kwargs)

    def derive(
        self, rule: str, function: Callable[..., Any], xs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record derivatives of a function at xs."""
        return control.derive(self, rule, function, xs, args, kwargs)

    # training

    def backward(self, loss: Any, parameters: Any, no_grad_set: Any) -> list[tuple[Tensor, Tensor]]:
        """Record the gradients of parameters."""
        return gradient.append_backward(loss, parameters, no_grad_set)

    def apply_gradients(self, optimizer: Any, pairs: Any, startup_program: Any) -> list[Operation]:
        """Record one step of an optimizer."""
        return gradient.apply_gradients(optimizer, pairs, startup_program)

    def minimize(
        self, optimizer: Any, loss: Any, startup_program: Any, parameters: Any, no_grad_set: Any
    ) -> tuple[list[Operation], list[tuple[Tensor, Tensor]]]:
        """Record backward and one step of an optimizer."""
        return gradient.minimize(optimizer, loss, startup_program, parameters, no_grad_set)

    @contextmanager
    def carrying(self) -> Iterator[dict[int, tuple[Variable, Symbol]]]:
        """Collects the Variables of blocks around that get a new value inside the block, with what they were before."""
        rebound: dict[int, tuple[Variable, Symbol]] = {}
        self._rebound.append(rebound)
        try:
            yield rebound
        finally:
            self._rebound.pop()

    def in_front(self, variable: Variable) -> Symbol:
        """What a Variable stood for in front of the block that is recorded."""
        before = self._rebound[-1].get(id(variable)) if self._rebound else None
        return variable._array if before is None else before[1]

    def _note_rebound(self, variable: Variable) -> None:
        if self._rebound and variable.block is not defaults.block:
            self._rebound[-1].setdefault(id(variable), (variable, variable._array))


def _check_here(variable: Variable) -> None:
    """Refuse a Variable of another Program, whose name may be that of something else in this one."""
    if variable.block.program is defaults.main:
        return
    own = defaults.block.find_var(variable._array.name)
    if own is None or own._array is not variable._array:  # a clone has the same ones
        raise ProgramError(
            f"{variable!r} belongs to another Program than the one that is recorded now; use both under one "
            "program_guard, or run that Program and feed what it gives to this one"
        )
