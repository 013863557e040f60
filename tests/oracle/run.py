"""Makes every call on both sides, each in a process of its own, and goes on after a call that ends one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.oracle.calls import Call

SIDE = Path(__file__).with_name("side.py")
AT_ONCE = 400  # calls of one process: each program that it compiles takes mappings, of which there are 65,530
PATIENCE = 120.0  # seconds for one call, the start of the process and a busy machine included
PADDLES = 20.0  # the same for PaddlePaddle, which compiles nothing, and where some calls never end
# one core, and a compiler told to compile fast: every call is run once
ENVIRONMENT = {
    "CPU_NUM": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "OMP_NUM_THREADS": "1",
    "GLOG_minloglevel": "3",
}
CRASHED = {"error": "the process ended in this call"}
HUNG = {"error": "no result in time"}


def outcomes(python: str, framework: str, calls: list[Call], folder: Path) -> list[dict[str, Any]]:
    """What came of each call in one framework; files are kept in folder under the framework's name."""
    calls_path, results = folder / f"{framework}.calls", folder / f"{framework}.results"
    calls_path.write_text("".join(json.dumps(c.message()) + "\n" for c in calls))
    results.write_text("")
    while (done := len(results.read_text().splitlines())) < len(calls):
        end = min(done + AT_ONCE, len(calls))
        command = [python, str(SIDE), framework, str(calls_path), str(results), str(done), str(end)]
        with subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stderr=subprocess.PIPE, text=True) as process:
            hung = not _ends(process, results, PADDLES if framework == "paddle" else PATIENCE)
            said = process.stderr.read() if process.stderr else ""
        after = len(results.read_text().splitlines())
        if after == 0 and process.returncode > 0:
            raise RuntimeError(f"{python} does not run {SIDE.name}: {said[-2000:]}")
        if after < end:
            with results.open("a") as out:
                out.write(json.dumps(HUNG if hung else CRASHED) + "\n")
    return [json.loads(line) for line in results.read_text().splitlines()]


def _ends(process: subprocess.Popen, results: Path, patience: float) -> bool:
    """Wait for the process; False if it was ended because no line was written for `patience` seconds."""
    size, since = -1, time.monotonic()
    while time.monotonic() - since < patience:
        try:
            process.wait(timeout=1)
            return True
        except subprocess.TimeoutExpired:
            if (now := results.stat().st_size) != size:
                size, since = now, time.monotonic()
    process.kill()
    return False


def both(paddle_python: str, calls: list[Call], folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(polyreme's outcome, PaddlePaddle's) of each call."""
    ours = outcomes(sys.executable, "polyreme", calls, folder)
    return list(zip(ours, outcomes(paddle_python, "paddle", calls, folder), strict=True))
