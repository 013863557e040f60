"""Python values that captured code reads from around it: captured equals eager after each of them has changed."""

import argparse
import random
import sys
import types

import numpy as np
import pytest

from polyreme import nn
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, ShapeError
from polyreme.jit import to_static
from polyreme.ops.creation import ones, zeros
from polyreme.optimizer import SGD

SCALE = 2.0
TABLE = {"scale": 2.0, "shifts": [0.0, 1.0]}


def x():
    return to_tensor([3.0])


def global_number():
    def change():
        globals()["SCALE"] = 5.0

    return lambda x: x * SCALE, change, "SCALE: 2.0 -> 5.0"


def dict_in_list():
    table = {"shifts": [0.0, 1.0]}

    def change():
        table["shifts"][1] = 4.0

    return lambda x: x + table["shifts"][1], change, "table['shifts'][1]: 1.0 -> 4.0"


def grown_list():
    factors = [2.0]
    return lambda x: x * sum(factors), lambda: factors.append(1.0), "factors: a list of 1 -> a list of 2"


def default_argument():
    table = {"scale": 2.0}

    def scaled(x, table=table, *, shifts=(0.0, 1.0)):
        return x * table["scale"] + shifts[1]

    return lambda x: scaled(x), lambda: table.update(scale=3.0), "table['scale']: 2.0 -> 3.0"


def closure_cell():
    k = 2.0

    def change():
        nonlocal k
        k = True

    return lambda x: x * k, change, "k: 2.0 -> True"


def small_array():
    array = np.zeros(3, np.float32)

    def change():
        array[2] = 1.0

    return lambda x: x + to_tensor(array)[2], change, "array: its values changed"


def another_tensor():
    held = [to_tensor([1.0])]
    weight = held[0]

    def change():
        nonlocal weight
        weight = to_tensor([2.0])

    return lambda x: x * weight, change, "weight: one Tensor -> another Tensor"


def namespace_of_settings():
    args = argparse.Namespace(model=types.SimpleNamespace(scale=2.0), epoch=0)

    def change():
        args.model.scale = 7.0

    return lambda x: x * args.model.scale, change, "args.model.scale: 2.0 -> 7.0"


class Settings:
    scale = 2.0


def attribute_of_a_class():
    settings = Settings()

    def change():
        Settings.scale = 3.0

    return lambda x: x * settings.scale, change, "Settings.scale: 2.0 -> 3.0"


def attribute_of_a_class_by_its_name():
    class Config:
        scale = 2.0

    def change():
        Config.scale = 3.0

    return lambda x: x * Config.scale, change, "Config.scale: 2.0 -> 3.0"


def module_constant():
    module = types.ModuleType("settings_of_a_test")
    module.SCALE = 2.0
    sys.modules[module.__name__] = module

    def change():
        module.SCALE = 9.0

    space = {"settings": module}
    exec("def fn(x): return x * settings.SCALE", space)
    space["fn"].__module__ = "scripts_of_a_test"
    # what a module holds is looked at where the function names the module
    return types.FunctionType(space["fn"].__code__, space, "fn"), change, "settings_of_a_test.SCALE: 2.0 -> 9.0"


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.act = nn.functional.relu
        self.drop = nn.Dropout(1.0)
        self.parts = nn.LayerList([nn.Identity()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.act(x * self.scale) + self.drop(x)


def net(change, reason):
    def case():
        model = Net()
        return model, lambda: change(model), reason

    return case


def set_to(name, value):
    return lambda model: setattr(model, name, value)


CASES = {
    case.__name__: case
    for case in (
        global_number, dict_in_list, grown_list, default_argument, closure_cell, small_array, another_tensor,
        namespace_of_settings, attribute_of_a_class, attribute_of_a_class_by_its_name, module_constant,
    )
} | {
    "attribute_of_a_layer": net(set_to("scale", -2.0), "Net.scale: 2.0 -> -2.0"),
    "function_of_a_layer": net(set_to("act", nn.functional.silu), "Net.act: one function -> another function"),
    "setting_of_our_layer": net(lambda model: setattr(model.drop, "p", 0.0), "Dropout.p: 1.0 -> 0.0"),
    "layer_list_that_grew": net(
        lambda model: model.parts.append(nn.Tanh()),
        "a parameter, buffer, sublayer or hook of LayerList was replaced, added or removed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_change_of_what_the_code_reads_captures_anew_and_says_why(name):
    fn, change, reason = CASES[name]()
    if isinstance(fn, nn.Layer):
        eager, captured = fn.forward, to_static(fn).forward
    else:
        eager, captured = fn, to_static(fn)
    try:
        for _ in range(2):
            np.testing.assert_array_equal(captured(x()).numpy(), eager(x()).numpy())
        change()
        for _ in range(2):
            np.testing.assert_array_equal(captured(x()).numpy(), eager(x()).numpy())
        assert captured.retraces == ["first call", reason]
    finally:
        globals()["SCALE"] = Settings.scale = 2.0


def test_what_the_code_does_not_read_or_changes_itself_is_no_guard():
    class Counted(nn.Layer):
        def __init__(self):
            super().__init__()
            self.longest, self.shapes, self.epoch = 0, [], 0

        def forward(self, x):
            self.shapes.append(x.shape)
            if len(x) > self.longest:  # as a rotary embedding grows its table
                self.longest = len(x)
            return x * self.longest

    model = Counted()
    step = to_static(model)
    for epoch in range(3):
        model.epoch = epoch
        assert step(x()).tolist() == [3.0]
    assert step.forward.retraces == ["first call"]
    assert model.longest == 1


def test_a_list_of_tensors_that_the_code_writes_is_the_same_list():
    weights = [to_tensor([1.0]), to_tensor([2.0])]

    @to_static
    def step(x):
        for weight in weights:
            weight.add_(x)
        return x * 2

    for _ in range(3):
        step(x())
    assert step.retraces == ["first call"]
    assert [w.item() for w in weights] == [10.0, 11.0]
    weights.reverse()
    step(x())
    assert step.retraces[1:] == ["weights[0]: one Tensor -> another Tensor"]


def test_a_number_that_counts_calls_is_refused_and_put_back():
    class Counting(nn.Layer):
        def __init__(self):
            super().__init__()
            self.calls = 4

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    model = Counting()
    with pytest.raises(CaptureError, match=r"Counting.calls goes from 5 to 6 each time .* keep the number in a Tensor"):
        to_static(model)(x())
    assert model.calls == 4


def test_a_list_that_the_code_makes_longer_is_named(caplog):
    seen = [1.0]

    @to_static
    def step(x):
        seen.append(1.0)
        return x * len(seen)

    step(x())
    step(x())
    assert len([r for r in caplog.records if "changes the length of seen" in r.message]) == 1


class Moving(nn.Layer):
    """Sets its buffers anew: in a layer's own code, in a branch and a loop on Tensors, and from outside (`step`)."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("mean", zeros([2]))
        self.register_buffer("calls", zeros([], "int64"))

    def forward(self, x):
        y = self.fc(x)
        self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        if x.sum() > 0:
            self.calls = self.calls + 1
        for _ in range(2):
            self.calls += 10
        return y + self.mean, self.mean


@pytest.mark.parametrize("captured", ["layer", "step"])
def test_a_buffer_that_captured_code_sets_anew_holds_its_value(captured):
    eager, model = Moving(), Moving()
    model.set_state_dict(eager.state_dict())
    optimizers = [SGD(0.1, parameters=net.parameters()) for net in (eager, model)]

    def stepped(net, optimizer):
        def step(x):
            y, mean = net(x)
            y.sum().backward()
            optimizer.step()
            optimizer.clear_grad()
            net.calls = net.calls * 2
            return mean

        return step

    buffer = model.mean
    steps = [stepped(eager, optimizers[0]), stepped(to_static(model) if captured == "layer" else model, optimizers[1])]
    if captured == "step":
        steps[1] = to_static(steps[1])
    means = []
    for sign in (1.0, -1.0, 1.0):
        means += [[step(sign * ones([3, 2])) for step in steps]]
        assert eager.calls.item() == model.calls.item()
        # a few float32 roundings of values below 4
        np.testing.assert_allclose(model.mean.numpy(), eager.mean.numpy(), atol=2.0**-18)
    for by_eager, by_captured in means:  # what a call returned is no later call's value
        np.testing.assert_allclose(by_captured.numpy(), by_eager.numpy(), atol=2.0**-18)
    assert model.mean is buffer


def test_buffers_may_change_places():
    class Turning(nn.Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("front", zeros([1]))
            self.register_buffer("back", ones([1]))

        def forward(self, x):
            self.front, self.back = self.back, self.front
            return self.front * x

    eager, captured = Turning(), to_static(Turning())
    assert (
        [captured(x()).tolist() for _ in range(3)] == [eager(x()).tolist() for _ in range(3)] == [[3.0], [0.0], [3.0]]
    )


def test_a_buffer_that_failed_code_set_anew_is_as_it_was():
    model = Moving()
    model.fc.register_forward_post_hook(
        lambda layer, inputs, y: setattr(model, "calls", model.calls + 1) or y.reshape([7])
    )
    with pytest.raises(ShapeError):
        to_static(model)(ones([3, 2]))
    assert (model.calls.item(), model.mean.tolist()) == (0, [0.0, 0.0])


class Counts:
    calls = 0


def of_a_list(held):
    held[0] += 1
    return held[0]


def of_a_dict(held):
    held["calls"]["n"] += 1
    return held["calls"]["n"]


def of_an_array(held):
    held[0] += 1
    return float(held[0])


def of_a_class(held):
    Counts.calls += 1
    return Counts.calls


@pytest.mark.parametrize(
    ("count", "held", "says"),
    [
        (of_a_list, [4, "a"], r"held\[0\] goes from 5 to 6"),
        (of_a_dict, {"calls": {"n": 4}, "all": dict.fromkeys(range(999))}, r"held\['calls'\]\['n'\] goes from 5 to 6"),
        (of_an_array, np.zeros(2), "held changes its values"),
        (of_a_class, None, "Counts.calls goes from 1 to 2"),
    ],
)
def test_counters_in_containers_and_classes_are_refused(count, held, says):
    with pytest.raises(CaptureError, match=says + " each time"):
        to_static(lambda x: x * count(held))(x())


@pytest.mark.parametrize(("draw", "module"), [(random.random, "random"), (np.random.rand, "numpy.random")])
def test_numbers_drawn_on_the_host_are_kept_with_a_warning(draw, module, caplog):
    step = to_static(lambda x: x * draw())
    assert step(x()).item() == step(x()).item()
    assert caplog.text.count(f"draws numbers of {module}, which the program keeps") == 1
    to_static(lambda x: x * 2)(x())
    assert caplog.text.count("draws numbers") == 1
