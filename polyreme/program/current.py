"""The Programs, and the block, that code is recorded into."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from polyreme.core import unique_name
from polyreme.optimizer.own_update import blocks
from polyreme.program.block import Block
from polyreme.program.program import Program
from polyreme.program.training import Optimize

_MAIN, _STARTUP = Program(), Program()
_STARTUP.is_startup = True


class _Defaults(threading.local):
    """The Programs that code of this thread is recorded into; outside any program_guard all threads' are the same."""

    def __init__(self) -> None:
        self.main = _MAIN
        self.startup = _STARTUP
        self.scopes: list[str] = []
        self.of_training = False

    @property
    def block(self) -> Block:
        """Where the next operation goes."""
        return self.main.current_block()


defaults: _Defaults = _Defaults()
blocks.current = lambda: defaults.main.global_block()


def default_main_program() -> Program:
    """The Program that ops are recorded into."""
    return defaults.main


def default_startup_program() -> Program:
    """The Program that parameter initializers are recorded into."""
    return defaults.startup


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Record into these Programs inside the block; startup_program None keeps the present one."""
    for what, program in (("main_program", main_program), ("startup_program", startup_program)):
        if not isinstance(program, Program) and not (what == "startup_program" and program is None):
            raise TypeError(f"program_guard: {what} is a Program, got {type(program).__name__}")
    for program in (main_program, startup_program):
        if program is not None and program.made_elsewhere:
            unique_name.reserve(v.name for v in program.list_vars())
            unique_name.reserve(op.key for op in program.every_op() if isinstance(op, Optimize))
    outer = defaults.main, defaults.startup
    defaults.main = main_program
    if startup_program is not None:
        startup_program.is_startup = True
        defaults.startup = startup_program
    try:
        yield
    finally:
        defaults.main, defaults.startup = outer


@contextmanager
def name_scope(prefix: str | None = None) -> Iterator[None]:
    """Put prefix into the `scope` of operations recorded inside the block; names of variables stay."""
    defaults.scopes.append(prefix or "")
    try:
        yield
    finally:
        defaults.scopes.pop()


@contextmanager
def of_training() -> Iterator[None]:
    """What is recorded inside the block belongs to training: copies for evaluation leave it out."""
    outer, defaults.of_training = defaults.of_training, True
    try:
        yield
    finally:
        defaults.of_training = outer


@contextmanager
def inside(block: Block) -> Iterator[Block]:
    """Record into an inner block."""
    block.program.entered.append(block)
    try:
        yield block
    finally:
        block.program.entered.pop()
