"""What ASGD and Rprop refuse, and how long NAdam's schedule stays exact."""

import numpy as np
import pytest

from polyreme import optimizer as opt
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.nn.parameter import Parameter


def parameter():
    return Parameter(to_tensor([1.0, 2.0], dtype="float64")._array, name="w")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: opt.ASGD(0.1, 0, p), "batch_num is a whole number of at least 1, got 0"),
        (lambda p: opt.Rprop(0.1, (0.1,), p), r"learning_rate_range is a pair of numbers, got \(0.1,\)"),
        (lambda p: opt.Rprop(0.1, (0.2, 1.0), p), r"learning_rate 0.1 is not within learning_rate_range=\(0.2, 1.0\)"),
        (lambda p: opt.Rprop(0.1, parameters=p, etas=(0.5, 0.9)), r"etas=\(0.5, 0.9\); give \(a factor below 1"),
        (lambda p: opt.Rprop(0.1, parameters=p, etas=(-0.5, 1.2)), "Rprop: etas is a number of at least 0"),
        (lambda p: opt.NAdam(momentum_decay=-1, parameters=p), "momentum_decay is a number of at least 0"),
        (lambda p: opt.RAdam(beta2=1.0, parameters=p), r"beta2 is a number in \[0, 1\)"),
    ],
)
def test_refuses_what_it_cannot_do(make, message):
    with pytest.raises(ConfigError, match=message):
        make([parameter()])


def test_groups_start_rates_of_their_own():
    p, q = parameter(), Parameter(to_tensor([1.0, 2.0], dtype="float64")._array, name="b")
    optimizer = opt.Rprop(0.1, parameters=[{"params": [p]}, {"params": [q], "learning_rate": 0.5}])
    ((p + q) * to_tensor([3.0, -4.0], dtype="float64")).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(p.numpy(), [0.9, 2.1], rtol=4 * 2.0**-52)
    np.testing.assert_allclose(q.numpy(), [0.95, 2.05], rtol=4 * 2.0**-52)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_the_schedule_of_nadam_after_many_steps(beta1):
    p = parameter()
    optimizer = opt.NAdam(0.1, beta1, 0.5, 1e-8, 0.01, [p])
    (p * p).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["w_step_0"] = to_tensor(499.0)
    m, v = state["w_moment1_0"].numpy().copy(), state["w_moment2_0"].numpy().copy()
    before = p.numpy().copy()
    optimizer.set_state_dict(state)
    optimizer.step()  # the 500th
    mu = [beta1 * (1 - 0.5 * 0.96 ** (0.01 * t)) for t in range(1, 502)]
    g = 2 * np.array([1.0, 2.0])
    m, v = beta1 * m + (1 - beta1) * g, 0.5 * v + 0.5 * g * g
    ahead = mu[500] * m / (1 - np.prod(mu)) + (1 - mu[499]) * g / (1 - np.prod(mu[:500]))
    # 64 roundings of numbers below 1
    np.testing.assert_allclose(p.numpy(), before - 0.1 * ahead / (np.sqrt(v) + 1e-8), rtol=0, atol=64 * 2.0**-52)
