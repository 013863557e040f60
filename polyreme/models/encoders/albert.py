"""ALBERT: a BERT with narrow embeddings that goes through the same blocks again and again.

Source: arXiv:1909.11942. Same functions as transformers' AlbertModel, AlbertForMaskedLM and
AlbertForSequenceClassification, of one block to a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyreme.errors import ConfigError
from polyreme.mesh.axes import nearest_divisor
from polyreme.models.encoders.bert import (
    KEYS,
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
from polyreme.models.parts.encoder import linear_rules, same_rules


@dataclass(frozen=True)
class AlbertConfig(BertConfig):
    """Dimensions of an ALBERT: a BERT's. embedding_size: width of the tables of embeddings. num_groups: blocks with
    weights of their own, each of which num_layers / num_groups layers in turn go through."""

    vocab_size: int = 30000
    activation: str = "gelu_new"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    classifier_dropout: float | None = 0.1
    embedding_size: int = 128  # type: ignore[misc]  # what follows from the width in a BERT is said of each model
    num_groups: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers % self.num_groups:
            raise ConfigError(
                f"AlbertConfig: num_layers {self.num_layers} is not a multiple of num_groups {self.num_groups}; make "
                f"num_groups {nearest_divisor(self.num_layers, self.num_groups)}"
            )

    @property
    def maps_embeddings(self) -> bool:
        """Whether a linear map brings embeddings to hidden_size: whatever their widths."""
        return True

    @property
    def num_blocks(self) -> int:
        """Blocks with weights of their own."""
        return self.num_groups


class Albert(Bert):
    """As Bert."""

    family: Any = architecture("albert", "base")


class AlbertForMaskedLM(BertForMaskedLM):
    """As BertForMaskedLM."""

    encoder_class: type[Bert] = Albert
    family: Any = architecture("albert", "masked_lm")


class AlbertForSequenceClassification(BertForSequenceClassification):
    """As BertForSequenceClassification."""

    encoder_class: type[Bert] = Albert
    family: Any = architecture("albert", "classification")


class AlbertForTokenClassification(BertForTokenClassification):
    """As BertForTokenClassification."""

    encoder_class: type[Bert] = Albert
    family: Any = architecture("albert", "token_classification")


class AlbertForQuestionAnswering(BertForQuestionAnswering):
    """As BertForQuestionAnswering."""

    encoder_class: type[Bert] = Albert
    family: Any = architecture("albert", "question_answering")


def _body_rules(prefix: str, ours: str) -> list[WeightRule]:
    there, here = f"{prefix}encoder.albert_layer_groups.{{n}}.albert_layers.0", f"{ours}blocks.{{n}}"
    tables = {"word": "tokens", "position": "positions", "token_type": "token_types"}
    rules = [
        WeightRule(f"{prefix}embeddings.{name}_embeddings.weight", f"{ours}{table}.weight", SAME)
        for name, table in tables.items()
    ]
    maps = {f"{there}.attention.{name}": f"{here}.attention.{name[0]}" for name in ("query", "key", "value")}
    maps |= {f"{there}.attention.dense": f"{here}.attention.out", f"{there}.ffn": f"{here}.ffn.up"}
    maps |= {f"{there}.ffn_output": f"{here}.ffn.down", f"{prefix}pooler": f"{ours}pooler"}
    maps[f"{prefix}encoder.embedding_hidden_mapping_in"] = f"{ours}embedding_in"
    norms = {f"{prefix}embeddings.LayerNorm": f"{ours}norm", f"{there}.full_layer_layer_norm": f"{here}.ffn_norm"}
    norms[f"{there}.attention.LayerNorm"] = f"{here}.attention_norm"
    rules += [rule for name, part in maps.items() for rule in linear_rules(name, part)]
    return [*rules, *(rule for name, norm in norms.items() for rule in same_rules(name, norm))]


def _masked_lm_rules(prefix: str) -> list[WeightRule]:
    rules = [*linear_rules("predictions.dense", "transform"), *same_rules("predictions.LayerNorm", "norm")]
    return [*_body_rules(prefix, "encoder."), *rules, WeightRule("predictions.bias", "bias", SAME)]


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = published_encoder(
    "Albert",
    "albert",
    body_rules=_body_rules,
    masked_lm_rules=_masked_lm_rules,
    label_rules=lambda prefix: [*_body_rules(prefix, "encoder."), *linear_rules("classifier", "classifier")],
    heads=("predictions.", "sop_classifier."),
    copies=("predictions.decoder.",),
    keys={
        **{key: ours for key, ours in KEYS.items() if key != "classifier_dropout"},
        "classifier_dropout_prob": "classifier_dropout",
        "embedding_size": "embedding_size",
        "num_hidden_groups": "num_groups",
    },
    fixed={"inner_group_num": (1,)},
    # of the first release's files, which nothing reads
    read_keys=("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks", "model_type"),
)
