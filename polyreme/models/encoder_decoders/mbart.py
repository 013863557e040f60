"""mBART: a BART of many languages whose parts take normed input.

Source: arXiv:2001.08210, arXiv:2008.00401. Same function as transformers' MBartForConditionalGeneration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from polyreme.models.encoder_decoders.bart import FIXED, BartConfig, BartForConditionalGeneration, published_writer
from polyreme.models.families import architecture
from polyreme.ops.creation import full_like
from polyreme.ops.indices.gather import take_along_axis, where
from polyreme.ops.manipulation import concat


@dataclass(frozen=True)
class MBartConfig(BartConfig):
    """Dimensions of an mBART: a BART's. start: where texts are written after a language of their own, that of the
    first token; labels say it themselves."""

    norm_first: ClassVar[bool] = True
    last_norm: ClassVar[bool] = True

    vocab_size: int = 250054


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """As BartForConditionalGeneration, but for what is written where nothing says it: labels end with a language, which
    the decoder takes first."""

    family: Any = architecture("mbart", "seq2seq_lm")

    def shifted(self, labels: Any) -> Any:
        """Labels [batch, s] after the last token of their row that is not padding."""
        pad = self.config.pad
        written = where(labels == -100, full_like(labels, pad), labels)
        last = (written != pad).astype("int64").sum(1, keepdim=True) - 1
        return concat([take_along_axis(written, last, 1), written[:, :-1]], axis=1)


PUBLISHED_SEQ2SEQ_LM = published_writer(
    architecture="MBartForConditionalGeneration",
    model_type="mbart",
    fixed={
        **FIXED,
        "normalize_before": (True,),
        "normalize_embedding": (True,),
        "add_final_layer_norm": (True,),
        "static_position_embeddings": (False,),
    },
    defaults={"pad_token_id": 1, "eos_token_id": 2},
)
