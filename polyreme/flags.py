"""Every environment variable polyreme reads, typed and documented in one place.

Floor: 0.  Values are read when asked for, so a test or a launcher may set them late.
"""

import os
import re
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
