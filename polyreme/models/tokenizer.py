"""The tokenizer of a family that names no other, and what every family's has."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from polyreme.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
"""The token after each text of a run's data, at which generation stops."""


MASK = "[MASK]"
"""The token in the place of a word that a model is asked for."""


def train_masked_byte_level_bpe(pieces: Iterator[str], vocab_size: int) -> Tokenizer:
    """train_byte_level_bpe with MASK among its tokens."""
    return train_byte_level_bpe(pieces, vocab_size, (END_OF_TEXT, MASK))


def train_byte_level_bpe(
    pieces: Iterator[str], vocab_size: int, special: tuple[str, ...] = (END_OF_TEXT,)
) -> Tokenizer:
    """Byte-level BPE of at most vocab_size tokens, trained on the pieces; it encodes and decodes any text exactly.

    special: tokens that no text becomes. Raises ConfigError for fewer tokens than hold every byte and those.

    >>> tokenizer = train_byte_level_bpe(iter(["to be", " or not to be"]), 260)
    >>> tokenizer.decode(tokenizer.encode(" be to").ids), tokenizer.get_vocab_size()
    (' be to', 260)
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(special)
    if vocab_size < smallest:
        raise ConfigError(
            f"data.tokenizer_vocab_size={vocab_size} is too small: {smallest} hold every byte and {', '.join(special)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer
