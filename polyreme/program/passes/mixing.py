"""amp: which calls run in which dtype under automatic mixed precision.

Each op declares its class where it is declared, and core.amp_policy says what it means; the pass puts the
policy into the calls and works out anew what dtypes their results have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from polyreme.amp.auto_cast import policy_of
from polyreme.core import dtype as dtypes
from polyreme.core.amp_policy import Policy
from polyreme.core.symbol import Symbol
from polyreme.errors import ConfigError
from polyreme.program import infer, values
from polyreme.program.block import Block
from polyreme.program.branches import Cond, Recompute, While
from polyreme.program.operation import Call, Operation
from polyreme.program.passes.facts import ProgramFacts, give_instead, inputs_of, kept_names, renamed, results_of, settle
from polyreme.program.program import Program
from polyreme.program.training import Backward
from polyreme.program.values import Ref


def amp(
    program: Program,
    keep: Any = (),
    level: str = "O1",
    dtype: Any = "bfloat16",
    white: Iterable[str] = (),
    black: Iterable[str] = (),
) -> Program:
    """program with every call that has no autocast of its own under this one; arguments as amp.auto_cast's.

    O1: matrix products and convolutions in dtype, delicate ops in float32, others in the widest of their inputs. O2:
    all but the delicate ones in dtype; parameters stay float32, and so are their own master weights. What goes into and
    out of branches and loops keeps its dtype, by casts where needed. Kept values may come in another dtype than before.
    Losses are not scaled, which float16 may need. Raises ConfigError as auto_cast does, and for other levels.
    """
    if level not in ("O1", "O2"):
        raise ConfigError(f"amp: level={level!r}; choose 'O1' or 'O2'")
    policy = policy_of(True, white, black, level, dtype, level == "O1")
    made = program.clone()
    facts = ProgramFacts(made, kept_names(program, keep))
    if policy is not None:
        _Mixing(facts, policy).block(made.global_block())
    return settle(made)


class _Mixing:
    """Puts a policy into blocks. before: the Symbols of values as they were recorded."""

    def __init__(self, facts: ProgramFacts, policy: Policy) -> None:
        self.facts = facts
        self.policy = policy
        self.before: dict[str, Symbol] = {n: t._array for n, t in facts.likes.items() if isinstance(t._array, Symbol)}

    def block(self, block: Block) -> None:
        """Put the policy into the calls of a block and of those inside."""
        done: list[Operation] = []
        for op in block.ops:
            if isinstance(op, Call):
                done.append(self._call(op, block))
                continue
            names: dict[str, str] = {}
            if isinstance(op, While):
                names = self._as_before(values.refs(op.init), block, done)
            if isinstance(op, Recompute):
                self._follow(op.inputs, op.block.takes, op.block)  # type: ignore[arg-type]
            for inner in op.blocks:
                self.block(inner)  # type: ignore[arg-type]
                if isinstance(op, (Cond, While)):
                    self._give_as_before(inner)  # type: ignore[arg-type]
            if isinstance(op, Recompute):
                self._follow(values.refs(op.block.gives), op.outputs, block)
            if isinstance(op, Backward):
                self._follow(op.inputs, op.outputs, block)
            done.append(renamed(op, names))
        block.ops = done

    def _follow(self, sources: Iterable[str], names: Iterable[str], block: Block) -> None:
        """Each name has the dtype of its source."""
        for source, name in zip(sources, names, strict=True):
            self._is_now(name, self.facts.likes[source]._array.dtype, block)

    def _call(self, op: Call, block: Block) -> Call:
        given = inputs_of(op, self.facts.likes)
        if given is None or not any(dtypes.is_floating(t._array.dtype) for t in given.values()):
            return op
        op = op if op.policy is not None else replace(op, policy=self.policy)
        results, _ = results_of(op, given)
        for name, one in zip(op.outputs, values.leaves(results[0], infer.InferredTensor), strict=True):
            self._is_now(name, one.array.dtype, block)
        return op

    def _is_now(self, name: str, dtype: Any, block: Block) -> None:
        """Note the dtype of a value, in every Variable that stands for it."""
        for var in {id(v): v for v in (self.facts.likes[name], block.vars.get(name)) if v is not None}.values():
            old = var._array
            if isinstance(old, Symbol) and old.name == name and old.dtype != dtype:
                var._array = Symbol(name, tuple(old.shape), dtype, old.weak_type, old.known)

    def _as_before(self, names: Iterable[str], block: Block, done: list[Operation]) -> dict[str, str]:
        """Casts of those values whose dtype is another now; name -> name of the cast."""
        casts: dict[str, str] = {}
        for name in names:
            now, old = self.facts.likes[name]._array, self.before.get(name)
            if old is None or now.dtype == old.dtype or name in casts:
                continue
            stops = self.facts.likes[name].stop_gradient
            cast = block.create_var(None, now.shape, old.dtype, stop_gradient=stops)._array.name
            self.facts.likes[cast] = block.vars[cast]
            done.append(Call(name="cast", args=(Ref(name), old.dtype.name), outputs=[cast]))
            casts[name] = cast
        return casts

    def _give_as_before(self, block: Block) -> None:
        done: list[Operation] = []
        names = self._as_before(values.refs(block.gives), block, done)
        block.ops = [*block.ops, *done]
        give_instead(block, names)
