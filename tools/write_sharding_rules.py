"""Writes docs/sharding_rules.md: where the sharding rule of every op is from.

Run it from the root after an op or a rule came or went: `python -m tools.write_sharding_rules`.
tests/distributed/auto_parallel/test_sharding_rules.py fails when the page is out of date. Rules that are derived need a
call: they are those of the first row that an op has in the contract table of the tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from polyreme.conformance.case import Case, tensors, tensors_in
from polyreme.conformance.rows import ROWS
from polyreme.core import amp_policy, mode
from polyreme.core.op import OPS, TENSOR, TENSORS, Op
from polyreme.distributed.auto_parallel.dims.derived import derived_rule, unknown_primitives
from polyreme.distributed.auto_parallel.tensors.mode import BoundCall

PAGE = Path(__file__).parent.parent / "docs" / "sharding_rules.md"
HEAD = """# Sharding rules of the ops

How the dims of an op's inputs and results go together over a mesh is said once, with the op
(`polyreme/core/sharding_rule.py`; how to declare it: [adding_an_op.md](adding_an_op.md)), and read by the placements
of Tensors on a `ProcessMesh`, by the inference of a model's logical dims and by calls that XLA cannot look into. Where
none is declared, or none describes a call, the rule follows from the primitives that the op's function is made of. An
op of which neither tells anything takes its inputs as they lie, addends joined; its results lie as XLA's partitioner
leaves them, which the log of `polyreme.distributed.auto_parallel` says once an op.

Written by `python -m tools.write_sharding_rules`.
"""


class _Reached(Exception):
    """The op that is looked for was called."""


class _Sampling(mode.Mode):
    """Stops at the first call of one op, and has its function as jax's expression."""

    def __init__(self, op: Op) -> None:
        self.op, self.under = op, mode.current.mode
        self.jaxpr: Any = None

    def run(self, op: Op, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Hand other calls on."""
        if op is not self.op:
            return self.under.run(op, args, kwargs)
        bound = BoundCall(op, args, {k: v for k, v in kwargs.items() if k != "out"})
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in bound.arrays]
        self.jaxpr = jax.make_jaxpr(op.kernel(bound.template, amp_policy.active.policy).fn)(*structs)
        raise _Reached


def _sample(op: Op, case: Case) -> Any:
    sampling = _Sampling(op)
    try:
        with mode.using(sampling):
            case.fn(*tensors(case.arguments()), **tensors_in(case.kwargs))
    except _Reached:
        return sampling.jaxpr
    raise ValueError(f"{case.id}: the row of op {op.name} does not call it")


def _name(rule: Callable[..., Any] | str) -> str:
    """How a declared rule is shown: the dims, the family's name, or that it is the op's own."""
    if isinstance(rule, str):
        return f"`{rule}`"
    family = rule.__qualname__.partition(".")[0]
    return "its own" if family.startswith("_") else f"`{family}`"


def _meaning(rule: Callable[..., Any] | str) -> str:
    if isinstance(rule, str):
        return "dims in brackets, and those that only one side has, are whole"
    family = getattr(inspect.getmodule(rule), rule.__qualname__.partition(".")[0], rule)
    return (inspect.getdoc(family) or "").splitlines()[0].replace("|", "\\|")


def _ops() -> dict[str, Op]:
    """Every op but composites, which are made of others."""
    return {name: public.op for name, public in sorted(OPS.items()) if hasattr(public, "op")}


def declared_part() -> list[str]:
    """The lines about rules that are declared."""
    rules: dict[tuple[str, str], list[str]] = {}
    for name, op in _ops().items():
        if op.declared_rule is not None:
            rules.setdefault((_name(op.declared_rule), _meaning(op.declared_rule)), []).append(name)
    lines = [f"## Declared ({sum(map(len, rules.values()))})", "", "| rule | what it says | ops |", "|---|---|---|"]
    return [*lines, *(f"| {rule} | {what} | {_listed(names)} |" for (rule, what), names in sorted(rules.items()))]


def page() -> str:
    """The whole page."""
    derived, no_input, unknown = [], [], []
    rows = {case.name: case for case in reversed(ROWS)}
    for name, op in _ops().items():
        if op.declared_rule is not None:
            continue
        if not {TENSOR, TENSORS} & set(op.kinds):
            no_input.append(name)
            continue
        jaxpr = _sample(op, rows[name])
        if derived_rule(jaxpr) is None:
            unknown.append(f"| `{name}` | {', '.join(unknown_primitives(jaxpr))} |")
        else:
            derived.append(name)
    lines = [HEAD, *declared_part()]
    lines += ["", f"## Derived from the op's function ({len(derived)})", "", _listed(derived)]
    lines += ["", f"## Without a Tensor among the inputs ({len(no_input)})", "", _listed(no_input)]
    lines += ["", f"## None ({len(unknown)})", ""]
    table = ["| op | primitives that say nothing of dims |", "|---|---|", *unknown]
    return "\n".join([*lines, *(table if unknown else ["No op is without one."])]) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page())
