"""What the system says of the machine's memory; loads nothing."""

from __future__ import annotations

import re
from pathlib import Path


def memory_facts() -> dict[str, int]:
    """What Linux says of the machine's memory, in bytes, by its names for it; empty elsewhere."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return {}
    return {name: int(kib) << 10 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}


def available_bytes() -> int | None:
    """Bytes that may be taken without swapping; None where the system does not say."""
    return memory_facts().get("MemAvailable")
