"""PASSES: all passes by name; apply runs some in order, show prints what one changes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyreme.errors import ConfigError, did_you_mean
from polyreme.program.passes.dead import dead_code, prune
from polyreme.program.passes.folding import constant_folding
from polyreme.program.passes.fusions import fusion
from polyreme.program.passes.identities import identity
from polyreme.program.passes.mixing import amp
from polyreme.program.passes.recomputing import recompute
from polyreme.program.passes.subexpressions import common_subexpression
from polyreme.program.program import Program


@dataclass(frozen=True)
class Pass:
    """A function Program -> Program that leaves what it is given as it was.

    keep: results that are fetched later, which stay under their names. options: its further parameters.
    """

    name: str
    description: str
    run: Callable[..., Program]

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.run).parameters)[2:]

    def __call__(self, program: Program, keep: Any = (), **options: Any) -> Program:
        if not isinstance(program, Program):
            raise TypeError(f"{self.name} takes a Program, got {type(program).__name__}")
        unknown = sorted(options.keys() - set(self.options))
        if unknown:
            raise ConfigError(f"{self.name}: unknown options {unknown}; it takes {list(self.options)}")
        return self.run(program, keep, **options)


PASSES: dict[str, Pass] = {
    p.name: p
    for p in (
        Pass("constant_folding", "compute what follows from constants before the Program runs", constant_folding),
        Pass("identity", "take away calls that give back what they take", identity),
        Pass("common_subexpression", "compute equal calls once", common_subexpression),
        Pass("dead_code", "take away what neither a kept value nor a write needs", dead_code),
        Pass("prune", "leave only what the kept values need", prune),
        Pass("fusion", "one call for several that match a pattern", fusion),
        Pass("recompute", "compute again in backward what lies between checkpoints", recompute),
        Pass("amp", "run calls in float16 or bfloat16 where their class allows it", amp),
    )
}


def apply(program: Program, passes: Sequence[Any] | str, fetch: Any = (), **options: Any) -> Program:
    """program after these passes, in this order.

    passes: names, or (name, options) pairs. fetch: Variables and names that are fetched later. options: given to every
    pass that has such a parameter. Raises ConfigError for an unknown pass, and for an option that none of them has.

    >>> [name for name, p in PASSES.items() if "checkpoints" in p.options]
    ['recompute']
    """
    chosen = [_choose(entry) for entry in ([passes] if isinstance(passes, str) else passes)]
    unused = sorted(options.keys() - {o for p, _ in chosen for o in p.options})
    if unused:
        raise ConfigError(f"passes.apply: no pass of {[p.name for p, _ in chosen]} has the options {unused}")
    for found, own in chosen:
        shared = {o: v for o, v in options.items() if o in found.options}
        program = found(program, fetch, **{**shared, **own})
    return program


def show(program: Program, passes: Sequence[Any] | str, fetch: Any = (), **options: Any) -> str:
    """What passes change, as a unified diff of the listings before and after; empty if nothing."""
    before, after = str(program).splitlines(), str(apply(program, passes, fetch, **options)).splitlines()
    return "\n".join(difflib.unified_diff(before, after, "before", "after", lineterm=""))


def _choose(entry: Any) -> tuple[Pass, dict[str, Any]]:
    name, own = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, {})
    if name not in PASSES:
        raise ConfigError(f"passes.apply: there is no pass {name!r}{did_you_mean(str(name), PASSES)}")
    return PASSES[name], own
