"""Derivatives of static Programs by either mode, and the switch for primitive operators.

In Paddle forward_grad and grad need ops to be taken apart into primitives first (enable_prim), and put
together again before the Program runs (prim2orig). Here every op is made of primitives that XLA fuses, so derivatives
of both modes and of any order work with the switch on or off, and there is nothing to convert back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.autograd import functional
from polyreme.autograd.functional import Tensors, as_list, directions, zeros
from polyreme.core import state
from polyreme.core.state import TensorState
from polyreme.eager import tape
from polyreme.eager.forward import push
from polyreme.errors import ConfigError, GradError, ProgramError
from polyreme.ops.creation import ones_like
from polyreme.program.current import default_main_program
from polyreme.program.gradient import gradients


class _PrimSwitch:
    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = False


_switch = _PrimSwitch()


def enable_prim() -> None:
    """Turn the switch for primitive operators on; raises ProgramError outside static mode."""
    _in_static_mode("enable_prim")
    _switch.is_on = True


def disable_prim() -> None:
    """Turn the switch for primitive operators off; raises ProgramError outside static mode."""
    _in_static_mode("disable_prim")
    _switch.is_on = False


def prim_enabled() -> bool:
    """Whether the switch for primitive operators is on; off at first."""
    return _switch.is_on


def prim2orig(block: Any = None, blacklist: Sequence[str] | None = None) -> None:
    """Leave the main Program's block ready to run, which it always is: no recorded op needs converting.

    Raises ProgramError outside static mode, ConfigError for another block or a blacklist that is no list of names.
    """
    _in_static_mode("prim2orig")
    if block is not None and block is not default_main_program().current_block():
        raise ConfigError("prim2orig: block is the current block of the default main Program, or None")
    if blacklist is not None and not all(isinstance(name, str) for name in blacklist):
        raise ConfigError(f"prim2orig: blacklist is a list of operator names, got {blacklist!r}")


def forward_grad(outputs: Tensors, inputs: Tensors, grad_inputs: Any = None) -> Any:
    """The derivative of outputs along grad_inputs, in the structure of outputs; zeros for one that is constant.

    grad_inputs: a direction for each input, of its shape; ones where None. In static mode it is recorded, to be fetched
    like any Variable; eagerly it follows the tape from inputs to outputs. Raises GradError for an input with
    stop_gradient=True.

    >>> from polyreme.eager.tensor import Tensor
    >>> x = Tensor([1.0, 2.0], stop_gradient=False)
    >>> forward_grad(x * x, x).tolist()
    [2.0, 4.0]
    """
    ends, starts = as_list("forward_grad", "outputs", outputs), as_list("forward_grad", "inputs", inputs)
    if state.recording():
        return _like(outputs, _record(ends, starts, grad_inputs))
    _want_gradients(starts)
    jets, spec = directions("forward_grad", grad_inputs, starts)
    with tape.GradEnabled(True):
        found = push(ends, list(zip(starts, jets, strict=True)), spec)
    tangents = [None if jet is None else jet[0] for jet in found]
    return _like(outputs, [zeros(y) if t is None else t for y, t in zip(ends, tangents, strict=True)])


def grad(outputs: Tensors, inputs: Tensors, grad_outputs: Any = None) -> Any:
    """The gradient of the sum of outputs by inputs, in the structure of inputs, which can be differentiated again.

    grad_outputs: what each output's gradient starts from, of its shape; ones where None. Recorded in static mode.
    """
    if state.recording():
        return _like(inputs, gradients(outputs, inputs, grad_outputs))
    return _like(inputs, functional.grad(outputs, inputs, grad_outputs, create_graph=True))


def _record(ends: list[Any], starts: list[Any], grads: Any) -> list[Any]:
    """Forward mode of a Program: its backward is linear in the cotangents u; backward of that, by u."""
    back = [ones_like(y) for y in ends]
    for u in back:
        u.stop_gradient = False
    vectors = functional.starts("forward_grad", "grad_inputs", grads, len(starts))
    rows = gradients(ends, starts, back)
    return gradients(rows, back, [ones_like(x) if v is None else v for x, v in zip(starts, vectors, strict=True)])


def _want_gradients(starts: Sequence[TensorState]) -> None:
    for x in starts:
        if x.stop_gradient:
            raise GradError(
                f"forward_grad: an input (shape {list(x._array.shape)}) has stop_gradient=True; set it to False before "
                "computing outputs from it"
            )


def _in_static_mode(what: str) -> None:
    if not state.recording():
        raise ProgramError(f"{what} is for static Programs; call enable_static() first")


def _like(structure: Any, results: list[Any]) -> Any:
    return results[0] if isinstance(structure, TensorState) else results
