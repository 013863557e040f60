"""What becomes of memory that programs free, and of scratch memory while programs wait in jax's queue."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyreme.core.engine import host_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of glibc's malloc")

STEPS = """
import numpy as np
import polyreme as paddle

def peak():  # MiB
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024

total = paddle.zeros([1])
tall = paddle.to_tensor(np.ones((4096, 32), np.float32))

@paddle.jit.to_static
def step():
    product = tall @ tall.T  # 64 MiB
    total.add_(paddle.sort(product, axis=1)[:, 0].max())

step()
(program,) = step.concrete_programs()
assert program._scratch
total.numpy()
before = peak()
for _ in range(30):
    step()
assert total.tolist() == [31 * 32.0]
print(peak() - before)
"""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_freed_memory_between_blocks_in_use_is_handed_back():
    block = 64 << 10  # bytes: below every threshold from which malloc maps a block by itself
    blocks = [bytearray(b"x" * block) for _ in range(1600)]
    in_use = blocks[::16]  # so that the end of the heap is not all that is free
    del blocks
    before = resident_bytes()
    host_memory.hand_back_freed()
    assert before - resident_bytes() > 1000 * block
    assert all(b[0] == ord("x") for b in in_use)


class Result:
    def __init__(self, deleted=False):
        self.deleted, self.awaited = deleted, 0

    def is_deleted(self):
        return self.deleted

    def block_until_ready(self):
        self.awaited += 1


def test_a_large_program_waits_for_the_last_one_unless_its_results_are_gone():
    scratch = host_memory.Scratch(host_memory.LARGE, 0)
    live, donated, dropped = Result(), Result(deleted=True), Result()
    for result in (live, donated):
        host_memory.note_last([result], scratch, None)
        host_memory.await_last()
    assert (live.awaited, donated.awaited) == (1, 0)
    host_memory.note_last([dropped], scratch, None)
    del dropped
    host_memory.await_last()


def test_steps_that_nobody_waits_for_do_not_add_up_their_scratch_memory():
    environment = os.environ | {"CPU_NUM": "1", "XLA_FLAGS": ""}
    run = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 3 * 192  # MiB; one step has 192, and without the wait four or more are there at once
