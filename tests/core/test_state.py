"""What may watch a thread's Tensors has all that core.state asks of it."""

import inspect

import pytest

from polyreme.autograd import recompute
from polyreme.core import state
from polyreme.distributed.auto_parallel.dims import trace
from polyreme.distributed.auto_parallel.stages import record
from polyreme.errors import ProgramError
from polyreme.export import tracing
from polyreme.jit import mutation
from polyreme.jit.capture import Capture
from polyreme.program.recorder import Recorder
from polyreme.static import io

ELSEWHERE = (recompute, trace, record, tracing, mutation, io)
"""Modules with kinds of their own, loaded here so that they are seen."""


def kinds(base: type) -> list[type]:
    """base, and every class below it."""
    return [base, *(kind for child in base.__subclasses__() for kind in kinds(child))]


def members(protocol: type) -> dict[str, object]:
    """Members by name; of one without a value, its annotation."""
    return {
        name: value
        for part in (protocol, state.Watcher)
        for name, value in {**part.__annotations__, **vars(part)}.items()
        if not name.startswith("_")
    }


def parameters(method) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


def test_every_module_with_a_watcher_is_loaded():
    homes = {kind.__module__ for base in (Capture, Recorder) for kind in kinds(base)}
    assert homes >= {module.__name__ for module in ELSEWHERE}


@pytest.mark.parametrize(("base", "protocol"), [(Capture, state.CodeWatcher), (Recorder, state.ProgramRecorder)])
def test_every_watcher_has_what_is_asked_of_it(base, protocol):
    asked = members(protocol)
    assert {"created", "read", "write", "records", "stages", "converted"} <= asked.keys()
    for name, member in asked.items():
        assert hasattr(base(), name), name
        if not inspect.isfunction(member):
            continue
        for kind in kinds(base):
            has = [p for p in inspect.signature(getattr(kind, name)).parameters if p != "self"]
            assert has == [p for p in inspect.signature(member).parameters if p != "self"], (
                f"{kind.__qualname__}.{name}"
            )


def test_a_watcher_is_told_by_what_it_does():
    assert state.code_watcher() is state.recorder() is None
    with pytest.raises(ProgramError, match=r"its value belongs to a static Program.*enable_static"):
        state.require_recorder("its value")
    for watcher, of_code in ((Capture(), True), (Recorder(), False)):
        state.watch.active = watcher
        try:
            assert (state.code_watcher() is watcher, state.recorder() is watcher) == (of_code, not of_code)
        finally:
            state.watch.active = None
