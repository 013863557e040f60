"""Executor that takes and gives LoDTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyreme.fluid.reader import feed_of
from polyreme.program import executor
from polyreme.program.current import defaults
from polyreme.program.program import Program
from polyreme.program.scope import Scope
from polyreme.sequences import lod
from polyreme.static.compiled import CompiledProgram


class Executor(executor.Executor):
    """Runs Programs on a place; the default device if None."""

    def run(
        self, program: Any = None, feed: Any = None, fetch_list: Any = None, feed_var_name: str = "feed",
        fetch_var_name: str = "fetch", scope: Scope | None = None, return_numpy: bool = True,
        use_program_cache: bool = False, use_prune: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Run a Program (the default main one if None); returns the fetched values as ndarrays, or as LoDTensors.

        A Program whose Variables a started DataLoader feeds takes the next minibatch of it; EOFException at the end.
        Raises ProgramError, besides what any Executor does, for ndarrays asked of values that are cut into sequences.
        """
        program = defaults.main if program is None else program
        inner = program.program if isinstance(program, CompiledProgram) else program
        feed, plain = feed_of(inner, feed), super().run
        if not isinstance(inner, Program):
            return plain(program, feed, fetch_list, scope=scope, return_numpy=return_numpy)
        if isinstance(feed, (list, tuple)):  # a dict for each device
            feed = [lod.with_longest(inner, part) if isinstance(part, Mapping) else part for part in feed]
        return lod.run(_ProgramRunner(plain, program), inner, feed, _list(fetch_list), scope, return_numpy)


class _ProgramRunner:
    """What lod.run calls: an Executor's run of a Program, or of a CompiledProgram of it."""

    def __init__(self, run: Any, program: Any) -> None:
        self._run, self._program = run, program

    def run(self, program: Program, *args: Any, **kwargs: Any) -> list[Any]:
        """Executor.run."""
        return self._run(self._program, *args, **kwargs)


def _list(fetch_list: Any) -> list[Any]:
    if fetch_list is None:
        return []
    if not isinstance(fetch_list, (list, tuple)):
        return [fetch_list]
    return [e for entry in fetch_list for e in (_list(entry) if isinstance(entry, (list, tuple)) else [entry])]


__all__ = ["Executor"]
