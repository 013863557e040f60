"""print, assert and raise in captured code: they happen when the program runs, as often as eagerly."""

# ruff: noqa: RET506, T201, UP031, UP032  (written as users write)
import logging
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import polyreme as paddle
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import CaptureError
from polyreme.jit import cond, to_static
from polyreme.jit.capture import Capture, watching
from polyreme.jit.host_calls import check, left_out
from polyreme.static import InputSpec

HERE = re.escape(__file__)


def speaks(x):
    print("start", x, f"value {x:.2f} and {x!r}", [x, {"k": x}], sep=" | ")
    if x > 0:
        print("positive", x * 2)
        x = x * x
    i = paddle.to_tensor(0)
    while i < 2:
        print(f"step {i:d}" + " of 2", end=";\n")
        i += 1
    print("%s is %.2f" % ("x", x), "{} and {k:.1f}".format(3, k=x), str(x) + "|" + repr([x]), f"{[x, 1]}")
    print(f"no Tensor in {1 + 1:03d}", "%d" % 3, "{}".format("a"), str(3))
    return x


@pytest.mark.parametrize("stop_gradient", [True, False])
def test_prints_what_the_eager_run_prints_at_every_call(capsys, stop_gradient):
    texts = []
    for run in (speaks, to_static(speaks)):
        for value in (2.0, -1.0, 3.0):
            y = run(to_tensor(value, stop_gradient=stop_gradient))
            if not stop_gradient:
                y.backward()
        texts.append(capsys.readouterr().out)
    assert texts[0].count("start") == 3
    assert texts[1] == texts[0]


def test_prints_outside_of_captured_code_stay_pythons(capsys):
    cond(True, lambda: print("eager"))
    assert capsys.readouterr().out == "eager\n"


def test_a_print_of_ones_own_is_called(capsys):
    said = []
    print = said.append  # a user's own

    @to_static
    def fn(x):
        print("mine")
        return x

    fn(to_tensor(1.0))
    assert said == ["mine", "mine"]  # as the function is traced twice
    assert capsys.readouterr().out == ""


def checks(x):
    assert x.ndim == 0, "a number is needed"
    assert x > 0, f"x must be positive, is {x:.1f}"
    for i in range(3):
        if x > i:
            assert x < 5
    return x * 2


def test_asserts_fail_when_the_program_runs_with_message_and_line():
    captured = to_static(checks)
    line = checks.__code__.co_firstlineno
    assert captured(to_tensor(1.0)).item() == 2.0
    message = rf"^x must be positive, is -1.0\nassert x > 0 failed at {HERE}:{line + 2}$"
    with pytest.raises(AssertionError, match=message):
        captured(to_tensor(-1.0))
    with pytest.raises(AssertionError, match=rf"^assert x < 5 failed at {HERE}:{line + 5}$"):
        captured(to_tensor(7.0))
    assert captured(to_tensor(3.0)).item() == 6.0  # and no failure is left over
    assert len(captured.concrete_programs()) == 1
    with pytest.raises(AssertionError, match=r"^a number is needed"):
        captured(to_tensor([1.0]))


def test_an_assert_in_a_loop_that_a_tensor_ends_and_in_a_differentiated_function():
    @to_static
    def fn(x, n):
        total = x * 0
        for i in range(n):
            assert i < 3, f"step {i:d} is too many"
            total = total + x.detach()
        return total * x

    x = to_tensor(2.0, stop_gradient=False)
    fn(x, to_tensor(3))
    with pytest.raises(AssertionError, match="step 3 is too many"):
        fn(x, to_tensor(4))


def raises(x):
    if x > 3:
        raise ValueError("too big")
    elif x < -3:
        raise KeyError("too small")
    y = x * 2
    while y < 10:
        if y < 0:
            raise RuntimeError
        y = y + 3
    return y


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [(4.0, ValueError, "too big"), (-4.0, KeyError, "too small"), (-1.0, RuntimeError, "raised at")],
)
def test_a_raise_in_a_branch_is_raised_when_the_program_goes_there(value, error, message):
    captured = to_static(raises)
    assert captured(to_tensor(1.0)).item() == raises(to_tensor(1.0)).item()
    with pytest.raises(error, match=message) as caught:
        captured(to_tensor(value))
    assert "test_host_calls.py:" in caught.value.__notes__[-1]
    assert len(captured.concrete_programs()) == 1


def test_state_is_written_when_an_assert_fails():
    count = to_tensor(0)

    @to_static
    def fn(x):
        assert x > 0
        count.add_(1)
        return x

    with pytest.raises(AssertionError):
        fn(to_tensor(-1.0))
    assert count.item() == 1


def test_an_exported_program_neither_prints_nor_checks(tmp_path, capsys):
    class Speaking(paddle.nn.Layer):
        def forward(self, x):
            print("in forward", x)
            assert (x > 0).all()
            if x.sum() > 3:
                x = x * 2
            return x

    paddle.jit.save(Speaking(), str(tmp_path / "net"), input_spec=[InputSpec([None, 2], "float32", "x")])
    capsys.readouterr()
    assert paddle.jit.load(str(tmp_path / "net"))(to_tensor([[-1.0, 5.0]])).tolist() == [[-2.0, 10.0]]
    assert capsys.readouterr().out == ""


def test_over_a_mesh_each_call_prints_and_checks_once(capsys):
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("dp",)), PartitionSpec("dp"))
    x = to_tensor(np.arange(8, dtype=np.float32))
    x._array = jax.device_put(x._array, rows)

    @to_static
    def fn(x):
        print("largest", f"{x.max():.0f}")
        assert x.min() >= 0, "not negative"
        return x - 1

    y = fn(x)
    assert capsys.readouterr().out == "largest 7\n"
    with pytest.raises(AssertionError, match="not negative"):
        fn(y)


def test_what_nobody_waits_for_is_logged(caplog):
    @jax.jit
    def program(a):
        with watching(Capture()):
            check(Tensor(a) > 0, None, "a > 0")
        return a

    with caplog.at_level(logging.ERROR, "polyreme.jit"):
        program(np.float32(-1.0))
        jax.effects_barrier()
    assert "AssertionError: assert a > 0 failed at" in caplog.text


def test_asserts_and_raises_have_no_place_in_a_program():
    @to_static
    def asserts(x):
        assert x.sum() > 0
        return x

    @to_static
    def raises(x):
        if x.sum() > 0:
            raise ValueError
        return x

    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            x = paddle.static.data("x", [2], "float32")
            with pytest.raises(CaptureError, match="a Program cannot check an assert"):
                asserts(x)
            with pytest.raises(CaptureError, match="a Program cannot raise"):
                raises(x)
    finally:
        paddle.disable_static()


def test_left_out_makes_programs_that_run_without_this_process(capsys):
    captured = to_static(speaks)
    with left_out():
        captured(to_tensor(2.0))
    assert capsys.readouterr().out == ""


def test_text_of_a_tensor_is_for_printing_only():
    for use in (lambda t: t.upper(), len, lambda t: t == "a", lambda t: {t: 1}, str, lambda t: f"{t!r}"):

        @to_static
        def fn(x, use=use):
            return use(f"{x} !")

        with pytest.raises((CaptureError, TypeError), match=r"this text holds the value|has no len"):
            fn(to_tensor(1.0))
