"""Every op against its row: NumPy, capture, finite differences, autocast, the documented error."""

import importlib
import pkgutil

import pytest

import tests.ops as tables
from polyreme.core.op import OPS
from tests.ops.contract import (
    Case,
    arrays,
    check_autocast,
    check_captured,
    check_eager,
    check_gradient,
    tensors,
    tensors_in,
)

CASES: list[Case] = [
    case
    for module in sorted(m.name for m in pkgutil.iter_modules(tables.__path__) if m.name.startswith("table_"))
    for case in importlib.import_module(f"tests.ops.{module}").CASES
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)


def one_an_op(cases: list[Case]) -> pytest.MarkDecorator:
    """Cases for what hardly depends on attributes: the first of each op, and in the long suite the others."""
    first = {case.name: case for case in reversed(cases)}
    marked = [c if first[c.name] is c else pytest.param(c, marks=pytest.mark.slow, id=c.id) for c in cases]
    return pytest.mark.parametrize("case", marked, ids=lambda c: c.id)


def test_every_op_has_a_row_and_every_row_an_id_of_its_own():
    assert sorted(set(OPS) - {c.name for c in CASES}) == []
    ids = [c.id for c in CASES]
    assert sorted({i for i in ids if ids.count(i) > 1}) == []


@every_case
def test_eager_equals_numpy(case):
    check_eager(case)


@one_an_op([c for c in CASES if not c.host])
def test_captured_equals_eager(case):
    check_captured(case)


@pytest.mark.parametrize("case", [c for c in CASES if not c.no_grad], ids=lambda c: c.id)
def test_gradient_equals_finite_differences(case):
    check_gradient(case)


@one_an_op([c for c in CASES if hasattr(c.fn, "op")])
def test_dtype_under_autocast(case):
    check_autocast(case)


@pytest.mark.parametrize("case", [c for c in CASES if c.bad], ids=lambda c: c.id)
def test_bad_input_raises_the_documented_error(case):
    args, error, match = case.bad
    with pytest.raises(error, match=match):
        arrays(case.fn(*tensors(args), **tensors_in(case.kwargs)))
