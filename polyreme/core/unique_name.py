"""Names for layers: a counter for each prefix, "linear_0", "linear_1", and guards that start over.

Parameters are named after their layer, and an optimizer's state after its parameters: a second copy of a
model built under `guard()` has the same names, so that state saved from the first fits it.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from polyreme.errors import ConfigError


class _Counters:
    """Counters by name, and what stands in front of every name."""

    __slots__ = ("counts", "prefix")

    def __init__(self, counts: dict[str, int], prefix: str) -> None:
        self.counts = counts
        self.prefix = prefix


generator: _Counters = _Counters({}, "")
"""The counters in force; a copy of them is what guard takes to count on from there."""


def generate(key: str, kind: str = "") -> str:
    """The next name for a prefix. kind: names of another kind are counted apart, as results of ops are.

    >>> with guard("doc/"):
    ...     generate("linear"), generate("linear")
    ('doc/linear_0', 'doc/linear_1')
    """
    counted = f"{kind}/{key}"
    count = generator.counts[counted] = generator.counts.get(counted, -1) + 1
    return f"{generator.prefix}{key}_{count}"


def reserve(names: Iterable[str]) -> None:
    """Count on from names that were made elsewhere, so that none of them is generated again.

    >>> with guard():
    ...     reserve(["linear_2.w_0"])
    ...     generate("linear")
    'linear_3'
    """
    counts = generator.counts
    for name in names:
        for found in re.finditer(r"_(\d{1,9})(?!\d)", name.removeprefix(generator.prefix)):
            for kind in ("", "op"):
                counted = f"{kind}/{found.string[: found.start()]}"
                counts[counted] = max(counts.get(counted, -1), int(found[1]))


def switch(new_generator: str | _Counters | None = None, new_para_name_checker: None = None) -> tuple[_Counters, None]:
    """Count in other counters from now on: new ones, with a prefix if one is given, or those that switch returned.

    Returns the ones before, and None in the place of Paddle's checker of parameter names: there is none here, and
    ConfigError for one that is given.
    """
    if new_para_name_checker is not None:
        raise ConfigError("unique_name.switch: there is no checker of parameter names here; leave it out")
    before = _Counters(generator.counts, generator.prefix)
    wanted = new_generator if isinstance(new_generator, _Counters) else _Counters({}, new_generator or "")
    generator.counts, generator.prefix = wanted.counts, wanted.prefix
    return before, None


@contextmanager
def guard(new_generator: str | _Counters | None = None) -> Iterator[None]:
    """Count from zero inside the block, with new_generator in front of every name; or in counters from switch."""
    outer, _ = switch(new_generator)
    try:
        yield
    finally:
        switch(outer)
