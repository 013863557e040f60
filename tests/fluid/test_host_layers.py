"""Layers whose results have as many rows as their values say: a Program with one of them runs op by op."""

import numpy as np
import pytest

from polyreme import fluid
from tests.fluid.table import Case, check, run_cases

L = fluid.layers
NEW = np.array([3, 1, 3, 0, 1, 3])

CASES = [
    Case("unique", lambda x: L.unique(x), (NEW,), (np.array([3, 1, 0]), np.array([0, 1, 0, 2, 1, 0], "int32"))),
    Case("unique_with_counts", lambda x: L.unique_with_counts(x, "int64")[1:], (NEW,),
         (np.array([0, 1, 0, 2, 1, 0]), np.array([3, 2, 1]))),
    Case("where", L.where, (NEW[None] > 2,), np.array([[0, 0], [0, 2], [0, 5]])),
]  # fmt: skip


@pytest.fixture(scope="module")
def results():
    return run_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_layer_equals_numpy(results, case):
    check(case, results)
