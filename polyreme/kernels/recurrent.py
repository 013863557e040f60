"""A recurrent layer over whole sequences: Elman, LSTM and GRU cells in one scan with its own backward, and its twin.

Letters: t steps, b sequences, d inputs, h units, p what a layer hands on (h, or the projection's size), g gates * h.
State is (h,), or (h, c) for LSTM. Gates are computed in at least float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.errors import InconclusiveDimensionOperation

from polyreme.errors import ConfigError, ShapeError
from polyreme.kernels import select
from polyreme.kernels.custom_vjp import custom_vjp

Array = jax.Array
State = tuple[Array, ...]


class Weights(NamedTuple):
    """[g, d], [g, p], [g] or None, [g] or None, [h, p] or None."""

    ih: Array
    hh: Array
    bias_ih: Array | None = None
    bias_hh: Array | None = None
    ho: Array | None = None


class Cell(NamedTuple):
    """A step's formulas without its matrix products.

    step: (gates from the input, gates from h, state) -> (new state, what the backward needs besides the state before).
    factors: (that, the state before), of all steps at once -> what cotangents are multiplied by; the backward's loop
    does nothing else, which is 1.4 times as fast as computing them there. back: (cotangents of the new state, factors)
    -> (of h's gates, of the state before where it does not pass through h's gates, None for zeros). input: (cotangents
    of h's gates, of the new h, factors), of all steps -> of the input's gates.
    """

    gates: int
    step: Callable[[Array, Array, State], tuple[State, Any]]
    factors: Callable[[Any, State], Any]
    back: Callable[[State, Any], tuple[Array, tuple[Any, ...]]]
    input: Callable[[Array, Array, Any], Array] = lambda d_gh, d_h, factors: d_gh


def _gates(x: Array, smooth: tuple[bool, ...]) -> Array:
    """[b, g] -> tanh of the gates that are smooth, sigmoid of the others, as 0.5 * tanh(0.5 * x) + 0.5.

    One function over all gates at once is what makes XLA's CPU code vectorised: 2 ms against 9 for 128 steps of
    [32, 1024] with a sigmoid or tanh for each gate.
    """
    scale = _per_gate(x, smooth, 1.0, 0.5)
    return jnp.tanh(x * scale) * scale + _per_gate(x, smooth, 0.0, 0.5)


def _slopes(act: Array, smooth: tuple[bool, ...]) -> Array:
    """The derivative of _gates, from its result: 1 - a^2 for tanh, a - a^2 for sigmoid."""
    return _per_gate(act, smooth, 1.0, 0.0) + act * (_per_gate(act, smooth, 0.0, 1.0) - act)


def _per_gate(x: Array, smooth: tuple[bool, ...], yes: float, no: float) -> Array:
    each = jnp.asarray([yes if s else no for s in smooth], x.dtype)
    return jnp.repeat(each, x.shape[-1] // len(smooth))


def _join(*parts: Array) -> Array:
    return jnp.concatenate(parts, -1)


_LSTM = (False, False, True, False)  # input, forget, candidate, output


def _lstm_step(gi: Array, gh: Array, state: State) -> tuple[State, Array]:
    act = _gates(gi + gh, _LSTM)
    i, f, new, o = jnp.split(act, 4, -1)
    c = f * state[1] + i * new
    return (o * jnp.tanh(c), c), act


def _lstm_factors(act: Array, before: State) -> tuple[Array, Array, Array]:
    i, f, new, o = jnp.split(act, 4, -1)
    tanh_c = jnp.tanh(f * before[1] + i * new)
    return _join(new, before[1], i, tanh_c) * _slopes(act, _LSTM), o * (1 - tanh_c * tanh_c), f


def _lstm_back(d: State, factors: tuple[Array, Array, Array]) -> tuple[Array, tuple[None, Array]]:
    of_gates, of_c, forget = factors
    dc = d[1] + d[0] * of_c
    return _join(dc, dc, dc, d[0]) * of_gates, (None, dc * forget)


def _lstm_out(act: Array, before: State) -> Array:
    """The output before its projection."""
    i, f, new, o = jnp.split(act, 4, -1)
    return o * jnp.tanh(f * before[1] + i * new)


def _gru_step(gi: Array, gh: Array, state: State) -> tuple[State, tuple[Array, Array, Array]]:
    size = state[0].shape[-1]
    rz = _gates(gi[:, : 2 * size] + gh[:, : 2 * size], (False, False))
    r, z = jnp.split(rz, 2, -1)
    heard = gh[:, 2 * size :]
    new = jnp.tanh(gi[:, 2 * size :] + r * heard)
    return (new + z * (state[0] - new),), (rz, new, heard)


def _gru_factors(saved: tuple[Array, Array, Array], before: State) -> tuple[Array, Array, Array]:
    rz, new, heard = saved
    r, z = jnp.split(rz, 2, -1)
    of_new = (1 - z) * (1 - new * new)
    of_rz = _join(of_new * heard, before[0] - new) * _slopes(rz, (False, False))
    return _join(of_rz, of_new * r), of_new, z


def _gru_back(d: State, factors: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array]]:
    return _join(d[0], d[0], d[0]) * factors[0], (d[0] * factors[2],)


def _gru_input(d_gh: Array, d_h: Array, factors: tuple[Array, Array, Array]) -> Array:
    return _join(d_gh[..., : 2 * d_h.shape[-1]], d_h * factors[1])


def _elman(act: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Cell:
    def step(gi: Array, gh: Array, state: State) -> tuple[State, Array]:
        h = act(gi + gh)
        return (h,), h

    return Cell(1, step, lambda h, before: slope(h), lambda d, factors: (d[0] * factors, (None,)))


CELLS: dict[str, Cell] = {
    "RNN_TANH": _elman(jnp.tanh, lambda h: 1 - h * h),
    "RNN_RELU": _elman(lambda x: jnp.maximum(x, 0), lambda h: (h > 0).astype(h.dtype)),
    "LSTM": Cell(4, _lstm_step, _lstm_factors, _lstm_back),
    "GRU": Cell(3, _gru_step, _gru_factors, _gru_back, _gru_input),
}


def recurrent(
    mode: str,
    x: Array,
    weights: Weights,
    state: State,
    lengths: Array | None = None,
    reverse: bool = False,
    flat: bool = True,
) -> tuple[Array, State]:
    """(outputs, last state) of a cell over sequences: x [t, b, d], state of [b, p] (and [b, h]) -> [t, b, p], state.

    mode is a key of CELLS; gates lie as in the public layers: input, forget, candidate, output for LSTM; reset, update,
    candidate for GRU. lengths [b]: the state of a sequence stands still from its length on, and its outputs there are
    0. reverse: from the last step to the first. flat joins steps and sequences in the products outside the scan, which
    is faster on CPU but gathers a batch that is split over devices.

    The input's product is one for the whole sequence, before the scan; so are the gradients of the weights, after it.
    Reverse mode of any order; for forward mode use recurrent_plain. Raises ShapeError, ConfigError.
    """
    _check(mode, x, weights, state, lengths)
    how, steps = (mode, bool(reverse), bool(flat)), x.shape[0]
    if not _may_be_empty(steps):
        return _recurrent(how, x, weights, state, _valid(x, lengths))
    # a scan that an exported program leaves open has a step or more: here one in which every state stands still
    lengths = jnp.full(x.shape[1:2], steps) if lengths is None else lengths
    x = jnp.pad(x, ((0, 1), (0, 0), (0, 0)))
    outputs, last = _recurrent(how, x, weights, state, _valid(x, lengths))
    return lax.slice_in_dim(outputs, 0, steps), last


def recurrent_plain(
    mode: str,
    x: Array,
    weights: Weights,
    state: State,
    lengths: Array | None = None,
    reverse: bool = False,
    flat: bool = True,
) -> tuple[Array, State]:
    """The plain twin of recurrent: derivatives by JAX."""
    _check(mode, x, weights, state, lengths)
    return _run((mode, bool(reverse), bool(flat)), x, weights, state, _valid(x, lengths))[:2]


def _check(mode: str, x: Array, weights: Weights, state: State, lengths: Array | None) -> None:
    if mode not in CELLS:
        raise ConfigError(f"recurrent: mode={mode!r}; choose one of {', '.join(CELLS)}")
    if x.ndim != 3 or weights.ih.ndim != 2 or weights.hh.ndim != 2:
        raise ShapeError(
            f"recurrent: x {list(x.shape)}, weight_ih {list(weights.ih.shape)}, weight_hh {list(weights.hh.shape)}; "
            "needs [steps, batch, input], [gates, input] and [gates, hidden]"
        )
    batch, (gates, projected) = x.shape[1], weights.hh.shape
    units = gates // CELLS[mode].gates
    want = {
        "weight_ih": (weights.ih, (gates, x.shape[2])),
        "weight_hh": (weights.hh, (CELLS[mode].gates * units, units if weights.ho is None else projected)),
        "bias_ih": (weights.bias_ih, (gates,)),
        "bias_hh": (weights.bias_hh, (gates,)),
        "weight_ho": (weights.ho, (units, projected)),
        "h": (state[0], (batch, projected)),
        "c": (state[1] if len(state) > 1 else None, (batch, units)),
        "lengths": (lengths, (batch,)),
    }
    for name, (array, shape) in want.items():
        if array is not None and array.shape != shape:
            raise ShapeError(f"recurrent: {name} {list(array.shape)}; needs {list(shape)} for x {list(x.shape)}")
    if weights.ho is not None and mode != "LSTM":
        raise ConfigError(f"recurrent: mode={mode!r} has no projection; only LSTM has")


def _may_be_empty(steps: Any) -> bool:
    """Whether a number of steps that is left open may be 0, as behind a pool."""
    try:
        return not isinstance(steps, int) and not steps >= 1
    except InconclusiveDimensionOperation:
        return True


def _valid(x: Array, lengths: Array | None) -> Array | None:
    return None if lengths is None else (jnp.arange(x.shape[0])[:, None] < lengths)[..., None]


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _times(x: Array, weight: Array) -> Array:
    """x @ weight, accumulated and returned in at least float32."""
    return jnp.matmul(x, weight, preferred_element_type=_wide(x.dtype))


def _rows(x: Array, flat: bool) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2]) if flat else x


def _plus(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias.astype(x.dtype)


def _where(valid: Array | None, a: Array, b: Array) -> Array:
    return a if valid is None else jnp.where(valid, a, b)


def _run(
    how: tuple[str, bool, bool], x: Array, weights: Weights, state: State, valid: Array | None
) -> tuple[Array, State, Any]:
    """(outputs, last state, (the state before each step, what the cell saved of it))."""
    mode, reverse, flat = how
    cell, dtype = CELLS[mode], x.dtype
    gates = _times(_rows(x, flat), weights.ih.T).reshape(*x.shape[:2], len(weights.ih))
    hh = weights.hh.T

    def advance(before: State, now: tuple[Array, Array | None]) -> tuple[State, Any]:
        gi, ok = now
        gi, gh = _plus(gi, weights.bias_ih), _plus(_times(before[0], hh), weights.bias_hh)
        new, saved = cell.step(gi, gh, _widen(before))
        out = new[0].astype(dtype)
        out = out if weights.ho is None else _times(out, weights.ho).astype(dtype)
        after = tuple(_where(ok, a, b) for a, b in zip((out, *new[1:]), before, strict=True))
        return after, (_where(ok, out, jnp.zeros_like(out)), (before, saved))

    first = (state[0].astype(dtype), *_widen(state[1:]))
    last, (outs, kept) = lax.scan(advance, first, (gates, valid), reverse=reverse)
    return outs, tuple(s.astype(dtype) for s in last), kept


def _widen(state: State) -> State:
    return tuple(s.astype(_wide(s.dtype)) for s in state)


@custom_vjp(0)
def _recurrent(how, x, weights, state, valid):
    return _run(how, x, weights, state, valid)[:2]


def _recurrent_fwd(how, x, weights, state, valid):
    outs, last, kept = _run(how, x, weights, state, valid)
    return (outs, last), (x, weights, state, valid, kept)


def _recurrent_bwd(how, residuals, cotangents):
    x, weights, state, valid, (before, saved) = residuals
    mode, reverse, flat = how
    cell, dtype = CELLS[mode], x.dtype
    d_outs, d_last = cotangents
    factors = cell.factors(saved, _widen(before))

    def retreat(after: State, now: Any) -> tuple[State, Any]:
        d_out, by, ok = now
        d = tuple(_where(ok, a, jnp.zeros_like(a)) for a in (after[0] + d_out, *after[1:]))
        inner = d if weights.ho is None else (_times(d[0].astype(dtype), weights.ho.T), *d[1:])
        d_gh, rest = cell.back(inner, by)
        d_gh = d_gh.astype(dtype)
        through = _times(d_gh, weights.hh)
        through = through if rest[0] is None else through + rest[0]
        ends = tuple(_where(ok, a, b) for a, b in zip((through, *rest[1:]), after, strict=True))
        return ends, (d_gh, d[0])

    scanned = (d_outs.astype(_wide(dtype)), factors, valid)
    d_state, (d_gh, d_h) = lax.scan(retreat, _widen(d_last), scanned, reverse=not reverse)
    d_gi = cell.input(d_gh, d_h, factors).astype(dtype)
    d_ho = None
    if weights.ho is not None:
        d_ho = _gradient(flat, _lstm_out(saved, before).astype(dtype), d_h.astype(dtype), weights.ho)
    d_weights = Weights(
        _gradient(flat, d_gi, x, weights.ih),
        _gradient(flat, d_gh, before[0], weights.hh),
        _sum(d_gi, weights.bias_ih),
        _sum(d_gh, weights.bias_hh),
        d_ho,
    )
    d_x = _times(_rows(d_gi, flat), weights.ih).astype(dtype).reshape(x.shape)
    return d_x, d_weights, tuple(d.astype(s.dtype) for d, s in zip(d_state, state, strict=True)), None


def _sum(gates: Array, bias: Array | None) -> Array | None:
    return None if bias is None else jnp.sum(gates, (0, 1), dtype=_wide(gates.dtype)).astype(bias.dtype)


def _gradient(flat: bool, left: Array, right: Array, like: Array) -> Array:
    """The sum over steps and sequences of left^T right: [t, b, m], [t, b, n] -> [m, n]."""
    if not flat:
        return jnp.einsum("tbm,tbn->mn", left, right, preferred_element_type=_wide(left.dtype)).astype(like.dtype)
    found = _times(_rows(right, flat).T, _rows(left, flat))
    if select.backend() == "cpu":
        # [n, m] with n the smaller is computed in half the time of its transpose, which XLA would else make of it
        found = lax.optimization_barrier(found)
    return found.T.astype(like.dtype)


_recurrent.defvjp(_recurrent_fwd, _recurrent_bwd)
