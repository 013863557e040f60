"""Attributes of PaddlePaddle's Programs that scripts use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from polyreme.core import rng
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import ConfigError
from polyreme.program import stored
from polyreme.program.scope import Scope, global_scope, scope_guard
from polyreme.static.io import set_program_state


class ProgramNames:
    """Attributes of Program."""

    def state_dict(self: Any, mode: str = "all", scope: Scope | None = None) -> dict[str, Tensor]:
        """Values by name in a scope: "param" those that outlive a run, "opt" those of optimizers, "all" both."""
        if mode not in ("all", "param", "opt"):
            raise ConfigError(f"Program.state_dict: mode={mode!r}; give 'all', 'param' or 'opt'")
        chosen = global_scope() if scope is None else scope
        arrays: dict[str, Any] = {}
        if mode != "opt":
            arrays |= stored.values_of(self, chosen, stored.persistables(self))
        if mode != "param":
            arrays |= stored.training_state(self, chosen)[0]
        return {name: to_tensor(array) for name, array in arrays.items()}

    def set_state_dict(self: Any, state_dict: Mapping[str, Any], scope: Scope | None = None) -> None:
        """Give variables values by name, in a scope."""
        with scope_guard(global_scope() if scope is None else scope):
            set_program_state(self, dict(state_dict))

    def global_seed(self: Any, seed: int = 0) -> None:
        """paddle.seed, and the seed of this Program's random operations."""
        rng.seed(seed)
        self.random_seed = seed

    def _sync_with_cpp(self) -> None:
        """Nothing: a Program is of Python alone."""

    @contextmanager
    def _optimized_guard(self, param_and_grads: Any) -> Iterator[None]:
        yield

    @contextmanager
    def _lr_schedule_guard(self, is_with_opt: bool = False) -> Iterator[None]:
        yield
