"""A captured program over other state than it was captured with."""

import numpy as np
import pytest

from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError
from polyreme.jit import to_static
from polyreme.nn import Linear
from tests.compilations import counted_compilations


def test_a_program_runs_over_other_weights_and_writes_other_state():
    one, other = Linear(2, 3), Linear(2, 3)
    sums, other_sums = to_tensor(np.zeros(3, np.float32)), to_tensor(np.zeros(3, np.float32))

    @to_static
    def run(x):
        y = one(x)
        sums.add_(y[0])
        return y

    x = to_tensor(np.ones((1, 2), np.float32))
    with no_grad():
        run(x)
        swapped = {id(one.weight): other.weight, id(one.bias): other.bias, id(sums): other_sums}
        twin = run.served.over(lambda tensor: swapped.get(id(tensor), tensor))
        before = sums.numpy().copy()
        with counted_compilations() as seconds:
            y = twin.run([x])
        assert not seconds
        np.testing.assert_array_equal(y.numpy(), other(x).numpy())
        np.testing.assert_array_equal(other_sums.numpy(), y.numpy()[0])
        np.testing.assert_array_equal(sums.numpy(), before)
        with pytest.raises(CaptureError, match="give one of the same shape and dtype"):
            run.served.over(lambda tensor: Linear(4, 3).weight if tensor is one.weight else tensor)
    run(x)
    with pytest.raises(CaptureError, match="takes part in gradients"):
        run.served.over(lambda tensor: tensor)
