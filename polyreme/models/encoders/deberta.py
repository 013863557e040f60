"""DeBERTa: a BERT whose scores also compare tokens with the distance between two places, by maps of its own.

Source: arXiv:2006.03654 (equation 4). Same functions as transformers' DebertaModel and its kin for masked words,
classes of texts and of tokens, and answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from polyreme.models.encoders import deberta_v2
from polyreme.models.encoders.bert import Bert
from polyreme.models.encoders.deberta_v2 import (
    DebertaV2,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2ForQuestionAnswering,
    DebertaV2ForSequenceClassification,
    DebertaV2ForTokenClassification,
    DistanceAttention,
)
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, Changed, Conversion, Index, WeightRule, WeightSource
from polyreme.models.parts.encoder import linear, linear_rules
from polyreme.nn.layers.linear import Linear


@dataclass(frozen=True)
class DebertaConfig(DebertaV2Config):
    """Dimensions of a DeBERTa: a DebertaV2Config's, without buckets and norms of distances."""

    position_buckets: ClassVar[int] = 0  # type: ignore[misc]  # a field there
    normed_distances: ClassVar[bool] = False  # type: ignore[misc]

    vocab_size: int = 50265


class MappedDistanceAttention(DistanceAttention):
    """A DistanceAttention with maps of distances beside those of queries and keys; those of keys add nothing."""

    far_q: Linear
    far_k: Linear

    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__(width, num_heads, dropout)
        self.k, self.far_k = (linear(width, width, ("embed", "heads"), bias=False) for _ in range(2))
        self.far_q = linear(width, width, ("embed", "heads"))

    def distance_maps(self) -> tuple[Linear, Linear]:
        """What makes queries and keys of distances."""
        return self.far_q, self.far_k


class Deberta(DebertaV2):
    """Token ids [batch, seq] -> hidden [batch, seq, embed]; the others as of Bert, no documents."""

    attention_class: type[DistanceAttention] = MappedDistanceAttention
    family: Any = architecture("deberta", "base")


class DebertaForMaskedLM(DebertaV2ForMaskedLM):
    """As BertForMaskedLM."""

    encoder_class: type[Bert] = Deberta
    family: Any = architecture("deberta", "masked_lm")


class DebertaForSequenceClassification(DebertaV2ForSequenceClassification):
    """As DebertaV2ForSequenceClassification."""

    encoder_class: type[Bert] = Deberta
    family: Any = architecture("deberta", "classification")


class DebertaForTokenClassification(DebertaV2ForTokenClassification):
    """As BertForTokenClassification."""

    encoder_class: type[Bert] = Deberta
    family: Any = architecture("deberta", "token_classification")


class DebertaForQuestionAnswering(DebertaV2ForQuestionAnswering):
    """As BertForQuestionAnswering."""

    encoder_class: type[Bert] = Deberta
    family: Any = architecture("deberta", "question_answering")


# as published


def _of_heads(number: int) -> Conversion:
    """One of the three maps whose rows take turns there, those of a head after each other."""

    def load(sources: list[WeightSource], config: Any) -> WeightSource:
        (whole,) = sources
        rows, ins = whole.shape

        def read(index: Index) -> np.ndarray:
            by_head = whole.read((slice(None), slice(None))).reshape(config.num_heads, 3, -1, ins)
            return by_head[:, number].reshape(-1, ins).T[index]

        return Changed((ins, rows // 3), whole.dtype, read)

    def store(array: np.ndarray, config: Any) -> list[np.ndarray]:
        return [array.T.reshape(config.num_heads, -1, len(array))]

    return Conversion(load, store, lambda parts: np.stack(parts, 1).reshape(-1, parts[0].shape[-1]))


def _attention_rules(there: str, here: str) -> list[WeightRule]:
    there, here = f"{there}.attention.self", f"{here}.attention"
    return [
        *(
            WeightRule(f"{there}.in_proj.weight", f"{here}.{name}.weight", _of_heads(number))
            for number, name in enumerate("qkv")
        ),
        *(WeightRule(f"{there}.{name}_bias", f"{here}.{name}.bias", SAME) for name in "qv"),
        WeightRule(f"{there}.pos_proj.weight", f"{here}.far_k.weight"),
        *linear_rules(f"{there}.pos_q_proj", f"{here}.far_q"),
    ]


def _write(config: DebertaConfig) -> Mapping[str, Any]:
    return {"pos_att_type": ["c2p", "p2c"], "max_relative_positions": config.farthest}


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = deberta_v2.published_deberta(
    "Deberta",
    "deberta",
    _attention_rules,
    fixed={"relative_attention": (True,), "talking_head": (False,), "legacy": (True,)},
    read=lambda config: {"farthest": deberta_v2.read_farthest(config)},
    read_keys=("padding_idx",),
    write=_write,
)
