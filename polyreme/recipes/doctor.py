"""Is this machine ready: versions, devices, memory, disk, caches, optional packages, each failure with its remedy."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyreme import flags
from polyreme.errors import ConfigError
from polyreme.system_memory import memory_facts
from polyreme.units import bytes_text

_REQUIRED = ("jax", "jaxlib", "numpy", "safetensors", "xxhash", "pydantic", "tokenizers")
_OPTIONAL = {"tensorboardX": "logs", "matplotlib": "logs", "pillow": "vision"}
_SHOWN = re.compile(r"(POLYREME|JAX|XLA|TF_CPP|CUDA|NVIDIA|NCCL|ROCR?|HIP|TPU|LIBTPU|SLURM|HF|OMP)_?\w*|CPU_NUM|FAULTS")
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MIN_MEMORY_BYTES = 2 << 30  # importing the compiler and compiling a small step takes about 1 GiB
_MIN_DISK_BYTES = 1 << 30  # a few checkpoints of a small model and the compile cache
_MIN_SHM_BYTES = 64 << 20  # one batch of images per loader worker
_MIN_JAX = (0, 10, 2)

# Run a small program on the first device: a backend may list devices that it cannot use.
_ASK_DEVICES = """
import json, polyreme.core, jax, jax.numpy as jnp
found = jax.devices()
answer = float(jax.jit(lambda x: x @ x)(jnp.ones((8, 8), jnp.float32))[0, 0])
stats = found[0].memory_stats() or {}
print("\\n" + json.dumps({"platform": found[0].platform, "kind": found[0].device_kind, "count": len(found),
    "memory_bytes": stats.get("bytes_limit"), "answer": answer}))
"""


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, what was found, and what to do if it is not well."""

    name: str
    is_ok: bool
    finding: str
    fix: str = ""
    is_required: bool = True

    @property
    def is_failure(self) -> bool:
        """Whether polyreme cannot be relied on until this is mended."""
        return self.is_required and not self.is_ok


def examine(timeout: float = 60.0) -> list[Check]:
    """Every check, in the order to read them. timeout is for the devices, in seconds."""
    looks: list[Callable[[], Iterable[Check]]] = [
        _python,
        _packages,
        lambda: [_devices(timeout)],
        _memory,
        _compile_cache,
        _shared_memory,
        _disk,
        _optional_packages,
        _environment,
    ]
    return [check for look in looks for check in look()]


def as_text(checks: list[Check]) -> str:
    """The findings as lines for a person: "ok", "FAIL" with the fix below it, or "-" for an extra that is missing."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        mark = "ok  " if check.is_ok else "FAIL" if check.is_required else "-   "
        lines.append(f"{mark} {check.name:<{width}}  {check.finding}")
        if not check.is_ok and check.fix:
            lines.append(f"     {'':<{width}}  fix: {check.fix}")
    failures = sum(check.is_failure for check in checks)
    lines.append("ready" if not failures else f"{failures} of {len(checks)} checks failed")
    return "\n".join(lines)


def as_json(checks: list[Check]) -> str:
    """The findings as one JSON object: {"ok": bool, "checks": [...]}."""
    facts: dict[str, Any] = {"ok": not any(check.is_failure for check in checks)}
    return json.dumps(facts | {"checks": [asdict(check) for check in checks]}, indent=1)


def mask(name: str, value: str) -> str:
    """The value of an environment variable with secrets hidden: by the variable's name, and in the user part of a URL.

    >>> mask("HF_TOKEN", "abcdef"), mask("POLYREME_X", "http://me:pw@host/")
    ('***', 'http://***@host/')
    """
    return "***" if _SECRET_NAME.search(name) else _SECRET_IN_URL.sub("***", value)


def _python() -> list[Check]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return [Check("python", sys.version_info >= (3, 11), found, "install Python 3.11 or newer")]


def _packages() -> list[Check]:
    return [_package("jax", _MIN_JAX), *(_package(name) for name in _REQUIRED[1:])]


def _package(name: str, least: tuple[int, ...] = ()) -> Check:
    version = _version(name)
    fix = f"pip install --upgrade {name}"
    if version is None:
        return Check(name, False, "not installed", fix)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < least:
        return Check(name, False, f"{version} is older than {'.'.join(map(str, least))}", fix)
    return Check(name, True, version)


def _devices(timeout: float) -> Check:
    command = [sys.executable, "-c", _ASK_DEVICES]
    fix = "JAX_PLATFORMS=cpu polyreme doctor tells whether the CPU works; if so, reinstall jax for your accelerator"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Check("devices", False, f"no answer in {timeout:g} s", f"the backend hangs: {fix}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Check("devices", False, mask("", last), fix)
    answer = (done.stdout.strip().splitlines() or ["nothing"])[-1]
    try:
        facts = json.loads(answer)
    except json.JSONDecodeError:
        return Check("devices", False, f"unreadable answer: {answer}", fix)
    memory = f", {bytes_text(facts['memory_bytes'])} each" if facts["memory_bytes"] else ""
    found = f"{facts['count']} x {facts['platform']} ({facts['kind']}{memory})"
    is_right = facts["answer"] == 8.0  # eight ones times eight ones
    return Check("devices", is_right, found if is_right else f"{found}: 8 x 1 x 1 gave {facts['answer']}", fix)


def _memory() -> list[Check]:
    facts = memory_facts()
    if not facts:
        return [Check("memory", True, "this system does not say")]
    free, total = facts["MemAvailable"], facts["MemTotal"]
    found = f"{bytes_text(free)} free of {bytes_text(total)}"
    return [Check("memory", free >= _MIN_MEMORY_BYTES, found, f"free at least {bytes_text(_MIN_MEMORY_BYTES)}")]


def _compile_cache() -> list[Check]:
    folder = flags.compile_cache()
    if folder is None:
        return [Check("compile cache", True, "turned off by POLYREME_COMPILE_CACHE=0")]
    problem = _write_problem(folder)
    fix = "set POLYREME_COMPILE_CACHE to a folder that can be written, or to 0 to do without"
    return [Check("compile cache", problem is None, f"{folder}: {problem or 'can be written'}", fix)]


def _shared_memory() -> list[Check]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        is_linux = sys.platform == "linux"
        return [Check("shared memory", not is_linux, "no /dev/shm", "mount tmpfs on /dev/shm, or use num_workers=0")]
    free = shutil.disk_usage(folder).free
    problem = _write_problem(folder) or (None if free >= _MIN_SHM_BYTES else "too small")
    found = f"/dev/shm: {bytes_text(free)} free{f', {problem}' if problem else ''}"
    fix = "give the container more (docker run --shm-size=1g), or set data.num_workers=0"
    return [Check("shared memory", problem is None, found, fix)]


def _disk() -> list[Check]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    problem = _write_problem(here) or (None if free >= _MIN_DISK_BYTES else "too little")
    found = f"{here}: {bytes_text(free)} free{f', {problem}' if problem else ''}"
    return [Check("disk", problem is None, found, "run from, or set output= to, a folder with space you may write to")]


def _optional_packages() -> list[Check]:
    checks = []
    for name, extra in _OPTIONAL.items():
        version = _version(name)
        fix = f"pip install polyreme[{extra}]"
        checks.append(Check(name, version is not None, version or "not installed", fix, is_required=False))
    return checks


def _environment() -> list[Check]:
    shown = {name: mask(name, value) for name, value in sorted(os.environ.items()) if _SHOWN.fullmatch(name)}
    try:
        for read in (flags.cpu_num, flags.x64, flags.debug):
            read()
    except ConfigError as error:
        return [Check("environment", False, str(error), "unset it or give it a value it takes")]
    return [Check("environment", True, " ".join(f"{name}={value}" for name, value in shown.items()) or "nothing set")]


def _write_problem(folder: Path) -> str | None:
    """Why a file cannot be written in the folder, made if missing; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".polyreme-doctor-"):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
