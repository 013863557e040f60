"""Dim strings, "*b m k": pairing each name with the sizes at its place in a shape, and checking that they agree.

"*name" takes as many dims as are left over, "_" and "..." match without being compared, a number must be
met.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.errors import ShapeError


def pair(dims: str, entries: Sequence[Any]) -> list[tuple[str, tuple[Any, ...]]]:
    """[(dim, its entries)] in order.

    Raises ShapeError if there are too few or too many entries.
    """
    names = dims.split()
    spare = len(entries) - len(names)
    variadic = any(n.startswith("*") or n == "..." for n in names)
    if spare < -1 or (spare < 0 and not variadic) or (spare > 0 and not variadic):
        raise ShapeError(f"needs [{', '.join(names)}], got {len(entries)} dims {list(entries)}")
    pairs, at = [], 0
    for name in names:
        take = 1 + spare if name.startswith("*") or name == "..." else 1
        pairs.append((name, tuple(entries[at : at + take])))
        at += take
    return pairs


def check(op_name: str, inputs: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ShapeError unless every named dim has one size over all the inputs that are present."""
    first: dict[str, tuple] = {}
    for tensor, shape in shapes.items():
        dims = inputs.get(tensor)
        if dims is None:
            continue
        try:
            pairs = pair(dims, shape)
        except ShapeError as error:
            raise ShapeError(f"{op_name}: {tensor} {error}") from None
        for dim, size in pairs:
            if dim in ("_", "...") or dim.startswith(("#", "*#", "*_")):
                continue
            if dim.isdigit():
                if size != (int(dim),):
                    raise ShapeError(f"{op_name}: {tensor} {list(shape)} has {size[0]} where [{dims}] needs {dim}")
                continue
            have, where = first.setdefault(dim, (size, f"{tensor} {list(shape)}"))
            if have != size:
                raise ShapeError(
                    f"{op_name}: dim {dim!r} is {_show(have)} in {where} but {_show(size)} in {tensor} {list(shape)}"
                )


def _show(sizes: tuple) -> str:
    return str(sizes[0]) if len(sizes) == 1 else str(list(sizes))
