"""DistilBERT: a BERT of half the blocks, without token types and pooler.

Source: arXiv:1910.01108. Same functions as transformers' DistilBertModel, DistilBertForMaskedLM and
DistilBertForSequenceClassification.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
from polyreme.models.files.published import SAME, WeightRule
from polyreme.models.parts.encoder import linear, linear_rules, same_rules
from polyreme.nn import functional as F
from polyreme.nn.layers.linear import Linear


@dataclass(frozen=True)
class DistilBertConfig(BertConfig):
    """Dimensions of a DistilBERT: a BERT's."""

    num_layers: int = 6
    num_token_types: int = field(default=0, metadata={"least": 0})
    classifier_dropout: float | None = 0.2


class DistilBert(Bert):
    """Token ids [batch, seq] -> hidden [batch, seq, embed]; the others as of Bert."""

    family: Any = architecture("distilbert", "base")

    def __init__(self, config: DistilBertConfig, pooled: bool = False) -> None:
        super().__init__(config, pooled=False)


class DistilBertForMaskedLM(BertForMaskedLM):
    """As BertForMaskedLM."""

    encoder_class: type[Bert] = DistilBert
    family: Any = architecture("distilbert", "masked_lm")


class DistilBertForSequenceClassification(BertForSequenceClassification):
    """As BertForSequenceClassification, of the first place through `dense` and ReLU."""

    dense: Linear

    encoder_class: type[Bert] = DistilBert
    family: Any = architecture("distilbert", "classification")

    def __init__(self, config: DistilBertConfig) -> None:
        super().__init__(config)
        self.dense = linear(config.hidden_size, config.hidden_size, ("embed", None))

    def scores(self, *args: Any, **kwargs: Any) -> Any:
        """[batch, num_labels]."""
        first = self.encoder.encode(*args, **kwargs)[:, 0]
        return self.classifier(self.drop(F.relu(self.dense(first))))


class DistilBertForTokenClassification(BertForTokenClassification):
    """As BertForTokenClassification."""

    encoder_class: type[Bert] = DistilBert
    family: Any = architecture("distilbert", "token_classification")


class DistilBertForQuestionAnswering(BertForQuestionAnswering):
    """As BertForQuestionAnswering."""

    encoder_class: type[Bert] = DistilBert
    family: Any = architecture("distilbert", "question_answering")


def _body_rules(prefix: str, ours: str) -> list[WeightRule]:
    there, here = f"{prefix}transformer.layer.{{n}}", f"{ours}blocks.{{n}}"
    tables = {"word": "tokens", "position": "positions"}
    rules = [
        WeightRule(f"{prefix}embeddings.{name}_embeddings.weight", f"{ours}{table}.weight", SAME)
        for name, table in tables.items()
    ]
    for name, part in {"q": "q", "k": "k", "v": "v", "out": "out"}.items():
        rules += linear_rules(f"{there}.attention.{name}_lin", f"{here}.attention.{part}")
    rules += linear_rules(f"{there}.ffn.lin1", f"{here}.ffn.up")
    rules += linear_rules(f"{there}.ffn.lin2", f"{here}.ffn.down")
    norms = {f"{prefix}embeddings.LayerNorm": f"{ours}norm"}
    norms |= {f"{there}.sa_layer_norm": f"{here}.attention_norm", f"{there}.output_layer_norm": f"{here}.ffn_norm"}
    return [*rules, *(rule for name, norm in norms.items() for rule in same_rules(name, norm))]


def _masked_lm_rules(prefix: str) -> list[WeightRule]:
    head = [*linear_rules("vocab_transform", "transform"), *same_rules("vocab_layer_norm", "norm")]
    return [*_body_rules(prefix, "encoder."), *head, WeightRule("vocab_projector.bias", "bias", SAME)]


def _label_rules(prefix: str) -> list[WeightRule]:
    head = [*linear_rules("pre_classifier", "dense"), *linear_rules("classifier", "classifier")]
    return [*_body_rules(prefix, "encoder."), *head]


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = published_encoder(
    "DistilBert",
    "distilbert",
    body_rules=_body_rules,
    masked_lm_rules=_masked_lm_rules,
    label_rules=_label_rules,
    heads=("vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "pre_classifier."),
    copies=("vocab_projector.weight",),
    keys={
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "n_layers": "num_layers",
        "n_heads": "num_heads",
        "hidden_dim": "ffn_size",
        "max_position_embeddings": "seq_len",
        "activation": "activation",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "seq_classif_dropout": "classifier_dropout",
    },
    # where their values begin, which then were trained
    read_keys=("sinusoidal_pos_embds", "qa_dropout", "tie_weights_"),
)
