"""Stage grpo: groups of texts that the model itself writes, judged by a rule, and the loss that favours good ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from polyreme.data.blend import Mixture, StreamSampler
from polyreme.data.chat_preview import PLAIN
from polyreme.data.chat_rows import read_rows
from polyreme.data.packing import NO_LABEL
from polyreme.data.text_files import BadLines
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import DataError, NumericsError
from polyreme.generation import SamplingParams, TextEngine
from polyreme.jit import to_static
from polyreme.nn import functional as F
from polyreme.nn.eval_mode import eval_mode
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.data.batches import Batch
from polyreme.recipes.data.chat_samples import TuningData, chat_tokenizer
from polyreme.recipes.data.paths import resolve
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.training.rewards import load_reward
from polyreme.recipes.weights.base import load_base
from polyreme.training.preference import policy_loss

PAD = -1
"""What stands behind a prompt."""
_FORMAT = 1  # raised when the same files give other samples, so that no run is resumed on them
_LEAST_SPREAD = 1e-4  # of the rewards of a group, so that equal ones give no advantage


def token_log_probs(model: Any, tokens: Any, labels: Any) -> Any:
    """Log-probabilities of labels [rows, seq] after tokens [rows, seq]; 0 where there is none."""
    logits = model(tokens).astype("float32")
    return -F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none").reshape(labels.shape)


def group_loss(config: FinetuneConfig) -> Callable[[Any, Any, Any], Any]:
    """The loss of groups of texts: tokens [batch, group, seq], and what Rollouts says of them."""

    def loss(model: Any, tokens: Any, targets: Any) -> Any:
        labels, old, reference, facts = targets
        batch, group, seq = labels.shape
        rows = [batch * group, seq]
        labels = labels.reshape(rows)
        logprobs = token_log_probs(model, tokens.reshape(rows), labels)
        advantages, rewards = facts.unbind(-1)
        is_counted = (labels != NO_LABEL).astype("float32")
        cost = policy_loss(
            logprobs,
            old.reshape(rows),
            reference.reshape(rows),
            advantages.reshape([batch * group]),
            is_counted,
            config.clip_ratio,
            config.kl_weight,
        )
        return cost.mean(), {"reward": rewards.mean(), "tokens": is_counted.sum(-1).mean()}

    return loss


class Rollouts:
    """Writes a group of texts after each prompt of a batch with the model as it is, and judges them.

    A text's draws follow from the seed, the step, the sample and its place in the group alone, so that a run that
    resumes draws the same. Where kl_weight is not 0 the reference is a frozen copy of the weights that the run began
    with.
    """

    config: FinetuneConfig
    trainer: Any
    writer: Any
    reference: Any | None
    engine: TextEngine

    def __init__(self, config: FinetuneConfig, trainer: Any, data: Any) -> None:
        self.config, self.trainer, self.writer = config, trainer, data.writer
        self.reward = load_reward(config.reward)
        self.reference = load_base(config.model) if config.kl_weight else None
        if self.reference is not None:
            self.reference.eval()
        self.engine = TextEngine(
            trainer.model,
            self.writer.end,
            self.writer.vocab_size,
            max_model_len=min(trainer.model.config.seq_len, config.max_seq_len + 1),
            enable_prefix_caching=False,  # weights are other ones in every step
        )
        self._old = to_static(lambda tokens, labels: token_log_probs(trainer.model, tokens, labels))
        self._before = to_static(lambda tokens, labels: token_log_probs(self.reference, tokens, labels))
        trainer.model.train()

    def __call__(self, batch: Batch, step: int) -> Batch:
        """The inputs of the loss, given prompts and known answers as PromptDataset has them."""
        group, seq = self.config.group_size, self.config.max_seq_len
        shape = (len(batch.ids), group, seq)
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, NO_LABEL, np.int64)
        rewards = np.zeros(shape[:2], np.float32)
        prompts = [
            (prompt[prompt != PAD].tolist(), self.writer.decode(known[known != NO_LABEL].tolist()))
            for prompt, known in zip(batch.inputs, batch.labels, strict=True)
        ]
        with eval_mode(self.trainer.model), no_grad():
            texts = self._write([ids for ids, _ in prompts], batch.ids, step)
            for number, (prompt, answer) in enumerate(prompts):
                for copy in range(group):
                    new = texts[number * group + copy]
                    ids = [*prompt, *new]
                    tokens[number, copy, : len(ids) - 1] = ids[:-1]
                    labels[number, copy, len(prompt) - 1 : len(ids) - 1] = new
                    rewards[number, copy] = self.reward(self.writer.decode(new), answer)
            flat = [to_tensor(array.reshape(-1, seq)) for array in (tokens, labels)]
            old = self._old(*flat).numpy().reshape(shape)
            reference = old if self.reference is None else self._before(*flat).numpy().reshape(shape)
        spread = rewards.std(1, keepdims=True) + _LEAST_SPREAD
        facts = np.stack([(rewards - rewards.mean(1, keepdims=True)) / spread, rewards], -1).astype(np.float32)
        return Batch(batch.ids, tokens, (labels, old, reference, facts))

    def _write(self, prompts: list[list[int]], samples: np.ndarray, step: int) -> list[list[int]]:
        """group_size texts after each prompt, token ids with the one that ends a text."""
        config, texts = self.config, {}
        for prompt, sample in zip(prompts, samples.tolist(), strict=True):
            room = min(config.max_new_tokens, config.max_seq_len + 1 - len(prompt))
            for copy in range(config.group_size):
                seed = xxhash.xxh3_64_intdigest(b"%d %d %d %d" % (config.train.seed, step, sample, copy)) >> 2
                # the token that ends a text is learnt, and so is taken as one of it
                params = SamplingParams(temperature=config.temperature, max_tokens=room, seed=seed, ignore_eos=True)
                name = f"{len(texts)}"
                self.engine.add(name, prompt, params)
                texts[name] = []
        while self.engine.has_unfinished:
            for output in self.engine.step():
                if output.finish_reason == "error":
                    raise NumericsError(f"step {step}: logits are not finite while texts are written; lower the rate")
                for token in output.token_ids:
                    texts[output.request_id].append(token)
                    if token in self.writer.end:
                        self.engine.abort(output.request_id)
                        break
        return list(texts.values())


# prompts


class PromptDataset:
    """Prompts and the answers that are known: item i is (prompt int32 [seq], PAD behind it; answer int32 [seq],
    NO_LABEL behind it)."""

    prompts: np.ndarray
    answers: np.ndarray

    def __init__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], seq_len: int) -> None:
        self.prompts = np.full((len(pairs), seq_len), PAD, np.int32)
        self.answers = np.full((len(pairs), seq_len), NO_LABEL, np.int32)
        for number, (prompt, answer) in enumerate(pairs):
            self.prompts[number, : len(prompt)] = prompt
            self.answers[number, : len(answer)] = answer

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.prompts[index], self.answers[index]


@dataclass(frozen=True, kw_only=True)
class Prompts(TuningData):
    """Prompts of a run."""

    left_out: int

    @property
    def summary(self) -> str:
        """The size of the data, in words."""
        lost = f"; {self.left_out:,} left out, which leave no room for an answer" if self.left_out else ""
        return f"{len(self.train):,} prompts{lost}"

    def shown(self, index: int, marks: tuple[str, str] = PLAIN) -> str:
        """A training prompt, and between marks the answer that is known."""
        prompt, answer = self.train[index]
        before = self.writer.decode(prompt[prompt != PAD].tolist(), skip_special_tokens=False)
        return f"{before}{marks[0]}{self.writer.decode(answer[answer != NO_LABEL].tolist())}{marks[1]}"


def load_prompts(config: FinetuneConfig, base: Path | None = None) -> Prompts:
    """The last questions of the conversations that data.train names, with what is before them, and their answers.

    Raises as chat_samples.load_chats does.
    """
    writer = chat_tokenizer(config, base)
    bad = BadLines(config.data.skip_bad)
    parts, left_out = [], 0
    for source in config.data.train:
        pairs = []
        for row in read_rows([resolve(source.path, base, "data.train")], source.type, bad):
            prompt = writer.encode_chat(row.messages[:-1])
            answer = writer.encode(row.messages[-1]["content"], add_special_tokens=False)
            if len(prompt) + config.max_new_tokens > config.max_seq_len + 1 or len(answer) > config.max_seq_len:
                left_out += 1
                continue
            pairs.append((prompt, answer))
        parts.append(PromptDataset(pairs, config.max_seq_len))
    if not all(map(len, parts)) or sum(map(len, parts)) < config.train.global_batch:
        raise DataError(
            f"data.train: {', '.join(map(str, map(len, parts)))} prompts that leave room for max_new_tokens="
            f"{config.max_new_tokens} in max_seq_len={config.max_seq_len}; train.global_batch="
            f"{config.train.global_batch} are needed"
        )
    weights = [source.weight or len(part) for source, part in zip(config.data.train, parts, strict=True)]
    state = xxhash.xxh3_128(repr((_FORMAT, weights)).encode())
    for part in parts:
        state.update(part.prompts.tobytes() + part.answers.tobytes())
    mixture = Mixture(parts, weights, config.data.seed)
    return Prompts(
        train=mixture,
        validation=mixture,
        digest=state.hexdigest(),
        left_out=left_out,
        sampler=partial(StreamSampler, multiple=config.train.global_batch),
        writer=writer,
    )


def check_prompts(batch: Batch, model: ModelConfig, what: str) -> None:
    """Raises DataError for a token that the model has no row for."""
    if batch.inputs.max() >= model.vocab_size:
        raise DataError(f"{what}: a prompt has token {batch.inputs.max()}, and the model {model.vocab_size}")


def random_groups(config: FinetuneConfig, steps: int) -> list[tuple[np.ndarray, Any]]:
    """Random tokens [batch, group, seq] and the other inputs of the loss for each step, drawn from the train seed."""
    rng = np.random.default_rng(config.train.seed)
    shape = (config.train.global_batch, config.group_size, config.max_seq_len)
    batches: list[tuple[np.ndarray, Any]] = []
    for _ in range(steps):
        tokens, labels = rng.integers(0, config.dimensions.vocab_size, (2, *shape))
        old, reference = -rng.uniform(1, 9, (2, *shape)).astype(np.float32)
        batches.append((tokens, (labels, old, reference, rng.standard_normal((*shape[:2], 2), np.float32))))
    return batches
