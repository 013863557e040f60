"""The template of a maker's package gives a Plugin."""

import importlib.util
import tomllib
from pathlib import Path

from polyreme.core.engine import plugins

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples/vendor_device"


def test_the_template_names_its_library(monkeypatch):
    entry = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]["entry-points"][plugins.GROUP]
    module, _, function = entry["npu"].partition(":")
    spec = importlib.util.spec_from_file_location(module, TEMPLATE / module / "__init__.py")
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    monkeypatch.setenv(package.LIBRARY, "/opt/acme.so")
    assert getattr(package, function)() == plugins.Plugin("npu", "/opt/acme.so")
