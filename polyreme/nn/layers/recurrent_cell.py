"""Cells of recurrent layers: one step from input and state to output and new state.

Formulas: kernels/recurrent.py. A cell of one's own is a RNNCellBase with a state_shape and a forward
(inputs, states) -> (outputs, new states).
"""

from __future__ import annotations

import math
from typing import Any

import jax

from polyreme.core import dtype as dtypes
from polyreme.errors import ConfigError
from polyreme.nn.initializer import Constant, Uniform
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr, ParamAttrLike
from polyreme.ops.recurrent import initial_state, recurrent_step

WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_ho")


class RNNCellBase(Layer):
    """Base class of recurrent cells; a subclass has a state_shape and writes forward(inputs, states).

    >>> from polyreme.eager.tensor import to_tensor
    >>> class Sum(RNNCellBase):
    ...     state_shape = (2,)
    ...     def forward(self, inputs, states):
    ...         return inputs + states, inputs + states
    >>> Sum().get_initial_states(to_tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).shape
    paddle.Size([3, 2])
    """

    def get_initial_states(
        self, batch_ref: Any, shape: Any = None, dtype: Any = None, init_value: float = 0.0, batch_dim_idx: int = 0
    ) -> Any:
        """Tensors filled with init_value, in the structure of shape: a shape is a list of ints without the batch.

        A leading -1 stands for the batch and may be left out; the batch is the size of batch_ref's dim batch_dim_idx
        (of its first Tensor, if nested). shape: state_shape if None. dtype: one, or a structure of them like shape; the
        default dtype if None.
        """
        shape = self.state_shape if shape is None else shape
        reference = jax.tree.leaves(batch_ref)[0]
        if dtype is None:
            dtype = getattr(self, "state_dtype", None) or dtypes.default_dtype()

        def states(size: Any, kind: Any) -> Any:
            sizes = [size] if isinstance(size, int) else list(size)
            sizes = sizes[1:] if sizes[:1] == [-1] else sizes
            return initial_state(reference, tuple(sizes), float(init_value), dtypes.as_dtype(kind).name, batch_dim_idx)

        if isinstance(dtype, (list, tuple, dict)):
            return jax.tree.map(states, shape, dtype, is_leaf=_is_shape)
        return jax.tree.map(lambda size: states(size, dtype), shape, is_leaf=_is_shape)

    @property
    def state_shape(self) -> Any:
        """The shapes of the states without their batch, nested as the states are; subclasses write it."""
        raise NotImplementedError(
            f"{type(self).__name__} has no state_shape; write one, or give shape to get_initial_states"
        )


def _is_shape(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, (list, tuple)) and all(isinstance(v, int) for v in value))


class BuiltInCell(RNNCellBase):
    """A cell whose loop is one op. mode: its key in kernels.recurrent.CELLS; gates: rows of weights a unit."""

    input_size: int
    hidden_size: int
    proj_size: int
    weight_ho: Any

    mode = ""
    gates = 1

    def _build(self, input_size: int, hidden_size: int, attrs: tuple[Any, Any, Any, Any], proj_size: int = 0) -> None:
        what = type(self).__name__
        if hidden_size <= 0 or input_size <= 0:
            raise ConfigError(f"{what}: input_size={input_size}, hidden_size={hidden_size}; both are greater than 0")
        if not 0 <= proj_size < hidden_size:
            raise ConfigError(
                f"{what}: proj_size={proj_size}; give 0 for no projection, or less than hidden_size={hidden_size}"
            )
        self.input_size, self.hidden_size, self.proj_size = input_size, hidden_size, proj_size
        rows, handed_on = self.gates * hidden_size, proj_size or hidden_size
        shapes = ([rows, input_size], [rows, handed_on], [rows], [rows])
        bound = 1.0 / math.sqrt(hidden_size)
        for name, shape, attr in zip(WEIGHTS, shapes, attrs, strict=False):
            setattr(self, name, self._weight(shape, attr, name.startswith("bias"), bound))
        self.weight_ho = None
        if proj_size:
            self.weight_ho = self._weight([hidden_size, proj_size], attrs[1], False, bound)

    def _weight(self, shape: list[int], attr: Any, is_bias: bool, bound: float) -> Any:
        if attr is False:
            # without a bias, or a weight: fixed at 0 and 1, and saved under its name like any other
            fixed = ParamAttr(initializer=Constant(0.0 if is_bias else 1.0), trainable=False)
            return self.create_parameter(shape, fixed, is_bias=is_bias)
        return self.create_parameter(shape, attr, is_bias=is_bias, default_initializer=Uniform(-bound, bound))

    def weights(self) -> tuple[Any, Any, Any, Any, Any]:
        """weight_ih, weight_hh, bias_ih, bias_hh and weight_ho, None where there is none."""
        return self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, self.weight_ho

    @property
    def state_shape(self) -> Any:
        """(size,)"""
        return (self.hidden_size,)

    def forward(self, inputs: Any, states: Any = None) -> tuple[Any, Any]:
        """inputs [batch, input_size], states [batch, hidden_size] or None for zeros -> (outputs, new states)."""
        h, c = pair_of(self, states, inputs)
        new = recurrent_step(inputs, *self.weights(), h, c, mode=self.mode)
        return new[0], tuple(new) if len(new) > 1 else new[0]

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"


def pair_of(cell: BuiltInCell, states: Any, inputs: Any, batch_dim: int = 0) -> tuple[Any, Any]:
    """(h, c) of states, or of those that a subclass begins with; None where there is none, which means zeros.

    Raises ConfigError for states of another structure.
    """
    if states is None and type(cell).get_initial_states is not RNNCellBase.get_initial_states:
        states = cell.get_initial_states(inputs, batch_dim_idx=batch_dim)
    if states is None:
        return None, None
    pair = isinstance(states, (list, tuple))
    if pair != (cell.mode == "LSTM") or (pair and len(states) != 2):
        need = "a pair (h, c)" if cell.mode == "LSTM" else "one Tensor"
        raise ConfigError(f"{type(cell).__name__}: states are {need}, got {type(states).__name__}")
    return tuple(states) if pair else (states, None)


class SimpleRNNCell(BuiltInCell):
    """h' = act(W_ih x + b_ih + W_hh h + b_hh), act being tanh or relu. Source: doi:10.1207/s15516709cog1402_1."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        activation: str = "tanh",
        weight_ih_attr: ParamAttrLike = None,
        weight_hh_attr: ParamAttrLike = None,
        bias_ih_attr: ParamAttrLike = None,
        bias_hh_attr: ParamAttrLike = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("tanh", "relu"):
            raise ConfigError(f"{type(self).__name__}: activation={activation!r}; choose 'tanh' or 'relu'")
        self.activation = activation
        self.mode = f"RNN_{activation.upper()}"
        self._build(input_size, hidden_size, (weight_ih_attr, weight_hh_attr, bias_ih_attr, bias_hh_attr))

    def extra_repr(self) -> str:
        act = "" if self.activation == "tanh" else f", activation={self.activation}"
        return super().extra_repr() + act


class LSTMCell(BuiltInCell):
    """c' = sig(f) c + sig(i) tanh(g), h' = sig(o) tanh(c'), where (i, f, g, o) = W_ih x + b_ih + W_hh h + b_hh.

    proj_size > 0: h' is multiplied by weight_ho [hidden_size, proj_size]. States are (h, c).
    Source: doi:10.1162/neco.1997.9.8.1735; the projection: arXiv:1402.1128.

    >>> from polyreme.ops.creation import ones
    >>> y, (h, c) = LSTMCell(3, 4, proj_size=2)(ones([5, 3]))
    >>> y.shape, h.shape, c.shape
    (paddle.Size([5, 2]), paddle.Size([5, 2]), paddle.Size([5, 4]))
    """

    mode = "LSTM"
    gates = 4

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        weight_ih_attr: ParamAttrLike = None,
        weight_hh_attr: ParamAttrLike = None,
        bias_ih_attr: ParamAttrLike = None,
        bias_hh_attr: ParamAttrLike = None,
        proj_size: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__()
        attrs = (weight_ih_attr, weight_hh_attr, bias_ih_attr, bias_hh_attr)
        self._build(input_size, hidden_size, attrs, proj_size or 0)

    @property
    def state_shape(self) -> Any:
        """((size,), (size,))"""
        return (self.proj_size or self.hidden_size,), (self.hidden_size,)


class GRUCell(BuiltInCell):
    """h' = z h + (1 - z) n: r and z are sigmoids of the first two of (W_ih x + b_ih) + (W_hh h + b_hh), and n is the
    tanh of the third, whose part from h is first multiplied by r. Source: arXiv:1406.1078.
    """

    mode = "GRU"
    gates = 3

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        weight_ih_attr: ParamAttrLike = None,
        weight_hh_attr: ParamAttrLike = None,
        bias_ih_attr: ParamAttrLike = None,
        bias_hh_attr: ParamAttrLike = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._build(input_size, hidden_size, (weight_ih_attr, weight_hh_attr, bias_ih_attr, bias_hh_attr))
