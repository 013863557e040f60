"""Known device kinds and the clusters they come in, read from devices.yaml."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from polyreme.errors import ConfigError, did_you_mean
from polyreme.planner.cluster import Cluster, DeviceKind, Link

_EVERYWHERE = 1 << 40
"""Devices that a network without a limit of its own joins."""

MOST = 1 << 24
"""Devices of a cluster: more than there are of any kind."""


def device_kinds() -> tuple[str, ...]:
    """Names of the kinds that devices.yaml has."""
    return tuple(_sheet()["kinds"])


@lru_cache(maxsize=256)
def device_kind(name: str) -> DeviceKind:
    """A kind by its name in devices.yaml, or another that it goes by; upper or lower case.

    Raises ConfigError for one that is not there, with the nearest that is.

    >>> device_kind("H100").name, device_kind("v5p").flops["bfloat16"]
    ('H100-SXM5-80GB', 459000000000000.0)
    """
    row = _row(name)
    known = {f.name for f in fields(DeviceKind)}
    values = {key: _plain(value) for key, value in row.items() if key in known}
    return DeviceKind(**values)


def cluster_of_kind(
    name: str, num_devices: int, *, node: str | None = None, slices: int = 1, torus: Sequence[int] = ()
) -> Cluster:
    """num_devices of a known kind, in the machines it usually comes in.

    node: another machine of devices.yaml. slices: for a TPU, how many tori of equal size, joined by the data-centre
    network; torus: lengths of one of them, the most even if not given.

    Raises ConfigError for a kind or node that is not known, a count below 1, slices that do not divide it, and a torus
    of another size.

    >>> cluster_of_kind("h100", 16).links[0].devices, cluster_of_kind("v5p", 64).links[0].torus
    (8, (4, 4, 4))
    """
    _count("num_devices", name, num_devices)
    _count("slices", name, slices)
    nodes = _sheet()["nodes"]
    node = node or str(_row(name)["node"])
    if node not in nodes:
        raise ConfigError(f"unknown node type {node!r} for devices {name!r}{did_you_mean(node, nodes)}")
    if num_devices % slices:
        raise ConfigError(f"{num_devices} devices of {name!r} do not make {slices} equal slices; change one of them")
    links = _links(nodes[node], name, num_devices // slices, tuple(torus))
    return Cluster(device_kind(name), num_devices, links)


def possible_slices(name: str) -> tuple[tuple[int, ...], ...]:
    """Lengths of every slice of a TPU that there is, the smallest first; () for kinds that are joined by switches.

    Raises ConfigError for a kind that is not known.

    >>> possible_slices("v5e")[:4]
    ((1, 1), (2, 2), (2, 4), (4, 4))
    """
    node = _sheet()["nodes"][_row(name)["node"]]
    small = [tuple(lengths) for lengths in node.get("slices", ())]
    return tuple(sorted([*small, *_of_cubes(node.get("unit", 0), node.get("most", 0))], key=math.prod))


def check_slice(name: str, num_devices: int, torus: Sequence[int] = ()) -> None:
    """Raise ConfigError, with the nearest that there are, if no slice of a TPU has so many devices, or these lengths.

    Other kinds pass: switches join any number of devices.
    """
    slices = possible_slices(name)
    lengths = tuple(sorted(torus))
    counts = [math.prod(each) for each in slices]
    if not slices or num_devices > counts[-1]:  # of more than the largest has, cluster_of_kind says how many make them
        return
    if lengths in [tuple(sorted(each)) for each in slices] if torus else num_devices in counts:
        return
    near = (max(n for n in counts if n <= num_devices), min(n for n in counts if n >= num_devices))
    asked = [math.log(length) for length in lengths or torus_of(num_devices, len(slices[0]))]

    def how_unlike(each: tuple[int, ...]) -> float:
        return math.dist(asked, [math.log(length) for length in sorted(each)])

    nearest = [min((each for each in slices if math.prod(each) == n), key=how_unlike) for n in dict.fromkeys(near)]
    words = " or ".join(f"{name}:{'x'.join(map(str, each))} (of {math.prod(each)})" for each in nearest)
    what = f"the lengths {'x'.join(map(str, torus))}" if torus else f"{num_devices} devices"
    raise ConfigError(f"no slice of {name!r} has {what}; give {words}")


@lru_cache(maxsize=8)
def _of_cubes(unit: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Rising lengths in multiples of unit with at most so many devices together; none for a unit of 0."""
    if not unit:
        return ()
    cubes = most // unit**3
    return tuple(
        (unit * a, unit * b, unit * c)
        for a in range(1, cubes + 1)
        for b in range(a, cubes // a + 1)
        for c in range(b, cubes // (a * b) + 1)
    )


def unknown_kind(name: str, num_devices: int, flops: float, memory: float) -> Cluster:
    """Devices of a kind of which only FLOP/s and bytes are known: the rest is its nearest relative's, in proportion."""
    basis = cluster_of_kind(relative(name), num_devices)
    ratio = flops / basis.device.flops["bfloat16"]
    device = replace(
        basis.device,
        name=name,
        flops={dtype: rate * ratio for dtype, rate in basis.device.flops.items()},
        memory=memory,
        bandwidth=basis.device.bandwidth * ratio**0.5,
        borrowed=relative(name),
    )
    return replace(basis, device=device)


def relative(name: str) -> str:
    """The known kind that one which is not known is taken after: of the same family by its name, else the A100.

    >>> relative("H100-64G"), relative("MI308X"), relative("unheard")
    ('h100', 'a100', 'a100')
    """
    families = [
        each for row in _sheet()["kinds"].values() for each in row["also"] if re.fullmatch(r"[a-z]+\d+[a-z]?", each)
    ]
    near = [each for each in families if _letters(str(name)).startswith(_letters(each))]
    return max(near, key=len, default="a100")


def kind_called(device_kind: str) -> str:
    """The kind whose words are all among those of what a driver calls its devices, the most words first; "" for none.

    >>> kind_called("NVIDIA A100-SXM4-80GB"), kind_called("NVIDIA A100 80GB PCIe"), kind_called("NVIDIA A10G")
    ('a100-80g', 'a100-pcie-80g', 'a10g')
    >>> kind_called("TPU v5 lite"), kind_called("NVIDIA GeForce RTX 4090"), kind_called("unheard of")
    ('tpu-v5e', 'rtx4090', '')
    """
    said = device_kind.lower().replace(" lite", "e")
    words = {*re.findall(r"[a-z0-9]+", re.sub(r"\b(\d+g)b\b", r"\1", said)), _letters(said)}
    names = [
        (len(each.split("-")), each == name, name)
        for name, row in _sheet()["kinds"].items()
        for each in (name, *row["also"])
        if words >= {*each.split("-")}
    ]
    return max(names, default=(0, False, ""))[2]


def torus_of(num_devices: int, dims: int) -> tuple[int, ...]:
    """The most even torus of so many devices, the longest dim last; dims of multiples of 4 where there are enough.

    >>> torus_of(64, 3), torus_of(128, 3), torus_of(256, 2), torus_of(8, 3)
    ((4, 4, 4), (4, 4, 8), (16, 16), (2, 2, 2))
    """
    unit = 4 if num_devices % 4**dims == 0 else 1
    left, lengths = num_devices // unit**dims, []
    for rest in range(dims, 0, -1):
        ideal = round(left ** (1 / rest), 6)
        length = max(d for d in range(1, int(ideal) + 1) if left % d == 0) if rest > 1 else left
        lengths.append(length * unit)
        left //= length
    return tuple(sorted(lengths))


def _links(node: dict[str, Any], name: str, per_slice: int, torus: tuple[int, ...]) -> tuple[Link, ...]:
    dims = node.get("dims", 0)
    if torus and math.prod(torus) != per_slice:
        raise ConfigError(f"a torus {torus} of {name!r} has {math.prod(torus)} devices, the slice has {per_slice}")
    if not dims:
        if torus:
            raise ConfigError(f"devices {name!r} are joined by switches; leave torus={torus} out")
    elif per_slice > node["most"]:
        raise ConfigError(
            f"a slice of {name!r} has {node['most']} devices at most, not {per_slice}; give more slices: two are "
            f"{name}:2x{'x'.join(map(str, torus_of(node['most'], dims)))}"
        )
    links = []
    for values in node["links"]:
        each = {key: _plain(value) for key, value in values.items()}
        if dims and "devices" not in each:
            each |= {"devices": per_slice, "torus": torus or torus_of(per_slice, dims), "closes": node["closes"]}
        links.append(Link(**{**each, "devices": each["devices"] or _EVERYWHERE}))
    return tuple(links)


def _row(name: str) -> dict[str, Any]:
    kinds = _sheet()["kinds"]
    names = {each: row for key, row in kinds.items() for each in (key, *row["also"], row["name"].lower())}
    rows = {_letters(each): row for each, row in names.items()}
    if _letters(str(name)) not in rows:
        near = [each for each in names if each.startswith(str(name).lower()[:3])]
        meant = did_you_mean(str(name).lower(), near or kinds)
        raise ConfigError(f"unknown device kind {name!r}{meant}, or describe it in a file (--cluster)")
    return rows[_letters(str(name))]


def _letters(name: str) -> str:
    """Without case, signs and makers' names: H100-80G, NVIDIA h100 80g."""
    makers = r"\b(nvidia|geforce|tesla|amd|instinct|intel|google|cloud|huawei|aws)\b"
    return re.sub(r"[^a-z0-9]", "", re.sub(makers, "", name.lower()))


def _count(what: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{what}={value!r} of device kind {name!r}; give a whole number of at least 1")
    if value > MOST:
        raise ConfigError(f"{what}={value} of device kind {name!r}; give at most {MOST:,}")


def _plain(value: Any) -> Any:
    """Lists as tuples, so that a kind can be a key of a cache."""
    return tuple(_plain(each) for each in value) if isinstance(value, list) else value


@lru_cache(maxsize=1)
def _sheet() -> dict[str, Any]:
    return yaml.safe_load(files("polyreme.planner").joinpath("devices.yaml").read_text(encoding="utf-8"))
