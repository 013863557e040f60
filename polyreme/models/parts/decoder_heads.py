"""Decoders that write nothing: the body of any family, and the same with a head that scores texts or tokens.

Same functions as transformers' LlamaModel, LlamaForSequenceClassification, LlamaForTokenClassification and those of
other families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from polyreme.models.families import DECODER_HEADS, Family
from polyreme.models.files.published import SAME, PublishedFamily, WeightRule
from polyreme.models.parts.encoder import LABEL_KEYS, check_label_names, linear, read_labels, write_labels
from polyreme.models.pretrained import Pretrained
from polyreme.nn import Layer
from polyreme.nn import functional as F
from polyreme.nn.layers.linear import Linear
from polyreme.ops.creation import arange, full
from polyreme.ops.indices.gather import take_along_axis

_WRITERS = ("ForCausalLM", "LMHeadModel")
"""What names of architectures that write end with."""


@dataclass(frozen=True)
class ScoringTraits:
    """What a config of a decoder that scores says besides. num_labels, label_names: as of BertConfig; pad_token: the id
    of places without a token, none if below 0."""

    num_labels: int = 2
    label_names: tuple[str, ...] = ()
    pad_token: int = field(default=-1, metadata={"least": -1})

    def __post_init__(self) -> None:
        check_label_names(self)
        super().__post_init__()  # type: ignore[misc]  # of the family's config


class DecoderBody(Pretrained, Layer):
    """Token ids [batch, seq] -> the last block's normed output, [batch, seq, embed]: a decoder without its head.

    attention_mask, position_ids: as of Decoder.
    """

    decoder: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.decoder = self.family_of_decoder.model.load()(config)
        for head in ("head", "head_bias"):
            if hasattr(self.decoder, head):
                delattr(self.decoder, head)

    family_of_decoder: Family

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        return self.encode(input_ids, attention_mask, position_ids)[0]

    def encode(self, *inputs: Any) -> tuple[Any, Any]:
        """What the body gives, and the loss of its routers, 0 where there are none or nothing is trained."""
        hidden = self.decoder.encode(*inputs)
        hidden, losses = hidden if isinstance(hidden, tuple) else (hidden, 0)
        return hidden, losses if self.training else 0

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """As the decoder's."""
        return self.decoder.example_inputs(rng, length)


class LastTokenScorer(DecoderBody):
    """Token ids [batch, seq] -> scores [batch, num_labels], of the last token of each text; with labels, their mean
    loss (0-D).

    labels [batch]: which one each is, and the loss is the cross-entropy; with num_labels=1 numbers, and the loss is the
    mean square. attention_mask, position_ids: as of Decoder; where there is no mask, config.pad_token says which places
    have no token.
    """

    score: Linear

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.score = linear(config.hidden_size, config.num_labels, ("embed", None), bias=False)

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None) -> Any:
        hidden, routers = self.encode(input_ids, attention_mask, position_ids)
        last = self._last_places(input_ids, attention_mask).unsqueeze(-1).unsqueeze(-1)
        scores = self.score(take_along_axis(hidden, last, 1).squeeze(1))
        if labels is None:
            return scores
        is_number = self.config.num_labels == 1
        return (F.mse_loss(scores[:, 0], labels) if is_number else F.cross_entropy(scores, labels)) + routers

    def _last_places(self, ids: Any, mask: Any) -> Any:
        """The place of each row's last token, int64 [batch]."""
        batch, seq = ids.shape
        if mask is None and self.config.pad_token < 0:
            return full([batch], seq - 1, "int64")
        is_token = mask != 0 if mask is not None else ids != self.config.pad_token
        return (is_token.astype("int64") * arange(seq, dtype="int64")).max(-1)


class TokenScorer(DecoderBody):
    """Token ids [batch, seq] -> scores of each token, [batch, seq, num_labels]; with labels, the mean cross-entropy
    (0-D).

    labels [batch, seq]: which one each token's is; -100 leaves a place out. The others: as of DecoderBody.
    """

    score: Linear

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.score = linear(config.hidden_size, config.num_labels, ("embed", None))

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None) -> Any:
        hidden, routers = self.encode(input_ids, attention_mask, position_ids)
        scores = self.score(hidden)
        return scores if labels is None else F.cross_entropy(scores, labels, ignore_index=-100) + routers


# what records name, of a family


@cache
def scoring_config(family: Family) -> type[Any]:
    """The config class of a family's decoder that scores: its own, with ScoringTraits."""
    base = family.config.load()
    name = base.__name__.replace("Config", "ScoringConfig")
    doc = f"{base.__doc__}\n\n    Those of ScoringTraits too."
    # the family's checks run after those of the labels, so its class comes last
    return make_dataclass(name, (), bases=(ScoringTraits, base), frozen=True, namespace={"__doc__": doc})


def base_model(family: Family) -> type[DecoderBody]:
    """The class of a family's body."""
    return _model(family, "base", DecoderBody, "Model")


def classification_model(family: Family) -> type[DecoderBody]:
    """The class of a family's decoder that scores texts."""
    return _model(family, "classification", LastTokenScorer, "ForSequenceClassification")


def token_classification_model(family: Family) -> type[DecoderBody]:
    """The class of a family's decoder that scores tokens."""
    return _model(family, "token_classification", TokenScorer, "ForTokenClassification")


@cache
def _model(family: Family, task: str, parent: type[DecoderBody], ending: str) -> type[DecoderBody]:
    record = next(record for record in DECODER_HEADS if (record.name, record.task) == (family.name, task))
    fields: dict[str, Any] = {"family": record, "family_of_decoder": family, "__doc__": parent.__doc__}
    return type(_title(family) + ending, (parent,), fields)


def published_base(family: Family) -> PublishedFamily:
    """How a family's body is published."""
    return _published(family, "Model", lambda config: [], bare=True)


def published_classification(family: Family) -> PublishedFamily:
    """How a family's decoder that scores texts is published."""
    return _published(family, "ForSequenceClassification", lambda config: [WeightRule("score.weight", "score.weight")])


def published_token_classification(family: Family) -> PublishedFamily:
    """How a family's decoder that scores tokens is published."""
    name = family.published.load().token_head  # type: ignore[union-attr]  # it is published
    rules = [WeightRule(f"{name}.weight", "score.weight"), WeightRule(f"{name}.bias", "score.bias", SAME)]
    return _published(family, "ForTokenClassification", lambda config: rules)


def _title(family: Family) -> str:
    name = family.published.load().architecture  # type: ignore[union-attr]  # it is published
    return next((name.removesuffix(ending) for ending in _WRITERS if name.endswith(ending)), name)


def _published(
    family: Family, ending: str, head_rules: Callable[[Any], list[WeightRule]], bare: bool = False
) -> PublishedFamily:
    writer: PublishedFamily = family.published.load()  # type: ignore[union-attr]  # likewise

    def rules(config: Any) -> list[WeightRule]:
        body = writer.weights(config)
        return [*(rule._replace(ours=f"decoder.{rule.ours}") for rule in body), *head_rules(config)]

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        pad = config.get("pad_token_id")
        return writer.read(config) | read_labels(config) | {"pad_token": -1 if pad is None else pad}

    def write(config: Any) -> dict[str, Any]:
        pad = None if config.pad_token < 0 else config.pad_token
        return writer.write(config) | write_labels(config) | {"pad_token_id": pad}

    return replace(
        writer,
        architecture=_title(family) + ending,
        weights=rules,
        heads=(*writer.heads, "score.", "classifier.", "qa_outputs."),
        bare=bare,
        read=read,
        read_keys=(*writer.read_keys, *LABEL_KEYS),
        write=write,
    )
