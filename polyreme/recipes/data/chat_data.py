"""Rows of conversations as a run reads them: with a tokenizer, its template, and what `polyreme data` says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyreme.data.chat_check import ChatReport, check_rows
from polyreme.data.chat_encoding import ChatEncoder, ChatForm, encode_rows
from polyreme.data.chat_preview import PLAIN, sample_lines
from polyreme.data.chat_rows import ChatRow, read_rows
from polyreme.data.chat_templates import load_template
from polyreme.data.packing import PackedDataset
from polyreme.data.text_files import BadLines
from polyreme.errors import ConfigError
from polyreme.generation.tokenizer import TextTokenizer
from polyreme.models.files import packages
from polyreme.recipes.data.chat_samples import chat_encoder, chat_tokenizer
from polyreme.recipes.data.paths import resolve
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.weights.base import load_tokenizer


@dataclass(frozen=True)
class ChatSource:
    """Rows and what makes tokens of them."""

    rows: list[ChatRow]
    tokenizer: TextTokenizer
    encoder: ChatEncoder

    def report(self) -> ChatReport:
        """Check the rows: counts of them, and their faults."""
        return check_rows(self.rows, self.encoder, self.bos)

    @property
    def bos(self) -> int | None:
        """The token that the tokenizer's folder says begins a text."""
        return self.tokenizer.bos_token_id

    def preview(self, count: int, *, is_packed: bool = True, marks: tuple[str, str] = PLAIN) -> Iterator[str]:
        """The first samples as a model sees them, in rows of as many tokens as a conversation may have."""
        chats = encode_rows(self.rows, self.encoder)
        seq_len = self.encoder.form.max_tokens
        data = PackedDataset(chats, 0, chats.num_documents, seq_len, is_packed, chats.is_asked)
        left_out = "".join(f"; {number:,} {what}" for what, number in chats.left_out.items())
        yield f"{len(self.rows):,} rows, {chats.num_documents:,} conversations in {len(data):,} samples{left_out}"
        for index in range(min(count, len(data))):
            inputs, labels = data[index]
            lines = sample_lines(
                inputs, labels, self._text, end=self.tokenizer.end, bos=self.tokenizer.bos_token_id, marks=marks
            )
            yield f"\n--- sample {index}: {next(lines)}"
            yield from lines

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def open_run_rows(config: FinetuneConfig, base: Path | None) -> Iterator[tuple[str, ChatSource]]:
    """The files that a run's data.train and data.validation name, each with its rows."""
    writer = chat_tokenizer(config, base)
    encoder = chat_encoder(config, writer)
    for key, sources in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        for source in sources:
            rows = read_rows([resolve(source.path, base, key)], source.type, BadLines(config.data.skip_bad))
            yield source.path, ChatSource(rows, writer, encoder)


def open_rows(
    paths: Sequence[Path],
    tokenizer: str,
    form: ChatForm,
    *,
    template: str | None = None,
    row_type: str | None = None,
    skip_bad: int = 0,
) -> ChatSource:
    """Rows of files with the tokenizer of a run, a folder, a GGUF file or a fetched name.

    template: by name or a .jinja file; None for the tokenizer's own. Raises what reading them raises, ConfigError for a
    tokenizer without a template.
    """
    text = load_tokenizer(packages.resolve(tokenizer))
    if template is not None:
        named = load_template(template)
        text = text.with_template(named.text, named.end)
    elif text.template is None:
        raise ConfigError(f"{tokenizer}: its tokenizer has no chat template; name one with --template, such as roles")
    rows = read_rows(paths, row_type, BadLines(skip_bad, "--skip-bad"))
    return ChatSource(rows, text, ChatEncoder(text, form))
