"""AutoModel and its kin, AutoConfig: a model of whatever family a folder's config.json names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from polyreme.errors import ConfigError
from polyreme.mesh import Plan
from polyreme.models.files.loader_words import read_words
from polyreme.models.files.packages import resolve
from polyreme.models.pretrained import load_pretrained, open_published, published_families, read_family_config


class AutoConfig:
    """The config of published weights, without reading them."""

    @classmethod
    def from_pretrained(cls, path: str | Path, *, ignore: Sequence[str] = (), **changes: Any) -> Any:
        """The config of the family that a folder, a GGUF file or weights that were fetched by name are of. ignore,
        changes: as of AutoModel.from_pretrained, and raises as that does."""
        _, fields = read_words(None, changes)
        return read_family_config(open_published(resolve(path), needs_weights=False), ignore, fields)


class AutoModel:
    """The body of a model, without a head, with published weights: of encoders."""

    task: ClassVar[str] = "base"

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: Any = None,
        plan: Plan | None = None,
        devices: Sequence[Any] | None = None,
        ignore: Sequence[str] = (),
        new_head: bool = False,
        config: Any = None,
        **changes: Any,
    ) -> Any:
        """A model with the weights of a folder (config.json, safetensors), of a GGUF file, or of those that `polyreme
        models fetch` brought by this name, in evaluation mode.

        dtype: of its parameters; the default dtype if None, that of the files if "auto". plan: put in force, over
        devices (all if None); each device reads its own part of a weight. ignore: keys of config.json that may say what
        they like. new_head: whether a head that the files have not begins with new values; its weights are missing
        otherwise. config: in place of what config.json says. changes: fields of the family's config, as seq_len or
        num_labels, by these names or by those of config.json. Words of transformers and PaddleNLP, as torch_dtype or
        device_map, are taken where they ask for what is done here (models.files.loader_words).

        Raises CheckpointError for files that are damaged or not those of the model, listing what is missing and what is
        too much, ConfigError for what cannot be had here; then nothing is placed.
        """
        options: dict[str, Any] = {"dtype": dtype, "plan": plan, "devices": devices, "ignore": ignore}
        return load_pretrained(resolve(path), task=cls.task, new_head=new_head, config=config, **options, **changes)

    @classmethod
    def from_config(cls, config: Any, **words: Any) -> Any:
        """A model of this task with new values, of the family whose config this is. words: dtype, and others as of
        from_pretrained. Raises ConfigError for a config of a family without such a model."""
        dtype, fields = read_words(None, words)
        for family, _ in published_families().values():
            if family.task == cls.task and family.config.load() is type(config):
                model = family.model.load()(dataclasses.replace(config, **fields) if fields else config)
                return model if dtype is None else model.to(dtype=dtype)
        raise ConfigError(
            f"{cls.__name__}: no family here has a {type(config).__name__} for {cls.task}; give one that "
            "AutoConfig.from_pretrained gives"
        )


class AutoModelForCausalLM(AutoModel):
    """A model that predicts the next token, with published weights."""

    task = "causal_lm"


class AutoModelForMaskedLM(AutoModel):
    """A model that predicts tokens that are masked, with published weights."""

    task = "masked_lm"


class AutoModelForSequenceClassification(AutoModel):
    """A model that scores labels of a text, with published weights."""

    task = "classification"


class AutoModelForTokenClassification(AutoModel):
    """A model that scores labels of each token of a text, with published weights."""

    task = "token_classification"


class AutoModelForQuestionAnswering(AutoModel):
    """A model that scores where in a text an answer is, with published weights."""

    task = "question_answering"


class AutoModelForImageClassification(AutoModel):
    """A model that scores labels of an image, with published weights."""

    task = "image_classification"


class AutoModelForSeq2SeqLM(AutoModel):
    """A model that writes a text of another, with published weights."""

    task = "seq2seq_lm"


class AutoModelForSpeechSeq2Seq(AutoModel):
    """A model that writes what is said in a sound, with published weights."""

    task = "speech_seq2seq"


class AutoModelForImageTextToText(AutoModel):
    """A model that reads images and text and writes text, with published weights."""

    task = "image_text_to_text"


__all__ = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForImageTextToText",
    "AutoModelForMaskedLM",
    "AutoModelForQuestionAnswering",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForTokenClassification",
]
