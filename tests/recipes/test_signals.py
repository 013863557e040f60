"""Signals in real processes: the first is a request, the second ends the process at once."""

import os
import signal
import subprocess
import sys
import time

import pytest

from polyreme.recipes.training.signals import StopRequest

LOOP = """
import sys, time
from polyreme.recipes.training.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    for step in range(1, 1000):
        time.sleep(0.05)
        if stop.requested:
            stop.leave(step, ["polyreme", "pretrain", "a b.yaml", "--resume", "auto"])
"""

# The main thread sits in C code that no Python handler can interrupt, as in a long compiled step.
STUCK = """
import time, jax, jax.numpy as jnp
from polyreme.recipes.training.signals import StopRequest
x = jnp.ones((256, 256), jnp.float32)
work = jax.jit(lambda x: jax.lax.fori_loop(0, 1_000_000, lambda i, y: jnp.tanh(y @ x), x))
with StopRequest() as stop:
    print("ready", flush=True)
    work(x).block_until_ready()
"""


def start(code):
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_saves_and_says_how_to_resume(number):
    process = start(LOOP)
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 75
    assert f"{number.name}: finishing this step, then saving" in errors
    assert f"stopped by {number.name} after step" in errors
    assert errors.rstrip().endswith("polyreme pretrain 'a b.yaml' --resume auto")
    assert "Traceback" not in errors


def test_second_signal_ends_it_even_inside_a_compiled_step():
    process = start(STUCK)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None  # the first one alone waits for the step
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)  # the step takes minutes
    assert process.returncode == 128 + signal.SIGINT
    assert "leaving now, without saving" in errors


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 5
        while not stop.requested and time.monotonic() < end:
            time.sleep(0.01)
        assert stop.signal == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_leave_without_a_signal():
    with pytest.raises(SystemExit) as ending:
        StopRequest().leave(3, ["polyreme"])
    assert ending.value.code == 75
