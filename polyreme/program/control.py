"""Branches, loops and recomputed calls, recorded as operations with blocks of their own.

A Variable from outside that code in a block gives a new value (increment, assign with output=) is carried:
it becomes a result of the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from polyreme.core.state import ProgramRecorder, TensorState
from polyreme.core.symbol import PROBES, Symbol
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import ProgramError
from polyreme.jit.structure import LEAF, flatten, rebuild
from polyreme.program import infer, values
from polyreme.program.block import Block, Variable
from polyreme.program.branches import Cond, Recompute, While
from polyreme.program.current import defaults, inside
from polyreme.program.derivatives import Derive
from polyreme.program.frame import Frame
from polyreme.program.operation import Operation, OperationBlock
from polyreme.program.values import Ref, SizeOf


@dataclass
class Side:
    """A recorded block, what its code returned, and the values it gave to Variables from outside."""

    block: Block
    result: Any = None
    carried: dict[int, tuple[Variable, Symbol]] = field(default_factory=dict)
    ended: dict[int, Symbol] = field(default_factory=dict)


@contextmanager
def recording(recorder: ProgramRecorder) -> Iterator[Side]:
    """Record what is called inside as a block; Variables from outside are as they were afterwards, also if it raises:
    then there is no such block.
    """
    program = defaults.main
    side = Side(program.add_block(defaults.block))
    try:
        with inside(side.block), recorder.carrying() as side.carried:
            yield side
    except BaseException:
        del program.blocks[side.block.idx :]
        raise
    finally:
        for key, (variable, before) in side.carried.items():
            side.ended[key], variable._array = variable._array, before


def _record(recorder: ProgramRecorder, fn: Callable[..., Any], args: Sequence[Any] = ()) -> Side:
    with recording(recorder) as side:
        side.result = as_now(fn(*[take(side.block, a) for a in args]))
    return side


def as_now(result: Any) -> Any:
    """A result with Variables for what its own stand for at this point: those from outside will be put back."""
    leaves: list[Any] = []
    spec = flatten(result, leaves)
    return rebuild(spec, iter([alias(v) if isinstance(v, Variable) else v for v in leaves]))


def alias(variable: Variable) -> Variable:
    """A Variable for the value that this one has now."""
    made = Variable.__new__(Variable)
    Tensor.__init__(made, variable._array, stop_gradient=variable.stop_gradient)
    made.__dict__.update({k: v for k, v in variable.__dict__.items() if k in ("_name", "block", "lod")})
    return made


def take(block: Block, like: Any) -> Any:
    """A Variable that the block is given each time it runs, as like is; numbers stay."""
    if not isinstance(like, TensorState):
        return like
    array = like._array
    variable = block.create_var(
        None, array.shape, array.dtype, stop_gradient=like.stop_gradient, probed=getattr(array, "sizes", None)
    )
    variable._node = block
    block.takes.append(variable.name)
    return variable


def reference(recorder: ProgramRecorder, value: Any) -> Any:
    """A Tensor by its name; numbers stay."""
    return Ref(recorder.name_of(value)) if isinstance(value, TensorState) else value


def append_op(
    recorder: ProgramRecorder, op: Operation, count: int, prefix: str, results: list[Any] | None = None
) -> list[Any]:
    """Append an operation with so many results. results: what they are for each probe, if that need not be inferred."""
    if results is None:
        op.outputs = [f"{i}" for i in range(count)]

        def run(frame: Frame) -> list[Tensor]:
            op.run(frame)
            return [frame.values[n] for n in op.outputs]

        results = _inferred(op, run, lambda: _declared(op))
        op.outputs = []
    return recorder.defined(op, results, prefix)


def _declared(op: Operation) -> list[Any] | None:
    """The results of a Cond or While for each probe, from what its blocks give as they were recorded; None if that
    cannot be said. A size that differs, between branches or from step to step, is not known.
    """
    if isinstance(op, Cond):
        pairs = zip(variables(op.true, op.true.gives), variables(op.false, op.false.gives), strict=True)
    elif isinstance(op, While):
        pairs = zip(variables(defaults.block, op.init), variables(op.body, op.body.gives), strict=True)
    else:
        return None
    every = list(pairs)
    return [[either(op.kind, one, other, probe) for one, other in every] for probe in PROBES]


def variables(block: OperationBlock, given: Sequence[Any]) -> list[TensorState]:
    """What Refs of a block stand for, and numbers as Tensors."""
    return [block.find_var(v.name) if isinstance(v, Ref) else Tensor(v) for v in given]  # type: ignore[misc]


def either(what: str, one: TensorState, other: TensorState, probe: int) -> infer.InferredTensor:
    """A value that is one or the other."""
    a, b = (v._array.at(probe) if isinstance(v._array, Symbol) else v._array for v in (one, other))
    if a.dtype != b.dtype or len(a.shape) != len(b.shape):
        raise ProgramError(
            f"{what}: a value is {a.dtype.name} of {len(a.shape)} dims or {b.dtype.name} of {len(b.shape)}, as its "
            "blocks run; give it one dtype and number of dims"
        )
    sizes = tuple(n if n == m else probe for n, m in zip(a.shape, b.shape, strict=True))
    return infer.InferredTensor(jax.ShapeDtypeStruct(sizes, a.dtype), one.stop_gradient and other.stop_gradient)


def _inferred(
    op: Operation, run: Callable[[Frame], Any], declared: Callable[[], list[Any] | None] | None = None
) -> list[Any]:
    """run's results, with the shapes they have when the operation runs on abstract Tensors, else those declared."""
    block, needed = defaults.block, {}
    for name in [*op.reads(), *op.writes()]:
        found = block.find_var(name)
        needed[name] = found if found is not None else block.program.captured.get(name)
    known = {n: t for n, t in needed.items() if t is not None}

    def run_on(given: dict[str, Tensor]) -> Any:
        frame = Frame(Block(block.program, -1, None), infer.scope_of(given))
        frame.values.update(given)
        return values.replace(run(frame), TensorState, infer.InferredTensor.of)

    with tape.GradEnabled(tape.grad_mode.enabled):
        return infer.probed(known, run_on, {}, not isinstance(op, While), declared)


def cond(recorder: ProgramRecorder, pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    """Record both branches; returns their result. Raises ProgramError unless both have one structure."""
    return cond_of(recorder, pred, [_record(recorder, fn) for fn in (true_fn, false_fn)])


def cond_of(recorder: ProgramRecorder, pred: Any, sides: Sequence[Side]) -> Any:
    """Append a Cond over two recorded blocks."""
    leaves: list[list[Any]] = [[], []]
    specs = [flatten(side.result, found) for side, found in zip(sides, leaves, strict=True)]
    if specs[0] != specs[1]:
        raise ProgramError(
            f"cond: true_fn returned {_describe(sides[0].result)}, false_fn {_describe(sides[1].result)}; return the "
            "same structure from both"
        )
    results: list[Any] = []
    for a, b in zip(*leaves, strict=True):
        if isinstance(a, TensorState) or isinstance(b, TensorState) or a != b:
            for side, value in zip(sides, (a, b), strict=True):
                side.block.gives.append(_branch_value(recorder, value))
            results.append(LEAF)
        else:
            results.append((a,))
    variables = {key: pair for side in sides for key, pair in side.carried.items()}
    for key, (_, before) in variables.items():
        for side in sides:
            side.block.gives.append(Ref(side.ended.get(key, before).name))
    op = Cond(pred=reference(recorder, pred), true=sides[0].block, false=sides[1].block)
    made = iter(append_op(recorder, op, len(op.true.gives), "cond"))
    filled = [next(made) if r is LEAF else r[0] for r in results]
    for variable, _ in variables.values():
        recorder.write(variable, next(made)._array)
    return rebuild(specs[0], iter(filled))


def _branch_value(recorder: ProgramRecorder, value: Any) -> Any:
    if not isinstance(value, (TensorState, bool, int, float, complex)):
        raise ProgramError(
            f"cond: one branch returned {_describe(value)} where the other returned something else; what depends on a "
            "Variable is a Tensor or a number"
        )
    return reference(recorder, value)


def _describe(value: Any) -> str:
    return repr(value) if not isinstance(value, TensorState) else f"a Tensor {value!r}"


def while_loop(
    recorder: ProgramRecorder,
    test: Callable[..., Any],
    body: Callable[..., Any],
    init: Sequence[Any],
    maximum: int | None,
) -> list[Any]:
    """Record a loop; returns what its variables end as, numbers as Tensors. Variables may be nested."""
    leaves: list[Any] = []
    spec = flatten(list(init), leaves)
    start = [v if isinstance(v, TensorState) else Tensor(v) for v in leaves]

    def advanced(*now: Any) -> list[Any]:
        result = _list(body(*rebuild(spec, iter(now))))
        if len(result) != len(init):
            raise ProgramError(f"while_loop: body returned {len(result)} values for {len(init)} loop_vars")
        ended: list[Any] = []
        if not _is_alike(flatten(result, ended), spec):
            raise ProgramError(
                "while_loop: body returned loop_vars nested in another way than they are at first; return the same "
                "lists and dicts, in the same order"
            )
        return ended

    tested = _record(recorder, lambda *now: [test(*rebuild(spec, iter(now)))], start)
    ran = _record(recorder, advanced, start)
    if tested.carried:
        raise ProgramError("while_loop: cond changes Variables from outside in place; do that in body")
    if not isinstance(tested.result[0], TensorState):
        raise ProgramError(f"while_loop: cond returned {tested.result[0]!r}, which is no Variable; the loop never ends")
    return rebuild(spec, iter(loop_of(recorder, tested, ran, start, maximum)))


def _is_alike(spec: Any, other: Any) -> bool:
    """Whether two structures are the same but for lists that are tuples."""
    if spec is LEAF or other is LEAF:
        return spec is other
    (kind, keys, specs), (other_kind, other_keys, others) = spec, other
    same_kind = kind is other_kind or {kind, other_kind} == {list, tuple}
    return same_kind and keys == other_keys and len(specs) == len(others) and all(map(_is_alike, specs, others))


def _list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def loop_of(
    recorder: ProgramRecorder, tested: Side, ran: Side, start: Sequence[TensorState], maximum: int | SizeOf | None
) -> list[Any]:
    """Append a While over recorded blocks; what body changes of the Variables around is carried too."""
    tested.block.gives = [reference(recorder, tested.result[0])]
    ran.block.gives = [reference(recorder, v) for v in ran.result]
    begins: list[Any] = [Ref(recorder.name_of(v)) for v in start]
    carried = list(ran.carried.items())
    for key, (_, before) in carried:
        begins.append(Ref(before.name))
        ran.block.gives.append(Ref(ran.ended[key].name))
        for block in (tested.block, ran.block):
            block.takes.append(before.name)  # the name it knows the value by
    op = While(init=begins, test=tested.block, body=ran.block, maximum=maximum)
    made = append_op(recorder, op, len(begins), "while")
    for (_, (variable, _before)), end in zip(carried, made[len(start) :], strict=True):
        recorder.write(variable, end._array)
    return made[: len(start)]


def recompute(
    recorder: ProgramRecorder, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a call of which backward keeps the inputs only."""
    leaves: list[Any] = []
    spec = flatten((args, kwargs), leaves)
    inputs = [v for v in leaves if isinstance(v, TensorState)]

    def call(*now: Any) -> Any:
        left = iter(now)
        again, named = rebuild(spec, iter([next(left) if isinstance(v, TensorState) else v for v in leaves]))
        return function(*again, **named)

    side = _record(recorder, call, inputs)
    if side.carried:
        raise ProgramError("recompute: the function changes Variables from outside in place; return new ones")
    outs: list[Any] = []
    result = flatten(side.result, outs)
    side.block.gives = [reference(recorder, v) for v in outs if isinstance(v, TensorState)]
    op = Recompute(inputs=[recorder.name_of(v) for v in inputs], block=side.block)
    made = iter(append_op(recorder, op, len(side.block.gives), "recompute"))
    return rebuild(result, iter([next(made) if isinstance(v, TensorState) else v for v in outs]))


def derive(
    recorder: ProgramRecorder,
    rule: str,
    function: Callable[..., Any],
    xs: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Record derivatives of a function, which is recorded as a block; returns them as the rule does."""
    side = _record(recorder, function, [_wanting(x) for x in _list(xs)])
    if side.carried:
        raise ProgramError(f"{rule}: the function changes Variables from outside in place; return new ones")
    side.block.gives = [_named(recorder, side.result)]
    op = Derive(
        rule=rule,
        block=side.block,
        xs=_named(recorder, xs),
        args=_named(recorder, args),
        kwargs=_named(recorder, kwargs),
    )
    return recorder.defined(op, _inferred(op, op.results), rule)


def _named(recorder: ProgramRecorder, value: Any) -> Any:
    return values.replace(value, TensorState, lambda tensor: Ref(recorder.name_of(tensor)))


def _wanting(x: TensorState) -> TensorState:
    """What stands for x where its gradient is asked for."""
    like = TensorState(x._array)
    like.stop_gradient = False
    return like
