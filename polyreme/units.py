"""Numbers with units, as a person reads them."""

from __future__ import annotations


def bytes_text(nbytes: float) -> str:
    """Bytes, in the unit a person would choose.

    >>> bytes_text(96), bytes_text(1536), bytes_text(3 * 2**30)
    ('96 B', '1.5 KiB', '3.0 GiB')
    """
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if abs(nbytes) < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"
