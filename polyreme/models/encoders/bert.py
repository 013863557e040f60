"""BERT: an encoder of post-norm blocks with learned positions and token types, and heads on it.

Source: arXiv:1810.04805. Same functions as transformers' BertModel, BertForMaskedLM and BertForSequenceClassification,
whose values are the fixtures of tests/models/test_encoders.py. Logical dims of parameters: embed, heads (num_heads *
head_dim), ffn, vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from polyreme.autograd.recompute import in_block, run_part
from polyreme.errors import ConfigError, ShapeError
from polyreme.mesh.axes import nearest_multiples
from polyreme.models.families import architecture
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.decoder import Documents, check_dimensions, unpacked
from polyreme.models.parts.encoder import (
    ACTIVATIONS,
    LABEL_KEYS,
    SelfAttention,
    TwoLayers,
    check_activation,
    check_label_names,
    key_mask,
    linear,
    linear_rules,
    normal,
    read_labels,
    same_rules,
    write_labels,
)
from polyreme.models.pretrained import Pretrained
from polyreme.nn import Dropout, Embedding, Layer, LayerList, LayerNorm
from polyreme.nn import functional as F
from polyreme.nn.initializer import Constant
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import Parameter
from polyreme.ops.creation import arange, zeros_like
from polyreme.ops.indices.gather import take_along_axis
from polyreme.ops.layout import constrain


@dataclass(frozen=True)
class BertConfig:
    """Dimensions of a BERT.

    seq_len: longest sequence, tokens. ffn_size: 4 * hidden_size if 0. activation: one of
    models.parts.encoder.ACTIVATIONS. dropout, attention_dropout, classifier_dropout: probabilities, while training; the
    last is dropout if None. num_token_types, num_task_types: types whose embeddings are added, none if 0. num_labels:
    what the classifier scores; label_names: what they are called. recompute: one of mesh.RECOMPUTE, or "" for what the
    plan in force says.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    ffn_size: int = 0
    seq_len: int = 512
    num_token_types: int = field(default=2, metadata={"least": 0})
    num_task_types: int = field(default=0, metadata={"least": 0})
    activation: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = None
    layer_norm_epsilon: float = 1e-12
    num_labels: int = 2
    label_names: tuple[str, ...] = ()
    recompute: str = ""

    def __post_init__(self) -> None:
        if not self.ffn_size:
            object.__setattr__(self, "ffn_size", 4 * self.hidden_size)
        check_dimensions(self)
        check_activation("BertConfig", self.activation)
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"BertConfig: hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
                f"make it {nearest_multiples(self.hidden_size, self.num_heads)}"
            )
        check_label_names(self)

    @property
    def num_positions(self) -> int:
        """Rows of the table of positions; 0 where embeddings have none."""
        return self.seq_len

    @property
    def embedding_size(self) -> int:
        """Width of the tables of embeddings."""
        return self.hidden_size

    @property
    def maps_embeddings(self) -> bool:
        """Whether a linear map brings embeddings to hidden_size."""
        return self.embedding_size != self.hidden_size

    @property
    def num_blocks(self) -> int:
        """Blocks with weights of their own."""
        return self.num_layers

    @classmethod
    def nano(cls, **changes: Any) -> BertConfig:
        """A BERT that trains in seconds on a CPU."""
        base = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_len": 16}
        return cls(**{**base, **changes})


class PostNormBlock(Layer):
    """norm(x + attention(x)), then norm(x + feed_forward(x)); a SelfAttention if none is given."""

    attention: SelfAttention
    attention_norm: LayerNorm
    ffn: TwoLayers
    ffn_norm: LayerNorm
    drop: Dropout
    recompute: str

    def __init__(self, config: BertConfig, attention: SelfAttention | None = None) -> None:
        super().__init__()
        sizes = (config.hidden_size, config.num_heads, config.attention_dropout)
        self.attention = attention or SelfAttention(*sizes)
        self.attention_norm = LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon)
        self.ffn = TwoLayers(config.hidden_size, config.ffn_size, config.activation)
        self.ffn_norm = LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon)
        self.drop = Dropout(config.dropout)
        self.recompute = config.recompute

    def forward(self, x_bse: Any, mask: Any = None, documents: Documents | None = None) -> Any:
        return run_part("full", self.recompute, self._compute, x_bse, mask, documents)

    def _compute(self, x_bse: Any, mask: Any = None, documents: Documents | None = None) -> Any:
        mixed = run_part("full_attn", self.recompute, self.attention, x_bse, mask, documents=documents)
        x_bse = self.attention_norm(x_bse + self.drop(mixed))
        x_bse = self.ffn_norm(x_bse + self.drop(self.ffn(x_bse)))
        return constrain(x_bse, "batch", "seq", "embed")


class Bert(Pretrained, Layer):
    """Token ids [batch, seq] -> (hidden [batch, seq, embed], pooled [batch, embed]).

    token_type_ids, position_ids, task_type_ids [batch, seq]: 0, the place and 0 if left out. attention_mask
    [batch, seq]: 0 where a place is padding, which no other sees. pooled: tanh of a linear map of the first place.

    >>> from polyreme.eager.tensor import to_tensor
    >>> hidden, pooled = Bert(BertConfig.nano())(to_tensor([[1, 2, 3]]))
    >>> hidden.shape, pooled.shape
    (paddle.Size([1, 3, 32]), paddle.Size([1, 32]))
    """

    pooler: Linear | None
    embedding_in: Linear | None

    tokens: Embedding
    positions: Embedding
    token_types: Embedding
    task_types: Embedding
    norm: LayerNorm
    drop: Dropout
    blocks: LayerList

    family: Any = architecture("bert", "base")

    def __init__(self, config: BertConfig, pooled: bool = True) -> None:
        super().__init__()
        self.config = config
        width, narrow = config.hidden_size, config.embedding_size
        self.tokens = Embedding(config.vocab_size, narrow, weight_attr=normal(), dims=("vocab", "embed"))
        if config.num_positions:
            self.positions = Embedding(config.num_positions, narrow, weight_attr=normal(), dims=(None, "embed"))
        if config.num_token_types:
            self.token_types = Embedding(config.num_token_types, narrow, weight_attr=normal(), dims=(None, "embed"))
        if config.num_task_types:
            self.task_types = Embedding(config.num_task_types, narrow, weight_attr=normal(), dims=(None, "embed"))
        self.norm = LayerNorm(narrow, epsilon=config.layer_norm_epsilon)
        self.drop = Dropout(config.dropout)
        self.embedding_in = linear(narrow, width, (None, "embed")) if config.maps_embeddings else None
        self.blocks = LayerList([self.make_block(config) for _ in range(config.num_blocks)])
        self.pooler = linear(width, width, ("embed", None)) if pooled else None

    def forward(
        self,
        input_ids: Any,
        token_type_ids: Any = None,
        position_ids: Any = None,
        attention_mask: Any = None,
        task_type_ids: Any = None,
    ) -> Any:
        hidden = self.encode(input_ids, token_type_ids, position_ids, attention_mask, task_type_ids)
        return hidden if self.pooler is None else (hidden, F.tanh(self.pooler(hidden[:, 0])))

    def encode(
        self,
        input_ids: Any,
        token_type_ids: Any = None,
        position_ids: Any = None,
        attention_mask: Any = None,
        task_type_ids: Any = None,
        documents: Documents | None = None,
    ) -> Any:
        """hidden, as of a call. documents: those that share rows, which also say the positions. Raises ShapeError for
        ids that are not [batch, seq] and rows that are too long, ConfigError for types of a model that has none."""
        owner, shape = type(self).__name__, list(input_ids.shape)
        if len(shape) != 2 or shape[1] > self.config.seq_len:
            raise ShapeError(
                f"{owner}: input_ids have shape {shape}; give [batch, seq], seq at most {self.config.seq_len}"
            )
        if task_type_ids is not None and not self.config.num_task_types:
            raise ConfigError(f"{owner}: task_type_ids of a model with num_task_types=0; leave them out")
        if token_type_ids is not None and not self.config.num_token_types:
            raise ConfigError(f"{owner}: token_type_ids of a model with num_token_types=0; leave them out")
        x_bse = constrain(self.tokens(input_ids), "batch", "block_seq", "embed")
        if documents is not None:
            position_ids = documents.places
        if self.config.num_positions:
            x_bse = x_bse + self.positions(self.places_of(input_ids) if position_ids is None else position_ids)
        if self.config.num_token_types:
            x_bse = x_bse + self.token_types(zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        if self.config.num_task_types:
            x_bse = x_bse + self.task_types(zeros_like(input_ids) if task_type_ids is None else task_type_ids)
        x_bse = self.drop(self.norm(x_bse))
        x_bse = x_bse if self.embedding_in is None else self.embedding_in(x_bse)
        x_bse = constrain(x_bse, "batch", "seq", "embed")
        mask = self.mask_of(attention_mask, shape)
        for number in range(self.config.num_layers):
            # some families go through a block again and again
            block = self.blocks[number * self.config.num_blocks // self.config.num_layers]
            with in_block(number):
                x_bse = block(x_bse, mask, documents)
        return x_bse

    def make_block(self, config: Any) -> Layer:
        """A new block."""
        return PostNormBlock(config)

    def places_of(self, input_ids: Any) -> Any:
        """The rows of the table of positions that tokens [batch, seq] have where none are given."""
        return arange(input_ids.shape[1])

    def mask_of(self, attention_mask: Any, shape: Any) -> Any:
        """attn_mask of attention, given the mask of ids of this shape."""
        return key_mask(type(self).__name__, attention_mask, shape)

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: token ids [1, length], fewer if there are fewer positions."""
        return (rng.integers(0, self.config.vocab_size, (1, min(length, self.config.seq_len))),)


class _WithEncoder(Pretrained, Layer):
    """A head on an encoder of encoder_class."""

    encoder_class: type[Bert] = Bert

    def __init__(self, config: BertConfig, pooled: bool) -> None:
        super().__init__()
        self.config: BertConfig = config
        self.encoder: Bert = self.encoder_class(config, pooled)

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """As the encoder's."""
        return self.encoder.example_inputs(rng, length)


class BertForMaskedLM(_WithEncoder):
    """Token ids [batch, seq] -> logits [batch, seq, vocab]; with labels, the mean cross-entropy (0-D, nats a token).

    labels [batch, seq]: the id that a masked token was; -100 leaves a place out. The others: as of Bert.
    """

    transform: Linear

    activation: Callable[..., Any]

    norm: LayerNorm
    bias: Parameter

    family: Any = architecture("bert", "masked_lm")

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, pooled=False)
        self.transform = linear(config.hidden_size, config.embedding_size, ("embed", None))
        self.activation = ACTIVATIONS[self.head_activation(config)]
        self.norm = LayerNorm(config.embedding_size, epsilon=config.layer_norm_epsilon)
        self.bias = self.create_parameter([config.vocab_size], is_bias=True, default_initializer=Constant(0.0))

    def forward(self, input_ids: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.logits(self.encoder.encode(input_ids, *args, **kwargs))
        return logits if labels is None else F.cross_entropy(logits, labels, ignore_index=-100)

    def head_activation(self, config: BertConfig) -> str:
        """What the head bends by."""
        return config.activation

    def transformed(self, hidden: Any) -> Any:
        """What the vocabulary's weight is multiplied with, of what the encoder gives."""
        return self.norm(self.activation(self.transform(hidden)))

    def logits(self, hidden: Any) -> Any:
        """[..., vocab] of what the encoder gives."""
        return self.transformed(hidden).matmul(self.encoder.tokens.weight, transpose_y=True) + self.bias


class BertForPretraining(BertForMaskedLM):
    """Rows of documents -> logits [batch, seq, vocab]; with asked, the mean cross-entropy (0-D, nats a word).

    rows: ids [batch, seq], or [batch, 3, seq], ids and where documents lie, as of models.parts.decoder.Documents. asked
    [batch, 2, most]: the places that are asked about and the ids that stood there, -100 in both where a row has fewer,
    as data.masking.MaskedDataset gives them. The vocabulary's scores are computed for those places alone.
    """

    def forward(self, rows: Any, asked: Any = None) -> Any:  # type: ignore[override]
        tokens, documents = unpacked(rows)
        hidden = self.encoder.encode(tokens, documents=documents)
        if asked is None:
            return self.logits(hidden)
        places, ids = asked.unbind(1)
        hidden = take_along_axis(hidden, places.clip(min=0).unsqueeze(-1), 1)
        weight = self.encoder.tokens.weight
        return F.fused_linear_cross_entropy(
            self.transformed(hidden), weight, ids, transpose_weight=True, bias=self.bias
        )


class BertForSequenceClassification(_WithEncoder):
    """Token ids [batch, seq] -> scores [batch, num_labels]; with labels, their mean loss (0-D).

    labels [batch]: which one each is, and the loss is the cross-entropy; with num_labels=1 numbers, and the loss is the
    mean square. The others: as of Bert.
    """

    classifier: Linear

    drop: Dropout

    family: Any = architecture("bert", "classification")

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, pooled=True)
        self.drop = Dropout(config.dropout if config.classifier_dropout is None else config.classifier_dropout)
        self.classifier = linear(config.hidden_size, config.num_labels, ("embed", None))

    def forward(self, input_ids: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        scores = self.scores(input_ids, *args, **kwargs)
        if labels is None:
            return scores
        if self.config.num_labels == 1:
            return F.mse_loss(scores[:, 0], labels)
        return F.cross_entropy(scores, labels)

    def scores(self, *args: Any, **kwargs: Any) -> Any:
        """[batch, num_labels]."""
        _, pooled = self.encoder(*args, **kwargs)
        return self.classifier(self.drop(pooled))


class BertForTokenClassification(_WithEncoder):
    """Token ids [batch, seq] -> scores of each token, [batch, seq, num_labels]; with labels, the mean cross-entropy
    (0-D).

    labels [batch, seq]: which one each token's is; -100 leaves a place out. The others: as of Bert.
    """

    classifier: Linear
    drop: Dropout

    family: Any = architecture("bert", "token_classification")

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, pooled=False)
        self.drop = Dropout(config.dropout if config.classifier_dropout is None else config.classifier_dropout)
        self.classifier = linear(config.hidden_size, config.num_labels, ("embed", None))

    def forward(self, input_ids: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        scores = self.classifier(self.drop(self.encoder.encode(input_ids, *args, **kwargs)))
        return scores if labels is None else F.cross_entropy(scores, labels, ignore_index=-100)


class BertForQuestionAnswering(_WithEncoder):
    """Token ids [batch, seq] -> scores of each token to be an answer's first, and its last, [batch, seq] both; with
    start_positions and end_positions [batch], the mean cross-entropy of the two (0-D). The others: as of Bert."""

    spans: Linear

    family: Any = architecture("bert", "question_answering")

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, pooled=False)
        self.spans = linear(config.hidden_size, 2, ("embed", None))

    def forward(
        self, input_ids: Any, *args: Any, start_positions: Any = None, end_positions: Any = None, **kwargs: Any
    ) -> Any:
        first, last = self.spans(self.encoder.encode(input_ids, *args, **kwargs)).unbind(-1)
        if start_positions is None and end_positions is None:
            return first, last
        if start_positions is None or end_positions is None:
            raise ConfigError(f"{type(self).__name__}: give start_positions and end_positions, or neither")
        return (F.cross_entropy(first, start_positions) + F.cross_entropy(last, end_positions)) / 2


# as published

KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_size",
    "max_position_embeddings": "seq_len",
    "type_vocab_size": "num_token_types",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "classifier_dropout": "classifier_dropout",
    "layer_norm_eps": "layer_norm_epsilon",
}
"""What config.json says of a BERT and its kin."""
_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def _rename(name: str) -> str:
    for old, new in _OLD_NORMS.items():
        name = name.replace(old, new)
    return name


def body_rules(prefix: str, ours: str) -> list[WeightRule]:
    """The weights of the body: what names there begin with, and ours."""
    there, here = f"{prefix}encoder.layer.{{n}}", f"{ours}blocks.{{n}}"
    tables = {"word": "tokens", "position": "positions", "token_type": "token_types", "task_type": "task_types"}
    rules = [
        WeightRule(f"{prefix}embeddings.{name}_embeddings.weight", f"{ours}{table}.weight", SAME)
        for name, table in tables.items()
    ]
    rules += same_rules(f"{prefix}embeddings.LayerNorm", f"{ours}norm")
    for name, part in {"query": "q", "key": "k", "value": "v"}.items():
        rules += linear_rules(f"{there}.attention.self.{name}", f"{here}.attention.{part}")
    rules += linear_rules(f"{there}.attention.output.dense", f"{here}.attention.out")
    rules += same_rules(f"{there}.attention.output.LayerNorm", f"{here}.attention_norm")
    rules += linear_rules(f"{there}.intermediate.dense", f"{here}.ffn.up")
    rules += linear_rules(f"{there}.output.dense", f"{here}.ffn.down")
    rules += same_rules(f"{there}.output.LayerNorm", f"{here}.ffn_norm")
    return [*rules, *linear_rules(f"{prefix}pooler.dense", f"{ours}pooler")]


def _masked_lm_rules(prefix: str) -> list[WeightRule]:
    head = "cls.predictions"
    rules = [*linear_rules(f"{head}.transform.dense", "transform"), *same_rules(f"{head}.transform.LayerNorm", "norm")]
    return [*body_rules(prefix, "encoder."), *rules, WeightRule(f"{head}.bias", "bias", SAME)]


Rules = Callable[[str], list[WeightRule]]
"""The weights of a head, given what the names of its body's begin with."""


def _label_rules(prefix: str) -> list[WeightRule]:
    return [*body_rules(prefix, "encoder."), *linear_rules("classifier", "classifier")]


def published_encoder(
    name: str,
    kind: str,
    *,
    prefix: str = "",
    body_rules: Callable[[str, str], list[WeightRule]] = body_rules,
    masked_lm_rules: Rules = _masked_lm_rules,
    label_rules: Rules = _label_rules,
    heads: tuple[str, ...] = ("cls.predictions.", "cls.seq_relationship."),
    copies: tuple[str, ...] = ("cls.predictions.decoder.",),
    **fields: Any,
) -> tuple[PublishedFamily, ...]:
    """How the models of a family with BERT's weights are published: the body, masked words, labels of texts, labels of
    tokens, answers.

    name: what names of architectures begin with. kind: model_type. prefix: of the body's weights, kind and a point if
    "". body_rules: (what names there begin with, ours) -> the body's weights; masked_lm_rules, label_rules: those of
    models with heads; heads: what these begin with, pooler and classifier apart; copies: what copies of the embedding
    and the bias do. fields: of PublishedFamily, more of read, write and read_keys.
    """
    prefix = prefix or f"{kind}."
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = fields.pop("read", lambda config: {})
    write: Callable[[Any], dict[str, Any]] = fields.pop("write", lambda config: {})
    body = PublishedFamily(
        architecture=f"{name}Model",
        model_type=kind,
        keys=fields.pop("keys", KEYS),
        weights=lambda config: body_rules(prefix, ""),
        fixed={"position_embedding_type": ("absolute",), "tie_word_embeddings": (True,), **fields.pop("fixed", {})},
        spare=lambda weight, config: weight.startswith(copies),
        prefix=prefix,
        bare=True,
        heads=(f"{prefix}pooler.", *heads, "classifier.", "qa_outputs."),
        rename=_rename,
        read=lambda config: read_labels(config) | read(config),
        read_keys=(*LABEL_KEYS, *fields.pop("read_keys", ())),
        write=lambda config: write_labels(config) | write(config),
        **fields,
    )
    headed = replace(body, bare=False)
    return (
        body,
        replace(headed, architecture=f"{name}ForMaskedLM", weights=lambda config: masked_lm_rules(prefix)),
        replace(
            headed,
            architecture=f"{name}ForSequenceClassification",
            weights=lambda config: label_rules(prefix),
        ),
        *(
            replace(headed, architecture=f"{name}For{kind}", weights=partial(_token_rules, body_rules, prefix, head))
            for kind, head in (("TokenClassification", "classifier"), ("QuestionAnswering", "qa_outputs"))
        ),
    )


def _token_rules(
    body_rules: Callable[[str, str], list[WeightRule]], prefix: str, head: str, config: Any
) -> list[WeightRule]:
    """The weights of a model that scores each token by a linear map."""
    ours = {"classifier": "classifier", "qa_outputs": "spans"}[head]
    return [*body_rules(prefix, "encoder."), *linear_rules(head, ours)]


(
    PUBLISHED_BASE,
    PUBLISHED_MASKED_LM,
    PUBLISHED_CLASSIFICATION,
    PUBLISHED_TOKEN_CLASSIFICATION,
    PUBLISHED_QUESTION_ANSWERING,
) = published_encoder("Bert", "bert")
