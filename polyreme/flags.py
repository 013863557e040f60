"""Every environment variable polyreme reads, typed and documented in one place.

Floor: 0.  Values are read when asked for, so a test or a launcher may set them late.
"""

import os
from pathlib import Path

from polyreme.errors import ConfigError


def cpu_num() -> int | None:
    """CPU_NUM: how many virtual CPU devices to make; None leaves XLA's default of one."""
    return _int("CPU_NUM", low=1)


def x64() -> bool:
    """POLYREME_X64: real int64 and float64, on unless set to 0."""
    return _bool("POLYREME_X64", default=True)


def compile_cache() -> Path | None:
    """POLYREME_COMPILE_CACHE: folder of the persistent compile cache; "0" turns it off."""
    text = os.environ.get("POLYREME_COMPILE_CACHE")
    if text == "0":
        return None
    if text:
        return Path(text)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "polyreme" / "xla"


def keep_freed() -> bool:
    """POLYREME_KEEP_FREED: let glibc keep freed memory for the next program instead of handing it back; on unless 0."""
    return _bool("POLYREME_KEEP_FREED", default=True)


def faults() -> str:
    """FAULTS: named points at which to fail, for tests: "ckpt.rename:kill@2,data.worker:hang@17"."""
    return os.environ.get("FAULTS", "")


def trainers_num() -> int:
    """PADDLE_TRAINERS_NUM: how many processes train together; 1 unless a launcher says otherwise."""
    return _int("PADDLE_TRAINERS_NUM", low=1) or 1


def trainer_id() -> int:
    """PADDLE_TRAINER_ID: the rank of this process among them, from 0."""
    return _int("PADDLE_TRAINER_ID", low=0) or 0


def debug() -> bool:
    """POLYREME_DEBUG: show tracebacks where the command line would print one line."""
    return _bool("POLYREME_DEBUG", default=False)


def _int(name: str, low: int) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdigit() or int(text) < low:
        raise ConfigError(f"{name}={text!r} in the environment: needs a whole number of at least {low}")
    return int(text)


def _bool(name: str, default: bool) -> bool:
    text = os.environ.get(name)
    if not text:
        return default
    if text.lower() not in ("0", "1", "true", "false"):
        raise ConfigError(f"{name}={text!r} in the environment: needs 0 or 1")
    return text.lower() in ("1", "true")
