"""Logging of captures, and of the code that control flow is converted into."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from polyreme import flags
from polyreme.errors import ConfigError

log = logging.getLogger("polyreme.jit")
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _Told:
    """code: after which step of the conversion its code is shown, 0 for none; a number above the steps is the last.
    out: what writes to standard output, for the log ("log") and the code ("code")."""

    def __init__(self) -> None:
        self.code = flags.translator_code_level()
        self.out: dict[str, logging.Handler] = {}
        self.forget: Callable[[], None] = lambda: None

    def write_to_stdout(self, what: str, wanted: bool) -> None:
        old = self.out.pop(what, None)
        if old is not None:
            log.removeHandler(old)
        if wanted:
            handler = self.out[what] = logging.StreamHandler(sys.stdout)
            handler.addFilter(lambda record: (getattr(record, "is_code", False)) is (what == "code"))
            log.addHandler(handler)


told: _Told = _Told()


def set_verbosity(level: int = 0, also_to_stdout: bool = False) -> None:
    """Set the verbosity of the logger polyreme.jit: 0 warnings, 1 also why each function is captured, 2 and above also
    every function whose control flow is converted. TRANSLATOR_VERBOSITY in the environment says the same.

    also_to_stdout: write it to standard output too. Raises ConfigError for a level that is no number from 0 on.
    """
    log.setLevel(_LEVELS[min(_check("set_verbosity", level), 2)])
    told.write_to_stdout("log", also_to_stdout)


def set_code_level(level: int = 100, also_to_stdout: bool = False) -> None:
    """Log the code that functions are converted into: after step number `level` of the conversion, after the last by
    default; 0 for none. Functions converted before are converted, and shown, again. TRANSLATOR_CODE_LEVEL in the
    environment says the same.

    also_to_stdout: write it to standard output too. Raises ConfigError for a level that is no number from 0 on.
    """
    told.code = _check("set_code_level", level)
    told.write_to_stdout("code", also_to_stdout)
    told.forget()


def show_code(name: str, step: int, last: int, text: Callable[[], str]) -> None:
    """Log the code after a step of the conversion, if it was asked for."""
    if told.code and step == min(told.code, last):
        # whatever level the log has: it was asked for
        record = log.makeRecord(
            log.name, logging.INFO, __file__, 0, "%s after step %d of %d:\n%s", (name, step, last, text()), None,
            extra={"is_code": True},
        )  # fmt: skip
        log.handle(record)


def _check(what: str, level: object) -> int:
    if not isinstance(level, int) or level < 0:
        raise ConfigError(f"{what}: level={level!r}; give a number from 0 on")
    return level


if flags.translator_verbosity():
    set_verbosity(flags.translator_verbosity())
