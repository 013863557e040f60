"""fluid.profiler over polyreme.profiler: what is recorded, forgotten, printed, written and refused."""

import pytest

import polyreme as paddle
from polyreme import fluid
from polyreme.errors import ConfigError


def test_start_reset_and_stop(tmp_path, capsys):
    x = paddle.ones([8, 8])
    fluid.profiler.start_profiler("All")
    with pytest.raises(ConfigError, match="it has started"):
        fluid.profiler.start_profiler("CPU")
    paddle.tanh(x).numpy()
    fluid.profiler.reset_profiler()
    paddle.matmul(x, x).numpy()
    fluid.profiler.stop_profiler("total", str(tmp_path / "deep" / "profile"))
    names = {e.name for e in paddle.profiler.load_profiler_result(tmp_path / "deep" / "profile").events}
    assert "matmul" in names
    assert "tanh" not in names
    assert "matmul" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="it has not started"):
        fluid.profiler.stop_profiler()


def test_the_block_and_bad_words(tmp_path, capsys):
    with fluid.profiler.profiler("CPU", "ave", str(tmp_path / "profile")):
        paddle.exp(paddle.ones([4])).numpy()
    assert "exp" in capsys.readouterr().out
    for words in (("TPU",), ("CPU", "calls"), ("CPU", None, "x", "Detail")):
        with pytest.raises(ConfigError, match="give one of"), fluid.profiler.profiler(*words):
            pass
    with pytest.raises(ConfigError, match="it has not started"):
        fluid.profiler.reset_profiler()
