"""Samples as a model sees them: text again, what of it counts in the loss, and where documents begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from polyreme.data.packing import NO_LABEL

PLAIN = ("[[", "]]")
COLOUR = ("\x1b[32m", "\x1b[0m")
"""What stands around tokens that are counted, in text and on a terminal: green there."""


def sample_lines(
    inputs: np.ndarray,
    labels: np.ndarray,
    decode: Callable[[Sequence[int]], str],
    *,
    end: Sequence[int] = (),
    bos: int | None = None,
    marks: tuple[str, str] = PLAIN,
) -> Iterator[str]:
    """A sample of PackedDataset as text, a document after a line that says how much it is.

    inputs: tokens int `[seq]`, or with where documents lie `[3, seq]`. end and bos: ids whose number those lines tell.
    """
    segments = list(_segments(inputs, labels))
    counted = sum(int(is_counted.sum()) for _, is_counted in segments)
    used = sum(len(ids) - 1 for ids, _ in segments)
    shown = f", between {marks[0]} and {marks[1]}" if marks == PLAIN else ""
    yield f"{used} of {len(labels)} places used by {len(segments)} documents, {counted} tokens counted{shown}"
    for number, (ids, is_counted) in enumerate(segments):
        facts = [f"{len(ids)} tokens", f"{int(is_counted.sum())} counted"]
        facts += [f"{int(np.isin(ids, list(end)).sum())} end tokens"] if end else []
        facts += [f"{int((ids == bos).sum())} beginning tokens"] if bos is not None else []
        yield f"-- document {number}: {', '.join(facts)}"
        yield _marked(ids, is_counted, decode, marks)


def _segments(inputs: np.ndarray, labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, is_counted) of each document of a sample: its tokens and, last, what follows them."""
    tokens, ends, places = inputs if inputs.ndim == 2 else (inputs, None, np.arange(len(inputs)))
    begin = 0
    while begin < len(tokens):
        if ends is None:
            known = np.flatnonzero(labels != NO_LABEL)
            stop = int(known[-1]) + 1 if len(known) else len(tokens)
        else:
            stop = int(ends[begin])
        is_padding = ends is not None and stop == begin + 1 and labels[begin] == NO_LABEL and places[begin] == 0
        if not is_padding:
            last = labels[stop - 1 : stop]
            last = last[last != NO_LABEL]
            ids = np.concatenate([tokens[begin:stop], last])
            is_counted = np.concatenate([[False], labels[begin:stop] != NO_LABEL])[: len(ids)]
            yield ids, is_counted
        begin = len(tokens) if ends is None else stop


def _marked(
    ids: np.ndarray, is_counted: np.ndarray, decode: Callable[[Sequence[int]], str], marks: tuple[str, str]
) -> str:
    """The text of ids, with marks around what is counted."""
    borders = np.flatnonzero(np.diff(is_counted.astype(np.int8))) + 1
    parts = zip(np.split(ids, borders), np.split(is_counted, borders), strict=True)
    texts = ((decode(part.tolist()), bool(counted[0])) for part, counted in parts)
    return "".join(f"{marks[0]}{text}{marks[1]}" if counted else text for text, counted in texts)
