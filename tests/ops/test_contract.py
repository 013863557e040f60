"""Every op against its row: NumPy, capture, finite differences, autocast, the documented error."""

import os
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from polyreme.conformance.case import check_autocast, check_eager, check_row, check_values, outcome
from polyreme.conformance.rows import ROWS, is_first
from polyreme.core.op import OPS
from tests import run_folder


@pytest.fixture(autouse=True, scope="module")
def _programs_are_not_stored():
    """No other test runs the programs of a row: to store them in the run's own folder takes a twentieth of the time."""
    if not Path(os.environ["POLYREME_COMPILE_CACHE"]).name.startswith(run_folder.PREFIX):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def test_every_op_has_a_row_and_every_row_an_id_of_its_own():
    assert sorted(set(OPS) - {c.name for c in ROWS}) == []
    ids = [c.id for c in ROWS]
    assert sorted({i for i in ids if ids.count(i) > 1}) == []


# a pad of a volume is that of an image in one dim more: rows of images have each pad under both alignments
@pytest.mark.slow_cases(
    "grid_sample-3d-bilinear-zeros-False",
    "grid_sample-3d-bilinear-border-True",
    "grid_sample-3d-bilinear-border-False",
    "grid_sample-3d-bilinear-reflection-True",
)
@pytest.mark.parametrize("case", ROWS, ids=lambda c: c.id)
def test_row(case):
    check_row(case, first=is_first(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in ROWS if not is_first(c)], ids=lambda c: c.id)
def test_other_rows_the_other_way_and_under_autocast(case):
    if case.no_grad:
        check_values(case, outcome(case, wide=False)[0])
    else:
        check_eager(case)
    check_autocast(case)
