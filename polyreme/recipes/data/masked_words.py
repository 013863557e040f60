"""Rows of text with masked words as the data of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from polyreme.data.masking import MaskedDataset, num_asked
from polyreme.data.packing import NO_LABEL, PackedDataset
from polyreme.errors import ConfigError, DataError
from polyreme.models.tokenizer import MASK
from polyreme.recipes.config import ModelConfig, PretrainConfig
from polyreme.recipes.corpus import Corpus, RowForm
from polyreme.recipes.data.batches import Batch
from polyreme.recipes.data.text_data import load_corpus, random_documents

_MASKS = (MASK, "<mask>")


@dataclass(frozen=True)
class MaskedCorpus(Corpus):
    """Prepared data whose samples ask for masked words."""

    def shown(self, index: int, marks: Any = None) -> str:
        """A training sample as the model sees it, and what it is asked for; marks have no use."""
        (tokens, ends, places), (asked, ids) = self.train[index]
        begins = [int(begin) for begin in np.flatnonzero(places == 0) if ends[begin] > begin + 1]
        wanted = [self._text(ids[asked == place]) for place in asked[asked != NO_LABEL]]
        texts = [self._text(tokens[begin : ends[begin]]) for begin in begins]
        return "\n".join([f"{len(tokens)} tokens, {len(wanted)} asked for: {' | '.join(wanted)}", *texts])


def load_masked(config: PretrainConfig, base: Path | None = None) -> MaskedCorpus:
    """The text of a run, as text_data.load_corpus prepares it. Raises ConfigError for a tokenizer without a token for
    what is masked, and what preparing raises."""
    data, vocab_size = config.data, config.dimensions.vocab_size

    def masked(rows: PackedDataset, tokenizer: Path) -> MaskedDataset:
        mask = _mask_of(tokenizer, vocab_size)
        return MaskedDataset(rows, mask, vocab_size, data.seed, data.mask_rate, data.mask_copies)

    corpus = load_corpus(config, base, RowForm(0, masked))
    return MaskedCorpus(**{name: getattr(corpus, name) for name in Corpus.__dataclass_fields__})


def _mask_of(path: Path, vocab_size: int) -> int:
    """The token of what is masked; of made-up tokens the last."""
    if not path.exists():
        return vocab_size - 1
    tokenizer = Tokenizer.from_file(str(path))
    mask = next((i for name in _MASKS if (i := tokenizer.token_to_id(name)) is not None), None)
    if mask is None:
        raise ConfigError(f"{path}: the tokenizer has none of {' '.join(_MASKS)} for masked words; use another")
    return mask


def random_masked(config: PretrainConfig, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random arrays of a batch for each step, drawn from the train seed: rows of documents of 4 tokens on average."""
    rng = np.random.default_rng(config.train.seed)
    rows, seq_len, vocab_size = config.train.global_batch, config.dimensions.seq_len, config.dimensions.vocab_size
    most = num_asked(seq_len, config.data.mask_rate)
    batches = []
    for _ in range(steps):
        inputs = random_documents(rng.integers(0, vocab_size, (rows, seq_len)), rng)
        places = np.sort(rng.permuted(np.tile(np.arange(seq_len), (rows, 1)), axis=1)[:, :most], axis=1)
        asked = np.stack([places, np.take_along_axis(inputs[:, 0], places, 1)], 1)
        asked[:, :, most - rng.integers(0, most) :] = NO_LABEL  # fewer in some
        np.put_along_axis(inputs[:, 0], places, vocab_size - 1, 1)
        batches.append((inputs, asked))
    return batches


def check_masked(batch: Batch, model: ModelConfig, what: str) -> None:
    """Raises DataError naming the sample for tokens outside the vocabulary and places outside the row."""
    asked: Any = np.where(batch.labels == NO_LABEL, 0, batch.labels)
    ranges = (
        ("token", batch.inputs[:, 0], model.vocab_size),
        ("place of a masked word", asked[:, 0], batch.inputs.shape[-1]),
        ("masked word", asked[:, 1], model.vocab_size),
    )
    for name, values, size in ranges:
        if values.size and not (values.min() >= 0 and values.max() < size):
            row, at = np.argwhere((values < 0) | (values >= size))[0]
            raise DataError(
                f"{what}: sample {batch.ids[row]} has {name} {values[row, at]}; there are 0 to {size - 1}; mend that "
                "sample, or raise model.vocab_size"
            )
