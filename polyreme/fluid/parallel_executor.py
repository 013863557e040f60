"""ParallelExecutor: a Program's data-parallel runs, with the scope and the places it was made for."""

from __future__ import annotations

from typing import Any

from polyreme.core.devices.place import CPUPlace, CUDAPlace
from polyreme.errors import ConfigError
from polyreme.fluid.executor import Executor
from polyreme.program.current import default_main_program
from polyreme.program.program import Program
from polyreme.program.scope import Scope, global_scope
from polyreme.static.compiled import BuildStrategy, CompiledProgram, ExecutionStrategy


class ParallelExecutor:
    """Runs a Program (the default main one if None) with its batch split over all GPUs, or over CPU_NUM processors.

    share_vars_from: another ParallelExecutor, which has run and whose scope this one uses. The rest is as in
    CompiledProgram.with_data_parallel. Raises ConfigError for num_trainers or trainer_id: several processes train with
    fleet.
    """

    def __init__(
        self,
        use_cuda: bool,
        loss_name: str | None = None,
        main_program: Program | None = None,
        share_vars_from: ParallelExecutor | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        build_strategy: BuildStrategy | None = None,
        num_trainers: int = 1,
        trainer_id: int = 0,
        scope: Scope | None = None,
    ) -> None:
        if (num_trainers, trainer_id) != (1, 0):
            raise ConfigError(
                f"ParallelExecutor: num_trainers={num_trainers}, trainer_id={trainer_id} cannot be honoured; several "
                "processes train with fleet"
            )
        if share_vars_from is not None and not isinstance(share_vars_from, ParallelExecutor):
            raise TypeError(f"share_vars_from is a ParallelExecutor, got {type(share_vars_from).__name__}")
        self._scope = global_scope() if scope is None else scope
        self._executor = Executor(CUDAPlace(0) if use_cuda else CPUPlace())
        shared = None if share_vars_from is None else share_vars_from._compiled
        program = default_main_program() if main_program is None else main_program
        self._compiled = CompiledProgram(program, build_strategy).with_data_parallel(
            loss_name, exec_strategy=exec_strategy, share_vars_from=shared
        )

    def run(self, fetch_list: Any, feed: Any = None, feed_dict: Any = None, return_numpy: bool = True) -> list[Any]:
        """Run once: see CompiledProgram.with_data_parallel for feed and for what is returned.

        feed_dict: an old name of feed; ConfigError if both are given.
        """
        if feed is not None and feed_dict is not None:
            raise ConfigError("ParallelExecutor.run: feed and feed_dict are one thing by two names; give one")
        return self._executor.run(
            self._compiled,
            feed_dict if feed is None else feed,
            fetch_list,
            scope=self._scope,
            return_numpy=return_numpy,
        )

    @property
    def device_count(self) -> int:
        """How many devices a batch is split over."""
        return len(self._compiled.devices(self._executor.place))

    def drop_local_exe_scopes(self) -> None:
        """Nothing to do: what a run needs is freed at its end."""


__all__ = ["ParallelExecutor"]
