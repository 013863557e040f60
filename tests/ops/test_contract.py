"""Every op against its row: NumPy, capture, finite differences, autocast, the documented error."""

import importlib
import pkgutil

import pytest

import tests.ops as tables
from polyreme.core import rng
from polyreme.core.op import OPS
from tests.ops.contract import Case, arrays, check_modes, check_row, tensors

CASES: list[Case] = [
    case
    for module in sorted(m.name for m in pkgutil.iter_modules(tables.__path__) if m.name.startswith("table_"))
    for case in importlib.import_module(f"tests.ops.{module}").CASES
]
_FIRST = {case.name: case for case in reversed(CASES)}


def is_first(case: Case) -> bool:
    """Whether this is the first row of its op."""
    return _FIRST[case.name] is case


def test_every_op_has_a_row_and_every_row_an_id_of_its_own():
    assert sorted(set(OPS) - {c.name for c in CASES}) == []
    ids = [c.id for c in CASES]
    assert sorted({i for i in ids if ids.count(i) > 1}) == []


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_row(case):
    check_row(case, whole=is_first(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if not is_first(c)], ids=lambda c: c.id)
def test_other_rows_captured_and_under_autocast(case):
    rng.seed(7)
    check_modes(case, arrays(case.call(tensors(case.arguments()))))
