"""Compositions of layers that 1.7 computes in one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyreme.core.rng import fixed_key
from polyreme.errors import ConfigError
from polyreme.fluid.layer import layer
from polyreme.fluid.layers import elementwise
from polyreme.fluid.layers.detection import nms_with_places
from polyreme.fluid.layers.nn import embedding
from polyreme.fluid.layers.sequences import sequence_pool
from polyreme.ops import OPS
from polyreme.ops import math as mt
from polyreme.ops.activation import relu
from polyreme.ops.arithmetic import matmul
from polyreme.ops.indices.gather import gather
from polyreme.ops.manipulation import concat, reshape
from polyreme.ops.search import argsort
from polyreme.program.activations import activate
from polyreme.program.parameters import LayerParameters

_BINARY: dict[str, Callable[..., Any]] = {
    "elementwise_add": elementwise.elementwise_add, "elementwise_mul": elementwise.elementwise_mul,
}  # fmt: skip
_UNARY: dict[str, Callable[[Any, float], Any]] = {
    "scale": mt.scale, "relu": lambda x, _: relu(x), "tanh": lambda x, _: mt.tanh(x),
    "sigmoid": lambda x, _: mt.sigmoid(x),
}  # fmt: skip


@layer
def fused_elemwise_activation(
    x: Any, y: Any, functor_list: Sequence[str], axis: int = -1, scale: float = 0.0, save_intermediate_out: bool = True
) -> Any:
    """["elementwise_add", "relu"]: x + relu(y); ["relu", "elementwise_add"]: relu(x + y); the compiler fuses them.

    elementwise_add or elementwise_mul, with scale (times scale), relu, tanh or sigmoid. save_intermediate_out changes
    no value. Raises ConfigError for another pair.
    """
    names = list(functor_list)
    if len(names) == 2 and names[0] in _BINARY and names[1] in _UNARY:
        return _BINARY[names[0]](x, _UNARY[names[1]](y, scale), axis)
    if len(names) == 2 and names[0] in _UNARY and names[1] in _BINARY:
        return _UNARY[names[0]](_BINARY[names[1]](x, y, axis), scale)
    raise ConfigError(
        f"fused_elemwise_activation: functor_list={names}; one of {', '.join(_BINARY)} and one of {', '.join(_UNARY)}"
    )


@layer
def partial_concat(input: Sequence[Any], start_index: int = 0, length: int = -1) -> Any:
    """Columns start_index to start_index + length (to the last if -1) of each [n, d], side by side."""
    return concat(_columns(input, start_index, length), 1)


@layer
def partial_sum(input: Sequence[Any], start_index: int = 0, length: int = -1) -> Any:
    """Columns start_index to start_index + length (to the last if -1) of each [n, d], added up."""
    return mt.add_n(_columns(input, start_index, length))


def _columns(input: Sequence[Any], start: int, length: int) -> list[Any]:
    several: list[Any] = list(input) if isinstance(input, (list, tuple)) else [input]
    width = several[0].shape[1]
    begin = start % width
    end = width if length < 0 else begin + length
    if not -width <= start < width or end > width:
        raise ConfigError(f"fluid.contrib.layers: start_index={start}, length={length} of {width} columns")
    return [x[:, begin:end] for x in several]


@layer
def shuffle_batch(x: Any, seed: Any = None) -> Any:
    """The rows of x (of all dims but the last) in another order at each run, with a seed always in the same one."""
    rows = reshape(x, [-1, x.shape[-1]])
    order = argsort(OPS["uniform"]([rows._array.shape[0]], **fixed_key(seed)), 0)
    return reshape(gather(rows, order), [-1 if size < 0 else size for size in x.shape])


@layer
def fused_embedding_seq_pool(
    input: Any, size: Sequence[int], is_sparse: bool = False, padding_idx: int | None = None, combiner: str = "sum",
    param_attr: Any = None, dtype: Any = "float32",
) -> Any:  # fmt: skip
    """The sum of the embeddings of each sequence of ids. Raises ConfigError for another combiner."""
    if combiner != "sum":
        raise ConfigError(f"fused_embedding_seq_pool: combiner={combiner!r}; it is 'sum', use sequence_pool for others")
    return sequence_pool(embedding(input, size, is_sparse, False, padding_idx, param_attr, dtype), "sum")


@layer
def multiclass_nms2(
    bboxes: Any, scores: Any, score_threshold: float, nms_top_k: int, keep_top_k: int, nms_threshold: float = 0.3,
    normalized: bool = True, nms_eta: float = 1.0, background_label: int = 0, return_index: bool = False,
    name: str | None = None,
) -> Any:  # fmt: skip
    """multiclass_nms, with return_index also the place of each row among all images' boxes, int32 [k, 1]."""
    rows, index = nms_with_places(
        bboxes, scores, score_threshold, nms_top_k, keep_top_k, nms_threshold, normalized, nms_eta, background_label
    )
    return (rows, index) if return_index else rows


@layer
def batch_fc(
    input: Any, param_size: Sequence[int], param_attr: Any, bias_size: Sequence[int], bias_attr: Any,
    act: str | None = None,
) -> Any:  # fmt: skip
    """act(input[k] @ weight[k] + bias[k]) of each slot k: input [slots, n, d], param_size [slots, d, m], bias_size
    [slots, m]."""
    parts = LayerParameters("batch_fc")
    weight = parts.parameter(param_attr, list(param_size), input.dtype)
    bias = parts.parameter(bias_attr, list(bias_size), input.dtype, None, True)
    return activate(matmul(input, weight) + reshape(bias, [bias_size[0], 1, bias_size[1]]), act)


__all__ = [
    "batch_fc", "fused_elemwise_activation", "fused_embedding_seq_pool", "multiclass_nms2", "partial_concat",
    "partial_sum", "shuffle_batch",
]  # fmt: skip
