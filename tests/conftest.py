"""Eight virtual CPU devices for every test, a compiler told to compile fast, programs shared by the run's processes."""

import ctypes
import gc
import os
import sys
from pathlib import Path

from tests.run_folder import RunFolder

os.environ.setdefault("CPU_NUM", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# tests run small programs once, so their time is compilation: without optimization it halves. Fusion emitters are left
# to polyreme.core.backend, as for users. XLA_FLAGS set outside win: make test-all optimizes
_FAST_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    # the other core has a worker of its own
    "--xla_cpu_parallel_codegen_split_count=1"
)
# XLA ends a process whose virtual devices do not meet within 40 s, which a busy machine may take; pytest stops at 300
_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=280"
os.environ.setdefault("XLA_FLAGS", f"{_FAST_COMPILE} {_PATIENT}")
# one folder for the workers and their children: loading a small program takes a fifth of compiling it. The run's own,
# as a process that a test kills may leave half a file
_PROGRAMS = RunFolder() if "POLYREME_COMPILE_CACHE" not in os.environ else None
if _PROGRAMS is not None:
    os.environ["POLYREME_COMPILE_CACHE"] = str(_PROGRAMS.path)
os.environ.setdefault("POLYREME_COMPILE_CACHE_SECONDS", "0.001")

import jax
import pytest
from hypothesis import settings

from polyreme.core import layout, program_bound
from polyreme.distributed.placement import clear_plan
from tests import tiers

# an example may meet a compilation or a busy machine: time says nothing of what is tested
settings.register_profile("polyreme", deadline=None)
settings.load_profile("polyreme")

# tracing makes many small objects that live on; looking for cycles after each 700 of them takes a tenth of the time
gc.set_threshold(30_000, 10, 10)

# resident bytes of a process at which compiled programs are let go: each holds about 1.5 MB and several mappings, of
# which Linux allows a process 65,530
_MANY_BYTES = 1_700_000_000


@pytest.fixture(autouse=True, scope="session")
def _devices_are_started():
    """Tests that set CPU_NUM would else decide how many devices the worker has, where they come first."""
    jax.devices()


@pytest.fixture(autouse=True, scope="module")
def _no_plan_outlives_its_file():
    """Which file comes next is for the workers to choose."""
    yield
    if layout.active.layout is not None:
        clear_plan()


@pytest.fixture(autouse=True)
def _programs_do_not_pile_up():
    """Let go of compiled programs when this process has grown: what is needed again is loaded from the run's folder."""
    yield
    if _resident_bytes() > _MANY_BYTES:
        program_bound.bound.clear()
        gc.collect()
        # polyreme lets glibc keep what is freed
        ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    """0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def pytest_configure(config):
    """Where Python may not write bytecode beside the sources, let children share that of the run: a third of an import.

    Workers of pytest itself go without, as they would have to compile all of jax first.
    """
    if not sys.dont_write_bytecode or getattr(config.option, "numprocesses", None):
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(os.environ["POLYREME_COMPILE_CACHE"], "bytecode")))


def pytest_collection_finish():
    """Tests and modules stay until the end: the collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """One look for what was never awaited or closed: pytest would look five times at all that the run has left."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    """Mark as slow the cases that slow_cases names; each test with the tier of what it needs."""
    named, seen = {}, set()
    for item in items:
        item.add_marker(tiers.tier(item))
        for mark in item.iter_markers("slow_cases"):
            function = item.nodeid.split("[")[0]
            named[function] = mark.args
            if item.callspec.id in mark.args:
                seen.add((function, item.callspec.id))
                item.add_marker(pytest.mark.slow)
    stale = [
        f"{function}[{case}]" for function, cases in named.items() for case in cases if (function, case) not in seen
    ]
    # a run of single cases does not collect the others
    if stale and not any("[" in argument for argument in config.args):
        raise pytest.UsageError(f"slow_cases names no case of its test: {stale}")


def pytest_unconfigure():
    """Delete the run's compiled programs: in the process that made the folder, not in its workers."""
    if _PROGRAMS is not None:
        _PROGRAMS.delete()
