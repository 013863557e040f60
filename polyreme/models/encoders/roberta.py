"""RoBERTa: a BERT that counts the places of a text from behind the id of its padding, with heads of its own.

Source: arXiv:1907.11692. Same functions as transformers' RobertaModel, RobertaForMaskedLM and
RobertaForSequenceClassification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyreme.models.encoders.bert import (
    KEYS,
    Bert,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    body_rules,
    published_encoder,
)
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.encoder import linear, linear_rules, same_rules
from polyreme.nn import functional as F
from polyreme.nn.layers.linear import Linear


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """Dimensions of a RoBERTa: a BERT's. pad_token_id: the id that has no place, from which places are counted."""

    vocab_size: int = 50265
    num_token_types: int = field(default=1, metadata={"least": 0})
    layer_norm_epsilon: float = 1e-5
    pad_token_id: int = field(default=1, metadata={"least": 0})

    @property
    def num_positions(self) -> int:
        """Rows of the table of positions: those up to that of the padding stand for no place."""
        return self.seq_len + self.pad_token_id + 1


class Roberta(Bert):
    """As Bert."""

    config: RobertaConfig

    family: Any = architecture("roberta", "base")

    def places_of(self, input_ids: Any) -> Any:
        """The rows of the table of positions that tokens have: of padding always its id's."""
        is_token = (input_ids != self.config.pad_token_id).astype("int64")
        return is_token.cumsum(1) * is_token + self.config.pad_token_id


class RobertaForMaskedLM(BertForMaskedLM):
    """As BertForMaskedLM."""

    encoder_class: type[Bert] = Roberta
    family: Any = architecture("roberta", "masked_lm")

    def head_activation(self, config: BertConfig) -> str:
        """What the head bends by, whatever the blocks do."""
        return "gelu"


class RobertaForSequenceClassification(BertForSequenceClassification):
    """As BertForSequenceClassification, of the first place, which dropout meets before and after `dense`."""

    dense: Linear

    encoder_class: type[Bert] = Roberta
    family: Any = architecture("roberta", "classification")
    bend: Any = staticmethod(F.tanh)
    """What `dense` goes through."""

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__(config)
        self.encoder.pooler = None
        self.dense = linear(config.hidden_size, config.hidden_size, ("embed", None))

    def scores(self, *args: Any, **kwargs: Any) -> Any:
        """[batch, num_labels]."""
        first = self.encoder.encode(*args, **kwargs)[:, 0]
        return self.classifier(self.drop(self.bend(self.dense(self.drop(first)))))


class RobertaForTokenClassification(BertForTokenClassification):
    """As BertForTokenClassification."""

    encoder_class: type[Bert] = Roberta
    family: Any = architecture("roberta", "token_classification")


class RobertaForQuestionAnswering(BertForQuestionAnswering):
    """As BertForQuestionAnswering."""

    encoder_class: type[Bert] = Roberta
    family: Any = architecture("roberta", "question_answering")


# as published

ROBERTA_KEYS = {key: ours for key, ours in KEYS.items() if key != "max_position_embeddings"} | {
    "pad_token_id": "pad_token_id"
}


def masked_lm_head(prefix: str) -> list[WeightRule]:
    """The head that writes masked words."""
    head = [*linear_rules("lm_head.dense", "transform"), *same_rules("lm_head.layer_norm", "norm")]
    return [*head, WeightRule("lm_head.bias", "bias", SAME)]


def label_head(prefix: str) -> list[WeightRule]:
    """The head that scores labels."""
    return [*linear_rules("classifier.dense", "dense"), *linear_rules("classifier.out_proj", "classifier")]


def read_positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """seq_len of a table that begins behind the padding's row, and the padding's id."""
    pad = config.get("pad_token_id")
    pad = 1 if pad is None else pad
    return {"pad_token_id": pad, "seq_len": config.get("max_position_embeddings", 512) - pad - 1}


def write_positions(config: RobertaConfig) -> dict[str, Any]:
    """The keys that these fields become."""
    return {"max_position_embeddings": config.num_positions}


def published_roberta(name: str, kind: str) -> tuple[PublishedFamily, ...]:
    """How the models of a family with RoBERTa's weights are published."""
    return published_encoder(
        name,
        kind,
        prefix="roberta.",
        masked_lm_rules=lambda prefix: [*body_rules(prefix, "encoder."), *masked_lm_head(prefix)],
        label_rules=lambda prefix: [*body_rules(prefix, "encoder."), *label_head(prefix)],
        heads=("lm_head.",),
        copies=("lm_head.decoder.",),
        keys=ROBERTA_KEYS,
        read=read_positions,
        read_keys=("max_position_embeddings", "output_past"),
        write=write_positions,
    )


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = published_roberta("Roberta", "roberta")
