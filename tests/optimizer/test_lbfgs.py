"""LBFGS: the numbers of a step without a line search, minima with one, what it keeps and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyreme as paddle
from polyreme import optimizer as opt
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CaptureError, CheckpointError, ConfigError, GradError
from polyreme.jit import to_static
from polyreme.nn.clip import ClipGradByGlobalNorm, ClipGradByNorm
from polyreme.nn.parameter import Parameter
from polyreme.optimizer import line_search
from polyreme.regularizer import L1Decay, L2Decay, WeightDecayRegularizer

EPS = 2.0**-52
START = [np.array([[1.0, -2.0]]), np.array([3.0, 0.5, -1.0])]
SCALES = [np.array([[2.0, 0.5]]), np.array([1.0, 3.0, 0.25])]


def parameters(dtype="float64", values=START):
    return [Parameter(jnp.asarray(v, dtype), name=f"p{i}") for i, v in enumerate(values)]


def quartic(params, optimizer):
    """A closure whose loss is the sum of scale * p^4 + p^2."""

    def closure():
        optimizer.clear_grad()
        terms = [(to_tensor(s, dtype=p.dtype) * p**4 + p * p).sum() for s, p in zip(SCALES, params, strict=True)]
        loss = terms[0] + terms[1]
        loss.backward()
        return loss

    return closure


def reference(start, fn, rate, iterations, pairs, decay=0.0):
    """Nocedal and Wright, algorithm 7.5, with steps of a fixed rate; fn: x -> gradient."""
    x, history, g_old, s = start.copy(), [], None, None
    for _ in range(iterations):
        g = fn(x) + decay * x
        if g_old is None:
            q, rate_now = -g, min(1, 1 / np.abs(g).sum()) * rate
        else:
            y = g - g_old
            history = [*history, (s, y)][-pairs:]
            q, shares = g.copy(), []
            for a, b in reversed(history):
                shares.append(a @ q / (a @ b))
                q = q - shares[-1] * b
            q = q * (s @ y) / (y @ y)
            for (a, b), share in zip(history, reversed(shares), strict=True):
                q = q + a * (share - b @ q / (a @ b))
            q, rate_now = -q, rate
        s = rate_now * q
        x, g_old = x + s, g
    return x


def slope(x):
    scale = np.concatenate([s.ravel() for s in SCALES])
    return 4 * scale * x**3 + 2 * x


@pytest.mark.parametrize("decay", [None, 0.3, L2Decay(0.3)], ids=["plain", "decay", "regularizer"])
def test_fixed_steps_equal_the_reference_and_calls_go_on(decay):
    params = parameters()
    optimizer = opt.LBFGS(0.4, max_iter=4, history_size=3, parameters=params, weight_decay=decay)
    closure = quartic(params, optimizer)
    first = optimizer.step(closure)
    assert isinstance(first, Tensor)
    start = np.concatenate([v.ravel() for v in START])
    assert first.item() == pytest.approx((np.concatenate([s.ravel() for s in SCALES]) * start**4 + start**2).sum())
    for _ in range(2):
        optimizer.step(closure)
    want = reference(start, slope, 0.4, 12, 3, 0.3 if decay else 0.0)
    found = np.concatenate([p.numpy().ravel() for p in params])
    np.testing.assert_allclose(found, want, rtol=0, atol=12 * 512 * EPS)


@pytest.mark.parametrize("captured", [pytest.param(False, id="eager", marks=pytest.mark.slow), True])
def test_the_strong_wolfe_search_finds_the_minimum_of_rosenbrock(captured):
    (x,) = parameters(values=[np.full(4, -1.2)])
    optimizer = opt.LBFGS(1.0, max_iter=100, line_search_fn="strong_wolfe", parameters=[x])

    def closure():
        optimizer.clear_grad()
        a, b = x[1:] - x[:-1] * x[:-1], 1 - x[:-1]
        loss = (100 * a * a + b * b).sum()
        loss.backward()
        return loss

    run, calls = to_static(closure) if captured else closure, []

    def counted():
        calls.append(1)
        return run()

    optimizer.step(counted)
    np.testing.assert_allclose(x.numpy(), np.ones(4), rtol=0, atol=1e-4)  # loss changes below 1e-9 end it
    assert len(calls) < 100  # scipy's L-BFGS-B takes 42 evaluations


def test_a_penalty_is_part_of_what_is_minimized():
    (x,) = parameters(values=[np.array([2.0, -3.0])])
    optimizer = opt.LBFGS(max_iter=50, line_search_fn="strong_wolfe", parameters=[x], weight_decay=L1Decay(0.5))

    def closure():
        optimizer.clear_grad()
        loss = ((x - to_tensor([1.0, -1.0], dtype="float64")) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    np.testing.assert_allclose(x.numpy(), [0.75, -0.75], rtol=0, atol=1e-6)


def test_max_eval_and_tolerances_end_it():
    params = parameters()
    optimizer = opt.LBFGS(0.1, max_iter=50, max_eval=7, parameters=params)
    closure, calls = quartic(params, optimizer), []

    def counted():
        calls.append(1)
        return closure()

    optimizer.step(counted)
    assert len(calls) == 7
    values = [p.numpy().copy() for p in params]
    still = opt.LBFGS(0.1, tolerance_grad=1e6, parameters=params)
    still.step(closure)
    for p, v in zip(params, values, strict=True):
        np.testing.assert_array_equal(p.numpy(), v)


def test_the_search_meets_the_strong_wolfe_conditions():
    advance = jax.jit(line_search.advance)
    for f, g, first in [
        (lambda a: -a / (a * a + 2), lambda a: (a * a - 2) / (a * a + 2) ** 2, 0.001),  # More and Thuente (1994), 5.1
        (lambda a: (a + 0.004) ** 5 - 2 * (a + 0.004) ** 4,
         lambda a: 5 * (a + 0.004) ** 4 - 8 * (a + 0.004) ** 3, 10.0),  # 5.2
        (lambda a: -np.log(2 - a) + (a - 3) ** 2 if a < 2 else np.nan,
         lambda a: 1 / (2 - a) + 2 * (a - 3) if a < 2 else np.nan, 64.0),
    ]:  # fmt: skip
        start = [jnp.asarray(v(0.0)) for v in (f, g)]
        search = line_search.begin(*start, start[1], first)
        while int(search.stage) != line_search.DONE:
            a = float(search.step)
            search = advance(search, f(a), g(a), g(a), 30, 0.0)
        a = float(search.low.step)
        assert a > 0
        assert f(a) <= f(0.0) + 1e-4 * a * g(0.0)
        assert abs(g(a)) <= 0.9 * abs(g(0.0))
        assert int(search.count) < 30


def test_a_line_search_is_finished_however_few_evaluations_are_allowed():
    w = Parameter(jnp.array([1.0]))
    optimizer = opt.LBFGS(50.0, max_iter=1, line_search_fn="strong_wolfe", parameters=[w])

    def closure():
        optimizer.clear_grad()
        loss = (50 * w * w).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # its first trial is at -49
    assert abs(w.item()) < 0.5


def test_state_dict_continues_bit_for_bit():
    def run(params, optimizer, steps):
        closure = quartic(params, optimizer)
        for _ in range(steps):
            optimizer.step(closure)

    params = parameters()
    optimizer = opt.LBFGS(0.4, max_iter=2, history_size=3, parameters=params)
    run(params, optimizer, 2)
    state = optimizer.state_dict()
    saved = {n: t if isinstance(t, dict) else t.numpy().copy() for n, t in state.items()}
    assert saved["state"] == {"func_evals": 4, "n_iter": 2}
    values = [p.numpy().copy() for p in params]
    run(params, optimizer, 2)
    again = parameters(values=values)
    other = opt.LBFGS(0.4, max_iter=2, history_size=3, parameters=again)
    other.set_state_dict(saved)
    run(again, other, 2)
    for p, q in zip(params, again, strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())
    with pytest.raises(CheckpointError, match=r"lacks .*'gradient'"):
        other.set_state_dict({n: a for n, a in saved.items() if n != "lbfgs_gradient"})
    with pytest.raises(CheckpointError, match=r"lbfgs_move has shape \[2\], the parameters have 5 elements"):
        other.set_state_dict({**saved, "lbfgs_move": np.zeros(2)})


def test_master_weights_and_a_clip():
    params = parameters("bfloat16")
    optimizer = opt.LBFGS(0.4, max_iter=3, parameters=params, grad_clip=ClipGradByGlobalNorm(1.0))
    optimizer.keep_masters({id(p): p._array for p in params})
    closure = quartic(params, optimizer)
    optimizer.step(closure)
    for p in params:
        master = optimizer.state_dict()[f"{p.name}_master_0"].numpy()
        np.testing.assert_array_equal(p.numpy(), master.astype(p.dtype))
        assert np.abs(master - p.numpy().astype("float32")).max() > 0
    assert np.linalg.norm(optimizer.state_dict()["lbfgs_gradient"].numpy()) <= 1 + 1e-6


class Odd(WeightDecayRegularizer):
    def gradient(self, p):
        return p


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_iter": 0}, "max_iter is a whole number of at least 1, got 0"),
        ({"max_eval": 2.5}, "max_eval is a whole number"),
        ({"history_size": 0}, "history_size is a whole number"),
        ({"tolerance_grad": -1}, "tolerance_grad is a number of at least 0"),
        ({"line_search_fn": "armijo"}, "line_search_fn is None or 'strong_wolfe', got 'armijo'"),
        ({"line_search_fn": "strong_wolfe", "grad_clip": ClipGradByNorm(1.0)}, "a clipped gradient is not the loss's"),
        ({"line_search_fn": "strong_wolfe", "weight_decay": Odd(0.1)}, "needs the value of the penalty Odd"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        opt.LBFGS(parameters=parameters(), **settings)


def test_refused_calls():
    params = parameters()
    optimizer = opt.LBFGS(parameters=params)
    closure = quartic(params, optimizer)
    for call in (optimizer.step, lambda: optimizer.step(closure, skip=to_tensor(True))):
        with pytest.raises(ConfigError, match="takes a function that computes the loss"):
            call()
    with pytest.raises(ConfigError, match=r"closure must return the loss, .* got float"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(ConfigError, match=r"only one value of the loss; call step\(closure\)"):
        optimizer.minimize(closure())
    with pytest.raises(ConfigError, match=r"save state_dict\(\)"):
        optimizer.state_arrays({})
    with pytest.raises(ConfigError, match="give all of them when it is made"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(CaptureError, match="capture the closure, not the step"):
        to_static(lambda: optimizer.step(closure))()
    with pytest.raises(ConfigError, match=r"p1 has learning rate factor 0\.5"):
        opt.LBFGS(parameters=[params[0], {"params": params[1], "learning_rate": 0.5}][1:])
    paddle.enable_static()
    try:
        with pytest.raises(GradError, match=r"in static mode use .*minimize_lbfgs"):
            optimizer.step(closure)
    finally:
        paddle.disable_static()
