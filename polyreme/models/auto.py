"""AutoModelForCausalLM and AutoConfig: a model of whatever family a folder's config.json names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme.mesh import Plan
from polyreme.models.pretrained import load_pretrained, open_published
from polyreme.models.published import read_config


class AutoConfig:
    """The config of published weights, without reading them."""

    @classmethod
    def from_pretrained(cls, path: str | Path, *, ignore: Sequence[str] = ()) -> Any:
        """The config of the family that a folder or a GGUF file names. Raises as AutoModelForCausalLM's."""
        opened = open_published(path)
        return opened.family.config.load()(**read_config(opened.published, opened.config, ignore))


class AutoModelForCausalLM:
    """A model that predicts the next token, with published weights."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: Any = None,
        plan: Plan | None = None,
        devices: Sequence[Any] | None = None,
        ignore: Sequence[str] = (),
        **changes: Any,
    ) -> Any:
        """A model with the weights of a folder (config.json, safetensors) or of a GGUF file, in evaluation mode.

        dtype: of its parameters; the default dtype if None, that of the files if "auto". plan: put in force, over
        devices (all if None); each device reads its own part of a weight. ignore: keys of config.json that may say what
        they like. changes: fields of the family's config, as seq_len.

        Raises CheckpointError for files that are damaged or not those of the model, listing what is missing and what is
        too much, ConfigError for what cannot be had here; then nothing is placed.
        """
        return load_pretrained(path, dtype=dtype, plan=plan, devices=devices, ignore=ignore, **changes)


__all__ = ["AutoConfig", "AutoModelForCausalLM"]
