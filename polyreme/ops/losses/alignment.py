"""Losses over alignments of two sequences: CTC and RNN transducer.

Sums over all alignments in the log domain, one scan over time (CTC) or over anti-diagonals of the lattice
(transducer), in at least float32. An alignment that cannot be makes the loss infinite, and its gradient 0.
Sources: doi:10.1145/1143844.1143891 (CTC), arXiv:1211.3711 (RNN-T), arXiv:2010.11148 (FastEmit).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from polyreme.core import dtype as dtypes
from polyreme.core.dtype import floating
from polyreme.core.op import op
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops.activation import wide
from polyreme.ops.bounds import preceded
from polyreme.ops.ids import check_none
from polyreme.ops.losses.elementwise import reduced
from polyreme.ops.recurrent import check_lengths

# log of a probability of 0: finite, so that no gradient is NaN; sums of a million of them are still finite in float32
_NEVER = -1e30


def _check_labels(what: str, labels: Any, lengths: Any, classes: int, blank: int) -> None:
    """IndexError for a label that counts and is no class or is the blank; ops.ids says when."""

    def describe(label: int, at: tuple[int, ...]) -> Exception:
        return IndexError(
            f"{what}: label {label} at {list(at)}; labels are classes from 0 to {classes - 1} other than blank={blank}"
        )

    if tuple(np.shape(lengths)) == tuple(np.shape(labels)[:1]) and np.prod(np.shape(labels)):
        check_none(lambda xp, x, counts: _wrong(xp, x, counts, classes, blank), [labels, lengths], describe)


def _wrong(xp: Any, labels: Any, lengths: Any, classes: int, blank: int) -> Any:
    """Marks the labels that count but are no class, or are the blank."""
    counts = xp.arange(labels.shape[1]) < lengths[:, None]
    return counts & ((labels < 0) | (labels >= classes) | (labels == blank))


def _honest(loss: Array, labels: Array, lengths: tuple[Array, Array], steps: int, classes: int, blank: int) -> Array:
    """loss, NaN for labels that are no classes and lengths that are none: captured code cannot raise."""
    bad = _wrong(jnp, labels, lengths[1], classes, blank).any(1)
    for given, most in ((lengths[0], steps), (lengths[1], labels.shape[1])):
        bad |= (given < 0) | (given > most)
    return jnp.where(bad, jnp.nan, loss)


def _check(what: str, labels: Array, lengths: tuple[Array, Array], batch: int, blank: int, classes: int) -> None:
    if not 0 <= blank < classes:
        raise ConfigError(f"{what}: blank={blank} of {classes} classes; give one from 0 to {classes - 1}")
    if labels.ndim != 2 or labels.shape[0] != batch:
        raise ShapeError(f"{what}: labels {list(labels.shape)} for a batch of {batch}; needs [{batch}, longest label]")
    for name, array in (("labels", labels), ("input_lengths", lengths[0]), ("label_lengths", lengths[1])):
        if not dtypes.is_integer(array.dtype):
            raise DTypeError(f"{what}: {name} are {array.dtype.name}; need integers, use astype('int64')")
    for name, array in (("input_lengths", lengths[0]), ("label_lengths", lengths[1])):
        if array.shape != (batch,):
            raise ShapeError(f"{what}: {name} {list(array.shape)}; needs [{batch}]")


def _shift(alpha: Array, by: int) -> Array:
    """alpha one or two places to the right, never where nothing comes in: [b, s] -> [b, s]."""
    return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=_NEVER)[:, : alpha.shape[1]]


def _finish(log_p: Array, scale: Array | None = None) -> Array:
    """-log_p, infinite for what can never be; scale multiplies its gradient alone."""
    possible = log_p > _NEVER / 2
    loss = -jnp.where(possible, log_p, 0)
    if scale is not None:
        scaled = loss * scale
        loss = scaled + lax.stop_gradient(loss - scaled)
    return jnp.where(possible, loss, jnp.inf)


def _ctc_ready(
    log_probs: Any, labels: Any, input_lengths: Any, label_lengths: Any, blank: int = 0, *_: Any, **__: Any
) -> None:
    if len(log_probs.shape) == 3 and len(labels.shape) == 2:
        check_lengths("ctc_loss: input_lengths", input_lengths, log_probs.shape[0])
        check_lengths("ctc_loss: label_lengths", label_lengths, labels.shape[1])
        _check_labels("ctc_loss", labels, label_lengths, log_probs.shape[2], blank)


@preceded(_ctc_ready)
@op(amp="fp32", method=False, real=True)
def ctc_loss(
    log_probs: Array,
    labels: Array,
    input_lengths: Array,
    label_lengths: Array,
    blank: int = 0,
    reduction: str = "mean",
    norm_by_times: bool = False,
    zero_infinity: bool = False,
) -> Array:
    """-log p(labels) under connectionist temporal classification: [t, b, classes], [b, l], [b], [b] -> [b] unreduced.

    log_probs are scores: log_softmax is taken inside, which leaves log-probabilities as they are. p sums over all ways
    to read the labels off the steps, repeats merged and blanks removed. "mean" divides each loss by its label's length
    (an empty label counts as 1) before the mean. norm_by_times divides the gradient, not the loss, by the number of
    steps. A label that does not fit into its steps gives an infinite loss, or with zero_infinity 0; its gradient is 0.
    Raises ShapeError, DTypeError, ConfigError, and IndexError for a label that is no class or is the blank.

    >>> from polyreme.ops.creation import zeros
    >>> import math, numpy as np
    >>> loss = ctc_loss(zeros([2, 1, 3]), np.array([[2]]), np.array([2]), np.array([1]))
    >>> round(math.exp(-loss.item()) * 9)  # of 9 paths "22", "2-" and "-2"
    3
    """
    if log_probs.ndim != 3:
        raise ShapeError(f"ctc_loss: log_probs {list(log_probs.shape)}; needs [steps, batch, classes]")
    steps, batch, classes = log_probs.shape
    _check("ctc_loss", labels, (input_lengths, label_lengths), batch, blank, classes)
    known = jax.nn.log_softmax(wide(log_probs), -1)
    at = jnp.clip(labels, 0, classes - 1)
    # blank, first label, blank, second label, ..., blank
    path = jnp.full((batch, 2 * at.shape[1] + 1), blank, at.dtype).at[:, 1::2].set(at)
    emitted = jnp.maximum(jnp.take_along_axis(known, path[None], 2), _NEVER)
    before = jnp.pad(path, ((0, 0), (2, 0)), constant_values=blank)[:, : path.shape[1]]
    skips = (path != blank) & (path != before)

    def step(alpha: Array, now: tuple[Array, Array]) -> tuple[Array, None]:
        emit, t = now
        reached = jnp.logaddexp(alpha, _shift(alpha, 1))
        reached = jnp.logaddexp(reached, jnp.where(skips, _shift(alpha, 2), _NEVER))
        return jnp.where((t < input_lengths)[:, None], reached + emit, alpha), None

    first = jnp.full(path.shape, _NEVER, emitted.dtype).at[:, 0].set(0.0)
    alpha, _ = lax.scan(step, first, (emitted, jnp.arange(steps)))
    end = 2 * label_lengths[:, None]
    last, blankless = (jnp.take_along_axis(alpha, jnp.maximum(e, 0), 1)[:, 0] for e in (end, end - 1))
    log_p = jnp.where(label_lengths > 0, jnp.logaddexp(last, blankless), last)
    loss = _finish(log_p, 1 / jnp.maximum(input_lengths, 1).astype(log_p.dtype) if norm_by_times else None)
    loss = jnp.where(jnp.isinf(loss), 0, loss) if zero_infinity else loss
    loss = _honest(loss, labels, (input_lengths, label_lengths), steps, classes, blank)
    if reduction == "mean":
        loss = loss / jnp.maximum(label_lengths, 1)
    return reduced(loss, reduction, "ctc_loss").astype(floating(log_probs).dtype)


def _rnnt_ready(
    input: Any, label: Any, input_lengths: Any, label_lengths: Any, blank: int = 0, *_: Any, **__: Any
) -> None:
    if len(input.shape) == 4 and len(label.shape) == 2:
        check_lengths("rnnt_loss: input_lengths", input_lengths, input.shape[1])
        check_lengths("rnnt_loss: label_lengths", label_lengths, label.shape[1])
        _check_labels("rnnt_loss", label, label_lengths, input.shape[3], blank)


@preceded(_rnnt_ready)
@op(amp="fp32", method=False, real=True)
def rnnt_loss(
    input: Array,
    label: Array,
    input_lengths: Array,
    label_lengths: Array,
    blank: int = 0,
    fastemit_lambda: float = 0.001,
    reduction: str = "mean",
) -> Array:
    """-log p(label) under an RNN transducer: [b, t, u + 1, classes], [b, u], [b], [b] -> [b] unreduced.

    input holds log-probabilities: of what is emitted at step t after u labels. p sums over the paths that emit every
    label and one blank a step, the last of them at the end. fastemit_lambda multiplies the gradient of emitting a label
    (not the loss) by 1 + lambda, which rewards early labels. "mean" divides by the batch size.
    Raises ShapeError, DTypeError, ConfigError, and IndexError for a label that is no class or is the blank.

    >>> from polyreme.ops.creation import full
    >>> import math, numpy as np
    >>> quarter = full([1, 2, 2, 4], math.log(0.25))
    >>> loss = rnnt_loss(quarter, np.array([[3]]), np.array([2]), np.array([1]))
    >>> round(math.exp(-loss.item()) * 4**3)  # two paths of three emissions
    2
    """
    if input.ndim != 4 or label.ndim != 2 or input.shape[2] != label.shape[1] + 1 or not input.shape[1]:
        raise ShapeError(
            f"rnnt_loss: input {list(input.shape)}, label {list(label.shape)}; needs [batch, steps, u + 1, classes] "
            "with a step or more, and [batch, u]"
        )
    if not math.isfinite(fastemit_lambda):
        raise ConfigError(f"rnnt_loss: fastemit_lambda={fastemit_lambda}; give a finite number")
    batch, steps, columns, classes = input.shape
    _check("rnnt_loss", label, (input_lengths, label_lengths), batch, blank, classes)
    known = jnp.maximum(wide(input), _NEVER)
    at = jnp.clip(label, 0, classes - 1)[:, None, :, None]
    emitted = jnp.take_along_axis(known[:, :, :-1], at, 3)[..., 0]
    # the value is that of emitted, the gradient 1 + lambda times it
    emitted = emitted + fastemit_lambda * (emitted - lax.stop_gradient(emitted))
    blanks, labels = _diagonals(known[..., blank]), _diagonals(jnp.pad(emitted, ((0, 0), (0, 0), (0, 1))))

    def step(alpha: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        # one step on by a blank from the diagonal before, or one label on
        new = jnp.logaddexp(alpha + now[0], _shift(alpha + now[1], 1))
        new = jnp.where(now[2], new, _NEVER)
        return new, new

    first = jnp.full((batch, columns), _NEVER, known.dtype).at[:, 0].set(0.0)
    # alpha of diagonal d is at [t = d - u, u]; columns whose t is no step are never
    inside = _inside(steps, columns)
    _, alphas = lax.scan(step, first, (blanks[:-1], labels[:-1], inside[1:]))
    alphas = jnp.concatenate([first[None], alphas])
    ends = jnp.stack([jnp.maximum(input_lengths - 1, 0) + label_lengths, jnp.arange(batch), label_lengths])
    log_p = (alphas + blanks)[tuple(ends)]
    loss = _finish(jnp.where(input_lengths > 0, log_p, _NEVER))
    loss = _honest(loss, label, (input_lengths, label_lengths), steps, classes, blank)
    return reduced(loss, reduction, "rnnt_loss").astype(floating(input).dtype)


def _inside(steps: int, columns: int) -> Array:
    """Whether column u of diagonal d is a step: [d, 1, u]."""
    t = np.arange(steps + columns - 1)[:, None] - np.arange(columns)
    return jnp.asarray((t >= 0) & (t < steps))[:, None]


def _diagonals(x: Array) -> Array:
    """[b, t, u] -> [t + u - 1, b, u]: x at [d - u, u], never outside."""
    steps, columns = x.shape[1:]
    t = np.arange(steps + columns - 1)[:, None] - np.arange(columns)
    rows = x[:, np.clip(t, 0, steps - 1), np.arange(columns)]
    return jnp.where(_inside(steps, columns), jnp.swapaxes(rows, 0, 1), _NEVER)
