"""What runs a Program: compiled as one captured step over its scope, or operation by operation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

from polyreme.core import rng, state
from polyreme.eager import tape
from polyreme.eager.tensor import Tensor
from polyreme.errors import HostValueError
from polyreme.jit.capture import Capture, watching
from polyreme.jit.program import CapturedProgram as Captured
from polyreme.program.frame import Frame, as_it_is
from polyreme.program.operation import Initialize
from polyreme.program.placing import gather, state_of
from polyreme.program.program import Program
from polyreme.program.scope import Scope
from polyreme.program.training import Backward, StartOptimizer

_log = logging.getLogger("polyreme.program")


class CompiledRun:
    """A Program compiled for feeds of certain shapes, in a scope. replayed: what runs it, replay unless given."""

    def __init__(
        self,
        program: Program,
        scope: Scope,
        given: Mapping[str, Any],
        names: Sequence[str],
        replayed: Callable[..., list[Tensor]] | None = None,
    ) -> None:
        self._scope = scope  # kept alive: its id is part of the key
        self._arguments = [Tensor(a) for a in given.values()]
        wanted = list(given)

        def step(*feeds: Tensor) -> list[Tensor]:
            return (replayed or replay)(program, scope, dict(zip(wanted, feeds, strict=True)), names)

        step.__name__ = step.__qualname__ = "program"
        gather(state_of(program, scope))
        self._captured = Captured(step, lambda tensors: step(*tensors), self._arguments)  # type: ignore[arg-type]

    @property
    def changes(self) -> bool:
        """Whether it changes persistable values or advances a stream of random numbers."""
        return any(self._captured.discovery.written)

    def serves(self, given: Mapping[str, Any]) -> bool:
        """Whether the scope still looks as it did."""
        return self._captured.serves(self._arguments)  # type: ignore[arg-type]

    def __call__(self, given: Mapping[str, Any]) -> list[Any]:
        gather(self._captured.discovery.tensors)
        for tensor, array in zip(self._arguments, given.values(), strict=True):
            tensor._array = array
        return [out._array for out in self._captured.run(self._arguments)]  # type: ignore[arg-type]


class _Interpreted:
    """A Program run operation by operation, on values: startup Programs, and what cannot be compiled."""

    changes = True

    def __init__(self, program: Program, scope: Scope, names: Sequence[str]) -> None:
        self._program, self._scope, self._names = program, scope, names

    def serves(self, given: Mapping[str, Any]) -> bool:
        return True

    def __call__(self, given: Mapping[str, Any]) -> list[Any]:
        if not any(isinstance(op, (Initialize, StartOptimizer)) for op in self._program.global_block().ops):
            gather(state_of(self._program, self._scope))
        feeds = {n: Tensor(jax.numpy.asarray(a)) for n, a in given.items()}
        return [state.read(t) for t in replay(self._program, self._scope, feeds, self._names)]


def make_run(
    program: Program,
    scope: Scope,
    feed: Mapping[str, Any],
    names: Sequence[str],
    on_place: Callable[[], AbstractContextManager[Any]],
) -> Any:
    """What runs a Program on such feeds."""
    with on_place():
        if any(isinstance(op, (Initialize, StartOptimizer)) for op in program.global_block().ops):
            return _Interpreted(program, scope, names)
        try:
            return CompiledRun(program, scope, feed, names)
        except HostValueError as error:
            _log.warning("Executor: the Program runs operation by operation, since it cannot be compiled: %s", error)
            return _Interpreted(program, scope, names)


def replay(program: Program, scope: Scope, feeds: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    """Run a Program's operations on these Tensors; returns the values of these names, apart from the tape."""
    with drawing(program, scope):
        return results(program, scope, feeds, names)


def results(
    program: Program,
    scope: Scope,
    feeds: Mapping[str, Tensor],
    names: Sequence[str],
    reduced: Callable[[str, Tensor], Tensor] = as_it_is,
    frame: Frame | None = None,
) -> list[Tensor]:
    """As replay, with random numbers of the stream in force, and gradients reduced so; in this frame if given."""
    block = program.global_block()
    frame = Frame(block, scope, reduced=reduced) if frame is None else frame
    for name, tensor in feeds.items():
        tensor.stop_gradient = block.vars[name].stop_gradient
        frame.values[name] = tensor
    taped = any(isinstance(op, Backward) for op in program.every_op())
    with tape.GradEnabled(taped):
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


def shapes_of(
    program: Program, scope: Scope, feeds: Mapping[str, jax.ShapeDtypeStruct], names: Sequence[str]
) -> list[tuple[int, ...]]:
    """The shapes that values of these names have for such feeds."""

    def stage(arrays: dict[str, Any]) -> list[Any]:
        with watching(Capture()):
            found = replay(program, scope, {n: Tensor(a) for n, a in arrays.items()}, names)
            return [t._array for t in found]

    return [tuple(out.shape) for out in jax.eval_shape(stage, dict(feeds))]
