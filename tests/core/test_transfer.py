"""Arrays from the host."""

import numpy as np
import pytest

from polyreme.core.devices.transfer import full_from_host
from tests.compilations import counted_compilations


@pytest.mark.parametrize(("value", "dtype"), [(0, "float32"), (1.5, "bfloat16"), (7, "int64"), (0, "bool")])
def test_full_is_filled_and_compiles_nothing(value, dtype):
    shapes = [(), (3, 5), (0, 2), (2, 1 << 20)]
    with counted_compilations() as programs:
        arrays = [full_from_host(shape, value, np.dtype(dtype) if dtype != "bfloat16" else "bfloat16")
                  for shape in shapes]  # fmt: skip
    assert not programs
    for array, shape in zip(arrays, shapes, strict=True):
        assert (array.shape, array.dtype.name) == (shape, dtype)
        np.testing.assert_array_equal(np.asarray(array, "float64"), np.full(shape, value, "float64"))
