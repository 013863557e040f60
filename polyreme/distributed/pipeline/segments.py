"""Cuts of a sequence of layers into parts: boundaries by count, by class name, by parameters, or as listed.

Boundaries are a list that starts at 0 and ends at the number of layers: part k is [b[k], b[k + 1]).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from polyreme.errors import ConfigError
from polyreme.mesh.axes import nearest_divisor, nearest_multiples

METHODS = "'uniform', 'parameters', 'layer:<class name>' or a list of boundaries that starts at 0"


def segment(method: Any, parts: int, names: Sequence[str], sizes: Sequence[int] = ()) -> list[int]:
    """Boundaries of `parts` segments of the layers called `names`.

    sizes: number of parameters of each layer, for method 'parameters'. Raises ConfigError for a method it does not know
    and for layers that cannot be cut so.
    """
    if len(names) < parts:
        raise ConfigError(
            f"PipelineLayer: {len(names)} layers cannot make {parts} parts (stages x virtual stages); give at least "
            f"{parts} layers, or fewer stages"
        )
    if isinstance(method, (list, tuple)):
        return explicit(method, parts, len(names))
    if method == "uniform":
        return uniform(len(names), parts)
    if method == "parameters":
        return balanced(sizes, parts)
    if isinstance(method, str) and method.startswith("layer:"):
        return by_name(method.removeprefix("layer:"), parts, names)
    raise ConfigError(f"PipelineLayer: unknown seg_method {method!r}; give {METHODS}")


def uniform(count: int, parts: int) -> list[int]:
    """Boundaries for equal numbers of layers in each part; the remainder goes one each to the last parts.

    >>> uniform(7, 3)
    [0, 2, 4, 7]
    """
    size, left = divmod(count, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + size + (part >= parts - left))
    return bounds


def by_name(pattern: str, parts: int, names: Sequence[str]) -> list[int]:
    """Boundaries for equal numbers, in each part, of layers whose class name contains the pattern (in any case).

    A part ends right after its last such layer; what follows the last of all belongs to the last part.

    >>> by_name("block", 2, ["Embedding", "Block", "Block", "Norm", "Head"])
    [0, 2, 5]
    """
    try:
        matches = [i for i, name in enumerate(names) if re.search(pattern, name, re.IGNORECASE)]
    except re.error as error:
        raise ConfigError(f"PipelineLayer: seg_method 'layer:{pattern}' is not a regular expression: {error}") from None
    if not matches:
        raise ConfigError(
            f"PipelineLayer: seg_method 'layer:{pattern}' matches no layer; the classes are "
            f"{', '.join(dict.fromkeys(names))}"
        )
    if len(matches) % parts:
        raise ConfigError(
            f"PipelineLayer: seg_method 'layer:{pattern}' matches {len(matches)} layers, which do not divide into "
            f"{parts} parts (stages x virtual stages); make it {nearest_multiples(len(matches), parts)} layers, or "
            f"{nearest_divisor(len(matches), parts)} parts"
        )
    each = len(matches) // parts
    return [0, *(matches[k * each - 1] + 1 for k in range(1, parts)), len(names)]


def explicit(bounds: Sequence[Any], parts: int, count: int) -> list[int]:
    """The boundaries given, with the end added if they lack it.

    >>> explicit([0, 3], 2, 5)
    [0, 3, 5]
    """
    whole = [*bounds] if len(bounds) == parts + 1 else [*bounds, count]
    is_whole = all(isinstance(b, int) and not isinstance(b, bool) for b in whole)
    rising = is_whole and all(a < b for a, b in itertools.pairwise(whole))
    if len(whole) != parts + 1 or not rising or whole[0] != 0 or whole[-1] != count:
        raise ConfigError(
            f"PipelineLayer: seg_method {list(bounds)!r} does not cut {count} layers into {parts} parts; give {parts} "
            f"whole numbers that start at 0, rise, and stay below {count}"
        )
    return whole


def balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """Parts of one layer at least, the largest of which is as small as can be.

    >>> balanced([8, 1, 1, 1, 1, 8], 3)
    [0, 1, 5, 6]
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, parts, middle)) <= parts + 1:
            high = middle
        else:
            low = middle + 1
    return _fill(sizes, parts, low)


def _fill(sizes: Sequence[int], parts: int, limit: int) -> list[int]:
    """Boundaries when each part takes layers up to limit, but leaves one for each part that follows."""
    bounds, filled = [0], 0
    for i, size in enumerate(sizes):
        needed = parts - len(bounds)  # parts that must still begin after this one
        if i > bounds[-1] and (filled + size > limit or len(sizes) - i <= needed):
            bounds.append(i)
            filled = 0
        filled += size
    return [*bounds, len(sizes)]
