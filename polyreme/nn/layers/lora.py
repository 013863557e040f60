"""LoRA: a linear map or experts' matrices, left as they are, beside a product of two small matrices that is trained.

Source: LoRA, arXiv:2106.09685; rsLoRA, arXiv:2312.03732; DoRA, arXiv:2402.09353; PiSSA, arXiv:2404.02948; LoRA+,
arXiv:2402.12354.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.initializer import Assign, Constant, Uniform
from polyreme.nn.layer import Layer
from polyreme.nn.layers.linear import Linear
from polyreme.nn.layers.quantized import QuantizedLinear
from polyreme.ops.quantization import weight_dequantize

_RANK = "lora_rank"


@dataclass(frozen=True)
class LoRA:
    """How a linear map is adapted.

    rank: columns of A and rows of B. alpha: the product counts alpha / rank, with rslora alpha / sqrt(rank); alpha is
    twice the rank if 0. dropout: of what A takes, while training. use_dora: also each output's weights have a length
    that trains. pissa_init: the product starts as the principal part of the weight, and what it was is taken off.
    loraplus_lr_ratio: B learns so many times as fast as A.

    >>> LoRA(rank=4).scale, LoRA(rank=4, rslora=True).scale
    (2.0, 4.0)
    """

    rank: int = 8
    alpha: float = 0.0
    dropout: float = 0.0
    rslora: bool = False
    use_dora: bool = False
    pissa_init: bool = False
    loraplus_lr_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 0 or not 0 <= self.dropout < 1 or self.loraplus_lr_ratio <= 0:
            raise ConfigError(
                f"{self}: rank is at least 1, alpha at least 0, dropout in [0, 1), loraplus_lr_ratio above 0"
            )
        if self.pissa_init and self.use_dora:
            raise ConfigError(
                "LoRA: pissa_init with use_dora: both change what the weight itself does; leave one of them out"
            )

    @property
    def scale(self) -> float:
        """What the product of A and B counts."""
        alpha = self.alpha or 2.0 * self.rank
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LoRALinear(Layer):
    """base(x) + scale (x A) B with x [..., in], A [in, rank], B [rank, out] -> [..., out].

    base: a Linear or a QuantizedLinear, none of whose parameters trains any more. B starts as zeros, so that the output
    is at first the base's, bit for bit. A starts uniform in +-1 / sqrt(in), A and B by pissa_init as the weight's
    largest singular vectors, and their product, which `start_a` and `start_b` keep, is taken off. A has the base's
    first logical dim, B its second.

    With use_dora W + scale A B has in each column the length that `magnitude` [out] says, which starts as that of W; no
    gradient flows through the length that is divided by (arXiv:2402.09353, section 4.3).

    >>> from polyreme.nn import Linear
    >>> layer = LoRALinear(Linear(6, 4), LoRA(rank=2))
    >>> {name: p.shape for name, p in layer.named_parameters() if p.trainable}
    {'lora_a': paddle.Size([6, 2]), 'lora_b': paddle.Size([2, 4])}
    """

    base: Linear | QuantizedLinear
    lora: LoRA

    def __init__(self, base: Linear | QuantizedLinear, lora: LoRA = LoRA()) -> None:
        super().__init__(dtype=base._dtype)
        self.base, self.lora = base, lora
        for p in base.parameters():
            p.trainable = False
        dims = base.weight.dims if isinstance(base, Linear) else base.weight.dims[::-1]
        _add_product(self, lora, dense_weight(base), dims)

    @property
    def in_features(self) -> int:
        """Features of the input."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """Features of the output."""
        return self.base.out_features

    @property
    def weight(self) -> Tensor:
        """The weight [in, out] of the one linear map that does the same, computed when it is asked for."""
        return _changed(self, dense_weight(self.base))

    @property
    def bias(self) -> Any:
        """The base's."""
        return self.base.bias

    def forward(self, input: Any) -> Any:
        out = self.base(input)
        change = self._change(input)
        if not self.lora.use_dora:
            return out + change
        factor = self.magnitude / _lengths(_sum(self, dense_weight(self.base))).detach()
        product = out if self.base.bias is None else out - self.base.bias
        return out + (factor - 1) * product + factor * change

    def _change(self, x: Any) -> Any:
        """scale (x A) B, without what it started from."""
        if self.lora.dropout and self.training:
            x = F.dropout(x, self.lora.dropout)
        change = F.linear(F.linear(x, self.lora_a) * self.lora.scale, self.lora_b)
        if self.lora.pissa_init:
            change = change - F.linear(F.linear(x, self.start_a) * self.lora.scale, self.start_b)
        return change

    def extra_repr(self) -> str:
        return f"rank={self.lora.rank}, scale={self.lora.scale:g}"


class ExpertLoRA(Layer):
    """The matrices [expert, in, out] of an MoE -> W + scale A B of each expert, A [expert, in, rank], B [expert, rank,
    out]: a change of an nn.MoE.

    As LoRALinear otherwise; the sum is computed before the experts' product, which every dispatcher takes as it is.
    dims: logical ones of the matrices, their own if None. Raises ConfigError for a dropout, which would be of what A
    takes by itself.
    """

    def __init__(self, matrix: Any, lora: LoRA = LoRA(), dims: Sequence[str | None] | None = None) -> None:
        super().__init__(dtype=matrix.dtype)
        if lora.dropout:
            raise ConfigError(
                f"ExpertLoRA: dropout {lora.dropout} of what A takes, and experts take their sum with A B at once; "
                "leave the dropout out, or the experts"
            )
        self.lora = lora
        _add_product(self, lora, matrix, matrix.dims if dims is None else dims)

    def forward(self, matrix: Any) -> Any:
        return _changed(self, matrix)

    def extra_repr(self) -> str:
        return f"rank={self.lora.rank}, scale={self.lora.scale:g}"


def _add_product(layer: Layer, lora: LoRA, weight: Any, dims: Sequence[str | None]) -> None:
    """Give a layer lora_a, lora_b and what else a LoRA beside a weight [..., in, out] of these logical dims has."""
    *outer, ins, outs = weight.shape
    *outer_dims, first, second = dims
    limit = 1 / math.sqrt(ins)
    starts = (Uniform(-limit, limit), Constant(0.0))
    if lora.pissa_init:
        a, b = principal_part(weight.numpy(), lora.rank)
        a, b = a / math.sqrt(lora.scale), b / math.sqrt(lora.scale)
        starts = (Assign(a), Assign(b))
        layer.register_buffer("start_a", to_tensor(a, layer._dtype))
        layer.register_buffer("start_b", to_tensor(b, layer._dtype))
    layer.lora_a = layer.create_parameter([*outer, ins, lora.rank], starts[0], dims=(*outer_dims, first, _RANK))
    layer.lora_b = layer.create_parameter([*outer, lora.rank, outs], starts[1], dims=(*outer_dims, _RANK, second))
    layer.lora_b.optimize_attr = {"learning_rate": lora.loraplus_lr_ratio}
    if lora.use_dora:
        lengths = Assign(_lengths(weight).numpy())
        layer.magnitude = layer.create_parameter([*outer, outs], lengths, dims=(*outer_dims, second))


def _sum(layer: Any, weight: Any) -> Any:
    """W + scale A B, without what it started from."""
    change = layer.lora_a.matmul(layer.lora_b)
    if layer.lora.pissa_init:
        change = change - layer.start_a.matmul(layer.start_b)
    return weight + change * layer.lora.scale


def _changed(layer: Any, weight: Any) -> Any:
    """The weight that does the same by itself: the sum, with use_dora of the lengths that the layer says."""
    total = _sum(layer, weight)
    return total * (layer.magnitude / _lengths(total).detach()).unsqueeze(-2) if layer.lora.use_dora else total


def principal_part(weight: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(A [..., in, rank], B [..., rank, out]) whose product is the nearest of that rank to a weight [..., in, out].

    Source: arXiv:2404.02948, equations 2 and 3.

    >>> a, b = principal_part(np.diag([3.0, 1.0]), 1)
    >>> np.round(np.abs(a @ b), 6).tolist()
    [[3.0, 0.0], [0.0, 0.0]]
    """
    left, sizes, right = np.linalg.svd(np.asarray(weight, np.float32), full_matrices=False)
    roots = np.sqrt(sizes[..., :rank])
    return left[..., :rank] * roots[..., None, :], roots[..., None] * right[..., :rank, :]


def dense_weight(layer: Linear | QuantizedLinear) -> Any:
    """A layer's weight [in, out], decoded if it is stored in few bits."""
    if isinstance(layer, Linear):
        return layer.weight
    return weight_dequantize(
        layer.weight, layer.weight_scale, layer.weight_dtype, out_dtype=layer._dtype.name, group_size=layer.group_size
    )


def _lengths(weight: Any) -> Any:
    """Of each column, [..., in, out] -> [..., out]."""
    return weight.square().sum(-2).sqrt()
