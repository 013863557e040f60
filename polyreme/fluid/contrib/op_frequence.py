"""fluid.contrib.op_frequence: how often a Program calls each op."""

from __future__ import annotations

from collections import Counter

from polyreme.program.program import Program


def op_freq_statistic(program: Program) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """((type of operation, how often), ...) and ("one->next", how often) where a value goes from one to the next, most
    often first. Raises TypeError for what is no Program.
    """
    if not isinstance(program, Program):
        raise TypeError(f"op_freq_statistic takes a Program, got {type(program).__name__}")
    single: Counter[str] = Counter()
    pairs: Counter[str] = Counter()
    for block in program.blocks:
        made_by: dict[str, str] = {}
        for op in block.ops:
            single[op.type] += 1
            pairs.update(f"{made_by[name]}->{op.type}" for name in dict.fromkeys(op.reads()) if name in made_by)
            made_by.update(dict.fromkeys(op.outputs, op.type))
    return single.most_common(), pairs.most_common()


__all__ = ["op_freq_statistic"]
