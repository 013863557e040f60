import numpy as np
import pytest

from polyreme.amp import GradScaler
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CaptureError, CheckpointError, ConfigError, GradError
from polyreme.jit import to_static
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.nn.parameter import Parameter
from polyreme.optimizer import SGD, Adam, AdamW, Momentum

modes = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


def training(scaler, optimizer_class=AdamW, captured=False, dtype="float32", **settings):
    """(parameters, optimizer, step): step(g) takes the gradient of the loss with respect to the first parameter."""
    params = [
        Parameter(np.array([1.0, 2.0]), dtype, name="w"),
        Parameter(np.array([[0.5]]), dtype, name="b"),
    ]
    optimizer = optimizer_class(parameters=params, **{"learning_rate": 0.1, **settings})

    def step(g):
        loss = (params[0] * g).sum() + params[1].sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        return loss

    return params, optimizer, to_static(step) if captured else step


def snapshot(params, optimizer):
    held = {p.name: p.numpy() for p in params}
    return held | {k: v.numpy() for k, v in optimizer.state_dict().items() if isinstance(v, Tensor)}


@pytest.mark.one_in(6)
@modes
@pytest.mark.parametrize("optimizer_class", [SGD, Momentum, Adam, AdamW])
def test_overflow_halves_the_scale_and_changes_nothing_else(captured, optimizer_class):
    """Case 27 of the fault table: inject an infinite gradient."""
    scaler = GradScaler(init_loss_scaling=1024.0)
    params, optimizer, step = training(scaler, optimizer_class, captured)
    for _ in range(2):
        step(to_tensor(np.array([0.5, -1.0], "float32")))
    before = snapshot(params, optimizer)
    for bad in (np.inf, -np.inf, np.nan):
        step(to_tensor(np.array([0.5, bad], "float32")))
        after = snapshot(params, optimizer)
        assert set(before) == set(after)
        for name, value in before.items():
            assert after[name].tobytes() == value.tobytes(), name
    assert scaler.state_dict()["scale"] == 1024.0 / 8
    step(to_tensor(np.array([0.5, -1.0], "float32")))
    moved = snapshot(params, optimizer)
    assert not np.array_equal(moved["w"], before["w"])
    if "w_step_0" in moved:  # the three overflowed steps were not counted
        assert moved["w_step_0"] == before["w_step_0"] + 1
    if captured:
        assert step.retraces == ["first call"]


@modes
def test_finite_steps_equal_unscaled_ones(captured):
    # the scale is a power of two: multiplying and dividing by it is exact
    g = to_tensor(np.array([0.3, -0.7], "float32"))
    scaled, _, step = training(GradScaler(), captured=captured)
    plain, _, other = training(GradScaler(enable=False), captured=captured)
    for _ in range(3):
        step(g)
        other(g)
    for p, q in zip(scaled, plain, strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())


@modes
def test_the_scale_grows_after_good_steps_and_shrinks_after_bad_ones(captured):
    scaler = GradScaler(8.0 > 0, 8.0, 4.0, 0.25, incr_every_n_steps=3, decr_every_n_nan_or_inf=2)
    _, _, step = training(scaler, captured=captured)
    seen = []
    for bad in [0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0]:
        step(to_tensor(np.array([np.inf if bad else 1.0, 1.0], "float32")))
        found = scaler.state_dict()
        seen.append((found["scale"], found["incr_count"], found["decr_count"]))
    # by hand: growth at the third good step; single overflows only count, pairs shrink; never below 1
    assert seen == [
        (8, 1, 0), (8, 2, 0), (32, 0, 0), (32, 0, 1), (32, 1, 0), (32, 0, 1),
        (8, 0, 0), (8, 0, 1), (2, 0, 0), (2, 0, 1), (1, 0, 0), (1, 1, 0),
    ]  # fmt: skip


def test_settings_changed_later_reach_a_captured_step():
    scaler = GradScaler(init_loss_scaling=16.0)
    _, _, step = training(scaler, captured=True)
    bad = to_tensor(np.array([np.inf, 1.0], "float32"))
    step(bad)
    assert scaler.get_loss_scaling().item() == 8.0
    scaler.set_decr_ratio(0.25)
    step(bad)
    assert scaler.get_loss_scaling().item() == 2.0
    scaler.set_init_loss_scaling(64.0)
    scaler.set_incr_every_n_steps(1)
    scaler.set_incr_ratio(8.0)
    step(to_tensor(np.array([1.0, 1.0], "float32")))
    assert scaler.get_loss_scaling().item() == 512.0
    assert step.retraces == ["first call"]


def test_a_scale_that_would_overflow_stays():
    scaler = GradScaler(init_loss_scaling=2.0**127, incr_every_n_steps=1)
    _, _, step = training(scaler)
    step(to_tensor(np.array([1e-30, 0.0], "float32")))
    assert scaler.get_loss_scaling().item() == 2.0**127


def test_a_fixed_scale_still_leaves_out_overflowed_steps():
    scaler = GradScaler(init_loss_scaling=4.0, use_dynamic_loss_scaling=False)
    params, optimizer, step = training(scaler)
    step(to_tensor(np.array([1.0, 1.0], "float32")))
    before = snapshot(params, optimizer)
    step(to_tensor(np.array([np.inf, 1.0], "float32")))
    np.testing.assert_array_equal(snapshot(params, optimizer)["w"], before["w"])
    assert scaler.get_loss_scaling().item() == 4.0


@modes
def test_unscaled_gradients_can_be_clipped_by_hand(captured):
    scaler = GradScaler(init_loss_scaling=2.0**10)
    w = Parameter(np.array([3.0, 4.0], "float32"), name="w")
    optimizer = SGD(1.0, parameters=[w])

    def step():
        scaler.scale((w * w).sum() / 2).backward()
        scaler.unscale_(optimizer)
        for p, g in ClipGradByGlobalNorm(1.0)([(w, w.grad)]):
            p.grad = g
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()

    (to_static(step) if captured else step)()
    # the gradient (3, 4) of norm 5 becomes (0.6, 0.8); four roundings of numbers of size 4
    np.testing.assert_allclose(w.numpy(), [2.4, 3.2], rtol=0, atol=4 * 4 * np.finfo("float32").eps)


def test_float16_gradients_below_its_smallest_number_survive():
    # the loss's gradient 1e-7 rounds to a subnormal in float16; scaled by 2^16 it is exact to 11 bits
    scaler = GradScaler()
    w = Parameter(np.zeros(1), "float16", name="w")
    optimizer = SGD(1.0, parameters=[w], multi_precision=True)
    scaler.scale((w.astype("float32") * 1e-7).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    master = optimizer.state_dict()["w_master_0"].item()
    assert master == pytest.approx(-1e-7, rel=2**-11)


def test_two_optimizers_share_a_scaler():
    scaler = GradScaler(init_loss_scaling=4.0)
    a, b = (Parameter(np.ones(1, "float32"), name=n) for n in "ab")
    first, second = SGD(0.5, parameters=[a]), SGD(0.5, parameters=[b])
    scaler.scale((a * to_tensor(float("inf")) + b).sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (a.item(), b.item(), scaler.get_loss_scaling().item()) == (1.0, 0.5, 2.0)


def test_minimize_steps_and_updates_the_scale():
    scaler = GradScaler()
    w = Parameter(np.ones(2, "float32"), name="w")
    optimizer = SGD(0.5, parameters=[w])
    scaled = scaler.scale(w.sum())
    scaled.backward()
    _, pairs = scaler.minimize(optimizer, scaled)
    assert [p.name for p, _ in pairs] == ["w"]
    np.testing.assert_array_equal(w.numpy(), [0.5, 0.5])
    optimizer.clear_grad(set_to_zero=False)
    scaler.minimize(optimizer, scaler.scale(w.sum()))
    np.testing.assert_array_equal(w.numpy(), [0.0, 0.0])
    with pytest.raises(ConfigError, match="the optimizer and the scaled loss"):
        scaler.minimize(optimizer)


def test_not_enabled_it_only_passes_on():
    scaler = GradScaler(enable=False)
    w = Parameter(np.ones(2, "float32"), name="w")
    optimizer = SGD(0.5, parameters=[w])
    loss = w.sum()
    assert scaler.scale(loss) is loss
    scaler.minimize(optimizer, loss)
    scaler.unscale_(optimizer)
    np.testing.assert_array_equal(w.numpy(), [0.5, 0.5])
    assert not scaler.is_enable()
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    with pytest.raises(CheckpointError, match="enable=False"):
        scaler.load_state_dict({"scale": 1.0})


def test_state_dict_round_trip():
    scaler = GradScaler(init_loss_scaling=256.0, incr_ratio=3.0, decr_ratio=0.25, incr_every_n_steps=7)
    _, _, step = training(scaler)
    for g in (1.0, np.inf, 1.0):
        step(to_tensor(np.array([g, 1.0], "float32")))
    state = scaler.state_dict()
    assert state == {
        "scale": 64.0, "incr_count": 1, "decr_count": 0, "incr_ratio": 3.0, "decr_ratio": 0.25, "incr_every_n_steps": 7,
        "decr_every_n_nan_or_inf": 1, "use_dynamic_loss_scaling": True,
    }  # fmt: skip
    other = GradScaler()
    other.load_state_dict(state)
    assert other.state_dict() == state
    with pytest.raises(CheckpointError, match=r"missing \['scale'\], unknown \['skale'\]"):
        other.load_state_dict({("skale" if k == "scale" else k): v for k, v in state.items()})
    with pytest.raises(ConfigError, match="decr_ratio is between 0 and 1, got 2"):
        other.load_state_dict({**state, "decr_ratio": 2.0})
    assert other.state_dict() == state


def test_getters_say_the_settings():
    scaler = GradScaler(init_loss_scaling=8.0)
    assert scaler.is_enable()
    assert scaler.is_use_dynamic_loss_scaling()
    assert (scaler.get_init_loss_scaling(), scaler.get_incr_ratio(), scaler.get_decr_ratio()) == (8.0, 2.0, 0.5)
    assert (scaler.get_incr_every_n_steps(), scaler.get_decr_every_n_nan_or_inf()) == (2000, 1)
    scaler.set_decr_every_n_nan_or_inf(3)
    assert scaler.get_decr_every_n_nan_or_inf() == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"init_loss_scaling": 0}, "scale is a finite number above 0, got 0"),
        ({"init_loss_scaling": float("inf")}, "scale is a finite number above 0, got inf"),
        ({"incr_ratio": 1.0}, "incr_ratio is a number above 1, got 1.0"),
        ({"decr_ratio": 1.0}, "decr_ratio is between 0 and 1, got 1.0"),
        ({"incr_every_n_steps": 0}, "incr_every_n_steps is an integer of at least 1, got 0"),
        ({"decr_every_n_nan_or_inf": 1.5}, "decr_every_n_nan_or_inf is an integer of at least 1, got 1.5"),
    ],
)
def test_refused_settings(given, message):
    with pytest.raises(ConfigError, match=message):
        GradScaler(**given)


def test_calls_out_of_order():
    scaler = GradScaler()
    w = Parameter(np.ones(2, "float32"), name="w")
    optimizer = SGD(0.5, parameters=[w])
    with pytest.raises(GradError, match="no gradients were unscaled"):
        scaler.update()
    with pytest.raises(ConfigError, match="takes the loss, a Tensor; got float"):
        scaler.scale(1.0)
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(GradError, match="unscaled already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(GradError, match="has stepped already"):
        scaler.step(optimizer)


def test_half_a_step_cannot_be_captured():
    scaler = GradScaler()
    w = Parameter(np.ones(2, "float32"), name="w")
    optimizer = SGD(0.5, parameters=[w])

    @to_static
    def half():
        scaler.scale(w.sum()).backward()
        scaler.unscale_(optimizer)

    half()
    with pytest.raises(CaptureError, match=r"without update\(\)"):
        scaler.step(optimizer)

    scaler = GradScaler()
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(CaptureError, match="called before the captured function"):
        to_static(lambda: scaler.step(optimizer))()
