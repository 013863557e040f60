"""Executor: runs a Program in a scope, compiled once for each version, scope, feed shapes and fetch list.

Floor: 4.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import numpy as np

from polyreme.core import amp_policy, rng, state
from polyreme.core import dtype as dtypes
from polyreme.core import place as places
from polyreme.core.symbol import DYNAMIC, Symbol
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import HostValueError, ProgramError, did_you_mean
from polyreme.jit.program import Program as Captured
from polyreme.program.frame import Frame
from polyreme.program.operation import Backward, Initialize, StartOptimizer
from polyreme.program.program import Program, Variable, defaults
from polyreme.program.scope import Scope, global_scope

_log = logging.getLogger("polyreme.program")
_KEPT = 64  # compiled programs that one Executor keeps
_lock = threading.RLock()


class Runnable(Protocol):
    """A Program made ready to run in its own way, such as a CompiledProgram."""

    def execute(
        self, executor: Executor, feed: Any, fetch_list: Any, scope: Scope, return_numpy: bool
    ) -> list[Any]: ...


class Executor:
    """Runs Programs on a place; the default device if None.

    >>> main, startup = Program(), Program()
    >>> Executor().run(startup)
    []
    """

    def __init__(self, place: Any = None) -> None:
        self.place = None if place is None else places.as_place(place)
        self._compiled: OrderedDict[tuple, Any] = OrderedDict()
        self._closed = False

    def close(self) -> None:
        """Let go of what was compiled; running again is an error."""
        self._closed = True
        self._compiled.clear()

    def run(
        self,
        program: Any = None,
        feed: Any = None,
        fetch_list: Any = None,
        feed_var_name: str = "feed",
        fetch_var_name: str = "fetch",
        scope: Scope | None = None,
        return_numpy: bool = True,
        use_program_cache: bool = False,
        use_prune: bool = False,
    ) -> list[Any]:
        """Run a Program (the default main one if None); returns the fetched values as ndarrays, or as LoDTensors.

        feed: name -> array. fetch_list: Variables or names. Every operation that changes a persistable value runs; what
        nothing needs is left out by the compiler, so use_prune and use_program_cache change nothing, and
        feed_var_name and fetch_var_name name nothing here. Raises ProgramError for a missing, unknown or ill-shaped
        feed, an unknown fetch, a scope without parameters, and after close().
        """
        if self._closed:
            raise ProgramError("Executor.run after close(); make a new Executor")
        program = defaults.main if program is None else program
        scope = global_scope() if scope is None else scope
        with _lock, _outside_static_mode():
            if not isinstance(program, Program):
                if not hasattr(program, "execute"):
                    raise TypeError(f"Executor.run takes a Program or a CompiledProgram, got {type(program).__name__}")
                return program.execute(self, feed, fetch_list, scope, return_numpy)
            return self.run_program(program, feed, fetch_list, scope, return_numpy)

    def run_program(self, program: Program, feed: Any, fetch_list: Any, scope: Scope, return_numpy: bool) -> list[Any]:
        """Run a plain Program."""
        if not program.global_block().ops and not fetch_list:
            _log.warning("Executor.run: the Program has no operations; was it built under another program_guard?")
        names = fetched(program, fetch_list)
        given = fed(program, {} if feed is None else feed)
        what = (program.identity, tuple(names), tuple((n, a.shape, a.dtype) for n, a in given.items()))
        run = self._compiled.get((scope.identity, what))
        if run is None or not run.serves(given):
            run = make_run(program, scope, given, names, self.place)
            self._compiled[scope.identity, what] = run  # looking for what the Program needs may add to the scope
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        outs = run(given)
        return [np.asarray(out) for out in outs] if return_numpy else outs


@contextmanager
def _outside_static_mode() -> Iterator[None]:
    """What runs is not recorded, nor cast by an autocast that was on while the call was made."""
    outer, state.watch.active = state.watch.active, None
    policy, amp_policy.active.policy = amp_policy.active.policy, None
    try:
        yield
    finally:
        state.watch.active, amp_policy.active.policy = outer, policy


def fetched(program: Program, fetch_list: Any) -> list[str]:
    """Names of the values to fetch; ProgramError for what is no Variable of the Program."""
    if fetch_list is None:
        return []
    listed = fetch_list if isinstance(fetch_list, (list, tuple)) else [fetch_list]
    names = []
    for entry in listed:
        if isinstance(entry, str):
            names.append(_current(program, entry))
        elif isinstance(entry, (list, tuple)):
            names += fetched(program, entry)
        elif isinstance(entry, Tensor) and isinstance(entry._array, Symbol):
            names.append(entry._array.name)
        elif any(held is entry for held in program.held.values()):
            names.append(next(n for n, held in program.held.items() if held is entry))
        else:
            raise ProgramError(f"fetch_list holds Variables and names, got {type(entry).__name__}: {entry!r}")
    return names


def _current(program: Program, name: str) -> str:
    """What the Variable of this name stands for now; in-place ops give it a new value."""
    block = program.global_block()
    found = block.vars.get(name)
    if found is not None:
        return found._array.name
    known = {*block.vars, *(n for op in block.ops for n in op.outputs), *program.held}
    if name in known:
        return name
    raise ProgramError(f"fetch_list: the Program has no variable {name!r}{did_you_mean(name, known)}")


def fed(program: Program, feed: Any) -> dict[str, Any]:
    """The feed as arrays by name, each checked against its Variable."""
    if not isinstance(feed, Mapping):
        raise ProgramError(f"feed is a dict of name -> array, got {type(feed).__name__}")
    block = program.global_block()
    data = {n: v for n, v in block.vars.items() if isinstance(v, Variable) and v.is_data}
    given: dict[str, Any] = {}
    for name, value in feed.items():
        variable = block.vars.get(name)
        if variable is None:
            raise ProgramError(
                f"feed: the Program has no variable {name!r}{did_you_mean(str(name), data)}; it takes {sorted(data)}"
            )
        given[name] = _checked(variable, value)
        if isinstance(variable, Variable):
            given.update(_offsets(variable, value))
    needed = {n for op in block.ops for n in op.reads()}
    missing = [n for n in data if n in needed and n not in given]
    if missing:
        raise ProgramError(f"feed lacks {missing}, which the Program reads; it was given {sorted(feed)}")
    return given


def _offsets(variable: Variable, value: Any) -> dict[str, Any]:
    """The offsets of a LoDTensor, under the names of the Variables that hold them."""
    if not variable.lod:
        return {}
    lod = value.lod() if hasattr(value, "lod") else []
    if len(lod) != len(variable.lod):
        raise ProgramError(
            f"feed: {variable.name!r} has lod_level {len(variable.lod)}, the value {len(lod)} levels of sequences; "
            "feed a LoDTensor made by create_lod_tensor"
        )
    return {v.name: np.asarray(level, v.dtype) for v, level in zip(variable.lod, lod, strict=True)}


def _checked(variable: Tensor, value: Any) -> Any:
    array = value._array if isinstance(value, Tensor) else value
    if not isinstance(array, (np.ndarray, jax.Array)):
        array = np.asarray(array)
        if array.dtype.kind in "iufb" and array.dtype != variable.dtype and _widens(array, variable.dtype):
            array = array.astype(variable.dtype)  # Python numbers have no dtype of their own
    name, want = variable._array.name, variable.shape
    if array.dtype != variable.dtype:
        raise ProgramError(
            f"feed: {name!r} is {variable.dtype.name}, got {array.dtype.name} of shape {list(array.shape)}; convert it "
            f'with .astype("{variable.dtype.name}")'
        )
    if len(want) != array.ndim or any(w not in (DYNAMIC, s) for w, s in zip(want, array.shape, strict=True)):
        raise ProgramError(f"feed: {name!r} has shape {want}, got {list(array.shape)}; -1 stands for any size")
    return array


def _widens(array: np.ndarray, dtype: np.dtype) -> bool:
    """Whether numbers as NumPy makes them of Python ones can go into dtype."""
    return dtypes.is_inexact(dtype) or (array.dtype.kind in "iub" and dtypes.is_integer(dtype))


class _Run:
    """A Program compiled for feeds of certain shapes, in a scope."""

    def __init__(self, program: Program, scope: Scope, given: Mapping[str, Any], names: Sequence[str]) -> None:
        self._scope = scope  # kept alive: its id is part of the key
        self._arguments = [Tensor.__new__(Tensor) for _ in given]
        self._fill(given)
        wanted = list(given)

        def step(*feeds: Tensor) -> list[Tensor]:
            return replay(program, scope, dict(zip(wanted, feeds, strict=True)), names)

        step.__name__ = step.__qualname__ = "program"
        self._captured = Captured(step, lambda tensors: step(*tensors), self._arguments)  # type: ignore[arg-type]

    def _fill(self, given: Mapping[str, Any]) -> None:
        for tensor, array in zip(self._arguments, given.values(), strict=True):
            state.TensorState.__init__(tensor, array)

    def serves(self, given: Mapping[str, Any]) -> bool:
        """Whether the scope still looks as it did."""
        return self._captured.serves(self._arguments)  # type: ignore[arg-type]

    def __call__(self, given: Mapping[str, Any]) -> list[Any]:
        for tensor, array in zip(self._arguments, given.values(), strict=True):
            tensor._array = array
        return [out._array for out in self._captured.run(self._arguments)]  # type: ignore[arg-type]


class _Interpreted:
    """A Program run operation by operation, on values: startup Programs, and what cannot be compiled."""

    def __init__(self, program: Program, scope: Scope, names: Sequence[str]) -> None:
        self._program, self._scope, self._names = program, scope, names

    def serves(self, given: Mapping[str, Any]) -> bool:
        return True

    def __call__(self, given: Mapping[str, Any]) -> list[Any]:
        feeds = {n: Tensor(jax.numpy.asarray(a)) for n, a in given.items()}
        return [state.read(t) for t in replay(self._program, self._scope, feeds, self._names)]


def make_run(program: Program, scope: Scope, given: Mapping[str, Any], names: Sequence[str], place: Any) -> Any:
    """What runs a Program on such feeds."""
    with jax.default_device(None if place is None else place.device()):
        if any(isinstance(op, (Initialize, StartOptimizer)) for op in program.global_block().ops):
            return _Interpreted(program, scope, names)
        try:
            return _Run(program, scope, given, names)
        except HostValueError as error:
            _log.warning("Executor: the Program runs operation by operation, since it cannot be compiled: %s", error)
            return _Interpreted(program, scope, names)


def replay(program: Program, scope: Scope, feeds: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    """Run a Program's operations on these Tensors; returns the values of these names, apart from the tape."""
    block = program.global_block()
    frame = Frame(block, scope)
    for name, tensor in feeds.items():
        tensor.stop_gradient = block.vars[name].stop_gradient
        frame.values[name] = tensor
    taped = any(isinstance(op, Backward) for op in program.every_op())
    with drawing(program, scope), tape.GradEnabled(taped):
        frame.run()
        return [Tensor(state.read(frame.get(name))) for name in names]


@contextmanager
def drawing(program: Program, scope: Scope) -> Iterator[None]:
    """Random numbers come from the Program's own stream if it has a seed."""
    if program.random_seed == 0:
        yield
        return
    with rng.default_generator.drawing_from(scope.generator(program.random_seed)):
        yield
