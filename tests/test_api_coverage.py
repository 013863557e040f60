"""docs/api_coverage.md tells the truth, and every absent name and every differing parameter has a reason."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("write_api_coverage", ROOT / "tools" / "write_api_coverage.py")
tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tables)


def test_the_page_is_up_to_date():
    assert tables.PAGE.read_text() == tables.page(), "run python tools/write_api_coverage.py"


def test_every_absent_name_has_a_reason():
    without = [f"{m}.{n}" for m, n in tables.absent() if tables.reason(f"{m}.{n}", tables.KINDS[:2]) is None]
    assert without == []


def test_every_difference_has_a_reason():
    without = [f"{m}.{n}: {w}" for m, n, w in tables.differing() if tables.reason(f"{m}.{n}", ("differs",)) is None]
    assert without == []


def test_no_reason_is_left_over():
    absent = {f"{m}.{n}" for m, n in tables.absent()}
    differing = {f"{m}.{n}" for m, n, _ in tables.differing()}
    used = {p for p, (kind, _) in tables.reasons().items() if _fits(p, differing if kind == "differs" else absent)}
    assert sorted(set(tables.reasons()) - used) == []


def _fits(pattern, names):
    return any(tables.fnmatchcase(n, pattern) for n in names)


def test_the_reference_is_read():
    names = tables.names()
    assert names["paddle"]["abs"] == "x, name=None, out=None"
    assert tables.found("paddle", "abs") is not None
    assert tables.found("paddle", "no_such_name") is None
