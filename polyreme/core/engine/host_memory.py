"""Memory of the process on CPU: glibc keeps what is freed, and one program with large scratch memory runs at a time.

XLA on CPU allocates a program's scratch memory with malloc for each call and frees it when the program ends; see
docs/decisions/0004-keep-freed-memory.md.
"""

import ctypes
import sys
import time
import weakref
from collections import deque
from typing import Any, NamedTuple

import jax

LARGE = 64 << 20
"""Bytes of scratch memory from which on a program waits for the one before it."""

_ROOM = 64 << 20  # for the scratch memory of single products, which are blocks of 2 MiB at most
_RELEASE_SECONDS = 0.05  # that a program which has ended is waited for
# parameters of mallopt(3), from glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def _libc() -> Any:
    """The C library where it is glibc's malloc that these functions know, else None."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def keep_freed() -> None:
    """Make glibc keep the memory that XLA frees between programs.

    By default it maps such blocks and unmaps them again, and every call pays for zeroed pages: 9.2 s of system time in
    40 pretraining steps, 1.9 s with these.
    """
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(_M_TOP_PAD, 1 << 28)
        # the arena of another thread holds 64 MiB at most, and what is larger is mapped for each call again
        libc.mallopt(_M_ARENA_MAX, 1)


def hand_back_freed() -> None:
    """Hand freed memory back to the system, once: after a long compilation, whose memory no later program needs.

    What the compiler leaves lies in pieces; the scratch memory of the program that it made did not fit between them,
    and came on top: 1232 MiB for the GPT of benchmarks/gpt_step.py, 715 MiB so.
    """
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


class Scratch(NamedTuple):
    """Bytes of a large program's scratch memory and of its results."""

    size: int
    results: int


def scratch_of(compiled: Any) -> Scratch | None:
    """Scratch bytes of a jax.stages.Compiled, if they are LARGE and it runs on CPU beside the thread that calls it."""
    if jax.default_backend() != "cpu" or not jax.config.read("jax_cpu_enable_async_dispatch"):
        return None
    analysis = compiled.memory_analysis()
    if analysis is None or analysis.temp_size_in_bytes < LARGE:
        return None
    return Scratch(analysis.temp_size_in_bytes, analysis.output_size_in_bytes)


def leave_room(scratch: Scratch) -> None:
    """Free a block for the results of a large program, before it runs first.

    malloc takes the smallest free block that fits. Without one of their size, results are cut from where the scratch
    memory lay or was to lie, which then does not fit there any more and is allocated once more, at the end of the heap.
    """
    libc = _libc()
    if libc is None:
        return
    libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = (ctypes.c_size_t,), (ctypes.c_void_p,)
    libc.realloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    size = scratch.results + _ROOM
    # neither is ever written to, so no page of them becomes resident; what stays of the second keeps the first, once it
    # is free, from becoming part of the heap's end
    block, border = libc.malloc(size), libc.malloc(size)
    libc.realloc(border, 1)
    libc.free(block)


def _in_use() -> int | None:
    """Bytes that malloc has given out; None where the C library does not say."""
    libc = _libc()
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _MallocInfo
    return libc.mallinfo2().uordblks


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2, from glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    )  # fmt: skip


class _Run(NamedTuple):
    """The last large program: a weak reference to a result, what it takes, and the bytes in use before it."""

    result: weakref.ref
    scratch: Scratch
    before: int | None


_last: deque[_Run] = deque(maxlen=1)


def await_last() -> int | None:
    """Wait until the last large program has ended and given back its scratch memory -> the bytes in use then.

    jax lets many programs wait in a queue, and each may have its scratch memory while it waits: twelve training steps
    of benchmarks/gpt_step.py whose loss nobody reads took 1947 MiB. A result is there before the memory is free, by
    microseconds, or by 15 ms where XLA's thread loses its core in between.
    """
    run = _last[0] if _last else None
    result = run.result() if run is not None else None
    in_use = _in_use()
    if run is None or result is None or result.is_deleted():
        return in_use
    result.block_until_ready()
    in_use = _in_use()
    if in_use is None or run.before is None:
        return in_use
    most = run.before + run.scratch.results + run.scratch.size // 2
    end = time.perf_counter() + _RELEASE_SECONDS
    while in_use is not None and in_use > most and time.perf_counter() < end:
        time.sleep(2e-4)
        in_use = _in_use()
    return in_use


def note_last(results: Any, scratch: Scratch, before: int | None) -> None:
    """Remember a result (of a tree of them) of a large program that was dispatched, for await_last; weakly."""
    for result in jax.tree.leaves(results)[:1]:
        _last.append(_Run(weakref.ref(result), scratch, before))
