"""Minimizers of functions, LookAhead and averages of parameters."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import polyreme as paddle
from polyreme import optimizer as opt
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, DTypeError, GradError, ShapeError
from polyreme.incubate import LookAhead, ModelAverage
from polyreme.incubate.optimizer import LBFGS, ExponentialMovingAverage
from polyreme.incubate.optimizer.functional import minimize_bfgs, minimize_lbfgs
from polyreme.jit import to_static
from polyreme.nn.parameter import Parameter

EPS = 2.0**-52


def double(value):
    return to_tensor(value, dtype="float64")


def rosenbrock(x):
    a, b = x[1:] - x[:-1] * x[:-1], 1 - x[:-1]
    return (100 * a * a + b * b).sum()


# minimizers


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("minimize", "captured"), [(minimize_bfgs, False), (minimize_lbfgs, True)])
def test_rosenbrock(minimize, captured):
    def run(x):
        return minimize(rosenbrock, x, tolerance_grad=1e-8, tolerance_change=0.0, max_iters=100, dtype="float64")

    start = np.array([-1.2, 1.0, -0.5])
    converged, calls, x, value, gradient, *inverse = (to_static(run) if captured else run)(double(start))
    assert converged.item() is True
    theirs = scipy.optimize.minimize(scipy.optimize.rosen, start, jac=scipy.optimize.rosen_der, method="BFGS")
    assert calls.item() <= 2 * theirs.nfev
    np.testing.assert_allclose(x.numpy(), np.ones(3), rtol=0, atol=1e-7)
    assert value.item() < 1e-14
    np.testing.assert_allclose(gradient.numpy(), scipy.optimize.rosen_der(x.numpy()), rtol=0, atol=1e-10)
    assert x.stop_gradient
    if inverse:
        hessian = scipy.optimize.rosen_hess(np.ones(3))
        np.testing.assert_allclose(inverse[0].numpy() @ hessian, np.eye(3), rtol=0, atol=0.05)


def test_a_quadratic_reads_what_it_closes_over_and_starts_from_an_inverse():
    a, b = np.array([[4.0, 1.0], [1.0, 3.0]]), np.array([1.0, 2.0])
    matrix, vector = double(a), double(b)

    def f(x):
        return 0.5 * (x * matrix.matmul(x)).sum() - (vector * x).sum()

    for minimize in (minimize_bfgs, minimize_lbfgs):
        exact = minimize(
            f, double([0.0, 0.0]), dtype="float64", initial_inverse_hessian_estimate=double(np.linalg.inv(a))
        )
        assert exact[1].item() == 2  # the first step is Newton's
        np.testing.assert_allclose(exact[2].numpy(), np.linalg.solve(a, b), rtol=16 * EPS)
    stopped = minimize_bfgs(f, double([9.0, -9.0]), dtype="float64", max_iters=1)
    assert stopped[0].item() is False


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"line_search_fn": "hager_zhang"}, ConfigError, "line_search_fn is 'strong_wolfe'"),
        ({"dtype": "float16"}, DTypeError, "dtype is 'float32' or 'float64', got 'float16'"),
        ({"dtype": "float32"}, DTypeError, "initial_position is float64 but dtype=float32"),
        ({"initial_position": double([[1.0]])}, ShapeError, r"initial_position is a 1-D Tensor, got \[1, 1\]"),
        ({"initial_inverse_hessian_estimate": double([1.0])}, ShapeError, r"has shape \[1\], needs \[2, 2\]"),
        ({"initial_inverse_hessian_estimate": double([[1.0, 0.0], [0.0, -1.0]])}, ConfigError, "positive definite"),
        ({"objective_func": lambda x: x}, ShapeError, r"must return one number, its result has shape \[2\]"),
        ({"objective_func": lambda x: 1.0}, ShapeError, "its result has no Tensor"),
        ({"max_iters": 0}, ConfigError, "max_iters is a whole number of at least 1"),
        ({"tolerance_grad": -1.0}, ConfigError, "tolerance_grad is a number of at least 0"),
    ],
)
def test_minimizers_refuse(change, error, message):
    given = {"objective_func": rosenbrock, "initial_position": double([1.0, 2.0]), "dtype": "float64", **change}
    with pytest.raises(error, match=message):
        minimize_lbfgs(**given)


def test_lbfgs_is_the_optimizer():
    assert LBFGS is opt.LBFGS


# LookAhead


def parameters(dtype="float32"):
    return [Parameter(jnp.asarray(v, dtype), name=n) for n, v in (("w", [[1.0, 2.0]]), ("b", [3.0]))]


def step_of(params, optimizer):
    def step(factor, skip=None):
        loss = sum((p * p * factor).sum() for p in params)
        loss.backward()
        optimizer.step(skip=skip)
        optimizer.clear_grad()

    return step


@pytest.mark.one_in(3)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_look_ahead(captured, dtype):
    params = parameters(dtype)
    inner = opt.SGD(0.125, params, multi_precision=True)
    optimizer = LookAhead(inner, alpha=0.5, k=3)
    step = step_of(params, optimizer)
    run = to_static(step) if captured else step
    fast = slow = np.array([1.0, 2.0, 3.0])
    for t in range(1, 8):
        gradient = 2 * np.asarray(jnp.asarray(fast, dtype), "float64")
        fast = fast - 0.125 * gradient
        if t % 3 == 0:
            slow = fast = slow + 0.5 * (fast - slow)
        run(to_tensor(1.0, dtype=dtype))
        found = np.concatenate([p.numpy().ravel().astype("float64") for p in params])
        # powers of two times short numbers: exact but for rounding to 8 bits
        np.testing.assert_allclose(found, fast, rtol=2.0**-8 if dtype == "bfloat16" else 8 * EPS)
    before = [p.numpy().copy() for p in params], optimizer.state_dict()["lookahead_step"].item()
    step(to_tensor(1.0, dtype=dtype), to_tensor(True))
    assert optimizer.state_dict()["lookahead_step"].item() == before[1] == 7
    for p, v in zip(params, before[0], strict=True):
        np.testing.assert_array_equal(p.numpy(), v)


def test_look_ahead_continues_and_hands_on():
    params = parameters()
    optimizer = LookAhead(opt.Adam(0.1, parameters=params), k=2)
    step = step_of(params, optimizer)
    for _ in range(3):
        step(1.0)
    saved = {n: t.numpy().copy() for n, t in optimizer.state_dict().items()}
    values = [p.numpy().copy() for p in params]
    again = parameters()
    other = LookAhead(opt.Adam(0.1, parameters=again), k=2)
    for p, v in zip(again, values, strict=True):
        p.set_value(v)
    with pytest.raises(CheckpointError, match="w_slow_0 is missing"):
        other.set_state_dict({"w_slow_0": np.zeros(3)})
    other.set_state_dict(saved)
    for _ in range(3):
        step(1.0)
        step_of(again, other)(1.0)
    for p, q in zip(params, again, strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())
    optimizer.set_lr(0.5)
    assert optimizer.get_lr() == optimizer.inner_optimizer.get_lr() == 0.5
    _, pairs = optimizer.minimize((params[0] * params[0]).sum())
    assert [p.name for p, _ in pairs] == ["w"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: LookAhead(3), "inner_optimizer is an optimizer"),
        (lambda p: LookAhead(opt.LBFGS(parameters=p)), "whose step takes no closure"),
        (lambda p: LookAhead(opt.SGD(0.1, p), k=0), "k is a whole number of at least 1"),
        (lambda p: LookAhead(opt.SGD(0.1, p), alpha=1.5), r"alpha is a number in \[0, 1\)"),
        (lambda p: LookAhead(opt.SGD(0.1, p)).minimize(p[0].sum(), parameters=p), "leave the arguments out"),
        (lambda p: ModelAverage(0.1), "needs parameters="),
        (lambda p: ModelAverage(-0.1, p), "average_window_rate is a number of at least 0"),
        (lambda p: ModelAverage(0.1, p, min_average_window=0), "min_average_window is a whole number"),
        (lambda p: ModelAverage(0.1, p).minimize(None, parameters=p), "parameters are given when it is made"),
        (lambda p: ModelAverage(0.1, p).restore(), "nothing was replaced"),
        (lambda p: ModelAverage(0.1, p).apply().__enter__(), "nothing was averaged yet"),
        (lambda p: ModelAverage(0.1, p).apply(executor=3).__enter__(), "executor belongs to static Programs"),
        (lambda p: ExponentialMovingAverage(p, decay=1.0), r"decay is a number in \[0, 1\)"),
    ],
)
def test_refuses_what_it_cannot_do(make, message):
    with pytest.raises(ConfigError, match=message):
        make(parameters())


def test_look_ahead_is_not_recorded():
    optimizer = LookAhead(opt.SGD(0.1, parameters()))
    paddle.enable_static()
    try:
        with pytest.raises(GradError, match=r"LookAhead.step\(\) runs now"):
            optimizer.step()
    finally:
        paddle.disable_static()


# averages


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_model_average(captured):
    (p,) = [Parameter(jnp.zeros(1, "float32"), name="w")]
    average = ModelAverage(0.5, [p], min_average_window=2, max_average_window=3)

    def step(value):
        with no_grad():
            paddle.assign(value, p)
        average.step()

    run, averaged = to_static(step) if captured else step, []
    for i in range(1, 12):
        run(to_tensor([float(i * i)]))
        with average.apply():
            averaged.append(p.item())
        assert p.item() == i * i
    # PaddlePaddle 3.3.1, run by hand: ModelAverage(0.5, [p], min_average_window=2, max_average_window=3) on i^2
    want = [1, 2.5, 14 / 3, 12.5, 50 / 3, 21.5, 110 / 3, 43.5, 51, 245 / 3, 91.5]
    np.testing.assert_allclose(averaged, want, rtol=4 * 2.0**-24)
    with average.apply(need_restore=False):
        pass
    assert p.item() == pytest.approx(91.5)
    with pytest.raises(ConfigError, match=r"in place already; call restore\(\) first"), average.apply():
        pass
    average.restore()
    assert p.item() == 121
    average.clear_grad()


@pytest.mark.parametrize("warm_up", [False, True])
def test_exponential_moving_average(warm_up):
    p = Parameter(jnp.zeros(2, jnp.bfloat16), name="w")
    average = ExponentialMovingAverage([p], decay=0.75, warm_up=warm_up)

    @to_static
    def update(value):
        with no_grad():
            paddle.assign(value, p)
        average.update()

    want, values = np.zeros(2), [np.array([1.0, -2.0]) * i for i in range(1, 6)]
    for t, value in enumerate(values):
        update(to_tensor(value, dtype="bfloat16"))
        decay = (0.0 if t == 0 else min(0.75, (1 + t) / (10 + t))) if warm_up else 0.75
        want = decay * want + (1 - decay) * value
    assert average.state_dict()["w_ema_0"].dtype == "float32"
    np.testing.assert_allclose(average.state_dict()["w_ema_0"].numpy(), want, rtol=16 * 2.0**-24)
    with average.apply():
        shown = want if warm_up else want / (1 - 0.75**5)
        np.testing.assert_allclose(p.numpy().astype("float64"), shown, rtol=2.0**-8)
    again = ExponentialMovingAverage([p], decay=0.75, warm_up=warm_up)
    again.set_state_dict(average.state_dict())
    assert again.state_dict()["num_updates"].item() == 5
    with pytest.raises(CheckpointError, match=r"'num_updates'.* missing, unknown or of another shape"):
        again.set_state_dict({"w_ema_0": np.zeros(2)})
