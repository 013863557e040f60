"""Captured functions are true to eager ones: arguments, state, gradients, guards, donation, errors, memory."""

import collections
import copy
import dataclasses
import gc
import logging
import threading
import weakref

import numpy as np
import pytest

import polyreme as paddle
from polyreme.autograd.functional import grad
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CaptureError, ConfigError
from polyreme.jit import StaticFunction, enable_to_static, to_static
from polyreme.nn import Linear
from polyreme.nn.layer import Layer
from polyreme.optimizer import AdamW
from polyreme.optimizer.lr import StepDecay


def vector(*values, stop_gradient=True):
    return to_tensor(list(values), stop_gradient=stop_gradient)


# arguments and results


def test_detach_and_no_grad_cut_gradients_as_in_eager():
    x = vector(2.0, 3.0, stop_gradient=False)
    to_static(lambda x: (x.detach() * x).sum())(x).backward()
    assert x.grad.tolist() == [2.0, 3.0]

    @to_static
    def fn(x):
        with no_grad():
            y = x * x
        return (y * x).sum()

    x.clear_grad()
    fn(x).backward()
    assert x.grad.tolist() == [4.0, 9.0]


def test_arguments_changed_in_place_and_given_gradients():
    @to_static
    def add(x):
        x.add_(1.0)
        return x

    x = vector(1.0)
    assert add(x) is x
    add(x)
    assert x.tolist() == [3.0]

    @to_static
    def back(x):
        (x * x).sum().backward()

    x = vector(3.0, stop_gradient=False)
    back(x)
    back(x)
    assert x.grad.tolist() == [12.0]


def test_in_place_change_of_an_argument_carries_its_history():
    @to_static
    def fn(y, x):
        y.add_(x * 2)

    x = vector(3.0, stop_gradient=False)
    y = x * 5
    fn(y, x)
    y.sum().backward()
    assert (y.tolist(), x.grad.tolist()) == ([21.0], [7.0])


def test_backward_past_the_captured_function_is_refused():
    x = vector(3.0, stop_gradient=False)
    loss = (x * x).sum()
    with pytest.raises(CaptureError, match=r"test_to_static.py:\d+: backward\(\) inside captured code"):
        to_static(lambda loss: loss.backward())(loss)
    with pytest.raises(CaptureError, match=r"reached a Tensor of shape \[\] computed before"):
        to_static(lambda: loss.backward())()
    loss.backward()
    assert x.grad.tolist() == [6.0]


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Output:
    loss: Tensor
    note: str


def test_structures_keep_their_types_order_and_identity():
    unread, read = vector(5.0), vector(6.0)

    @to_static
    def fn(x, y, d):
        return {
            "z": x, "a": None, "unread": unread, "read": read, "sum": read + x, "pair": Pair(y * 2, [y, 3, "s"]),
            "keys": list(d), "out": Output(x * 3, "n"), "ordered": collections.OrderedDict(q=x, b=y),
        }  # fmt: skip

    x = vector(1.0)
    for _ in range(2):
        got = fn(x, x, {"b": 1, "a": x})
        assert list(got) == ["z", "a", "unread", "read", "sum", "pair", "keys", "out", "ordered"]
        assert got["z"] is x
        assert got["unread"] is unread
        assert got["read"] is read
        assert got["a"] is None
        assert got["pair"].b[0] is x
        assert got["keys"] == ["b", "a"]
        assert got["out"].loss.tolist() == [3.0]
        assert list(got["ordered"]) == ["q", "b"]


def test_the_same_tensor_twice_is_one_tensor_inside():
    @to_static
    def fn(x, y):
        x.add_(1.0)
        return x + y

    x = vector(1.0)
    assert fn(x, x).tolist() == [4.0]
    assert fn(x, vector(0.0)).tolist() == [3.0]
    assert fn.retraces[1] == "which arguments are one and the same Tensor"


def test_an_argument_that_is_also_state():
    w = vector(1.0, 2.0)

    @to_static
    def fn(a):
        w.add_(1.0)
        return a + w

    assert fn(w).tolist() == [4.0, 6.0]
    assert fn(w).tolist() == [6.0, 8.0]
    assert fn(vector(0.0, 0.0)).tolist() == [4.0, 5.0]
    assert fn(w).tolist() == [10.0, 12.0]
    assert fn.retraces[1] == "a Tensor is both an argument and state of the function, or no longer is"


# state


def test_gradients_that_come_and_go_reach_the_gradient_of_now():
    w = vector(1.0, 2.0, stop_gradient=False)

    @to_static
    def accumulate(x):
        (w * x).sum().backward()

    for _ in range(3):
        accumulate(vector(1.0, 1.0))
        accumulate(vector(1.0, 1.0))
        assert w.grad.tolist() == [2.0, 2.0]
        w.clear_grad()
    assert len(accumulate.concrete_programs()) == 2
    assert "gradient of" in accumulate.retraces[1]


def test_an_exception_leaves_all_state_as_before():
    w = vector(1.0, stop_gradient=False)
    layer = Linear(1, 1)
    optimizer = AdamW(0.1, parameters=layer.parameters())

    @to_static
    def fn(x):
        (layer(x) * w).sum().backward()
        optimizer.step()
        raise ValueError("mine")

    before = layer.weight.numpy()
    key = paddle.get_rng_state()[0]
    with pytest.raises(ValueError, match="mine"):
        fn(to_tensor([[1.0]]))
    assert w.grad is None
    assert layer.weight.grad is None
    np.testing.assert_array_equal(layer.weight.numpy(), before)
    np.testing.assert_array_equal(paddle.get_rng_state()[0], key)


def test_state_made_lazily_in_the_function():
    layer = Linear(2, 1)
    optimizer = AdamW(0.1, parameters=layer.parameters())

    @to_static
    def step(x):
        loss = layer(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        return loss

    for _ in range(3):
        step(to_tensor([[1.0, 2.0]]))
    moments = [v for k, v in optimizer.state_dict().items() if "moment1" in k]
    assert len(moments) == 2
    assert all(np.isfinite(m.numpy()).all() for m in moments)
    assert len(step.concrete_programs()) == 1


def test_captured_inside_no_grad_and_inside_another_capture():
    inner = to_static(lambda x: x * x)
    outer = to_static(lambda x: inner(x) + inner(x))
    x = vector(3.0, stop_gradient=False)
    with no_grad():
        assert outer(x).stop_gradient
    outer(x).sum().backward()
    assert x.grad.tolist() == [12.0]
    assert inner.programs == {}
    assert outer.retraces == ["first call", "gradient mode: False -> True"]


def test_python_side_effects_happen_while_capturing_only():
    calls = []
    fn = to_static(lambda x: calls.append(1) or x * 2)
    for _ in range(4):
        fn(vector(1.0))
    assert len(calls) == 2


# second order


def test_create_graph_through_a_captured_function():
    fn = to_static(lambda x: (x**3).sum())
    x = vector(2.0, stop_gradient=False)
    (first,) = grad([fn(x)], [x], create_graph=True)
    first.sum().backward()
    assert (first.tolist(), x.grad.tolist()) == ([12.0], [12.0])


def test_what_a_derivative_of_the_whole_cannot_express_is_refused():
    w = vector(1.0, stop_gradient=False)

    @to_static
    def hooked(x):
        y = x * w
        y.register_hook(lambda g: g * 2)
        return y * 2

    with pytest.raises(CaptureError, match="register_hook on a Tensor computed inside"):
        hooked(vector(1.0))

    @to_static
    def changed(x):
        with no_grad():
            w.set_value(w * 2)
        return x * w

    with pytest.raises(CaptureError, match="which it also changes"):
        changed(vector(1.0))


# retraces


def test_retraces_say_why():
    fn = to_static(lambda x, k: x * k)
    fn(vector(1.0), 2)
    fn(vector(1.0, 2.0), 2)
    fn(vector(1.0), 3)
    fn(to_tensor([1]), 3)
    fn(vector(1.0), 2)
    assert fn.retraces[0] == "first call"
    assert fn.retraces[1] == "tensor argument 0: shape (1,) -> (2,)"
    assert "static argument 1: 2 -> 3" in fn.retraces[2] or "shape" in fn.retraces[2]
    assert "dtype float32 -> int64" in fn.retraces[3]
    assert len(fn.retraces) == 4


def test_true_one_and_one_point_zero_are_different_arguments():
    fn = to_static(lambda x, k: [x, k])
    assert [type(fn(vector(1.0), k)[1]) for k in (1, True, 1.0)] == [int, bool, float]


class Switching(Layer):
    def __init__(self):
        super().__init__()
        self.fc = Linear(2, 2)

    def forward(self, x):
        return self.fc(x) * 2 if self.training else self.fc(x)


def test_train_eval_and_stop_gradient_are_guards():
    layer = to_static(Switching())
    x = to_tensor([[1.0, 2.0]])
    a = layer(x)
    layer.eval()
    np.testing.assert_allclose(layer(x).numpy() * 2, a.numpy(), rtol=1e-6)
    layer.train()
    layer(x)
    layer.fc.weight.stop_gradient = True
    layer(x)
    assert layer.forward.retraces[1] == "training of Switching: True -> False"
    assert "stop_gradient of" in layer.forward.retraces[2]
    assert len(layer.forward.retraces) == 3


def test_many_programs_are_warned_about(caplog):
    fn = to_static(lambda x, k: x * k)
    with caplog.at_level(logging.WARNING, "polyreme.jit"):
        for k in range(16):
            fn(vector(1.0), k)
    assert "was captured 16 times" in caplog.text


def test_the_oldest_programs_go_where_they_are_many(monkeypatch):
    monkeypatch.setitem(StaticFunction._let_go_of_oldest.__globals__, "_MOST_PROGRAMS", 3)
    offset = [0.0]
    fn = to_static(lambda x, k: x * k + offset[0])
    for k in range(5):
        assert fn(vector(1.0), float(k)).numpy() == k
    programs = fn.concrete_programs()
    assert len(programs) == len(fn._by_form) == len(fn.programs) == 3
    assert fn(vector(1.0), 2.0).numpy() == 2
    assert fn.concrete_programs() == programs
    assert fn(vector(1.0), 0.0).numpy() == 0
    assert fn.concrete_programs()[:2] == programs[1:]
    # several of one key, apart by a value that is read
    for offset[0] in (1.0, 2.0, 3.0, 4.0):
        assert fn(vector(1.0), 0.0).numpy() == offset[0]
    assert [len(alike) for alike in fn.programs.values()] == [3]
    assert len(fn.retraces) == 10


# Layers


def test_layer_hooks_run_and_methods_take_an_input_spec():
    layer = to_static(Switching())
    seen = []
    layer.register_forward_pre_hook(lambda _, inputs: seen.append("pre"))
    layer.register_forward_post_hook(lambda _, inputs, out: out * 0)
    assert layer(to_tensor([[1.0, 2.0]])).tolist() == [[0.0, 0.0]]
    layer(to_tensor([[1.0, 2.0]]))
    assert seen == ["pre", "pre"]

    @dataclasses.dataclass(frozen=True)
    class Spec:
        shape: tuple
        dtype: str

    class Own(Layer):
        @to_static(input_spec=[Spec((None, 2), "float32")])
        def forward(self, x):
            return x * 2

    own = Own()
    assert own(to_tensor([[1.0, 2.0]])).tolist() == [[2.0, 4.0]]
    assert isinstance(own.__dict__["forward"], StaticFunction)
    with pytest.raises(CaptureError, match=r"input_spec asks for shape \[None, 2\] dtype float32"):
        own(to_tensor([1.0]))


def test_deepcopy_of_a_captured_layer_has_its_own_programs():
    layer = to_static(Switching())
    x = to_tensor([[1.0, 2.0]])
    first = layer(x).numpy()
    other = copy.deepcopy(layer)
    other.fc.weight.set_value(np.zeros((2, 2), np.float32))
    assert np.abs(other(x).numpy()).sum() == np.abs(other.fc.bias.numpy()).sum() * 2
    np.testing.assert_array_equal(layer(x).numpy(), first)


def test_programs_of_a_dead_layer_are_freed():
    layer = to_static(Switching())
    layer(to_tensor([[1.0, 2.0]]))
    weak, weight = weakref.ref(layer), weakref.ref(layer.fc.weight)
    del layer
    gc.collect()
    assert weak() is None
    assert weight() is None


def after_one_step(capture):
    """Weak references to a weight and an optimizer that a step has used."""
    layer = Linear(2, 2)
    optimizer = AdamW(parameters=layer.parameters())

    def step(x):
        layer(x).sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    (to_static(step) if capture else step)(to_tensor([[1.0, 2.0]]))
    return weakref.ref(layer.weight), weakref.ref(optimizer)


@pytest.mark.parametrize("capture", [False, True])
def test_what_a_step_used_is_freed_without_the_collector(capture):
    gc.disable()
    try:
        assert [weak() for weak in after_one_step(capture)] == [None, None]
    finally:
        gc.enable()


# donation


def test_everything_that_looks_at_donated_state_keeps_its_value():
    w = vector(1.0, 2.0)
    detached, ema, moved, view, dlpack = w.detach(), vector(0.0, 0.0), w.to("cpu"), np.asarray(w), np.from_dlpack(w)
    ema.set_value(w)
    taped = vector(1.0, 1.0, stop_gradient=False)
    product = (taped * w).sum()
    saved = {"w": w.detach()}

    @to_static
    def fn():
        w.add_(1.0)

    for _ in range(3):
        fn()
    assert w.tolist() == [4.0, 5.0]
    for other in (detached, ema, moved, saved["w"]):
        assert other.tolist() == [1.0, 2.0]
    assert view.tolist() == dlpack.tolist() == [1.0, 2.0]
    product.backward()
    assert taped.grad.tolist() == [1.0, 2.0]


def test_two_state_tensors_may_share_one_array():
    a = vector(1.0, 2.0)
    b = a.detach()

    @to_static
    def fn():
        a.add_(1.0)
        b.add_(2.0)

    fn()
    fn()
    assert (a.tolist(), b.tolist()) == ([3.0, 4.0], [5.0, 6.0])


def test_an_argument_sharing_the_donated_array():
    w = vector(1.0, 2.0)

    @to_static
    def fn(x):
        w.add_(x)

    fn(w.detach())
    fn(w.detach())
    assert w.tolist() == [4.0, 8.0]


def test_state_is_donated():
    w = vector(1.0, 2.0)

    @to_static
    def fn():
        w.add_(1.0)

    fn()
    old = w._array
    reference = weakref.ref(old)
    del old
    fn()
    assert reference() is None or reference().is_deleted()


# leaks and misuse


def test_a_tensor_that_outlives_its_capture_says_so():
    outputs = []

    @to_static
    def fn(x):
        outputs.append(x * 2)
        return x

    fn(vector(1.0))
    for use in (
        lambda: outputs[0].tolist(),
        lambda: outputs[0] + 1,
        lambda: to_static(lambda x: x + outputs[0])(vector(1.0)),
    ):
        with pytest.raises(CaptureError, match=r"belongs to (a )?captured"):
            use()


def test_a_property_is_left_as_it_is():
    class Scaled(Layer):
        @to_static(property=True)
        def rate(self):
            return 4

    assert Scaled().rate() == 4
    assert to_static(lambda x: x + 1, build_strategy=paddle.static.BuildStrategy())(vector(1.0)).tolist() == [2.0]
    assert not isinstance(Scaled.rate, StaticFunction)


class _Counting(Layer):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls if x.max().item() > 0.5 else x


def _selected(x):
    return x[x > 0]


@pytest.mark.parametrize(
    ("fn", "wanted"),
    [(_selected, [[1.0]] * 2), (_Counting(), [[1.0, -1.0], [2.0, -2.0]])],
    ids=["shape by value", "host value"],
)
def test_what_reads_values_runs_as_eager_code_without_full_graph(fn, wanted, caplog):
    loose = to_static(copy.deepcopy(fn), full_graph=False)
    x = vector(1.0, -1.0, stop_gradient=False)
    results = [loose(x) for _ in wanted]
    assert [result.tolist() for result in results] == wanted
    results[0].sum().backward()
    assert x.grad.tolist()[0] == 1.0
    assert sum("runs as eager code" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(CaptureError, match="needs the value on the host"):
        to_static(copy.deepcopy(fn), full_graph=True)(x)


def test_misuse_is_refused():
    with pytest.raises(CaptureError, match="neither a Tensor nor hashable"):
        to_static(lambda x, s: x)(vector(1.0), {1, 2})
    with pytest.raises(ConfigError, match="XLA is the only one"):
        to_static(lambda x: x, backend="other")
    runs = iter(range(10))
    state = [vector(1.0), vector(2.0)]

    def fickle():
        state[next(runs)].add_(1.0)

    with pytest.raises(CaptureError, match="must do the same each time"):
        to_static(fickle)()


def test_a_scheduler_is_stepped_outside():
    scheduler = StepDecay(0.1, step_size=1)
    optimizer = AdamW(scheduler, parameters=Linear(1, 1).parameters())
    with pytest.raises(CaptureError, match=r"StepDecay.step\(\) inside a captured function"):
        to_static(lambda x: scheduler.step() or x)(vector(1.0))
    assert (scheduler.last_epoch, optimizer.get_lr()) == (0, 0.1)


def test_switching_capture_off():
    calls = []
    fn = to_static(lambda x: calls.append(1) or x * 2)
    enable_to_static(False)
    try:
        for _ in range(3):
            fn(vector(1.0))
    finally:
        enable_to_static(True)
    assert len(calls) == 3
    assert fn.programs == {}


# what a layer is put together from


class Shifted(Layer):
    def __init__(self):
        super().__init__()
        self.inner = Linear(1, 1)
        self.register_buffer("shift", to_tensor([0.0]))

    def forward(self, x):
        return self.inner(x) + self.shift


def replace_inner(layer):
    layer.inner = Linear(1, 1)


def replace_weight(layer):
    layer.inner.weight = layer.inner.create_parameter([1, 1])


def replace_buffer(layer):
    layer.shift = to_tensor([5.0])


def add_hook(layer):
    layer.inner.register_forward_post_hook(lambda layer, inputs, output: output * 3.0)


@pytest.mark.parametrize("change", [replace_inner, replace_weight, replace_buffer, add_hook])
def test_a_layer_changed_after_its_capture_is_captured_again(change):
    layer = Shifted()
    fn = to_static(lambda x: layer(x))
    x = to_tensor([[2.0]])
    assert fn(x).tolist() == layer(x).tolist()
    change(layer)
    np.testing.assert_allclose(fn(x).numpy(), layer(x).numpy(), rtol=2.0**-22)  # two float32 roundings
    assert "replaced, added or removed" in fn.retraces[-1]
    count = sum(len(p) for p in fn.programs.values())
    fn(x)
    assert sum(len(p) for p in fn.programs.values()) == count


def test_a_capture_sees_only_its_own_thread():
    outside, results = vector(1.0), []

    @to_static
    def fn(x):
        other = threading.Thread(target=lambda: results.append((outside + 1.0).tolist()))
        other.start()
        other.join()
        return x * 2.0

    assert fn(vector(3.0)).tolist() == [6.0]
    assert results[0] == [2.0]
    outside.stop_gradient = False  # would be a changed guard, were it state of fn
    fn(vector(3.0))
    assert sum(len(p) for p in fn.programs.values()) == 1


def test_what_a_long_compilation_leaves_is_handed_back_once(monkeypatch):
    handed_back = []
    monkeypatch.setattr("polyreme.jit.program._LONG_COMPILATION", 0.0)
    monkeypatch.setattr("polyreme.core.engine.host_memory.hand_back_freed", lambda: handed_back.append(True))
    counter = to_tensor(np.zeros(3, np.float32))

    @to_static
    def grow():
        counter.add_(1.0)

    for _ in range(3):
        grow()
    assert counter.tolist() == [3.0, 3.0, 3.0]
    assert len(handed_back) == 1
    (program,) = grow.concrete_programs()
    assert program._jitted._cache_size() == 1


def test_programs_of_one_form_serve_their_own_shapes_only():
    scale = 2.0

    @to_static
    def fn(x, y):
        return x * scale if x is y else x * scale + y

    def check(x, y):
        expected = x.numpy() * scale + (0 if x is y else y.numpy())
        result = fn(x, y)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result.numpy(), expected)

    a, b = (paddle.to_tensor(np.arange(n, dtype="float32")) for n in (3, 4))
    doubles = paddle.to_tensor(np.arange(3, dtype="float64"))
    for x, y in [(a, a + 1), (a, a + 1), (b, b + 1), (a, a + 1), (b, b), (doubles, doubles + 1), (b, b + 1)] * 2:
        check(x, y)
    assert len(fn.concrete_programs()) == 4, fn.retraces  # of three elements, four, one Tensor twice, and float64
    scale = 3.0
    for x in (a, b):
        check(x, x + 1)
    assert len(fn.concrete_programs()) == 6, fn.retraces


def test_what_a_function_changes_in_lists_and_dicts_reaches_the_caller():
    def adds(batch, sizes, seen):
        batch["sum"] = batch["x"].sum() * len(sizes)
        del batch["x"]
        seen.append(batch["sum"])
        seen[0]["last"] = seen[-1]
        batch["calls"] += 1
        batch["seen"] = seen
        return batch

    captured = to_static(adds)
    for fn in (adds, captured, captured):
        batch, sizes, inner = {"x": paddle.ones([2]), "calls": 0}, [1, 2], {}
        seen = [inner]
        assert fn(batch, sizes, seen) is batch
        assert ([*batch], batch["calls"], float(batch["sum"])) == (["calls", "sum", "seen"], 1, 4)
        assert batch["seen"] is seen
        assert seen[0] is inner
        assert seen[1] is batch["sum"] is inner["last"]
        assert sizes == [1, 2]
    assert len(captured.concrete_programs()) == 1
    with pytest.raises(CaptureError, match="changes a list or dict among its arguments, and one is there twice"):
        captured({"x": paddle.ones([2]), "calls": 0}, [1, 2], [inner, inner])


def test_a_gradient_flows_through_what_a_function_leaves_in_a_dict():
    weight = paddle.to_tensor([2.0], stop_gradient=False)

    @to_static
    def fill(cache):
        cache["y"] = weight * 3

    cache = {}
    fill(cache)
    cache["y"].backward()
    assert weight.grad.tolist() == [3]


def test_a_tensor_that_takes_another_s_place_in_an_attribute_is_read():
    class Scaled(Layer):
        def __init__(self):
            super().__init__()
            self.scale, self.last = to_tensor(2.0), to_tensor(0.0)

        def forward(self, x):
            return x * self.scale + (0 if self.last is None else 1)

    class Holder:
        shift = to_tensor(1.0)

    net, holder = Scaled(), Holder()

    @to_static
    def fn(x):
        return net(x) + holder.shift

    x = to_tensor(10.0)
    assert fn(x).item() == 22
    net.last = to_tensor(7.0)  # never read: one of the same form will do
    assert (fn(x).item(), len(fn.retraces)) == (22, 1)
    net.scale = to_tensor(3.0)
    assert (fn(x).item(), fn.retraces[-1]) == (32, "Scaled.scale: one Tensor -> another Tensor")
    holder.shift = to_tensor(5.0)
    assert fn(x).item() == 36
