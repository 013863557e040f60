"""ERNIE: a BERT, since 3.0 with embeddings of task types.

Source: arXiv:1904.09223, arXiv:2107.02137. Same functions as transformers' ErnieModel, ErnieForMaskedLM and
ErnieForSequenceClassification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyreme.models.encoders.bert import (
    Bert,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    published_encoder,
)
from polyreme.models.families import architecture


@dataclass(frozen=True)
class ErnieConfig(BertConfig):
    """Dimensions of an ERNIE: a BERT's."""


class Ernie(Bert):
    """As Bert."""

    family: Any = architecture("ernie", "base")


class ErnieForMaskedLM(BertForMaskedLM):
    """As BertForMaskedLM."""

    family: Any = architecture("ernie", "masked_lm")


class ErnieForSequenceClassification(BertForSequenceClassification):
    """As BertForSequenceClassification."""

    family: Any = architecture("ernie", "classification")


class ErnieForTokenClassification(BertForTokenClassification):
    """As BertForTokenClassification."""

    family: Any = architecture("ernie", "token_classification")


class ErnieForQuestionAnswering(BertForQuestionAnswering):
    """As BertForQuestionAnswering."""

    family: Any = architecture("ernie", "question_answering")


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_task_types": config.get("task_type_vocab_size", 3) if config.get("use_task_id") else 0}


def _write(config: ErnieConfig) -> dict[str, Any]:
    return {"use_task_id": config.num_task_types > 0, "task_type_vocab_size": config.num_task_types or 3}


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = published_encoder("Ernie", "ernie", read=_read, read_keys=("use_task_id", "task_type_vocab_size"), write=_write)
