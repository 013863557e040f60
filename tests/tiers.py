"""The tier of a test, by what it needs: unit, compile or process. Said here alone; conftest.py sets the markers.

process: the test, a fixture or a helper of it starts other processes. compile: it stands in a folder or file whose
tests spend their time compiling. unit: the rest; make test-fast runs those.
"""

import functools
import multiprocessing
import subprocess
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

COMPILE = tuple(
    f"tests/{name}"
    for name in (
        "autograd", "cli", "compression", "distributed", "distribution", "evaluation", "export", "generation", "hapi",
        "jit", "kernels", "models", "nn", "ops", "optimizer", "oracle", "paddle_scripts", "profiler", "program",
        "quantization", "recipes", "serving", "sparse", "static", "test_docstrings.py", "test_errors.py",
        "test_pages.py", "test_pinn_examples.py", "test_science.py", "test_suite.py", "test_trainer.py",
    )
)  # fmt: skip
"""Folders and files, below the root, whose tests spend their time compiling: the rest takes under two minutes."""

_STARTERS = (subprocess, multiprocessing)
# distributed.spawn under whatever name it is called, and loaders with workers
_STARTING_NAMES = {"spawn", "Popen", "num_workers"}


def tier(item: pytest.Function) -> str:
    """The name of the marker; process too where the test says so, because the code under test starts them."""
    if item.get_closest_marker("process"):
        return "process"
    fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
    if any(starts_processes(function) for function in (item.function, *fixtures)):
        return "process"
    return "compile" if item.nodeid.startswith(COMPILE) else "unit"


@functools.cache
def starts_processes(function: Callable[..., Any]) -> bool:
    """Whether function, or a function of the tests that it reaches by name, starts a process."""
    return any(_is_starter(value) for value in _reached(function))


def _is_starter(value: Any) -> bool:
    return any(value is starter for starter in _STARTERS) or (isinstance(value, str) and value in _STARTING_NAMES)


def _reached(function: Any) -> Iterator[Any]:
    """What function names: strings, and the values of globals, through functions, classes and modules of the tests."""
    waiting, seen = [function], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type):
            waiting += [member for member in vars(value).values() if isinstance(member, FunctionType)]
        if not isinstance(value, FunctionType):
            continue
        names = set(_names(value.__code__))
        yield from names
        known = [value.__globals__[name] for name in names if name in value.__globals__]
        yield from known
        modules = [m for m in known if isinstance(m, ModuleType) and m.__name__.startswith("tests.")]
        known += [vars(m)[name] for m in modules for name in names if name in vars(m)]
        waiting += [v for v in known if getattr(v, "__module__", None) and str(v.__module__).startswith("tests.")]


def _names(code: CodeType) -> Iterator[str]:
    """Names and keywords in code and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, tuple):
            yield from (c for c in constant if isinstance(c, str))
