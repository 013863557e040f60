"""Children of fork: refused by name once the parent has used a device, left alone otherwise."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

import polyreme as paddle
from polyreme import amp, jit, nn, optimizer, static

BOUND = 10.0  # seconds


def in_child(action):
    """What action said in a forked process: its result or error as text; None if it hung."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax's own, of every fork
        pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            said = str(action())
        except BaseException as error:  # noqa: BLE001
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    try:
        return os.read(reader, 10_000).decode() if select.select([reader], [], [], BOUND)[0] else None
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture(scope="module")
def used():
    """Things of every kind, each used once."""
    net = nn.Linear(2, 2)
    opt = optimizer.SGD(0.1, parameters=net.parameters())
    x = paddle.to_tensor([[1.0, 2.0]])
    captured = jit.to_static(lambda x: net(x) * 2)
    captured(x).numpy()
    loss = net(x).sum()
    (2 * loss).backward()
    opt.step()
    program = static.Program()
    paddle.enable_static()
    with static.program_guard(program):
        out = static.data("d", [2]) * 2
    paddle.disable_static()
    run = lambda: static.Executor().run(program, feed={"d": np.ones(2, "float32")}, fetch_list=[out])
    run()
    return net, opt, x, captured, loss, run


REFUSED = {
    "an op": lambda net, opt, x, captured, loss, run: x + 1,
    "an op not called before": lambda net, opt, x, captured, loss, run: paddle.tanh(x),
    "a Tensor": lambda net, opt, x, captured, loss, run: paddle.to_tensor([1.0]),
    "a random Tensor": lambda net, opt, x, captured, loss, run: paddle.randn([2]),
    "a layer": lambda net, opt, x, captured, loss, run: nn.Linear(3, 3),
    "a layer's call": lambda net, opt, x, captured, loss, run: net(x),
    "backward": lambda net, opt, x, captured, loss, run: loss.backward(),
    "an update": lambda net, opt, x, captured, loss, run: opt.step(),
    "a captured call": lambda net, opt, x, captured, loss, run: captured(x),
    "a new capture": lambda net, opt, x, captured, loss, run: jit.to_static(lambda x: x + 1)(x),
    "a Program": lambda net, opt, x, captured, loss, run: run(),
    "a seed": lambda net, opt, x, captured, loss, run: paddle.seed(1),
    "a scaler": lambda net, opt, x, captured, loss, run: amp.GradScaler(),
    "a Model": lambda net, opt, x, captured, loss, run: paddle.Model(net).predict_batch([x]),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("action", REFUSED.values(), ids=REFUSED)
def test_a_forked_child_is_refused_what_would_hang(used, action):
    said = in_child(lambda: action(*used))
    assert said is not None, "it hangs"
    assert said.startswith("DeviceError: ")
    assert "was forked from one that had used a device" in said
    assert "get_context('spawn')" in said


def test_a_forked_child_may_read_compute_with_numpy_and_become_another_program(used):
    net, _, x, *_ = used
    assert in_child(lambda: (x.numpy() @ np.ones((2, 1))).tolist()) == "[[3.0]]"
    assert in_child(lambda: (x.shape, sorted(net.state_dict()))) == "(paddle.Size([1, 2]), ['bias', 'weight'])"
    assert in_child(lambda: os.execv(sys.executable, [sys.executable, "-c", ""])) == ""
    assert in_child(lambda: subprocess.run(["echo", "yes"], stdout=subprocess.PIPE, check=True).stdout) == "b'yes\\n'"
    in_thread = "import threading; t = threading.Thread(target=run); t.start(); t.join()"
    said = []

    def run():
        try:
            x + 1
        except RuntimeError as error:
            said.append(type(error).__name__)

    assert in_child(lambda: (exec(in_thread, {"run": run}), said)) == "(None, ['DeviceError'])"
    assert (x + 1).numpy().tolist() == [[2.0, 3.0]]  # the parent goes on


def test_before_a_device_was_used_a_fork_computes_and_loading_jax_draws_no_random_numbers():
    code = """
        import os, random
        import numpy as np
        import polyreme as paddle
        np.random.seed(0); random.seed(0)
        before, plain = np.random.get_state(), random.getstate()
        paddle.nn.Linear
        assert all(np.array_equal(a, b) for a, b in zip(before, np.random.get_state())) and plain == random.getstate()
        import jax
        assert jax.__loader__ is jax.__spec__.loader and type(jax.__loader__).__name__ == "SourceFileLoader"
        if os.fork() == 0:
            print((paddle.to_tensor([1.0]) + 1).numpy(), flush=True)
            os._exit(0)
        print(os.wait()[1])
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert run.stdout == "[2.]\n0\n", run.stderr
