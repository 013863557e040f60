"""LSTM and GRU over the sequences of ragged rows.

x [total, ...] holds the inputs already multiplied by their weights; lengths [n] as in sequences.rows. All
sequences step together in a rectangle [maxlen, n, ...], those that have ended keeping their state. maxlen may
be more than the longest sequence, which costs time and changes nothing; without it the longest is read on the host.
Source: PaddlePaddle 1.7, `fluid.layers.dynamic_lstm`, `dynamic_lstmp`, `dynamic_gru`; arXiv:1402.1128, 1406.1078.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from polyreme.core.op import OPS, op
from polyreme.errors import ConfigError, ShapeError
from polyreme.ops.activation import wide
from polyreme.ops.bounds import preceded
from polyreme.ops.sequences.rows import Rows, check_lengths, check_room, given_size, longest, padded, rows_of, unpadded

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "identity": lambda x: x,
}


def activation(what: str, name: str) -> Callable[[Array], Array]:
    """The function that a gate's activation names. Raises ConfigError for another name."""
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{what}: activation {name!r}; choose one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _room(lengths: Any) -> int:
    """The longest length, rounded up to a power of two so that batches of like lengths share a program."""
    return 1 << max(longest("a recurrent op without maxlen", lengths) - 1, 0).bit_length()


def _ready(what: str) -> Callable[..., Any]:
    """The step before a recurrent op: check lengths and maxlen; without maxlen, find it on the host."""

    def check(x: Any, lengths: Any, *args: Any, maxlen: int | None = None, **kwargs: Any) -> Any:
        check_lengths(what, lengths, x.shape[0])
        if maxlen is None:
            return OPS[what](x, lengths, *args, maxlen=_room(lengths), **kwargs)
        check_room(what, lengths, maxlen)
        return None

    return check


def _initial(what: str, name: str, state: Array | None, n: int, width: int, like: Array) -> Array:
    if state is None:
        return jnp.zeros((n, width), like.dtype)
    if state.shape != (n, width):
        raise ShapeError(f"{what}: {name} {list(state.shape)}; needs [{n}, {width}], one row for each sequence")
    return state.astype(like.dtype)


def _need(what: str, shapes: dict[str, tuple[Array | None, tuple[int, ...]]]) -> None:
    for name, (array, shape) in shapes.items():
        if array is not None and array.shape != shape:
            raise ShapeError(f"{what}: {name} {list(array.shape)}; needs {list(shape)}")


def _times(x: Array, weight: Array) -> Array:
    """x @ weight, accumulated and returned in at least float32."""
    return jnp.matmul(x, weight, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _scan(step: Callable, first: tuple[Array, ...], x: Array, rows: Rows, length: int, reverse: bool) -> list[Array]:
    """The states after each row, one array [total, ...] for each part: step(state, row inputs [n, ...]) -> state."""
    side, valid = padded(x, rows, length, reverse)

    def advance(state: tuple[Array, ...], now: tuple[Array, Array]) -> tuple:
        new = step(state, now[0])
        # nothing reads a state behind the end, but one that grew to infinity there would make gradients NaN
        new = tuple(jnp.where(now[1][:, None], a, b) for a, b in zip(new, state, strict=True))
        return new, new

    _, every = lax.scan(advance, first, (jnp.swapaxes(side, 0, 1), valid.T))
    return [unpadded(jnp.swapaxes(e, 0, 1), rows, reverse) for e in every]


@preceded(_ready("sequence_lstm"))
@op(amp="low", method=False)
def sequence_lstm(
    x: Array,
    lengths: Array,
    weight: Array,
    bias: Array | None = None,
    h0: Array | None = None,
    c0: Array | None = None,
    projection: Array | None = None,
    use_peepholes: bool = True,
    is_reverse: bool = False,
    gate_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    candidate_activation: str = "tanh",
    proj_activation: str = "tanh",
    cell_clip: float | None = None,
    proj_clip: float | None = None,
    maxlen: int | None = None,
) -> tuple[Array, Array]:
    """(hidden, cell) after each row: x [total, 4 d], weight [d, 4 d] -> [total, d] each.

    x, weight and bias hold the candidate, then the input, forget and output gates. bias [1, 4 d]; with use_peepholes
    [1, 7 d], the last three being how c adds to the input, forget (c before) and output gates (c after). h0, c0 [n, d].
    projection [d, p]: hidden is proj_activation(h @ projection), [total, p], and weight and h0 have p for d.
    is_reverse: from each sequence's last row to its first. cell_clip, proj_clip: bounds on |c| and |hidden|.
    """
    what = "sequence_lstm"
    d, p = x.shape[-1] // 4, (weight if projection is None else projection.T).shape[0]
    _need(what, {"x": (x, (x.shape[0], 4 * d)), "weight": (weight, (p, 4 * d)), "projection": (projection, (d, p))})
    _need(what, {"bias": (bias, (1, (7 if use_peepholes else 4) * d))})
    if projection is None and p != d:
        raise ShapeError(f"{what}: x {list(x.shape)} and weight {list(weight.shape)}; needs [total, {4 * p}]")
    gate, cell, candidate, project = (
        activation(what, a) for a in (gate_activation, cell_activation, candidate_activation, proj_activation)
    )
    rows = rows_of(what, lengths, x.shape[0])
    added = jnp.zeros((7 * d,), x.dtype) if bias is None else jnp.pad(bias[0], (0, 7 * d - bias.shape[1]))
    bias4, (peep_i, peep_f, peep_o) = wide(added[: 4 * d]), wide(added[4 * d :]).reshape(3, d)

    def step(state: tuple[Array, ...], inputs: Array) -> tuple[Array, ...]:
        h, c = state
        total = wide(inputs) + _times(h, weight) + bias4
        new, i, f, o = jnp.split(total, 4, -1)
        before = wide(c)
        c = candidate(new) * gate(i + before * peep_i) + before * gate(f + before * peep_f)
        c = c if cell_clip is None else jnp.clip(c, -cell_clip, cell_clip)
        h = gate(o + c * peep_o) * cell(c)
        if projection is not None:
            h = project(_times(h.astype(x.dtype), projection))
            h = h if proj_clip is None else jnp.clip(h, -proj_clip, proj_clip)
        return h.astype(x.dtype), c.astype(x.dtype)

    first = (_initial(what, "h0", h0, rows.n, p, x), _initial(what, "c0", c0, rows.n, d, x))
    hidden, cells = _scan(step, first, x, rows, given_size(what, "maxlen", maxlen), is_reverse)
    return hidden, cells


def gru_step(
    x: Array, h: Array, weight: Array, gate: Callable[..., Any], candidate: Callable[..., Any], origin_mode: bool
) -> tuple[Array, Array, Array]:
    """One step of a GRU: x [n, 3 d] with its bias, h [n, d] -> (gates [n, 3 d], reset * h, new h).

    weight [d, 3 d] is read as Paddle lays it out: 2 d^2 numbers [d, 2 d] for update and reset, then [d, d].
    """
    d = h.shape[1]
    flat = weight.reshape(-1)
    gates = gate(wide(x[:, : 2 * d]) + _times(h, flat[: 2 * d * d].reshape(d, 2 * d)))
    u, r = gates[:, :d], gates[:, d:]
    reset = (r * wide(h)).astype(x.dtype)
    new = candidate(wide(x[:, 2 * d :]) + _times(reset, flat[2 * d * d :].reshape(d, d)))
    mixed = u * wide(h) + (1 - u) * new if origin_mode else (1 - u) * wide(h) + u * new
    return jnp.concatenate([gates, new], 1).astype(x.dtype), reset, mixed.astype(x.dtype)


@preceded(_ready("sequence_gru"))
@op(amp="low", method=False)
def sequence_gru(
    x: Array,
    lengths: Array,
    weight: Array,
    bias: Array | None = None,
    h0: Array | None = None,
    is_reverse: bool = False,
    gate_activation: str = "sigmoid",
    candidate_activation: str = "tanh",
    origin_mode: bool = False,
    maxlen: int | None = None,
) -> Array:
    """The state after each row: x [total, 3 d], weight [d, 3 d] -> [total, d].

    x and bias [1, 3 d] hold the update gate u, the reset gate r and the candidate. h' = (1 - u) h + u c, or with
    origin_mode u h + (1 - u) c, where c is computed from r * h. weight holds [d, 2 d] numbers for u and r, then [d, d]
    for c. h0 [n, d].
    """
    what, d = "sequence_gru", weight.shape[0]
    _need(what, {"x": (x, (x.shape[0], 3 * d)), "weight": (weight, (d, 3 * d)), "bias": (bias, (1, 3 * d))})
    gate, candidate = activation(what, gate_activation), activation(what, candidate_activation)
    rows = rows_of(what, lengths, x.shape[0])
    x = x if bias is None else x + bias

    def step(state: tuple[Array, ...], inputs: Array) -> tuple[Array, ...]:
        return (gru_step(inputs, state[0], weight, gate, candidate, origin_mode)[2],)

    first = (_initial(what, "h0", h0, rows.n, d, x),)
    return _scan(step, first, x, rows, given_size(what, "maxlen", maxlen), is_reverse)[0]


@op(amp="low", method=False)
def gru_unit(
    x: Array,
    hidden: Array,
    weight: Array,
    bias: Array | None = None,
    activation_name: str = "tanh",
    gate_activation: str = "sigmoid",
    origin_mode: bool = False,
) -> tuple[Array, Array, Array]:
    """One step of sequence_gru: x [n, 3 d], hidden [n, d] -> (new hidden [n, d], r * hidden [n, d], gates [n, 3 d])."""
    d = hidden.shape[-1]
    _need("gru_unit", {"x": (x, (hidden.shape[0], 3 * d)), "weight": (weight, (d, 3 * d)), "bias": (bias, (1, 3 * d))})
    gate, candidate = activation("gru_unit", gate_activation), activation("gru_unit", activation_name)
    x = x if bias is None else x + bias
    gates, reset, new = gru_step(x, hidden, weight, gate, candidate, origin_mode)
    return new, reset, gates
