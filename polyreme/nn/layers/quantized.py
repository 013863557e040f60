"""A Linear whose weight is stored in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.errors import ConfigError, did_you_mean
from polyreme.kernels.low_bit import HALVES, LARGEST
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layer import Layer
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import ParamAttr, ParamAttrLike, Parameter
from polyreme.ops.quantization import (
    fake_quantize,
    low_bit_product,
    weight_dequantize,
    weight_only_linear,
    weight_quantize,
)

_BITS = {"int8": 8, "int4": 4}


class QuantizedLinear(Layer):
    """x W + b with W stored as codes and scales (ops.quantization.weight_quantize), decoded inside the product.

    weight: codes, [out, in], of 4 bits [out / 2, in]. weight_scale: [out], or [in / group_size, out]. Neither is
    trained, gradients reach x and the bias. weight_dtype: int8, int4, nf4 or fp8. group_size: inputs that share a
    scale, all if -1. low_bit_input: x is rounded too, each row by its own scale, to int8 or fp8, and the product is one
    of codes. dims: logical dims of W, (in, out), as of Linear.

    Raises ConfigError for sizes that groups, pairs of channels or low_bit_input do not fit.

    >>> layer = QuantizedLinear.of(Linear(64, 32), "int4", group_size=16)
    >>> layer.weight.shape, layer.weight_scale.shape
    (paddle.Size([16, 64]), paddle.Size([4, 32]))
    """

    in_features: int
    out_features: int
    weight_dtype: str
    group_size: int
    low_bit_input: bool
    weight: Parameter
    weight_scale: Parameter
    bias: Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_dtype: str = "int8",
        group_size: int = -1,
        bias_attr: ParamAttrLike = None,
        low_bit_input: bool = False,
        dims: Sequence[str | None] = (None, None),
    ) -> None:
        super().__init__()
        if weight_dtype not in LARGEST:
            raise ConfigError(
                f"QuantizedLinear: unknown weight_dtype {weight_dtype!r}{did_you_mean(str(weight_dtype), LARGEST)}"
            )
        if group_size != -1 and (group_size < 1 or in_features % group_size):
            raise ConfigError(
                f"QuantizedLinear: groups of {group_size} of {in_features} inputs; give what divides them, or -1"
            )
        if weight_dtype in HALVES and out_features % 2:
            raise ConfigError(f"QuantizedLinear: {out_features} outputs; {weight_dtype} stores two in a byte")
        if low_bit_input and (group_size != -1 or weight_dtype in HALVES):
            raise ConfigError(
                f"QuantizedLinear: low_bit_input with {weight_dtype} in groups of {group_size}; it takes int8 or fp8 "
                "with one scale a channel"
            )
        self.in_features, self.out_features = in_features, out_features
        self.weight_dtype, self.group_size, self.low_bit_input = weight_dtype, group_size, low_bit_input
        rows = out_features // 2 if weight_dtype in HALVES else out_features
        frozen = ParamAttr(initializer=Constant(0.0), trainable=False)
        into, out = dims
        self.weight = self.create_parameter([rows, in_features], frozen, dtypes.int8, dims=(out, into))
        groups = [] if group_size == -1 else [in_features // group_size]
        # one group cannot be split; several lie as the inputs that they are of
        of_groups = (into if groups[0] > 1 else None,) if groups else ()
        self.weight_scale = self.create_parameter([*groups, out_features], frozen, dims=(*of_groups, out))
        self.bias = self.create_parameter([out_features], bias_attr, is_bias=True, dims=(out,))

    @classmethod
    def of(cls, linear: Linear, weight_dtype: str = "int8", group_size: int = -1, low_bit_input: bool = False) -> Self:
        """A Linear with its weight rounded to the nearest codes; the bias is shared. Raises as the class does."""
        layer = cls.like(linear, weight_dtype, group_size, low_bit_input)
        codes, scale = weight_quantize(linear.weight.detach(), algo=weight_dtype, group_size=group_size)
        layer.set_codes(codes, scale)
        return layer

    @classmethod
    def like(cls, linear: Linear, weight_dtype: str, group_size: int = -1, low_bit_input: bool = False) -> Self:
        """One that takes a Linear's place, with its bias and logical dims, whose codes are still to be set."""
        sizes = (linear.in_features, linear.out_features)
        layer = cls(*sizes, weight_dtype, group_size, False, low_bit_input, dims=linear.weight.dims)
        layer.bias = linear.bias
        layer._dtype = linear._dtype
        layer.training = linear.training
        return layer

    def set_codes(self, codes: Any, scale: Any) -> None:
        """Replace codes and scales, Tensors as weight_quantize gives them; scales keep their dtype."""
        state.write(self.weight, codes._array)
        state.write(self.weight_scale, scale._array)

    def forward(self, input: Any) -> Any:
        if self.low_bit_input:
            y = low_bit_product(input, self.weight, self.weight_scale, self.weight_dtype)
            return y if self.bias is None else y + self.bias
        return weight_only_linear(
            input, self.weight, self.bias, self.weight_scale, self.weight_dtype, group_size=self.group_size
        )

    def extra_repr(self) -> str:
        groups = "" if self.group_size == -1 else f", group_size={self.group_size}"
        rounded = ", low_bit_input=True" if self.low_bit_input else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.weight_dtype}{groups}{rounded}"


class QuantizedExperts(Layer):
    """A matrix of each expert of an MoE, [expert, in, out], stored as codes and scales.

    codes, codes_scale: as weight and weight_scale of a QuantizedLinear, with the experts in front. The MoE decodes all
    of them for many tokens, and those that are chosen for few. Raises as QuantizedLinear.

    >>> QuantizedExperts(4, 64, 32, "int4", 16).codes_scale.shape
    paddle.Size([4, 4, 32])
    """

    num_experts: int
    in_features: int
    out_features: int
    weight_dtype: str
    group_size: int
    low_bit_input: bool
    codes: Parameter
    codes_scale: Parameter

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        weight_dtype: str = "int8",
        group_size: int = -1,
        dims: Sequence[str | None] = (None, None, None),
    ) -> None:
        super().__init__()
        one = QuantizedLinear(in_features, out_features, weight_dtype, group_size, False)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight_dtype, self.group_size, self.low_bit_input = weight_dtype, group_size, False
        frozen = ParamAttr(initializer=Constant(0.0), trainable=False)
        expert, into, out = dims
        sizes, scales = [num_experts, *one.weight.shape], [num_experts, *one.weight_scale.shape]
        self.codes = self.create_parameter(sizes, frozen, dtypes.int8, dims=(expert, out, into))
        self.codes_scale = self.create_parameter(scales, frozen, dims=(expert, *[None] * (len(scales) - 2), out))

    @property
    def dims(self) -> tuple[str | None, ...]:
        """Logical dims of the matrices, (expert, in, out)."""
        expert, out, into = self.codes.dims
        return expert, into, out

    def set_codes(self, codes: Any, scale: Any) -> None:
        """Replace codes and scales, Tensors as weight_quantize gives them of each expert; scales keep their dtype."""
        state.write(self.codes, codes._array)
        state.write(self.codes_scale, scale._array)

    def decoded(self, dtype: Any, experts: Any = None) -> Any:
        """[expert, in, out] in a dtype; of these experts [n], in their order, if given."""
        codes, scale = self.codes, self.codes_scale
        if experts is not None:
            codes, scale = codes[experts], scale[experts]
        return weight_dequantize(codes, scale, self.weight_dtype, dtype, self.group_size)

    def extra_repr(self) -> str:
        groups = "" if self.group_size == -1 else f", group_size={self.group_size}"
        sizes = f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {self.weight_dtype}{groups}"


class RoundedLinear(Linear):
    """A Linear that computes with its weight rounded as QuantizedLinear.of rounds it, while the weight itself is
    trained, the gradient passing the rounding by. weight_dtype: int8 or int4.

    It takes a Linear's place with the Linear's own parameters, so that nothing else of a model changes.
    """

    name: str | None
    weight: Parameter
    bias: Parameter
    training: bool
    weight_dtype: str
    group_size: int

    def __init__(self, linear: Linear, weight_dtype: str, group_size: int = -1) -> None:
        Layer.__init__(self)
        if weight_dtype not in _BITS:
            raise ConfigError(f"RoundedLinear: weight_dtype={weight_dtype!r}; give {' or '.join(_BITS)}")
        if group_size != -1 and (group_size < 1 or linear.in_features % group_size):
            raise ConfigError(
                f"RoundedLinear: groups of {group_size} of {linear.in_features} inputs; give what divides them, or -1"
            )
        self.name, self._weight_attr, self._bias_attr = linear.name, linear._weight_attr, linear._bias_attr
        self._in_features, self._out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._dtype, self.training = linear._dtype, linear.training
        self.weight_dtype, self.group_size = weight_dtype, group_size

    def forward(self, input: Any) -> Any:
        size = self._in_features if self.group_size == -1 else self.group_size
        top = self.weight.detach().abs().reshape([-1, size, self._out_features]).max(1)
        return F.linear(input, fake_quantize(self.weight, top, _BITS[self.weight_dtype]), self.bias)
