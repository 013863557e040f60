"""fluid.incubate.fleet.collective: `fleet`, its strategy and its optimizer, for Programs.

One worker trains a Program as Executor does. Several train dygraph code with fluid.dygraph.DataParallel, or with
polyreme.distributed.fleet: a Program's gradients do not go from process to process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyreme.distributed.fleet.base.role_maker import RoleMakerBase
from polyreme.errors import ConfigError, NotReadyError
from polyreme.fluid import io
from polyreme.fluid.compiler import BuildStrategy, CompiledProgram, ExecutionStrategy
from polyreme.fluid.incubate.fleet.base.fleet_base import DistributedOptimizer, Fleet
from polyreme.fluid.incubate.fleet.base.role_maker import PaddleCloudRoleMaker
from polyreme.fluid.wrapping_optimizers import RecomputeOptimizer
from polyreme.program.current import default_startup_program
from polyreme.program.program import Program


class LambConfig:
    """Settings of 1.7's LAMB of a fleet, of which it has none; use fluid.optimizer.LambOptimizer."""


class DistFCConfig:
    """Settings of 1.7's layer over workers, which DistributedStrategy.check refuses with use_dist_fc."""


class DistributedStrategy(BuildStrategy):
    """A BuildStrategy, and how fleet trains: forward_recompute with recompute_checkpoints is RecomputeOptimizer.

    mode, collective_mode, nccl_comm_num and exec_strategy change nothing for one worker. Raises ConfigError where it
    is used with use_local_sgd, use_dist_fc or use_amp.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(
            use_local_sgd=False, use_dist_fc=False, dist_fc_config=None, use_amp=False, amp_loss_scaling=2.0**15,
            mode="nccl2", collective_mode=None, nccl_comm_num=1, forward_recompute=False, recompute_checkpoints=[],
            exec_strategy=ExecutionStrategy(),
        )  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def check(self) -> None:
        """Raise ConfigError for what cannot be honoured."""
        instead = {
            "use_local_sgd": "use polyreme.distributed.fleet",
            "use_dist_fc": "use a layer of polyreme.distributed.fleet.meta_parallel",
            "use_amp": "wrap the optimizer in polyreme.static.amp.decorate",
        }
        for name, remedy in instead.items():
            if self.__dict__[name]:
                raise ConfigError(f"DistributedStrategy.{name}=True cannot be honoured here; {remedy}")


class Collective(Fleet):
    """The job of a script: init, distributed_optimizer(...).minimize(loss), then run main_program."""

    def __init__(self) -> None:
        super().__init__()
        self._program: Program | None = None
        self._compiled: Any = None

    def init(self, role_maker: RoleMakerBase | None = None) -> Collective:  # type: ignore[override]  (1.7's parameters)
        """Join the processes that the launcher started. Raises ConfigError for the role of a parameter server."""
        super().init(role_maker if role_maker is not None else PaddleCloudRoleMaker(is_collective=True))
        return self

    @property
    def main_program(self) -> Any:
        """What Executor.run is given; NotReadyError before minimize."""
        if self._compiled is None:
            raise NotReadyError("fleet.main_program: call fleet.distributed_optimizer(...).minimize(loss) first")
        return self._compiled

    @property
    def startup_program(self) -> Program:
        """The default startup Program."""
        return default_startup_program()

    def run_worker(self, main_programs: Any = None, scopes: Any = None) -> None:
        """Does nothing: Executor.run runs the Program."""

    def distributed_optimizer(self, optimizer: Any, strategy: DistributedStrategy | None = None) -> CollectiveOptimizer:
        """optimizer, whose minimize makes main_program. Raises ConfigError for what strategy cannot have."""
        return CollectiveOptimizer(optimizer, DistributedStrategy() if strategy is None else strategy, self)

    def take(self, program: Program, strategy: DistributedStrategy) -> None:
        """Make main_program of a Program that trains."""
        self._program, self._compiled = program, CompiledProgram(program, build_strategy=strategy)

    def save_inference_model(
        self, executor: Any, dirname: str, feeded_var_names: Any = None, target_vars: Any = None,
        main_program: Any = None, export_for_deployment: bool = True,
    ) -> None:  # fmt: skip
        """fluid.io.save_inference_model, by the first worker."""
        if self.is_first_worker():
            io.save_inference_model(
                dirname, feeded_var_names, target_vars, executor, main_program or self._program, None, None,
                export_for_deployment,
            )  # fmt: skip

    def save_persistables(
        self, executor: Any, dirname: str, main_program: Any = None, filename: str | None = None
    ) -> None:
        """fluid.io.save_persistables, by the first worker."""
        if self.is_first_worker():
            io.save_persistables(executor, dirname, main_program or self._program, filename)


class CollectiveOpBasedOptimizer(DistributedOptimizer):
    """A DistributedOptimizer with a DistributedStrategy. Raises TypeError for another strategy."""

    def __init__(self, optimizer: Any, strategy: DistributedStrategy | None = None) -> None:
        chosen = DistributedStrategy() if strategy is None else strategy
        if not isinstance(chosen, DistributedStrategy):
            raise TypeError(f"{type(self).__name__}: strategy is a DistributedStrategy, got {type(chosen).__name__}")
        chosen.check()
        super().__init__(optimizer, chosen)


class CollectiveOptimizer(CollectiveOpBasedOptimizer):
    """An optimizer of a fleet: its minimize makes the fleet's main_program."""

    def __init__(
        self, optimizer: Any, strategy: DistributedStrategy | None = None, job: Collective | None = None
    ) -> None:
        super().__init__(optimizer, strategy)
        self._job = fleet if job is None else job
        chosen = self._strategy
        if chosen.__dict__["forward_recompute"]:
            self._optimizer = RecomputeOptimizer(optimizer)
            self._optimizer._set_checkpoints(chosen.__dict__["recompute_checkpoints"])

    def minimize(
        self, loss: Any, startup_program: Program | None = None, parameter_list: Any = None, no_grad_set: Any = None
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        """The optimizer's. Raises ConfigError where fleet has several workers, NotReadyError before fleet.init."""
        _ = self._job.job
        if self._job.worker_num() > 1:
            raise ConfigError(
                f"fleet: {self._job.worker_num()} workers cannot train one Program; give each the dygraph code with "
                "fluid.dygraph.DataParallel, or use polyreme.distributed.fleet"
            )
        recorded = self._optimizer.minimize(loss, startup_program, parameter_list, no_grad_set)
        self._job.take(loss.block.program, self._strategy)
        return recorded


fleet = Collective()

__all__ = [
    "Collective", "CollectiveOpBasedOptimizer", "CollectiveOptimizer", "DistFCConfig", "DistributedStrategy",
    "LambConfig", "fleet",
]  # fmt: skip
