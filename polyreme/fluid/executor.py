"""Executor that takes and gives LoDTensors."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyreme.errors import ConfigError
from polyreme.fluid.dataset import DatasetBase
from polyreme.fluid.host_array import HostArray
from polyreme.fluid.reader import feed_of
from polyreme.program import executor
from polyreme.program.current import defaults
from polyreme.program.program import Program
from polyreme.program.scope import Scope, global_scope, scope_guard
from polyreme.sequences import lod
from polyreme.static.compiled import CompiledProgram


class FetchHandler:
    """What train_from_dataset shows values to: a subclass writes handler(res_dict), the values of var_dict by its keys.

    var_dict: key -> Variable. period_secs: seconds between two calls at least, each after a minibatch. Raises
    ConfigError without a Variable.
    """

    def __init__(self, var_dict: Mapping[str, Any] | None = None, period_secs: float = 60) -> None:
        if not var_dict:
            raise ConfigError(f"FetchHandler: var_dict={var_dict!r}; give the Variables that handler is to be shown")
        self.var_dict, self.period_secs = dict(var_dict), period_secs

    def handler(self, res_dict: dict[str, Any]) -> None:
        """Print the values: an array each, or a LoDTensor of what has sequences."""
        for key, value in res_dict.items():
            sys.stdout.write(f"{key}: {value}\n")


class Executor(executor.Executor):
    """Runs Programs on a place; the default device if None."""

    def run(
        self, program: Any = None, feed: Any = None, fetch_list: Any = None, feed_var_name: str = "feed",
        fetch_var_name: str = "fetch", scope: Scope | None = None, return_numpy: bool = True,
        use_program_cache: bool = False, use_prune: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Run a Program (the default main one if None); returns the fetched values as HostArrays, or as LoDTensors.

        A Program whose Variables a started DataLoader feeds takes the next minibatch of it; EOFException at the end.
        Raises ProgramError, besides what any Executor does, for ndarrays asked of values that are cut into sequences.
        """
        program = defaults.main if program is None else program
        inner = program.program if isinstance(program, CompiledProgram) else program
        feed, plain = feed_of(inner, feed), super().run
        if not isinstance(inner, Program):
            outs = plain(program, feed, fetch_list, scope=scope, return_numpy=return_numpy)
        else:
            if isinstance(feed, (list, tuple)):  # a dict for each device
                feed = [lod.with_longest(inner, part) if isinstance(part, Mapping) else part for part in feed]
            outs = lod.run(_ProgramRunner(plain, program), inner, feed, _list(fetch_list), scope, return_numpy)
        return [out.view(HostArray) for out in outs] if return_numpy else outs

    def train_from_dataset(
        self, program: Any = None, dataset: DatasetBase | None = None, scope: Scope | None = None, thread: int = 0,
        debug: bool = False, fetch_list: Any = None, fetch_info: Sequence[str] | None = None, print_period: int = 100,
        fetch_handler: Any = None,
    ) -> None:  # fmt: skip
        """Run a Program (the default main one if None) once for each minibatch of a dataset of fluid.dataset.

        Every print_period minibatches the values of fetch_list are printed, each after its fetch_info (its name if
        there is none). thread and debug change nothing. Raises ConfigError without a dataset, for another number of
        fetch_info, and for a fetch_handler that is no FetchHandler.
        """
        if not isinstance(dataset, DatasetBase):
            raise ConfigError(f"train_from_dataset: dataset is one of fluid.DatasetFactory, got {dataset!r}")
        fetches = _list(fetch_list)
        shown = [getattr(f, "name", f) for f in fetches] if fetch_info is None else list(fetch_info)
        if len(shown) != len(fetches) or not isinstance(fetch_handler, FetchHandler | None):
            raise ConfigError(
                f"train_from_dataset: {len(shown)} fetch_info for {len(fetches)} in fetch_list, fetch_handler="
                f"{fetch_handler!r}; give one fetch_info each, and a fluid.executor.FetchHandler or None"
            )
        watched = {} if fetch_handler is None else fetch_handler.var_dict
        handled = time.monotonic()
        for number, feed in enumerate(dataset.feeds(), 1):
            asked = fetches if number % print_period == 0 else []
            is_due = fetch_handler is not None and time.monotonic() - handled >= fetch_handler.period_secs
            every = [*asked, *(watched.values() if is_due else ())]
            values = self.run(program, feed=feed, fetch_list=every, scope=scope, return_numpy=False)
            if asked:
                parts = (f"{info}: {np.asarray(value)}" for info, value in zip(shown, values, strict=False))
                sys.stdout.write(f"batch {number}: {', '.join(parts)}\n")
            if is_due:
                rest = (value if value.lod() else np.asarray(value) for value in values[len(asked) :])
                fetch_handler.handler(dict(zip(watched, rest, strict=True)))
                handled = time.monotonic()

    def infer_from_dataset(
        self, program: Any = None, dataset: DatasetBase | None = None, scope: Scope | None = None, thread: int = 0,
        debug: bool = False, fetch_list: Any = None, fetch_info: Sequence[str] | None = None, print_period: int = 100,
        fetch_handler: Any = None,
    ) -> None:  # fmt: skip
        """train_from_dataset, which trains only if the Program does."""
        self.train_from_dataset(
            program, dataset, scope, thread, debug, fetch_list, fetch_info, print_period, fetch_handler
        )


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


__all__ = ["Executor", "FetchHandler", "global_scope", "scope_guard"]
