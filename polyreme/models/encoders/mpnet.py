"""MPNet: a RoBERTa without token types, whose scores have a bias of the distance between two places.

Source: arXiv:2004.09297; distances as of T5, arXiv:1910.10683. Same functions as transformers' MPNetModel,
MPNetForMaskedLM and MPNetForSequenceClassification.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from polyreme.eager.tensor import to_tensor
from polyreme.models.encoders.bert import (
    Bert,
    BertForQuestionAnswering,
    BertForTokenClassification,
    published_encoder,
)
from polyreme.models.encoders.roberta import (
    ROBERTA_KEYS,
    Roberta,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    label_head,
    masked_lm_head,
    read_positions,
    write_positions,
)
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, WeightRule
from polyreme.models.parts.distance_buckets import buckets
from polyreme.models.parts.encoder import linear_rules, normal, same_rules
from polyreme.nn import Embedding

_BUCKETS, _FARTHEST = 32, 128
"""Of distances, which no configuration changes."""


@dataclass(frozen=True)
class MPNetConfig(RobertaConfig):
    """Dimensions of an MPNet: a RoBERTa's."""

    vocab_size: int = 30527
    num_token_types: int = field(default=0, metadata={"least": 0})
    layer_norm_epsilon: float = 1e-12


class MPNet(Roberta):
    """As Roberta."""

    distances: Embedding

    family: Any = architecture("mpnet", "base")

    def __init__(self, config: MPNetConfig, pooled: bool = True) -> None:
        super().__init__(config, pooled)
        self.distances = Embedding(_BUCKETS, config.num_heads, weight_attr=normal(), dims=(None, "heads"))

    def mask_of(self, attention_mask: Any, shape: Any) -> Any:
        """What is added to scores: a bias for each distance and head, -inf for padding."""
        seq, is_seen = shape[1], super().mask_of(attention_mask, shape)
        places = to_tensor(buckets(seq, seq, _BUCKETS, _FARTHEST, is_causal=False))
        bias = self.distances(places).transpose([2, 0, 1]).unsqueeze(0)
        return bias if is_seen is None else is_seen.where(bias, float("-inf"))


class MPNetForMaskedLM(RobertaForMaskedLM):
    """As RobertaForMaskedLM."""

    encoder_class: type[Bert] = MPNet
    family: Any = architecture("mpnet", "masked_lm")


class MPNetForSequenceClassification(RobertaForSequenceClassification):
    """As RobertaForSequenceClassification."""

    encoder_class: type[Bert] = MPNet
    family: Any = architecture("mpnet", "classification")


class MPNetForTokenClassification(BertForTokenClassification):
    """As BertForTokenClassification."""

    encoder_class: type[Bert] = MPNet
    family: Any = architecture("mpnet", "token_classification")


class MPNetForQuestionAnswering(BertForQuestionAnswering):
    """As BertForQuestionAnswering."""

    encoder_class: type[Bert] = MPNet
    family: Any = architecture("mpnet", "question_answering")


def _body_rules(prefix: str, ours: str) -> list[WeightRule]:
    there, here = f"{prefix}encoder.layer.{{n}}", f"{ours}blocks.{{n}}"
    tables = {"embeddings.word_embeddings": "tokens", "embeddings.position_embeddings": "positions"}
    tables["encoder.relative_attention_bias"] = "distances"
    rules = [WeightRule(f"{prefix}{name}.weight", f"{ours}{table}.weight", SAME) for name, table in tables.items()]
    for name, part in {"q": "q", "k": "k", "v": "v", "o": "out"}.items():
        rules += linear_rules(f"{there}.attention.attn.{name}", f"{here}.attention.{part}")
    rules += linear_rules(f"{there}.intermediate.dense", f"{here}.ffn.up")
    rules += linear_rules(f"{there}.output.dense", f"{here}.ffn.down")
    rules += linear_rules(f"{prefix}pooler.dense", f"{ours}pooler")
    norms = {f"{there}.attention": f"{here}.attention_norm", f"{there}.output": f"{here}.ffn_norm"}
    norms[f"{prefix}embeddings"] = f"{ours}norm"
    return [*rules, *(rule for name, norm in norms.items() for rule in same_rules(f"{name}.LayerNorm", norm))]


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = published_encoder(
    "MPNet",
    "mpnet",
    body_rules=_body_rules,
    masked_lm_rules=lambda prefix: [*_body_rules(prefix, "encoder."), *masked_lm_head(prefix)],
    label_rules=lambda prefix: [*_body_rules(prefix, "encoder."), *label_head(prefix)],
    heads=("lm_head.",),
    copies=("lm_head.decoder.",),
    keys={key: ours for key, ours in ROBERTA_KEYS.items() if key != "type_vocab_size"},
    fixed={"relative_attention_num_buckets": (_BUCKETS,)},
    read=read_positions,
    read_keys=("max_position_embeddings",),
    write=write_positions,
)
