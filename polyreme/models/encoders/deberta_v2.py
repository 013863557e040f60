"""DeBERTa v2 and v3: a BERT whose scores also compare tokens with the distance between two places.

Source: arXiv:2006.03654 (equation 4), arXiv:2111.09543; distances in buckets as of v2's release. Same functions as
transformers' DebertaV2Model, DebertaV2ForMaskedLM and DebertaV2ForSequenceClassification where distances share the
projections of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.models.encoders.bert import (
    KEYS,
    Bert,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    PostNormBlock,
    published_encoder,
)
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.encoder import (
    ACTIVATIONS,
    SelfAttention,
    check_activation,
    linear,
    linear_rules,
    normal,
    same_rules,
)
from polyreme.nn import Embedding, Layer, LayerNorm
from polyreme.nn import functional as F
from polyreme.nn.layers.linear import Linear
from polyreme.ops.indices.gather import take_along_axis
from polyreme.ops.layout import constrain


@dataclass(frozen=True)
class DebertaV2Config(BertConfig):
    """Dimensions of a DeBERTa: a BERT's. position_buckets: of distances on each side, of which those near by are one
    each; a bucket a distance if 0. farthest: distances from this one on are one. normed_distances: whether the
    embeddings of distances are normed. placed_input: whether embeddings have positions too. pooler_activation: what
    the `dense` of scores goes through, one of models.parts.encoder.ACTIVATIONS."""

    vocab_size: int = 128100
    layer_norm_epsilon: float = 1e-7
    num_token_types: int = field(default=0, metadata={"least": 0})
    position_buckets: int = field(default=256, metadata={"least": 0})
    farthest: int = 512
    normed_distances: bool = True
    placed_input: bool = False
    pooler_activation: str = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation("DebertaV2Config", self.pooler_activation)

    @property
    def num_positions(self) -> int:
        """Rows of the table of positions; 0 where embeddings have none."""
        return self.seq_len if self.placed_input else 0

    @property
    def span(self) -> int:
        """Distances on each side that have an embedding."""
        return self.position_buckets or self.farthest


class Distances(NamedTuple):
    """What blocks compare tokens with: embeddings [2 span, embed], which of them the distance of two places has, int64
    [seq, seq], and which keys are seen, bool [batch, 1, 1, seq], all if None."""

    table: Any
    indices: Any
    is_seen: Any


class DistanceAttention(SelfAttention):
    """Self-attention whose scores are of queries and keys, queries and distances, distances and keys."""

    def distance_maps(self) -> tuple[Linear, Linear]:
        """What makes queries and keys of distances."""
        return self.q, self.k

    def forward(self, x_bse: Any, mask: Any = None, is_causal: bool = False, documents: Any = None) -> Any:
        table, indices, is_seen = mask
        batch, seq, width = x_bse.shape
        heads = self.num_heads

        def split(x: Any, part: Linear) -> Any:
            return part(x).reshape([*x.shape[:-1], heads, width // heads])

        q, k, v = (
            constrain(split(x_bse, part), "batch", "block_seq", "heads", None) for part in (self.q, self.k, self.v)
        )
        far_q, far_k = (split(table, part).transpose([1, 2, 0]).unsqueeze(0) for part in self.distance_maps())
        shape = [batch, heads, seq, seq]
        to_far = q.transpose([0, 2, 1, 3]).matmul(far_k)  # [batch, heads, seq, 2 span]
        from_far = k.transpose([0, 2, 1, 3]).matmul(far_q)
        biases = take_along_axis(to_far, indices.expand(shape), 3)
        # of a key's row the distance that each query has to it
        biases = biases + take_along_axis(from_far, indices.t().expand(shape), 3).transpose([0, 1, 3, 2])
        scale = (3 * width // heads) ** -0.5
        biases = biases * scale
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=biases if is_seen is None else is_seen.where(biases, float("-inf")),
            dropout_p=self.dropout,
            training=self.training,
            scale=scale,
        )
        return self.out(mixed.reshape([batch, seq, width]))


class DebertaV2(Bert):
    """Token ids [batch, seq] -> hidden [batch, seq, embed]; the others as of Bert, no documents."""

    config: DebertaV2Config
    distances: Embedding
    distance_norm: LayerNorm | None

    attention_class: type[DistanceAttention] = DistanceAttention
    family: Any = architecture("deberta_v2", "base")

    def __init__(self, config: DebertaV2Config, pooled: bool = False) -> None:
        super().__init__(config, pooled=False)
        width = config.hidden_size
        self.distances = Embedding(2 * config.span, width, weight_attr=normal(), dims=(None, "embed"))
        epsilon = config.layer_norm_epsilon
        self.distance_norm = LayerNorm(width, epsilon=epsilon) if config.normed_distances else None

    def make_block(self, config: DebertaV2Config) -> Layer:
        """A new block."""
        attention = self.attention_class(config.hidden_size, config.num_heads, config.attention_dropout)
        return PostNormBlock(config, attention)

    def mask_of(self, attention_mask: Any, shape: Any) -> Any:
        """What blocks compare tokens with."""
        table = self.distances.weight
        table = table if self.distance_norm is None else self.distance_norm(table)
        indices = distance_indices(shape[1], self.config.position_buckets, self.config.farthest)
        return Distances(table, to_tensor(indices), super().mask_of(attention_mask, shape))


def distance_indices(seq: int, buckets: int, farthest: int) -> np.ndarray:
    """The row of the table that the distance of a query's place to a key's has, int64 [seq, seq].

    >>> distance_indices(4, 0, 2).tolist()[3]
    [3, 3, 3, 2]
    """
    distance = np.arange(seq)[:, None] - np.arange(seq)[None]
    span = buckets or farthest
    if buckets:
        near = buckets // 2
        size = np.maximum(np.abs(distance), near).astype(np.float32)
        steps = np.log(size / near) / np.log(np.float32((farthest - 1) / near)) * (near - 1)
        distance = np.where(np.abs(distance) <= near, distance, np.sign(distance) * (np.ceil(steps) + near))
    return np.clip(distance + span, 0, 2 * span - 1).astype(np.int64)


class DebertaV2ForMaskedLM(BertForMaskedLM):
    """As BertForMaskedLM."""

    encoder_class: type[Bert] = DebertaV2
    family: Any = architecture("deberta_v2", "masked_lm")


class DebertaV2ForSequenceClassification(BertForSequenceClassification):
    """As BertForSequenceClassification, of the first place through `dense` and pooler_activation."""

    config: DebertaV2Config
    dense: Linear

    encoder_class: type[Bert] = DebertaV2
    family: Any = architecture("deberta_v2", "classification")

    def __init__(self, config: DebertaV2Config) -> None:
        super().__init__(config)
        self.dense = linear(config.hidden_size, config.hidden_size, ("embed", None))

    def scores(self, *args: Any, **kwargs: Any) -> Any:
        """[batch, num_labels]."""
        first = self.encoder.encode(*args, **kwargs)[:, 0]
        return self.classifier(self.drop(ACTIVATIONS[self.config.pooler_activation](self.dense(first))))


class DebertaV2ForTokenClassification(BertForTokenClassification):
    """As BertForTokenClassification."""

    encoder_class: type[Bert] = DebertaV2
    family: Any = architecture("deberta_v2", "token_classification")


class DebertaV2ForQuestionAnswering(BertForQuestionAnswering):
    """As BertForQuestionAnswering."""

    encoder_class: type[Bert] = DebertaV2
    family: Any = architecture("deberta_v2", "question_answering")


# as published


def published_deberta(
    title: str,
    model_type: str,
    attention_rules: Callable[[str, str], list[WeightRule]],
    read_keys: Sequence[str] = (),
    **how: Any,
) -> tuple[PublishedFamily, ...]:
    """As published_encoder, of a DeBERTa. attention_rules: (the name of a block there, here) -> rules of what makes
    queries, keys and values."""

    def body_rules(prefix: str, ours: str) -> list[WeightRule]:
        there, here = f"{prefix}encoder.layer.{{n}}", f"{ours}blocks.{{n}}"
        tables = {
            f"{prefix}embeddings.word_embeddings": f"{ours}tokens",
            f"{prefix}encoder.rel_embeddings": f"{ours}distances",
        }
        tables |= {f"{prefix}embeddings.{name}_embeddings": f"{ours}{name}s" for name in ("position", "token_type")}
        maps = {
            "attention.output.dense": "attention.out",
            "intermediate.dense": "ffn.up",
            "output.dense": "ffn.down",
        }
        norms = {f"{prefix}embeddings.LayerNorm": f"{ours}norm", f"{prefix}encoder.LayerNorm": f"{ours}distance_norm"}
        norms |= {f"{there}.attention.output.LayerNorm": f"{here}.attention_norm"}
        norms |= {f"{there}.output.LayerNorm": f"{here}.ffn_norm"}
        return [
            *(WeightRule(f"{name}.weight", f"{table}.weight", SAME) for name, table in tables.items()),
            *attention_rules(there, here),
            *(rule for name, part in maps.items() for rule in linear_rules(f"{there}.{name}", f"{here}.{part}")),
            *(rule for name, norm in norms.items() for rule in same_rules(name, norm)),
        ]

    def masked_lm_rules(prefix: str) -> list[WeightRule]:
        head = "cls.predictions"
        transform = linear_rules(f"{head}.transform.dense", "transform")
        rules = [*transform, *same_rules(f"{head}.transform.LayerNorm", "norm")]
        return [*body_rules(prefix, "encoder."), *rules, WeightRule(f"{head}.bias", "bias", SAME)]

    def label_rules(prefix: str) -> list[WeightRule]:
        head = [*linear_rules("pooler.dense", "dense"), *linear_rules("classifier", "classifier")]
        return [*body_rules(prefix, "encoder."), *head]

    return published_encoder(
        title,
        model_type,
        prefix="deberta.",
        body_rules=body_rules,
        masked_lm_rules=masked_lm_rules,
        label_rules=label_rules,
        heads=("cls.predictions.", "lm_predictions.", "mask_predictions.", "pooler."),
        copies=("cls.predictions.decoder.", "deberta.embeddings.position_embeddings."),
        keys={
            **{key: ours for key, ours in KEYS.items() if key != "classifier_dropout"},
            "cls_dropout": "classifier_dropout",
            "position_biased_input": "placed_input",
            "pooler_hidden_act": "pooler_activation",
        },
        defaults={"position_biased_input": True, "pooler_hidden_act": "gelu", "type_vocab_size": 0},
        read_keys=("pos_att_type", "max_relative_positions", "pooler_dropout", "pooler_hidden_size", *read_keys),
        **how,
    )


def read_farthest(config: Mapping[str, Any]) -> int:
    """The field of that name. Raises ConfigError for scores that are not of distances in both directions."""
    kinds = config.get("pos_att_type") or []
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    if sorted(kind.strip() for kind in kinds) != ["c2p", "p2c"]:
        raise ConfigError(f"config.json of a DeBERTa: pos_att_type is {kinds}; only c2p with p2c can be had here")
    farthest = config.get("max_relative_positions", -1)
    return farthest if farthest > 0 else config["max_position_embeddings"]


def _attention_rules(there: str, here: str) -> list[WeightRule]:
    maps = {f"attention.self.{name}_proj": f"attention.{name[0]}" for name in ("query", "key", "value")}
    return [rule for name, part in maps.items() for rule in linear_rules(f"{there}.{name}", f"{here}.{part}")]


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    norm = config.get("norm_rel_ebd", "none")
    if norm not in ("none", "layer_norm"):
        raise ConfigError(f"config.json of a deberta-v2: norm_rel_ebd is {norm!r}; only none or layer_norm is here")
    return {
        "position_buckets": max(0, config.get("position_buckets", -1)),
        "farthest": read_farthest(config),
        "normed_distances": norm == "layer_norm",
    }


def _write(config: DebertaV2Config) -> dict[str, Any]:
    return {
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": config.position_buckets or -1,
        "max_relative_positions": config.farthest,
        "norm_rel_ebd": "layer_norm" if config.normed_distances else "none",
    }


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = published_deberta(
    "DebertaV2",
    "deberta-v2",
    _attention_rules,
    fixed={
        "relative_attention": (True,),
        "share_att_key": (True,),
        "conv_kernel_size": (0, None),
        "legacy": (True,),
    },
    read=_read,
    read_keys=("position_buckets", "norm_rel_ebd", "model_type"),
    write=_write,
)
