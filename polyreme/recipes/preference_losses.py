"""Losses of preferences by their loss_type, as records; the functions are those of training.preference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyreme.registry import Reference, Registry


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceLoss:
    """A loss of pairs. of: (PairLogProbs, PreferenceSettings) -> [pairs]. needs_reference: whether it reads the
    reference's log-probabilities; is_averaged: they are those of a token on average; settings: those that it has a use
    for beside beta."""

    name: str
    of: Reference[Callable[[Any, Any], Any]]
    needs_reference: bool = True
    is_averaged: bool = False
    settings: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def __call__(self, pairs: Any, settings: Any) -> Any:
        """The loss of each pair, [pairs]."""
        return self.of.load()(pairs.averaged() if self.is_averaged else pairs, settings)


def _loss(name: str, **facts: Any) -> PreferenceLoss:
    return PreferenceLoss(name, Reference("polyreme.training.preference", f"{name}_loss"), **facts)


LOSSES: Registry[PreferenceLoss] = Registry(
    "loss_type",
    [
        _loss("sigmoid", settings=("label_smoothing",)),
        _loss("hinge"),
        _loss("ipo", is_averaged=True),
        _loss("kto_pair"),
        _loss("sppo_hard"),
        _loss("nca_pair"),
        _loss("dpop", settings=("dpop_lambda",)),
        _loss("orpo", needs_reference=False, is_averaged=True, aliases=("or",)),
        _loss("simpo", needs_reference=False, is_averaged=True, settings=("simpo_gamma", "label_smoothing")),
    ],
)
"""Losses by their loss_type."""
