"""What all optimizers share: settings, groups, learning rate, clipping, state."""

import copy
import inspect

import numpy as np
import pytest

from polyreme import optimizer as opt
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, CheckpointError, ConfigError, DTypeError
from polyreme.jit import to_static
from polyreme.nn import Embedding, Layer, LayerNorm, Linear
from polyreme.nn.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from polyreme.nn.parameter import Parameter
from polyreme.optimizer import adam
from polyreme.optimizer.lr import StepDecay
from polyreme.regularizer import L1Decay, L2Decay

SIGNATURES = {
    "SGD": "learning_rate=0.001, parameters=None, weight_decay=None, grad_clip=None, multi_precision=False, name=None",
    "Momentum": "learning_rate=0.001, momentum=0.9, parameters=None, use_nesterov=False, weight_decay=None, "
    "grad_clip=None, multi_precision=False, rescale_grad=1.0, use_multi_tensor=False, name=None",
    "Adam": "learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08, parameters=None, weight_decay=None, "
    "grad_clip=None, lazy_mode=False, multi_precision=False, use_multi_tensor=False, amsgrad=False, name=None",
    "AdamW": "learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08, parameters=None, weight_decay=0.01, "
    "use_lowprecision_moment=False, lr_ratio=None, apply_decay_param_fun=None, grad_clip=None, lazy_mode=False, "
    "multi_precision=False, amsgrad=False, name=None",
    "Adamax": "learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08, parameters=None, weight_decay=None, "
    "grad_clip=None, name=None",
    "Adagrad": "learning_rate, epsilon=1e-06, parameters=None, weight_decay=None, grad_clip=None, name=None, "
    "initial_accumulator_value=0.0",
    "Adadelta": "learning_rate=0.001, epsilon=1e-06, rho=0.95, parameters=None, weight_decay=None, grad_clip=None, "
    "name=None",
    "RMSProp": "learning_rate, rho=0.95, epsilon=1e-06, momentum=0.0, centered=False, parameters=None, "
    "weight_decay=None, grad_clip=None, name=None",
    "Lamb": "learning_rate=0.001, lamb_weight_decay=0.01, beta1=0.9, beta2=0.999, epsilon=1e-06, parameters=None, "
    "grad_clip=None, exclude_from_weight_decay_fn=None, multi_precision=False, always_adapt=False, name=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_paddles(name):
    found = inspect.signature(getattr(opt, name)).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found]
    assert ", ".join(shown) == SIGNATURES[name]


def parameter(value=1.0, name="w", dtype="float32"):
    return Parameter(np.full(2, value), dtype, name=name)


def give(p, *gradient):
    p.grad = to_tensor(np.asarray(gradient), dtype=p.dtype)


# groups


def test_groups_have_their_own_settings():
    a, b, c = (parameter(name=n) for n in "abc")
    groups = [
        {"params": [a], "learning_rate": 0.5, "weight_decay": 0.1},
        {"params": b, "grad_clip": ClipGradByValue(0.25)},
        {"params": [c], "momentum": 0.0},
    ]
    optimizer = opt.Momentum(1.0, 0.5, groups, weight_decay=0.2)
    for _ in range(2):
        for p in (a, b, c):
            give(p, 1.0, 1.0)
        optimizer.step()

    def run(rate, decay, clip, mu):
        p = v = 0.0
        p = 1.0
        for _ in range(2):
            v = mu * v + min(1.0, clip) + decay * p
            p -= rate * v
        return p

    # a handful of float32 roundings of numbers of size 4
    for p, want in zip((a, b, c), (run(0.5, 0.1, 9, 0.5), run(1, 0.2, 0.25, 0.5), run(1, 0.2, 9, 0.0)), strict=True):
        np.testing.assert_allclose(p.numpy(), [want, want], rtol=0, atol=16 * 4 * 2.0**-24)


def test_a_shared_clip_sees_all_groups_and_spares_what_must_not_be_clipped():
    a, b, c = (parameter(0.0, n) for n in "abc")
    c.need_clip = False
    optimizer = opt.SGD(1.0, [{"params": [a]}, {"params": [b, c]}], grad_clip=ClipGradByGlobalNorm(1.0))
    give(a, 3.0, 0.0)
    give(b, 0.0, 4.0)
    give(c, 5.0, 5.0)
    optimizer.step()
    np.testing.assert_allclose(a.numpy(), [-0.6, 0], rtol=4 * 2.0**-24)
    np.testing.assert_allclose(b.numpy(), [0, -0.8], rtol=4 * 2.0**-24)
    np.testing.assert_array_equal(c.numpy(), [-5, -5])


def test_clip_by_norm_is_per_parameter():
    a, b = parameter(0.0, "a"), parameter(0.0, "b")
    optimizer = opt.SGD(1.0, [a, b], grad_clip=ClipGradByNorm(1.0))
    give(a, 3.0, 4.0)
    give(b, 0.3, 0.4)
    optimizer.step()
    np.testing.assert_allclose(a.numpy(), [-0.6, -0.8], rtol=8 * 2.0**-24)
    np.testing.assert_allclose(b.numpy(), [-0.3, -0.4], rtol=8 * 2.0**-24)


def test_a_parameters_own_regularizer_and_rate_win():
    a, b = parameter(2.0, "a"), parameter(2.0, "b")
    a.regularizer = L1Decay(0.5)
    b.optimize_attr = {"learning_rate": 0.1}
    optimizer = opt.SGD(1.0, [a, b], weight_decay=L2Decay(0.25))
    give(a, 0.0, 0.0)
    give(b, 0.0, 0.0)
    optimizer.step()
    np.testing.assert_array_equal(a.numpy(), [1.5, 1.5])
    np.testing.assert_allclose(b.numpy(), [1.95, 1.95], rtol=4 * 2.0**-24)


def test_what_a_group_says_replaces_a_parameters_own_rate_and_regularizer():
    a, b, c = parameter(2.0, "a"), parameter(2.0, "b"), parameter(2.0, "c")
    for p in (a, b, c):
        p.regularizer = L1Decay(0.5)
        p.optimize_attr = {"learning_rate": 0.5}
    groups = [{"params": [a], "learning_rate": 0.25}, {"params": [b], "weight_decay": 1.0}, {"params": [c]}]
    optimizer = opt.SGD(1.0, groups)
    for p in (a, b, c):
        give(p, 0.0, 0.0)
    optimizer.step()
    assert [p.tolist() for p in (a, b, c)] == [[1.875] * 2, [1.0] * 2, [1.75] * 2]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: opt.SGD(), ConfigError, "SGD needs parameters="),
        (lambda p: opt.SGD(0.1, p), ConfigError, "got one Parameter"),
        (lambda p: opt.SGD(0.1, [3]), ConfigError, "must hold Parameters, got int"),
        (lambda p: opt.SGD(0.1, [p, p]), ConfigError, "'w' appears twice"),
        (lambda p: opt.SGD(0.1, [p, parameter()]), ConfigError, "two parameters are named 'w'"),
        (lambda p: opt.SGD(0.1, [{"params": [p]}, parameter(name="x")]), ConfigError, "cannot be mixed"),
        (lambda p: opt.SGD(0.1, [{"lr": 3}]), ConfigError, r"cannot be mixed with plain Parameters; got \['lr'\]"),
        (lambda p: opt.SGD(0.1, [{"params": [p], "lr": 3}]), ConfigError, "setting 'lr' is not known"),
        (lambda p: opt.Adam(0.1, parameters=[{"params": [p], "beta": 0.1}]), ConfigError, "did you mean 'beta"),
        (lambda p: opt.Adam(0.1, parameters=[{"params": [p], "beta1": 1.5}]), ConfigError, r"beta1 .* got 1.5"),
        (lambda p: opt.SGD(0.1, [{"params": [p], "learning_rate": -1}]), ConfigError, "learning_rate .* got -1"),
        (lambda p: opt.SGD(-0.1, [p]), ConfigError, "at least 0, got -0.1"),
        (lambda p: opt.SGD(float("nan"), [p]), ConfigError, "at least 0, got nan"),
        (lambda p: opt.SGD(0.1, [p], weight_decay=-1.0), ConfigError, "weight_decay .* got -1.0"),
        (lambda p: opt.SGD(0.1, [p], weight_decay=True), ConfigError, "weight_decay .* got True"),
        (lambda p: opt.SGD(0.1, [p], grad_clip=1.0), ConfigError, "grad_clip is a ClipGradBy... or None, got 1.0"),
        (lambda p: opt.AdamW(0.1, parameters=[p], weight_decay=L2Decay(0.1)), ConfigError, "regularizers go with Adam"),
        (lambda p: opt.AdamW(0.1, parameters=[p], lr_ratio=0.5), ConfigError, "lr_ratio is a function or None"),
        (lambda p: opt.Adam(0.1, 1.0, parameters=[p]), ConfigError, r"beta1 is a number in \[0, 1\), got 1.0"),
        (lambda p: opt.Momentum(0.1, 0.9, [p], use_nesterov=1), ConfigError, "use_nesterov is True or False, got 1"),
        (lambda p: opt.Lamb(parameters=[p], exclude_from_weight_decay_fn=3), ConfigError, "is a function or None"),
        (lambda p: opt.Adam(parameters=[parameter(dtype="complex64")]), DTypeError, "w is complex64; only SGD"),
    ],
)
def test_refuses_what_it_cannot_do(make, error, message):
    with pytest.raises(error, match=message):
        make(parameter())


# learning rate


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_schedules_and_set_lr_reach_the_step(captured):
    p = parameter(0.0)
    schedule = StepDecay(1.0, step_size=2, gamma=0.5)
    optimizer = opt.SGD(schedule, [p])

    def step():
        p.sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    step = to_static(step) if captured else step
    seen = []
    for _ in range(4):
        before = p.numpy()[0]
        step()
        seen.append(before - p.numpy()[0])
        schedule.step()
    assert seen == [1.0, 1.0, 0.5, 0.5]
    assert optimizer.get_lr() == 0.25
    with pytest.raises(ConfigError, match="comes from a scheduler"):
        optimizer.set_lr(0.1)
    optimizer.set_lr_scheduler(StepDecay(2.0, step_size=9))
    schedule.step()  # no longer heard
    before = p.numpy()[0]
    step()
    assert before - p.numpy()[0] == 2.0
    if captured:
        assert step.retraces == ["first call"]


def test_set_lr_changes_the_next_step():
    p = parameter(0.0)
    optimizer = opt.SGD(1.0, [p])
    optimizer.set_lr(0.25)
    give(p, 1.0, 2.0)
    optimizer.step()
    np.testing.assert_array_equal(p.numpy(), [-0.25, -0.5])
    assert optimizer.get_lr() == 0.25
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        optimizer.set_lr(-1)
    with pytest.raises(ConfigError, match="takes an LRScheduler, got float"):
        optimizer.set_lr_scheduler(0.1)


def test_float64_parameters_get_a_float64_rate():
    p = parameter(0.0, dtype="float64")
    optimizer = opt.SGD(0.1, [p])
    give(p, 1.0, 1.0)
    optimizer.step()
    assert p.numpy()[0] == -0.1


def test_the_rate_cannot_change_inside_a_capture():
    p = parameter()
    schedule = StepDecay(1.0, step_size=1)
    scheduled, fixed = opt.SGD(schedule, [p]), opt.SGD(0.5, [p])

    @to_static
    def step(change):
        p.sum().backward()
        change()

    with pytest.raises(CaptureError, match="step the scheduler, or call set_lr, after the captured call"):
        step(lambda: fixed.set_lr(0.1))
    with pytest.raises(CaptureError, match="inside a captured function"):
        step(schedule.step)
    assert (fixed.get_lr(), scheduled.get_lr()) == (0.5, 1.0)


# the step


def test_parameters_without_gradient_or_frozen_stay():
    a, b, c = (parameter(name=n) for n in "abc")
    optimizer = opt.AdamW(0.1, parameters=[a, b, c])
    give(a, 1.0, 1.0)
    give(b, 1.0, 1.0)
    b.stop_gradient = True
    optimizer.step()
    assert a.numpy()[0] != 1.0
    np.testing.assert_array_equal(b.numpy(), [1.0, 1.0])
    np.testing.assert_array_equal(c.numpy(), [1.0, 1.0])
    optimizer.clear_grad(set_to_zero=False)
    optimizer.step()  # nothing to do


def test_a_captured_step_notices_a_gradient_that_appears():
    a, b = parameter(0.0, "a"), parameter(0.0, "b")
    optimizer = opt.SGD(1.0, [a, b])
    step = to_static(lambda: optimizer.step())
    give(a, 1.0, 1.0)
    step()
    give(b, 1.0, 1.0)
    step()
    np.testing.assert_array_equal(a.numpy(), [-2, -2])
    np.testing.assert_array_equal(b.numpy(), [-1, -1])


def test_a_step_after_a_captured_write_of_the_parameter():
    p = Parameter(np.ones(2), "bfloat16", name="w")
    optimizer = opt.AdamW(0.0, parameters=[p], multi_precision=True)

    @to_static
    def step():
        (p * p).sum().backward()
        p.set_value(p.detach() * 1)
        optimizer.step()
        optimizer.clear_grad()

    step()
    step()
    np.testing.assert_array_equal(optimizer.state_dict()["w_master_0"].numpy(), [1.0, 1.0])


def test_minimize_uses_gradients_that_are_there():
    a, b = parameter(1.0, "a"), parameter(1.0, "b")
    optimizer = opt.SGD(0.5, [a, b])
    loss = (a + b).sum()
    loss.backward()
    operations, pairs = optimizer.minimize(loss)  # after backward: its gradients are used
    assert operations == []
    assert [(p.name, g.tolist()) for p, g in pairs] == [("a", [1.0, 1.0]), ("b", [1.0, 1.0])]
    optimizer.clear_grad(set_to_zero=False)
    optimizer.minimize((a + b).sum(), parameters=[a])  # without: minimize calls it
    optimizer.clear_grad(set_to_zero=False)
    optimizer.minimize((a + b).sum(), no_grad_set=[a])
    np.testing.assert_array_equal(a.numpy(), [0.0, 0.0])
    np.testing.assert_array_equal(b.numpy(), [0.0, 0.0])
    with pytest.raises(ConfigError, match="startup_program belongs to static programs"):
        optimizer.minimize(loss, startup_program=3)
    with pytest.raises(ConfigError, match="'c' is not a parameter of this SGD"):
        optimizer.minimize(loss, parameters=[parameter(name="c")])


def test_backward_and_apply_gradients():
    a, b = parameter(1.0, "a"), parameter(1.0, "b")
    optimizer = opt.SGD(0.5, [a, b])
    pairs = optimizer.backward((a * 2 + b).sum())
    optimizer.apply_gradients([(p, g * 2) for p, g in pairs if p is a])
    np.testing.assert_array_equal(a.numpy(), [-1.0, -1.0])
    np.testing.assert_array_equal(b.numpy(), [1.0, 1.0])
    with pytest.raises(ConfigError, match="callbacks belong to static programs"):
        optimizer.backward(a.sum(), callbacks=[3])


def test_clear_grad_reads_as_zeros_or_none():
    p = parameter()
    optimizer = opt.SGD(0.5, [p])
    give(p, 1.0, 1.0)
    optimizer.clear_grad()
    np.testing.assert_array_equal(p.grad.numpy(), [0.0, 0.0])
    give(p, 1.0, 1.0)
    optimizer.clear_gradients(False)
    assert p.grad is None


def test_complex_parameters():
    p = Parameter(np.array([1 + 2j]), "complex128", name="w")
    optimizer = opt.Momentum(0.5, 0.5, [p])
    for _ in range(2):
        (p * p.conj()).real().sum().backward()  # gradient 2 p
        optimizer.step()
        optimizer.clear_grad()
    # p (1 - 0.5 * 2) = 0, then velocity 0.5 * 2 p
    np.testing.assert_array_equal(p.numpy(), [-0.5 * (1 + 2j)])


def test_low_precision_moments():
    p = Parameter(np.ones(2), "bfloat16", name="w")
    for low, want in ((True, "bfloat16"), (False, "float32")):
        optimizer = opt.AdamW(parameters=[p], multi_precision=True, use_lowprecision_moment=low)
        optimizer.create_state()
        assert optimizer.state_dict()["w_moment1_0"].dtype == want


# state


@pytest.mark.parametrize("captured", [False, True])
def test_lazy_mode_updates_the_rows_of_a_sparse_table_that_are_looked_up(captured):
    table = Embedding(5, 2, sparse=True)
    start = np.linspace(-1, 1, 10).reshape(5, 2)
    table.weight.set_value(start.astype("float32"))
    adam = opt.Adam(0.1, parameters=table.parameters(), lazy_mode=True, grad_clip=ClipGradByNorm(1.5))

    def step(ids):
        (table(ids) ** 2).sum().backward()
        adam.step()
        adam.clear_grad()

    moved, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    run = to_static(step) if captured else step
    for t, ids in enumerate(([0, 1, 1], [1, 4, 4], [0, 4, 4]), 1):
        run(to_tensor(ids))
        g = 2 * moved * np.bincount(ids, minlength=5)[:, None]
        g *= min(1.0, 1.5 / np.linalg.norm(g))
        rows = sorted(set(ids))
        m[rows], v[rows] = 0.9 * m[rows] + 0.1 * g[rows], 0.999 * v[rows] + 0.001 * g[rows] ** 2
        moved[rows] -= 0.1 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8))[rows]
    np.testing.assert_allclose(table.weight.numpy(), moved, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.1, L1Decay(0.1)])
def test_lazy_mode_takes_no_penalty_on_a_sparse_table(decay):
    table = Embedding(5, 2, sparse=True)
    adam = opt.Adam(parameters=table.parameters(), lazy_mode=True, weight_decay=decay)
    table(to_tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="gives all of its rows a gradient; leave out weight_decay"):
        adam.step()


def state_of(p, **given):
    optimizer = opt.Adam(0.1, parameters=[p], **given)
    give(p, 1.0, 2.0)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_moment1_0": np.zeros(2)}, r"unknown entries \['v_moment1_0'\]"),
        ({"w_moment1_0": np.zeros(3)}, r"w_moment1_0 has shape \[3\], its parameter \[2\]"),
        ({"w_moment1_0": np.zeros(())}, r"w_moment1_0 has shape \[\], its parameter \[2\]"),
        ({"w_moment2_0": None}, r"w lacks \['moment2'\]"),
        ({"w_master_0": np.zeros(2)}, "w_master_0 is a master weight, but w .* has none here"),
        ({"LR_Scheduler": {"last_epoch": 1}}, "this optimizer a fixed rate"),
    ],
)
def test_states_that_do_not_fit_change_nothing(change, message):
    p = parameter()
    saved = {**state_of(p), **change}
    saved = {k: v for k, v in saved.items() if v is not None}
    optimizer = opt.Adam(0.1, parameters=[p])
    optimizer.step()
    before = {k: v.numpy() for k, v in optimizer.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        optimizer.set_state_dict(saved)
    for name, value in before.items():
        np.testing.assert_array_equal(optimizer.state_dict()[name].numpy(), value)


def test_the_schedule_is_part_of_the_state():
    p = parameter()
    first = opt.SGD(StepDecay(1.0, step_size=1, gamma=0.5), [p])
    first._scheduler.step()
    saved = first.state_dict()
    second = opt.SGD(StepDecay(1.0, step_size=1, gamma=0.5), [p])
    second.set_state_dict(saved)
    assert second.get_lr() == 0.5
    give(p, 1.0, 1.0)
    second.step()
    np.testing.assert_array_equal(p.numpy(), [0.5, 0.5])


def test_state_of_names_without_underscores_between_words_loads():
    norm = LayerNorm(2)
    optimizer = opt.Momentum(0.1, parameters=norm.parameters())
    earlier = {
        f"{p.name.replace('layer_norm', 'layernorm')}_velocity_0": np.full(2, 3.0, "float32") for p in norm.parameters()
    }
    optimizer.set_state_dict(earlier)
    optimizer.create_state()
    state = optimizer.state_dict()
    assert [state[f"{p.name}_velocity_0"].tolist() for p in norm.parameters()] == [[3.0, 3.0]] * 2


def test_amsgrad_state_does_not_fit_plain_adam_and_the_other_way():
    p = parameter()
    with pytest.raises(CheckpointError, match="unknown entries"):
        opt.Adam(parameters=[p]).set_state_dict(state_of(p, amsgrad=True))
    with pytest.raises(CheckpointError, match=r"lacks \['moment2_max'\]"):
        opt.Adam(parameters=[p], amsgrad=True).set_state_dict(state_of(p))


def test_a_deep_copy_goes_with_the_copied_model():
    model = Linear(3, 2)
    optimizer = opt.AdamW(0.1, parameters=model.parameters())

    def step(model, optimizer):
        model(to_tensor(np.ones((1, 3), np.float32))).sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    step(model, optimizer)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    before = model.weight.numpy()
    step(twin, twin_optimizer)
    np.testing.assert_array_equal(model.weight.numpy(), before)
    assert (twin.weight.numpy() != before).all()
    step(model, optimizer)
    np.testing.assert_array_equal(model.weight.numpy(), twin.weight.numpy())


def test_a_deep_copy_is_held_by_no_program_of_the_original():
    model = Linear(3, 2)
    optimizer = opt.Momentum(0.1, parameters=model.parameters())
    optimizer._bound = [object()]
    copied = copy.deepcopy((model, optimizer))[1]
    assert copied._bound == ()
    assert copied._made_with is optimizer._made_with


def test_added_groups_train_as_by_optimizers_of_their_own():
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(3) for _ in range(2)]
    gradients = rng.standard_normal((4, 3)).astype("float32")

    def parameters():
        return [Parameter(v.astype("float32")) for v in values]

    def step(optimizer, chosen, gradient):
        for p in chosen:
            p.grad = to_tensor(gradient)
        optimizer.step()
        optimizer.clear_grad()

    (first, second), alone = parameters(), parameters()
    optimizer = opt.NAdam(0.1, parameters=[first])  # it keeps two numbers for each parameter
    others = [opt.NAdam(0.1 * factor, parameters=[p]) for factor, p in zip((1, 0.5), alone, strict=True)]
    for gradient in gradients[:2]:
        step(optimizer, [first], gradient)
        step(others[0], alone[:1], gradient)
    optimizer.add_param_group({"params": second, "learning_rate": 0.5})
    assert optimizer.parameters_given == [first, second]
    for gradient in gradients[2:]:
        step(optimizer, [first, second], gradient)
        for other, p in zip(others, alone, strict=True):
            step(other, [p], gradient)
    for p, q in zip((first, second), alone, strict=True):
        np.testing.assert_array_equal(p.numpy(), q.numpy())
    numbers = optimizer.state_dict()
    assert float(numbers[f"{first.name}_step_0"]) == 4
    assert float(numbers[f"{second.name}_step_0"]) == 2
    for group, error, words in (
        ({"params": [second]}, ConfigError, "appears twice"),
        ([second], ConfigError, "takes a dict with 'params', got one list"),
        ({"params": [], "rate": 1.0}, ConfigError, "'rate' is not known"),
        (
            {"params": Parameter(values[0])},
            ConfigError,
            "float64 parameters need a float64 rate",
        ),
    ):
        with pytest.raises(error, match=words):
            optimizer.add_param_group(group)
    assert optimizer.parameters_given == [first, second]

    to_static(lambda g: step(optimizer, [first, second], g))(to_tensor(gradients[0]))
    with pytest.raises(CaptureError, match="after a captured function that steps the optimizer"):
        optimizer.add_param_group({"params": []})


def test_one_update_is_traced_for_each_kind_and_shape_of_parameter():
    traced = []

    class Noting(opt.SGD):
        def rule(self, p, *rest):
            traced.append(p.shape)
            return super().rule(p, *rest)

    shapes = [(2, 3), (3,)] * 4
    parameters = [Parameter(np.ones(s, "float32")) for s in shapes]
    slow = Parameter(np.ones(3, "float32"))
    slow.optimize_attr["learning_rate"] = 0.5
    optimizer = Noting(0.5, parameters=[*parameters, slow])

    @to_static
    def train():
        sum((p * p).sum() for p in [*parameters, slow]).backward()
        optimizer.step()
        optimizer.clear_grad()

    train()
    assert sorted(traced) == [(2, 3), (3,), (3,)]
    assert all((p.numpy() == 0.0).all() for p in parameters)
    np.testing.assert_array_equal(slow.numpy(), 0.5)


def test_equal_optimizers_share_a_trace_and_a_subclass_has_its_rule(monkeypatch):
    traced, kernel = [], adam.adamw

    def noting(*arrays, **settings):
        traced.append(settings["beta1"])
        return kernel(*arrays, **settings)

    class Still(opt.AdamW):
        scale = 0.0

        def rule(self, p, g, lr, *rest):
            return super().rule(p, g, lr * self.scale, *rest)

    def stepped(kind, beta1, scale=0.0):
        p = Parameter(np.ones((1, 5), "float32"))
        optimizer = kind(0.5, beta1=beta1, parameters=[p])
        optimizer.scale = scale
        p.sum().backward()
        optimizer.step()
        return float(p[0, 0])

    monkeypatch.setattr(adam, "adamw", noting)
    assert stepped(opt.AdamW, 0.83) == stepped(opt.AdamW, 0.83) != 1.0
    assert traced == [0.83]
    stepped(opt.AdamW, 0.84)
    stepped(opt.Adam, 0.83)
    assert traced == [0.83, 0.84, 0.83]
    assert stepped(Still, 0.83) == 1.0 != stepped(Still, 0.83, scale=1.0)


def test_layers_in_a_plain_list_are_not_trained_in_silence():
    class Blocks(Layer):
        def __init__(self):
            super().__init__()
            self.blocks = [Linear(2, 2)]

    optimizer = opt.SGD(0.1, parameters=Blocks().parameters())
    with pytest.warns(UserWarning, match=r"SGD.step: parameters= was empty.*LayerList"):
        optimizer.step()


def test_zero_grad_and_load_state_dict_are_second_names():
    layer = Linear(2, 1)
    optimizer = opt.Adam(0.1, parameters=layer.parameters())
    for none in (False, True):
        layer(to_tensor([[1.0, 2.0]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)
        assert (layer.weight.grad is None) == none
    other = opt.Adam(0.1, parameters=layer.parameters())
    other.load_state_dict(optimizer.state_dict())
    assert [v.tolist() for v in other.state_dict().values()] == [v.tolist() for v in optimizer.state_dict().values()]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: opt.SGD("fast", p),
        lambda p: opt.SGD(0.1, p[0]),
        lambda p: opt.SGD(0.1, p, grad_clip=0.5),
        lambda p: opt.lr.StepDecay("fast", 2),
        lambda p: opt.lr.StepDecay(0.1, 2.5),
        lambda p: opt.lr.LambdaDecay(0.1, 3),
        lambda p: opt.lr.MultiStepDecay(0.1, 3),
    ],
)
def test_arguments_of_another_type_raise_type_errors_too(make):
    with pytest.raises(ConfigError) as raised:
        make(Linear(2, 1).parameters())
    assert isinstance(raised.value, TypeError)
