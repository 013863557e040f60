"""Every environment variable polyreme reads, typed and documented in one place; the flags of set_flags and get_flags.

Values are read when asked for, so a test or a launcher may set them late.
"""

import ast
import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from polyreme.errors import ConfigError, did_you_mean


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
    return cache_home() / "polyreme" / "xla"


def compile_cache_seconds() -> float:
    """POLYREME_COMPILE_CACHE_SECONDS: programs that compile faster than this are not kept in the folder; 0.005."""
    return _float("POLYREME_COMPILE_CACHE_SECONDS", default=0.005)  # loading a program takes 0.003


def compile_cache_bytes() -> int:
    """POLYREME_COMPILE_CACHE_BYTES: how much the folder holds before those used least recently are deleted; 1 GiB."""
    return _int("POLYREME_COMPILE_CACHE_BYTES", low=1) or 1 << 30


def devices() -> dict[str, str]:
    """POLYREME_DEVICES: libraries of devices to register, name=path, with commas between; each process reads it."""
    pairs = [pair.partition("=") for pair in os.environ.get("POLYREME_DEVICES", "").split(",") if pair.strip()]
    for name, _, path in pairs:
        if not name.strip() or not path.strip():
            raise ConfigError(f"POLYREME_DEVICES: {name!r} has no library; write name=path,name=path")
    return {name.strip(): path.strip() for name, _, path in pairs}


def program_bytes() -> int | None:
    """POLYREME_PROGRAM_BYTES: what compiled programs of eager ops may take before some are let go; None, the default:
    3 GiB, or a quarter of the machine's memory where that is less."""
    return _int("POLYREME_PROGRAM_BYTES", low=1)


def cache_home() -> Path:
    """XDG_CACHE_HOME, or ~/.cache: where a user's caches lie."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) if home else Path.home() / ".cache"


def extension_dir() -> Path:
    """POLYREME_EXTENSION_DIR: folder of the libraries that utils.cpp_extension builds."""
    text = os.environ.get("POLYREME_EXTENSION_DIR")
    return Path(text) if text else cache_home() / "polyreme" / "extensions"


def keep_freed() -> bool:
    """POLYREME_KEEP_FREED: let glibc keep freed memory for the next program instead of handing it back; on unless 0."""
    return _bool("POLYREME_KEEP_FREED", default=True)


def lock_timeout() -> float:
    """POLYREME_LOCK_TIMEOUT: seconds after its last heartbeat that a folder locked on another machine is free; 120."""
    seconds = _float("POLYREME_LOCK_TIMEOUT", default=120.0)
    if not seconds > 0:
        raise ConfigError(f"POLYREME_LOCK_TIMEOUT={seconds:g} in the environment: needs a positive number of seconds")
    return seconds


def loader_stall() -> float:
    """POLYREME_LOADER_STALL: seconds without a sample read after which a loader worker counts as hung, where the
    DataLoader has no timeout of its own; 1800, 0 for never."""
    return _float("POLYREME_LOADER_STALL", default=1800.0)


def job_token() -> str:
    """POLYREME_JOB_TOKEN: what processes of a job show each other; a launcher makes one up for those it starts."""
    return os.environ.get("POLYREME_JOB_TOKEN", "")


def faults() -> str:
    """FAULTS: named points at which to fail, for tests: "ckpt.rename:kill@2,data.worker:hang@17"."""
    return os.environ.get("FAULTS", "")


def trainers_num() -> int:
    """PADDLE_TRAINERS_NUM: how many processes train together; 1 unless a launcher says otherwise."""
    return _int("PADDLE_TRAINERS_NUM", low=1) or 1


def trainer_id() -> int:
    """PADDLE_TRAINER_ID: the rank of this process among them, from 0."""
    return _int("PADDLE_TRAINER_ID", low=0) or 0


def trainers_given() -> bool:
    """Whether a launcher set PADDLE_TRAINERS_NUM."""
    return bool(os.environ.get("PADDLE_TRAINERS_NUM"))


def master() -> str | None:
    """PADDLE_MASTER: host:port at which rank 0 meets the other ranks; else the first of PADDLE_TRAINER_ENDPOINTS."""
    text = os.environ.get("PADDLE_MASTER")
    endpoints = trainer_endpoints()
    return text or (endpoints[0] if endpoints else None)


def trainer_endpoints() -> list[str]:
    """PADDLE_TRAINER_ENDPOINTS: host:port of every rank, separated by commas."""
    return [e for e in os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",") if e]


def current_endpoint() -> str:
    """PADDLE_CURRENT_ENDPOINT: host:port of this rank; empty without a launcher."""
    return os.environ.get("PADDLE_CURRENT_ENDPOINT", "")


def training_role() -> str:
    """TRAINING_ROLE: what a launcher says this process is: TRAINER, or the PSERVER of a parameter-server job."""
    return os.environ.get("TRAINING_ROLE", "TRAINER").upper()


def server_endpoints() -> list[str]:
    """PADDLE_PSERVERS_IP_PORT_LIST: host:port of every parameter server, separated by commas."""
    return [e for e in os.environ.get("PADDLE_PSERVERS_IP_PORT_LIST", "").split(",") if e]


def selected_devices() -> list[int] | None:
    """FLAGS_selected_gpus: indexes of the accelerators this process drives, separated by commas; None for all."""
    text = os.environ.get("FLAGS_selected_gpus", "")  # noqa: SIM112  (the launcher's spelling)
    if not text:
        return None
    if not all(part.isdigit() for part in text.split(",")):
        raise ConfigError(f"FLAGS_selected_gpus={text!r} in the environment: needs device indexes such as 0,1")
    return [int(part) for part in text.split(",")]


def cluster() -> str | None:
    """The scheduler whose variables describe a job of several processes (SLURM, Open MPI, Kubernetes), or None.

    jax.distributed reads the rest itself.
    """
    if (_int("SLURM_NTASKS", low=1) or 1) > 1 and "SLURM_STEP_NODELIST" in os.environ:
        return "SLURM"
    if (_int("OMPI_COMM_WORLD_SIZE", low=1) or 1) > 1:
        return "Open MPI"
    return "Kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ else None


def init_timeout() -> int:
    """POLYREME_INIT_TIMEOUT: seconds that the ranks of a job may take to find each other; 120."""
    return _int("POLYREME_INIT_TIMEOUT", low=1) or 120


def heartbeat_timeout() -> int:
    """POLYREME_HEARTBEAT_TIMEOUT: seconds of silence after which jax itself ends the ranks that are left; 100."""
    return _int("POLYREME_HEARTBEAT_TIMEOUT", low=5) or 100


def check_collectives() -> bool | None:
    """POLYREME_CHECK_COLLECTIVES: compare over all ranks what each calls before every collective. None, the default:
    between processors, where it costs little beside the collective; elsewhere at the first call of each kind and shape.
    """
    return _bool("POLYREME_CHECK_COLLECTIVES", default=False) if "POLYREME_CHECK_COLLECTIVES" in os.environ else None


def store() -> str | None:
    """POLYREME_STORE: host:port of the launcher's store, where the watchdogs of all ranks meet; None without one."""
    return os.environ.get("POLYREME_STORE") or None


def attempt() -> int:
    """POLYREME_ATTEMPT: how often the launcher has started this job again, from 0."""
    return _int("POLYREME_ATTEMPT", low=0) or 0


def log_dir() -> Path | None:
    """PADDLE_LOG_DIR: folder of the launcher's logs, where a watchdog puts stacks; None for the current folder."""
    text = os.environ.get("PADDLE_LOG_DIR")
    return Path(text) if text else None


def heartbeat() -> float:
    """POLYREME_HEARTBEAT: seconds between two signs of life of a rank; 1."""
    return _float("POLYREME_HEARTBEAT", default=1.0)


def watchdog_timeout() -> float:
    """POLYREME_WATCHDOG_TIMEOUT: seconds without progress that make a rank count as hung; 1800: it may be compiling."""
    return _float("POLYREME_WATCHDOG_TIMEOUT", default=1800.0)


def stop_grace() -> float:
    """POLYREME_STOP_GRACE: seconds that ranks have to save after SIGTERM before the launcher kills them; 300."""
    return _float("POLYREME_STOP_GRACE", default=300.0)


def restart_backoff() -> float:
    """POLYREME_RESTART_BACKOFF: seconds before the first restart, twice as long before each later one; 1."""
    return _float("POLYREME_RESTART_BACKOFF", default=1.0)


def translator_verbosity() -> int:
    """TRANSLATOR_VERBOSITY: how much capturing logs, as jit.set_verbosity; 0."""
    return _int("TRANSLATOR_VERBOSITY", low=0) or 0


def translator_code_level() -> int:
    """TRANSLATOR_CODE_LEVEL: after which step converted code is logged, as jit.set_code_level; 0 for none."""
    return _int("TRANSLATOR_CODE_LEVEL", low=0) or 0


def debug() -> bool:
    """POLYREME_DEBUG: show tracebacks where the command line would print one line."""
    return _bool("POLYREME_DEBUG", default=False)


_log = logging.getLogger("polyreme.flags")
_ARTICLE: dict[type, str] = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


class Flag:
    """A setting of the FLAGS_ family: from the environment variable of its name until set_flags changes it.

    default tells its type. changed: called, without arguments, after each change; what depends on the flag adds to it.
    has_effect: False for one of PaddlePaddle that nothing here reads.
    """

    def __init__(self, name: str, default: bool | int | float | str, meaning: str, *, has_effect: bool = True) -> None:
        self.name = name
        self.default = default
        self.meaning = meaning
        self.has_effect = has_effect
        self.changed: list[Callable[[], None]] = []
        self._set: bool | int | float | str | None = None

    @property
    def value(self) -> bool | int | float | str:
        """What set_flags gave, else the environment, else the default."""
        if self._set is not None:
            return self._set
        text = os.environ.get(self.name)
        return self.default if not text else self.read(text)

    def set(self, value: object) -> None:
        """Change it; ConfigError for a value of another type. A flag without effect says so the first time."""
        if not self.has_effect and self._set is None:
            _log.warning("set_flags: %s has no effect here", self.name)
        self._set = self.read(value)
        for tell in self.changed:
            tell()

    def read(self, value: object) -> bool | int | float | str:
        """value as the flag's type: numbers and their spellings are taken, as the environment has only text."""
        kind = type(self.default)
        words = {"true": True, "1": True, "false": False, "0": False}
        try:
            if kind is bool:
                return words[str(value).lower()] if isinstance(value, str) else {0: False, 1: True}[value]  # type: ignore[index]
            if kind is str and not isinstance(value, str):
                raise TypeError(value)
            return kind(value)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{self.name}={value!r}: needs {_ARTICLE[kind]}; {self.meaning}") from None


FLAGS: dict[str, Flag] = {
    flag.name: flag
    for flag in [
        Flag("FLAGS_check_nan_inf", False, "check every op's values, forward and backward, for NaN and infinity, and "
             "every index of captured code for its range; see docs/numerics.md"),
        Flag("FLAGS_fuse_captured", True, "let captured code and Executors make one call of several that fit a "
             "pattern; see docs/capture.md"),
        Flag("FLAGS_check_nan_inf_level", 0, "0: what FLAGS_check_nan_inf finds is raised; 1 and above: it is logged"),
    ]
}  # fmt: skip
"""Every flag that something here reads."""


def set_flags(flags: Mapping[str, object]) -> None:
    """Change flags by name: set_flags({"FLAGS_check_nan_inf": True}).

    Flags of PaddlePaddle that mean nothing here are kept, and a line is logged when one is first set. Raises
    ConfigError for an unknown name or a value of another type; then nothing is changed.
    """
    if not isinstance(flags, Mapping):
        raise ConfigError(f"set_flags takes a dict of names and values, got {type(flags).__name__}")
    for name, value in flags.items():
        _flag(name).read(value)
    for name, value in flags.items():
        _flag(name).set(value)


def get_flags(flags: str | Sequence[str]) -> dict[str, bool | int | float | str]:
    """The values of one flag or several, by name. Raises ConfigError for an unknown one."""
    return {name: _flag(name).value for name in ([flags] if isinstance(flags, str) else flags)}


def _flag(name: str) -> Flag:
    flag = FLAGS.get(name) or _without_effect().get(name)
    if flag is None:
        raise ConfigError(f"{name!r} is no flag here{did_you_mean(name, [*FLAGS, *_without_effect()])}")
    return flag


@functools.cache
def _without_effect() -> dict[str, Flag]:
    """PaddlePaddle's flags that nothing here reads, by name."""
    flags: dict[str, Flag] = {}
    for line in (Path(__file__).parent / "paddle_flags.txt").read_text(encoding="utf-8").splitlines()[1:]:
        default, _, names = line.partition(": ")
        for name in names.split():
            flag = Flag(f"FLAGS_{name}", ast.literal_eval(default), "it has no effect here", has_effect=False)
            flags[flag.name] = flag
    return flags


def _int(name: str, low: int) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdigit() or int(text) < low:
        raise ConfigError(f"{name}={text!r} in the environment: needs a whole number of at least {low}")
    return int(text)


def _float(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) or float(text) <= 0:
        raise ConfigError(f"{name}={text!r} in the environment: needs seconds, a number above 0")
    return float(text)


def _bool(name: str, default: bool) -> bool:
    text = os.environ.get(name)
    if not text:
        return default
    if text.lower() not in ("0", "1", "true", "false"):
        raise ConfigError(f"{name}={text!r} in the environment: needs 0 or 1")
    return text.lower() in ("1", "true")
