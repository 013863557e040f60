"""Conversations as the data of a run: encoded by the base's tokenizer, packed or padded, mixed by weight."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from polyreme.data.blend import Mixture, StreamSampler
from polyreme.data.chat_encoding import ChatEncoder, ChatForm, ChatTokens, encode_rows
from polyreme.data.chat_preview import PLAIN, sample_lines
from polyreme.data.chat_rows import check_kind, read_rows
from polyreme.data.chat_templates import load_template
from polyreme.data.packing import PackedDataset
from polyreme.data.text_files import BadLines
from polyreme.errors import DataError
from polyreme.generation.tokenizer import TextTokenizer
from polyreme.models.files import packages
from polyreme.recipes.data.paths import resolve
from polyreme.recipes.finetune_config import ConversationSource, FinetuneConfig
from polyreme.recipes.weights.base import load_tokenizer

_FORMAT = 1  # raised when the same files give other samples, so that no run is resumed on them


@dataclass(frozen=True, kw_only=True)
class TuningData:
    """The data of a fine-tuning run, as Corpus is of a text: both splits, the digest that a resumed run compares, the
    order in which samples are read, and the tokenizer with its template."""

    train: Any
    validation: Any
    digest: str
    sampler: Any
    writer: TextTokenizer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the tokens."""
        return self.writer.tokenizer

    def keep_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer, its template and the tokens that end a text beside what a run leaves."""
        self.writer.save_pretrained(folder)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones shown."""
        return self.writer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True, kw_only=True)
class Chats(TuningData):
    """Conversations of a run."""

    num_tokens: int
    num_conversations: int
    num_asked: int
    left_out: dict[str, int]

    @property
    def summary(self) -> str:
        """The size of the data, in words."""
        lost = "".join(f"; {count:,} {what}" for what, count in self.left_out.items())
        return (
            f"{self.num_conversations:,} conversations of {self.num_tokens:,} tokens, {self.num_asked:,} of them "
            f"learnt{lost}"
        )

    def shown(self, index: int, marks: tuple[str, str] = PLAIN) -> str:
        """A training sample as the model sees it, decoded again; marks: what stands around that which is learnt."""
        end, bos = self.writer.end, self.writer.bos_token_id
        inputs, labels = self.train[index]
        return "\n".join(sample_lines(inputs, labels, self.text_of, end=end, bos=bos, marks=marks))


def chat_tokenizer(config: FinetuneConfig, base: Path | None = None) -> TextTokenizer:
    """The tokenizer of the model that is fine-tuned, with the template that the configuration names."""
    writer = load_tokenizer(packages.resolve(config.model))
    if config.template is None:
        return writer
    named = load_template(config.template, base)
    return writer.with_template(named.text, named.end)


def chat_encoder(config: FinetuneConfig, writer: TextTokenizer) -> ChatEncoder:
    """The encoder by which a run turns conversations into tokens."""
    form = ChatForm(config.max_seq_len + 1, config.train_on_prompt, config.mask_history, config.data.truncation)
    return ChatEncoder(writer, form)


def load_chats(config: FinetuneConfig, base: Path | None = None) -> Chats:
    """The conversations that data.train and data.validation name, encoded.

    Raises ConfigError for a template that does not close its answers, DataError with file, line and field for rows that
    cannot be read, and for a split too short for one batch.
    """
    data, seq_len = config.data, config.max_seq_len
    writer = chat_tokenizer(config, base)
    encoder, bad = chat_encoder(config, writer), BadLines(data.skip_bad)

    def encoded(sources: Sequence[ConversationSource], key: str) -> list[ChatTokens]:
        chats = []
        for source in sources:
            rows = read_rows([resolve(source.path, base, key)], source.type, bad)
            check_kind(rows, "answers", config.stage)
            chats.append(encode_rows(rows, encoder, bad))
        return chats

    chats, others = encoded(data.train, "data.train"), encoded(data.validation, "data.validation")
    held_out = 0.0 if others else data.validation_fraction
    splits = [_split_samples(chat, held_out, seq_len, config.packing) for chat in chats]
    validation = [_split_samples(chat, 0.0, seq_len, config.packing)[0] for chat in others]
    mixtures = []
    for key, sources, parts, needed in (
        ("data.train", data.train, [train for train, _ in splits], config.train.global_batch),
        (
            "data.validation" if others else "data.validation_fraction",
            data.validation or data.train,
            validation or [part for _, part in splits],
            config.train.global_batch if config.log.validation_interval else 0,
        ),
    ):
        count = sum(map(len, parts))
        if not all(map(len, parts)) or count < needed:
            rows = ", ".join(f"{source.path} {len(part)}" for source, part in zip(sources, parts, strict=True))
            ways = ["give more conversations", "a smaller batch"]
            ways += ["a shorter max_seq_len or packing=false"] if config.packing else []
            ways += ["a larger validation_fraction"] if key == "data.validation_fraction" else []
            ways += ["or log.validation_interval=0 to do without"] if key != "data.train" and needed else []
            raise DataError(
                f"{key}: samples of max_seq_len={seq_len} tokens: {rows}; at least one of each, and "
                f"train.global_batch={needed} in all are needed; {', '.join(ways)}"
            )
        weights = [source.weight or len(part) for source, part in zip(sources, parts, strict=True)]
        mixtures.append(Mixture(parts, weights, data.seed))
    facts = [_FORMAT, seq_len, config.packing, held_out, [chat.digest for chat in (*chats, *others)]]
    facts += [mixture.blend.shares for mixture in mixtures]
    left_out: Counter[str] = Counter()
    for chat in (*chats, *others):
        left_out.update(chat.left_out)
    return Chats(
        train=mixtures[0],
        validation=mixtures[1],
        digest=xxhash.xxh3_128_hexdigest(json.dumps(facts).encode()),
        num_tokens=sum(len(chat.ids) for chat in chats),
        num_conversations=sum(chat.num_documents for chat in chats),
        num_asked=sum(int(chat.is_asked.sum()) for chat in chats),
        left_out=dict(left_out),
        sampler=partial(StreamSampler, multiple=config.train.global_batch),
        writer=writer,
    )


def _split_samples(
    chats: ChatTokens, held_out: float, seq_len: int, is_packed: bool
) -> tuple[PackedDataset, PackedDataset]:
    """Samples of all but the last conversations, and of those, which are about this part."""
    count = chats.num_documents
    first = count - max(1, round(count * held_out)) if held_out else count
    return (
        PackedDataset(chats, 0, first, seq_len, is_packed, chats.is_asked),
        PackedDataset(chats, first, count, seq_len, is_packed, chats.is_asked),
    )
