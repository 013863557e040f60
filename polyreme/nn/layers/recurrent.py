"""Recurrent layers over sequences: RNN and BiRNN around a cell, and stacks SimpleRNN, LSTM and GRU.

A cell of this library runs as one op with its loop inside; any other cell is called once a step. Behind the
end of a padded sequence outputs are 0 and states stand still, whichever of the two runs.
"""

from __future__ import annotations

from typing import Any

import jax

from polyreme.core import layout
from polyreme.core.symbol import DYNAMIC
from polyreme.errors import ConfigError, ShapeError
from polyreme.jit.steps import over_rows
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer
from polyreme.nn.layers.container import LayerList
from polyreme.nn.layers.recurrent_cell import (
    WEIGHTS,
    BuiltInCell,
    GRUCell,
    LSTMCell,
    RNNCellBase,
    SimpleRNNCell,
    pair_of,
)
from polyreme.nn.parameter import ParamAttrLike
from polyreme.ops.creation import full, zeros_like
from polyreme.ops.indices.gather import where
from polyreme.ops.manipulation import concat, stack, transpose, unbind, unsqueeze
from polyreme.ops.recurrent import check_lengths, recurrent_layer
from polyreme.ops.scan import cumsum


def swap_steps(x: Any) -> Any:
    """[batch, steps, ...] <-> [steps, batch, ...], of every Tensor in x."""
    return jax.tree.map(lambda leaf: transpose(leaf, [1, 0, *range(2, len(leaf.shape))]), x)


def over_time(cell: Layer, x: Any, states: Any, lengths: Any, reverse: bool, **kwargs: Any) -> tuple[Any, Any]:
    """(outputs, last states) of a cell over x [steps, batch, ...]."""
    if isinstance(cell, BuiltInCell) and not kwargs and _runs_as_written(cell):
        h, c = pair_of(cell, states, x, batch_dim=1)
        flat = layout.active.layout is None
        outputs, *last = recurrent_layer(
            x, *cell.weights(), h, c, lengths=lengths, mode=cell.mode, reverse=reverse, flat=flat
        )
        return outputs, tuple(last) if len(last) > 1 else last[0]
    return _step_by_step(cell, x, states, lengths, reverse, kwargs)


def _runs_as_written(cell: BuiltInCell) -> bool:
    """Whether no subclass and no hook has changed what calling the cell does."""
    own = type(cell).forward is BuiltInCell.forward and "forward" not in vars(cell)
    return own and not cell._forward_pre_hooks and not cell._forward_post_hooks


def _step_by_step(
    cell: Any, x: Any, states: Any, lengths: Any, reverse: bool, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    steps = jax.tree.leaves(x)[0]._array.shape[0]
    if lengths is not None and steps > 0:
        check_lengths("RNN", lengths, steps)
    states = cell.get_initial_states(x, batch_dim_idx=1) if states is None else states
    if lengths is None:
        return over_rows(lambda row, states: cell(row, states, **kwargs), x, states, reverse)

    def step(row: Any, states: Any) -> tuple[Any, Any]:
        row, t = row
        output, new = cell(row, states, **kwargs)
        real = lengths > t
        output = jax.tree.map(lambda a: where(_beside(real, a), a, zeros_like(a)), output)
        return output, jax.tree.map(lambda a, b: where(_beside(real, a), a, b), new, states)

    places = cumsum(full([steps], 1, "int64"), 0) - 1
    return over_rows(step, (x, places), states, reverse)


def _beside(real: Any, x: Any) -> Any:
    """[batch] with as many dims as x [batch, ...]."""
    for _ in range(len(x.shape) - 1):
        real = unsqueeze(real, -1)
    return real


class _OverSteps(Layer):
    """What calls over_time with the steps first, and gives the outputs in the order of the inputs."""

    time_major: bool
    _is_recurrent = True

    def forward(self, inputs: Any, initial_states: Any = None, sequence_length: Any = None, **kwargs: Any) -> Any:
        """initial_states: what the cell takes, else its own initial states; of BiRNN a pair, for cell_fw and cell_bw.
        sequence_length [batch]: the steps of each sequence that are real. kwargs go to the cell at each step.
        """
        x = inputs if self.time_major else swap_steps(inputs)
        outputs, last = self.over_time(x, initial_states, sequence_length, **kwargs)
        return outputs if self.time_major else swap_steps(outputs), last

    def over_time(self, x: Any, states: Any, lengths: Any, **kwargs: Any) -> tuple[Any, Any]:
        """forward of inputs that are [steps, batch, ...]."""
        raise NotImplementedError


class RNN(_OverSteps):
    """A cell over sequences: inputs [batch, steps, ...] (time_major: [steps, batch, ...]) -> (outputs, last states).

    Inputs, states and outputs may be nested if the cell takes them so. A cell of this library runs as one op.

    >>> from polyreme.ops.creation import ones
    >>> outputs, last = RNN(GRUCell(3, 4), is_reverse=True)(ones([2, 5, 3]))
    >>> outputs.shape, last.shape
    (paddle.Size([2, 5, 4]), paddle.Size([2, 4]))
    """

    def __init__(self, cell: RNNCellBase, is_reverse: bool = False, time_major: bool = False) -> None:
        super().__init__()
        if not callable(getattr(cell, "forward", None)):
            raise ConfigError(f"RNN: cell is a {type(cell).__name__}; give a RNNCellBase")
        self.cell = cell
        self.is_reverse = is_reverse
        self.time_major = time_major

    def over_time(self, x: Any, states: Any, lengths: Any, **kwargs: Any) -> tuple[Any, Any]:
        """forward of inputs that are [steps, batch, ...]."""
        return over_time(self.cell, x, states, lengths, self.is_reverse, **kwargs)


class BiRNN(_OverSteps):
    """One cell from the first step to the last and one back: outputs side by side in the last dim, a pair of states."""

    cell_fw: RNNCellBase
    cell_bw: RNNCellBase

    def __init__(self, cell_fw: RNNCellBase, cell_bw: RNNCellBase, time_major: bool = False) -> None:
        super().__init__()
        sizes = [getattr(cell, "input_size", None) for cell in (cell_fw, cell_bw)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise ConfigError(f"BiRNN: cell_fw takes inputs of size {sizes[0]}, cell_bw of {sizes[1]}; make them equal")
        self.cell_fw, self.cell_bw = cell_fw, cell_bw
        self.time_major = time_major

    def over_time(self, x: Any, states: Any, lengths: Any, **kwargs: Any) -> tuple[Any, Any]:
        """forward of inputs that are [steps, batch, ...]."""
        if states is not None and (not isinstance(states, (list, tuple)) or len(states) != 2):
            raise ConfigError(f"BiRNN: initial_states is a pair, of cell_fw and cell_bw, got {type(states).__name__}")
        fw, bw = (None, None) if states is None else states
        ahead, last_fw = over_time(self.cell_fw, x, fw, lengths, False, **kwargs)
        back, last_bw = over_time(self.cell_bw, x, bw, lengths, True, **kwargs)
        return jax.tree.map(lambda a, b: concat([a, b], -1), ahead, back), (last_fw, last_bw)


class _Stack(LayerList):
    """Layers of one kind of cell. Parameters have two names: weight_ih_l0 (.._l0_reverse), and 0.cell.weight_ih."""

    _is_recurrent = True

    def _build(
        self,
        cell: Any,
        sizes: tuple[int, int],
        num_layers: int,
        direction: str,
        time_major: bool,
        dropout: float,
        **settings: Any,
    ) -> None:
        what = type(self).__name__
        if direction not in ("forward", "bidirect", "bidirectional"):
            raise ConfigError(f"{what}: direction={direction!r}; choose 'forward', or 'bidirect' (or 'bidirectional')")
        if num_layers < 1 or not 0 <= dropout <= 1:
            raise ConfigError(f"{what}: num_layers={num_layers}, dropout={dropout}; needs 1 or more, and 0 to 1")
        self.input_size, self.hidden_size = sizes
        self.proj_size = settings.get("proj_size") or 0
        self.num_layers, self.num_directions = num_layers, 1 if direction == "forward" else 2
        self.time_major, self.dropout = time_major, dropout
        self.state_components = 2 if cell is LSTMCell else 1
        input_size = self.input_size
        for k in range(num_layers):
            cells: list[Any] = [cell(input_size, self.hidden_size, **settings) for _ in range(self.num_directions)]
            self.append(BiRNN(cells[0], cells[1], time_major) if len(cells) == 2 else RNN(cells[0], False, time_major))
            for made, end in zip(cells, ("", "_reverse"), strict=False):
                for name in WEIGHTS[:4]:  # a projection has its cell's name only, as in PaddlePaddle's files
                    setattr(self, f"{name}_l{k}{end}", getattr(made, name))
            input_size = self.num_directions * (self.proj_size or self.hidden_size)
        self.mode = self[0].cell.mode if self.num_directions == 1 else self[0].cell_fw.mode

    def forward(self, inputs: Any, initial_states: Any = None, sequence_length: Any = None) -> tuple[Any, Any]:
        """inputs [batch, steps, input_size] (time_major: [steps, batch, ...]) -> (outputs, last states).

        outputs [batch, steps, directions * size]; states [layers * directions, batch, size], the directions of a layer
        side by side; of an LSTM a pair (h, c). initial_states: zeros if None. sequence_length [batch]: the real steps
        of each sequence; behind them outputs are 0.
        """
        # in a Program a size may be open: what is fed is checked where the size is used
        if len(inputs.shape) != 3 or inputs.shape[-1] not in (self.input_size, DYNAMIC):
            order = "steps, batch" if self.time_major else "batch, steps"
            raise ShapeError(
                f"{type(self).__name__}: inputs {list(inputs.shape)}; needs [{order}, input_size={self.input_size}]"
            )
        x = inputs if self.time_major else swap_steps(inputs)
        states, last = self._states_of(initial_states), []
        for k, layer in enumerate(self):
            if k and self.dropout:
                x = F.dropout(x, self.dropout, training=self.training)
            at = k * self.num_directions
            mine = states[at : at + self.num_directions]
            x, ended = layer.over_time(x, mine[0] if self.num_directions == 1 else mine, sequence_length)
            last += [ended] if self.num_directions == 1 else list(ended)
        outputs = x if self.time_major else swap_steps(x)
        return outputs, jax.tree.map(lambda *each: stack(list(each), 0), *last)

    def flatten_parameters(self) -> None:
        """Nothing: no kernel here takes the weights in one array."""

    def _states_of(self, initial: Any) -> list[Any]:
        """The initial state of each layer and direction."""
        count = self.num_layers * self.num_directions
        if initial is None:
            return [None] * count
        parts = list(initial) if isinstance(initial, (list, tuple)) else [initial]
        if len(parts) != self.state_components or any(p.shape[0] != count for p in parts):
            need = "a pair (h, c) of Tensors" if self.state_components == 2 else "a Tensor"
            raise ShapeError(
                f"{type(self).__name__}: initial_states {[list(p.shape) for p in parts]}; needs {need} "
                f"[{count}, batch, size], one row for each layer and direction"
            )
        rows = [unbind(p, 0) for p in parts]
        return [tuple(r) if len(parts) == 2 else r[0] for r in zip(*rows, strict=True)]

    def extra_repr(self) -> str:
        said = [f"{self.input_size}, {self.hidden_size}"]
        said += [f"num_layers={self.num_layers}"] if self.num_layers != 1 else []
        said += [f"time_major={self.time_major}"] if self.time_major else []
        said += [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join(said)


class SimpleRNN(_Stack):
    """Layers of SimpleRNNCell, in one direction or both, with dropout between them."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        direction: str = "forward",
        time_major: bool = False,
        dropout: float = 0.0,
        activation: str = "tanh",
        weight_ih_attr: ParamAttrLike = None,
        weight_hh_attr: ParamAttrLike = None,
        bias_ih_attr: ParamAttrLike = None,
        bias_hh_attr: ParamAttrLike = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self._build(
            SimpleRNNCell, (input_size, hidden_size), num_layers, direction, time_major, dropout,
            activation=activation, weight_ih_attr=weight_ih_attr, weight_hh_attr=weight_hh_attr,
            bias_ih_attr=bias_ih_attr, bias_hh_attr=bias_hh_attr, name=name,
        )  # fmt: skip


class LSTM(_Stack):
    """Layers of LSTMCell, in one direction or both, with dropout between them.

    >>> from polyreme.ops.creation import ones
    >>> outputs, (h, c) = LSTM(3, 4, num_layers=2, direction="bidirect")(ones([2, 5, 3]))
    >>> outputs.shape, h.shape, c.shape
    (paddle.Size([2, 5, 8]), paddle.Size([4, 2, 4]), paddle.Size([4, 2, 4]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        direction: str = "forward",
        time_major: bool = False,
        dropout: float = 0.0,
        weight_ih_attr: ParamAttrLike = None,
        weight_hh_attr: ParamAttrLike = None,
        bias_ih_attr: ParamAttrLike = None,
        bias_hh_attr: ParamAttrLike = None,
        proj_size: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._build(
            LSTMCell, (input_size, hidden_size), num_layers, direction, time_major, dropout,
            weight_ih_attr=weight_ih_attr, weight_hh_attr=weight_hh_attr, bias_ih_attr=bias_ih_attr,
            bias_hh_attr=bias_hh_attr, proj_size=proj_size, name=name,
        )  # fmt: skip


class GRU(_Stack):
    """Layers of GRUCell, in one direction or both, with dropout between them."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        direction: str = "forward",
        time_major: bool = False,
        dropout: float = 0.0,
        weight_ih_attr: ParamAttrLike = None,
        weight_hh_attr: ParamAttrLike = None,
        bias_ih_attr: ParamAttrLike = None,
        bias_hh_attr: ParamAttrLike = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._build(
            GRUCell, (input_size, hidden_size), num_layers, direction, time_major, dropout,
            weight_ih_attr=weight_ih_attr, weight_hh_attr=weight_hh_attr, bias_ih_attr=bias_ih_attr,
            bias_hh_attr=bias_hh_attr, name=name,
        )  # fmt: skip
