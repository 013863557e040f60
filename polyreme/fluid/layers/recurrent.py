"""Recurrent cells of 1.7, what walks them over sequences, and decoding with them step by step.

A cell is called with (inputs, states) and makes its parameters at the first call; write one by subclassing RNNCell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from polyreme.errors import ConfigError
from polyreme.fluid.layer import layer, seedless
from polyreme.nn import functional as F
from polyreme.nn.layers import decoding
from polyreme.nn.layers.decoding import BeamSearchDecoder
from polyreme.nn.layers.recurrent import over_time, swap_steps
from polyreme.nn.layers.recurrent_cell import RNNCellBase
from polyreme.nn.parameter import ParamAttr
from polyreme.ops import OPS
from polyreme.ops.activation import softmax
from polyreme.ops.arithmetic import cast, equal, matmul
from polyreme.ops.creation import zeros_like
from polyreme.ops.manipulation import concat, reshape, split, stack
from polyreme.ops.math import sigmoid, tanh
from polyreme.ops.random import multinomial
from polyreme.ops.recurrent import gather_tree as walk_back
from polyreme.ops.search import argmax
from polyreme.program.parameters import LayerParameters


class RNNCell:
    """Base of cells: a subclass has state_shape (a list of ints without the batch, or a structure of such lists) and
    writes call(inputs, states) -> (outputs, new states)."""

    def call(self, inputs: Any, states: Any, **kwargs: Any) -> tuple[Any, Any]:
        """One step."""
        raise NotImplementedError(f"{type(self).__name__} needs call(inputs, states)")

    def __call__(self, inputs: Any, states: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.call(inputs, states, **kwargs)

    @property
    def state_shape(self) -> Any:
        """Shapes of the states, without the batch."""
        raise NotImplementedError(f"{type(self).__name__} needs state_shape, or initial states")

    @property
    def state_dtype(self) -> Any:
        """Dtype of the states: one, or a structure as state_shape's."""
        return "float32"

    @layer
    def get_initial_states(
        self, batch_ref: Any, shape: Any = None, dtype: Any = None, init_value: float = 0, batch_dim_idx: int = 0
    ) -> Any:
        """Variables filled with init_value, whose batch is dim batch_dim_idx of batch_ref."""
        shape = self.state_shape if shape is None else shape
        return RNNCellBase.get_initial_states(
            self,  # type: ignore[arg-type]  (it reads state_shape and state_dtype alone)
            batch_ref,
            shape,
            self.state_dtype if dtype is None else dtype,
            init_value,
            batch_dim_idx,
        )


def named_after(attr: Any, suffix: str) -> Any:
    """attr, its name followed by suffix if it has one."""
    return attr.changed(name=attr.name + suffix) if isinstance(attr, ParamAttr) and attr.name else attr


class _GatedCell(RNNCell):
    """A cell of hidden_size whose weights are those of products with [inputs, hidden]."""

    def __init__(
        self, kind: str, hidden_size: int, param_attr: Any, bias_attr: Any, gate_activation: Any, activation: Any,
        dtype: Any,
    ) -> None:  # fmt: skip
        self.hidden_size = hidden_size
        self._gate, self._activation = gate_activation or sigmoid, activation or tanh
        self._attrs, self._dtype = (param_attr, bias_attr), dtype
        self._parameters: LayerParameters | dict[str, Any] = LayerParameters(kind)

    @property
    def state_dtype(self) -> Any:
        """Dtype of the states."""
        return self._dtype

    def _weights(self, input_size: int, gates: dict[str, int]) -> dict[str, Any]:
        """Weight and bias of each product by name; gates: how many hidden_size its result is wide."""
        if isinstance(self._parameters, LayerParameters):
            rows, maker = input_size + self.hidden_size, self._parameters
            # all weights, then all biases, as 1.7 has them in a Program
            weights, biases = (
                [
                    maker.parameter(
                        named_after(attr, f"_{gate}" if len(gates) > 1 else ""),
                        [*([] if is_bias else [rows]), count * self.hidden_size], self._dtype, None, is_bias,
                    )
                    for gate, count in gates.items()
                ]
                for attr, is_bias in zip(self._attrs, (False, True), strict=True)
            )  # fmt: skip
            self._parameters = dict(zip(gates, zip(weights, biases, strict=True), strict=True))
        return self._parameters

    @staticmethod
    def _affine(parts: list[Any], weight: Any, bias: Any) -> Any:
        product = matmul(concat(parts, -1), weight)
        return product if bias is None else product + bias


class GRUCell(_GatedCell):
    """Gated recurrent unit: with r, u = gate([x, h] W + b), h' = u h + (1 - u) activation([x, r h] V + c)."""

    def __init__(
        self, hidden_size: int, param_attr: Any = None, bias_attr: Any = None, gate_activation: Any = None,
        activation: Any = None, dtype: Any = "float32", name: str = "GRUCell",
    ) -> None:  # fmt: skip
        kind = f"{name}/BasicGRUUnit"
        super().__init__(kind, hidden_size, param_attr, bias_attr, gate_activation, activation, dtype)

    @layer
    def call(self, inputs: Any, states: Any) -> tuple[Any, Any]:
        """inputs [batch, m], states [batch, hidden_size] -> (new state, new state)."""
        weights = self._weights(inputs.shape[-1], {"gate": 2, "candidate": 1})
        reset, update = split(self._gate(self._affine([inputs, states], *weights["gate"])), 2, -1)
        candidate = self._activation(self._affine([inputs, reset * states], *weights["candidate"]))
        new = update * states + (1 - update) * candidate
        return new, new

    @property
    def state_shape(self) -> Any:
        """[hidden_size]."""
        return [self.hidden_size]


class LSTMCell(_GatedCell):
    """Long short-term memory: with i, j, f, o = [x, h] W + b,
    c' = c gate(f + forget_bias) + gate(i) activation(j), h' = gate(o) activation(c')."""

    def __init__(
        self, hidden_size: int, param_attr: Any = None, bias_attr: Any = None, gate_activation: Any = None,
        activation: Any = None, forget_bias: float = 1.0, dtype: Any = "float32", name: str = "LSTMCell",
    ) -> None:  # fmt: skip
        kind = f"{name}/BasicLSTMUnit"
        super().__init__(kind, hidden_size, param_attr, bias_attr, gate_activation, activation, dtype)
        self._forget_bias = forget_bias

    @layer
    def call(self, inputs: Any, states: Any) -> tuple[Any, Any]:
        """inputs [batch, m], states [hidden, cell] of [batch, hidden_size] each -> (hidden, [hidden, cell])."""
        hidden, cell = states
        weights = self._weights(inputs.shape[-1], {"gate": 4})
        i, j, f, o = split(self._affine([inputs, hidden], *weights["gate"]), 4, -1)
        cell = cell * self._gate(f + self._forget_bias) + self._gate(i) * self._activation(j)
        hidden = self._gate(o) * self._activation(cell)
        return hidden, [hidden, cell]

    @property
    def state_shape(self) -> Any:
        """[[hidden_size], [hidden_size]]."""
        return [[self.hidden_size], [self.hidden_size]]


@layer
def rnn(
    cell: Any, inputs: Any, initial_states: Any = None, sequence_length: Any = None, time_major: bool = False,
    is_reverse: bool = False, **kwargs: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """A cell over inputs [batch, steps, ...] (time_major: [steps, batch, ...]) -> (outputs, last states).

    sequence_length [batch]: behind it outputs are 0 and states stand still. In a Program the cell is called once, so
    layers with parameters may stand in it, and the number of steps may be open.
    """
    x = inputs if time_major else swap_steps(inputs)
    outputs, last = over_time(cell, x, initial_states, sequence_length, is_reverse, **kwargs)
    return outputs if time_major else swap_steps(outputs), last


class Decoder:
    """Base of what dynamic_decode calls: initialize, step, and finalize where results want more work."""

    def initialize(self, inits: Any) -> tuple[Any, Any, Any]:
        """-> (first inputs, first states, finished [batch])."""
        raise NotImplementedError(f"{type(self).__name__} needs initialize(inits)")

    def step(self, time: Any, inputs: Any, states: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        """-> (outputs, new states, next inputs, finished)."""
        raise NotImplementedError(f"{type(self).__name__} needs step(time, inputs, states)")

    def finalize(self, outputs: Any, final_states: Any, sequence_lengths: Any) -> tuple[Any, Any]:
        """What is made of the outputs of all steps [steps, batch, ...]; they stay as they are."""
        return outputs, final_states


class DecodeHelper:
    """Base of what gives a BasicDecoder its inputs and draws its samples."""

    def initialize(self) -> tuple[Any, Any]:
        """-> (first inputs, finished [batch])."""
        raise NotImplementedError(f"{type(self).__name__} needs initialize()")

    def sample(self, time: Any, outputs: Any, states: Any) -> Any:
        """Token ids [batch] of a step's outputs."""
        raise NotImplementedError(f"{type(self).__name__} needs sample(time, outputs, states)")

    def next_inputs(self, time: Any, outputs: Any, states: Any, sample_ids: Any) -> tuple[Any, Any, Any]:
        """-> (finished, next inputs, states)."""
        raise NotImplementedError(f"{type(self).__name__} needs next_inputs(time, outputs, states, sample_ids)")


class TrainingHelper(DecodeHelper):
    """Inputs are the steps of sequences [batch, steps, ...] (time_major: [steps, batch, ...]) of sequence_length."""

    @layer
    def __init__(self, inputs: Any, sequence_length: Any, time_major: bool = False) -> None:
        steps = inputs if time_major else swap_steps(inputs)
        self._length = sequence_length
        # behind the last step there is one more, which no output comes of
        self._steps = jax.tree.map(lambda x: concat([x, zeros_like(x[:1])], 0), steps)

    def initialize(self) -> tuple[Any, Any]:
        """The first step; finished are sequences without steps."""
        return jax.tree.map(lambda x: x[0], self._steps), equal(self._length, zeros_like(self._length))

    def sample(self, time: Any, outputs: Any, states: Any) -> Any:
        """The likeliest token of each row of logits [batch, vocab]."""
        return argmax(outputs, -1)

    def next_inputs(self, time: Any, outputs: Any, states: Any, sample_ids: Any) -> tuple[Any, Any, Any]:
        """The next step of the sequence."""
        later = cast(time, self._length.dtype) + 1
        most = jax.tree.leaves(self._steps)[0].shape[0] - 1
        place = cast(later[0] if later.shape else later, "int64").clip(0, most)
        return later >= self._length, jax.tree.map(lambda x: x[place], self._steps), states


class GreedyEmbeddingHelper(DecodeHelper):
    """Inputs are embedding_fn of the likeliest token of the step before; the first are of start_tokens [batch]."""

    embedding_fn: Callable[..., Any]
    start_tokens: Any
    end_token: int

    def __init__(self, embedding_fn: Callable[..., Any], start_tokens: Any, end_token: int) -> None:
        self.embedding_fn, self.start_tokens, self.end_token = embedding_fn, start_tokens, int(end_token)

    @layer
    def initialize(self) -> tuple[Any, Any]:
        """The start tokens; nothing is finished."""
        return self.embedding_fn(self.start_tokens), cast(zeros_like(self.start_tokens), "bool")

    def sample(self, time: Any, outputs: Any, states: Any) -> Any:
        """The likeliest token of each row of logits [batch, vocab]."""
        return argmax(outputs, -1)

    def next_inputs(self, time: Any, outputs: Any, states: Any, sample_ids: Any) -> tuple[Any, Any, Any]:
        """The embedding of what was sampled; finished is what has the end token."""
        return sample_ids == self.end_token, self.embedding_fn(sample_ids), states


class SampleEmbeddingHelper(GreedyEmbeddingHelper):
    """GreedyEmbeddingHelper that draws tokens by softmax(logits / softmax_temperature).

    Raises ConfigError for a temperature that is not above 0, and for a seed.
    """

    softmax_temperature: float

    def __init__(
        self, embedding_fn: Callable[..., Any], start_tokens: Any, end_token: int,
        softmax_temperature: float | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        seedless("SampleEmbeddingHelper", seed)
        super().__init__(embedding_fn, start_tokens, end_token)
        self.softmax_temperature = 1.0 if softmax_temperature is None else softmax_temperature
        if not self.softmax_temperature > 0:
            raise ConfigError(
                f"SampleEmbeddingHelper: softmax_temperature={softmax_temperature}; give a number above 0, or use "
                "GreedyEmbeddingHelper"
            )

    def sample(self, time: Any, outputs: Any, states: Any) -> Any:
        """A token of each row of logits [batch, vocab]."""
        return multinomial(softmax(outputs / self.softmax_temperature), 1)[:, 0]


class BasicOutput(NamedTuple):
    """A step of a BasicDecoder: cell_outputs [batch, ...], sample_ids [batch]."""

    cell_outputs: Any
    sample_ids: Any


class BasicDecoder(Decoder):
    """A cell with a helper, and output_fn from the cell's outputs to logits; for dynamic_decode."""

    output_fn: Callable[..., Any] | None

    cell: Any
    helper: DecodeHelper

    OutputWrapper = BasicOutput

    def __init__(self, cell: Any, helper: DecodeHelper, output_fn: Callable[..., Any] | None = None) -> None:
        self.cell, self.helper, self.output_fn = cell, helper, output_fn

    def initialize(self, initial_cell_states: Any) -> tuple[Any, Any, Any]:
        """The helper's first inputs, and the cell's states."""
        inputs, finished = self.helper.initialize()
        return inputs, initial_cell_states, finished

    def step(self, time: Any, inputs: Any, states: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        """One call of the cell, and what the helper makes of it."""
        outputs, states = self.cell(inputs, states, **kwargs)
        outputs = outputs if self.output_fn is None else self.output_fn(outputs)
        sample_ids = self.helper.sample(time, outputs, states)
        finished, inputs, states = self.helper.next_inputs(time, outputs, states, sample_ids)
        return BasicOutput(outputs, sample_ids), states, inputs, finished


dynamic_decode: Callable[..., Any] = layer(decoding.dynamic_decode)


@layer
def gather_tree(ids: Any, parents: Any) -> Any:
    """Whole sequences of a beam search, of ids and parents [steps, batch, beams]; see nn.functional.gather_tree."""
    return walk_back(ids, parents)


@layer
def lstm(
    input: Any, init_h: Any, init_c: Any, max_len: int, hidden_size: int, num_layers: int, dropout_prob: float = 0.0,
    is_bidirec: bool = False, is_test: bool = False, name: str | None = None, default_initializer: Any = None,
    seed: int = -1,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """LSTM layers over input [steps, batch, d]: (outputs [steps, batch, width], last hidden, last cell).

    init_h, init_c and the last ones are [layers, batch, hidden_size], with is_bidirec twice as many, forward before
    backward in each layer; width is hidden_size, or twice that. Between layers dropout_prob of the numbers are dropped.
    All parameters are one vector: the weights of each layer and direction, of inputs and then of the state, and after
    them their two biases each, gates in the order input, forget, candidate, output. max_len: the number of steps, which
    is input's. Raises ConfigError for a seed: Program.random_seed is the seed.
    """
    seedless("lstm", None if seed == -1 else seed)
    sides = 2 if is_bidirec else 1
    gates, cells = 4 * hidden_size, [(layer, side) for layer in range(num_layers) for side in range(sides)]
    widths = [input.shape[-1], *[hidden_size * sides] * (num_layers - 1)]
    if init_h.shape[0] != len(cells) or init_c.shape[0] != len(cells) or 0 <= max_len != input.shape[0] >= 0:
        raise ConfigError(
            f"fluid.layers.lstm: init_h {list(init_h.shape)}, init_c {list(init_c.shape)} for {len(cells)} layers and "
            f"directions, max_len={max_len} of input {list(input.shape)}"
        )
    shapes = [s for layer, _ in cells for s in ([gates, widths[layer]], [gates, hidden_size])]
    sizes = [rows * columns for rows, columns in shapes] + [gates] * (2 * len(cells))
    flat = LayerParameters("lstm", name).parameter(None, [sum(sizes)], input.dtype, default_initializer)
    parts = split(flat, sizes, 0)
    weights = [reshape(part, shape) for part, shape in zip(parts, shapes, strict=False)]
    biases = parts[len(weights) :]
    x, last = input, []
    for n in range(num_layers):
        if n and dropout_prob:
            x = F.dropout(x, dropout_prob, training=not is_test)
        outs = []
        for side in range(sides):
            at = n * sides + side
            pair = (slice(2 * at, 2 * at + 2), init_h[at], init_c[at])
            out, h, c = OPS["recurrent_layer"](
                x, *weights[pair[0]], *biases[pair[0]], None, pair[1], pair[2], None, "LSTM", bool(side)
            )
            outs.append(out)
            last.append((h, c))
        x = outs[0] if sides == 1 else concat(outs, -1)
    last_h, last_c = (stack(list(states), 0) for states in zip(*last, strict=True))
    return x, last_h, last_c


__all__ = [
    "BasicDecoder",
    "BeamSearchDecoder",
    "DecodeHelper",
    "Decoder",
    "GRUCell",
    "GreedyEmbeddingHelper",
    "LSTMCell",
    "RNNCell",
    "SampleEmbeddingHelper",
    "TrainingHelper",
    "dynamic_decode",
    "gather_tree",
    "lstm",
    "rnn",
]
