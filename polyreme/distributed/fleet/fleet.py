"""Fleet: the hybrid-parallel job of this program; `fleet` is the one there is."""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax

from polyreme.distributed.communication.group import num_ranks, this_rank
from polyreme.distributed.fleet.base.distributed_strategy import DistributedStrategy
from polyreme.distributed.fleet.base.job import Job, resolve
from polyreme.distributed.fleet.base.role_maker import PaddleCloudRoleMaker, RoleMakerBase
from polyreme.distributed.fleet.base.topology import CommunicateTopology, HybridCommunicateGroup, topology_of
from polyreme.distributed.fleet.base.util_factory import UtilBase
from polyreme.distributed.parallel import init_parallel_env
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.tensor_parallel.random_streams import get_rng_state_tracker, start_stream
from polyreme.errors import ConfigError, NotReadyError
from polyreme.mesh import DEFAULT_SCHEDULE, Plan

logger = logging.getLogger("polyreme.distributed.fleet")


def _refuse(name: str, instead: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"fleet.{name}: {instead}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raises ConfigError: {instead}."
    return refuse


_NO_SERVER = "there is no parameter server; train collectively, with fleet.init(is_collective=True, strategy=...)"
_NO_PROGRAM = "belongs to static programs; save a model with polyreme.save(model.state_dict(), path) or jit.save"


class Fleet:
    """The state that fleet.init sets up: the strategy, the Plan it makes, the topology and its groups."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._job: Job | None = None
        self._strategy = DistributedStrategy()
        self._init_strategy: DistributedStrategy | Plan = self._strategy
        self._group: HybridCommunicateGroup | None = None
        self._role_maker: RoleMakerBase = PaddleCloudRoleMaker(is_collective=True)
        self._util = UtilBase(self._role_maker)
        self._seeds = False
        # what distributed_model and distributed_optimizer made, for whichever comes second
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def init(
        self,
        role_maker: RoleMakerBase | None = None,
        is_collective: bool = False,
        strategy: DistributedStrategy | Plan | None = None,
        log_level: int | str = "INFO",
    ) -> Fleet:
        """Join the processes and lay the devices out on a mesh, as a strategy (or a Plan) says; returns the Fleet.

        Training is collective whatever is_collective says, as there are no servers. Without a strategy all devices are
        data parallel. A second call changes nothing and warns.

        Raises ConfigError for a strategy that cannot be honoured and for the role of a parameter server,
        PlacementError, with the nearest degrees that fit, for a mesh of another number of devices.
        """
        _set_log_level(log_level)
        if self._job is not None:
            warnings.warn(
                f"fleet.init was called before; the mesh stays {self._job.plan.mesh}. Call fleet.reset() first to "
                "begin another job",
                stacklevel=3,
            )
            return self
        role = role_maker if role_maker is not None else PaddleCloudRoleMaker(is_collective=is_collective)
        _check_role(role)
        init_parallel_env()
        given = copy.deepcopy(DistributedStrategy() if strategy is None else strategy)
        job, described = _job_of(given, jax.device_count())
        topology = topology_of(job.plan.mesh, described.hybrid_parallel_order)
        self._group = HybridCommunicateGroup(topology)
        self._job, self._strategy, self._init_strategy, self._role_maker = job, described, given, role
        self._util = UtilBase(role)
        self._seeds = start_stream(job.seed)
        logger.info("mesh %s of %d devices, %d processes", job.plan.mesh, jax.device_count(), num_ranks())
        return self

    def reset(self) -> None:
        """Forget the job: what is made from now on lives on one device, and fleet.init may be called again."""
        if self._job is not None:
            clear_plan()
        if self._seeds:
            get_rng_state_tracker().reset()
        self._forget()

    # what there is

    @property
    def job(self) -> Job:
        """The strategy, resolved for the devices; NotReadyError before fleet.init."""
        if self._job is None:
            raise NotReadyError("fleet is not ready; call fleet.init(is_collective=True, strategy=...) first")
        return self._job

    @property
    def plan(self) -> Plan:
        """The one Plan that the strategy means; NotReadyError before fleet.init."""
        return self.job.plan

    @property
    def strategy(self) -> DistributedStrategy:
        """The copy of the strategy that fleet.init took; of a Plan, what it says in those words."""
        return self._strategy

    @property
    def init_strategy(self) -> DistributedStrategy | Plan:
        """The copy of what fleet.init took."""
        return self._init_strategy

    def get_hybrid_communicate_group(self) -> HybridCommunicateGroup:
        """The coordinates and groups of this rank on each mesh axis; NotReadyError before fleet.init."""
        _ = self.job
        assert self._group is not None  # they are set together
        return self._group

    def get_hybrid_parallel_topology(self) -> CommunicateTopology:
        """The grid of ranks."""
        return self.get_hybrid_communicate_group().topology()

    @property
    def util(self) -> UtilBase:
        """Small things that workers do together with values on the host."""
        return self._util

    # workers: processes

    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._role_maker.worker_index()

    worker_index = rank

    def world_size(self) -> int:
        """Number of workers."""
        return self._role_maker.worker_num()

    nranks = worker_num = world_size

    def is_first_worker(self) -> bool:
        """True for worker 0."""
        return self._role_maker.is_first_worker()

    def is_worker(self) -> bool:
        """True: every process trains."""
        return self._role_maker.is_worker()

    def node_num(self) -> int:
        """Number of machines: of different hosts among the worker endpoints, one if nobody gave those."""
        hosts = {endpoint.rpartition(":")[0] for endpoint in self._role_maker.worker_endpoints()}
        return len(hosts) or 1

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """host:port of every worker as the launcher gave them, separated by commas in a string."""
        found = self._role_maker.worker_endpoints()
        return ",".join(found) if to_string else found

    def barrier_worker(self) -> None:
        """Wait until every worker is here."""
        self._util.barrier()

    def init_worker(self, scopes: Any = None) -> None:
        """Does nothing: a worker is ready once fleet.init returns."""

    def stop_worker(self) -> None:
        """Does nothing: a worker ends with its program."""

    # servers: none

    def is_server(self) -> bool:
        """False."""
        return False

    def is_coordinator(self) -> bool:
        """False."""
        return False

    def server_num(self) -> int:
        """0."""
        return 0

    def server_index(self) -> int:
        """0, as there is none."""
        return 0

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """None there."""
        return "" if to_string else []

    init_server: Callable[..., Any] = _refuse("init_server", _NO_SERVER)
    run_server: Callable[..., Any] = _refuse("run_server", _NO_SERVER)
    init_coordinator: Callable[..., Any] = _refuse("init_coordinator", _NO_SERVER)
    shrink: Callable[..., Any] = _refuse("shrink", _NO_SERVER)
    save_inference_model: Callable[..., Any] = _refuse("save_inference_model", _NO_PROGRAM)
    save_persistables: Callable[..., Any] = _refuse("save_persistables", _NO_PROGRAM)


def _set_log_level(level: Any) -> None:
    try:
        logger.setLevel(level if isinstance(level, int) else level.upper())
    except (ValueError, AttributeError):
        raise ConfigError(f"fleet.init: log_level={level!r}; give DEBUG, INFO, WARNING, ERROR or a number") from None


def _check_role(role: Any) -> None:
    if not isinstance(role, RoleMakerBase):
        raise TypeError(f"fleet.init: role_maker is a PaddleCloudRoleMaker or another role, got {type(role).__name__}")
    if not role.is_worker() or role.server_endpoints():
        raise ConfigError(f"fleet.init: the role ({role.to_string()}) is of a parameter-server job: {_NO_SERVER}")
    if (role.worker_index(), role.worker_num()) != (this_rank(), num_ranks()):
        raise ConfigError(
            f"fleet.init: the role says worker {role.worker_index()} of {role.worker_num()}, this process is "
            f"{this_rank()} of {num_ranks()}; start the workers with the launcher, which sets both"
        )


def _job_of(strategy: Any, num_devices: int) -> tuple[Job, DistributedStrategy]:
    if isinstance(strategy, Plan):
        return resolve(strategy, num_devices), _strategy_of(strategy)
    if not isinstance(strategy, DistributedStrategy):
        raise TypeError(f"fleet.init: strategy is a DistributedStrategy or a Plan, got {type(strategy).__name__}")
    return resolve(strategy, num_devices), strategy


def _strategy_of(plan: Plan) -> DistributedStrategy:
    """The degrees, order and microbatches of a plan as a strategy, for code that reads strategies."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {
        **{f"{axis}_degree": degree for axis, degree in plan.mesh.degrees.items()},
        "order": [*plan.mesh.order],
    }
    strategy.pipeline_configs = {
        "accumulate_steps": plan.num_microbatches,
        "schedule_mode": plan.schedule or DEFAULT_SCHEDULE,
    }
    strategy.recompute = plan.recompute == "full"
    return strategy


fleet: Fleet = Fleet()
