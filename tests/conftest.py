"""Eight virtual CPU devices for every test, a compiler told to compile fast, programs shared by the run's processes."""

import gc
import os
from collections import Counter

import pytest

from tests import tiers
from tests.run_folder import RunFolder

os.environ.setdefault("CPU_NUM", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# tests run small programs once, so their time is compilation: without optimization it halves. Fusion emitters are left
# to polyreme.core.engine.backend, as for users. XLA_FLAGS set outside win: make test-all optimizes
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


def pytest_configure(config):
    """Import jax and the fixtures of tests where tests are run: xdist's own process only hands them out."""
    if not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("tests.worker")


def pytest_collection_finish():
    """Tests and modules stay until the end: the collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """One look for what was never awaited or closed: pytest would look five times at all that the run has left."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    """Mark as slow the cases that slow_cases names and all but one of each few that one_in counts; each test with the
    tier of what it needs.
    """
    named, seen, counts, tier_of = {}, set(), Counter(), {}
    for item in items:
        cases = (item.parent, item.function)  # they share a tier
        if cases not in tier_of:
            tier_of[cases] = tiers.tier(item)
        item.add_marker(tier_of[cases])
        function = item.nodeid.split("[")[0]
        for mark in item.iter_markers("slow_cases"):
            named[function] = mark.args
            if item.callspec.id in mark.args:
                seen.add((function, item.callspec.id))
                item.add_marker(pytest.mark.slow)
        mark = item.get_closest_marker("one_in")
        if mark is not None and not item.get_closest_marker("slow"):
            if counts[function] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            counts[function] += 1
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
