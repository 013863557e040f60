"""Labels of sequences: linear-chain conditional random fields, edit distance, greedy CTC decoding.

Ragged rows and lengths [n] as in sequences.rows; maxlen as in sequences.recurrent:
more than the longest sequence changes nothing. Source: PaddlePaddle 1.7, `linear_chain_crf`,
`crf_decoding`, `edit_distance`, `ctc_greedy_decoder` of `fluid.layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from polyreme.core import dtype as dtypes
from polyreme.core.op import OPS, op
from polyreme.errors import DTypeError, ShapeError
from polyreme.ops.activation import wide
from polyreme.ops.bounds import check_index, preceded
from polyreme.ops.by_index import bounded, read, read_along
from polyreme.ops.indices.gather import as_column
from polyreme.ops.sequences.layout import kept_first
from polyreme.ops.sequences.rows import (
    Rows,
    check_lengths,
    check_room,
    column,
    given_size,
    longest,
    padded,
    rows_of,
    unpadded,
)

# conditional random fields


def _crf_ready(what: str) -> Callable[..., Any]:
    """The step before a CRF op: check lengths, labels and maxlen; without maxlen, find it on the host."""

    def check(
        x: Any,
        lengths: Any,
        transition: Any,
        label: Any = None,
        maxlen: int | None = None,
        **_: Any,
    ) -> Any:
        check_lengths(what, lengths, x.shape[0])
        if label is not None:
            check_index(what, label, x.shape[-1], 1, negative=False)
        if maxlen is None:
            return OPS[what](x, lengths, transition, label, maxlen=longest(f"{what} without maxlen", lengths))
        check_room(what, lengths, maxlen)
        return None

    return check


def _crf_parts(what: str, x: Array, transition: Array) -> tuple[Array, Array, Array, Array]:
    """(emissions, start, stop, transitions [from, to]), wide."""
    if x.ndim != 2 or transition.shape != (x.shape[1] + 2, x.shape[1]):
        raise ShapeError(
            f"{what}: x {list(x.shape)} and transition {list(transition.shape)}; needs [total, tags] and "
            "[tags + 2, tags]: start, stop, then from each tag to each"
        )
    weights = wide(transition)
    return wide(x), weights[0], weights[1], weights[2:]


def _score(x: Array, rows: Rows, label: Array, start: Array, stop: Array, move: Array) -> Array:
    """The score of each sequence's own labels, [n]."""
    at, here = bounded(label, x.shape[1], negative=False), jnp.arange(rows.total)
    before = jnp.where(here == rows.of_row(rows.starts), read(start, (at,)), read(move, (jnp.roll(at, 1), at)))
    end = jnp.where(here == rows.of_row(rows.ends) - 1, read(stop, (at,)), 0)
    each = read_along(x, at[:, None], 1)[:, 0] + before + end
    return jax.ops.segment_sum(each, rows.ids, rows.n, indices_are_sorted=True)


@preceded(_crf_ready("linear_chain_crf"))
@op(amp="fp32", method=False)
def linear_chain_crf(x: Array, lengths: Array, transition: Array, label: Array, maxlen: int | None = None) -> Array:
    """-log p(label | x) of each sequence under a linear-chain CRF: x [total, tags], label [total, 1] -> [n, 1].

    transition [tags + 2, tags]: weights of starting and of stopping with each tag, then from each tag to each. Zero for
    a sequence without rows. Raises IndexError for a label outside [0, tags).
    """
    what = "linear_chain_crf"
    scores, start, stop, move = _crf_parts(what, x, transition)
    rows = rows_of(what, lengths, x.shape[0])
    label = column(what, "label", label)
    if not rows.total:
        return jnp.zeros((rows.n, 1), x.dtype)
    side, valid = padded(scores, rows, given_size(what, "maxlen", maxlen))

    def step(alpha: Array, now: tuple[Array, Array, Array]) -> tuple[Array, None]:
        score, real, first = now
        moved = jax.scipy.special.logsumexp(alpha[:, :, None] + move, 1)
        new = jnp.where(first, start, moved) + score
        return jnp.where(real[:, None], new, alpha), None

    first = jnp.arange(side.shape[1]) == 0
    alpha, _ = lax.scan(step, jnp.zeros((rows.n, x.shape[1]), scores.dtype), (jnp.swapaxes(side, 0, 1), valid.T, first))
    log_z = jax.scipy.special.logsumexp(alpha + stop, 1)
    nll = log_z - _score(scores, rows, label, start, stop, move)
    return jnp.where(rows.lengths > 0, nll, 0)[:, None].astype(x.dtype)


@preceded(_crf_ready("crf_decoding"))
@op(amp="fp32", method=False)
def crf_decoding(
    x: Array,
    lengths: Array,
    transition: Array,
    label: Array | None = None,
    maxlen: int | None = None,
) -> Array:
    """The likeliest tags of each sequence (Viterbi), int64 [total, 1]; of equal paths that of the lower tags.

    With label: 1 where the tag is the label, else 0. Arguments as linear_chain_crf's.
    """
    what = "crf_decoding"
    scores, start, stop, move = _crf_parts(what, x, transition)
    rows = rows_of(what, lengths, x.shape[0])
    if not rows.total:
        return jnp.zeros((0, 1), dtypes.int64)
    side, valid = padded(scores, rows, given_size(what, "maxlen", maxlen))
    path = unpadded(_viterbi(side, valid, rows, start, stop, move), rows)[:, None]
    if label is None:
        return path
    same = path == column(what, "label", label)[:, None]
    return (same & rows.inside[:, None]).astype(dtypes.int64)


def _viterbi(side: Array, valid: Array, rows: Rows, start: Array, stop: Array, move: Array) -> Array:
    """Tags [n, maxlen], int64."""
    steps = jnp.arange(side.shape[1])

    def forward(best: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        score, real, t = now
        through = best[:, :, None] + move
        new = jnp.where(t == 0, start, through.max(1)) + score
        return jnp.where(real[:, None], new, best), jnp.argmax(through, 1)

    first = jnp.zeros((rows.n, side.shape[2]), side.dtype)
    best, came_from = lax.scan(forward, first, (jnp.swapaxes(side, 0, 1), valid.T, steps))
    last = jnp.argmax(best + stop, 1)

    def backward(after: tuple[Array, Array], now: tuple[Array, Array]) -> tuple:
        tag_after, from_after = after
        came, t = now
        stepped = jnp.take_along_axis(from_after, tag_after[:, None], 1)[:, 0]
        tag = jnp.where(t >= rows.lengths - 1, last, stepped)
        return (tag, came), tag

    _, tags = lax.scan(backward, (last, jnp.zeros_like(came_from[0])), (came_from, steps), reverse=True)
    return tags.T.astype(dtypes.int64)


# edit distance


def _distance(hyp: Array, hyp_length: Array, ref: Array, ref_length: Array) -> Array:
    """Levenshtein distance of each pair of rows of [n, a] and [n, b] with their lengths: [n]."""
    steps = jnp.arange(ref.shape[1] + 1)
    first = jnp.broadcast_to(steps, (hyp.shape[0], steps.shape[0]))

    def row(before: Array, now: tuple[Array, Array]) -> tuple[Array, None]:
        token, i = now
        swapped = before[:, :-1] + (ref != token[:, None])
        new = jnp.concatenate([before[:, :1] + 1, jnp.minimum(before[:, 1:] + 1, swapped)], 1)
        # an insertion costs one a column: the least of what stands to the left, each one dearer than the next
        new = lax.cummin(new - steps, 1) + steps
        return jnp.where((i < hyp_length)[:, None], new, before), None

    last, _ = lax.scan(row, first, (hyp.T, jnp.arange(hyp.shape[1])))
    return jnp.take_along_axis(last, ref_length[:, None].astype(last.dtype), 1)[:, 0]


def _without(tokens: Array, length: Array, ignored: tuple[int, ...]) -> tuple[Array, Array]:
    """Rows [n, l] and lengths [n] with the ignored tokens taken out."""
    real = jnp.arange(tokens.shape[1]) < length[:, None]
    keep = real & ~jnp.isin(tokens, jnp.asarray(ignored, tokens.dtype)) if ignored else real
    order = jnp.argsort(~keep, axis=1, stable=True)
    return jnp.take_along_axis(tokens, order, 1), keep.sum(1)


def _edit(
    hyp: Array, hyp_length: Array, ref: Array, ref_length: Array, normalized: bool, ignored: tuple[int, ...] | None
) -> tuple[Array, Array]:
    if not dtypes.is_integer(hyp.dtype) or not dtypes.is_integer(ref.dtype):
        raise DTypeError(f"edit_distance: token ids are {hyp.dtype.name} and {ref.dtype.name}, need integers")
    hyp, hyp_length = _without(hyp, hyp_length, ignored or ())
    ref, ref_length = _without(ref, ref_length, ignored or ())
    distance = _distance(hyp, hyp_length, ref, ref_length).astype(dtypes.float32)
    distance = distance / ref_length if normalized else distance
    return distance[:, None].astype(dtypes.float32), jnp.full(1, hyp.shape[0], dtypes.int64)


@op(method=False)
def edit_distance(
    input: Array,
    label: Array,
    normalized: bool = True,
    ignored_tokens: Any = None,
    input_length: Array | None = None,
    label_length: Array | None = None,
) -> tuple[Array, Array]:
    """Levenshtein distance of rows of token ids: [n, a], [n, b] -> float32 [n, 1], and n as int64 [1].

    normalized divides by the label's length (infinite for an empty one). ignored_tokens are taken out first. Only the
    first input_length [n] and label_length [n] ids of a row count, all unless given.
    """
    if input.ndim != 2 or label.ndim != 2 or input.shape[0] != label.shape[0]:
        raise ShapeError(
            f"edit_distance: input {list(input.shape)}, label {list(label.shape)}; needs [n, a] and [n, b]"
        )
    lengths = [
        jnp.full(t.shape[0], t.shape[1]) if given is None else as_column("edit_distance", given)
        for t, given in ((input, input_length), (label, label_length))
    ]
    return _edit(input, lengths[0], label, lengths[1], normalized, ignored_tokens)


def _edit_ready(
    input: Any, lengths: Any, label: Any, label_lengths: Any, normalized: bool = True, ignored_tokens: Any = None,
    maxlen: int | None = None, label_maxlen: int | None = None, **_: Any
) -> Any:  # fmt: skip
    what = "sequence_edit_distance"
    for rows, cut in ((input, lengths), (label, label_lengths)):
        check_lengths(what, cut, np.shape(rows)[0])
    if maxlen is None or label_maxlen is None:
        found = [longest(f"{what} without maxlen", cut) for cut in (lengths, label_lengths)]
        return OPS[what](input, lengths, label, label_lengths, normalized, ignored_tokens, *found)
    return None


@preceded(_edit_ready)
@op(method=False)
def sequence_edit_distance(
    input: Array,
    lengths: Array,
    label: Array,
    label_lengths: Array,
    normalized: bool = True,
    ignored_tokens: Any = None,
    maxlen: int | None = None,
    label_maxlen: int | None = None,
) -> tuple[Array, Array]:
    """edit_distance of the sequences of two ragged arrays of ids, [total] or [total, 1] each, with their lengths."""
    what = "sequence_edit_distance"
    sides: list[tuple[Array, Array]] = []
    for name, x, cut, size in (("input", input, lengths, maxlen), ("label", label, label_lengths, label_maxlen)):
        rows = rows_of(what, cut, x.shape[0])
        found = padded(column(what, name, x), rows, given_size(what, "maxlen", size))[0]
        sides.append((found, rows.lengths))
    if sides[0][1].shape != sides[1][1].shape:
        n, m = (lengths.shape[0] for _, lengths in sides)
        raise ShapeError(f"{what}: {n} sequences of input, {m} of label; give as many")
    (hyp, hyp_length), (ref, ref_length) = sides
    return _edit(hyp, hyp_length, ref, ref_length, normalized, ignored_tokens)


# greedy CTC decoding


def _blank(what: str, blank: int, classes: int) -> None:
    if not 0 <= blank < classes:
        raise ShapeError(f"{what}: blank={blank} of {classes} classes; give one from 0 to {classes - 1}")


@op(method=False)
def ctc_greedy_decoder(input: Array, input_length: Array, blank: int, padding_value: int = 0) -> tuple[Array, Array]:
    """The likeliest class of each step, repeats merged and blanks removed: [n, steps, classes], [n] or [n, 1] ->
    int64 [n, steps] filled with padding_value, and how many there are, int64 [n, 1].
    """
    if input.ndim != 3:
        raise ShapeError(f"ctc_greedy_decoder: input {list(input.shape)}; needs [n, steps, classes]")
    _blank("ctc_greedy_decoder", blank, input.shape[2])
    best = jnp.argmax(input, 2)
    steps = jnp.arange(input.shape[1])
    real = steps < as_column("ctc_greedy_decoder", input_length)[:, None]
    keep = real & (best != blank) & ((best != jnp.roll(best, 1, 1)) | (steps == 0))
    left = jnp.take_along_axis(best, jnp.argsort(~keep, axis=1, stable=True), 1)
    count = keep.sum(1, keepdims=True)
    return jnp.where(steps < count, left, padding_value).astype(dtypes.int64), count.astype(dtypes.int64)


def _ctc_ready(x: Any, lengths: Any, *_: Any, **__: Any) -> None:
    check_lengths("sequence_ctc_greedy_decoder", lengths, x.shape[0])


@preceded(_ctc_ready)
@op(method=False)
def sequence_ctc_greedy_decoder(x: Array, lengths: Array, blank: int) -> tuple[Array, Array]:
    """ctc_greedy_decoder of ragged rows: [total, classes], [n] -> int64 [total, 1] and lengths [n].

    How many ids are left depends on the values, so the rows behind the last sequence are of none; they are -1.
    """
    what = "sequence_ctc_greedy_decoder"
    if x.ndim != 2:
        raise ShapeError(f"{what}: x {list(x.shape)}; needs [total, classes]")
    _blank(what, blank, x.shape[1])
    rows = rows_of(what, lengths, x.shape[0])
    best = jnp.argmax(x, 1)
    new = (best != jnp.roll(best, 1)) | (jnp.arange(rows.total) == rows.of_row(rows.starts))
    left, made = kept_first(best, rows, new & (best != blank))
    real = jnp.arange(rows.total) < made.sum()
    return jnp.where(real, left, -1)[:, None].astype(dtypes.int64), made
