"""Layer functions that multiply by a matrix or look rows up: fc, embedding, bilinear_tensor_product."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError, ShapeError
from polyreme.nn import functional as F
from polyreme.ops.arithmetic import add, matmul
from polyreme.ops.manipulation import reshape
from polyreme.program.activations import activation
from polyreme.program.parameters import LayerParameters
from polyreme.static.nn.checks import refuse


def fc(
    x: Any,
    size: int,
    num_flatten_dims: int = 1,
    weight_attr: Any = None,
    bias_attr: Any = None,
    activation: str | None = None,
    name: str | None = None,
) -> Any:
    """activation(x W + b), with x seen as a matrix: [*kept, *rest] -> [*kept, size], W [prod(rest), size].

    num_flatten_dims: how many dims are kept, -1 for all but the last. x: several Variables have a weight each, and
    their products are added up; weight_attr may then be a list. bias_attr=False: no bias.
    """
    act = _activation(activation)
    xs = list(x) if isinstance(x, (list, tuple)) else [x]
    attrs = list(weight_attr) if isinstance(weight_attr, (list, tuple)) else [weight_attr] * len(xs)
    if not xs or len(attrs) != len(xs):
        raise ConfigError(f"fc: {len(attrs)} weight attributes for {len(xs)} inputs; give one for all, or one for each")
    parameters = LayerParameters("fc", name)
    products = [
        _product(parameters, value, size, num_flatten_dims, attr) for value, attr in zip(xs, attrs, strict=True)
    ]
    out = functools.reduce(add, products)
    bias = parameters.bias(bias_attr, [size], xs[0].dtype)
    return act(out if bias is None else add(out, bias))


_activation = activation


def _product(parameters: LayerParameters, x: Any, size: int, num_dims: int, attr: Any) -> Any:
    if attr is False:
        raise ConfigError("fc: weight_attr=False leaves nothing to multiply by; leave it out")
    keep = x.ndim - 1 if num_dims == -1 else num_dims
    if not 0 < keep < x.ndim:
        raise ShapeError(
            f"fc: num_flatten_dims={num_dims} for an input of shape {list(x.shape)}; keep 1 to {x.ndim - 1}"
        )
    rest = x.shape[keep:]
    weight = parameters.parameter(attr, [-1 if -1 in rest else math.prod(rest), size], x.dtype)
    return matmul(x if len(rest) == 1 else reshape(x, [*x.shape[:keep], math.prod(rest)]), weight)


def embedding(
    input: Any,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: Any = "float32",
) -> Any:
    """Rows of a learned table of this size [rows, width]: ids [*b] -> [*b, width]; padding_idx: an id that gives zeros.

    is_sparse: Adam(lazy_mode=True) leaves the rows that are not looked up as they are; the gradient is the same.
    Raises ConfigError for is_distributed=True.
    """
    refuse("embedding", is_distributed=(is_distributed, "there is no parameter server; place the table by a plan"))
    if len(size) != 2:
        raise ConfigError(f"embedding: size is [rows, width], got {size!r}")
    weight = LayerParameters("embedding").parameter(param_attr, list(size), dtype)
    return F.embedding(input, weight, padding_idx=padding_idx, sparse=bool(is_sparse))


def sparse_embedding(
    input: Any,
    size: Sequence[int],
    padding_idx: int | None = None,
    is_test: bool = False,
    entry: Any = None,
    table_class: str = "MemorySparseTable",
    param_attr: Any = None,
    dtype: Any = "float32",
    slot: Any = None,
) -> Any:
    """embedding with the table in this process: there is no parameter server, whose settings are refused.

    is_test: ids that were never seen are not added to the table, which has all its rows here.
    Raises ConfigError for entry, slot and another table_class.
    """
    server = "it is a setting of a parameter server, and there is none"
    other = table_class if table_class != "MemorySparseTable" else ""
    refuse("sparse_embedding", entry=(entry, server), slot=(slot, server), table_class=(other, server))
    return embedding(input, size, True, False, padding_idx, param_attr, dtype)


def bilinear_tensor_product(
    x: Any,
    y: Any,
    size: int,
    act: str | None = None,
    name: str | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
) -> Any:
    """act(x W_o y^T + b_o) for each output o: [n, a], [n, b] -> [n, size], W [size, a, b], b [1, size]."""
    after = activation(act)
    parameters = LayerParameters("bilinear_tensor_product", name)
    weight = parameters.parameter(param_attr, [size, x.shape[1], y.shape[1]], x.dtype)
    bias = parameters.bias(bias_attr, [1, size], x.dtype)
    return after(F.bilinear(x, y, weight, bias))
