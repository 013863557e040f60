"""What runs train for, as records: the samples that a stage reads, the loss it makes small, what it shows of itself.

A new stage is a file beside this one and a record in STAGES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyreme.recipes.samples import CONVERSATIONS, SampleKind
from polyreme.registry import Reference, Registry

Loss = Callable[[Any, Any, Any], Any]
"""(model, inputs, labels) -> its mean loss, 0-D; or a pair of that and a dict of 0-D Tensors to be logged by name."""


@dataclass(frozen=True, slots=True, eq=False)
class TuningStage:
    """One kind of fine-tuning. samples: what it reads. loss: (the run's configuration) -> the loss; None for the
    model's own, which alone a pipeline can compute."""

    name: str
    samples: SampleKind
    loss: Reference[Callable[[Any], Loss]] | None = None
    aliases: tuple[str, ...] = ()


SFT = TuningStage(
    name="sft",
    samples=CONVERSATIONS,
    aliases=("supervised",),
)

STAGES: Registry[TuningStage] = Registry("stage", [SFT])
"""Stages by the name that a configuration has."""
