"""The tensor-parallel layers of the public API: nn's own Linear and Embedding with their dims named, and a loss.

Weights have their global shapes, on one device and on any mesh; a plan places them: see
docs/tensor_parallel.md. Source of the scheme: arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

from polyreme.distributed.tensor_parallel.constraints import check_group, constrain_dim, settle, whole_over_mp
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer
from polyreme.nn.layers.linear import Embedding, Linear
from polyreme.nn.parameter import Parameter


def mark_split(parameter: Parameter | None, dim: int) -> None:
    """Note on a parameter (None: there is none) that `mp` splits it along dim."""
    if parameter is not None:
        parameter.is_distributed = True
        parameter.split_axis = dim


class ColumnParallelLinear(Linear):
    """Linear whose out features `mp` splits: x [..., in] -> [..., out].

    weight [in, out], bias [out] (zeros; only when has_bias is true: None means none). gather_output: the result is
    whole on every device of the `mp` group; else it stays split along its last dim, as RowParallelLinear takes it.
    fuse_matmul_bias changes nothing: product and bias are one op here. mp_group: None, or the group of the `mp` axis.
    Raises PlacementError for another group; when a plan places it, for out features that mp does not divide.

    >>> ColumnParallelLinear(3, 8, has_bias=True, gather_output=False).weight.shape
    paddle.Size([3, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool | None = None,
        gather_output: bool = True,
        fuse_matmul_bias: bool = False,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        check_group(type(self).__name__, mp_group)
        bias_attr = None if has_bias else False
        super().__init__(in_features, out_features, weight_attr, bias_attr, name, dims=("embed", "inner"))
        self.gather_output = gather_output
        mark_split(self.weight, 1)
        mark_split(self.bias, 0)
        settle(self)

    def forward(self, input: Any) -> Any:
        return constrain_dim(super().forward(input), -1, None if self.gather_output else "inner")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gather_output={self.gather_output}"


class RowParallelLinear(Linear):
    """Linear whose in features `mp` splits: x [..., in] -> [..., out], whole on every device of the `mp` group.

    weight [in, out]; the bias [out] is whole and added once, after the sum over `mp`. input_is_parallel says that x is
    split along its last dim already; a whole one is split first, so the result is the same. fuse_matmul_bias and
    mp_group: as in ColumnParallelLinear. Raises as it does, for in features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool = True,
        input_is_parallel: bool = False,
        fuse_matmul_bias: bool = False,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        check_group(type(self).__name__, mp_group)
        bias_attr = None if has_bias else False
        super().__init__(in_features, out_features, weight_attr, bias_attr, name, dims=("inner", "embed"))
        self.input_is_parallel = input_is_parallel
        mark_split(self.weight, 0)
        settle(self)

    def forward(self, input: Any) -> Any:
        return constrain_dim(super().forward(constrain_dim(input, -1, "inner")), -1, None)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, input_is_parallel={self.input_is_parallel}"


class VocabParallelEmbedding(Embedding):
    """Embedding whose rows `mp` splits: ids [...] -> [..., embedding_dim], whole on every device of the `mp` group.

    Each device looks up the ids whose rows it holds, and the results are summed; no device gathers the table.
    Raises PlacementError for an mp_group off the `mp` axis; when a plan places it, for a number of rows that mp does
    not divide, with the nearest that it does (models.parts.vocab.padded_vocab_size gives one for every mesh).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        weight_attr: Any = None,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        check_group(type(self).__name__, mp_group)
        super().__init__(num_embeddings, embedding_dim, weight_attr=weight_attr, name=name, dims=("vocab", "embed"))
        mark_split(self.weight, 0)
        settle(self)

    def forward(self, x: Any) -> Any:
        # asked for a part of the sum at once (a sequence split next), the partitioner would gather the table instead
        return whole_over_mp(super().forward(x))


class ParallelCrossEntropy(Layer):
    """Softmax cross-entropy of each element over classes that `mp` splits: [*b, C], label [*b] or [*b, 1] -> [*b, 1].

    Nothing is averaged; a label equal to ignore_index gives 0. Only maxima and sums over the classes pass between
    devices, never the logits. Raises IndexError for a label out of range, PlacementError for an mp_group off the `mp`
    axis.

    >>> from polyreme.eager.tensor import to_tensor
    >>> ParallelCrossEntropy()(to_tensor([[0.0, 0.0]]), to_tensor([1])).shape
    paddle.Size([1, 1])
    """

    def __init__(self, mp_group: Any = None, name: str | None = None, ignore_index: int = -100) -> None:
        check_group(type(self).__name__, mp_group)
        super().__init__(name)
        self.ignore_index = ignore_index

    def forward(self, input: Any, label: Any) -> Any:
        if len(label.shape) == len(input.shape) - 1:
            label = label.unsqueeze(-1)
        logits = constrain_dim(input, -1, "vocab")
        return F.cross_entropy(logits, label, ignore_index=self.ignore_index, reduction="none")

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}"
