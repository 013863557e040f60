"""Whether a file still says what a function of it was compiled from: files are edited while their code runs."""

from __future__ import annotations
import __future__

import ast
import functools
import importlib.machinery
import linecache
import os
import time
import types
import warnings
from collections.abc import Iterator

_LOADED = time.time()
# what compile() may have been told beside the text: a notebook's cell may await at its top level
_FUTURE = __future__.annotations.compiler_flag
_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class SourceChangedError(ValueError):
    """The text at a function's lines is not the text that it was compiled from."""


def check_source(fn: types.FunctionType) -> None:
    """Raise SourceChangedError unless compiling the text that fn's lines would be read from gives fn's code again.

    Where a loader rewrites what it loads, as pytest's does with asserts, text and code differ at any time: there
    a file that was not written to since this process came here is taken at its word.
    """
    code = fn.__code__
    file = code.co_filename
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file, fn.__globals__))
    if not text or (_is_rewritten(fn) and not _is_newer(file)) or code in _codes(text, code.co_flags & _FUTURE):
        return
    raise SourceChangedError(
        f"{file} has changed since it was loaded, and its lines are no longer those that run; start the process again"
    )


def _is_rewritten(fn: types.FunctionType) -> bool:
    loader = fn.__globals__.get("__loader__")
    return loader is not None and type(loader) is not importlib.machinery.SourceFileLoader


def _is_newer(file: str) -> bool:
    try:
        facts = os.stat(file)
    except OSError:  # a notebook's cell, a member of an archive
        return True
    # ctime too: copies and archives may bring an older mtime
    return max(facts.st_mtime, facts.st_ctime) >= _LOADED


@functools.lru_cache(maxsize=32)
def _codes(text: str, flags: int) -> frozenset[types.CodeType]:
    """Code of every function in a file's text; none if it is no Python any more.

    10 us of processor time a line of text.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown when it was loaded
        try:
            return frozenset(code_within(compile(text, "", "exec", flags=flags | _AWAIT, dont_inherit=True)))
        except (SyntaxError, ValueError):
            return frozenset()


def code_within(code: types.CodeType) -> Iterator[types.CodeType]:
    """code, and that of the functions written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_within(constant)
