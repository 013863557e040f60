"""What Programs refuse, and that they are as before afterwards: feeds that do not fit, sizes taken for constants, code
that raises while it is recorded."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import static
from polyreme.errors import CaptureError, ProgramError


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("uint8", [-1], "is uint8, which cannot hold -1"),
        ("int32", [1, 2**40], "is int32, which cannot hold 1099511627776"),
        ("float16", [1e6], "is float16, which cannot hold 1000000.0"),
        ("float32", None, "is float32, got NoneType None; give numbers"),
        ("int64", ["a"], "give numbers"),
        ("float32", [[1.0], [2.0, 3.0]], "is given list that is no array"),
        ("float32", [1j], "is float32, got complex128"),
    ],
)
def test_python_values_that_a_variable_cannot_hold_are_refused(static_mode, dtype, value, message):
    y = static.data("x", [None], dtype) + 0
    with pytest.raises(ProgramError, match=message):
        static.Executor().run(feed={"x": value}, fetch_list=[y])


def test_python_values_that_a_variable_can_hold_are_converted(static_mode):
    values = {"uint8": [255, 0], "int8": [-128], "float16": [1.5, float("inf"), float("nan")], "complex64": [1j, 2]}
    for dtype, value in values.items():
        y = static.data(dtype, [None], dtype) + 0
        (found,) = static.Executor().run(static_mode[0].clone(), feed={n: values[n] for n in _data()}, fetch_list=[y])
        np.testing.assert_array_equal(found, np.array(value, dtype))


def _data():
    return [v.name for v in static.default_main_program().list_vars() if getattr(v, "is_data", False)]


def test_a_size_is_no_constant(static_mode):
    n = static.data("x", [None, 3]).shape[0]
    for make in (paddle.to_tensor, paddle.assign):
        with pytest.raises(CaptureError, match=r"size 0 of x: float32\[-1, 3\] is not known before Executor.run"):
            make([n, 2])
    with pytest.raises(CaptureError, match="to_tensor: size 0"):
        paddle.to_tensor(n)
    found = static.Executor().run(
        feed={"x": np.ones((4, 3), "float32")}, fetch_list=[np.float32(2) * n, np.array([1, 2]) * n]
    )
    assert [f.tolist() for f in found] == [8.0, [4, 8]]


def test_a_number_of_results_that_is_not_known_is_refused(static_mode):
    x = static.data("x", [None, 3])
    before = static_mode[0].global_block().ops
    with pytest.raises(ProgramError, match="unbind: how many Tensors it gives depends on a size"):
        paddle.unbind(x, 0)
    assert static_mode[0].global_block().ops == before


def test_code_that_raises_in_a_branch_or_loop_leaves_the_program_as_it_was(static_mode):
    main, _ = static_mode
    x = static.data("x", [2])
    y = x + 1
    blocks = main.num_blocks

    def raises(*_):
        y.add_(x)
        static.nn.cond(x.sum() > 0, lambda: y.add_(x), lambda: y)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        static.nn.cond(x.sum() > 0, raises, lambda: None)
    with pytest.raises(KeyError, match="stop"):
        static.nn.while_loop(lambda i: i < 3, raises, [paddle.zeros([], "int64")])
    assert main.num_blocks <= blocks + 1  # the condition of the loop was recorded
    z = y * 2
    found = static.Executor().run(feed={"x": np.ones(2, "float32")}, fetch_list=[y, z])
    assert [f.tolist() for f in found] == [[2.0, 2.0], [4.0, 4.0]]


def test_a_feed_that_would_be_computed_over_is_refused(static_mode):
    h = static.data("x", [2]) * 2
    ones = np.ones(2, "float32")
    with pytest.raises(
        ProgramError, match=r"is computed by the Program, which would replace what is fed; feed \['x'\]"
    ):
        static.Executor().run(feed={"x": ones, h.name: ones}, fetch_list=[h + 1])


def test_what_the_program_updates_cannot_be_fed(static_mode):
    w = paddle.create_parameter([1], "float32", name="w")
    paddle.optimizer.SGD(0.1).minimize(w.sum())
    exe = static.Executor()
    exe.run(static.default_startup_program())
    with pytest.raises(ProgramError, match=r"'w' is changed by the Program.*find_var\('w'\)"):
        exe.run(feed={"w": np.zeros(1, "float32")}, fetch_list=[w])


def test_a_list_with_one_dict_is_a_feed(static_mode):
    y = static.data("x", [2]) * 2
    (found,) = static.Executor().run(feed=[{"x": np.ones(2, "float32")}], fetch_list=[y], return_numpy=False)
    assert (type(found), found.tolist()) == (paddle.Tensor, [2, 2])


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (
            lambda x, exe: exe.run(feed={"x": x}, fetch_list=[x]),
            r"'x' is given the Variable x: float32\[-1\], which has",
        ),
        (lambda x, exe: exe.run(static.Program(), fetch_list=[x * 1]), "belongs to another Program"),
        (lambda x, exe: float(x), r"test_refusals.py:\d+: .*belongs to a static Program, which has none before"),
        (
            lambda x, exe: paddle.reshape(x, [x.sum().astype("int64"), 5, 7]),
            r"test_refusals.py:\d+: .*has none while it",
        ),
        (lambda x, exe: paddle.Model(paddle.nn.Linear(1, 1)).predict_batch([x]), "Model.predict_batch runs imperative"),
    ],
)
def test_what_users_mix_up_is_said(static_mode, act, match):
    with pytest.raises((ProgramError, CaptureError), match=match):
        act(static.data("x", [None]), static.Executor())
