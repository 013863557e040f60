"""Counting in a captured function, where the largest value is not known."""

import numpy as np
import pytest

from polyreme.core.op import OPS
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError
from polyreme.jit import to_static

VALUES = to_tensor(np.array([0, 2, 2, 5]))


def test_bincount_in_a_capture_needs_a_length():
    with pytest.raises(CaptureError, match="give length="):
        to_static(lambda x: OPS["bincount"](x))(VALUES)


def test_bincount_with_a_length_can_be_captured():
    assert to_static(lambda x: OPS["bincount"](x, length=4))(VALUES).tolist() == [1, 0, 2, 0]
