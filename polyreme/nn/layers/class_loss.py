"""Loss layers over many classes, with weights of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer
from polyreme.nn.parameter import ParamAttrLike, Parameter
from polyreme.ops.losses.classes import adaptive_log_softmax
from polyreme.ops.search import argmax


class HSigmoidLoss(Layer):
    """-log p(label), p a product of binary choices down a tree of classes: [N, feature_size], [N] -> [N, 1].

    weight [num_classes - 1, feature_size] and bias [num_classes - 1, 1] are those of the inner nodes of a complete
    binary tree; with is_custom they have num_classes rows, and every call gives path_table and path_code.
    """

    weight: Parameter
    bias: Parameter

    def __init__(
        self,
        feature_size: int,
        num_classes: int,
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        is_custom: bool = False,
        is_sparse: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._name, self._weight_attr, self._bias_attr, self._is_sparse = name, weight_attr, bias_attr, is_sparse
        if num_classes < 2 and not is_custom:
            raise ConfigError(f"HSigmoidLoss: num_classes={num_classes}; a tree has at least 2")
        self._feature_size, self._num_classes, self._is_custom = feature_size, num_classes, is_custom
        rows = num_classes if is_custom else num_classes - 1
        self.weight = self.create_parameter([rows, feature_size], weight_attr)
        self.bias = self.create_parameter([rows, 1], bias_attr, is_bias=True)

    def forward(self, input: Any, label: Any, path_table: Any = None, path_code: Any = None) -> Any:
        if self._is_custom != (path_table is not None):
            raise ConfigError(
                f"HSigmoidLoss(is_custom={self._is_custom}) called {'with' if path_table is not None else 'without'} "
                "path_table; give path_table and path_code exactly when is_custom is True"
            )
        return F.hsigmoid_loss(input, label, self._num_classes, self.weight, self.bias, path_table, path_code)

    def extra_repr(self) -> str:
        return f"feature_size={self._feature_size}, num_classes={self._num_classes}"


class AdaptiveLogSoftmaxWithLoss(Layer):
    """log softmax over n_classes, rare ones in clusters with narrower weights; see adaptive_log_softmax_with_loss.

    cutoffs: the first class of each cluster, rising and below n_classes. Cluster i has weights [in_features, d] and [d,
    its size], d = in_features // div_value^(i + 1). Calling it gives (log p(label) [N], loss []).
    """

    is_head_bias: bool
    in_features: int
    n_classes: int
    div_value: float
    cutoffs: list[int]
    shortlist_size: int
    n_clusters: int
    head_size: int
    head_weight: Parameter
    head_bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        cutoffs: Sequence[int],
        weight_attr: ParamAttrLike = None,
        bias_attr: ParamAttrLike = None,
        div_value: float = 4.0,
        head_bias: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._weight_attr, self._bias_attr, self.is_head_bias = weight_attr, bias_attr, head_bias
        edges = [int(c) for c in cutoffs]
        if not edges or sorted(set(edges)) != edges or edges[0] < 1 or edges[-1] >= n_classes:
            raise ConfigError(
                f"AdaptiveLogSoftmaxWithLoss: cutoffs={list(cutoffs)}; give rising numbers from 1 to {n_classes - 1}"
            )
        self.in_features, self.n_classes, self.div_value = in_features, n_classes, div_value
        self.cutoffs = [*edges, n_classes]
        self.shortlist_size, self.n_clusters = edges[0], len(edges)
        width = self.head_size = edges[0] + len(edges)
        self.head_weight = self.create_parameter([in_features, width], weight_attr)
        self.head_bias = self.create_parameter([width], bias_attr, is_bias=True) if head_bias else None
        for i, (low, high) in enumerate(zip(self.cutoffs[:-1], self.cutoffs[1:], strict=True)):
            narrow = int(in_features // div_value ** (i + 1))
            if narrow < 1:
                raise ConfigError(
                    f"AdaptiveLogSoftmaxWithLoss: cluster {i} has {in_features} // {div_value}^{i + 1} = 0 features; "
                    "give a smaller div_value or fewer cutoffs"
                )
            self.add_parameter(f"tail_weight_{i}_0", self.create_parameter([in_features, narrow], weight_attr))
            self.add_parameter(f"tail_weight_{i}_1", self.create_parameter([narrow, high - low], weight_attr))

    @property
    def tail_weights(self) -> list[list[Any]]:
        """The two weights of each cluster."""
        return [[getattr(self, f"tail_weight_{i}_{j}") for j in (0, 1)] for i in range(len(self.cutoffs) - 1)]

    def forward(self, input: Any, label: Any) -> Any:
        return F.adaptive_log_softmax_with_loss(
            input, label, self.head_weight, self.tail_weights, self.cutoffs, self.head_bias
        )

    def log_prob(self, input: Any) -> Any:
        """log p of every class: [N, in_features] -> [N, n_classes]."""
        flat = [w for pair in self.tail_weights for w in pair]
        return adaptive_log_softmax(input, self.head_weight, flat, self.cutoffs, self.head_bias)

    def predict(self, input: Any) -> Any:
        """The likeliest class: [N, in_features] -> [N]."""
        return argmax(self.log_prob(input), -1)
