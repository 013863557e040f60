"""Frame: the values of one run of a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyreme.core import state
from polyreme.eager.tensor import Tensor
from polyreme.errors import ProgramError
from polyreme.program import values
from polyreme.program.block import Block
from polyreme.program.listing import line
from polyreme.program.operation import Operation, is_exact
from polyreme.program.scope import Scope
from polyreme.program.training import Backward
from polyreme.program.values import Ref


def as_it_is(of: str, gradient: Tensor) -> Tensor:
    """The gradient."""
    return gradient


class Frame:
    """Values by name: those defined in this run, those of the run around it, persistable ones of the scope.

    reduced: (name, its gradient) -> the gradient that is used: data parallel runs average a parameter's over devices.
    """

    def __init__(
        self,
        block: Block,
        scope: Scope,
        outer: Frame | None = None,
        reduced: Callable[[str, Tensor], Tensor] = as_it_is,
    ) -> None:
        self.block = block
        self.scope = scope
        self.outer = outer
        self.reduced = reduced
        self.values: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor:
        """The value of this name; ProgramError if it has none."""
        frame: Frame | None = self
        while frame is not None:
            found = frame.values.get(name)
            if found is not None:
                return found
            frame = frame.outer
        return self.persistable(name)

    def persistable(self, name: str) -> Tensor:
        """The Tensor that the scope holds under this name; ProgramError if there is none."""
        found = self.scope.find(name)
        if found is not None:
            return found
        tensor = self.block.program.captured.get(name)
        if tensor is None:
            var = self.block.find_var(name)
            if var is not None and var.persistable:
                raise ProgramError(
                    f"variable {name!r} has no value in this scope; run the startup program in it first: "
                    "exe.run(static.default_startup_program())"
                )
            raise ProgramError(
                f"{name!r} has no value in this run: "
                + (
                    "feed it, or fetch something else"
                    if var is not None
                    else "this Program does not compute it; it belongs to another Program, or was left out of a copy, "
                    "as gradients are of clone(for_test=True)"
                )
            )
        self.scope.adopt(name, tensor)
        return tensor

    def define(self, name: str, tensor: Tensor) -> None:
        """Give a name its value, cut off from gradients if its Variable was told to stop them, and one that wants a
        gradient if it was told not to."""
        var = self.block.vars.get(name)
        if var is not None and var.stop_gradient and not tensor.stop_gradient:
            tensor = Tensor(state.read(tensor))
        elif var is not None and not var.stop_gradient and tensor.stop_gradient and not isinstance(var._node, Backward):
            tensor = Tensor(state.read(tensor), stop_gradient=is_exact(tensor.dtype))
        self.values[name] = tensor

    def run(self) -> None:
        """Run every operation of the block."""
        for operation in self.block.ops:
            try:
                self.perform(operation)
            except Exception as error:
                _say_where(error, operation, self.block)
                raise

    def perform(self, operation: Operation) -> None:
        """Run one operation."""
        operation.run(self)

    def inside(self, block: Block, given: Sequence[Any]) -> list[Any]:
        """Results of a block within this one, run on these values."""
        frame = Frame(block, self.scope, self, self.reduced)
        frame.values.update(zip(block.takes, given, strict=True))
        frame.run()
        return [values.replace(r, Ref, lambda ref: frame.get(ref.name)) for r in block.gives]


_IN_OPERATION = "in the Program's operation: "


def _say_where(error: Exception, operation: Operation, block: Block) -> None:
    """Note on an error which operation it comes from: the innermost, if that is inside others."""
    if not any(note.startswith(_IN_OPERATION) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_IN_OPERATION}{line(operation, block)}")
        if operation.origin:
            error.add_note(f"recorded {operation.origin}")
