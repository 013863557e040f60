"""From a configuration to a model."""

from dataclasses import fields
from importlib import import_module
from typing import Any

from polyreme.models.decoder import Decoder
from polyreme.models.families import FAMILIES, Family
from polyreme.recipes.config import ModelConfig


def build_model(config: ModelConfig) -> Decoder:
    """A fresh model of the configured family, initial values from the default generator."""
    model_class, config_class = classes_of(FAMILIES[config.family])
    names = [field.name for field in fields(config_class) if field.name in ModelConfig.model_fields]
    return model_class(config_class(**{name: getattr(config, name) for name in names}))


def classes_of(family: Family) -> tuple[type[Decoder], type[Any]]:
    """The class of a family's models and that of their configs."""
    module = import_module(family.module)  # by name: a record is read where jax is not loaded
    return getattr(module, family.model), getattr(module, family.config)
