"""Losses of preferences, of judged answers, of rewards and of a teacher, as functions of log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyreme.nn import functional as F
from polyreme.registry import Registry


class PairLogProbs(NamedTuple):
    """Log-probabilities of better and worse answers, summed over their tokens, [pairs] each; those of a reference
    model; and how many tokens each answer has."""

    chosen: Any
    rejected: Any
    reference_chosen: Any
    reference_rejected: Any
    num_chosen: Any
    num_rejected: Any

    @property
    def chosen_ratio(self) -> Any:
        """log p(chosen) over the reference's."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Any:
        """log p(rejected) over the reference's."""
        return self.rejected - self.reference_rejected

    @property
    def margin(self) -> Any:
        """What a model prefers the better answer by, beside the reference."""
        return self.chosen_ratio - self.rejected_ratio

    def averaged(self) -> PairLogProbs:
        """The same of a token, on average."""
        return self._replace(
            chosen=self.chosen / self.num_chosen,
            rejected=self.rejected / self.num_rejected,
            reference_chosen=self.reference_chosen / self.num_chosen,
            reference_rejected=self.reference_rejected / self.num_rejected,
        )


@dataclass(frozen=True)
class PreferenceSettings:
    """beta: how dear it is to leave the reference; label_smoothing: the part of pairs that may be the wrong way round
    (sigmoid, simpo); simpo_gamma: the margin that simpo wants; dpop_lambda: what dpop adds for better answers that
    became less likely."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    dpop_lambda: float = 50.0


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceLoss:
    """A loss of pairs. of: (log-probabilities, settings) -> [pairs]. needs_reference: whether it reads the reference's;
    is_averaged: log-probabilities are those of a token on average; settings: those of PreferenceSettings that it has a
    use for beside beta."""

    name: str
    of: Callable[[PairLogProbs, PreferenceSettings], Any]
    needs_reference: bool = True
    is_averaged: bool = False
    settings: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def __call__(self, pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
        """The loss of each pair, [pairs]."""
        return self.of(pairs.averaged() if self.is_averaged else pairs, settings)


def _smoothed(logits: Any, settings: PreferenceSettings) -> Any:
    smoothing = settings.label_smoothing
    loss = -F.log_sigmoid(logits) * (1 - smoothing)
    return loss - F.log_sigmoid(-logits) * smoothing if smoothing else loss


def _sigmoid(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """Source: arXiv:2305.18290, equation 7; label smoothing: "A note on DPO with noisy preferences", E. Mitchell."""
    return _smoothed(pairs.margin * settings.beta, settings)


def _hinge(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """Source: arXiv:2309.06657."""
    return F.relu(1 - pairs.margin * settings.beta)


def _ipo(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """Source: arXiv:2310.12036, equation 17, of a token on average."""
    return (pairs.margin - 1 / (2 * settings.beta)) ** 2


def _kto_pair(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """Both answers of a pair as KTO judges them, each beside how far the model is from the reference on the others.

    Source: arXiv:2402.01306, with the batch's other answers for the reference point.
    """
    chosen, rejected, beta = pairs.chosen_ratio, pairs.rejected_ratio, settings.beta
    chosen_point, rejected_point = (F.relu(ratio.mean()).detach() for ratio in (chosen, rejected))
    better = 1 - F.sigmoid((chosen - rejected_point) * beta)
    return better + 1 - F.sigmoid((chosen_point - rejected) * beta)


def _sppo_hard(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """Source: arXiv:2405.00675, with probabilities 1 and 0."""
    half = 0.5 / settings.beta
    return (pairs.chosen_ratio - half) ** 2 + (pairs.rejected_ratio + half) ** 2


def _nca_pair(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """Source: arXiv:2402.05369, for two answers."""
    chosen, rejected = pairs.chosen_ratio * settings.beta, pairs.rejected_ratio * settings.beta
    return -F.log_sigmoid(chosen) - 0.5 * F.log_sigmoid(-chosen) - 0.5 * F.log_sigmoid(-rejected)


def _dpop(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """Source: arXiv:2402.13228, equation 3."""
    lost = F.relu(pairs.reference_chosen - pairs.chosen)
    return -F.log_sigmoid((pairs.margin - lost * settings.dpop_lambda) * settings.beta)


def _simpo(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """Source: arXiv:2405.14734, equation 6."""
    return _smoothed((pairs.chosen - pairs.rejected) * settings.beta - settings.simpo_gamma, settings)


_LEAST_DOUBT = 1e-6  # an answer that is certain has no finite odds


def _orpo(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """Source: arXiv:2403.07691, equations 6 and 7: with the cost of the better answer, beta being its lambda."""
    chosen, rejected = (value.clip(max=-_LEAST_DOUBT) for value in (pairs.chosen, pairs.rejected))
    odds = (chosen - rejected) - ((-chosen.exp()).log1p() - (-rejected.exp()).log1p())
    return -pairs.chosen - F.log_sigmoid(odds) * settings.beta


LOSSES: Registry[PreferenceLoss] = Registry(
    "loss_type",
    [
        PreferenceLoss("sigmoid", _sigmoid, settings=("label_smoothing",)),
        PreferenceLoss("hinge", _hinge),
        PreferenceLoss("ipo", _ipo, is_averaged=True),
        PreferenceLoss("kto_pair", _kto_pair),
        PreferenceLoss("sppo_hard", _sppo_hard),
        PreferenceLoss("nca_pair", _nca_pair),
        PreferenceLoss("dpop", _dpop, settings=("dpop_lambda",)),
        PreferenceLoss("orpo", _orpo, needs_reference=False, is_averaged=True, aliases=("or",)),
        PreferenceLoss(
            "simpo", _simpo, needs_reference=False, is_averaged=True, settings=("simpo_gamma", "label_smoothing")
        ),
    ],
)
"""Losses of preferences by their loss_type."""


def kto_loss(
    ratio: Any,
    mismatched_ratio: Any,
    is_desirable: Any,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Any:
    """The loss of judged answers, [answers].

    ratio: log-probability of each over the reference's; mismatched_ratio: the same of answers to other questions, whose
    mean, if above 0, is the point that both kinds are judged beside; is_desirable: 1 or 0. Source: arXiv:2402.01306.
    """
    point = F.relu(mismatched_ratio.mean()).detach()
    good = (1 - F.sigmoid((ratio - point) * beta)) * desirable_weight
    bad = (1 - F.sigmoid((point - ratio) * beta)) * undesirable_weight
    return good * is_desirable + bad * (1 - is_desirable)


def reward_loss(chosen: Any, rejected: Any) -> Any:
    """The loss of rewards of better and worse answers, [pairs]. Source: arXiv:2203.02155, equation 1."""
    return -F.log_sigmoid(chosen - rejected)


def soft_label_loss(logits: Any, teacher_logits: Any, is_counted: Any, temperature: float) -> Any:
    """KL(teacher || student) of the tokens that count, softened and times temperature squared, the mean; 0-D.

    logits [..., vocab], is_counted [...], 1 or 0. Source: arXiv:1503.02531, section 2.
    """
    log_student = F.log_softmax(logits.astype("float32") / temperature, axis=-1)
    log_teacher = F.log_softmax(teacher_logits.astype("float32") / temperature, axis=-1)
    cost = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)
    return (cost * is_counted).sum() / is_counted.sum().clip(min=1) * temperature**2


def policy_loss(
    logprobs: Any,
    old_logprobs: Any,
    reference_logprobs: Any,
    advantages: Any,
    is_counted: Any,
    clip_ratio: float,
    kl_weight: float,
) -> Any:
    """GRPO's objective with its sign turned, [texts]: the mean over each text's tokens.

    logprobs, old_logprobs (when the text was drawn), reference_logprobs, is_counted: [texts, seq]; advantages [texts].
    Source: arXiv:2402.03300, equations 3 and 4.
    """
    ratio = (logprobs - old_logprobs).exp()
    advantages = advantages.unsqueeze(-1)
    clipped = ratio.clip(1 - clip_ratio, 1 + clip_ratio)
    gain = (ratio * advantages).minimum(clipped * advantages)
    away = reference_logprobs - logprobs
    gain = gain - (away.exp() - away - 1) * kl_weight
    return -(gain * is_counted).sum(-1) / is_counted.sum(-1).clip(min=1)
