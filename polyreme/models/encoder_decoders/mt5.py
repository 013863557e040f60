"""mT5: a T5 of a hundred languages, with gated feed-forwards and a head of its own.

Source: arXiv:2010.11934. Same function as transformers' MT5ForConditionalGeneration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from polyreme.models.encoder_decoders.t5 import PUBLISHED_SEQ2SEQ_LM as T5_PUBLISHED
from polyreme.models.encoder_decoders.t5 import T5Config, T5ForConditionalGeneration
from polyreme.models.families import architecture


@dataclass(frozen=True)
class MT5Config(T5Config):
    """Dimensions of an mT5: a T5's."""

    vocab_size: int = 250112
    ffn_size: int = 1024
    activation: str = "gelu_new"
    gated: bool = True
    tie_embeddings: bool = False


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    """As T5ForConditionalGeneration."""

    family: Any = architecture("mt5", "seq2seq_lm")


PUBLISHED_SEQ2SEQ_LM = replace(
    T5_PUBLISHED,
    architecture="MT5ForConditionalGeneration",
    model_type="mt5",
    defaults={"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False},
    # of tokenizers
    read_keys=("tokenizer_class", *T5_PUBLISHED.read_keys),
)
