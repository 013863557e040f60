"""docs/hardware.md: its Python runs as it is written, and the template of a maker's package gives a Plugin."""

import importlib.util
import re
import tomllib
from pathlib import Path

from polyreme.core import plugins

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/hardware.md").read_text(encoding="utf-8")
TEMPLATE = ROOT / "examples/vendor_device"


def test_every_python_block_runs():
    names = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/hardware.md", "exec"), names)
    assert names["message"].startswith("device.register: npu: /etc/hostname is no PJRT plugin")


def test_linked_files_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_the_template_names_its_library(monkeypatch):
    entry = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]["entry-points"][plugins.GROUP]
    module, _, function = entry["npu"].partition(":")
    spec = importlib.util.spec_from_file_location(module, TEMPLATE / module / "__init__.py")
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    monkeypatch.setenv(package.LIBRARY, "/opt/acme.so")
    assert getattr(package, function)() == plugins.Plugin("npu", "/opt/acme.so")
