"""Pairs of answers as the data of a run: better and worse ones, or judged ones beside answers to other questions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from polyreme.data.blend import Mixture, StreamSampler
from polyreme.data.chat_encoding import ChatEncoder, EncodedChat
from polyreme.data.chat_preview import PLAIN, sample_lines
from polyreme.data.chat_rows import ChatRow, check_kind, read_rows
from polyreme.data.packing import NO_LABEL
from polyreme.data.text_files import BadLines
from polyreme.errors import DataError
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.data.batches import Batch, ids_text
from polyreme.recipes.data.chat_samples import TuningData, chat_encoder, chat_tokenizer
from polyreme.recipes.data.paths import resolve
from polyreme.recipes.finetune_config import ConversationSource, FinetuneConfig

_FORMAT = 1  # raised when the same files give other samples, so that no run is resumed on them


class PairDataset:
    """Pairs of conversations, padded: item i is (tokens int32 [2, seq], labels int32 [2, seq], facts float32 [3]).

    Where nothing is asked labels are NO_LABEL. facts: the log-probabilities of both by the reference model, which
    `reference` [pairs, 2] gets before training, and whether the first one was judged desirable.
    """

    tokens: np.ndarray
    labels: np.ndarray
    is_good: np.ndarray
    reference: np.ndarray

    def __init__(self, pairs: Sequence[tuple[EncodedChat, EncodedChat]], is_good: Sequence[bool], seq_len: int) -> None:
        shape = (len(pairs), 2, seq_len)
        self.tokens, self.labels = np.zeros(shape, np.int32), np.full(shape, NO_LABEL, np.int32)
        self.is_good = np.array(is_good, np.float32)
        self.reference = np.zeros((len(pairs), 2), np.float32)
        for number, pair in enumerate(pairs):
            for side, chat in enumerate(pair):
                count = len(chat.ids) - 1
                self.tokens[number, side, :count] = chat.ids[:-1]
                self.labels[number, side, :count] = np.where(chat.is_asked[1:], chat.ids[1:], NO_LABEL)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        facts = np.array([*self.reference[index], self.is_good[index]], np.float32)
        return self.tokens[index], self.labels[index], facts

    @property
    def digest(self) -> str:
        """xxh3_128 of the pairs, hex; of what a reference says nothing."""
        state = xxhash.xxh3_128()
        for array in (self.tokens, self.labels, self.is_good):
            state.update(array.tobytes())
        return state.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Pairs(TuningData):
    """Pairs of a run. datasets: those of train and validation."""

    datasets: tuple[PairDataset, ...]
    left_out: dict[str, int]

    @property
    def summary(self) -> str:
        """The size of the data, in words."""
        lost = "".join(f"; {count:,} {what}" for what, count in self.left_out.items())
        return f"{sum(map(len, self.datasets)):,} pairs{lost}"

    def shown(self, index: int, marks: tuple[str, str] = PLAIN) -> str:
        """A training pair as the model sees it, decoded again; marks: what stands around that which is asked."""
        tokens, labels, _ = self.train[index]
        facts = {"end": self.writer.end, "bos": self.writer.bos_token_id, "marks": marks}
        sides = (sample_lines(tokens[side], labels[side], self.text_of, **facts) for side in (0, 1))
        return "\n".join(line for lines in sides for line in lines)


def load_preferences(config: FinetuneConfig, base: Path | None = None) -> Pairs:
    """The pairs that data.train and data.validation name, from rows with chosen and rejected.

    Raises as chat_samples.load_chats does.
    """
    return _load(config, base, "preference", lambda rows: [(row, row.messages, row.rejected) for row in rows])


def load_judged(config: FinetuneConfig, base: Path | None = None) -> Pairs:
    """The same of rows with a label; beside each answer stands the next row's, as one to its own question."""
    return _load(config, base, "judgement", lambda rows: list(_mismatched(rows)))


def _mismatched(rows: Sequence[ChatRow]) -> Iterator[tuple[ChatRow, Any, Any]]:
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        yield row, row.messages, (*row.messages[:-1], other.messages[-1])


def _load(config: FinetuneConfig, base: Path | None, kind: str, sides: Any) -> Pairs:
    writer = chat_tokenizer(config, base)
    encoder, bad = chat_encoder(config, writer), BadLines(config.data.skip_bad)
    left_out: Counter[str] = Counter()

    def encoded(sources: Sequence[ConversationSource], key: str) -> list[list[tuple[EncodedChat, EncodedChat, bool]]]:
        lists = []
        for source in sources:
            rows = read_rows([resolve(source.path, base, key)], source.type, bad)
            check_kind(rows, kind, config.stage)
            pairs = []
            for row, first, second in sides(rows):
                pair = _pair(row, first, second, encoder, bad, left_out)
                if pair is not None:
                    pairs.append((*pair, bool(row.is_desirable)))
            lists.append(pairs)
        return lists

    lists, others = encoded(config.data.train, "data.train"), encoded(config.data.validation, "data.validation")
    held_out = 0.0 if others else config.data.validation_fraction
    counts = [max(1, round(len(pairs) * held_out)) if held_out else 0 for pairs in lists]
    train = [_dataset(pairs[: len(pairs) - count], config) for pairs, count in zip(lists, counts, strict=True)]
    rest = others or [pairs[len(pairs) - count :] for pairs, count in zip(lists, counts, strict=True)]
    validation = [_dataset(pairs, config) for pairs in rest]
    mixtures = []
    for key, sources, parts, needed in (
        ("data.train", config.data.train, train, config.train.global_batch),
        (
            "data.validation" if others else "data.validation_fraction",
            config.data.validation or config.data.train,
            validation,
            config.train.global_batch if config.log.validation_interval else 0,
        ),
    ):
        if not all(map(len, parts)) or sum(map(len, parts)) < needed:
            rows = ", ".join(f"{source.path} {len(part)}" for source, part in zip(sources, parts, strict=True))
            larger = ", a larger validation_fraction" if key == "data.validation_fraction" else ""
            larger += ", or log.validation_interval=0 to do without" if key != "data.train" and needed else ""
            raise DataError(
                f"{key}: pairs: {rows}; at least one of each, and train.global_batch={needed} in all are needed; give "
                f"more rows, a smaller batch{larger}"
            )
        weights = [source.weight or len(part) for source, part in zip(sources, parts, strict=True)]
        mixtures.append(Mixture(parts, weights, config.data.seed))
    datasets = (*train, *validation)
    facts = [_FORMAT, [data.digest for data in datasets], *(mixture.blend.shares for mixture in mixtures)]
    return Pairs(
        train=mixtures[0],
        validation=mixtures[1],
        datasets=datasets,
        digest=xxhash.xxh3_128_hexdigest(json.dumps(facts).encode()),
        left_out=dict(left_out),
        sampler=partial(StreamSampler, multiple=config.train.global_batch),
        writer=writer,
    )


def _pair(
    row: ChatRow, first: Any, second: Any, encoder: ChatEncoder, bad: BadLines, left_out: Counter[str]
) -> tuple[EncodedChat, EncodedChat] | None:
    """Both sides of a row; None where one of them is left out. Only the last answer is asked about."""
    try:
        chats = [encoder.encode(replace(row, messages=tuple(side), rejected=None)) for side in (first, second)]
    except DataError as error:
        bad.leave_out(row.place, str(error).removeprefix(f"{row.place}: "), "mend it")
        return None
    for chat in chats:
        left_out.update(chat.left_out)
    return None if any(chat.is_empty for chat in chats) else (chats[0], chats[1])


def _dataset(pairs: Sequence[tuple[EncodedChat, EncodedChat, bool]], config: FinetuneConfig) -> PairDataset:
    return PairDataset([(a, b) for a, b, _ in pairs], [good for _, _, good in pairs], config.max_seq_len)


def random_pairs(config: FinetuneConfig, steps: int) -> list[tuple[np.ndarray, Any]]:
    """Random tokens [batch, 2, seq] and (labels, facts) for each step, drawn from the train seed."""
    rng = np.random.default_rng(config.train.seed)
    shape = (config.train.global_batch, 2, config.max_seq_len)
    batches: list[tuple[np.ndarray, Any]] = []
    for _ in range(steps):
        tokens, labels = rng.integers(0, config.dimensions.vocab_size, (2, *shape))
        facts = np.concatenate([-rng.uniform(1, 9, (shape[0], 2)), rng.integers(0, 2, (shape[0], 1))], 1)
        batches.append((tokens, (labels, facts.astype(np.float32))))
    return batches


def check_pairs(batch: Batch, model: ModelConfig, what: str) -> None:
    """Raises DataError naming the samples for a token outside 0..model.vocab_size - 1."""
    labels = batch.labels[0]
    values = np.where(labels == NO_LABEL, 0, labels)
    for name, array in (("token", batch.inputs), ("label", values)):
        if array.size and not (array.min() >= 0 and array.max() < model.vocab_size):
            raise DataError(
                f"{what}: samples {ids_text(batch.ids)} have a {name} outside 0 to {model.vocab_size - 1}; the "
                "tokenizer is not the model's"
            )
