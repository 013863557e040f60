"""Recurrent layers over padded sequences, single steps of them, the states they start from, and beam search.

Formulas and the loop over time are in kernels/recurrent.py. Source: PaddlePaddle 3.3, `paddle.nn.LSTM`,
`GRU`, `SimpleRNN`, `functional.gather_tree`; doi:10.1162/neco.1997.9.8.1735 (LSTM), arXiv:1406.1078 (GRU).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from polyreme import kernels
from polyreme.core import dtype as dtypes
from polyreme.core.dtype import promote_floating
from polyreme.core.op import op
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels.recurrent import CELLS, State, Weights
from polyreme.ops.activation import wide
from polyreme.ops.bounds import check_index, preceded
from polyreme.ops.by_index import bounded, read, read_along
from polyreme.ops.ids import check_within

NEVER_CHOSEN = -1e9
"""The log-probability of what a beam search is not to choose."""


def check_lengths(what: str, lengths: Any, steps: int) -> None:
    """Raise ShapeError for a length outside [0, steps]; ops.ids says when."""

    def describe(wrong: int, at: tuple[int, ...]) -> Exception:
        return ShapeError(f"{what}: length {wrong} of a sequence padded to {steps}; give 0 to {steps}")

    if lengths is not None:
        check_within(lengths, 0, steps + 1, describe)


def _ready(x: Any, *args: Any, lengths: Any = None, **_: Any) -> None:
    check_lengths("recurrent_layer", args[7] if len(args) > 7 else lengths, x.shape[0])


def _prepare(
    x: Array, optional: list[Array | None], h: Array | None, c: Array | None, mode: str, batch: int
) -> tuple[Array, Weights, State]:
    """x, weights and state in one dtype; a state that is not given is zeros."""
    if mode not in CELLS:
        raise ConfigError(f"recurrent_layer: mode={mode!r}; choose one of {', '.join(CELLS)}")
    if c is not None and mode != "LSTM":
        raise ConfigError(f"recurrent_layer: c for mode={mode!r}; only LSTM has one")
    arrays = [x, *optional, h, c]
    there = iter(promote_floating(*(a for a in arrays if a is not None)))
    filled: list[Any] = [None if a is None else next(there) for a in arrays]
    weights = Weights(*filled[1:6])
    if weights.hh.ndim != 2:
        raise ShapeError(f"recurrent_layer: weight_hh {list(weights.hh.shape)}; needs [gates, hidden]")
    gates, handed_on = weights.hh.shape
    sizes = (handed_on, gates // CELLS[mode].gates)
    state = [jnp.zeros((batch, n), filled[0].dtype) if s is None else s for s, n in zip(filled[6:], sizes, strict=True)]
    return filled[0], weights, tuple(state) if mode == "LSTM" else (state[0],)


@preceded(_ready)
@op(amp="low", method=False, saves=True)
def recurrent_layer(
    x: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array | None = None,
    bias_hh: Array | None = None,
    weight_ho: Array | None = None,
    h: Array | None = None,
    c: Array | None = None,
    lengths: Array | None = None,
    mode: str = "LSTM",
    reverse: bool = False,
    flat: bool = True,
) -> tuple[Array, ...]:
    """A cell over sequences: x [steps, batch, d] -> (outputs [steps, batch, p], last h [batch, p], and for LSTM c).

    mode: "LSTM", "GRU", "RNN_TANH" or "RNN_RELU", of 4, 3 and 1 gates. weight_ih [gates * size, d], weight_hh [gates *
    size, p], biases [gates * size]; gates in the order input, forget, candidate, output, or reset, update, candidate.
    weight_ho [size, p] projects the output of an LSTM; without it p is size. h [batch, p] and c [batch, size] are
    zeros if not given. lengths [batch]: behind a sequence's end outputs are 0 and the state stands still. reverse: from
    the last step to the first. flat=False keeps a batch that is split over devices split.
    """
    if lengths is not None and not dtypes.is_integer(lengths.dtype):
        raise DTypeError(f"recurrent_layer: lengths are {lengths.dtype.name}; use astype('int64')")
    given = [weight_ih, weight_hh, bias_ih, bias_hh, weight_ho]
    x, weights, state = _prepare(x, given, h, c, mode, x.shape[1] if x.ndim > 1 else 0)
    outputs, last = kernels.recurrent(mode, x, weights, state, lengths, reverse, flat)
    return (outputs, *last)


@op(amp="low", method=False)
def recurrent_step(
    x: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array | None = None,
    bias_hh: Array | None = None,
    weight_ho: Array | None = None,
    h: Array | None = None,
    c: Array | None = None,
    mode: str = "LSTM",
) -> tuple[Array, ...]:
    """One step of recurrent_layer: x [batch, d] -> (h [batch, p], and for LSTM c)."""
    if x.ndim != 2:
        raise ShapeError(f"recurrent_step: x {list(x.shape)}; needs [batch, input]")
    x, weights, state = _prepare(x, [weight_ih, weight_hh, bias_ih, bias_hh, weight_ho], h, c, mode, x.shape[0])
    return kernels.recurrent(mode, x[None], weights, state)[1]


@op(method=False)
def initial_state(
    batch_ref: Array, shape: tuple[int, ...], value: float = 0.0, dtype: str = "float32", batch_dim: int = 0
) -> Array:
    """value everywhere, [batch, *shape], batch being the size of batch_ref's dim batch_dim."""
    if not -batch_ref.ndim <= batch_dim < batch_ref.ndim:
        raise ShapeError(f"initial_state: batch_dim_idx={batch_dim} of a Tensor with {batch_ref.ndim} dims")
    return jnp.full((batch_ref.shape[batch_dim], *shape), value, dtypes.as_dtype(dtype))


def _beams(ids: Any, parents: Any) -> None:
    if len(parents.shape) == 3:
        check_index("gather_tree", parents, parents.shape[2], 2, negative=False)


@preceded(_beams)
@op(method=False)
def gather_tree(ids: Array, parents: Array) -> Array:
    """Whole sequences of a beam search: ids and parents [steps, batch, beams] -> ids [steps, batch, beams].

    parents says which beam of the step before each id continues; the path of each beam of the last step is walked back.
    Raises IndexError for a parent that is no beam.

    >>> import numpy as np
    >>> from polyreme.eager.tensor import to_tensor
    >>> ids, parents = np.array([[[2, 6]], [[6, 1]], [[0, 1]]]), np.array([[[0, 0]], [[1, 0]], [[0, 0]]])
    >>> gather_tree(to_tensor(ids), to_tensor(parents)).tolist()
    [[[6, 6]], [[6, 6]], [[0, 1]]]
    """
    if ids.ndim != 3 or ids.shape != parents.shape:
        raise ShapeError(
            f"gather_tree: ids {list(ids.shape)}, parents {list(parents.shape)}; both are [steps, batch, beams]"
        )
    if not dtypes.is_integer(ids.dtype) or not dtypes.is_integer(parents.dtype):
        raise DTypeError(f"gather_tree: ids are {ids.dtype.name}, parents {parents.dtype.name}; need integers")

    def back(beam: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        chosen, parent = (read_along(a, beam, 1) for a in now)
        return bounded(parent, ids.shape[2], negative=False).astype(beam.dtype), chosen

    last = jnp.broadcast_to(jnp.arange(ids.shape[2]), ids.shape[1:])
    return lax.scan(back, last, (ids, parents), reverse=True)[1]


@op(amp="fp32", method=False)
def beam_choice(
    logits: Array, log_probs: Array, finished: Array, lengths: Array, end_token: int
) -> tuple[Array, Array, Array, Array, Array]:
    """One step of a beam search: the likeliest continuations of all beams of a batch entry.

    logits [batch, beams, classes]; of each beam so far log_probs, finished and lengths [batch, beams] -> (log_probs,
    tokens, parents, finished, lengths) [batch, beams], likeliest first, of equals the one of the lower beam and token.
    A finished beam goes on with end_token alone, at probability 1, and grows no longer.
    """
    if logits.ndim != 3 or logits.shape[:2] != log_probs.shape:
        raise ShapeError(
            f"beam_choice: logits {list(logits.shape)}, log_probs {list(log_probs.shape)}; needs [batch, beams, "
            "classes] and [batch, beams]"
        )
    classes = logits.shape[2]
    if not 0 <= end_token < classes:
        raise ConfigError(f"beam_choice: end_token={end_token} of {classes} classes; give one from 0 to {classes - 1}")
    each = jax.nn.log_softmax(wide(logits), -1)
    ended = jnp.where(jnp.arange(classes) == end_token, 0, NEVER_CHOSEN).astype(each.dtype)
    total = log_probs[..., None] + jnp.where(finished[..., None], ended, each)
    scores, at = lax.top_k(total.reshape(total.shape[0], -1), total.shape[1])
    parents, tokens = (a.astype(dtypes.int64) for a in jnp.divmod(at, classes))
    was = jnp.take_along_axis(finished, parents, 1)
    grown = jnp.take_along_axis(lengths, parents, 1) + (~was).astype(lengths.dtype)
    return scores, tokens, parents, was | (tokens == end_token), grown


@op(method=False)
def beam_rows(x: Array, parents: Array) -> Array:
    """Rows reordered by the chosen beams: x [batch * beams, ...], parents [batch, beams] -> [batch * beams, ...]."""
    if x.ndim < 1 or parents.ndim != 2 or x.shape[0] != parents.size:
        raise ShapeError(
            f"beam_rows: x {list(x.shape)}, parents {list(parents.shape)}; needs [batch * beams, ...] and "
            "[batch, beams]"
        )
    batch, beams = parents.shape
    first = jnp.arange(batch, dtype=dtypes.int32)[:, None] * beams
    # a beam that there is not must not name one of the next batch entry
    known = bounded(parents, beams, negative=False)
    return read(x, (jnp.where(known == beams, batch * beams, first + known).reshape(-1),))
