"""Compiled programs of eager ops, let go of where a process would come to hold more than fit.

A program takes half a megabyte and 6 to 9 of the 65,530 mappings that Linux allows a process: three for each object
that XLA compiles, one of them for code, one for constants, one for data. jax by itself lets go from 8,192 programs on.
Nothing is counted when a program is called: only when one is traced or compiled, which takes milliseconds.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import jax

from polyreme import flags

# benchmarks/results/growth_2_cores_2026-11-23.md
PROGRAM_BYTES = 500_000
_COMPILED = "/jax/core/compile/backend_compile_duration"
# programs compiled between two looks at the mappings; most have fewer than 64, captured steps some hundreds
_BETWEEN_LOOKS = 64

_log = logging.getLogger("polyreme.core")


class Programs:
    """The programs of one compiled function, whose `clear_cache` lets go of them all."""

    count: int
    name: str

    __slots__ = ("__weakref__", "count", "function", "name")

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self.function = weakref.ref(function)
        self.count = 0


class ProgramBound:
    """At most max_bytes of programs, and mappings of the process at most max_mappings, None for any number."""

    max_programs: int
    num_programs: int

    def __init__(self, max_bytes: int, max_mappings: int | None) -> None:
        self.max_programs = max(1, max_bytes // PROGRAM_BYTES)
        self.max_mappings = max_mappings
        self._allowed = (max_mappings or 0) * 4 // 3  # by the system: _max_mappings
        self.num_programs = 0
        self._functions: weakref.WeakSet[Programs] = weakref.WeakSet()
        # of the set alone: not held while programs are let go of; a finalizer that runs inside may come here again
        self._lock = threading.RLock()
        self._until_look = _BETWEEN_LOOKS
        self._warned = False

    def add(self, programs: Programs) -> None:
        """Count one more program of a function, and let go of others if that is one too many."""
        programs.count += 1
        self.num_programs += 1
        with self._lock:
            self._functions.add(programs)
        if self.num_programs > self.max_programs:
            # functions that are gone took their programs with them
            self.num_programs = sum(p.count for p in self._all())
        if self.num_programs > self.max_programs:
            self.let_go(f"they take {self.num_programs * PROGRAM_BYTES / 1e6:,.0f} MB")

    def let_go(self, reason: str) -> None:
        """Release half of the programs, of the functions that have most. A program that is needed again is loaded."""
        names = []
        most_first = sorted(self._all(), key=lambda programs: programs.count, reverse=True)
        self.num_programs = total = sum(programs.count for programs in most_first)
        for programs in most_first:
            if self.num_programs <= total // 2:
                break
            function = programs.function()
            if function is not None:
                function.clear_cache()
            names.append(f"{programs.name} ({programs.count})")
            self.num_programs -= programs.count
            programs.count = 0
        if names and not self._warned:
            self._warned = True
            _log.warning(
                "let go of compiled programs, as %s: %s; what is called again is loaded or compiled again. Pad data to "
                "a few sizes, or raise POLYREME_PROGRAM_BYTES",
                reason,
                ", ".join(names[:8]) + (", ..." if len(names) > 8 else ""),
            )

    def clear(self) -> None:
        """Release every program of this process, those of captured functions too."""
        jax.clear_caches()
        for programs in self._all():
            programs.count = 0
        self.num_programs = 0

    def _all(self) -> list[Programs]:
        with self._lock:
            return list(self._functions)

    def watch_mappings(self) -> None:
        """Look at the mappings of this process after every so many compilations."""
        if self.max_mappings is not None:
            jax.monitoring.register_event_duration_secs_listener(self._count_compilation)

    def _count_compilation(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            self._until_look -= 1
            if self._until_look <= 0:
                self._look()

    def _look(self) -> None:
        limit, mappings = self.max_mappings or 0, num_mappings()
        if mappings > limit:
            reason = f"this process has {mappings} memory mappings and the system allows {self._allowed}"
            self.let_go(reason)
            mappings = num_mappings()
            if mappings > limit:
                _log.warning("let go of all compiled programs, those of captured functions too, as %s", reason)
                self.clear()
                mappings = num_mappings()
            if mappings > limit:
                # others than programs take them: again when half of the room that is left is taken
                self.max_mappings = limit = mappings + max(0, self._allowed - mappings) // 2
        # a look reads a line for each mapping: rarely where there is room
        self._until_look = max(_BETWEEN_LOOKS, (limit - mappings) // _BETWEEN_LOOKS)


def num_mappings() -> int:
    """Memory mappings of this process; 0 where the system does not say."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def _max_mappings() -> int | None:
    """Three quarters of what the system allows: some hundred compilations lie between two looks."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) * 3 // 4
    except (OSError, ValueError):
        return None


def _max_bytes() -> int:
    """POLYREME_PROGRAM_BYTES; without it 3 GiB, or a quarter of a smaller machine's memory."""
    asked = flags.program_bytes()
    if asked is not None:
        return asked
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return min(3 << 30, memory // 4) if memory > 0 else 3 << 30


bound: ProgramBound = ProgramBound(_max_bytes(), _max_mappings())
bound.watch_mappings()
