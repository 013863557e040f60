"""What the processes that run tests need, and xdist's own, which only hands them out, does not: jax, and its fixtures.

conftest.py loads it where it is needed, after it has set the environment that jax reads.
"""

import contextlib
import ctypes
import gc
import importlib
import os
from pathlib import Path

import jax
import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from polyreme.core import layout
from polyreme.core.engine import program_bound
from polyreme.distributed.placement import clear_plan

# an example may meet a compilation or a busy machine: time says nothing of what is tested
settings.register_profile("polyreme", deadline=None)
settings.load_profile("polyreme")
# it would parse the package's 1,300 modules for constants to draw, 4 s of each worker in a fresh clone
providers._get_local_constants = lambda: providers._local_constants

# tracing makes many small objects that live on; looking for cycles after each 700 of them takes a tenth of the time
gc.set_threshold(30_000, 10, 10)

# resident bytes of a process at which compiled programs are let go: each holds about 1.5 MB and several mappings, of
# which Linux allows a process 65,530
_MANY_BYTES = 1_700_000_000


def pytest_collection(session):
    """Each second worker imports its test files from the last one on: of the files of a fresh clone, whose assertions
    pytest rewrites when they are first imported, each of two workers then rewrites a half and reads the other's.
    """
    worker = getattr(session.config, "workerinput", {"workerid": "gw0"})["workerid"]
    if int(worker.removeprefix("gw")) % 2 == 0:
        return
    root = session.config.rootpath
    for argument in session.config.args:
        for file in sorted((root / argument).rglob("test_*.py"), reverse=True):
            if (file.parent / "__init__.py").exists():
                # whatever is wrong with a file is for its collection to say
                with contextlib.suppress(Exception, pytest.skip.Exception):
                    importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


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
