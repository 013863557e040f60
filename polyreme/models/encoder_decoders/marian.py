"""Marian: the translators of OPUS-MT, BARTs with sines and cosines for positions and no norm of embeddings.

Source: arXiv:1804.00344; positions arXiv:1706.03762. Same function as transformers' MarianMTModel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from polyreme.errors import ConfigError
from polyreme.models.encoder_decoders.bart import (
    FIXED,
    READ_KEYS,
    BartConfig,
    BartForConditionalGeneration,
    published_writer,
)
from polyreme.models.families import architecture


def sines_then_cosines(rows: int, width: int) -> np.ndarray:
    """Sines of each place's angles, then their cosines, float32 [rows, width].

    >>> sines_then_cosines(2, 4).round(2).tolist()[1]
    [0.8399999737739563, 0.009999999776482582, 0.5400000214576721, 1.0]
    """
    angles = np.arange(rows)[:, None] / 10000.0 ** (2 * np.arange((width + 1) // 2) / width)[None]
    return np.concatenate([np.sin(angles), np.cos(angles[:, : width // 2])], -1).astype(np.float32)


@dataclass(frozen=True)
class MarianConfig(BartConfig):
    """Dimensions of a Marian: a BART's."""

    embedding_norm: ClassVar[bool] = False
    spare_positions: ClassVar[int] = 0
    table: ClassVar[Callable[[int, int], np.ndarray] | None] = staticmethod(sines_then_cosines)

    vocab_size: int = 58101
    start: int = field(default=58100, metadata={"least": 0})
    pad: int = field(default=58100, metadata={"least": 0})
    end: int = field(default=0, metadata={"least": 0})


class MarianMTModel(BartForConditionalGeneration):
    """As BartForConditionalGeneration."""

    family: Any = architecture("marian", "seq2seq_lm")


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = config["vocab_size"], config.get("decoder_vocab_size")
    if sizes[1] not in (None, sizes[0]):
        raise ConfigError(
            f"config.json of a marian: decoder_vocab_size is {sizes[1]}, and vocab_size {sizes[0]}; only one table of "
            "embeddings can be had here"
        )
    return {}


PUBLISHED_SEQ2SEQ_LM = published_writer(
    architecture="MarianMTModel",
    model_type="marian",
    fixed={
        **FIXED,
        "share_encoder_decoder_embeddings": (True,),
        "normalize_before": (False,),
        "normalize_embedding": (False,),
        "add_final_layer_norm": (False,),
        "static_position_embeddings": (True,),
    },
    read=_read,
    write=lambda config: {"decoder_vocab_size": config.vocab_size},
    read_keys=(*READ_KEYS, "decoder_vocab_size"),
    defaults={"decoder_start_token_id": 58100, "pad_token_id": 58100, "eos_token_id": 0},
)
