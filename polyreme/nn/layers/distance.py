"""Distances between two Tensors."""

from __future__ import annotations

from polyreme.core.alias import Alias
from polyreme.core.spelling import takes_second_names
from polyreme.nn import functional as F
from polyreme.nn.layers.functional_layer import FunctionalLayer


class CosineSimilarity(FunctionalLayer):
    """x1 . x2 / max(|x1| |x2|, eps) along axis."""

    _function = staticmethod(F.cosine_similarity)
    _attribute_prefix = "_"
    dim: Alias[int] = Alias("_axis")

    def __init__(self, axis: int = 1, eps: float = 1e-8) -> None:
        super().__init__(None, axis=axis, eps=eps)


class PairwiseDistance(FunctionalLayer):
    """p-norm of x - y + epsilon over the last dim; keepdim leaves that dim with size 1."""

    _function = staticmethod(F.pairwise_distance)
    eps: Alias[float] = Alias("epsilon")
    norm: Alias[float] = Alias("p")

    @takes_second_names
    def __init__(self, p: float = 2.0, epsilon: float = 1e-6, keepdim: bool = False, name: str | None = None) -> None:
        super().__init__(name, p=p, epsilon=epsilon, keepdim=keepdim)
