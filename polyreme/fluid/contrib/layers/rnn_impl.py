"""GRU and LSTM layers one over the other, made of the cells of fluid.layers."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError
from polyreme.fluid.layer import layer
from polyreme.fluid.layers.image import dropout
from polyreme.fluid.layers.recurrent import GRUCell, LSTMCell, named_after, rnn
from polyreme.ops.manipulation import concat, stack, transpose


class BasicGRUUnit:
    """A GRUCell that is called with (input, state) and gives the new state, for steps of a StaticRNN."""

    def __init__(
        self, name_scope: str, hidden_size: int, param_attr: Any = None, bias_attr: Any = None,
        gate_activation: Any = None, activation: Any = None, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        self._cell = GRUCell(hidden_size, param_attr, bias_attr, gate_activation, activation, dtype, name_scope)

    def __call__(self, input: Any, pre_hidden: Any) -> Any:
        return self._cell(input, pre_hidden)[0]


class BasicLSTMUnit:
    """An LSTMCell that is called with (input, hidden, cell) and gives the new two, for steps of a StaticRNN."""

    def __init__(
        self, name_scope: str, hidden_size: int, param_attr: Any = None, bias_attr: Any = None,
        gate_activation: Any = None, activation: Any = None, forget_bias: float = 1.0, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        self._cell = LSTMCell(
            hidden_size, param_attr, bias_attr, gate_activation, activation, forget_bias, dtype, name_scope
        )

    def __call__(self, input: Any, pre_hidden: Any, pre_cell: Any) -> tuple[Any, Any]:
        return tuple(self._cell(input, [pre_hidden, pre_cell])[1])  # type: ignore[return-value]


def _layers(
    what: str, input: Any, starts: list[Any], cell: Any, attrs: tuple[Any, Any], name: str, num_layers: int,
    sequence_length: Any, dropout_prob: float, bidirectional: bool, batch_first: bool,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """(outputs, of each kind of state those of all layers and directions [layers * directions, batch, hidden_size]).

    Each direction goes through layers of its own. cell(param_attr, bias_attr, name) is one of them.
    """
    sides = 2 if bidirectional else 1
    for start in starts:
        if start is not None and start.shape[0] not in (-1, num_layers * sides):
            raise ConfigError(
                f"{what}: a first state of {list(start.shape)} for {num_layers * sides} layers and directions"
            )
    rows = input if batch_first else transpose(input, [1, 0, 2])
    ends: list[dict[int, Any]] = [{} for _ in starts]
    outputs = []
    for side, (direction, prefix) in enumerate([("fw", ""), ("bw", "reverse_")][:sides]):
        x = rows
        for i in range(num_layers):
            place = i * sides + side
            first = [None if s is None else s[place] for s in starts]
            initial = None if None in first else first[0] if len(first) == 1 else first
            named = [named_after(attr, f"_{direction}_{kind}_{i}") for attr, kind in zip(attrs, "wb", strict=True)]
            step = cell(*named, f"{name}_{prefix}layers_{i}")
            x, last = rnn(step, x, initial, sequence_length, is_reverse=bool(side))
            for end, final in zip(ends, last if len(starts) > 1 else [last], strict=True):
                end[place] = final
            if dropout_prob:
                x = dropout(x, dropout_prob, dropout_implementation="upscale_in_train")
        outputs.append(x)
    x = concat(outputs, 2) if bidirectional else outputs[0]
    states = [stack([end[place] for place in sorted(end)], 0) for end in ends]
    return (x if batch_first else transpose(x, [1, 0, 2])), states


@layer
def basic_gru(
    input: Any, init_hidden: Any, hidden_size: int, num_layers: int = 1, sequence_length: Any = None,
    dropout_prob: float = 0.0, bidirectional: bool = False, batch_first: bool = True, param_attr: Any = None,
    bias_attr: Any = None, gate_activation: Any = None, activation: Any = None, dtype: Any = "float32",
    name: str = "basic_gru",
) -> tuple[Any, Any]:  # fmt: skip
    """(outputs [batch, steps, width], last states [layers * directions, batch, hidden_size]) of GRU layers.

    init_hidden: first states, zeros if None. The number of steps is known while recording; see fluid.layers.rnn. width
    is hidden_size, or twice that with bidirectional. Raises ConfigError for another number of first states.
    """
    rows, (last,) = _layers(
        "basic_gru", input, [init_hidden],
        lambda weight, bias, name: GRUCell(hidden_size, weight, bias, gate_activation, activation, dtype, name),
        (param_attr, bias_attr), name, num_layers, sequence_length, dropout_prob, bidirectional, batch_first,
    )  # fmt: skip
    return rows, last


@layer
def basic_lstm(
    input: Any, init_hidden: Any, init_cell: Any, hidden_size: int, num_layers: int = 1, sequence_length: Any = None,
    dropout_prob: float = 0.0, bidirectional: bool = False, batch_first: bool = True, param_attr: Any = None,
    bias_attr: Any = None, gate_activation: Any = None, activation: Any = None, forget_bias: float = 1.0,
    dtype: Any = "float32", name: str = "basic_lstm",
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(outputs [batch, steps, width], last hidden, last cell), as basic_gru, of LSTM layers."""

    rows, (hidden, cells) = _layers(
        "basic_lstm", input, [init_hidden, init_cell],
        lambda weight, bias, name: LSTMCell(
            hidden_size, weight, bias, gate_activation, activation, forget_bias, dtype, name
        ),
        (param_attr, bias_attr), name, num_layers, sequence_length, dropout_prob, bidirectional, batch_first,
    )  # fmt: skip
    return rows, hidden, cells


__all__ = ["BasicGRUUnit", "BasicLSTMUnit", "basic_gru", "basic_lstm"]
