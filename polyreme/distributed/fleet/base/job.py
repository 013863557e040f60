"""Job: what a DistributedStrategy says, resolved for a number of devices: one Plan, and how the loop around it runs.

Every HONOURED field of strategy_fields.py is read here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyreme.distributed.fleet.base.distributed_strategy import DistributedStrategy
from polyreme.distributed.fleet.base.strategy_fields import FIELDS
from polyreme.distributed.settings import REFUSED, walk
from polyreme.errors import ConfigError, did_you_mean
from polyreme.mesh import SCHEDULES, MeshShape, Plan, default_schedule
from polyreme.training import FULL_PRECISION, MixedPrecision

_SCALER = (
    "init_loss_scaling",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_ratio",
    "decr_ratio",
    "use_dynamic_loss_scaling",
)


@dataclass(frozen=True)
class Job:
    """The training settings of a job: its Plan, rows of a microbatch on one part of the batch (None: as many as there
    are), mixed precision, gradient merge.

    merge_steps: calls of the optimizer's step() that make one update; merge_average: of their gradients' mean, not sum.
    recompute_layers: names of the sublayers that are run again in backward, their inputs kept in host memory meanwhile
    if recompute_offloads; without names, the plan says what is. seed: of all random numbers, None to leave them as they
    are.
    """

    plan: Plan = field(default_factory=Plan)
    micro_batch_size: int | None = None
    amp: MixedPrecision = FULL_PRECISION
    merge_steps: int = 1
    merge_average: bool = True
    recompute_layers: tuple[str, ...] = ()
    recompute_offloads: bool = False
    seed: int | None = None

    @property
    def microbatch_rows(self) -> int | None:
        """Rows of a microbatch over all devices: micro_batch_size x the parts that the batch is split into."""
        return None if self.micro_batch_size is None else self.micro_batch_size * self.plan.batch_ways


def resolve(strategy: DistributedStrategy | Plan, num_devices: int) -> Job:
    """The Job of a strategy, or of a Plan, on this many devices.

    Raises ConfigError for a setting that cannot be honoured, or two that contradict each other; PlacementError, with
    the nearest degrees that fit, for a mesh of another number of devices.

    >>> strategy = DistributedStrategy()
    >>> strategy.hybrid_configs = {"mp_degree": 2, "sharding_degree": 2}
    >>> print(resolve(strategy, 8).plan.mesh)
    dp2 sharding2 mp2
    """
    if isinstance(strategy, Plan):
        strategy.mesh.check_devices(num_devices, here=True)
        if strategy.in_blocks:
            raise ConfigError(
                "fleet.init: plan with compile='blocks', and fleet compiles no steps of models without stages; leave "
                "compile out, or train with distributed.planned_step.PlannedStep"
            )
        return Job(strategy)
    _check_refused(strategy)
    hybrid = strategy.hybrid_configs
    mesh = _mesh(strategy, num_devices)
    _check_moe_sharding(hybrid, mesh.sharding)
    layers = tuple(strategy.recompute_configs["checkpoints"]) if strategy.recompute else ()
    offloads = strategy.recompute and strategy.recompute_configs["enable_offload"]
    plan = Plan.from_degrees(
        dp=mesh.dp,
        pp=mesh.pp,
        sharding=mesh.sharding,
        sep=mesh.sep,
        mp=mesh.mp,
        ep=mesh.ep,
        order=mesh.order,
        sharding_stage=_sharding(strategy, "stage", "stage"),
        sequence_parallel=hybrid["mp_configs"]["sequence_parallel"],
        schedule=_schedule(strategy, mesh.pp),
        num_microbatches=_check_at_least_one(strategy, "pipeline_configs", "accumulate_steps"),
        recompute="full" if strategy.recompute and not layers else "none",
        offload=_offload(strategy, offloads and not layers),
        sep_attention=hybrid["sep_configs"]["attention"],
        sep_order=hybrid["sep_configs"]["order"],
        ulysses_degree=hybrid["sep_configs"]["ulysses_degree"] or None,
    )
    return Job(
        plan=plan,
        micro_batch_size=_check_at_least_one(strategy, "pipeline_configs", "micro_batch_size"),
        amp=_amp(strategy),
        merge_steps=_merge_steps(strategy),
        merge_average=strategy.gradient_merge_configs["avg"],
        recompute_layers=layers,
        recompute_offloads=offloads and bool(layers),
        seed=None if (seed := strategy.tensor_parallel_configs["tensor_init_seed"]) == -1 else seed,
    )


def _check_refused(strategy: DistributedStrategy) -> None:
    fields = dict(walk(FIELDS))
    refused = [f"{n}={v!r}: {fields[n].note}" for n, v in strategy.changed().items() if fields[n].kind == REFUSED]
    if refused:
        raise ConfigError("DistributedStrategy has settings that are not supported: " + "; ".join(refused))


def _mesh(strategy: DistributedStrategy, num_devices: int) -> MeshShape:
    hybrid = strategy.hybrid_configs
    settings = hybrid.given()
    degrees = {axis: hybrid[f"{axis}_degree"] for axis in ("dp", "pp", "sharding", "sep", "mp", "ep")}
    for group, names in _other_degrees(strategy).items():
        for axis, name in names.items():
            value, own = getattr(strategy, group)[name], getattr(strategy, group).given()
            if f"{axis}_degree" not in settings:
                # sharding alone has a degree by default; the others leave an axis as it is
                degrees[axis] = value if name in own or axis == "sharding" else degrees[axis]
            elif name in own and value != degrees[axis]:
                raise _two(f"{group}.{name}", value, f"hybrid_configs.{axis}_degree", degrees[axis])
    for switch, axis in (("pipeline", "pp"), ("tensor_parallel", "mp")):
        if getattr(strategy, switch) and degrees[axis] == 1:
            raise ConfigError(
                f"DistributedStrategy.{switch} is on but {axis}_degree is 1; set hybrid_configs {axis}_degree above 1"
            )
    order = tuple(axis for axis in hybrid["order"] if axis != "cp")
    is_free = degrees["dp"] == -1
    mesh = MeshShape(**{**degrees, "dp": 1 if is_free else degrees["dp"]}, order=order)
    if is_free:
        return mesh.grow("dp", num_devices)
    mesh.check_devices(num_devices, here=True)
    return mesh


def _check_moe_sharding(hybrid: Any, parts: int) -> None:
    degree = hybrid["moe_sharding_degree"]
    if "moe_sharding_degree" in hybrid.given() and degree != parts:
        raise ConfigError(
            f"hybrid_configs.moe_sharding_degree={degree}, but state is split in {parts} parts, that of experts too; "
            "leave it out, or make sharding_degree the same"
        )


def _other_degrees(strategy: DistributedStrategy) -> dict[str, dict[str, str]]:
    """Groups in force that give degrees too: group -> axis -> setting."""
    found: dict[str, dict[str, str]] = {}
    if strategy.sharding:
        found["sharding_configs"] = {axis: f"{axis}_degree" for axis in ("sharding", "mp", "dp", "pp")}
    return {**found, "tensor_parallel_configs": {"mp": "tensor_parallel_degree"}}


def _sharding(strategy: DistributedStrategy, key: str, other: str) -> Any:
    """A setting that hybrid_configs["sharding_configs"] calls `own`, and sharding_configs `other`."""
    group = strategy.hybrid_configs["sharding_configs"]
    value = group[key]
    if not strategy.sharding or other not in strategy.sharding_configs.given():
        return value
    theirs = strategy.sharding_configs[other]
    if key in group.given() and theirs != value:
        raise _two(f"sharding_configs.{other}", theirs, f"hybrid_configs.sharding_configs.{key}", value)
    return theirs


def _schedule(strategy: DistributedStrategy, stages: int) -> str | None:
    name = SCHEDULES.canonical_name(strategy.pipeline_configs["schedule_mode"])
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline_configs.schedule_mode={name!r}{did_you_mean(name, SCHEDULES)}")
    if strategy.hybrid_configs["pp_configs"]["use_dualpipev"] and not SCHEDULES[name].is_v:
        if "schedule_mode" in strategy.pipeline_configs.given():
            raise _two("pp_configs.use_dualpipev", True, "pipeline_configs.schedule_mode", name)
        name = default_schedule(is_v=True)
    return name if stages > 1 else None


def _offload(strategy: DistributedStrategy, activations: bool) -> tuple[str, ...]:
    state = ("state",) if _sharding(strategy, "offload", "optimize_offload") else ()
    return (*state, "act") if activations else state


def _merge_steps(strategy: DistributedStrategy) -> int:
    steps = _check_at_least_one(strategy, "gradient_merge_configs", "k_steps") if strategy.gradient_merge else 1
    if not strategy.sharding:
        return steps
    other = _check_at_least_one(strategy, "sharding_configs", "gradient_merge_acc_step")
    if steps > 1 and other > 1 and steps != other:
        raise _two("sharding_configs.gradient_merge_acc_step", other, "gradient_merge_configs.k_steps", steps)
    return max(steps, other)


def _amp(strategy: DistributedStrategy) -> MixedPrecision:
    if not strategy.amp:
        return FULL_PRECISION
    configs = strategy.amp_configs
    if configs["use_pure_fp16"] and configs["use_pure_bf16"]:
        raise _two("amp_configs.use_pure_fp16", True, "amp_configs.use_pure_bf16", True)
    is_pure = configs["use_pure_fp16"] or configs["use_pure_bf16"]
    return MixedPrecision(
        level="O2" if is_pure else "O1",
        dtype="bfloat16" if configs["use_pure_bf16"] else "float16",
        custom_white_list=tuple(configs["custom_white_list"]),
        custom_black_list=tuple(configs["custom_black_list"]),
        master_weight=not configs["use_optimizer_fp16"],
        master_grad=not configs["use_optimizer_fp16"],
        # bfloat16 has the range of float32: nothing vanishes
        scaler=None if configs["use_pure_bf16"] else {name: configs[name] for name in _SCALER},
    )


def _check_at_least_one(strategy: DistributedStrategy, group: str, name: str) -> int:
    value = getattr(strategy, group)[name]
    if value < 1:
        raise ConfigError(f"{group}.{name}={value}; give a whole number of at least 1")
    return value


def _two(first: str, value: Any, second: str, other: Any) -> ConfigError:
    return ConfigError(f"DistributedStrategy: {first}={value!r} contradicts {second}={other!r}; give one of them")
