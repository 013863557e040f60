"""What backend does to the process it configures."""

import sys
from pathlib import Path

import pytest

from polyreme.core import backend


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is glibc's")
def test_freed_memory_between_blocks_in_use_is_handed_back():
    block = 64 << 10  # bytes: below every threshold from which malloc maps a block by itself
    blocks = [bytearray(b"x" * block) for _ in range(1600)]
    in_use = blocks[::16]  # so that the end of the heap is not all that is free
    del blocks
    before = resident_bytes()
    backend.hand_back_freed()
    assert before - resident_bytes() > 1000 * block
    assert all(b[0] == ord("x") for b in in_use)
