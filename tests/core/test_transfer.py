"""Arrays from the host."""

import numpy as np
import pytest

from polyreme.core.devices.transfer import aligned_copy, full_from_host, in_c_order
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


@pytest.mark.parametrize("shape", [(701, 512), (700, 501), (3, 102_400), (100_003, 3)])
def test_a_transpose_is_copied_whole_whatever_its_sizes(shape):
    numbers = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    views = [numbers.T, numbers[::-1].T, numbers[:, ::2].T, np.broadcast_to(numbers[:1], shape)]
    for view in views:
        copy = aligned_copy(view)
        np.testing.assert_array_equal(copy, view)
        assert copy.flags.c_contiguous
        assert not np.shares_memory(copy, view)
    assert in_c_order(numbers) is numbers
    np.testing.assert_array_equal(in_c_order(numbers.T), numbers.T)
