"""Losses of the stages that align a model: preferences, judged answers, rewards, and a teacher's soft labels."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import xxhash

from polyreme.core.layout import Layout
from polyreme.data.packing import NO_LABEL
from polyreme.distributed.placement import place_on
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError
from polyreme.io import safetensors_file
from polyreme.nn import Layer
from polyreme.nn import functional as F
from polyreme.nn.eval_mode import eval_mode
from polyreme.nn.initializer import Normal
from polyreme.nn.parameter import Parameter
from polyreme.ops.creation import arange
from polyreme.ops.indices.gather import take_along_axis
from polyreme.recipes.data.pair_samples import PairDataset
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.preference_losses import LOSSES
from polyreme.recipes.weights.base import base_digest, load_base
from polyreme.training import Objective
from polyreme.training.preference import (
    PairLogProbs,
    PreferenceSettings,
    kto_loss,
    reward_loss,
    soft_label_loss,
)

_REFERENCE = "reference.safetensors"
_SECONDS_A_LINE = 10.0


def answer_log_probs(model: Any, tokens: Any, labels: Any) -> tuple[Any, Any]:
    """(log-probabilities of the answers, summed over their tokens; how many those are), [batch, 2] each, of pairs of
    rows: tokens [batch, 2, seq], labels [batch, 2, seq] with NO_LABEL where nothing is asked."""
    return _log_probs(model(_by_row(tokens)), labels)


def _by_row(pairs: Any) -> Any:
    """[batch, 2, seq] as [2 batch, seq]."""
    batch, sides, seq = pairs.shape
    return pairs.reshape([batch * sides, seq])


def _log_probs(logits: Any, labels: Any) -> tuple[Any, Any]:
    """answer_log_probs given the logits [2 batch, seq, vocab]."""
    costs = F.cross_entropy(logits.astype("float32"), _by_row(labels), ignore_index=NO_LABEL, reduction="none")
    counts = (labels != NO_LABEL).astype("float32").sum(-1)
    return -costs.reshape(labels.shape).sum(-1), counts


class _OfPairs(Objective):
    """A loss of pairs of answers."""

    config: FinetuneConfig

    def __init__(self, config: FinetuneConfig) -> None:
        self.config = config

    def rows(self, inputs: Any) -> Any:
        return _by_row(inputs)


# preferences


class PreferenceObjective(_OfPairs):
    """The loss of stage dpo, by loss_type."""

    told: tuple[str, ...] = ("rewards/chosen", "rewards/rejected", "rewards/accuracy")

    def cost(self, model: Any, output: Any, targets: Any) -> tuple[Any, dict[str, Any]]:
        config = self.config
        settings = PreferenceSettings(config.beta, config.label_smoothing, config.simpo_gamma, config.dpop_lambda)
        labels, facts = targets
        sums, counts = _log_probs(output, labels)
        (chosen, rejected), (num_chosen, num_rejected) = sums.unbind(1), counts.unbind(1)
        reference_chosen, reference_rejected, _ = facts.unbind(1)
        pairs = PairLogProbs(chosen, rejected, reference_chosen, reference_rejected, num_chosen, num_rejected)
        total = LOSSES.named(config.loss_type)(pairs, settings).mean() * config.pref_loss_ratio
        if config.sft_loss_ratio:
            total = total - (chosen / num_chosen).mean() * config.sft_loss_ratio
        rewards = (pairs.chosen_ratio * config.beta, pairs.rejected_ratio * config.beta)
        accuracy = (rewards[0] > rewards[1]).astype("float32").mean()
        return total, dict(zip(self.told, (rewards[0].mean(), rewards[1].mean(), accuracy), strict=True))


def needs_reference(config: FinetuneConfig) -> bool:
    """Whether the loss of a run reads what a reference model says of the answers."""
    if config.reference_free:
        return False
    return config.stage == "kto" or LOSSES.named(config.loss_type).needs_reference


class JudgementObjective(_OfPairs):
    """The loss of stage kto."""

    told: tuple[str, ...] = ("rewards/desirable", "rewards/undesirable")

    def cost(self, model: Any, output: Any, targets: Any) -> tuple[Any, dict[str, Any]]:
        config = self.config
        labels, facts = targets
        sums, _ = _log_probs(output, labels)
        ratio, mismatched = (sums - facts[:, :2]).unbind(1)
        is_good = facts[:, 2]
        weights = (config.desirable_weight, config.undesirable_weight)
        cost = kto_loss(ratio, mismatched, is_good, config.beta, *weights).mean()
        reward = ratio * config.beta
        good, bad = is_good.sum().clip(min=1), (1 - is_good).sum().clip(min=1)
        rewards = ((reward * is_good).sum() / good, (reward * (1 - is_good)).sum() / bad)
        return cost, dict(zip(self.told, rewards, strict=True))


class _AnswerScores(_OfPairs):
    """No loss to make small: tells the log-probabilities of answers, [batch, 2]."""

    told: tuple[str, ...] = ("scores",)

    def cost(self, model: Any, output: Any, targets: Any) -> tuple[Any, dict[str, Any]]:
        sums, _ = _log_probs(output, targets)
        return sums.mean(), {"scores": sums}


def score_reference(
    config: FinetuneConfig, trainer: Any, data: Any, folder: Path, say: Callable[[str], None] = lambda text: None
) -> None:
    """Set the reference scores of the pairs that the run reads: the log-probabilities by the model as the run begins,
    computed once under the run's plan and stored in the run's folder for when it resumes. With adapters that model is
    the base, as adapters begin at zero.

    Other pairs have NaN, so that none is read unnoticed. say: takes lines of how far it is.
    """
    if not needs_reference(config):
        return
    path, digest = folder / _REFERENCE, xxhash.xxh3_128_hexdigest(f"{data.digest} {base_digest(config.model)}".encode())
    scores = read_scores(path, digest)
    if scores is None:
        scores = [np.full((len(dataset), 2), np.nan, np.float32) for dataset in data.datasets]
    missing = [rows[np.isnan(known[rows]).any(1)] for rows, known in zip(_rows_read(config, data), scores, strict=True)]
    if any(map(len, missing)):
        _score(trainer, data.datasets, missing, scores, config.train.global_batch, say)
        if jax.process_index() == 0:
            aside = path.with_name(f".{path.name}.tmp")
            with aside.open("wb") as file:
                arrays = {str(number): array for number, array in enumerate(scores)}
                safetensors_file.write(file, arrays, {"of": digest})
            os.replace(aside, path)
    for dataset, array in zip(data.datasets, scores, strict=True):
        dataset.reference[:] = array


def _rows_read(config: FinetuneConfig, data: Any) -> list[np.ndarray]:
    """The pairs of each data set that the steps and validations of a run read."""
    size = config.train.global_batch
    validated = (
        min(config.log.validation_batches, len(data.validation) // size) if config.log.validation_interval else 0
    )
    rows: list[np.ndarray] = []
    for mixture, count in ((data.train, config.train.steps * size), (data.validation, validated * size)):
        if count >= 2 * len(mixture):  # whatever their weights and the order of a pass: as good as all
            rows += [np.arange(length) for length in mixture.lengths]
            continue
        places = {mixture.locate(number) for number in range(count)}
        of_each = [sorted(row for number, row in places if number == source) for source in range(len(mixture.lengths))]
        rows += [np.array(each, np.int64) for each in of_each]
    return rows


def read_scores(path: Path, digest: str) -> list[np.ndarray] | None:
    """The scores that score_reference stored for these pairs and weights; None if there are none, or those of
    others."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        arrays, metadata = safetensors_file.read(file, str(path))
    return [arrays[str(number)] for number in range(len(arrays))] if metadata.get("of") == digest else None


def _score(
    trainer: Any,
    datasets: Sequence[PairDataset],
    rows: Sequence[np.ndarray],
    scores: Sequence[np.ndarray],
    size: int,
    say: Callable[[str], None],
) -> None:
    """Put the log-probabilities of the answers of these rows of data sets into scores, in batches of one size."""
    score = trainer.planned.evaluator(_AnswerScores(trainer.config))
    places = [(number, row) for number, listed in enumerate(rows) for row in listed]
    count, told_at = len(places), time.monotonic()
    with eval_mode(trainer.model):
        for begin in range(0, count, size):
            batch = [places[place % count] for place in range(begin, begin + size)]  # one shape, one program
            tokens, labels = (
                np.stack([getattr(datasets[number], part)[row] for number, row in batch]).astype(np.int64)
                for part in ("tokens", "labels")
            )
            for (number, row), value in zip(batch, score(tokens, labels)["scores"], strict=True):
                scores[number][row] = value
            if time.monotonic() - told_at > _SECONDS_A_LINE:
                say(f"what the reference says of the answers: {min(begin + size, count)} of {count} pairs")
                told_at = time.monotonic()


# rewards


class RewardHead(Layer):
    """A number for a text: the product of its last token's hidden state [batch, hidden] with a vector."""

    weight: Parameter

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = self.create_parameter(
            [hidden_size], default_initializer=Normal(std=1 / np.sqrt(hidden_size + 1.0))
        )

    def forward(self, hidden: Any) -> Any:
        return (hidden * self.weight).sum(-1)


def add_reward_head(model: Any, config: FinetuneConfig) -> None:
    """Add a reward head, model.reward_head, to a decoder; it scores a text, and trains whichever other parameters
    do."""
    model.add_sublayer("reward_head", RewardHead(model.config.hidden_size))


def rewards(model: Any, tokens: Any, labels: Any) -> Any:
    """The rewards [rows] of texts [rows, seq], read where their last label, the token that ends them, is asked for."""
    return _rewards(model, model.hidden(tokens), labels)


def _rewards(model: Any, hidden: Any, labels: Any) -> Any:
    """rewards given the hidden states [rows, seq, hidden]."""
    places = (labels != NO_LABEL).astype("int64") * arange(labels.shape[1])
    index = places.max(-1).reshape([-1, 1, 1]).expand([-1, 1, hidden.shape[-1]])
    return model.reward_head(take_along_axis(hidden, index, 1).squeeze(1).astype("float32"))


class RewardObjective(_OfPairs):
    """The loss of stage rm."""

    reads: Literal["logits", "hidden"] = "hidden"
    told: tuple[str, ...] = ("rewards/chosen", "rewards/rejected", "rewards/accuracy")

    def cost(self, model: Any, output: Any, targets: Any) -> tuple[Any, dict[str, Any]]:
        labels, _ = targets
        chosen, rejected = _rewards(model, output, _by_row(labels)).reshape(labels.shape[:2]).unbind(1)
        means = (chosen.mean(), rejected.mean(), (chosen > rejected).astype("float32").mean())
        return reward_loss(chosen, rejected).mean(), dict(zip(self.told, means, strict=True))


# a teacher


class DistillationObjective(Objective):
    """The loss of stage distill: distill_weight of the divergence from the teacher's soft labels, the rest the cost of
    the tokens themselves. `teacher` is there once load_teacher has put it."""

    config: FinetuneConfig
    teacher: Any
    told: tuple[str, ...] = ("loss/soft", "loss/hard")

    def __init__(self, config: FinetuneConfig) -> None:
        self.config = config
        self.teacher = None

    def targets(self, inputs: Any, labels: Any) -> Any:
        return labels, inputs

    def cost(self, model: Any, output: Any, targets: Any) -> tuple[Any, dict[str, Any]]:
        if self.teacher is None:
            raise ConfigError("stage distill: no teacher is loaded; it computes inside a run alone")
        labels, inputs = targets
        logits = output.astype("float32")
        with no_grad():
            soft = self.teacher(inputs)
        vocab = min(logits.shape[-1], soft.shape[-1])  # rows that no token has may be more in one of them
        is_counted = (labels != NO_LABEL).astype("float32")
        soft_cost = soft_label_loss(
            logits[:, :, :vocab], soft[:, :, :vocab], is_counted, self.config.distill_temperature
        )
        cost = F.cross_entropy(logits, labels, ignore_index=NO_LABEL)
        weight = self.config.distill_weight
        return soft_cost * weight + cost * (1 - weight), {"loss/soft": soft_cost, "loss/hard": cost}


def load_teacher(
    config: FinetuneConfig, trainer: Any, data: Any, folder: Path, say: Callable[[str], None] = lambda text: None
) -> None:
    """Put the teacher's weights on the devices that compute the loss, under the run's plan."""
    assert config.teacher is not None
    teacher = load_base(config.teacher)
    known = trainer.model.config.vocab_size
    if teacher.config.vocab_size < data.writer.vocab_size or known < data.writer.vocab_size:
        raise ConfigError(
            f"teacher={config.teacher}: has {teacher.config.vocab_size} tokens, and the tokenizer "
            f"{data.writer.vocab_size}; give a teacher of the same tokenizer"
        )
    place_teacher(teacher, trainer.layout, trainer.objective)


def place_teacher(teacher: Any, layout: Layout, objective: DistillationObjective) -> None:
    """Put a teacher where an objective computes the loss: of pipeline stages the last has all of it."""
    for parameter in teacher.parameters():
        parameter.stop_gradient = True
    place_on(layout.stages[layout.plan.stage_of_chunk[-1]], teacher)
    teacher.eval()
    objective.teacher = teacher
