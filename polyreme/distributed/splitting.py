"""split: one linear or embedding whose weight `mp` splits, made and called at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.core import layout as layouts
from polyreme.distributed.tensor_parallel.constraints import settle
from polyreme.distributed.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from polyreme.errors import ConfigError, ShapeError
from polyreme.nn.layer import Layer


def split(
    x: Any,
    size: Sequence[int],
    operation: str,
    axis: int = 0,
    num_partitions: int = 1,
    gather_out: bool = True,
    weight_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
) -> Any:
    """A new layer's result for x: operation "linear" of size [in, out], or "embedding" of size [rows, width].

    axis: the dim of the weight that is split: 0 (RowParallelLinear, or the rows of the table) or 1
    (ColumnParallelLinear). num_partitions: the degree of `mp` in the plan in force, 1 without one. gather_out=False
    leaves a column-parallel result split along its last dim; a row-parallel one is whole either way. bias_attr=False
    leaves the bias out.

    Each call makes a new layer, whose parameters the result's history alone holds: in training code that runs every
    step, make the layer once instead. Raises ConfigError for another operation, axis or number of partitions, and
    ShapeError for an x that does not fit.
    """
    found = layouts.active.layout
    degree = 1 if found is None else found.plan.mesh.mp
    if num_partitions != degree:
        raise ConfigError(
            f"split(num_partitions={num_partitions}): the plan in force has mp={degree}; give num_partitions={degree}, "
            f"or put a plan with mp={num_partitions} in force first"
        )
    layer = _layer(size, operation, axis, gather_out, weight_attr, bias_attr is not False, name)
    if operation == "linear" and bias_attr not in (None, True, False):
        _replace_bias(layer, bias_attr)
    return layer(x)


def _layer(
    size: Any, operation: Any, axis: Any, gather_out: bool, weight_attr: Any, has_bias: bool, name: Any
) -> Layer:
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        raise ShapeError(f"split: size={size!r}; give the weight's two sizes, such as (8, 16)")
    first, second = size
    if operation == "linear" and axis == 1:
        return ColumnParallelLinear(first, second, weight_attr, has_bias, gather_out, name=name)
    if operation == "linear" and axis == 0:
        return RowParallelLinear(first, second, weight_attr, has_bias, input_is_parallel=False, name=name)
    if operation == "embedding" and axis == 0:
        return VocabParallelEmbedding(first, second, weight_attr, name=name)
    raise ConfigError(
        f"split(operation={operation!r}, axis={axis!r}): choose 'linear' with axis 0 (rows) or 1 (columns), or "
        "'embedding' with axis 0"
    )


def _replace_bias(layer: Layer, attr: Any) -> None:
    made = layer.create_parameter(layer.bias.shape, attr, is_bias=True, dims=layer.bias.dims)
    made.is_distributed = layer.bias.is_distributed
    layer.bias = made
    settle(layer)
