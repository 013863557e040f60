"""What random variables are, as transforms written for PaddlePaddle say of what goes in and comes out."""

from __future__ import annotations

from typing import Any


class RandomVariable:
    """Values of one kind. event_rank: dims of one event."""

    def __init__(self, is_discrete: bool = False, event_rank: int = 0, constraint: Any = None) -> None:
        self.is_discrete, self.event_rank = is_discrete, event_rank
        self._constraint = constraint


class Real(RandomVariable):
    """Any numbers."""

    def __init__(self, event_rank: int = 0) -> None:
        super().__init__(False, event_rank, lambda value: value == value)

    def constraint(self, value: Any) -> Any:
        """Where value is one."""
        return self._constraint(value)


class Positive(Real):
    """Numbers above 0."""

    def __init__(self, event_rank: int = 0) -> None:
        super().__init__(event_rank)
        self._constraint = lambda value: value > 0


class IndependentValues(RandomVariable):
    """A base's values with more dims that belong to one event."""

    def __init__(self, base: Any, reinterpreted_batch_rank: int) -> None:
        super().__init__(base.is_discrete, base.event_rank + reinterpreted_batch_rank)


real, positive = Real(), Positive()
