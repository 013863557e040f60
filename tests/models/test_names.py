"""Names of polyreme.models: classes of every family, and modules by the path without their package."""

import importlib

import pytest

from polyreme import models
from polyreme.models.families import ARCHITECTURES, FAMILIES


def test_every_familys_classes_are_names_of_the_package():
    records = [*FAMILIES.values(), *ARCHITECTURES]
    assert len(records) > 40
    for reference in (r for record in records for r in (record.config, record.model)):
        assert reference.name in dir(models)
        assert getattr(models, reference.name) is reference.load()


def test_a_module_has_a_path_without_its_package():
    short, whole = (importlib.import_module(f"polyreme.models.{path}") for path in ("llama", "decoders.llama"))
    assert short is whole
    assert whole.__spec__.name == whole.__name__ == "polyreme.models.decoders.llama"
    with pytest.raises(ModuleNotFoundError, match=r"polyreme\.models\.lama"):
        importlib.import_module("polyreme.models.lama")


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'GPTConfig'"):
        models.GPTconfig  # noqa: B018
