"""Pegasus: BARTs for summaries whose parts take normed input, with positions that began as sines and cosines.

Source: arXiv:1912.08777. Same function as transformers' PegasusForConditionalGeneration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from polyreme.models.encoder_decoders.bart import FIXED, BartConfig, BartForConditionalGeneration, published_writer
from polyreme.models.families import architecture


@dataclass(frozen=True)
class PegasusConfig(BartConfig):
    """Dimensions of a Pegasus: a BART's."""

    norm_first: ClassVar[bool] = True
    embedding_norm: ClassVar[bool] = False
    last_norm: ClassVar[bool] = True
    spare_positions: ClassVar[int] = 0

    start: int = field(default=0, metadata={"least": 0})
    pad: int = field(default=0, metadata={"least": 0})
    end: int = field(default=1, metadata={"least": 0})


class PegasusForConditionalGeneration(BartForConditionalGeneration):
    """As BartForConditionalGeneration."""

    family: Any = architecture("pegasus", "seq2seq_lm")


PUBLISHED_SEQ2SEQ_LM = published_writer(
    architecture="PegasusForConditionalGeneration",
    model_type="pegasus",
    fixed={
        **FIXED,
        "normalize_before": (True,),
        "normalize_embedding": (False,),
        "add_final_layer_norm": (True,),
        "static_position_embeddings": (True,),
    },
    defaults={"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
)
