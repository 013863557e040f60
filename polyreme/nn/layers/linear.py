"""Linear and Embedding: the layers that hold nearly all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import numpy as np

from polyreme.core import amp_policy, layout
from polyreme.core.alias import Alias
from polyreme.errors import ArgumentTypeError, ConfigError
from polyreme.nn import functional as F
from polyreme.nn.argument_order import also_in_order, is_no_bool
from polyreme.nn.initializer import Assign, Initializer, XavierUniform, chosen_initializer
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttr, ParamAttrLike, Parameter
from polyreme.ops import ring_linear


class Linear(Layer):
    """x W + b with x [..., in] and W [in, out] -> [..., out].

    dims: logical dims of W, such as ("embed", "ffn"); the bias has the second. bias_attr=False leaves the bias out.

    >>> Linear(3, 5).weight.shape
    paddle.Size([3, 5])
    """

    name: str | None
    weight: Parameter
    bias: Parameter

    in_features: Alias[int] = Alias("_in_features")
    out_features: Alias[int] = Alias("_out_features")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        name: str | None = None,
        dims: Sequence[str | None] = (None, None),
    ) -> None:
        super().__init__()
        self.name, self._weight_attr, self._bias_attr = name, weight_attr, bias_attr
        what = f"Linear({in_features!r}, {out_features!r})"
        if not all(isinstance(n, Integral) for n in (in_features, out_features)):
            raise ArgumentTypeError(f"{what}: both sizes must be integers")
        if in_features < 0 or out_features < 0:
            raise ConfigError(f"{what}: both sizes must be at least 0")
        self._in_features, self._out_features = in_features, out_features
        self.weight = self.create_parameter([in_features, out_features], weight_attr, dims=dims)
        self.bias = self.create_parameter([out_features], bias_attr, is_bias=True, dims=dims[1:])

    def forward(self, input: Any) -> Any:
        if layout.active.layout is None:
            return F.linear(input, self.weight, self.bias)
        dims = getattr(self.weight, "dims", ())  # a weight that is computed has none
        if (split := ring_linear.scattering(input.shape, dims)) is not None:
            return _biased(ring_linear.scattered_linear(input, self.weight, split), self.bias)
        if (split := ring_linear.gathering(input.shape, dims)) is not None:
            return _biased(ring_linear.gathered_linears(input, [self.weight], split)[0], self.bias)
        if (ring := ring_linear.summing(input.shape, self.weight)) is not None:
            return _biased(ring_linear.ring_gradient_linear(input, self.weight, ring), self.bias)
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self._in_features}, out_features={self._out_features}, dtype={self._dtype.name}"


def _biased(y: Any, bias: Any) -> Any:
    # in y's dtype: under autocast the product is low, and so is linear's result
    return y if bias is None else y + bias.astype(y.dtype)


def _has_hooks(layer: Layer) -> bool:
    return bool(layer._forward_pre_hooks or layer._forward_post_hooks or layer._forward_post_hooks_always_called)


def map_each(x: Any, *maps: Layer) -> tuple[Any, ...]:
    """What each of the maps gives of x: tuple(each(x) for each in maps).

    Under a plan with overlap.mp, x [batch, seq, embed] goes round once for all Linears of which mp splits the columns.
    Where else the sequence is gathered over mp, autocast casts x once: what each map casts for itself is gathered for
    itself.
    """
    if layout.active.layout is not None and all(type(each) is Linear and not _has_hooks(each) for each in maps):
        splits = {ring_linear.gathering(x.shape, getattr(each.weight, "dims", ())) for each in maps}
        if len(splits) == 1 and (split := splits.pop()) is not None:
            products = ring_linear.gathered_linears(x, [each.weight for each in maps], split)
            return tuple(_biased(y, each.bias) for y, each in zip(products, maps, strict=True))
        x = _cast_as_products(x)
    return tuple(each(x) for each in maps)


def _cast_as_products(x: Any) -> Any:
    """x in the dtype in which autocast multiplies, if its sequence is gathered before; else x."""
    policy = amp_policy.active.policy
    if policy is None or not ring_linear.gathers_sequence(x.shape):
        return x
    dtype = policy.target("linear", "low", (jax.ShapeDtypeStruct((), x.dtype),))
    return x if dtype is None or x.dtype == dtype else x.astype(dtype)


class Embedding(Layer):
    """Row x[i] of a [num_embeddings, embedding_dim] table for every integer i: [...] -> [..., embedding_dim].

    padding_idx: a row that is zero and gets no gradient. max_norm: rows looked up are first scaled, in the table, to an
    L-norm_type norm of at most that. scale_grad_by_freq: a row's gradient over how often it is looked up.
    _weight: the table to start from. _freeze: do not train it.
    dims: logical dims of the table. Initial values: XavierUniform.
    """

    weight: Parameter

    num_embeddings: Alias[int] = Alias("_num_embeddings")
    embedding_dim: Alias[int] = Alias("_embedding_dim")
    max_norm: Alias[float | None] = Alias("_max_norm")
    norm_type: Alias[float] = Alias("_norm_type")
    scale_grad_by_freq: Alias[bool] = Alias("_scale_grad_by_freq")
    sparse: Alias[bool] = Alias("_sparse")
    padding_idx: Alias[int | None] = Alias("_padding_idx")

    @also_in_order(3, ("sparse", "weight_attr", "name"), unless=is_no_bool)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Any = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
        weight_attr: ParamAttrLike = None,
        name: str | None = None,
        dims: Sequence[str | None] = (None, None),
    ) -> None:
        super().__init__(dtype=dtype)
        if num_embeddings < 1 or embedding_dim < 1:
            raise ConfigError(f"Embedding({num_embeddings}, {embedding_dim}): both sizes must be at least 1")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ConfigError(f"Embedding: padding_idx {padding_idx} is outside the table of {num_embeddings} rows")
        if weight_attr is False:
            raise ConfigError("Embedding: weight_attr=False leaves no table to look up in; leave it out")
        self._num_embeddings, self._embedding_dim = num_embeddings, embedding_dim
        self._max_norm, self._norm_type = max_norm, norm_type
        self._size, self._name, self._weight_attr = [num_embeddings, embedding_dim], name, weight_attr
        self._scale_grad_by_freq, self._sparse = scale_grad_by_freq, sparse
        self._padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        attr = ParamAttr.of(weight_attr) or ParamAttr()
        start = Assign(_weight) if _weight is not None else attr.initializer
        if _weight is None and self._padding_idx is not None:
            start = _ZeroRow(start or chosen_initializer(False) or XavierUniform(), self._padding_idx)
        attr = attr.changed(initializer=start)
        self.weight = self.create_parameter([num_embeddings, embedding_dim], attr, dims=dims)
        if _freeze:
            self.weight.trainable = False
        if device is not None:
            self.to(device=device)

    def forward(self, x: Any) -> Any:
        return F.embedding(
            x,
            self.weight,
            padding_idx=self._padding_idx,
            max_norm=self._max_norm,
            norm_type=self._norm_type,
            sparse=self._sparse,
            scale_grad_by_freq=self._scale_grad_by_freq,
        )

    def extra_repr(self) -> str:
        padding = "" if self._padding_idx is None else f", padding_idx={self._padding_idx}"
        settings = f"sparse={self._sparse}, scale_grad_by_freq={self._scale_grad_by_freq}"
        return f"{self._num_embeddings}, {self._embedding_dim}{padding}, {settings}"


class _ZeroRow(Initializer):
    """Another's initial values, with zeros in one row."""

    def __init__(self, other: Any, row: int) -> None:
        self.other, self.row = other, row

    def values(self, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        return self.other.values(shape, dtype).at[self.row].set(0)


class Bilinear(Layer):
    """y_o = x1 W_o x2^T + b_o: [..., in1] and [..., in2] -> [..., out]. W is [out, in1, in2], b [1, out]."""

    weight: Parameter
    bias: Parameter

    in1_features: Alias[int] = Alias("_in1_features")
    in2_features: Alias[int] = Alias("_in2_features")
    out_features: Alias[int] = Alias("_out_features")

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._name, self._weight_attr, self._bias_attr = name, weight_attr, bias_attr
        self._in1_features, self._in2_features, self._out_features = in1_features, in2_features, out_features
        self.weight = self.create_parameter([out_features, in1_features, in2_features], weight_attr)
        self.bias = self.create_parameter([1, out_features], bias_attr, is_bias=True)

    def forward(self, x1: Any, x2: Any) -> Any:
        return F.bilinear(x1, x2, self.weight, self.bias)

    def extra_repr(self) -> str:
        inputs = f"in1_features={self._in1_features}, in2_features={self._in2_features}"
        return f"{inputs}, out_features={self._out_features}, dtype={self._dtype.name}"
