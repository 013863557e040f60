"""The contract of every optimizer: right numbers eager and captured, one compilation, exact resume, master weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.jit import to_static
from polyreme.nn.parameter import Parameter
from tests.compilations import counted_compilations
from tests.optimizer.table_optimizers import CASES, PLAIN

STEPS = 20
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
every_plain = pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.name)
INITIAL = [np.random.default_rng(0).normal(size=(3, 4)), np.random.default_rng(1).normal(size=(4,))]
GRADS = [[np.random.default_rng(10 * t + i).normal(size=p.shape) for i, p in enumerate(INITIAL)] for t in range(STEPS)]
NAMES = ("w", "b")


def tolerance(dtype, steps=STEPS):
    """Absolute, for parameters of size up to 8.

    Each step rounds some 16 times, each time by half an eps of numbers below 8; a centered variance loses up to 3 more
    bits to cancellation.
    """
    return steps * 16 * 8 * 8 * float(jnp.finfo(dtype).eps) / 2


def parameters(dtype, values=INITIAL):
    return [Parameter(jnp.asarray(v, dtype), name=n) for v, n in zip(values, NAMES, strict=True)]


def stepper(params, optimizer):
    """A training step whose gradients are the Tensors given: the loss is linear in the parameters."""

    def step(*grads):
        loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    return step


def run(step, dtype, steps):
    for grads in steps:
        step(*[to_tensor(jnp.asarray(g, dtype)) for g in grads])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@every_case
def test_equals_its_oracle_eager(case, dtype):
    params = parameters(dtype)
    run(stepper(params, case.make(params)), dtype, GRADS)
    for p, want in zip(params, case.oracle(INITIAL, GRADS), strict=True):
        assert p.dtype == dtype
        np.testing.assert_allclose(p.numpy(), want, rtol=0, atol=tolerance(dtype))


@pytest.mark.one_in(6)
@every_case
def test_equals_its_oracle_captured_and_compiles_once(case):
    params = parameters("float32")
    step = to_static(stepper(params, case.make(params)))
    run(step, "float32", GRADS[:1])
    with counted_compilations() as compiled:
        run(step, "float32", GRADS[1:])
    assert step.retraces == ["first call"]
    assert not compiled
    for p, want in zip(params, case.oracle(INITIAL, GRADS), strict=True):
        np.testing.assert_allclose(p.numpy(), want, rtol=0, atol=tolerance("float32"))


def copied(state_dict):
    return {k: v.numpy() if isinstance(v, Tensor) else v for k, v in state_dict.items()}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("stepped", [False, True], ids=["before_first_step", "after_steps"])
@every_plain
def test_state_dict_continues_bit_for_bit(case, stepped):
    params = parameters("float32")
    optimizer = case.make(params)
    step = stepper(params, optimizer)
    run(step, "float32", GRADS[:10])
    saved, values = copied(optimizer.state_dict()), [p.numpy() for p in params]
    run(step, "float32", GRADS[10:])

    again = parameters("float32")
    other = case.make(again)
    step = stepper(again, other)
    if stepped:
        run(step, "float32", GRADS[3:7])
    for p, v in zip(again, values, strict=True):
        p.set_value(v)
    other.set_state_dict(saved)
    assert set(copied(other.state_dict())) == set(saved)
    run(step, "float32", GRADS[10:])
    for p, q in zip(params, again, strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())


@every_plain
def test_an_empty_state_dict_starts_again(case):
    params = parameters("float32")
    optimizer = case.make(params)
    step = stepper(params, optimizer)
    run(step, "float32", GRADS[:4])
    for p, v in zip(params, INITIAL, strict=True):
        p.set_value(v.astype("float32"))
    optimizer.set_state_dict({})
    run(step, "float32", GRADS)
    for p, want in zip(params, case.oracle(INITIAL, GRADS), strict=True):
        np.testing.assert_allclose(p.numpy(), want, rtol=0, atol=tolerance("float32"))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@every_plain
def test_master_weights_follow_the_float32_run(case, captured):
    def exact(values):  # numbers that bfloat16 holds exactly, so that only the update can differ
        return [np.asarray(jnp.asarray(v, jnp.bfloat16), np.float64) for v in values]

    initial, grads = exact(INITIAL), [exact(g) for g in GRADS]
    low = parameters("bfloat16", initial)
    optimizer = case.make(low)
    optimizer.keep_masters({id(p): p._array for p in low})
    step = stepper(low, optimizer)
    run(to_static(step) if captured else step, "bfloat16", grads)
    found = optimizer.state_dict()
    for p, want in zip(low, case.oracle(initial, grads), strict=True):
        master = found[f"{p.name}_master_0"].numpy()
        assert master.dtype == np.float32
        np.testing.assert_allclose(master, want, rtol=0, atol=tolerance("float32"))
        np.testing.assert_array_equal(p.numpy(), master.astype(p.dtype))


@pytest.mark.one_in(6)
@every_plain
def test_a_parameter_that_joins_later_has_its_own_bias_correction(case):
    w, b = parameters("float32")
    optimizer = case.make([w, b])
    for t, (gw, gb) in enumerate(GRADS):
        loss = (w * to_tensor(gw.astype("float32"))).sum()
        if t >= 5:
            loss = loss + (b * to_tensor(gb.astype("float32"))).sum()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    (want,) = case.oracle(INITIAL[1:], [g[1:] for g in GRADS[5:]])
    np.testing.assert_allclose(b.numpy(), want, rtol=0, atol=tolerance("float32"))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@every_plain
def test_a_skipped_step_changes_no_bit(case, captured):
    params = parameters("float32")
    optimizer = case.make(params)

    def step(skip, *grads):
        loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
        loss.backward()
        optimizer.step(skip=skip)
        optimizer.clear_grad()

    step = to_static(step) if captured else step
    for grads in GRADS[:3]:
        step(to_tensor(False), *[to_tensor(g.astype("float32")) for g in grads])
    before = [p.numpy() for p in params], copied(optimizer.state_dict())
    step(to_tensor(True), *[to_tensor(np.full(p.shape, np.nan, "float32")) for p in params])
    after = [p.numpy() for p in params], copied(optimizer.state_dict())
    for a, b in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert set(before[1]) == set(after[1])
    for key, value in before[1].items():
        np.testing.assert_array_equal(value, after[1][key])
