"""The names of 1.7: which there are, with which parameters, and what the others say."""

import importlib.util
import inspect
from pathlib import Path

import pytest

from polyreme import fluid
from polyreme.errors import AbsentError

_FILE = Path(__file__).parents[2] / "tools" / "write_fluid_table.py"
_SPEC = importlib.util.spec_from_file_location("write_fluid_table", _FILE)
tables = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tables)

EVERY = [(module, name, given) for module, entries in tables.names().items() for name, given in entries.items()]
# what is the same thing with parameters of today
OTHER_PARAMETERS = {
    "fluid.Program", "fluid.Variable", "fluid.program_guard", "fluid.dygraph.Sequential",
}  # fmt: skip


def test_the_page_says_what_there_is():
    page = tables.PAGE.read_text()
    assert tables.table() in page, "run python tools/write_fluid_table.py"


def test_parameters_are_those_of_1_7():
    wrong = []
    for module, name, parameters in EVERY:
        have = tables.found(module, name)
        if parameters is None or have is None or f"{module}.{name}" in OTHER_PARAMETERS:
            continue
        mine = [p.name for p in inspect.signature(have).parameters.values() if p.kind is not p.VAR_POSITIONAL]
        theirs = [p for p in parameters if not p.startswith("*")]
        if mine[: len(theirs)] != theirs:
            wrong.append((module, name, parameters, mine))
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        (fluid.layers, "softmaxx", "docs/fluid.md"),
        (fluid.dygraph, "Linearr", "did you mean 'Linear'"),
    ],
)
def test_an_absent_name_says_what_to_use(module, name, says):
    with pytest.raises(AttributeError, match=says):
        getattr(module, name)


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [(fluid.layers, "data_norm", "parameter servers"), (fluid.layers, "filter_by_instag", "reader")],
)
def test_what_1_7_has_besides_can_be_imported_and_says_what_to_use_when_it_is_called(module, name, says):
    stand_in = getattr(module, name)
    assert not stand_in
    with pytest.raises(AbsentError, match=says):
        stand_in()


def test_no_star_import_shadows_a_name():
    assert fluid.layers.data is not fluid.data
    assert fluid.layers.embedding is not fluid.embedding
