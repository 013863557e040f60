"""Gradients added up in place."""

import ml_dtypes
import numpy as np
import pytest

from polyreme.eager.tensor import to_tensor
from polyreme.incubate.nn.functional import embedding_grad_add_to_


def test_an_embeddings_gradient_is_added_in_place_in_the_wide_dtype():
    main = to_tensor(np.ones((3, 2), "float32"))
    grad = to_tensor(np.array([[1, 2], [3, 4], [5, 6]], ml_dtypes.bfloat16))
    got = embedding_grad_add_to_(to_tensor(np.array([2, 0, 2])), main, grad)
    assert got is main
    np.testing.assert_array_equal(main.numpy(), [[4, 5], [1, 1], [7, 9]])
    with pytest.raises(IndexError, match="id: 3 at"):
        embedding_grad_add_to_(to_tensor(np.array([3, 0, 2])), main, grad)
