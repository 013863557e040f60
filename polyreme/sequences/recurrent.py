"""Recurrent layer functions on Variables whose rows are sequences: dynamic_lstm, dynamic_lstmp, dynamic_gru; and single
steps: lstm_unit, gru_unit.

The number of steps is the length of the longest sequence, which is fed beside the offsets; for sequences
that other layers made it is the number of rows, which takes longer and gives the same. Source: PaddlePaddle 1.7.
"""

from __future__ import annotations

from typing import Any

from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.ops import OPS
from polyreme.program.block import Variable
from polyreme.program.parameters import LayerParameters
from polyreme.sequences import lod as lods
from polyreme.sequences.lod import divided, inner, sequences


def _check(what: str, x: Variable, size: int, parts: int, dtype: Any = None) -> int:
    """The width of the state for inputs of `parts` times as many numbers."""
    if size % parts or x.shape[-1] != size:
        raise ShapeError(
            f"{what}: size={size} for input of shape {list(x.shape)}; the input holds {parts} numbers for each of the "
            "state"
        )
    if dtype is not None and dtypes.as_dtype(dtype) != x.dtype:
        raise DTypeError(f"{what}: dtype={dtype!r}, the input is {x.dtype.name}; give that")
    return size // parts


def _states_together(what: str, h_0: Any, c_0: Any) -> None:
    if (h_0 is None) != (c_0 is None):
        raise ConfigError(f"{what}: give both h_0 and c_0, or neither")


def dynamic_lstm(
    input: Any,
    size: int,
    h_0: Any = None,
    c_0: Any = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_peepholes: bool = True,
    is_reverse: bool = False,
    gate_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    candidate_activation: str = "tanh",
    dtype: Any = "float32",
    name: str | None = None,
) -> tuple[Variable, Variable]:
    """(hidden, cell) after each row of input [rows, size], size being 4 times their width d.

    Weight [d, 4 d] for candidate, input, forget and output; bias [1, 4 d], with peepholes [1, 7 d]; see sequence_lstm.
    Raises ConfigError for bias_attr=False, as there is always a bias, and for one of h_0 and c_0.
    """
    x, lod = sequences("dynamic_lstm", input)
    d = _check("dynamic_lstm", x, size, 4, dtype)
    _states_together("dynamic_lstm", h_0, c_0)
    _, weight, bias = _lstm_parameters("lstm", (d, d), x.dtype, (param_attr, bias_attr), use_peepholes, name)
    found = OPS["sequence_lstm"](
        x, inner(lod), weight, bias, h_0, c_0, None, use_peepholes, is_reverse, gate_activation, cell_activation,
        candidate_activation, maxlen=lods.room(x, lod),
    )  # fmt: skip
    return divided(found[0], lod), divided(found[1], lod)


def _lstm_parameters(
    kind: str, widths: tuple[int, int], dtype: Any, attrs: tuple[Any, Any], use_peepholes: bool, name: str | None
) -> tuple[LayerParameters, Any, Any]:
    """(its parts, weight, bias); widths: of the cell and of what is fed back."""
    if any(a is False for a in attrs):
        raise ConfigError(f"dynamic_{kind}: param_attr and bias_attr are not False; it has a weight and a bias")
    parts, (d, p) = LayerParameters(kind, name), widths
    weight = parts.parameter(attrs[0], [p, 4 * d], dtype)
    return parts, weight, parts.bias(attrs[1], [1, (7 if use_peepholes else 4) * d], dtype)


def dynamic_lstmp(
    input: Any,
    size: int,
    proj_size: int,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_peepholes: bool = True,
    is_reverse: bool = False,
    gate_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    candidate_activation: str = "tanh",
    proj_activation: str = "tanh",
    dtype: Any = "float32",
    name: str | None = None,
    h_0: Any = None,
    c_0: Any = None,
    cell_clip: float | None = None,
    proj_clip: float | None = None,
) -> tuple[Variable, Variable]:
    """(projection, cell) after each row of an LSTM whose hidden state is projected to proj_size before it is fed back.

    As dynamic_lstm, with weight [proj_size, 4 d] and projection weight [d, proj_size]. cell_clip, proj_clip: bounds on
    what they name, None or 0 for none.
    """
    x, lod = sequences("dynamic_lstmp", input)
    d = _check("dynamic_lstmp", x, size, 4, dtype)
    _states_together("dynamic_lstmp", h_0, c_0)
    parts, weight, bias = _lstm_parameters(
        "lstmp", (d, proj_size), x.dtype, (param_attr, bias_attr), use_peepholes, name
    )
    projection = parts.parameter(param_attr, [d, proj_size], x.dtype)
    found = OPS["sequence_lstm"](
        x, inner(lod), weight, bias, h_0, c_0, projection, use_peepholes, is_reverse, gate_activation, cell_activation,
        candidate_activation, proj_activation, cell_clip or None, proj_clip or None, maxlen=lods.room(x, lod),
    )  # fmt: skip
    return divided(found[0], lod), divided(found[1], lod)


def dynamic_gru(
    input: Any,
    size: int,
    param_attr: Any = None,
    bias_attr: Any = None,
    is_reverse: bool = False,
    gate_activation: str = "sigmoid",
    candidate_activation: str = "tanh",
    h_0: Any = None,
    origin_mode: bool = False,
) -> Variable:
    """The state [rows, size] after each row of input [rows, 3 * size]; weight [size, 3 * size]; see sequence_gru."""
    x, lod = sequences("dynamic_gru", input)
    _check("dynamic_gru", x, 3 * size, 3)
    weight, bias = _gru_parameters("gru", size, x.dtype, param_attr, bias_attr)
    found = OPS["sequence_gru"](
        x, inner(lod), weight, bias, h_0, is_reverse, gate_activation, candidate_activation, origin_mode,
        maxlen=lods.room(x, lod),
    )  # fmt: skip
    return divided(found, lod)


def _gru_parameters(kind: str, d: int, dtype: Any, param_attr: Any, bias_attr: Any) -> tuple[Any, Any]:
    if param_attr is False:
        raise ConfigError(f"{kind}: param_attr=False; it has a weight")
    parts = LayerParameters(kind)
    return parts.parameter(param_attr, [d, 3 * d], dtype), parts.bias(bias_attr, [1, 3 * d], dtype)


def gru_unit(
    input: Any,
    hidden: Any,
    size: int,
    param_attr: Any = None,
    bias_attr: Any = None,
    activation: str = "tanh",
    gate_activation: str = "sigmoid",
    origin_mode: bool = False,
) -> tuple[Variable, Variable, Variable]:
    """(new hidden, reset * hidden, gates) of one step: input [n, size], hidden [n, size / 3]."""
    x = lods.variable("gru_unit", input)
    d = _check("gru_unit", x, size, 3)
    weight, bias = _gru_parameters("gru_unit", d, x.dtype, param_attr, bias_attr)
    return OPS["gru_unit"](x, hidden, weight, bias, activation, gate_activation, origin_mode)


def lstm_unit(
    x_t: Any,
    hidden_t_prev: Any,
    cell_t_prev: Any,
    forget_bias: float = 0.0,
    param_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
) -> tuple[Variable, Variable]:
    """(hidden, cell) of one step: [x, h] @ weight + bias gives input, forget, output and candidate.

    x_t [n, a], hidden_t_prev and cell_t_prev [n, d]; weight [a + d, 4 d]. forget_bias is added to the forget gate.
    """
    x, h, c = (lods.variable("lstm_unit", v) for v in (x_t, hidden_t_prev, cell_t_prev))
    d = c.shape[-1]
    if len(x.shape) != 2 or len(h.shape) != 2 or h.shape[-1] != d:
        raise ShapeError(
            f"lstm_unit: x_t {list(x.shape)}, hidden {list(h.shape)}, cell {list(c.shape)}; needs [n, a], [n, d], [n, "
            "d]"
        )
    parts = LayerParameters("fc", name)  # as 1.7 names them
    weight = parts.parameter(param_attr, [x.shape[-1] + d, 4 * d], x.dtype)
    bias = parts.bias(bias_attr, [4 * d], x.dtype)
    total = OPS["matmul"](OPS["concat"]([x, h], 1), weight)
    i, f, o, new = OPS["split"](total if bias is None else total + bias, 4, 1)
    gate, tanh = OPS["sigmoid"], OPS["tanh"]
    cell = gate(f + forget_bias) * c + gate(i) * tanh(new)
    return gate(o) * tanh(cell), cell
