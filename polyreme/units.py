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


def seconds_text(seconds: float) -> str:
    """Seconds to three digits, in the unit a person would choose.

    >>> seconds_text(2.32e-5), seconds_text(0.57), seconds_text(6.1), seconds_text(1234)
    ('23.2 us', '570 ms', '6.10 s', '1,234 s')
    """
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1 or not seconds:
            return f"{seconds * factor:#.3g} {unit}".replace(". ", " ")
    return f"{seconds * 1e6:#.3g} us".replace(". ", " ")
