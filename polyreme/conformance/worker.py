"""A process that checks a device: one name a line on stdin, one JSON line on stdout for each.

python -m polyreme.conformance.worker DEVICE [COMPILE] [HELLO]; with COMPILE rows are compiled for the device, which is
not here, and not run; with HELLO it says first what the device is. Its own process, so that a row that ends it is that
row's failure and no other's.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Collection
from typing import Any, TextIO

import jax

from polyreme.conformance import compiling
from polyreme.conformance.arithmetic import factor_bits, for_device
from polyreme.conformance.case import Case, NothingRaised, check_bad, check_row
from polyreme.conformance.checks import CHECKS, Skip
from polyreme.conformance.rows import ROWS, is_first
from polyreme.core.devices.place import CPUPlace, Place, set_device
from polyreme.errors import ConfigError, DeviceError


def describe(place: Place) -> dict[str, Any]:
    """Facts of the device, of its platform and of the versions here."""
    device: Any = place.device()
    return {
        "device": f"{place.platform}:{place.index}",
        "kind": device.device_kind,
        "platform": device.platform,
        "platform_version": str(device.client.platform_version).split("\n")[0],
        "devices": device.client.device_count(),
        "factor_bits": factor_bits(place.platform),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
    }


def outcome(name: str, place: Place) -> dict[str, Any]:
    """What came of a check, or of the row of this id."""
    start = time.perf_counter()
    answer: dict[str, Any] = {"name": name, "status": "passed", "detail": ""}
    set_device(place)
    try:
        if name in CHECKS:
            answer["detail"] = CHECKS[name](place) or ""
        else:
            case = for_device(_ROWS[name], factor_bits(place.platform))
            check_row(case, first=is_first(_ROWS[name]), bad=False)
            answer["detail"] = _refuses_bad_input(case, place)
    except Skip as reason:
        answer |= {"status": "skipped", "detail": str(reason)}
    except Exception as error:  # noqa: BLE001  (what fails is what is asked)
        answer |= {"status": "failed", "detail": _describe_error(error)}
    return answer | {"seconds": round(time.perf_counter() - start, 3)}


_ROWS = {case.id: case for case in ROWS}


def _refuses_bad_input(case: Case, place: Place) -> str:
    """Check the documented error; one about values need not be raised where reading them would stall the device."""
    if not case.bad:
        return ""
    try:
        check_bad(case)
    except NothingRaised:
        if place.device().platform == "cpu":
            raise
        set_device(CPUPlace())
        check_bad(case)
        return "bad values are refused on the processor alone"
    return ""


def _describe_error(error: BaseException) -> str:
    """The error in a few lines, with the place in the checks where it was met."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "conformance" in f.filename]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' | '.join(lines[:8])[:700]}{where}"


def serve(device: str, words: Collection[str], names: TextIO, answers: TextIO) -> None:
    """Answer until the names end. A device that is not there ends the process with the error's message on stderr."""
    try:
        checked = compiling.Target.named(device) if "COMPILE" in words else set_device(device)
        facts = None
        if "HELLO" in words:
            facts = checked.describe() if isinstance(checked, compiling.Target) else describe(checked)
    except (ConfigError, DeviceError) as error:
        sys.exit(str(error))
    if facts is not None:
        answers.write(json.dumps(facts) + "\n")
        answers.flush()
    for line in names:
        name = line.strip()
        if isinstance(checked, compiling.Target):
            answer = compiling.outcome(_ROWS[name], checked)
        else:
            answer = outcome(name, checked)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    serve(sys.argv[1], sys.argv[2:], sys.stdin, stream)
