"""fusion: the pass that applies the table of patterns to a Program."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError, did_you_mean
from polyreme.fusion.pattern import Pattern, matches
from polyreme.fusion.table import PATTERNS
from polyreme.program.block import Block
from polyreme.program.passes.facts import ProgramFacts, direct, kept_names, settle
from polyreme.program.passes.replacing import BlockCalls, replaced
from polyreme.program.program import Program


def fusion(program: Program, keep: Any = (), patterns: Any = None) -> Program:
    """program with one call where several match a pattern of PATTERNS.

    patterns: names of those to apply, one or a list; None for all but `attention_dropout`, whose mask of dropped
    probabilities is another one for the same seed (what other calls draw stays). A pattern applies only where nothing
    else reads what lies between, and it is not kept. Sums are added in another order, so results are equal within
    rounding. Attention over a row of scores that are all -inf gives 0 instead of NaN.
    """
    chosen = _choose(patterns)
    fused = program.clone()
    facts = ProgramFacts(fused, kept_names(program, keep))
    for block in fused.blocks:
        while _fuse_one(block, chosen, facts):
            pass
    return settle(fused)


def _choose(patterns: Any) -> list[Pattern]:
    if patterns is None:
        return [p for p in PATTERNS if not p.redraws]
    names = [patterns] if isinstance(patterns, str) else list(patterns)
    known = dict.fromkeys(p.name for p in PATTERNS)
    for name in names:
        if name not in known:
            raise ConfigError(f"fusion: there is no pattern {name!r}{did_you_mean(str(name), known)}")
    return [p for p in PATTERNS if p.name in names]


def _fuse_one(block: Block, patterns: list[Pattern], facts: ProgramFacts) -> bool:
    """Apply one pattern somewhere in the block; False if none applies."""
    calls = BlockCalls(block, facts)
    for index, op in enumerate(block.ops):
        for pattern in patterns:
            if pattern.ending != op.kind:
                continue
            for match in matches(pattern, index, calls):
                found = replaced(pattern, match)
                if found is not None:
                    _put(block, index, *found, facts)
                    return True
    return False


def _put(block: Block, at: int, call: Any, gone: list[int], facts: ProgramFacts) -> None:
    for place in gone:
        facts.readers.subtract(direct(block.ops[place]))
    facts.readers.update(direct(call))
    block.ops = [call if i == at else op for i, op in enumerate(block.ops) if i == at or i not in gone]
