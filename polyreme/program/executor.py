"""Executor: runs a Program in a scope, compiled once for each version, scope, feed shapes and fetch list.

A run that was seen before costs the making of its key, a lookup and the call of what was compiled.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from polyreme.core import amp_policy, state
from polyreme.core.checked import checked
from polyreme.core.devices import place as places
from polyreme.core.engine import backend, forks
from polyreme.eager.tensor import Tensor
from polyreme.errors import ProgramError
from polyreme.jit.fusing import fusing
from polyreme.program.buckets import BucketRun, Buckets
from polyreme.program.current import defaults
from polyreme.program.feed import arrays_of, fed, fetch_key, fetched, shapes_in, without_unused
from polyreme.program.padded_rows import PADDING_SEEN, PaddedRun, RowPadding
from polyreme.program.program import Program
from polyreme.program.run import make_run
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

    A Program is compiled anew for each shape that it is fed. buckets: {name: {dim: sizes}} has the dims of these feeds
    padded with zeros up to the next of the sizes, and the fetches cut back, so that it is compiled once for each of
    the sizes. That is for inference: a Program that changes values or draws random numbers is refused, and so are
    fetches that would depend on the padding.

    pad_sequences: whether feeds of sequences (LoDTensors) are padded to a few numbers of rows, which nothing of the
    results depends on but the rounding of sums over rows (padded_rows.py); a Program in which padding would be seen
    runs as it is fed.

    >>> main, startup = Program(), Program()
    >>> Executor().run(startup)
    []
    """

    def __init__(
        self,
        place: Any = None,
        buckets: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
        pad_sequences: bool = True,
    ) -> None:
        self.place = None if place is None else places.as_place(place)
        self._buckets = None if buckets is None else Buckets(buckets)
        self._device: Any = None
        self._pads = pad_sequences
        self._as_fed: set[tuple[Any, ...]] = set()  # runs in which padding would be seen
        self._compiled: OrderedDict[tuple, Any] = OrderedDict()
        self._closed = False

    def close(self) -> None:
        """Let go of what was compiled; running again is an error."""
        self._closed = True
        self._compiled.clear()
        self._as_fed.clear()

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
        """Run a Program (the default main one if None); returns the fetched values as ndarrays, or as Tensors.

        feed: name -> array, as such or in a list, as a DataLoader gives it. fetch_list: Variables or names. Every
        operation that changes a persistable value runs; what nothing needs is left out by the compiler, so use_prune
        and use_program_cache change nothing, and feed_var_name and fetch_var_name name nothing here. A feed of a name
        that the Program does not have is ignored, and logged once. Raises ProgramError for a missing or ill-shaped
        feed, an unknown fetch, a scope without parameters, and after close().
        """
        if self._closed:
            raise ProgramError("Executor.run after close(); make a new Executor")
        program = defaults.main if program is None else program
        scope = global_scope() if scope is None else scope
        forks.check("Executor.run")
        watch, autocast = state.watch, amp_policy.active
        with _lock:
            # what runs is not recorded, nor cast by an autocast that was on while the call was made
            active, policy = watch.active, autocast.policy
            watch.active = autocast.policy = None
            try:
                if isinstance(program, Program):
                    outs = self.run_program(program, feed, fetch_list, scope, return_numpy)
                elif hasattr(program, "execute"):
                    outs = program.execute(self, feed, fetch_list, scope, return_numpy)
                else:
                    raise TypeError(f"Executor.run takes a Program or a CompiledProgram, got {type(program).__name__}")
                return outs if return_numpy else [out if isinstance(out, Tensor) else Tensor(out) for out in outs]
            finally:
                watch.active, autocast.policy = active, policy

    def run_program(self, program: Program, feed: Any, fetch_list: Any, scope: Scope, return_numpy: bool) -> list[Any]:
        """Run a plain Program."""
        if isinstance(feed, (list, tuple)) and len(feed) == 1:
            (feed,) = feed
        feed = without_unused(program, {} if feed is None else feed)
        if self._buckets is not None and feed:
            return self._run_in_bucket(self._buckets, program, feed, fetch_list, scope, return_numpy)
        arrays, asked = arrays_of(feed), fetch_key(fetch_list)
        if asked is None:
            asked = tuple((name,) for name in fetched(program, fetch_list))
        if arrays is None:
            arrays = fed(program, feed)
            outs = self._run_padded(program, arrays, asked, fetch_list, scope) if self._pads else None
            if outs is not None:
                return [np.asarray(out) for out in outs] if return_numpy else [jnp.asarray(out) for out in outs]
        shapes = (shapes_in(arrays), checked.is_on, fusing.is_on)
        run = self.compiled((program.identity, scope.identity, asked, shapes), arrays)
        if run is None:
            run = self._prepare(program, feed, fetch_list, scope)
            # the scope's identity now: it holds the state of optimizers since
            self.keep((program.identity, scope.identity, asked, shapes), run)
        with self.on_place():
            outs = run(arrays)
        return [np.asarray(out) for out in outs] if return_numpy else outs

    def _prepare(self, program: Program, feed: Any, fetch_list: Any, scope: Scope) -> Any:
        if not (program.global_block().ops or fetch_list or program.is_startup):
            _log.warning("Executor.run: the Program has no operations; was it built under another program_guard?")
        names = fetched(program, fetch_list)
        return make_run(program, scope, fed(program, feed), names, self.on_place)

    def _run_padded(
        self, program: Program, arrays: dict[str, Any], asked: tuple[Any, ...], fetch_list: Any, scope: Scope
    ) -> list[Any] | None:
        """What is fetched, of sequences padded with rows; None without sequences, and where padding would be seen."""
        sizes = RowPadding.of(program).sizes(arrays)
        which = (program.identity, scope.identity, asked)
        if not sizes or not self.pads(which):
            return None
        given = tuple(
            [(n, (sizes.get(n, a.shape[0]), *a.shape[1:]) if a.ndim else (), a.dtype) for n, a in arrays.items()]
        )
        about = ("padded", asked, given, checked.is_on, fusing.is_on)
        run = self.compiled((program.identity, scope.identity, *about), arrays)
        with self.on_place():
            if run is None:
                try:
                    run = PaddedRun(program, scope, arrays, sizes, fetched(program, fetch_list))
                except PADDING_SEEN as error:
                    self.run_as_fed(which, error)
                    return None
                self.keep((program.identity, scope.identity, *about), run)
            return run(arrays) if run.fits(arrays) else None

    def _run_in_bucket(
        self, buckets: Buckets, program: Program, feed: Any, fetch_list: Any, scope: Scope, return_numpy: bool
    ) -> list[Any]:
        arrays, names = fed(program, feed), fetched(program, fetch_list)
        padded = buckets.padded(program, arrays)
        shapes = tuple((n, padded[n], a.dtype) for n, a in arrays.items())
        about = ("bucket", checked.is_on, fusing.is_on, tuple(names), shapes)
        run = self.compiled((program.identity, scope.identity, *about), arrays)
        if run is None:
            run = BucketRun(program, scope, arrays, padded, names, buckets.dims, self.on_place)
            self.keep((program.identity, scope.identity, *about), run)
        with self.on_place():
            outs = run(arrays)
        return [np.asarray(out) for out in outs] if return_numpy else outs

    # what a Runnable calls

    def compiled(self, key: tuple[Any, ...], given: Any) -> Any:
        """What was kept under this key, if it still serves."""
        run = self._compiled.get(key)
        return run if run is not None and run.serves(given) else None

    def pads(self, which: tuple[Any, ...]) -> bool:
        """Whether sequences of a run are padded with rows."""
        return self._pads and which not in self._as_fed

    def run_as_fed(self, which: tuple[Any, ...], error: Exception) -> None:
        """From now on pad no sequences of this run, in which padding would be seen."""
        _log.info("Executor: the Program is compiled for each number of rows of its sequences: %s", error)
        self._as_fed.add(which)

    def keep(self, key: tuple[Any, ...], run: Any) -> None:
        """Keep what was compiled under this key; the oldest of too many goes."""
        self._compiled[key] = run
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)

    def on_place(self) -> AbstractContextManager[Any]:
        """Makes the place's device the default one, if it is not already."""
        if self.place is None:
            return _HERE
        if self._device is None:
            self._device = self.place.device()
        return _HERE if self._device is _default_device() else jax.default_device(self._device)


_HERE = nullcontext()


def _default_device() -> Any:
    return backend.config.jax_default_device or _first_device()


@functools.cache
def _first_device() -> Any:
    return jax.local_devices()[0]
