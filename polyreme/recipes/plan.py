"""From a pretraining configuration to the planner's question, and from its answer back to a configuration.

Floor: 7.  Never imports: jax.
"""

from __future__ import annotations

from typing import Literal

import yaml
from pydantic import ValidationError

from polyreme.errors import ConfigError
from polyreme.mesh import Plan
from polyreme.mesh.axes import AXES
from polyreme.planner import ModelShape, Training
from polyreme.planner.cluster import Cluster
from polyreme.planner.space import Space
from polyreme.recipes.config import ModelConfig, PlanConfig, PretrainConfig


def shape_of(model: ModelConfig) -> ModelShape:
    """The planner's view of a configured model.

    >>> shape_of(PretrainConfig().model).num_parameters
    4235264
    """
    is_llama = model.family == "llama"
    return ModelShape(
        hidden=model.hidden_size,
        layers=model.num_layers,
        heads=model.num_heads,
        seq=model.seq_len,
        vocab=model.vocab_size,
        ffn=model.ffn_size,
        kv_heads=model.num_kv_heads,
        gated=is_llama,
        biases=not is_llama,
        learned_positions=not is_llama,
        rms_norm=is_llama,
        tied=model.tie_embeddings,
        dropout=model.dropout > 0,
        name=model.family,
    )


def training_of(config: PretrainConfig, cluster: Cluster) -> Training:
    """How the configured step computes on a cluster's devices."""
    train = config.train
    dtype = "float32" if train.amp_level == "O0" else train.amp_dtype
    return Training(dtype=dtype, master=train.amp_level == "O2", attention=_attention(config, cluster, dtype))


def space_of(config: PretrainConfig) -> Space:
    """The plans that a configuration can say: of its families none has experts."""
    return Space(axes=tuple(axis for axis in AXES if axis != "ep"))


def with_plan(config: PretrainConfig, plan: Plan) -> PretrainConfig:
    """The configuration with this plan in place of its own, and train.accumulation as the plan's microbatches.

    Raises ConfigError for a plan that a configuration cannot say, or that its model or batch does not divide into.
    """
    mesh, rules = plan.mesh, plan.strategy
    if mesh.ep > 1:
        raise ConfigError(f"mesh {mesh}: a pretraining configuration has no ep; leave it at 1")
    section = {
        **{axis: mesh.degree(axis) for axis in AXES if axis != "ep"},
        "sharding_stage": sharding_stage(plan),
        "sequence_parallel": "mp" in rules.rule("act").get("seq", ()),
        "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages if plan.schedule else None,
        "sep_attention": plan.sep_attention,
        "recompute": plan.recompute,
        "offload": list(plan.offload),
    }
    values = config.model_dump()
    values["plan"] = PlanConfig(**section).model_dump()
    values["train"]["accumulation"] = plan.num_microbatches
    try:
        return PretrainConfig.model_validate(values)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"plan {mesh} does not go with the configuration: {message}") from None


def sharding_stage(plan: Plan) -> Literal[0, 1, 2, 3]:
    """What the sharding axis splits: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also parameters."""
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
    if plan.schedule:
        words.append(plan.schedule + (f"/{plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    if plan.num_microbatches > 1:
        words.append(f"x{plan.num_microbatches}")
    if plan.recompute != "none":
        words.append(f"recompute={plan.recompute}")
    if plan.offload:
        words.append(f"offload={'+'.join(plan.offload)}")
    return " ".join(words)


def to_yaml(config: PretrainConfig, heading: str) -> str:
    """A whole configuration file, every setting spelled out, under lines of heading."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, default_flow_style=None, allow_unicode=True)
    return "".join(f"# {line}\n" for line in heading.splitlines()) + text


def _attention(config: PretrainConfig, cluster: Cluster, dtype: str) -> Literal["fused", "plain"]:
    """What kernels/attention.py takes: on processors blocks, on GPUs cuDNN for 16 bits without dropout, else all scores
    at once."""
    name = cluster.device.name.lower()
    if "cpu" in name:
        return "fused"
    is_tpu = "tpu" in name or name.startswith("v")
    is_fused = not is_tpu and dtype != "float32" and config.model.dropout == 0
    return "fused" if is_fused else "plain"
