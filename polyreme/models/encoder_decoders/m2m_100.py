"""M2M-100 and NLLB-200: translators between any two of their languages, whose places are counted without padding.

Source: arXiv:2010.11125, arXiv:2207.04672. Same function as transformers' M2M100ForConditionalGeneration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from polyreme.models.encoder_decoders.bart import FIXED, BartConfig, BartForConditionalGeneration, published_writer
from polyreme.models.families import architecture


def evenly_spaced_sines(rows: int, width: int) -> np.ndarray:
    """Sines of each place's angles, then their cosines, the slowest being that of a 10,000th, float32 [rows, width]; of
    nothing at the padding's place, 1."""
    half = width // 2
    angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(half) / max(half - 1, 1))[None]
    table = np.concatenate([np.sin(angles), np.cos(angles), np.zeros((rows, width % 2))], -1).astype(np.float32)
    table[1] = 0
    return table


@dataclass(frozen=True)
class M2M100Config(BartConfig):
    """Dimensions of an M2M-100: a BART's."""

    norm_first: ClassVar[bool] = True
    embedding_norm: ClassVar[bool] = False
    last_norm: ClassVar[bool] = True
    logit_bias: ClassVar[bool] = False
    table: ClassVar[Callable[[int, int], np.ndarray] | None] = staticmethod(evenly_spaced_sines)

    vocab_size: int = 128112
    activation: str = "relu"
    scale_embedding: bool = True


class M2M100ForConditionalGeneration(BartForConditionalGeneration):
    """As BartForConditionalGeneration, but for places, of which padding has none; so rows may be padded before."""

    family: Any = architecture("m2m_100", "seq2seq_lm")

    def places(self, ids: Any) -> Any:
        """The place of each of ids [batch, s], counted without padding, whose place is -1."""
        super().places(ids)
        is_token = (ids != self.config.pad).astype("int32")
        return is_token.cumsum(1) * is_token - 1


PUBLISHED_SEQ2SEQ_LM = published_writer(
    architecture="M2M100ForConditionalGeneration",
    model_type="m2m_100",
    fixed={**FIXED, "pad_token_id": (1,)},
    defaults={
        "decoder_start_token_id": 2,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "activation_function": "relu",
        "scale_embedding": True,
        "attention_dropout": 0.1,
    },
)
