"""Losses of preferences, of judged answers, of rewards and of a teacher, as functions of log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from polyreme.nn import functional as F


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
        """The margin by which a model prefers the better answer more than the reference does."""
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


def _smoothed(logits: Any, settings: PreferenceSettings) -> Any:
    smoothing = settings.label_smoothing
    loss = -F.log_sigmoid(logits) * (1 - smoothing)
    return loss - F.log_sigmoid(-logits) * smoothing if smoothing else loss


def sigmoid_loss(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """DPO, [pairs]. Source: arXiv:2305.18290, equation 7; smoothing: E. Mitchell, "A note on DPO with noisy
    preferences"."""
    return _smoothed(pairs.margin * settings.beta, settings)


def hinge_loss(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """A hinge in the place of DPO's sigmoid, [pairs]. Source: arXiv:2309.06657."""
    return F.relu(1 - pairs.margin * settings.beta)


def ipo_loss(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """IPO, [pairs], of averaged log-probabilities. Source: arXiv:2310.12036, equation 17, of a token on average."""
    return (pairs.margin - 1 / (2 * settings.beta)) ** 2


def kto_pair_loss(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """KTO of pairs, [pairs]: both answers as KTO judges them, each beside how far the model is from its reference on
    the others.

    Source: arXiv:2402.01306, with the batch's other answers for the reference point.
    """
    chosen, rejected, beta = pairs.chosen_ratio, pairs.rejected_ratio, settings.beta
    chosen_point, rejected_point = (F.relu(ratio.mean()).detach() for ratio in (chosen, rejected))
    better = 1 - F.sigmoid((chosen - rejected_point) * beta)
    return better + 1 - F.sigmoid((chosen_point - rejected) * beta)


def sppo_hard_loss(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """SPPO with hard labels, [pairs]. Source: arXiv:2405.00675, with probabilities 1 and 0."""
    half = 0.5 / settings.beta
    return (pairs.chosen_ratio - half) ** 2 + (pairs.rejected_ratio + half) ** 2


def nca_pair_loss(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """NCA, [pairs]. Source: arXiv:2402.05369, for two answers."""
    chosen, rejected = pairs.chosen_ratio * settings.beta, pairs.rejected_ratio * settings.beta
    return -F.log_sigmoid(chosen) - 0.5 * F.log_sigmoid(-chosen) - 0.5 * F.log_sigmoid(-rejected)


def dpop_loss(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """DPO-Positive, [pairs]. Source: arXiv:2402.13228, equation 3."""
    lost = F.relu(pairs.reference_chosen - pairs.chosen)
    return -F.log_sigmoid((pairs.margin - lost * settings.dpop_lambda) * settings.beta)


def simpo_loss(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """SimPO, [pairs], of averaged log-probabilities; it reads no reference. Source: arXiv:2405.14734, equation 6."""
    return _smoothed((pairs.chosen - pairs.rejected) * settings.beta - settings.simpo_gamma, settings)


_LEAST_DOUBT = 1e-6  # an answer that is certain has no finite odds


def orpo_loss(pairs: PairLogProbs, settings: PreferenceSettings) -> Any:
    """ORPO, [pairs], of averaged log-probabilities, with the cost of the better answer; beta is its lambda. It reads no
    reference. Source: arXiv:2403.07691, equations 6 and 7."""
    chosen, rejected = (value.clip(max=-_LEAST_DOUBT) for value in (pairs.chosen, pairs.rejected))
    odds = (chosen - rejected) - ((-chosen.exp()).log1p() - (-rejected.exp()).log1p())
    return -pairs.chosen - F.log_sigmoid(odds) * settings.beta


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
