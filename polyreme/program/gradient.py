"""append_backward and gradients: backward recorded as one operation, and the minimize of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.core import unique_name
from polyreme.core.state import TensorState
from polyreme.core.symbol import Symbol
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, GradError, ProgramError
from polyreme.program.block import Block
from polyreme.program.current import defaults
from polyreme.program.operation import Operation
from polyreme.program.passes import recomputing
from polyreme.program.program import Program
from polyreme.program.training import Backward, Optimize, StartOptimizer

Pairs = list[tuple[Tensor, Tensor]]


def append_backward(
    loss: Any,
    parameter_list: Sequence[Any] | None = None,
    no_grad_set: Any = None,
    callbacks: Any = None,
    checkpoints: Any = None,
) -> Pairs:
    """Record the gradient of loss for every trainable parameter it depends on; -> [(parameter, gradient), ...].

    parameter_list: these only (Variables or names). no_grad_set: no gradient flows through these. A gradient's name is
    `<name>@GRAD`. checkpoints: backward keeps these Variables, and computes again what lies before and between them
    (arXiv:1604.06174). Raises ConfigError for callbacks, and for checkpoints that are not computed here.
    """
    if callbacks is not None:
        raise ConfigError(f"append_backward: callbacks={callbacks!r} cannot be honoured; inspect the Program instead")
    symbol = _symbol("append_backward", loss)
    block = _block_of(loss)
    if symbol.shape not in ((), (1,)):
        raise GradError(f"append_backward: loss {symbol!r} is not one number; reduce it with mean() or sum()")
    blocked = [_named(block, v) for v in no_grad_set or ()]
    program = block.program
    if parameter_list is None:
        wanted = [*program.all_parameters(), *program.captured.values()]
    else:
        wanted = [block.var(p) if isinstance(p, str) else p for p in parameter_list]
    trained = [p for p in wanted if not p.stop_gradient and _name(block, p) not in blocked]
    reached = _behind(block, [symbol.name], set(blocked))
    used = [p for p in trained if _name(block, p) in reached]
    if parameter_list is None and not used:
        raise GradError(f"append_backward: loss {symbol!r} depends on no trainable parameter of this Program")
    if checkpoints is not None:
        recomputing.wrap(block, recomputing.checkpoint_names(block.program, checkpoints), None)
    return list(zip(used, _backward(block, [symbol.name], used, [], blocked), strict=True))


def gradients(targets: Any, inputs: Any, target_gradients: Any = None, no_grad_set: Any = None) -> list[Tensor]:
    """Record the gradient of the sum of targets with respect to each input; zeros for one that they do not depend on.

    target_gradients: what each target's gradient starts from, ones for None. Gradients of gradients are recorded alike.
    """
    ends, starts = _list(targets), _list(inputs)
    block = _block_of(ends[0])
    seeds = [None] * len(ends) if target_gradients is None else _list(target_gradients)
    if len(seeds) != len(ends):
        raise GradError(f"gradients: {len(seeds)} target_gradients for {len(ends)} targets; give one for each, or None")
    for x in starts:
        if x.stop_gradient:
            raise GradError(
                f"gradients: input {_symbol('gradients', x)!r} has stop_gradient=True; set it to False before "
                "it is used"
            )
    names = [_symbol("gradients", t).name for t in ends]
    begins = [None if g is None else _symbol("gradients", g).name for g in seeds]
    return _backward(block, names, starts, begins, [_named(block, v) for v in no_grad_set or ()])


def minimize(
    optimizer: Any, loss: Any, startup_program: Any, parameters: Any, no_grad_set: Any
) -> tuple[list[Operation], Pairs]:
    """Record backward and one step of optimizer; -> (operations, pairs)."""
    chosen = parameters if parameters is not None else (optimizer.parameters_given or None)
    pairs = append_backward(loss, chosen, no_grad_set)
    return apply_gradients(optimizer, pairs, startup_program), pairs


def apply_gradients(
    optimizer: Any, pairs: Sequence[tuple[Tensor, Tensor]], startup_program: Program | None = None
) -> list[Operation]:
    """Record one step of optimizer with these gradients."""
    key = unique_name.generate(type(optimizer).__name__.lower())
    block = _block_of(pairs[0][1]) if pairs else defaults.main.global_block()
    named = [(_name(block, p), _symbol("minimize", g).name) for p, g in pairs]
    rate = optimizer.rate_variable
    op = Optimize(
        key=key, optimizer=optimizer, pairs=named, rate=None if rate is None else _symbol("minimize", rate).name
    )
    block.append(op)
    startup = defaults.startup if startup_program is None else startup_program
    startup.global_block().append(StartOptimizer(of=op))
    return [op]


def _backward(
    block: Block, ends: list[str], inputs: Sequence[Tensor], starts: list[str | None], blocked: list[str]
) -> list[Tensor]:
    op = Backward(
        targets=ends, inputs=[_name(block, x) for x in inputs], starts=starts, blocked=blocked,
        scope="/".join(defaults.scopes),
    )  # fmt: skip
    reached = _behind(block, ends, set())
    for earlier in block.ops:
        # its results are differentiated in turn
        if isinstance(earlier, Backward) and not reached.isdisjoint(earlier.outputs):
            earlier.again = True
    results = []
    for x in inputs:
        name = f"{_name(block, x)}@GRAD"
        if block.has_var(name):
            name = unique_name.generate(name)
        # it can be differentiated in turn
        made = block.create_var(name, x._array.shape, x._array.dtype, stop_gradient=False)
        made._node = op
        op.outputs.append(name)
        results.append(made)
    block.append(op)
    return results


def _behind(block: Block, ends: Sequence[str], blocked: set[str]) -> set[str]:
    """Names that values depend on with a gradient, as far as the Program says."""
    reached = set(ends) - blocked
    for op in reversed(block.ops):
        if not reached.isdisjoint(op.outputs) and getattr(op, "taped", True):
            reached |= {n for n in op.reads() if n not in blocked and not _stops(block, n)}
    return reached


def _stops(block: Block, name: str) -> bool:
    found = block.find_var(name)
    return found is not None and found.stop_gradient


def _block_of(variable: Any) -> Block:
    """The outermost block of a Variable's Program, which need not be the one in force."""
    return getattr(variable, "block", defaults.block).program.global_block()


def _symbol(what: str, value: Any) -> Symbol:
    if not isinstance(value, TensorState) or not isinstance(value._array, Symbol):
        raise ProgramError(
            f"{what}: takes Variables of a static Program, got {type(value).__name__}; call enable_static() before "
            "building it"
        )
    return value._array


def _name(block: Block, tensor: Tensor) -> str:
    """The name of a Variable, or of a Tensor with a value that the Program holds."""
    if isinstance(tensor._array, Symbol):
        return tensor._array.name
    return next((n for n, held in block.program.captured.items() if held is tensor), tensor.name)


def _named(block: Block, value: Any) -> str:
    return block.var(value)._array.name if isinstance(value, str) else _symbol("no_grad_set", value).name


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
