"""Independent: batch dims of a distribution counted as dims of its events."""

from __future__ import annotations

from typing import Any

from polyreme.distribution.distribution import Distribution
from polyreme.distribution.kl import kl_divergence, register_kl
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.ops.reduce import sum as sum_of


class Independent(Distribution):
    """base with its last reinterpreted_batch_rank batch dims counted as event dims: log_prob sums over them.

    >>> from polyreme.distribution import Normal
    >>> both = Independent(Normal([0.0, 0.0], 1.0), 1)
    >>> both.batch_shape, both.event_shape, both.log_prob([1.0, 1.0]).shape
    ((), (2,), paddle.Size([]))
    """

    def __init__(self, base: Distribution, reinterpreted_batch_rank: int) -> None:
        if not isinstance(base, Distribution):
            raise ConfigError(f"Independent: base is a {type(base).__name__}; give a Distribution")
        if not isinstance(reinterpreted_batch_rank, int) or not 0 < reinterpreted_batch_rank <= len(base.batch_shape):
            raise ConfigError(
                f"Independent: reinterpreted_batch_rank={reinterpreted_batch_rank!r}; base has batch_shape "
                f"{base.batch_shape}, give 1 to {len(base.batch_shape)}"
            )
        self._base, self._reinterpreted_batch_rank = base, reinterpreted_batch_rank
        shape = (*base.batch_shape, *base.event_shape)
        cut = len(base.batch_shape) - reinterpreted_batch_rank
        super().__init__(shape[:cut], shape[cut:])

    @property
    def mean(self) -> Tensor:
        return self._base.mean

    @property
    def variance(self) -> Tensor:
        return self._base.variance

    def _sample(self, shape: tuple[int, ...]) -> Tensor:
        return self._base.sample(shape)

    def _rsample(self, shape: tuple[int, ...]) -> Tensor:
        return self._base.rsample(shape)

    def log_prob(self, value: Any) -> Tensor:
        """base's log density, summed over the dims that count as event dims."""
        return sum_rightmost(self._base.log_prob(value), self._reinterpreted_batch_rank)

    def entropy(self) -> Tensor:
        """base's entropy, summed over the dims that count as event dims."""
        return sum_rightmost(self._base.entropy(), self._reinterpreted_batch_rank)


def sum_rightmost(x: Tensor, count: int) -> Tensor:
    """x summed over its last `count` dims."""
    return sum_of(x, list(range(-count, 0))) if count else x


@register_kl(Independent, Independent)
def _independent(p: Independent, q: Independent) -> Tensor:
    if p._reinterpreted_batch_rank != q._reinterpreted_batch_rank:
        raise ConfigError(
            "kl_divergence(Independent, Independent): reinterpreted_batch_rank is "
            f"{p._reinterpreted_batch_rank} and {q._reinterpreted_batch_rank}; give equal ones"
        )
    return sum_rightmost(kl_divergence(p._base, q._base), p._reinterpreted_batch_rank)
