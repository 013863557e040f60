"""Names for layers: a counter for each prefix, "linear_0", "linear_1", and guards that start over.

Floor: 1.  Parameters are named after their layer, and an optimizer's state after its parameters: a second copy of a
model built under `guard()` has the same names, so that state saved from the first fits it.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class _Counters:
    """The counters in force."""

    __slots__ = ("counts", "prefix")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.prefix = ""


_current = _Counters()


def generate(key: str, kind: str = "") -> str:
    """The next name for a prefix. kind: names of another kind are counted apart, as results of ops are.

    >>> with guard("doc/"):
    ...     generate("linear"), generate("linear")
    ('doc/linear_0', 'doc/linear_1')
    """
    counted = f"{kind}/{key}"
    count = _current.counts[counted] = _current.counts.get(counted, -1) + 1
    return f"{_current.prefix}{key}_{count}"


def reserve(names: Iterable[str]) -> None:
    """Count on from names that were made elsewhere, so that none of them is generated again.

    >>> with guard():
    ...     reserve(["linear_2.w_0"])
    ...     generate("linear")
    'linear_3'
    """
    counts = _current.counts
    for name in names:
        for found in re.finditer(r"_(\d{1,9})(?!\d)", name.removeprefix(_current.prefix)):
            for kind in ("", "op"):
                counted = f"{kind}/{found.string[: found.start()]}"
                counts[counted] = max(counts.get(counted, -1), int(found[1]))


@contextmanager
def guard(new_generator: str | None = None) -> Iterator[None]:
    """Count from zero inside the block, with new_generator in front of every name."""
    outer = _current.counts, _current.prefix
    _current.counts, _current.prefix = {}, new_generator or ""
    try:
        yield
    finally:
        _current.counts, _current.prefix = outer
