"""Eight virtual CPU devices for every test, and a compiler told to compile fast: tests run small programs once."""

import gc
import itertools
import os
from pathlib import Path

os.environ.setdefault("CPU_NUM", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# halves the suite's time, which is nearly all compilation
_FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# XLA ends a process whose virtual devices do not meet within 40 s, which a busy machine may take; pytest stops at 300
_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=280"
os.environ.setdefault("XLA_FLAGS", f"{_FAST_COMPILE} {_PATIENT}")

import jax
import pytest
from hypothesis import settings

# an example may meet a compilation or a busy machine: time says nothing of what is tested
settings.register_profile("polyreme", deadline=None)
settings.load_profile("polyreme")

# mappings of one process, of the 65,530 that Linux allows by default: each compiled program takes several
_MANY_MAPPINGS = 30_000


_run = itertools.count(1)


@pytest.fixture(autouse=True)
def _programs_do_not_pile_up():
    """Let go of compiled programs when there are many: a process that runs out of mappings aborts, or crashes where XLA
    does not look. Looked at now and then, within long modules too."""
    yield
    maps = Path("/proc/self/maps")
    if next(_run) % 100 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items):
    """Mark the tests that tests/long_suite.txt names as slow."""
    lines = (Path(__file__).parent / "long_suite.txt").read_text().splitlines()
    long = {line for line in lines if line and not line.startswith("#")}
    for item in items:
        if item.nodeid in long or item.nodeid.split("[")[0] in long:
            item.add_marker(pytest.mark.slow)
