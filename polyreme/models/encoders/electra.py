"""ELECTRA: a BERT whose embeddings may be narrower than its blocks, and whose heads bend by GELU.

Source: arXiv:2003.10555. Same functions as transformers' ElectraModel, ElectraForMaskedLM (a generator) and
ElectraForSequenceClassification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyreme.models.encoders.bert import (
    KEYS,
    Bert,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForTokenClassification,
    body_rules,
    published_encoder,
)
from polyreme.models.encoders.roberta import RobertaForSequenceClassification, label_head
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, WeightRule
from polyreme.models.parts.encoder import linear_rules, same_rules
from polyreme.nn import functional as F


@dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """Dimensions of an ELECTRA: a BERT's. embedding_size: width of the tables of embeddings."""

    hidden_size: int = 256
    num_heads: int = 4
    embedding_size: int = 128  # type: ignore[misc]  # what follows from the width in a BERT is said of each model


class Electra(Bert):
    """Token ids [batch, seq] -> hidden [batch, seq, embed]; the others as of Bert."""

    family: Any = architecture("electra", "base")

    def __init__(self, config: ElectraConfig, pooled: bool = False) -> None:
        super().__init__(config, pooled=False)


class ElectraForMaskedLM(BertForMaskedLM):
    """As BertForMaskedLM."""

    encoder_class: type[Bert] = Electra
    family: Any = architecture("electra", "masked_lm")

    def head_activation(self, config: BertConfig) -> str:
        """What the head bends by, whatever the blocks do."""
        return "gelu"


class ElectraForSequenceClassification(RobertaForSequenceClassification):
    """As RobertaForSequenceClassification, `dense` going through GELU."""

    encoder_class: type[Bert] = Electra
    family: Any = architecture("electra", "classification")
    bend: Any = staticmethod(F.gelu)


class ElectraForTokenClassification(BertForTokenClassification):
    """As BertForTokenClassification."""

    encoder_class: type[Bert] = Electra
    family: Any = architecture("electra", "token_classification")


class ElectraForQuestionAnswering(BertForQuestionAnswering):
    """As BertForQuestionAnswering."""

    encoder_class: type[Bert] = Electra
    family: Any = architecture("electra", "question_answering")


def _body_rules(prefix: str, ours: str) -> list[WeightRule]:
    return [*body_rules(prefix, ours), *linear_rules(f"{prefix}embeddings_project", f"{ours}embedding_in")]


def _masked_lm_rules(prefix: str) -> list[WeightRule]:
    head = "generator_predictions"
    rules = [*linear_rules(f"{head}.dense", "transform"), *same_rules(f"{head}.LayerNorm", "norm")]
    return [*_body_rules(prefix, "encoder."), *rules, WeightRule("generator_lm_head.bias", "bias", SAME)]


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = published_encoder(
    "Electra",
    "electra",
    body_rules=_body_rules,
    masked_lm_rules=_masked_lm_rules,
    label_rules=lambda prefix: [*_body_rules(prefix, "encoder."), *label_head(prefix)],
    heads=("generator_predictions.", "generator_lm_head.", "discriminator_predictions."),
    copies=("generator_lm_head.weight",),
    keys={**KEYS, "embedding_size": "embedding_size"},
    read_keys=("summary_last_dropout",),
)
