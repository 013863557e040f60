"""HybridParallelOptimizer: an optimizer of a hybrid-parallel job.

Gradients are global, the state is laid out by the plan and clipping sees global norms, all in the optimizer
itself; what is added here is gradient merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyreme.distributed.fleet.base.distributed_strategy import DistributedStrategy
from polyreme.distributed.fleet.base.job import Job, resolve
from polyreme.distributed.fleet.gradient_merge import COUNT, GradientMerge, split
from polyreme.eager.tensor import Tensor
from polyreme.errors import CheckpointError, ConfigError
from polyreme.optimizer import Optimizer


class HybridParallelOptimizer:
    """An optimizer under a strategy: everything it has, and `step` merges gradients if the strategy says so.

    With merge, clear_grad between the calls of step() is the caller's, as without; sums are kept apart from `.grad`.
    Raises TypeError for what is no Optimizer.
    """

    def __init__(self, optimizer: Optimizer, hcg: Any = None, strategy: Any = None, *, job: Job | None = None) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"distributed_optimizer takes an Optimizer, got {type(optimizer).__name__}")
        if job is None:
            job = Job() if hcg is None else resolve(strategy or DistributedStrategy(), hcg.topology().world_size())
        self._inner_opt = optimizer
        self._hcg = hcg
        merges = job.merge_steps > 1
        self._merge = GradientMerge(optimizer, job.merge_steps, job.merge_average) if merges else None

    def __getattr__(self, name: str) -> Any:
        # __dict__: copying asks for attributes before there are any
        inner = self.__dict__.get("_inner_opt")
        if inner is None:
            raise AttributeError(f"HybridParallelOptimizer has no attribute {name!r}")
        return getattr(inner, name)

    @property
    def inner_opt(self) -> Optimizer:
        """The optimizer itself."""
        return self._inner_opt

    @property
    def merges(self) -> bool:
        """True if several calls of step() make one update."""
        return self._merge is not None

    def step(self, *, skip: Tensor | None = None) -> None:
        """Update the parameters, or add up their gradients until it is time to.

        skip: a 0-D bool Tensor; where it is True nothing changes.
        """
        if self._merge is None:
            self._inner_opt.step(skip=skip)
        else:
            self._merge.step(skip)

    def minimize(
        self, loss: Tensor, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None
    ) -> tuple[None, list[tuple[Any, Any]]]:
        """As the optimizer's; with gradient merge, of all parameters only."""
        if self._merge is None:
            return self._inner_opt.minimize(loss, startup_program, parameters, no_grad_set)
        if startup_program is not None or parameters is not None or no_grad_set is not None:
            raise ConfigError("minimize: gradient merge updates all parameters; give the loss alone")
        if all(p._grad is None for p in self._inner_opt._parameters):
            loss.backward()
        self.step()
        return None, [(p, p.grad) for p in self._inner_opt._parameters if p._grad is not None]

    def apply_gradients(self, params_grads: Any) -> None:
        """As the optimizer's; ConfigError with gradient merge, which takes gradients from backward()."""
        if self._merge is not None:
            raise ConfigError("apply_gradients passes gradient merge by; set .grad and call step()")
        self._inner_opt.apply_gradients(params_grads)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, and the gradients merged so far."""
        return {**self._inner_opt.state_dict(), **(self._merge.state_dict() if self._merge else {})}

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state_dict, of a job with or without gradient merge.

        Raises CheckpointError for gradients merged half way where nothing is merged.
        """
        merged, others = split(self._inner_opt, state_dict)
        count = int(np.asarray(merged.get(COUNT, 0)))
        if self._merge is None and count:
            raise CheckpointError(
                f"the state_dict holds gradients merged over {count} steps, and this optimizer merges none; set "
                "strategy.gradient_merge, or save right after an update"
            )
        self._inner_opt.set_state_dict(others)
        if self._merge is not None:
            self._merge.set_state_dict(merged)

    set_dict = set_state_dict
