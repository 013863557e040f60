"""AutoModel and its kin, AutoConfig: a model of whatever family a folder's config.json names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from polyreme.mesh import Plan
from polyreme.models.packages import resolve
from polyreme.models.pretrained import load_pretrained, open_published, read_family_config


class AutoConfig:
    """The config of published weights, without reading them."""

    @classmethod
    def from_pretrained(cls, path: str | Path, *, ignore: Sequence[str] = ()) -> Any:
        """The config of the family that a folder, a GGUF file or weights that were fetched by name are of. Raises as
        AutoModel's."""
        return read_family_config(open_published(resolve(path), needs_weights=False), ignore)


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
        **changes: Any,
    ) -> Any:
        """A model with the weights of a folder (config.json, safetensors), of a GGUF file, or of those that `polyreme
        models fetch` brought by this name, in evaluation mode.

        dtype: of its parameters; the default dtype if None, that of the files if "auto". plan: put in force, over
        devices (all if None); each device reads its own part of a weight. ignore: keys of config.json that may say what
        they like. new_head: whether a head that the files have not begins with new values; its weights are missing
        otherwise. changes: fields of the family's config, as seq_len or num_labels.

        Raises CheckpointError for files that are damaged or not those of the model, listing what is missing and what is
        too much, ConfigError for what cannot be had here; then nothing is placed.
        """
        options: dict[str, Any] = {"dtype": dtype, "plan": plan, "devices": devices, "ignore": ignore}
        return load_pretrained(resolve(path), task=cls.task, new_head=new_head, **options, **changes)


class AutoModelForCausalLM(AutoModel):
    """A model that predicts the next token, with published weights."""

    task = "causal_lm"


class AutoModelForMaskedLM(AutoModel):
    """A model that predicts tokens that are masked, with published weights."""

    task = "masked_lm"


class AutoModelForSequenceClassification(AutoModel):
    """A model that scores labels of a text, with published weights."""

    task = "classification"


class AutoModelForImageClassification(AutoModel):
    """A model that scores labels of an image, with published weights."""

    task = "image_classification"


class AutoModelForSeq2SeqLM(AutoModel):
    """A model that writes a text of another, with published weights."""

    task = "seq2seq_lm"


__all__ = [
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
]
