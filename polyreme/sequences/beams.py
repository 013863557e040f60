"""Beam search: candidates chosen step by step, in sequences of sequences, and whole sentences at the end.

At each step the rows are prefixes: level 0 divides them among sources, level 1 says how many of each prefix's
continuations were chosen a step before. Source: PaddlePaddle 1.7, `fluid.layers.beam_search`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyreme.core.op import recorded
from polyreme.core.symbol import DYNAMIC
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.detection.proposals import read_on_host, tensor_of
from polyreme.sequences import lod as lods
from polyreme.sequences.elements import elements_of


def beam_search(
    pre_ids: Any, pre_scores: Any, ids: Any, scores: Any, beam_size: int, end_id: int, level: int = 0,
    is_accumulated: bool = True, name: str | None = None, return_parent_idx: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """(ids [k, 1], accumulated scores [k, 1]) of the beam_size best continuations of each source, and with
    return_parent_idx the row of each one's prefix, int32 [k].

    pre_ids, pre_scores [prefixes, 1]; ids (None: 0, 1, ...), scores [prefixes, candidates], divided in two levels, of
    which `level` says which prefixes belong to one source. scores are those of whole continuations if is_accumulated,
    else probabilities of the last word. A prefix that ended stays as it is; a source whose chosen ones all had ended
    before has no rows any more. The Program runs op by op. Raises ConfigError for a level there is not.
    """
    given = next((v for v in (scores, ids, pre_scores, pre_ids) if v is not None and lods.lod_of(v)), scores)
    _, lod = lods.sequences("beam_search", given)
    if not 0 <= level < len(lod):
        raise ConfigError(f"beam_search: level={level} of {len(lod)} levels; give 0 or more")
    args = (pre_ids, pre_scores, ids, scores, list(lod[level:]), int(beam_size), int(end_id), bool(is_accumulated))
    results = [([DYNAMIC, 1], "int64", 0), ([DYNAMIC, 1], scores.dtype, 0), ([DYNAMIC], "int32", 0),
               *[([DYNAMIC], "int64", 1)] * 2]  # fmt: skip
    chosen, values, parent, *levels = lods.uninferred("best_continuations", args, results)
    made = lods.divided(chosen, levels), lods.divided(values, levels)
    return (*made, parent) if return_parent_idx else made


@recorded(draws=False)
def best_continuations(
    pre_ids: Any, pre_scores: Any, ids: Any, scores: Any, levels: Sequence[Any], size: int, end: int, accumulated: bool
) -> tuple[Any, ...]:
    """What beam_search gives, and the offsets of its two levels."""
    before, had, score, *cuts = read_on_host("beam_search", pre_ids, pre_scores, scores, *levels)
    score = score.reshape(len(before), -1)
    words = read_on_host("beam_search", ids)[0] if ids is not None else np.broadcast_to(
        np.arange(score.shape[1]), score.shape)  # fmt: skip
    before, had, words = before.reshape(-1), had.reshape(-1), words.reshape(score.shape)
    bounds = cuts[0]
    for inner in cuts[1:]:
        bounds = inner[bounds]
    if bounds[-1] != len(before):
        raise ShapeError(
            f"beam_search: sequences of {bounds[-1]} rows, pre_ids has {len(before)}; they must be the same"
        )
    total = score if accumulated else had[:, None] + np.log(score)
    rows: list[tuple[int, int, Any]] = []
    for low, high in itertools.pairwise(bounds):
        items: list[tuple[int, int, Any]] = []
        for row in range(low, high):
            if before[row] == end:
                items.append((row, end, had[row]))
            else:
                items += zip([row] * score.shape[1], words[row], total[row], strict=True)
        # of equal ones a later prefix first
        best = sorted(items, key=lambda item: (-item[2], -item[0]))[:size]
        if not all(word == end and before[row] == end for row, word, _ in best):
            rows += sorted(best, key=lambda item: item[0])
    counts = np.bincount([row for row, *_ in rows], minlength=len(before))
    return (
        tensor_of(np.array([word for _, word, _ in rows], np.int64)[:, None], np.int64),
        tensor_of(np.array([value for *_, value in rows], score.dtype)[:, None], score.dtype),
        tensor_of([row for row, *_ in rows], np.int32),
        tensor_of(bounds, np.int64),
        tensor_of(np.concatenate([[0], np.cumsum(counts)]), np.int64),
    )


def beam_search_decode(ids: Any, scores: Any, beam_size: int, end_id: int, name: str | None = None) -> tuple[Any, Any]:
    """(ids [words], their accumulated scores [words]) of whole sentences: for each source the best first.

    ids, scores: arrays of what beam_search chose at each step, the first words too, as one Variable each. Level 0 says
    how many sentences a source has, level 1 how many words a sentence. beam_size is what they were chosen with.
    """
    results = [([DYNAMIC], "int64", 0), ([DYNAMIC], "float32", 0), *[([DYNAMIC], "int64", 1)] * 2]
    words, values, *levels = lods.uninferred("whole_sentences", (ids, scores, int(end_id)), results)
    return lods.divided(words, levels), lods.divided(values, levels)


@recorded(draws=False)
def whole_sentences(ids: Any, scores: Any, end: int) -> tuple[Any, ...]:
    """What beam_search_decode gives, and the offsets of its two levels."""
    steps = [
        [read_on_host("beam_search_decode", *(element if i == 0 else element[:1])) for i, element in enumerate(pair)]
        for pair in zip(elements_of("beam_search_decode", ids), elements_of("beam_search_decode", scores), strict=True)
    ]
    if not steps or len(steps[0][0]) != 3:
        raise ShapeError("beam_search_decode: each element of the array is divided in two levels, as beam_search's are")
    sources = len(steps[0][0][1]) - 1
    # of each source: a row of the step that is looked at, and the words and values of a sentence from its end on
    open_: list[list[tuple[int, list[int], list[Any]]]] = [[] for _ in range(sources)]
    for (word, top, low), (value,) in reversed(steps):
        word, value = word.reshape(-1), value.reshape(-1)
        prefix = np.repeat(np.arange(len(low) - 1), np.diff(low))
        for source in range(sources):
            if not open_[source]:
                rows = range(low[top[source]], low[top[source + 1]])
                open_[source] = [(int(prefix[row]), [int(word[row])], [value[row]]) for row in rows]
                continue
            stay = []
            for row, words, values in open_[source]:
                # an ended sentence that was chosen again and again has one end
                if word[row] != end or not words:
                    words, values = [*words, int(word[row])], [*values, value[row]]
                stay.append((int(prefix[row]), words, values))
            open_[source] = stay
    ordered = [sorted(sentences, key=lambda s: -s[2][0]) for sentences in open_]
    flat = [s for sentences in ordered for s in sentences]
    words = [word for s in flat for word in reversed(s[1])]
    values = [value for s in flat for value in reversed(s[2])]
    levels = ([len(s) for s in ordered], [len(s[1]) for s in flat])
    return (
        tensor_of(words, np.int64),
        tensor_of(values, steps[0][1][0].dtype),
        *(tensor_of(np.concatenate([[0], np.cumsum(v)]), np.int64) for v in levels),
    )


__all__ = ["beam_search", "beam_search_decode"]
