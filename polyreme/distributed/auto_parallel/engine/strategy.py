"""Strategy: settings of auto-parallel training, and what they mean for a job.

strategy_fields.py says what each setting does; `settle` reads every honoured one, and nothing else does.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.distributed.auto_parallel.engine.strategy_fields import FIELDS
from polyreme.distributed.settings import REFUSED, Field, Settings
from polyreme.errors import ConfigError, PlacementError, StrategyError, did_you_mean
from polyreme.mesh import SCHEDULES, Plan, default_schedule
from polyreme.mesh.axes import nearest_divisor
from polyreme.training import FULL_PRECISION, MixedPrecision

_SCALER = (
    "init_loss_scaling",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_ratio",
    "decr_ratio",
    "use_dynamic_loss_scaling",
)
_STRICT = "fused_passes"  # the section of which the public API refuses unknown keys; of others it passes them over
_AUTO_MODES = ("semi", "full")


class StrategySection(Settings):
    """One section of a Strategy, read by attribute or key; values are checked as they are set.

    Setting it from a dict passes unknown keys over with a warning (the public API: silently); fused_passes raises.
    """

    __slots__ = ()

    def assign(self, values: Any) -> None:
        """Set the keys given."""
        if not isinstance(values, Mapping):
            raise StrategyError(
                f"{self._where()} is a section, got {values!r}; give a dict with any of {', '.join(self)}"
            )
        for key, value in values.items():
            if key in self._table or self._name == _STRICT:
                self[key] = value
                continue
            warnings.warn(
                f"{self._where()} has no setting {key!r}, which is passed over{did_you_mean(key, self._table)}",
                stacklevel=3,
            )

    def from_dict(self, config: Mapping[str, Any]) -> None:
        """Set the keys given."""
        self.assign(config)

    def to_dict(self) -> dict[str, Any]:
        """Every setting and its value, sections as dicts."""
        return {key: value.to_dict() if isinstance(value, StrategySection) else value for key, value in self.items()}


class Strategy:
    """Settings of an Engine or a DistModel: sections (`amp`, `sharding`, ...) and plain fields (`auto_mode`, ...).

    config: None, or a dict of any of them; ValueError for anything else. Values are checked as they are set:
    StrategyError (a TypeError) for one of another type. A section counts where its `enable` is True; what cannot be
    honoured is refused when the Strategy is used, by `settle`. docs/auto_parallel.md lists what each setting does.

    >>> strategy = Strategy({"sharding": {"enable": True, "stage": 2}})
    >>> strategy.pipeline.accumulate_steps = 4
    >>> strategy.sharding.stage, strategy.pipeline.enable
    (2, False)
    """

    _settings: StrategySection

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        if config is not None and not isinstance(config, dict):
            raise ConfigError(f"Strategy takes a dict of settings or nothing, got {type(config).__name__}: {config!r}")
        object.__setattr__(self, "_settings", StrategySection("", FIELDS, "Strategy"))
        self._settings.assign(config or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in FIELDS:
            raise AttributeError(f"Strategy has no setting {name!r}{did_you_mean(name, FIELDS)}")
        return self._settings[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._settings[name] = value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *FIELDS})

    def __deepcopy__(self, memo: dict[Any, Any]) -> Strategy:
        copied = Strategy()
        object.__setattr__(copied, "_settings", copy.deepcopy(self._settings, memo))
        return copied

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and self._settings == other._settings

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"Strategy({self.changed()})"

    def get(self, name: str, default: Any = None) -> Any:
        """A setting by name, or the default."""
        return self._settings.get(name, default)

    def from_dict(self, config: Mapping[str, Any]) -> None:
        """Set what a dict gives."""
        self._settings.assign(config)

    def to_dict(self) -> dict[str, Any]:
        """Every setting, sections as dicts."""
        return self._settings.to_dict()

    def given(self) -> dict[str, Any]:
        """The settings that were set, whatever their value."""
        return self._settings.given()

    def changed(self) -> dict[str, Any]:
        """Dotted name -> value of the settings that differ from their defaults."""
        return self._settings.changed()


@dataclass(frozen=True)
class Stages:
    """A pipeline: schedule of mesh.SCHEDULES, stages, chunks a stage holds, the class that is dealt out ("" for any).

    num_microbatches: of a batch; None where microbatch_rows, rows of one on one part of the batch, says it.
    """

    schedule: str
    degree: int
    virtual_stages: int
    segment: str
    num_microbatches: int | None
    microbatch_rows: int | None


@dataclass(frozen=True)
class Settled:
    """The settings that a Strategy stands for: how a job computes, apart from where its tensors lie.

    merge_steps: batches for one update, of their gradients' mean or sum. recompute_layers: names of sublayers to run
    again in backward; without names, what the model does under a plan that says so. sharding_stage: 0 for none.
    sharding_degree: None for all devices that other axes leave. is_planned: the planner chooses the plan.
    """

    precision: MixedPrecision = FULL_PRECISION
    recompute: bool = False
    recompute_layers: tuple[str, ...] = ()
    merge_steps: int = 1
    merge_average: bool = True
    sharding_stage: int = 0
    sharding_degree: int | None = None
    stages: Stages | None = None
    seed: int | None = None
    is_planned: bool = False
    return_numpy: bool = True

    def plan_for(self, num_devices: int) -> Plan:
        """The plan of an unmarked model on this many devices: data parallel, over what stages and sharding leave.

        Raises PlacementError, with the nearest that do, for degrees that do not divide the devices.
        """
        stages = 1 if self.stages is None else self.stages.degree
        left = _divide("pipeline.pp_degree", stages, num_devices)
        sharding = 1
        if self.sharding_stage:
            sharding = left if self.sharding_degree is None else self.sharding_degree
            _divide("sharding.degree", sharding, left)
        return Plan.from_degrees(
            dp=left // sharding, sharding=sharding, pp=stages, sharding_stage=self.sharding_stage or 1, **self.how
        )

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of Plan.from_degrees that are not degrees."""
        fields: dict[str, Any] = {"recompute": "full" if self.recompute and not self.recompute_layers else "none"}
        if self.stages is not None:
            fields["num_microbatches"] = self.stages.num_microbatches or 1
            if self.stages.degree > 1:
                fields |= {"schedule": self.stages.schedule, "virtual_stages": self.stages.virtual_stages}
        return fields


def settle(strategy: Strategy | str | None) -> Settled:
    """The settings that a Strategy stands for; "auto" is short for a Strategy with auto_mode="full", None for the
    defaults.

    Raises ConfigError, naming each setting and what to do instead, for what cannot be honoured; TypeError for another
    thing than a Strategy.
    """
    if isinstance(strategy, str):
        if strategy not in ("auto", *_AUTO_MODES):
            raise ConfigError(f"strategy={strategy!r}; give 'auto', or a Strategy")
        strategy = Strategy({"auto_mode": "semi" if strategy == "semi" else "full"})
    strategy = Strategy() if strategy is None else strategy
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy is an auto_parallel.Strategy or 'auto', got {type(strategy).__name__}")
    _check_refused(strategy)
    is_planned = _choose("auto_mode", strategy.auto_mode, _AUTO_MODES) == "full"
    chosen_twice = [name for name in ("recompute", "sharding", "pipeline") if strategy.get(name).enable]
    if is_planned and chosen_twice:
        raise ConfigError(
            f"Strategy.auto_mode='full' lets the planner choose {' and '.join(chosen_twice)}, and so do you; "
            "switch one of the two off"
        )
    merge = strategy.gradient_merge
    return Settled(
        precision=_precision(strategy.amp),
        recompute=strategy.recompute.enable,
        recompute_layers=tuple(strategy.recompute.checkpoints) if strategy.recompute.enable else (),
        merge_steps=_check_at_least_one("gradient_merge.k_steps", merge.k_steps) if merge.enable else 1,
        merge_average=merge.avg,
        sharding_stage=_choose("sharding.stage", strategy.sharding.stage, (1, 2, 3)) if strategy.sharding.enable else 0,
        sharding_degree=_set_degree(strategy.sharding),
        stages=_stages(strategy.pipeline) if strategy.pipeline.enable else None,
        seed=strategy.seed,
        is_planned=is_planned,
        return_numpy=strategy.return_numpy,
    )


def _check_refused(strategy: Strategy) -> None:
    """A section that is off does not count, and its settings are as good as not there."""
    refused = [f"{name}={value!r}: {note}" for name, value, note in _in_force(strategy)]
    if refused:
        raise ConfigError("Strategy has settings that are not supported: " + "; ".join(refused))


def _in_force(strategy: Strategy) -> Iterator[tuple[str, Any, str]]:
    for name, value in strategy.changed().items():
        entry: Any = FIELDS
        for part in name.split("."):
            entry = entry[part]
        section = strategy.get(name.partition(".")[0])
        is_off = isinstance(section, StrategySection) and section.get("enable") is False
        if isinstance(entry, Field) and entry.kind == REFUSED and not is_off:
            yield name, value, entry.note


def _precision(amp: StrategySection) -> MixedPrecision:
    if not amp.enable:
        return FULL_PRECISION
    level = _choose("amp.level", amp.level.upper(), ("O0", "O1", "O2"))
    dtype = _choose("amp.dtype", amp.dtype, ("float16", "bfloat16"))
    return MixedPrecision(
        level,
        dtype,
        custom_white_list=tuple(amp.custom_white_list),
        custom_black_list=tuple(amp.custom_black_list),
        use_promote=amp.use_promote,
        master_grad=amp.use_master_grad,
        # bfloat16 has the range of float32: nothing vanishes
        scaler=None if dtype == "bfloat16" else {name: amp[name] for name in _SCALER},
    )


def _stages(pipeline: StrategySection) -> Stages:
    set_fields = pipeline.given()
    degree = _check_at_least_one("pipeline.pp_degree", pipeline.pp_degree)
    virtual = _check_at_least_one("pipeline.vpp_degree", pipeline.vpp_degree)
    schedule = pipeline.schedule_mode if "schedule_mode" in set_fields else default_schedule(virtual)
    _choose("pipeline.schedule_mode", schedule, tuple(SCHEDULES))
    is_v = SCHEDULES[schedule].is_v
    by_rows = "accumulate_steps" not in set_fields and "micro_batch_size" in set_fields
    return Stages(
        schedule,
        degree,
        SCHEDULES[schedule].least_virtual if is_v and "vpp_degree" not in set_fields else virtual,
        pipeline.vpp_seg_method,
        None if by_rows else _check_at_least_one("pipeline.accumulate_steps", pipeline.accumulate_steps),
        _check_at_least_one("pipeline.micro_batch_size", pipeline.micro_batch_size) if by_rows else None,
    )


def _set_degree(sharding: StrategySection) -> int | None:
    """The degree, None where it was left at its default, which fits one number of devices alone."""
    if not sharding.enable or "degree" not in sharding.given():
        return None
    return _check_at_least_one("sharding.degree", sharding.degree)


def _divide(name: str, degree: int, devices: int) -> int:
    if devices % degree:
        raise PlacementError(
            f"Strategy.{name}={degree} does not divide {devices} devices; make it {nearest_divisor(devices, degree)}"
        )
    return devices // degree


def _choose(name: str, value: Any, choices: tuple) -> Any:
    if value not in choices:
        raise ConfigError(f"Strategy.{name}={value!r}; give one of {', '.join(map(repr, choices))}")
    return value


def _check_at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"Strategy.{name}={value}; give a whole number of at least 1")
    return value
