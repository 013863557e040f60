"""From a configuration to a model."""

from dataclasses import fields
from typing import Any

from polyreme.models.families import FAMILIES
from polyreme.recipes.config import ModelConfig


def build_model(config: ModelConfig) -> Any:
    """A fresh model of the configured family, initial values from the default generator."""
    family = FAMILIES[config.family]
    config_class = family.config.load()
    names = [field.name for field in fields(config_class) if field.name in ModelConfig.model_fields]
    model = family.model.load()(config_class(**config.model_dump(include=set(names))))
    model.family = family  # several records may share a class
    return model
