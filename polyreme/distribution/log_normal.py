"""LogNormal: exp of a normal draw."""

from __future__ import annotations

from typing import Any

from polyreme.distribution.elementwise_transforms import ExpTransform
from polyreme.distribution.kl import kl_divergence, register_kl
from polyreme.distribution.location_scale import Normal
from polyreme.distribution.transform import TransformedDistribution
from polyreme.eager.tensor import Tensor
from polyreme.ops.math import exp, expm1, square


class LogNormal(TransformedDistribution):
    """The distribution of exp of a normal draw of mean loc and standard deviation scale > 0."""

    loc: Tensor
    scale: Tensor

    def __init__(self, loc: Any, scale: Any) -> None:
        self._normal = Normal(loc, scale)
        self.loc, self.scale = self._normal.loc, self._normal.scale
        super().__init__(self._normal, [ExpTransform()])

    @property
    def mean(self) -> Tensor:
        return exp(self.loc + 0.5 * square(self.scale))

    @property
    def variance(self) -> Tensor:
        return expm1(square(self.scale)) * exp(2 * self.loc + square(self.scale))

    def entropy(self) -> Tensor:
        """loc + log(2 pi e scale^2) / 2."""
        return self._normal.entropy() + self.loc


@register_kl(LogNormal, LogNormal)
def _log_normal(p: LogNormal, q: LogNormal) -> Tensor:
    """The same as between the normal distributions: a one-to-one transform changes no divergence."""
    return kl_divergence(p._normal, q._normal)
