"""The stable order of elements: NumPy's for every dtype, NaN last, by one packed sort and by the plain one."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import polyreme.core  # noqa: F401  (turns 64-bit types on)
from polyreme.kernels import select
from polyreme.kernels.order import stable_order

EDGES = {
    "float32": [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, 1e-40, -1e-40],
    "bfloat16": [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan],
    "float64": [0.0, -0.0, 1.0, np.nextafter(1.0, 2.0), -np.inf, np.nan],
    "int32": [0, 1, -1, 2**31 - 1, -(2**31)],
    "uint32": [0, 1, 2**31, 2**32 - 1],
    "uint8": [0, 1, 128, 255],
    "int64": [0, 2**40, -(2**40), 2**40 + 1],
    "bool": [True, False],
}


def expected(x, descending):
    wide = x.astype(np.float64) if x.dtype == bfloat16 else x
    if not descending:
        return np.argsort(wide, axis=0, kind="stable")
    # backwards twice: equal elements then come in the order they have
    return len(x) - 1 - np.argsort(wide[::-1], axis=0, kind="stable")[::-1]


def ranked(x, descending):
    return stable_order(x, 0, descending=descending)


packed = jax.jit(ranked, static_argnums=1)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", EDGES)
@given(data=st.data())
def test_order_is_numpys_stable_one(dtype, data):
    values = data.draw(st.lists(st.sampled_from(EDGES[dtype]), min_size=12, max_size=12))
    x = np.array(values, bfloat16 if dtype == "bfloat16" else dtype)
    for descending in (False, True):
        np.testing.assert_array_equal(packed(x, descending), expected(x, descending))


def test_order_along_a_middle_dim_is_the_portable_one():
    x = np.random.default_rng(0).integers(0, 4, (3, 7, 2)).astype(np.float32)
    with select.portable():
        plain = stable_order(x, 1)
    np.testing.assert_array_equal(stable_order(x, 1), plain)
    np.testing.assert_array_equal(plain, np.argsort(x, axis=1, kind="stable"))
