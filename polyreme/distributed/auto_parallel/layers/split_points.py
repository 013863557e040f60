"""Cuts of a model into pipeline stages: SplitPoint, and the stage of every layer by a pp_config.

The cut is told by meshes: a layer of stage s has its parameters on the s-th slice of the mesh along "pp".
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.errors import ConfigError
from polyreme.nn.layer import Layer


class SplitPoint(enum.Enum):
    """The side of a layer at which the model is cut."""

    BEGINNING = 0
    END = 1


def stages_of_layers(model: Layer, split_spec: Any, num_stages: int) -> dict[str, int | None]:
    """The stage of every layer by its name, the model itself ("") included; None for a layer whose sublayers are on
    several.

    split_spec: {layer: SplitPoint}, as many as cuts are needed, or the name of a list of layers (or several such), that
    is divided evenly, earlier stages getting one more where it does not divide: what stands before its layers goes to
    the first stage and what stands behind to the last. Layers are taken in the order they were assigned. Raises
    ConfigError for a spec that names no layer, several for one cut, or another number of cuts.
    """
    names = [name for name, _ in model.named_sublayers(include_self=True)]
    cuts = _listed_cuts(names, split_spec) if isinstance(split_spec, Mapping) else _even(names, split_spec, num_stages)
    if len(cuts) != num_stages - 1:
        raise ConfigError(
            f"pp_config: split_spec cuts the model {len(cuts)} times, after {sorted(cuts)}; a 'pp' dim of {num_stages} "
            f"needs {num_stages - 1} cuts"
        )
    return _number(names, cuts)


def _listed_cuts(names: Sequence[str], spec: Mapping[str, Any]) -> dict[str, SplitPoint]:
    cuts = {}
    for pattern, point in spec.items():
        if not isinstance(point, SplitPoint):
            raise ConfigError(f"pp_config: split_spec[{pattern!r}] is {point!r}; give SplitPoint.END or BEGINNING")
        layers = matching(pattern, names)
        if len(layers) != 1:
            raise ConfigError(
                f"pp_config: split_spec names {pattern!r}, which fits {len(layers)} layers {layers[:5]}; name one "
                "for each cut"
            )
        cuts[layers[0]] = point
    return cuts


def _even(names: Sequence[str], spec: Any, num_stages: int) -> dict[str, SplitPoint]:
    prefixes = [spec] if isinstance(spec, str) else spec
    if not isinstance(prefixes, (list, tuple)) or not all(isinstance(p, str) for p in prefixes):
        raise ConfigError(f"pp_config: split_spec={spec!r}; give a name, a list of names, or {{layer: SplitPoint.END}}")
    layers = [n for n in names if any(re.fullmatch(rf"(?:{p})\.\d+", n) for p in prefixes)]
    if len(layers) < num_stages:
        raise ConfigError(
            f"pp_config: split_spec={spec!r} has {len(layers)} layers to divide over {num_stages} stages; name a list "
            "of at least as many"
        )
    least, more = divmod(len(layers), num_stages)
    ends = [least * s + min(s, more) for s in range(1, num_stages)]
    return {layers[end - 1]: SplitPoint.END for end in ends}


def _number(names: Sequence[str], cuts: Mapping[str, SplitPoint]) -> dict[str, int | None]:
    stages: dict[str, int | None] = {}
    stage, pending = 0, None
    for name in names:
        if pending is not None and not _inside(name, pending):
            stage, pending = stage + 1, None
        if cuts.get(name) is SplitPoint.BEGINNING:
            stage += 1
        elif name in cuts:
            pending = name
        stages[name] = stage
    for name in names:
        inner = {stages[n] for n in names if n != name and _inside(n, name)}
        if inner - {stages[name]}:
            stages[name] = None
    return stages


def _inside(name: str, outer: str) -> bool:
    return name == outer or outer == "" or name.startswith(f"{outer}.")


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a pattern, a regular expression, fits as a whole."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression ({error}); write the name of a layer") from error
    return [name for name in names if name == pattern or compiled.fullmatch(name)]
