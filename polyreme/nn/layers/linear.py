"""Linear and Embedding: the layers that hold nearly all parameters.

Floor: 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn.initializer import Normal
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr
from polyreme.ops import neural


class Linear(Layer):
    """x W + b with x [..., in] and W [in, out] -> [..., out].

    dims: logical dims of W, such as ("embed", "ffn"); the bias has the second. bias_attr=False leaves the bias out.

    >>> Linear(3, 5).weight.shape
    [3, 5]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        bias_attr: Any = None,
        name: str | None = None,
        dims: Sequence[str | None] = (None, None),
    ) -> None:
        super().__init__(name)
        if in_features < 1 or out_features < 1:
            raise ConfigError(f"Linear({in_features}, {out_features}): both sizes must be at least 1")
        self.in_features, self.out_features = in_features, out_features
        self.weight = self.create_parameter([in_features, out_features], weight_attr, dims=dims)
        self.bias = self.create_parameter([out_features], bias_attr, is_bias=True, dims=dims[1:])

    def forward(self, input: Any) -> Any:
        return neural.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self._dtype.name}"


class Embedding(Layer):
    """Row x[i] of a [num_embeddings, embedding_dim] table for every integer i: [...] -> [..., embedding_dim].

    padding_idx: a row that is zero and gets no gradient. dims: logical dims of the table. Initial values: Gaussian(0, 1).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        sparse: bool = False,
        scale_grad_by_freq: bool = False,
        weight_attr: Any = None,
        name: str | None = None,
        dims: Sequence[str | None] = (None, None),
    ) -> None:
        super().__init__(name)
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise ConfigError(
                "Embedding: max_norm, scale_grad_by_freq and sparse gradients are not supported; leave them out"
            )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ConfigError(f"Embedding: padding_idx {padding_idx} is outside the table of {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        default = Normal(0.0, 1.0) if ParamAttr.of(weight_attr) is not None else None
        self.weight = self.create_parameter(
            [num_embeddings, embedding_dim], weight_attr, default_initializer=default, dims=dims
        )
        if self.padding_idx is not None:
            with_zero = self.weight.numpy()
            with_zero[self.padding_idx] = 0
            self.weight.set_value(with_zero)

    def forward(self, x: Any) -> Any:
        return neural.embedding(x, self.weight, padding_idx=self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"
