"""Derivatives of a recorded function: an operation with the function as its block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyreme.autograd.derivation import DERIVATIONS
from polyreme.errors import ProgramError
from polyreme.program import values
from polyreme.program.operation import Operation, OperationBlock, OperationFrame
from polyreme.program.values import refs


@dataclass(kw_only=True)
class Derive(Operation):
    """Call a function of autograd that takes a function: DERIVATIONS[rule](block, xs, *args, **kwargs).

    xs, args, kwargs: with a Ref for every Tensor. The block takes xs one by one and has one nested result.
    """

    rule: str
    block: OperationBlock
    xs: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.rule

    @property
    def blocks(self) -> list[OperationBlock]:
        return [self.block]

    def reads(self) -> list[str]:
        return [*refs((self.xs, self.args, self.kwargs)), *self.block.free()]

    def run(self, frame: OperationFrame) -> None:
        for name, tensor in zip(self.outputs, values.tensors(self.results(frame)), strict=True):
            frame.define(name, tensor)

    def results(self, frame: OperationFrame) -> Any:
        """What it gives, in its structure."""
        xs, args, kwargs = values.resolve((self.xs, self.args, self.kwargs), frame.get)
        if self.rule not in DERIVATIONS:
            raise ProgramError(
                f"a Program calls {self.rule!r}, which is not declared here; import the module that does"
            )
        return DERIVATIONS[self.rule](lambda *now: frame.inside(self.block, now)[0], xs, *args, **kwargs)
