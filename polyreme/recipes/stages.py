"""Stages of training, as records: the samples that a stage reads, its loss, and the figures it shows.

A new stage is a file beside this one and a record in STAGES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyreme.recipes.samples import CONVERSATIONS, JUDGEMENTS, PREFERENCES, PROMPTS, SampleKind
from polyreme.registry import Reference, Registry

Loss = Callable[[Any, Any, Any], Any]
"""(model, inputs, labels) -> its mean loss, 0-D; or a pair of that and a dict of 0-D Tensors to be logged by name."""


@dataclass(frozen=True, slots=True, eq=False)
class TuningStage:
    """One kind of fine-tuning. samples: what it reads. loss: (the run's configuration) -> the loss; None for the
    model's own, and one that is no training.Objective no pipeline can compute. settings: those that it alone, or some
    stages, have a use for. build: (model, configuration) -> adds what the model lacks. prepare: (configuration,
    Trainer, data, folder, say) -> does what is to be done once, before the first step and when a run resumes, of the
    model as it begins; say takes lines of how far it is. roll_out: (configuration, Trainer, data) -> (batch, step) ->
    what the loss takes, where the model itself makes it."""

    name: str
    samples: SampleKind
    loss: Reference[Callable[[Any], Loss]] | None = None
    settings: tuple[str, ...] = ()
    build: Reference[Callable[[Any, Any], None]] | None = None
    prepare: Reference[Callable[..., None]] | None = None
    roll_out: Reference[Callable[[Any, Any, Any], Callable[[Any, int], Any]]] | None = None
    aliases: tuple[str, ...] = ()


def _alignment(name: str) -> Reference[Any]:
    return Reference("polyreme.recipes.training.alignment", name)


SFT = TuningStage(name="sft", samples=CONVERSATIONS, settings=("packing",), aliases=("supervised",))

DPO = TuningStage(
    name="dpo",
    samples=PREFERENCES,
    loss=_alignment("PreferenceObjective"),
    settings=("beta", "loss_type", "pref_loss_ratio", "sft_loss_ratio", "label_smoothing", "simpo_gamma",
              "dpop_lambda", "reference_free"),
    prepare=_alignment("score_reference"),
)  # fmt: skip

KTO = TuningStage(
    name="kto",
    samples=JUDGEMENTS,
    loss=_alignment("JudgementObjective"),
    settings=("beta", "desirable_weight", "undesirable_weight", "reference_free"),
    prepare=_alignment("score_reference"),
)

RM = TuningStage(
    name="rm",
    samples=PREFERENCES,
    loss=_alignment("RewardObjective"),
    build=_alignment("add_reward_head"),
    aliases=("reward",),
)

DISTILL = TuningStage(
    name="distill",
    samples=CONVERSATIONS,
    loss=_alignment("DistillationObjective"),
    settings=("packing", "teacher", "distill_temperature", "distill_weight"),
    prepare=_alignment("load_teacher"),
)

GRPO = TuningStage(
    name="grpo",
    samples=PROMPTS,
    loss=Reference("polyreme.recipes.training.rollouts", "group_loss"),
    settings=("group_size", "max_new_tokens", "temperature", "reward", "clip_ratio", "kl_weight"),
    roll_out=Reference("polyreme.recipes.training.rollouts", "Rollouts"),
)

STAGES: Registry[TuningStage] = Registry("stage", [SFT, DPO, KTO, RM, DISTILL, GRPO])
"""Stages by the name that a configuration has."""
