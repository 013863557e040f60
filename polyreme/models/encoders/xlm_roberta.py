"""XLM-RoBERTa: a RoBERTa of a hundred languages.

Source: arXiv:1911.02116. Same functions as transformers' XLMRobertaModel, XLMRobertaForMaskedLM and
XLMRobertaForSequenceClassification.
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
class XLMRobertaConfig(RobertaConfig):
    """Dimensions of an XLM-RoBERTa: a RoBERTa's."""

    vocab_size: int = 250002


class XLMRoberta(Roberta):
    """As Roberta."""

    family: Any = architecture("xlm_roberta", "base")


class XLMRobertaForMaskedLM(RobertaForMaskedLM):
    """As RobertaForMaskedLM."""

    family: Any = architecture("xlm_roberta", "masked_lm")


class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """As RobertaForSequenceClassification."""

    family: Any = architecture("xlm_roberta", "classification")


class XLMRobertaForTokenClassification(BertForTokenClassification):
    """As BertForTokenClassification."""

    encoder_class: type[Bert] = XLMRoberta
    family: Any = architecture("xlm_roberta", "token_classification")


class XLMRobertaForQuestionAnswering(BertForQuestionAnswering):
    """As BertForQuestionAnswering."""

    encoder_class: type[Bert] = XLMRoberta
    family: Any = architecture("xlm_roberta", "question_answering")


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = published_roberta("XLMRoberta", "xlm-roberta")
