"""Ops that compare numbers refuse complex ones, which have no order."""

import numpy as np
import pytest

from polyreme.conformance.case import tensors
from polyreme.conformance.rows import ROWS
from polyreme.errors import DTypeError

FIRST = {case.name: case for case in reversed(ROWS)}
REAL = [name for name, case in FIRST.items() if getattr(getattr(case.fn, "op", None), "real", False)]
THROUGH = ["cross_entropy", "nll_loss", "batch_norm", "scaled_dot_product_attention", "sequence_mask", "viterbi_decode"]


def as_complex(value):
    if isinstance(value, np.ndarray):
        return value.astype("complex64")
    if isinstance(value, (list, tuple)):
        return type(value)(as_complex(v) for v in value)
    return value


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize("name", [*REAL, *THROUGH])
def test_complex_numbers_are_refused(name):
    case = FIRST[name]
    with pytest.raises(DTypeError, match=r"real numbers|integers"):
        case.fn(*tensors(as_complex(case.arguments())), **tensors(case.kwargs))
