"""Control flow on Tensors: a captured function does what the same Python does eagerly, or says why it cannot."""

import functools
import importlib.util
import logging

import numpy as np
import pytest

import polyreme as paddle
from polyreme.autograd.functional import grad
from polyreme.eager.mode import enable_grad, no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, ConfigError, ShapeError
from polyreme.jit import case, cond, not_to_static, switch_case, to_static, while_loop
from polyreme.nn import Linear, Sequential
from polyreme.nn.layer import Layer
from polyreme.optimizer import AdamW


def scalar(value, stop_gradient=True):
    return to_tensor(value, stop_gradient=stop_gradient)


def if_elif_else(x):
    if x > 1:
        y = x * 2
    elif x == 0:
        y = x
    else:
        y = x * x - 1
    return y


def early_return(x):
    if x > 1:
        return x * 3
    x = x + 1
    if x < 0:
        return -x
    return x * x


def return_in_loop(x):
    for i in range(4):
        if x > i:
            return x * (i + 1)
        x = x + 2
    return -x


def break_and_continue(x):
    total = x * 0
    for i in range(6):
        if i == 1:
            continue
        total = total + x * i
        if total > 4:
            break
    return total


def conditional_expression(x):
    return (x * 2 if x > 0 else -x) + (1 if x > 1 else 0)


def logic(x):
    if (x > 0 and x < 2) or not x > -1:
        return x * 5
    return x if 0 <= x <= 3 else x * x


def nested(x):
    y = x
    if x > 0:
        if x > 2:
            y = x * x
        else:
            for i in range(3):
                y = y + x * i
    else:
        y = -y
    return y


def through_functions(x):
    def inner(z):
        if z > 1:
            return z * 2
        return z - 1

    return inner(x) + helper(x) + sum(inner(x * k) for k in (1.0, 2.0)) * 0 + (lambda z: z if z > 0 else -z)(x)


def helper(z, *, scale=3):
    while scale > 2:
        scale -= 1
    return z * scale if z > 1 else z / scale


def in_place(x):
    y = x * 1
    if x > 0:
        y.add_(x)
    return y * y


def rows(x):
    out = []
    for row in to_like(x):
        if row > x:
            row = row * 2
        out.append(row)
    return out[0] + out[1] * out[2]


def to_like(x):
    return paddle.stack([x, x + 1, x - 1])


def while_true(x):
    for _ in range(3):
        while True:
            x = x + 2
            break
        if x > 4:
            break
    return x * x


def return_inside_with_and_try(x):
    try:
        with enable_grad():
            if x > 0:
                return x * 2
            y = x * 3
    finally:
        pass
    return y


def attributes_and_items(x):
    holder, table = Holder(), {"a": x}
    if x > 1:
        holder.scale = 2.0
        table["a"] = x * 3
    else:
        holder.scale = 3.0
    return table["a"] * holder.scale


class Holder:
    scale = 1.0


def comprehensions(x):
    made = [y if y > 1 else -y for y in (x, x * 2)]
    return made[0] + made[1] + {k: (x if x > k else x * 0) for k in (0, 1)}[1]


DIFFERENTIABLE = [
    while_true, return_inside_with_and_try, attributes_and_items, comprehensions,
    if_elif_else, early_return, return_in_loop, break_and_continue, conditional_expression, logic, nested,
    through_functions, in_place, rows,
]  # fmt: skip


@pytest.mark.parametrize("fn", DIFFERENTIABLE, ids=lambda f: f.__name__)
def test_value_and_gradient_equal_eager(fn):
    captured = to_static(fn)
    for value in (-2.5, 0.0, 0.5, 1.5, 3.0):
        a, b = scalar(value, False), scalar(value, False)
        x, y = fn(a), captured(b)
        x.backward()
        y.backward()
        assert y.item() == pytest.approx(x.item(), rel=1e-6)  # a few float32 roundings, fused or not
        assert b.grad.item() == pytest.approx(a.grad.item(), rel=1e-6)
    assert len(captured.concrete_programs()) == 1


def counts(n):
    total, k = n * 0, 0
    for i in range(n):
        if i == 2:
            continue
        total += i
        k += 1
        if total > 20:
            break
    return total, k


def collatz(n):
    steps = 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    return steps


def finds(n):
    i = 0
    while i < 50:
        if i * i >= n:
            return i
        i += 1
    return n * 0 - 1


def backwards(n):
    last = n * 0
    for i in range(n, 0, -2):
        last = last * 10 + i
    return last


def nested_with_return(n):
    total = n * 0
    for i in range(n):
        for j in range(i):
            total = total + j
            if total > 20:
                return total
    return -total


@pytest.mark.parametrize("fn", [counts, collatz, finds, backwards, nested_with_return], ids=lambda f: f.__name__)
@pytest.mark.parametrize("value", [1, 3, 9, 27])
def test_tensor_loops_equal_eager(fn, value):
    got, want = to_static(fn)(scalar(value)), fn(scalar(value))
    for g, w in zip(*([x] if not isinstance(x, tuple) else x for x in (got, want)), strict=True):
        assert int(g) == int(w)


def test_loops_carry_state_random_numbers_and_gradients():
    count, w = to_tensor(0), scalar(4.0, False)

    def fn(n):
        drawn = paddle.zeros([2])
        for _ in range(n):
            drawn = drawn + paddle.rand([2])
            (w * w).backward()
            w.set_value(w - 0.1 * w.grad)
            w.clear_grad()
            count.add_(1)
        return drawn

    results = []
    for run in (fn, to_static(fn)):
        paddle.seed(1)
        w.set_value(np.float32(4.0))
        results.append([run(scalar(n)).tolist() for n in (3, 0, 2)] + [w.item()])
    for got, want in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)  # a few float32 roundings
    assert count.item() == 10
    assert w.item() == pytest.approx(4.0 * 0.8**5, rel=1e-6)


def test_the_test_of_a_loop_changes_nothing():
    count = to_tensor(0)

    @to_static
    def fn(n):
        while count.add_(1) < n:
            pass
        return n

    with pytest.raises(CaptureError, match="the test of a while loop changes a Tensor"):
        fn(scalar(3))


def test_partials_and_callable_objects_are_converted():
    class Absolute:
        def __call__(self, x, scale=1):
            if x > 0:
                return x * scale
            return -x

    for fn in (Absolute(), functools.partial(Absolute(), scale=3), lambda x: functools.partial(Absolute(), scale=3)(x)):
        captured = to_static(fn)
        assert [captured(scalar(v)).item() for v in (-2.0, 2.0)] == [fn(scalar(v)).item() for v in (-2.0, 2.0)]


def test_and_or_not_have_pythons_values():
    def fn(a, b):
        return (a and b), (a or b), not a

    captured = to_static(fn)
    for a in (-1, 0, 2):
        for b in (0, 3):
            got, want = captured(scalar(a), scalar(b)), fn(scalar(a), scalar(b))
            assert [float(g) for g in got] == [float(w) for w in want]


def test_python_conditions_stay_python():
    seen = []

    @to_static
    def fn(x, flag):
        if flag:
            seen.append("yes")
            return x
        seen.append("no")
        return x[0]

    assert fn(to_tensor([1.0, 2.0]), True).shape == [2]
    assert set(seen) == {"yes"}


class Norm(Layer):
    def __init__(self):
        super().__init__()
        self.fc = Linear(2, 2)
        self.register_buffer("mean", to_tensor([0.0, 0.0]))
        self.register_buffer("count", to_tensor(0))

    def forward(self, x):
        y = self.fc(x)
        if x.sum() > 0:
            with no_grad():
                self.mean.set_value(self.mean * 0.5 + y.mean(0) * 0.5)
                self.count.add_(1)
            y = y * 2 - self.mean
        return y


def test_state_written_in_a_branch_and_gradients_through_it():
    plain, captured = Norm(), Norm()
    captured.set_state_dict(plain.state_dict())
    to_static(captured)
    for rows_ in ([[1.0, 2.0]], [[-1.0, -2.0]], [[3.0, 4.0]]):
        for layer in (plain, captured):
            layer(to_tensor(rows_)).sum().backward()
        for a, b in zip(plain.state_dict().values(), captured.state_dict().values(), strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)
        np.testing.assert_allclose(plain.fc.weight.grad.numpy(), captured.fc.weight.grad.numpy(), rtol=1e-6)
    assert captured.count.item() == 2


def test_forward_of_layers_inside_our_containers_and_super_are_converted():
    class Doubling(Layer):
        def forward(self, x):
            if x.sum() > 0:
                return x * 2
            return x

    class More(Doubling):
        def forward(self, x):
            return super().forward(x) + 1

    layer = to_static(Sequential(Doubling(), More()))
    assert layer(to_tensor([1.0])).tolist() == [5.0]
    assert layer(to_tensor([-1.0])).tolist() == [0.0]


def test_random_numbers_in_a_branch_advance_the_generator_only_when_taken():
    def fn(x):
        if x > 0:
            return x + paddle.rand([2])
        return x + paddle.zeros([2])

    drawn = []
    for run in (fn, to_static(fn)):
        paddle.seed(3)
        drawn.append([run(scalar(v)).tolist() for v in (1.0, -1.0, 1.0)])
    assert drawn[0] == drawn[1]


def test_whole_step_inside_a_branch():
    layer = Linear(2, 1)
    optimizer = AdamW(0.1, parameters=layer.parameters())

    @to_static
    def step(x, go):
        if go:
            loss = layer(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
        else:
            loss = x.sum()
        return loss

    x, before = to_tensor([[1.0, 2.0]]), layer.weight.numpy()
    step(x, to_tensor(False))
    np.testing.assert_array_equal(layer.weight.numpy(), before)
    step(x, to_tensor(True))
    assert (layer.weight.numpy() != before).all()


def test_second_order_through_a_branch():
    @to_static
    def fn(x):
        if x > 0:
            return x**3
        return x**2

    x = scalar(2.0, False)
    (first,) = grad([fn(x)], [x], create_graph=True)
    first.backward()
    assert first.item() == pytest.approx(12.0)
    assert x.grad.item() == pytest.approx(12.0)


def test_detach_and_shared_arrays_inside_branches():
    @to_static
    def fn(x, y):
        if x > 0:
            return x.detach() * x + y
        return x + y

    x = scalar(3.0, False)
    y = x.detach()
    y.stop_gradient = False
    fn(x, y).backward()
    assert (x.grad.item(), y.grad.item()) == (3.0, 1.0)


# functional forms


@pytest.mark.parametrize("wrap", [lambda f: f, to_static], ids=["eager", "captured"])
def test_functional_forms(wrap):
    pick = wrap(lambda i, x: switch_case(i, [lambda: x, lambda: x * 2, (lambda: x * 3)], default=lambda: -x))
    assert [pick(scalar(i), scalar(1.0)).item() for i in range(-1, 4)] == [-1.0, 1.0, 2.0, 3.0, -1.0]
    first = wrap(lambda x: case([(x > 2, lambda: x * 2), (x > 1, lambda: x * 3)], default=lambda: x))
    assert [first(scalar(v)).item() for v in (0.5, 1.5, 2.5)] == [0.5, 4.5, 5.0]
    both = wrap(lambda x: cond(x > 0, lambda: {"a": x, "b": [x * 2]}, lambda: {"a": -x, "b": [x]}))
    assert both(scalar(-3.0))["a"].item() == 3.0
    assert both(scalar(3.0))["b"][0].item() == 6.0
    assert wrap(lambda x: cond(x > 0, None, None))(scalar(1.0)) is None


@pytest.mark.parametrize("wrap", [lambda f: f, to_static], ids=["eager", "captured"])
def test_bounded_while_loop_has_a_gradient(wrap):
    fn = wrap(lambda x: while_loop(lambda y: y < 10, lambda y: y * 2, [x], maximum_iterations=5)[0])
    x = scalar(3.0, False)
    y = fn(x)
    y.backward()
    assert (y.item(), x.grad.item()) == (12.0, 4.0)
    assert fn(scalar(0.001)).item() == pytest.approx(0.032)


def test_unbounded_loop_runs_forward_and_refuses_only_the_gradient():
    @to_static
    def fn(x):
        while x < 10:
            x = x * 2
        return x

    x = scalar(3.0, False)
    y = fn(x)
    assert y.item() == 12.0
    with pytest.raises(CaptureError, match=r"test_control_flow.py:\d+: no gradient flows through a while loop"):
        y.backward()


def test_the_gradient_of_an_unbounded_loop_is_taken_of_eager_code_where_that_may_be(caplog):
    def fn(x):
        while x < 10:
            x = x * 2
        return x

    def step(x):
        y = fn(x)
        y.backward()
        return y

    forward, whole = to_static(fn, full_graph=False), to_static(step, full_graph=False)
    x = scalar(3.0, False)
    forward(x).backward()
    assert x.grad.item() == 4.0
    assert whole(x).item() == 12.0
    assert x.grad.item() == 8.0
    assert caplog.text.count("no gradient flows through a while loop") == 2
    assert to_static(fn, full_graph=False)(scalar(3.0)).item() == 12.0


def test_functional_forms_check_their_arguments():
    with pytest.raises(TypeError, match="true_fn must be callable"):
        cond(True, 3)
    with pytest.raises(ConfigError, match="loop_vars is a non-empty list"):
        while_loop(lambda: True, lambda: None, [])
    with pytest.raises(ConfigError, match="maximum_iterations is None or an int"):
        while_loop(lambda i: True, lambda i: i, [1], maximum_iterations=-1)
    with pytest.raises(ConfigError, match="body returned 2 values for 1"):
        while_loop(lambda i: True, lambda i: (i, i), [1])
    with pytest.raises(ConfigError, match="non-empty list of"):
        case([])
    with pytest.raises(ConfigError, match="distinct int indices"):
        switch_case(0, [(1, lambda: 1), (1, lambda: 2)])


# what is refused


def one_sided(x):
    if x > 0:
        y = x
    return y


def other_shape(x):
    if x > 0:
        y = x
    else:
        y = paddle.stack([x, x])
    return y


def other_dtype(x):
    if x > 0:
        y = x
    else:
        y = x.astype("int32")
    return y


def other_object(x):
    if x > 0:
        y = "above"
    else:
        y = "below"
    return y


def half_return(x):  # noqa: RET503  (the missing return is what is tested)
    if x > 0:
        return x


def list_in_branch(x):
    out = []
    if x > 0:
        out.append(x * 2)
    return out


def gradient_left(x):
    w = to_tensor([1.0], stop_gradient=False)
    if x > 0:
        (w * x).sum().backward()
    return x


def backward_past_the_branch(x):
    loss = x * x
    if x > 0:
        loss.backward()
    return x


def loop_shape(x):
    while x.sum() < 10:
        x = paddle.stack([x, x])
    return x


def loop_undefined(x):
    for i in range(x.astype("int64")):
        last = i
    return last


def loop_step(x):
    for _ in range(0, 10, x.astype("int64")):
        pass
    return x


def host_read(x):
    if x > 0:
        y = float(x)
    else:
        y = 0.0
    return y


def text_logic(x):
    return (x > 0) and "text"


REFUSED = [
    (one_sided, r"variable 'y' is defined only in the true branch of an if at \S+:{0}"),
    (other_shape, r":{0}: an if .* variable 'y' is a Tensor of shape \[\] .* shape \[2\] .* after the false one"),
    (other_dtype, r":{0}: .* dtype float32 after the true side but .* dtype int32"),
    (other_object, r":{0}: .* variable 'y' is 'above' \(str\) after the true side but 'below'"),
    (half_return, r"half_return: whether it returns a value or ends without one"),
    (list_in_branch, r"'out', a list, has 1 element after the true side but 0 elements after the false one"),
    (gradient_left, r"the gradient of .* is present after the true side but absent after the false one"),
    (backward_past_the_branch, r"backward\(\) inside captured code .* reached a Tensor of shape \[\]"),
    (loop_shape, r":{0}: a while loop .* variable 'x' is a Tensor of shape \[\] .* before a step"),
    (loop_undefined, r"variable 'last' is first defined inside a for loop at \S+:{0}"),
    (loop_step, r"the step of range\(\) over Tensors must be a Python int"),
    (host_read, r":{1}: float\(Tensor\) needs the value on the host"),
    (text_logic, r"`and`/`or` of a Tensor and a str"),
]


@pytest.mark.parametrize(("fn", "message"), REFUSED, ids=[f.__name__ for f, _ in REFUSED])
def test_refusals_name_variable_and_line(fn, message):
    first = fn.__code__.co_firstlineno
    lines = {"backward_past_the_branch": 2}
    at = first + lines.get(fn.__name__, 1)
    with pytest.raises(CaptureError, match=message.format(at, at + 1)):
        to_static(fn)(scalar(2.0, fn is not backward_past_the_branch))


def test_a_condition_has_one_element():
    @to_static
    def fn(x):
        if x > 0:
            return x
        return -x

    with pytest.raises(ShapeError, match=r"one element, got shape \[2\]"):
        fn(to_tensor([1.0, 2.0]))


def test_range_needs_integers():
    @to_static
    def fn(x):
        for _ in range(x):
            pass
        return x

    with pytest.raises(ShapeError, match=r"range\(\) needs integers, got a Tensor of shape \[\] dtype float32"):
        fn(scalar(2.0))


def test_not_to_static_and_functions_without_source_run_as_written(caplog):
    @not_to_static
    def plain(x):
        return x if x > 0 else -x

    with pytest.raises(CaptureError, match=r"bool\(Tensor\)"):
        to_static(lambda x: plain(x))(scalar(1.0))
    space = {}
    exec("def f(x):\n  if x > 0: return x\n  return -x", space)
    with caplog.at_level(logging.WARNING, "polyreme.jit"):
        for _ in range(2):
            with pytest.raises(CaptureError, match="was not converted here: its source cannot be had"):
                to_static(space["f"])(scalar(1.0))
    assert [r.getMessage() for r in caplog.records] == [
        "f (<string>:1) runs without conversion of control flow on Tensors: its source cannot be had"
    ]


def module_of(text, file):
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# the function has another name in each case, since equal code is converted once
@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("moved", lambda text: "def other(x):\n    return x\n" + text),
        ("changed", lambda text: text.replace("-x", "0 * x")),
        ("broken", lambda text: text.replace("-x", "-x.sum(")),
        ("emptied", lambda text: ""),
    ],
    ids=["moved", "changed", "broken", "emptied"],
)
def test_a_function_whose_file_was_edited_since_runs_as_written(tmp_path, caplog, name, edit):
    file = tmp_path / "edited.py"
    written = f"def {name}(x):\n    if x > 0:\n        return x\n    return -x\n"
    fn = getattr(module_of(written, file), name)
    file.write_text(edit(written))
    with (
        caplog.at_level(logging.WARNING, "polyreme.jit"),
        pytest.raises(CaptureError, match=r"was not converted here: .*(has changed since|source cannot be had)"),
    ):
        to_static(fn)(scalar(-2.0))
    assert f"{name} ({file}:1) runs without conversion" in caplog.text


def test_lines_below_a_function_may_be_edited(tmp_path, caplog):
    file = tmp_path / "edited.py"
    written = "def untouched(x):\n    if x > 0:\n        return x\n    return -x\n"
    module = module_of(written, file)
    file.write_text(written + "\ndef new(x):\n    return x\n")
    assert to_static(module.untouched)(scalar(-2.0)).item() == 2.0
    assert not caplog.records


def test_code_that_cannot_be_converted_runs_as_written_with_one_warning(caplog):
    def fn(x, how):
        match how:
            case "twice":
                return x * 2
        return x

    with caplog.at_level(logging.WARNING, "polyreme.jit"):
        assert to_static(fn)(scalar(2.0), "twice").item() == 4.0
    at = fn.__code__.co_firstlineno
    assert [f"line {at + 1}: match statements are not converted" in r.getMessage() for r in caplog.records] == [True]


def test_user_errors_show_the_users_line():
    @to_static
    def fn(x):
        if x > 0:
            y = x
        else:
            y = {}["mine"]
        return y

    with pytest.raises(KeyError, match="mine") as caught:
        fn(scalar(1.0))
    last = caught.traceback[-1]
    assert str(last.path) == __file__
    assert "mine" in str(last.statement)


def test_hooks_inside_a_branch_are_refused():
    @to_static
    def fn(x):
        if x > 0:
            y = x * 2
            y.register_hook(lambda g: g * 5)
            return y * 3
        return x

    with pytest.raises(CaptureError, match=r"test_control_flow.py:\d+: register_hook on a Tensor computed inside"):
        fn(scalar(1.0, False))
