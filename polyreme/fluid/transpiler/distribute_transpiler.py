"""DistributeTranspiler: what prepared Programs for several machines."""

from __future__ import annotations

from typing import Any

from polyreme.errors import ConfigError
from polyreme.program.current import default_main_program
from polyreme.program.program import Program


class DistributeTranspilerConfig:
    """Settings of a DistributeTranspiler. mode: "nccl2" or "collective" for trainers alone; "pserver" is refused there.

    The other settings say how gradients travel, which XLA decides, or belong to parameter servers.
    """

    slice_var_up = True
    split_method = None
    min_block_size = 8192
    enable_dc_asgd = False
    mode = "pserver"
    print_log = False
    wait_port = True
    runtime_split_send_recv = False
    sync_mode = True
    half_async = False
    completely_not_async = False
    geo_sgd_mode = False
    geo_sgd_need_push_nums = 100
    nccl_comm_num = 1
    use_hierarchical_allreduce = False
    hierarchical_allreduce_inter_nranks = 0
    collective_mode: str | None = None


class DistributeTranspiler:
    """Prepares a Program for trainers that reduce gradients among themselves.

    With one trainer, on as many devices as a CompiledProgram is given, there is nothing to change, and
    get_trainer_program() is the Program. Raises ConfigError for several trainers and for parameter servers: processes
    train with polyreme.distributed.fleet.
    """

    def __init__(self, config: DistributeTranspilerConfig | None = None) -> None:
        self.config = DistributeTranspilerConfig() if config is None else config
        self._program: Program | None = None

    def transpile(
        self, trainer_id: int, program: Program | None = None, pservers: str = "127.0.0.1:6174", trainers: Any = 1,
        sync_mode: bool = True, startup_program: Program | None = None, current_endpoint: str = "127.0.0.1:6174",
    ) -> None:  # fmt: skip
        """Take a Program, the default main one if None. trainers: how many, or their endpoints, joined by commas."""
        mode = self.config.mode
        if mode not in ("nccl2", "collective"):
            raise ConfigError(
                f"DistributeTranspiler: mode={mode!r}; there are no parameter servers here: set config.mode = 'nccl2', "
                "or use polyreme.distributed.fleet"
            )
        count = len(trainers.split(",")) if isinstance(trainers, str) else int(trainers)
        if count != 1 or trainer_id != 0:
            raise ConfigError(
                f"DistributeTranspiler: trainer {trainer_id} of {count}; several processes train with "
                "polyreme.distributed.fleet, devices of one with CompiledProgram.with_data_parallel"
            )
        self._program = default_main_program() if program is None else program

    def get_trainer_program(self, wait_port: bool = True) -> Program:
        """The Program that the trainer runs. Raises ConfigError in front of transpile."""
        if self._program is None:
            raise ConfigError("DistributeTranspiler.get_trainer_program: call transpile first")
        return self._program


__all__ = ["DistributeTranspiler", "DistributeTranspilerConfig"]
