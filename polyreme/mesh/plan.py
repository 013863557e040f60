"""Plan: the one value that says how a job runs in parallel. Nothing else turns parallelism on.

The planner returns it, a person writes it in YAML, the log prints it and the checkpoint stores it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

import yaml

from polyreme.errors import ConfigError, PlacementError, did_you_mean
from polyreme.mesh.axes import AXES, MeshShape, check_axis, nearest_multiples
from polyreme.mesh.offload import BUFFERS, Offload, check_settings
from polyreme.mesh.overlap import Overlap
from polyreme.mesh.schedule import Schedule, check_schedule, make_schedule, stage_of_chunk
from polyreme.mesh.schedules import DEFAULT_SCHEDULE, SCHEDULES, WITHOUT_PIPELINE, ScheduleKind
from polyreme.mesh.segment import SEP_ATTENTION, SEP_ORDER, SegmentSettings, SegmentWay
from polyreme.mesh.strategy import (
    Strategy,
    branch_parallel,
    data_parallel,
    expert_parallel,
    join,
    segment_parallel,
    sequence_parallel,
    tensor_parallel,
    zero,
)
from polyreme.yaml_loader import YamlLoader

RECOMPUTE = ("none", "core_attn", "full_attn", "full")
"""What is computed again in the backward pass: nothing, softmax(q k) v, the attention block, or whole layers."""

COMPILE = ("step", "blocks")
"""What is compiled as one program: the whole step, or each part of the model, once for all blocks that are alike."""

EXPERT_DISPATCH = ("auto", "gather", "padded", "ragged", "balanced")
"""How tokens reach experts on other devices: all tokens to all of them, or rows for each choice by an all-to-all, of
equal parts or of just the rows there are (not on CPU), or to whoever has room, so that all compute equally many, with
the weights of hot experts; auto gathers where that moves less."""

EXPERT_ALL_TO_ALL = ("auto", "flat", "two_level")
"""How rows for experts of several axes go: in one all-to-all, or in one within nodes (along the inner axes) and one
between them (along the outermost), which sends fewer and larger messages between nodes; auto takes two where the outer
axes of the experts lead to other processes and the inner do not."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one training or inference job uses its devices.

    mesh and strategy: a value, or what their `parse` and `from_dict` take.
    schedule: one of SCHEDULES when mesh.pp > 1, else None.
    virtual_stages: chunks of the model a stage holds, as many as the schedule takes. chunk_items: how many of the
    model's pipeline items each chunk has, in the order that data flows; as even as may be if left out. stage_devices:
    the kind of each stage's devices, "gpu", "cpu" or a plugin's name, where stages lie on several kinds.
    num_microbatches: parts a batch is cut into, run one after another (through the stages, or to accumulate gradients).
    recompute: one of RECOMPUTE. recompute_share: the part of the model's blocks that recompute, spread evenly over them
    (`recomputes`); the others keep what their backward reads. sep_attention: one of SEP_ATTENTION. sep_order: one of
    SEP_ORDER. ulysses_degree: of "usp", the neighbours along sep that heads are dealt out to; the most that the heads
    allow unless given.
    compile: one of COMPILE, for steps that `PlannedStep` builds (pretraining, fine-tuning, prove); with parameters that
    are brought from elsewhere blocks are programs in any case.
    expert_dispatch: one of EXPERT_DISPATCH. expert_all_to_all: one of EXPERT_ALL_TO_ALL. overlap: an Overlap, or a
    mapping of its fields.
    offload: what goes to the host's memory, or a mapping of that to "host" or "disk" (Offload). offload_path: the
    folder of what goes to disk. offload_ratio: the part of the optimizer's state that goes, in bytes; the first
    parameters' state stays. offload_buffers: buckets on disk that are on their way at once; 1 reads nothing ahead.

    Raises ConfigError for a value out of range and for an axis of degree > 1 that the strategy never uses: its devices
    would all do the same work.
    """

    mesh: MeshShape = field(default_factory=MeshShape)
    strategy: Strategy = field(default_factory=data_parallel)
    schedule: str | None = None
    virtual_stages: int = 1
    chunk_items: tuple[int, ...] = ()
    stage_devices: tuple[str, ...] = ()
    num_microbatches: int = 1
    recompute: str = "none"
    recompute_share: float = 1.0
    offload: Offload = field(default_factory=Offload)
    offload_path: str | None = None
    offload_ratio: float = 1.0
    offload_buffers: int = BUFFERS
    compile: str = "step"
    sep_attention: str = "auto"
    sep_order: str = "auto"
    ulysses_degree: int | None = None
    expert_dispatch: str = "auto"
    expert_all_to_all: str = "auto"
    overlap: Overlap = field(default_factory=Overlap)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", MeshShape.parse(self.mesh))
        if not isinstance(self.strategy, Strategy):
            object.__setattr__(self, "strategy", Strategy.from_dict(self.strategy))
        object.__setattr__(self, "offload", Offload(self.offload))
        check_settings(self.offload, self.offload_path, self.offload_ratio, self.offload_buffers)
        if self.streams and self.mesh.pp > 1:
            kinds = " and ".join(repr(kind) for kind in ("param", "expert") if kind in self.offload)
            raise ConfigError(
                f"offload {kinds} in plan on mesh {self.mesh}: stages of a pipeline hold their parameters; set pp to "
                f"1, or leave {kinds} out"
            )
        _check_choice("recompute", self.recompute, RECOMPUTE)
        _check_share(self.recompute_share, self.recompute)
        _check_choice("compile", self.compile, COMPILE)
        if self.compile == "blocks" and self.mesh.pp > 1:
            raise ConfigError(
                f"compile='blocks' in plan on mesh {self.mesh}: each stage of a pipeline is compiled as a whole, with "
                "all of its blocks; set pp to 1, or leave compile out"
            )
        _check_choice("sep_attention", self.sep_attention, SEP_ATTENTION)
        _check_choice("sep_order", self.sep_order, SEP_ORDER)
        _check_choice("expert_dispatch", self.expert_dispatch, EXPERT_DISPATCH)
        _check_choice("expert_all_to_all", self.expert_all_to_all, EXPERT_ALL_TO_ALL)
        object.__setattr__(self, "overlap", Overlap.of(self.overlap))
        _check_microbatches(self.num_microbatches)
        _check_schedule(self.schedule, self.mesh.pp)
        self._check_virtual_stages()
        self._check_stages()
        self._check_axes_used()
        self.segment.check(self.mesh.sep)
        if self.expert_dispatch != "auto" and not self.expert_axes:
            raise ConfigError(
                f"expert_dispatch={self.expert_dispatch!r} in a plan that splits no experts; set ep, or leave it out"
            )
        if self.overlap.moe > 1 and not self.expert_axes:
            raise ConfigError(
                f"overlap.moe={self.overlap.moe} in a plan that splits no experts, so that nothing is sent; set ep, or "
                "leave it out"
            )
        if self.overlap.mp == "ring" and "mp" not in self._split_over("seq"):
            raise ConfigError(
                "overlap.mp='ring' in a plan whose mp splits no sequence between blocks, so that what goes over mp are "
                "sums of the whole, not parts; set mp above 1 and sequence_parallel, or leave it out"
            )
        has_pieces = any("sharding" in axes for axes in self.strategy.rule("grad").values())
        if self.overlap.sharding == "ring" and (self.mesh.sharding == 1 or not has_pieces):
            raise ConfigError(
                "overlap.sharding='ring' in a plan whose sharding keeps no pieces of gradients; set sharding above 1 "
                "and sharding_stage 2 or 3, or leave it out"
            )
        self._check_levels()
        if self.recompute_share != 1 and (self.streams or self.in_blocks):
            what = "offload 'param' or 'expert'" if self.streams else "compile 'blocks'"
            raise ConfigError(
                f"recompute_share in plan with {what}, whose blocks share one program; leave one of them out"
            )

    @property
    def streams(self) -> bool:
        """Whether parameters lie outside of the devices' memory, so that a step brings those of one chunk of the model
        after another."""
        return "param" in self.offload or "expert" in self.offload

    @property
    def in_blocks(self) -> bool:
        """Whether parts of the model that has no stages are programs of their own, with all parameters in memory."""
        return self.compile == "blocks" and not self.streams

    def __str__(self) -> str:
        rules = str(self.strategy).replace("\n", "\n             ")
        inner = f" ({self.ulysses_degree} deal heads out)" if self.ulysses_degree else ""
        sequence = [f"  sequence   {self.sep_attention} attention{inner}, {self.sep_order} order"]
        return "\n".join(
            [
                "Plan",
                f"  mesh       {self.mesh}  ({self.mesh.size} device{'s' if self.mesh.size > 1 else ''})",
                f"  strategy   {rules}",
                f"  schedule   {self.schedule or 'none'}, {self.num_microbatches} microbatch"
                f"{'es' if self.num_microbatches > 1 else ''}"
                f"{f', {self.virtual_stages} chunks a stage' if self.virtual_stages > 1 else ''}",
                *([f"  chunks     of {', '.join(map(str, self.chunk_items))} items"] if self.chunk_items else []),
                *([f"  stages     on {', '.join(self.stage_devices)}"] if self.stage_devices else []),
                *(["  compile    each block once"] if self.in_blocks else []),
                *(sequence if self.mesh.sep > 1 else []),
                f"  recompute  {self.recompute}{self._share_text()}",
                f"  offload    {self._offload_text()}",
                *([f"  overlap    {self.overlap}"] if self.overlap != Overlap() else []),
            ]
        )

    def _share_text(self) -> str:
        return f", {self.recompute_share:g} of the blocks" if self.recompute_share != 1 else ""

    def _offload_text(self) -> str:
        disk = f" ({self.offload_path}, {self.offload_buffers} buffers)" if self.offload.on_disk else ""
        part = f", {self.offload_ratio:g} of the state" if self.offload_ratio != 1 else ""
        return f"{self.offload}{disk}{part}"

    @classmethod
    def from_degrees(
        cls,
        *,
        sharding_stage: int = 1,
        sequence_parallel: bool = False,
        schedule: str | None = None,
        virtual_stages: int | None = None,
        chunk_items: Sequence[int] = (),
        stage_devices: Sequence[str] = (),
        num_microbatches: int = 1,
        recompute: str = "none",
        recompute_share: float = 1.0,
        offload: Mapping[str, str] | Sequence[str] = (),
        offload_path: str | None = None,
        offload_ratio: float = 1.0,
        offload_buffers: int = BUFFERS,
        compile: str = "step",
        sep_attention: str = "auto",
        sep_order: str = "auto",
        ulysses_degree: int | None = None,
        expert_dispatch: str = "auto",
        expert_all_to_all: str = "auto",
        overlap: Overlap | Mapping[str, int | str] | None = None,
        expert_axes: Sequence[str] = ("ep",),
        branch_axis: str = "",
        order: Sequence[str] = AXES,
        **degrees: int,
    ) -> Plan:
        """A Plan from the degree of each mesh axis (dp, pp, sharding, sep, mp, ep; 1 if not given).

        An axis of degree 1 adds nothing to the strategy. With pp > 1 the schedule is DEFAULT_SCHEDULE unless
        given, and virtual_stages the fewest that the schedule takes.
        sequence_parallel splits the residual stream's seq over mp. expert_axes: the axes that split experts, outermost
        first; those beside ep then split, around the experts, tokens and not what else they split ("mp": the experts'
        inner width). branch_axis: "mp" gives the devices of that axis to branches (`branch_parallel`), instead of
        heads and widths.

        Raises ConfigError for an unknown name, with the closest valid one, and for any value Plan refuses.

        >>> Plan.from_degrees(dp=2, mp=2, sharding=2, sharding_stage=3).strategy.param_spec(("embed", "ffn"))
        ('sharding', 'mp')
        """
        for name in degrees:
            if name not in AXES:
                raise ConfigError(f"unknown setting {name!r} of a plan{did_you_mean(name, (*AXES, *_FROM_DEGREES))}")
        _check_bool("sequence_parallel", sequence_parallel)
        mesh = MeshShape(**degrees, order=order)  # type: ignore[arg-type]
        expert_axes = _check_expert_axes(expert_axes, mesh)
        schedule = DEFAULT_SCHEDULE if schedule is None and mesh.pp > 1 else schedule
        _check_schedule(schedule, mesh.pp)
        if virtual_stages is None:
            virtual_stages = SCHEDULES.named(schedule).least_virtual if schedule is not None else 1
        return cls(
            mesh=mesh,
            strategy=_strategy_for(
                mesh,
                zero(sharding_stage),
                sequence_parallel,
                expert_axes,
                _check_branch_axis(branch_axis, mesh, sequence_parallel),
            ),
            schedule=schedule,
            virtual_stages=virtual_stages,
            chunk_items=tuple(chunk_items),
            stage_devices=tuple(stage_devices),
            num_microbatches=num_microbatches,
            recompute=recompute,
            recompute_share=recompute_share,
            offload=Offload(offload),
            offload_path=offload_path,
            offload_ratio=offload_ratio,
            offload_buffers=offload_buffers,
            compile=compile,
            sep_attention=sep_attention,
            sep_order=sep_order,
            ulysses_degree=ulysses_degree,
            expert_dispatch=expert_dispatch,
            expert_all_to_all=expert_all_to_all,
            overlap=Overlap() if overlap is None else overlap,  # type: ignore[arg-type]  # __post_init__ checks it
        )

    @property
    def schedule_kind(self) -> ScheduleKind:
        """The record of the schedule; without a pipeline, of what runs on its one stage."""
        return WITHOUT_PIPELINE if self.schedule is None else SCHEDULES.named(self.schedule)

    def make_schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The table that the stages walk, of num_microbatches of the plan's or as many as said.

        >>> Plan(num_microbatches=2).make_schedule().stage_text(0)
        'f0;f1;b0;b1;'
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        return make_schedule(self.schedule_kind.name, self.mesh.pp, count, self.virtual_stages)

    @property
    def stage_of_chunk(self) -> tuple[int, ...]:
        """The pipeline stage of each chunk of the model, in the order that data flows through them.

        Round after round, except in a V, where the second round goes back up.
        """
        if self.schedule is None:
            return (0,) * self.virtual_stages
        return stage_of_chunk(self.schedule, self.mesh.pp, self.virtual_stages)

    def num_recomputed(self, blocks: int) -> int:
        """How many of the model's first so many blocks recompute.

        >>> [Plan(recompute="full", recompute_share=0.5).num_recomputed(n) for n in range(5)]
        [0, 0, 1, 1, 2]
        """
        return math.floor(blocks * self.recompute_share + _ROUNDING) if self.recompute != "none" else 0

    def recomputes(self, block: int) -> bool:
        """Whether a block recomputes, by its place among the model's blocks, from 0."""
        return self.num_recomputed(block + 1) > self.num_recomputed(block)

    def expert_dispatcher(self, ways: int, top_k: int, has_ragged: bool = False) -> str:
        """How tokens reach experts split over so many devices, of which top_k work on a token: expert_dispatch, "auto"
        being the one that moves fewer numbers of "gather" and, where the devices have it, "ragged", else "padded";
        "padded" where levels of it are asked for.

        >>> Plan().expert_dispatcher(4, top_k=2)
        'padded'
        """
        if self.expert_dispatch != "auto":
            return self.expert_dispatch
        if self.expert_all_to_all == "two_level":
            return "padded"
        return "gather" if ways <= top_k else "ragged" if has_ragged else "padded"

    def _split_over(self, dim: str) -> tuple[str, ...]:
        """The axes of several devices that split a dim of activations."""
        return tuple(axis for axis in self.strategy.rule("act").get(dim, ()) if self.mesh.degree(axis) > 1)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of several devices that split experts, outermost first.

        >>> Plan.from_degrees(dp=2, ep=2, expert_axes=("dp", "ep")).expert_axes
        ('dp', 'ep')
        """
        return tuple(axis for axis in self.strategy.rule("act").get("expert", ()) if self.mesh.degree(axis) > 1)

    def sums_in_ring(self, dims: Sequence[str | None], shape: Sequence[int]) -> bool:
        """Whether the gradient of a parameter is summed piece by piece as it is computed (overlap.sharding): one of a
        linear map between features, that sharding keeps in pieces.

        >>> plan = Plan.from_degrees(sharding=2, sharding_stage=3, overlap={"sharding": "ring"})
        >>> plan.sums_in_ring(("embed", "ffn"), (8, 32)), plan.sums_in_ring(("vocab", "embed"), (64, 8))
        (True, False)
        """
        if self.overlap.sharding != "ring" or len(dims) != 2 or None in dims or "vocab" in dims:
            return False
        entries = self.strategy.grad_spec(tuple(dims), tuple(shape), self.mesh)
        return any("sharding" in (entry if isinstance(entry, tuple) else (entry,)) for entry in entries)

    @property
    def segment(self) -> SegmentSettings:
        """What it says of attention over a split sequence."""
        return SegmentSettings(self.sep_attention, self.sep_order, self.ulysses_degree)

    def segment_way(self, tokens: int, heads: int, kv_heads: int) -> SegmentWay:
        """How attention of so many tokens of a row and heads, each a device's, exchanges over sep within a process.

        >>> Plan.from_degrees(sep=2, sep_order="zigzag").segment_way(1024, 5, 5)
        SegmentWay(how='ring', inner=1)
        """
        return self.segment.way(self.mesh.sep, tokens, heads, kv_heads, self.mesh.sep)

    @property
    def batch_ways(self) -> int:
        """Number of equal parts that one microbatch is split into across devices."""
        return math.prod(self.mesh.degree(axis) for axis in self.strategy.rule("act").get("batch", ()))

    def rows_per_device(self, batch_size: int) -> int:
        """Rows of one microbatch that a device holds, of a batch of `batch_size` rows over the whole job.

        Raises PlacementError, with the nearest sizes that do, if the batch does not divide evenly.

        >>> Plan.from_degrees(dp=2, sharding=2, num_microbatches=4).rows_per_device(32)
        2
        """
        parts = self.num_microbatches * self.batch_ways
        if batch_size < 1 or batch_size % parts:
            raise PlacementError(
                f"batch of {batch_size} does not divide into {self.num_microbatches} microbatches x {self.batch_ways} "
                f"parts on mesh {self.mesh}; make it {nearest_multiples(max(batch_size, 0), parts)}"
            )
        return batch_size // parts

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, lists, strings and numbers: what `from_dict` takes, and fit for JSON and YAML."""
        return {
            "mesh": self.mesh.to_dict(),
            "strategy": self.strategy.to_dict(),
            "schedule": self.schedule,
            "virtual_stages": self.virtual_stages,
            "chunk_items": list(self.chunk_items),
            "stage_devices": list(self.stage_devices),
            "num_microbatches": self.num_microbatches,
            "recompute": self.recompute,
            "recompute_share": self.recompute_share,
            "offload": self.offload.plain(),
            "offload_path": self.offload_path,
            "offload_ratio": self.offload_ratio,
            "offload_buffers": self.offload_buffers,
            "compile": self.compile,
            "sep_attention": self.sep_attention,
            "sep_order": self.sep_order,
            "ulysses_degree": self.ulysses_degree,
            "expert_dispatch": self.expert_dispatch,
            "expert_all_to_all": self.expert_all_to_all,
            "overlap": self.overlap.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Plan:
        """A Plan from plain values; a key left out has its default. Raises ConfigError for a key it does not know."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"a plan cannot be made from {values!r}; give a mapping with any of {', '.join(_FIELDS)}")
        for key in values:
            if key not in _FIELDS:
                raise ConfigError(f"unknown key {key!r} in plan{did_you_mean(key, _FIELDS)}")
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks the values

    def to_yaml(self) -> str:
        """YAML text that `from_yaml` reads back to an equal Plan."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None)

    @classmethod
    def from_yaml(cls, text: str) -> Plan:
        """A Plan from YAML text; raises ConfigError for text that is not YAML or gives a key twice, and as from_dict
        does.

        >>> Plan.from_yaml("mesh: dp2").mesh.dp
        2
        """
        if not isinstance(text, str):
            raise ConfigError(f"the plan's YAML is text, got {type(text).__name__}; read the file first")
        try:
            values = yaml.load(text, _OneOfEachKey)  # a SafeLoader
        except yaml.YAMLError as error:
            raise ConfigError(f"the plan is not valid YAML: {error}") from error
        return cls.from_dict({} if values is None else values)

    def _check_virtual_stages(self) -> None:
        if self.schedule is not None:
            check_schedule(self.schedule, self.mesh.pp, self.num_microbatches, self.virtual_stages)
        elif self.virtual_stages != 1:
            raise ConfigError(f"virtual_stages={self.virtual_stages!r} in a plan without a pipeline; leave it at 1")

    def _check_stages(self) -> None:
        for name, count in (("chunk_items", len(self.stage_of_chunk)), ("stage_devices", self.mesh.pp)):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or isinstance(values, str):
                raise ConfigError(f"{name}={values!r} in plan; give a list")
            values = tuple(values)
            object.__setattr__(self, name, values)
            if values and (self.mesh.pp == 1 or len(values) != count):
                each = "chunk" if name == "chunk_items" else "stage"
                raise ConfigError(
                    f"{name}={list(values)} in plan on mesh {self.mesh}, whose pipeline has "
                    f"{count if self.mesh.pp > 1 else 0} {each}s; give one for each {each}, or leave it out"
                )
        if not all(type(items) is int and items > 0 for items in self.chunk_items):
            raise ConfigError(f"chunk_items={list(self.chunk_items)} in plan; give whole numbers of at least 1")
        if not all(isinstance(kind, str) and kind for kind in self.stage_devices):
            raise ConfigError(f"stage_devices={list(self.stage_devices)} in plan; give names of kinds, such as gpu")

    def _check_levels(self) -> None:
        if self.expert_all_to_all != "two_level":
            return
        if len(self.expert_axes) < 2:
            raise ConfigError(
                f"expert_all_to_all='two_level' with experts split over {self.expert_axes}: one level is between nodes "
                "and one within; give expert_axes two axes of several devices, outermost first, such as ('dp', 'ep')"
            )
        if self.expert_dispatch in ("gather", "ragged"):
            raise ConfigError(
                f"expert_all_to_all='two_level' with expert_dispatch={self.expert_dispatch!r}, which has no all-to-all "
                "of equal parts; set expert_dispatch to 'padded' or 'balanced', or expert_all_to_all to 'flat'"
            )

    def _check_axes_used(self) -> None:
        for axis, degree in self.mesh.degrees.items():
            if degree > 1 and axis != "pp" and axis not in self.strategy.axes:
                raise ConfigError(
                    f"mesh axis {axis!r} has degree {degree}, but the strategy splits nothing over it, so {degree} "
                    f"devices would repeat the same work; add a dim for {axis!r} to the strategy or set {axis} to 1"
                )


_ROUNDING = 1e-9  # of shares such as 1/3, whose third multiple is 1


def _check_share(share: object, recompute: str) -> None:
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ConfigError(f"recompute_share={share!r} in plan; give the part of the blocks, above 0 and at most 1")
    if share != 1 and recompute == "none":
        raise ConfigError(
            f"recompute_share={share} in plan, and recompute is none: no block recomputes; set recompute, or leave the "
            "share out"
        )


class _OneOfEachKey(YamlLoader):
    """Refuses a mapping that has a key twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
        if twice is not None:
            raise ConfigError(
                f"the plan gives {twice!r} twice, in line {node.start_mark.line + 1} or below; give it once"
            )
        return super().construct_mapping(node, deep)


_FIELDS = tuple(f.name for f in fields(Plan))
_FROM_DEGREES = (
    "sharding_stage",
    "sequence_parallel",
    "schedule",
    "virtual_stages",
    "chunk_items",
    "stage_devices",
    "num_microbatches",
    "recompute",
    "recompute_share",
    "offload",
    "offload_path",
    "offload_ratio",
    "offload_buffers",
    "compile",
    "sep_attention",
    "sep_order",
    "ulysses_degree",
    "expert_dispatch",
    "expert_all_to_all",
    "overlap",
    "expert_axes",
    "branch_axis",
    "order",
)


def _strategy_for(
    mesh: MeshShape,
    sharding: Strategy,
    is_sequence_parallel: bool,
    expert_axes: tuple[str, ...],
    branch_axis: str,
) -> Strategy:
    parts = [data_parallel()]
    if mesh.sharding > 1:
        parts.append(sharding)
    if mesh.sep > 1:
        parts.append(segment_parallel())
    if branch_axis:
        parts.append(branch_parallel(branch_axis))
    elif mesh.mp > 1:
        parts.append(tensor_parallel(experts="mp" not in expert_axes))
        if is_sequence_parallel:
            parts.append(sequence_parallel())
    live = tuple(axis for axis in expert_axes if mesh.degree(axis) > 1)
    if live:
        parts.append(expert_parallel(live))
    return join(*parts)


def _check_expert_axes(axes: object, mesh: MeshShape) -> tuple[str, ...]:
    if isinstance(axes, str) or not isinstance(axes, Sequence) or not axes:
        raise ConfigError(f"expert_axes={axes!r} in plan; give a list of mesh axes such as ('ep',) or ('ep', 'mp')")
    for axis in axes:
        if check_axis(axis) == "pp" or list(axes).count(axis) > 1:
            raise PlacementError(
                f"expert_axes={tuple(axes)!r} in plan: give axes that split tensors, not pp, and each of them once"
            )
    if mesh.ep > 1 and "ep" not in axes:
        raise ConfigError(
            f"expert_axes={tuple(axes)!r} in plan leaves out ep, of degree {mesh.ep}; name it, or set ep to 1"
        )
    return tuple(axes)


def _check_branch_axis(axis: object, mesh: MeshShape, is_sequence_parallel: bool) -> str:
    if axis not in ("", "mp"):
        raise ConfigError(f"branch_axis={axis!r} in plan; give 'mp', whose devices then run branches, or leave it out")
    if axis and mesh.mp == 1:
        raise ConfigError("branch_axis='mp' in plan with mp=1: no device to run a branch; set mp to 2, or leave it out")
    if axis and is_sequence_parallel:
        raise ConfigError("sequence_parallel with branch_axis='mp' in plan: mp then splits no seq; drop one of them")
    return str(axis)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} in plan; give True or False")


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        raise ConfigError(f"unknown {name} {value!r} in plan{did_you_mean(value, choices)}")


def _check_schedule(schedule: object, stages: int) -> None:
    if stages == 1 and schedule is not None:
        raise ConfigError(
            f"schedule {schedule!r} with pp=1: there is no pipeline to schedule; drop it or set pp above 1"
        )
    if stages > 1:
        _check_choice("schedule", schedule, tuple(SCHEDULES))


def _check_microbatches(number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(f"num_microbatches={number!r} in plan; give a whole number of at least 1")
