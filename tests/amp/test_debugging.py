"""Looking for NaN and infinity, and the table of ops by dtype."""

import doctest
import logging

import numpy as np
import pytest

import polyreme as paddle
from polyreme.amp import debugging
from polyreme.amp.debugging import DebugMode, TensorCheckerConfig, check_numerics
from polyreme.errors import ConfigError, DTypeError, NotReadyError, NumericsError

BAD = np.array([[1.0, np.nan], [-np.inf, 0.0]], "float32")


def test_one_tensor_is_counted_logged_or_refused(caplog):
    assert doctest.testmod(debugging).failed == 0
    with pytest.raises(
        NumericsError, match=r"loss of divide, float32\[2, 2\], has 1 NaN, 1 infinite values and 1 zeros"
    ):
        check_numerics(paddle.to_tensor(BAD), "divide", "loss")
    counts, values = check_numerics(paddle.to_tensor(BAD), "divide", "loss", DebugMode.CHECK_NAN_INF)
    assert (counts.tolist(), values.tolist()[:2]) == ([1, 1, 1], [1.0, -np.inf])
    assert caplog.text.count("loss of divide") == 1
    large = paddle.to_tensor([7e4, 1.0])
    check_numerics(large, "scale", "x")
    assert "x of scale" not in caplog.text
    with caplog.at_level(logging.WARNING, "polyreme.numerics"):
        check_numerics(large, "scale", "x", DebugMode.CHECK_ALL_FOR_OVERFLOW)
    assert "maximum 70000" in caplog.text
    assert np.isnan(check_numerics(paddle.ones([0]), "scale", "x")[1].numpy()).all()
    with pytest.raises(DTypeError, match="ids is int64"):
        check_numerics(paddle.ones([1], "int64"), "embedding", "ids")


def test_a_forward_is_looked_at():
    class Inverse(paddle.nn.Layer):
        @debugging.check_layer_numerics
        def forward(self, x):
            return 1 / x

    assert Inverse()(paddle.to_tensor([2.0])).item() == 0.5
    with pytest.raises(NumericsError, match="result 0 of Inverse"):
        Inverse()(paddle.to_tensor([0.0]))
    with pytest.raises(NumericsError, match="argument 0 of Inverse"):
        Inverse()(paddle.to_tensor(BAD))


def test_chosen_steps_are_looked_at():
    config = TensorCheckerConfig(True, debug_step=(1, 2))
    raised = []
    for step in range(3):
        debugging.enable_tensor_checker(config)
        try:
            paddle.log(paddle.to_tensor([-1.0]))
        except NumericsError:
            raised.append(step)
    debugging.disable_tensor_checker()
    assert raised == [1]
    assert not paddle.get_flags("FLAGS_check_nan_inf")["FLAGS_check_nan_inf"]
    for bad in ({"output_dir": "x"}, {"debug_mode": DebugMode.CHECK_ALL}, {"debug_step": (3, 1)}):
        with pytest.raises(ConfigError, match="TensorCheckerConfig: "):
            TensorCheckerConfig(True, **bad)


def test_ops_are_counted_by_dtype(capsys):
    x = paddle.ones([2, 2])
    with debugging.collect_operator_stats(), paddle.amp.auto_cast(dtype="bfloat16"):
        (x @ x + 1).astype("int32")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["op", "float16", "bfloat16", "float32", "other"]
    assert ["matmul", "0", "1", "0", "0"] in rows
    assert ["cast", "0", "0", "0", "1"] in rows
    debugging.enable_operator_stats_collection()
    with pytest.raises(NotReadyError, match="counted already"):
        debugging.enable_operator_stats_collection()
    debugging.disable_operator_stats_collection()
    assert capsys.readouterr().out.endswith("0 ops\n")
    with pytest.raises(NotReadyError, match="enable it first"):
        debugging.disable_operator_stats_collection()
