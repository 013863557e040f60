"""All rows of the contract table, in the order of their modules' names."""

import importlib
import pkgutil

from polyreme.conformance import _tables
from polyreme.conformance.case import Case

ROWS: list[Case] = [
    case
    for module in sorted(m.name for m in pkgutil.iter_modules(_tables.__path__))
    for case in importlib.import_module(f"{_tables.__name__}.{module}").CASES
]
_FIRST = {case.name: case for case in reversed(ROWS)}


def is_first(case: Case) -> bool:
    """Whether this is the first row of its op, which is checked in more ways than the others."""
    return _FIRST[case.name] is case
