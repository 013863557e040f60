"""From a pretraining configuration to the planner's question, and from its answer back to a configuration.

The answer is an Answer: the search's plans, the configuration's own plan, what the compiler said, and what to change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import yaml
from pydantic import ValidationError

from polyreme.errors import ConfigError, did_you_mean
from polyreme.mesh import SCHEDULES, Plan
from polyreme.mesh.axes import AXES
from polyreme.models.families import FAMILIES
from polyreme.planner import Memory, ModelGraph, Training
from polyreme.planner.cluster import Cluster
from polyreme.planner.explain import Change, changes, nearest_counts
from polyreme.planner.memory import Compiler, memory
from polyreme.planner.predict import predict
from polyreme.planner.search import Ranked, SearchResult, search
from polyreme.planner.space import Space
from polyreme.recipes.config import PlanConfig, PretrainConfig, RunConfig
from polyreme.recipes.config_file import Loaded
from polyreme.recipes.estimate import shape_of
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.planning.tuning import rows_of, training_of_tuning, tuning_graph
from polyreme.units import bytes_text

Run = TypeVar("Run", bound=RunConfig)


@dataclass(frozen=True)
class Answer:
    """The result of `polyreme plan`.

    own_plan: the configuration's own plan, where it uses as many devices. verified: what the compiler found of the
    first of search.plans, in their order. changes: if nothing fits, what would make something fit. nearest: if no
    mesh divides, the next smaller and larger number of devices for which one does.
    """

    config: RunConfig
    cluster: Cluster
    training: Training
    space: Space
    search: SearchResult
    own_plan: Ranked | None = None
    verified: tuple[PlanVerification, ...] = ()
    changes: tuple[Change, ...] = ()
    nearest: tuple[int | None, int | None] = (None, None)

    @property
    def chosen(self) -> int | None:
        """Place in found.plans of the plan to run: the first that the compiler did not refute."""
        places = range(len(self.search.plans))
        return next((at for at in places if at >= len(self.verified) or not self.is_refuted(at)), None)

    def is_refuted(self, at: int) -> bool:
        """Whether the compiler needs more memory for a plan than a device has."""
        return at < len(self.verified) and self.verified[at].total > self.search.plans[at].prediction.capacity


class PlanVerification(Protocol):
    """The result of recipes/planning/verify.py: bytes of the fullest device, and the collectives of each stage."""

    @property
    def total(self) -> int:
        """Bytes of the fullest device."""
        ...

    @property
    def stages(self) -> tuple[Any, ...]:
        """The collectives of each pipeline stage."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        ...


def graph_of_run(config: RunConfig, attention: Literal["fused", "plain"] = "fused") -> tuple[ModelGraph, int]:
    """(operations, rows of a step) of what a configuration trains."""
    if isinstance(config, FinetuneConfig):
        return tuning_graph(config, attention), rows_of(config)
    return shape_of(config.dimensions).graph(attention), config.train.global_batch


def answer(
    config: RunConfig,
    cluster: Cluster,
    *,
    top: int = 10,
    without: Sequence[str] = (),
    report: Callable[[str], None] = lambda line: None,
) -> Answer:
    """The best plans for a configuration's model and batch on a cluster; its own plan is only compared.

    without: what may not be used, any of FEATURES. report is called with a line about each change that is tried where
    nothing fits, which may take a minute. Raises ConfigError for another word.
    """
    space, training = space_of(config, cluster, without), training_of(config, cluster)
    graph, batch = graph_of_run(config, training.attention)
    refuse = functools.partial(_refuse, config)
    result = search(graph, cluster, batch, training, space, top, refuse)
    asked = None
    if config.plan.num_devices == cluster.num_devices:
        plan = config.parallel_plan
        asked = Ranked(plan, predict(graph, plan, cluster, batch, training))
    wanted: tuple[Change, ...] = ()
    nearest: tuple[int | None, int | None] = (None, None)
    if not result.plans and not result.too_big:
        nearest = nearest_counts(graph, cluster, batch, training, space)
    if not result.plans:
        wanted = changes(graph, cluster, batch, training, space, refuse, report=report)
    return Answer(config, cluster, training, space, result, asked, changes=wanted, nearest=nearest)


def training_of(config: RunConfig, cluster: Cluster) -> Training:
    """The planner's Training for the configured step on a cluster's devices."""
    training = fused_training(config)
    # in 16 bits a GPU's attention is cuDNN's
    has_own = cluster.device.own_attention > 1 and training.dtype != "float32"
    attention = _attention(config, cluster, training.dtype)
    return replace(training, attention=attention, flash=3 if has_own else training.flash)


def fused_training(config: RunConfig) -> Training:
    """The planner's Training for the configured step on any device, with fused attention."""
    train = config.train
    dtype = "float32" if train.amp_level == "O0" else train.amp_dtype
    cut = FAMILIES[config.dimensions.family].cut
    training = Training(dtype=dtype, master=train.amp_level == "O2", cut=cut, sums="program")
    return training_of_tuning(config, training) if isinstance(config, FinetuneConfig) else training


def memory_of(config: RunConfig) -> Memory:
    """Bytes on the fullest device under the configuration's own plan, with fused attention; on a processor, as XLA's
    compiler for it keeps them. Of fine-tuning with all that it holds besides (tuning.py)."""
    compiler: Compiler = "cpu" if config.device == "cpu" else "accelerator"
    plan, training = config.parallel_plan, fused_training(config)
    graph, batch = graph_of_run(config)
    stages = memory(graph, plan, batch, training, compiler)
    return max(stages, key=lambda stage: stage.total)


FEATURES = ("recompute", "offload", "sharding", "pp", "mp", "sep", "ep", "sequence_parallel", "virtual_stages")
"""What `polyreme plan --without` takes."""


def space_of(config: RunConfig, cluster: Cluster, without: Sequence[str] = ()) -> Space:
    """The plans that a configuration can have on a cluster, without the features that are excluded."""
    for name in without:
        if name not in FEATURES:
            raise ConfigError(f"--without {name}{did_you_mean(name, FEATURES)}")
    left_out = {*without}
    # a family that says what it can recompute has its blocks in one loop, where they are alike
    is_looped = FAMILIES[config.dimensions.family].recompute is not None
    shares = () if is_looped else (0.25, 0.5, 0.75)
    space = Space(axes=tuple(axis for axis in AXES if axis not in left_out), recompute_shares=shares)
    if config.device == "cpu" or cluster.shared > 1:  # virtual devices: XLA's ragged all-to-all is not on CPU
        space = replace(space, expert_dispatch=tuple(how for how in space.expert_dispatch if how != "ragged"))
    if "recompute" in left_out:
        space = replace(space, recompute=("none",), recompute_shares=())
    if "offload" in left_out:
        space = replace(space, offload=((),))
    if "virtual_stages" in left_out:
        space = replace(space, schedules=tuple(name for name in space.schedules if SCHEDULES[name].takes(1)))
    if "sequence_parallel" in left_out:
        space = replace(space, sequence_parallel=(False,))
    return space


def _refuse(config: RunConfig, plan: Plan) -> str:
    try:
        with_plan(config, plan)
    except ConfigError as error:
        return str(error)
    return ""


def with_plan(config: Run, plan: Plan) -> Run:
    """The configuration with this plan in place of its own, and train.accumulation as the plan's microbatches.

    Raises ConfigError for a plan that a configuration cannot say, or that its model or batch does not divide into.
    """
    mesh, rules = plan.mesh, plan.strategy
    section = {
        **{axis: mesh.degree(axis) for axis in AXES},
        "sharding_stage": sharding_stage(plan),
        "sequence_parallel": "mp" in rules.rule("act").get("seq", ()),
        "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages if plan.schedule else None,
        "chunk_items": list(plan.chunk_items),
        "stage_devices": list(plan.stage_devices),
        "sep_attention": plan.sep_attention,
        "sep_order": plan.sep_order,
        "ulysses_degree": plan.ulysses_degree,
        "expert_dispatch": plan.expert_dispatch,
        "expert_all_to_all": plan.expert_all_to_all,
        "overlap": plan.overlap.to_dict(),
        "expert_axes": list(rules.rule("param").get("expert", ())) or ["ep"],
        "recompute": plan.recompute,
        "recompute_share": plan.recompute_share,
        "offload": plan.offload.plain(),
        "offload_path": plan.offload_path,
        "offload_ratio": plan.offload_ratio,
        "offload_buffers": plan.offload_buffers,
        "compile": config.plan.compile,
        "elastic": config.plan.elastic,
    }
    values = config.model_dump()
    values["plan"] = PlanConfig(**section).model_dump()
    values["train"]["accumulation"] = plan.num_microbatches
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"plan {mesh} does not go with the configuration: {message}") from None


def sharding_stage(plan: Plan) -> Literal[0, 1, 2, 3]:
    """The ZeRO stage of the sharding axis: 0 splits nothing, 1 the optimizer's state, 2 also gradients, 3 also
    parameters."""
    if plan.mesh.sharding == 1:
        return 0
    splits = [any("sharding" in axes for axes in plan.strategy.rule(kind).values()) for kind in ("param", "grad")]
    return 3 if splits[0] else 2 if splits[1] else 1


def plan_words(plan: Plan) -> str:
    """A plan in a few words.

    >>> plan_words(Plan.from_degrees(pp=2, sharding=4, sharding_stage=3, num_microbatches=4, recompute="full"))
    'pp2 sharding4 stage3 1F1B x4 recompute=full'
    """
    words = [str(plan.mesh)]
    if plan.mesh.sharding > 1:
        words.append(f"stage{sharding_stage(plan)}")
    if "mp" in plan.strategy.rule("act").get("seq", ()):
        words.append("sp")
    if plan.expert_axes:
        words.append(f"experts={'+'.join(plan.expert_axes)}/{plan.expert_dispatch}")
    if plan.schedule:
        words.append(plan.schedule + (f"/{plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    if plan.chunk_items:
        words.append(f"items={'+'.join(map(str, plan.chunk_items))}")
    if plan.stage_devices:
        words.append(f"on={'+'.join(plan.stage_devices)}")
    if plan.num_microbatches > 1:
        words.append(f"x{plan.num_microbatches}")
    if plan.recompute != "none":
        share = f"*{plan.recompute_share:g}" if plan.recompute_share != 1 else ""
        words.append(f"recompute={plan.recompute}{share}")
    if plan.offload:
        tiers = (kind if tier == "host" else f"{kind}:{tier}" for kind, tier in plan.offload.items())
        words.append(f"offload={'+'.join(tiers)}")
    return " ".join(words)


def run_file(loaded: Loaded, answer: Answer, output: Path) -> str:
    """The file that `polyreme pretrain` or `finetune` takes to run the chosen plan; for a processor it says so.

    Data that lie beside the configuration are named so that they are found from the new file too.
    """
    assert answer.chosen is not None  # who asks has looked
    ranked = answer.search.plans[answer.chosen]
    config = with_plan(loaded.config, ranked.plan)
    values: dict[str, Any] = {}
    if answer.cluster.shared > 1 and config.device is None:
        values["device"] = "cpu"
    moved = output.parent.resolve() != loaded.folder.resolve()
    if isinstance(config, PretrainConfig) and not config.data.is_synthetic and moved:
        beside = [(loaded.folder / name) for name in config.data.text]
        names = [str(p.resolve()) if p.exists() else name for p, name in zip(beside, config.data.text, strict=True)]
        values["data"] = config.data.model_copy(update={"text": names})
    prediction = ranked.prediction
    heading = (
        f"{loaded.path.name} with the plan that `polyreme plan` chose for {answer.cluster.num_devices} x "
        f"{answer.cluster.device.name}: {plan_words(ranked.plan)}\n"
        f"predicted: {prediction.step_seconds:.3g} s a step, {prediction.tokens_per_second:,.0f} tokens/s, "
        f"{bytes_text(prediction.memory.total)} a device"
    )
    return to_yaml(config.model_copy(update=values), heading)


def to_yaml(config: RunConfig, heading: str) -> str:
    """A whole configuration file, every setting that its family has spelled out, under lines of heading."""
    others: set[str] = set()
    if isinstance(config, PretrainConfig):
        own = FAMILIES[config.model.family].settings
        others = {name for family in FAMILIES.values() for name in family.settings}.difference(own)
    values = config.model_dump(mode="json", exclude={"model": others} if others else None)
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, allow_unicode=True)
    return "".join(f"# {line}\n" for line in heading.splitlines()) + text


def _attention(config: RunConfig, cluster: Cluster, dtype: str) -> Literal["fused", "plain"]:
    """The kind of attention that kernels/attention.py uses: blocks on CPUs, cuDNN on GPUs for 16 bits without dropout,
    else all scores at once."""
    name = cluster.device.name.lower()
    if "cpu" in name:
        return "fused"
    is_tpu = "tpu" in name or name.startswith("v")
    is_fused = not is_tpu and dtype != "float32" and config.dimensions.dropout == 0
    return "fused" if is_fused else "plain"
