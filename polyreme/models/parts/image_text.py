"""What models share that read images and text and write text: a decoder, in whose rows stands what is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polyreme.core import state
from polyreme.errors import ConfigError, ShapeError
from polyreme.models.families import FAMILIES, Family
from polyreme.models.files.published import PublishedFamily, WeightRule, check_fields, read_config, rules_of_part
from polyreme.models.parts.decoder import Decoder, InsertedVectors
from polyreme.models.pretrained import Pretrained, family_of
from polyreme.nn import Layer
from polyreme.registry import Reference

_GENERATE: Reference[Callable[..., tuple[Any, Any]]] = Reference("polyreme.generation.strategies", "generate")
"""Which stands above models, and is loaded when it is asked for."""


class ImageTextModel(Pretrained, Layer):
    """Token ids [batch, seq] and images -> logits [batch, seq, vocab]; with labels, the decoder's loss, a 0-D mean.

    Each id that is config.image_token stands for a vector of an image, the images' in the order of the ids.
    pixel_values [images, channels, height, width]: as `image_vectors` takes; none if None. attention_mask, labels: as
    of Decoder. A class sets `config`, with image_token, and `language`, a Decoder, and writes image_vectors and
    vectors_per_image.
    """

    config: Any
    language: Decoder

    @property
    def vectors_per_image(self) -> int:
        """Places in a text that an image takes."""
        raise NotImplementedError

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        raise NotImplementedError

    def image_vectors(self, pixel_values: Any) -> Any:
        """What stands in rows for images [images, channels, height, width], [images, vectors_per_image, embed]."""
        raise NotImplementedError

    def forward(self, input_ids: Any, pixel_values: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        inserted = None if pixel_values is None else self.insert(input_ids, self.image_vectors(pixel_values))
        return self.language(input_ids, labels=labels, attention_mask=attention_mask, inserted=inserted)

    def insert(self, input_ids: Any, vectors: Any) -> InsertedVectors:
        """Vectors [images, count, embed] in their places in rows of ids [batch, seq]. Raises ShapeError for another
        number of places; in captured code, where ids have no values, nothing can."""
        is_image = input_ids == self.config.image_token
        flat = vectors.reshape([-1, vectors.shape[-1]])
        if not state.capturing():
            self.check_places(int(is_image.astype("int64").sum()), flat.shape[0])
        numbers = (is_image.astype("int64").flatten().cumsum(0) - 1).clip(0, flat.shape[0] - 1)
        return InsertedVectors(flat.index_select(numbers, 0).reshape([*input_ids.shape, flat.shape[-1]]), is_image)

    def check_places(self, num_places: int, num_vectors: int) -> None:
        """Raises ShapeError where the ids have places for another number of vectors."""
        if num_places != num_vectors:
            raise ShapeError(
                f"{type(self).__name__}: {num_places} ids are the image token, {self.config.image_token}, and the "
                f"images are {num_vectors} vectors; give {self.vectors_per_image} ids for each image"
            )

    @property
    def generation_config(self) -> Mapping[str, Any]:  # type: ignore[override]  # one for both
        """As of Pretrained; the decoder's too."""
        return self.language.generation_config

    @generation_config.setter
    def generation_config(self, said: Mapping[str, Any]) -> None:
        self.language.generation_config = said

    def generate(self, input_ids: Any, pixel_values: Any = None, **settings: Any) -> tuple[Any, Any]:
        """Write after prompts [batch, seq], in which images stand as in a call -> ids of the new tokens and scores.
        settings: as of generation.strategies.generate. Raises ShapeError as `insert`."""
        if pixel_values is None:
            return _GENERATE.load()(self.language, input_ids, **settings)
        ids = np.asarray(input_ids.numpy() if hasattr(input_ids, "numpy") else input_ids)
        vectors = self.image_vectors(pixel_values).astype("float32").numpy()
        return _GENERATE.load()(self.language, ids, inserted=(ids == self.config.image_token, vectors), **settings)

    def example_inputs(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """What a call takes, made up: token ids with an image among them, and the image."""
        (ids,) = self.language.example_inputs(rng, length + self.vectors_per_image)
        ids[ids == self.config.image_token] = (self.config.image_token + 1) % self.config.vocab_size
        ids[:, 1 : 1 + self.vectors_per_image] = self.config.image_token
        return ids, rng.standard_normal((1, *self.image_shape), "float32")


def text_family(name: str) -> tuple[Family, PublishedFamily]:
    """The family of decoders of a model_type, and how it is published. Raises ConfigError for one that is none."""
    return family_of({"model_type": name}, f"text_config of model_type {name!r}", "causal_lm")


def read_text_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[str, Any]:
    """The name of the family, and its config, that the text_config of a config.json describes. defaults: what it means
    by leaving a key out. Raises ConfigError for what cannot be had here."""
    said = {**defaults, **(config.get("text_config") or {})}
    if "tie_word_embeddings" in config:
        said.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    family, published = text_family(said.get("model_type", "llama"))
    config_class, fields = family.config.load(), read_config(published, said)
    check_fields(config_class, fields)
    return family.name, config_class(**fields)


def language_rules(family: str, config: Any, theirs: str, part: Callable[[Any], Any]) -> list[WeightRule]:
    """The weights of `language`, a decoder of a family with this config, whose names begin with `theirs` there. part:
    the config of the whole -> the decoder's."""
    return rules_of_part(published_text(family).weights(config), theirs, "language.", part)


def published_text(family: str) -> PublishedFamily:
    """How a family of decoders is published. Raises ConfigError for one that nobody publishes."""
    record = FAMILIES.named(family)
    if record.published is None:
        raise ConfigError(f"{family} is published by nobody; take another family of decoders")
    return record.published.load()
