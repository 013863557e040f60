"""XLM-RoBERTa: a RoBERTa of a hundred languages.

Source: arXiv:1911.02116. Same functions as transformers' XLMRobertaModel, XLMRobertaForMaskedLM and
XLMRobertaForSequenceClassification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyreme.models.families import architecture
from polyreme.models.roberta import (
    Roberta,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    published_roberta,
)


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


PUBLISHED_BASE, PUBLISHED_MASKED_LM, PUBLISHED_CLASSIFICATION = published_roberta("XLMRoberta", "xlm-roberta")
