"""identity: calls that give their input back are taken away. Which those are is a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyreme.core.symbol import Symbol
from polyreme.program.block import Block
from polyreme.program.operation import Call, Operation
from polyreme.program.passes.facts import ProgramFacts, kept_names, rename, renamed, settle, symbol_of
from polyreme.program.program import Program
from polyreme.program.values import Ref


@dataclass(frozen=True)
class IdentityRule:
    """A call of op gives back what is in its parameter `of` when `holds` says so of all its arguments."""

    op: str
    of: str
    holds: Callable[[dict[str, Any]], bool]
    why: str


def _always(_: dict[str, Any]) -> bool:
    return True


def _one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 1


def _drops_nothing(given: dict[str, Any]) -> bool:
    if given["training"]:
        return given["p"] == 0
    return given.get("mode", "upscale_in_train") == "upscale_in_train"


def _keeps_order(given: dict[str, Any]) -> bool:
    perm = given["perm"]
    return isinstance(perm, (list, tuple)) and list(perm) == list(range(len(perm)))


# not x + 0: that makes 0.0 of -0.0
IDENTITIES = (
    IdentityRule("assign", "x", _always, "a copy"),
    IdentityRule("clone", "x", _always, "a copy"),
    IdentityRule("cast", "x", _always, "a cast to the dtype it has"),
    IdentityRule("reshape", "x", _always, "a reshape to the shape it has"),
    IdentityRule("expand", "x", _always, "an expansion to the shape it has"),
    IdentityRule("transpose", "x", _keeps_order, "dims in the order they have"),
    IdentityRule("scale", "x", lambda a: _one(a["scale"]) and _nothing(a["bias"]) and a["act"] is None, "1 * x"),
    IdentityRule("multiply", "x", lambda a: _one(a["y"]), "x * 1"),
    IdentityRule("multiply", "y", lambda a: _one(a["x"]), "1 * x"),
    IdentityRule("divide", "x", lambda a: _one(a["y"]) and a["rounding_mode"] is None, "x / 1"),
    IdentityRule("subtract", "x", lambda a: _nothing(a["y"]), "x - 0"),
    *(
        IdentityRule(name, "input" if name == "dropout1d" else "x", _drops_nothing, "dropout that drops nothing")
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    ),
)


def _nothing(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0 and str(value) != "-0.0"


def identity(program: Program, keep: Any = ()) -> Program:
    """program without calls that give back what they take (the table IDENTITIES): their readers read the input.

    Left in place: results that are kept, that gradients are taken of or to, that stop gradients where the input does
    not, and copies of values that something writes.
    """
    made = program.clone()
    _drop(made.global_block(), {}, ProgramFacts(made, kept_names(program, keep)))
    return settle(made)


def _drop(block: Block, names: dict[str, str], facts: ProgramFacts) -> None:
    ops: list[Operation] = []
    for op in block.ops:
        op = renamed(op, names)
        source = _given_back(op, block, facts)
        if source is not None:
            names[op.outputs[0]] = source
            continue
        ops.append(op)
        for inner in op.blocks:
            _drop(inner, dict(names), facts)  # type: ignore[arg-type]
    block.ops = ops
    rename(block, names)


def _given_back(op: Operation, block: Block, facts: ProgramFacts) -> str | None:
    """The name of what the call gives back; None if it does something."""
    if not isinstance(op, Call) or len(op.outputs) != 1 or op.changes or op.outputs[0] in facts.pinned:
        return None
    rules = [rule for rule in IDENTITIES if rule.op == op.name]
    given = op.by_parameter() if rules else None
    for rule in rules:
        if given is not None and isinstance(given[rule.of], Ref) and rule.holds(given):
            source = given[rule.of].name
            if _same(op, source, block, facts):
                return source
    return None


def _same(op: Call, source: str, block: Block, facts: ProgramFacts) -> bool:
    """Whether the input can stand for the result everywhere."""
    # a name that some other block takes anew means something else inside that block
    if source in facts.written or any(source in b.takes for b in facts.program.blocks if b is not block):
        return False
    have, result = symbol_of(facts.likes, source), symbol_of(facts.likes, op.outputs[0])
    before, after = facts.like(source), facts.like(op.outputs[0])
    if have is None or before is None or after is None or not isinstance(result, Symbol) or result.follows_sizes:
        return False
    return (
        before.stop_gradient == after.stop_gradient
        and (have.dtype, bool(getattr(have, "weak_type", False))) == (result.dtype, result.weak_type)
        and _same_shape(op.name, tuple(have.shape), tuple(result.shape))
    )


_CHANGE_SHAPE = ("reshape", "expand")


def _same_shape(name: str, before: tuple, after: tuple) -> bool:
    # sizes that are not known may differ from each other
    return before == after and (name not in _CHANGE_SHAPE or all(size >= 0 for size in before))
