"""The table of public names that docs/api_coverage.md is written from."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("write_api_coverage", ROOT / "tools" / "write_api_coverage.py")
tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tables)


def test_the_reference_is_read():
    names = tables.names()
    assert names["paddle"]["abs"] == "x, name=None, out=None"
    assert names["paddle"]["Tensor"] is not None
    assert tables.found("paddle", "abs") is not None
    assert tables.found("paddle", "no_such_name") is None
