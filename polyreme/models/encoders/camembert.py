"""CamemBERT: a RoBERTa of French.

Source: arXiv:1911.03894. Same functions as transformers' CamembertModel, CamembertForMaskedLM and
CamembertForSequenceClassification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyreme.models.encoders.bert import (
    Bert,
    BertForQuestionAnswering,
    BertForTokenClassification,
)
from polyreme.models.encoders.roberta import (
    Roberta,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    published_roberta,
)
from polyreme.models.families import architecture


@dataclass(frozen=True)
class CamembertConfig(RobertaConfig):
    """Dimensions of a CamemBERT: a RoBERTa's."""

    vocab_size: int = 32005


class Camembert(Roberta):
    """As Roberta."""

    family: Any = architecture("camembert", "base")


class CamembertForMaskedLM(RobertaForMaskedLM):
    """As RobertaForMaskedLM."""

    family: Any = architecture("camembert", "masked_lm")


class CamembertForSequenceClassification(RobertaForSequenceClassification):
    """As RobertaForSequenceClassification."""

    family: Any = architecture("camembert", "classification")


class CamembertForTokenClassification(BertForTokenClassification):
    """As BertForTokenClassification."""

    encoder_class: type[Bert] = Camembert
    family: Any = architecture("camembert", "token_classification")


class CamembertForQuestionAnswering(BertForQuestionAnswering):
    """As BertForQuestionAnswering."""

    encoder_class: type[Bert] = Camembert
    family: Any = architecture("camembert", "question_answering")


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = published_roberta("Camembert", "camembert")
