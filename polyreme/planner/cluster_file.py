"""Which devices to plan for: a cluster.yaml, a topology such as v5e:16x16, or this machine's own.

device: h100            # a kind of devices.yaml, or every figure of one (as `polyreme calibrate` writes)
devices_per_node: 8
nodes: 128              # 1 if left out
torus: [16, 16]         # of a TPU's slice, and slices: 2; the most even torus if left out
links:                  # those of the kind if left out; nearest first
  - {name: nvlink, devices: 8, bandwidth: 4.5e11, latency: 5e-6}
  - {name: infiniband, devices: 1024, bandwidth: 5e10, latency: 1e-5, oversubscription: 2}  # 1 if left out
memory: 64e9            # bytes of a device, where it is not the kind's
variation: 0.02         # standard deviation of the devices' speed, as a share, where it is not the kind's
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import yaml

from polyreme.errors import ConfigError, did_you_mean
from polyreme.planner.calibration import calibration_file, declared, resized
from polyreme.planner.cluster import Cluster, DeviceKind, Link
from polyreme.planner.devices import MOST, check_slice, cluster_of_kind, device_kinds
from polyreme.yaml_loader import YamlLoader

_MAX_BYTES = 1 << 20  # written by hand; more is some other file given by mistake
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_KEYS = (
    "device",
    "devices_per_node",
    "nodes",
    "node",
    "torus",
    "slices",
    "links",
    "memory",
    "shared",
    "task",
    "variation",
)
_HUGE = 1e30  # more than any figure of a machine
_MOST_VIRTUAL = 1 << 16  # devices of one machine
_OF_KIND = ("node", "torus", "slices")


def read(path: str | Path) -> Cluster:
    """The Cluster that a YAML file describes.

    Raises ConfigError, naming file and key, for a file that cannot be read, a key or a device kind that does not exist
    (with the nearest that does), a value of the wrong type or out of range, and links that do not reach all devices.
    """
    path = Path(path)
    loaded = _load(path)
    if isinstance(loaded, Mapping) and {"model", "train"} & set(loaded):
        raise ConfigError(f"{path}: is the configuration of a run, not a cluster; give it as CONFIG")
    values = _mapping(loaded, str(path), _KEYS)
    if "device" not in values:
        raise ConfigError(f"{path}: device is missing; name a kind such as h100, or give its figures")
    count = math.prod(_whole(values.get(key, 1), f"{path}: {key}") for key in ("devices_per_node", "nodes"))
    if count > MOST:
        raise ConfigError(f"{path}: {count:,} devices; give at most {MOST:,}")
    cluster = _basis(values, count, str(path))
    if "links" in values:
        cluster = replace(cluster, links=_links(values["links"], count, str(path)))
    if "memory" in values:
        memory = _positive(values["memory"], f"{path}: memory")
        cluster = replace(cluster, device=replace(cluster.device, memory=memory))
    if "variation" in values:
        variation = _share(values["variation"], f"{path}: variation")
        cluster = replace(cluster, device=replace(cluster.device, variation=variation))
    shared = _whole(values.get("shared", cluster.shared), f"{path}: shared")
    if shared not in (1, count):
        raise ConfigError(f"{path}: shared is {shared}; give 1, or {count} where all devices share one set of units")
    return replace(cluster, shared=shared, task=_not_negative(values.get("task", cluster.task), f"{path}: task"))


def of_topology(text: str) -> Cluster:
    """A Cluster from a kind and its shape.

    v5e:16x16 is one slice of a TPU, v5e:2x16x16 two of them; h100:64 is 64 GPUs in the machines they come in, h100:8x8
    as machines x GPUs, of which a machine may have fewer (h100:16x4).

    >>> of_topology("v5p:4x4x8").num_devices, of_topology("h100:16").links[0].devices
    (128, 8)
    >>> of_topology("h100:4x4").links[0].devices
    4
    """
    kind, _, shape = text.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*", shape) or math.prod(map(int, shape.split("x"))) < 1:
        raise ConfigError(f"--topology {text}: needs KIND:SHAPE, such as v5e:16x16 or h100:8x8; kinds: {_kinds()}")
    sizes = [int(size) for size in shape.split("x")]
    link = cluster_of_kind(kind, 1).links[0]
    if not link.torus:
        return _of_machines(text, kind, sizes, link.devices)
    dims = len(link.torus)
    if len(sizes) not in (1, dims, dims + 1):
        raise ConfigError(f"--topology {text}: {kind} has a torus of {dims} dims; give as many lengths, or a count")
    slices = sizes[0] if len(sizes) > dims else 1
    torus = sizes[-dims:] if len(sizes) > 1 else ()
    try:
        check_slice(kind, math.prod(sizes) // slices, torus)
    except ConfigError as error:
        raise ConfigError(f"--topology {text}: {error}") from None
    return cluster_of_kind(kind, math.prod(sizes), slices=slices, torus=torus)


def of_devices(count: int) -> Cluster:
    """This machine with so many devices: as `polyreme calibrate` found it, else a processor by declared figures."""
    if count > _MOST_VIRTUAL:
        raise ConfigError(f"--devices {count}: give at most {_MOST_VIRTUAL:,}; for devices elsewhere, --topology")
    path = calibration_file()
    if not path.exists():
        return declared(count)
    try:
        return resized(read(path), count)
    except ConfigError as error:
        raise ConfigError(f"{error}; `polyreme calibrate` measures the machine again") from None


def _of_machines(text: str, kind: str, sizes: list[int], node: int) -> Cluster:
    if len(sizes) > 2 or (len(sizes) == 2 and sizes[1] > node):
        raise ConfigError(
            f"--topology {text}: give {kind} as a number of devices or as machines x devices, of which a machine has "
            f"{node}; describe other machines in a file for --cluster"
        )
    cluster = cluster_of_kind(kind, math.prod(sizes))
    return _in_machines(cluster, sizes[1]) if len(sizes) == 2 else cluster


def _in_machines(cluster: Cluster, inside: int) -> Cluster:
    """The cluster in machines of so many devices: one of 1 has no near link."""
    near, *far = cluster.links
    return replace(cluster, links=(replace(near, devices=inside), *far) if inside > 1 else tuple(far))


def _basis(values: Mapping[str, Any], count: int, path: str) -> Cluster:
    """The cluster by its device alone."""
    device = values["device"]
    if isinstance(device, Mapping):
        stray = [key for key in _OF_KIND if key in values]
        if stray:
            raise ConfigError(f"{path}: {stray[0]} is for a kind of devices.yaml; leave it out, or name such a kind")
        if count > 1 and "links" not in values:
            raise ConfigError(f"{path}: links are missing; a device with figures of its own needs those of its links")
        return Cluster(_device(device, path), count, ())
    if not isinstance(device, str):
        raise ConfigError(f"{path}: device is {device!r}; give the name of a kind, or its figures")
    node, torus = values.get("node"), values.get("torus", ())
    slices = _whole(values.get("slices", 1), f"{path}: slices")
    lengths = _torus(torus, f"{path}: torus")
    try:
        cluster = cluster_of_kind(device, count, node=None if node is None else str(node), slices=slices, torus=lengths)
        if node is None:
            check_slice(device, count // slices, lengths)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if slices > 1 and not cluster.links[0].torus:
        raise ConfigError(f"{path}: slices is {slices}, but devices {device!r} are joined by switches; leave it out")
    if cluster.links[0].torus or "devices_per_node" not in values:
        return cluster
    return _in_machines(cluster, _whole(values["devices_per_node"], f"{path}: devices_per_node"))


def _torus(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where} is {value!r}; give its lengths, such as [16, 16]")
    return tuple(_whole(length, where) for length in value)


def _device(values: Mapping[str, Any], path: str) -> DeviceKind:
    where = f"{path}: device"
    checked = _section(values, DeviceKind, where)
    flops = checked.get("flops")
    if not isinstance(flops, Mapping) or not flops:
        raise ConfigError(f"{where}.flops is {flops!r}; give FLOP/s by dtype, such as {{bfloat16: 3.12e14}}")
    checked["flops"] = {str(dtype): _positive(rate, f"{where}.flops.{dtype}") for dtype, rate in flops.items()}
    return DeviceKind(**checked)


def _links(values: Any, count: int, path: str) -> tuple[Link, ...]:
    if not isinstance(values, list):
        raise ConfigError(f"{path}: links is {values!r}; give a list, the nearest link first")
    links = []
    for at, each in enumerate(values):
        where = f"{path}: links[{at}]"
        checked = _section(_mapping(each, where, [f.name for f in fields(Link)]), Link, where)
        link = Link(**checked)
        if link.torus and math.prod(link.torus) != link.devices:
            raise ConfigError(f"{where}.torus has {math.prod(link.torus)} devices, the link joins {link.devices}")
        links.append(link)
    reach = [link.devices for link in links]
    if reach != sorted(set(reach)):
        raise ConfigError(f"{path}: links join {reach} devices; list them nearest first, each joining more")
    if count > 1 and (not reach or reach[-1] < count):
        raise ConfigError(f"{path}: links join {reach[-1] if reach else 1} of {count} devices; add one that joins all")
    return tuple(links)


_CURVES = ("efficiency", "matmul", "attention", "streaming", "few")
_WHOLE = ("devices", "closes")
_TEXT = ("name", "source", "borrowed")


def _section(values: Mapping[str, Any], kind: type, where: str) -> dict[str, Any]:
    """The checked fields of a DeviceKind or Link."""
    known = {f.name: f for f in fields(kind)}
    checked: dict[str, Any] = {}
    for key, value in _mapping(values, where, known).items():
        path = f"{where}.{key}"
        if key in _CURVES:
            checked[key] = _curve(value, path)
        elif key == "torus":
            checked[key] = _torus(value, path)
        elif key in _TEXT:
            checked[key] = str(value)
        elif key == "flops":
            checked[key] = value
        else:
            checks = {**dict.fromkeys(_WHOLE, _whole), **dict.fromkeys(_MAY_BE_NOTHING, _not_negative)}
            checked[key] = {**checks, "variation": _share}.get(key, _positive)(value, path)
            if key == "oversubscription" and checked[key] < 1:
                raise ConfigError(f"{path} is {value!r}; give 1 for a switch that passes all on, or more")
            if key == "usable" and checked[key] > 1:
                raise ConfigError(f"{path} is {value!r}; give a share of the memory, above 0 and up to 1")
    missing = [name for name, f in known.items() if f.default is MISSING and name not in checked]
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing; a {kind.__name__} needs {', '.join(missing)}")
    return checked


_MAY_BE_NOTHING = ("latency", "launch")


def _curve(value: Any, where: str) -> tuple[tuple[float, float], ...]:
    shape = f"{where} is {value!r}; give points [size, share], sizes rising, shares above 0 and up to 1"
    if not isinstance(value, list) or not value or not all(isinstance(p, list) and len(p) == 2 for p in value):
        raise ConfigError(shape)
    points = tuple((_not_negative(x, where), _positive(y, where)) for x, y in value)
    sizes = [x for x, _ in points]
    if sizes != sorted(set(sizes)) or any(share > 1 for _, share in points):
        raise ConfigError(shape)
    return points


def _mapping(value: Any, where: str, known: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: needs key: value lines, got {value!r}")
    names = tuple(known)
    for key in value:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}{did_you_mean(str(key), names)}")
    return value


def _load(path: Path) -> Any:
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; name a cluster file inside it")
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size:,} bytes is too long for a cluster file")
        return yaml.load(path.read_text(encoding="utf-8"), YamlLoader)
    except FileNotFoundError:
        near = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such cluster file{did_you_mean(path.name, near) if near else ''}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {getattr(error, 'problem', None) or error}") from None


def _number(value: Any, where: str) -> float:
    """YAML 1.1 reads 5e10 as text; text that is a number is meant as one."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _HUGE:
        shown = repr(value)
        raise ConfigError(f"{where} is {shown[:40]}{'...' * (len(shown) > 40)}; give a number")
    return float(value)


def _positive(value: Any, where: str) -> float:
    number = _number(value, where)
    if number <= 0:
        raise ConfigError(f"{where} is {value!r}; give a number above 0")
    return number


def _not_negative(value: Any, where: str) -> float:
    number = _number(value, where)
    if number < 0:
        raise ConfigError(f"{where} is {value!r}; give a number of at least 0")
    return number


def _share(value: Any, where: str) -> float:
    number = _not_negative(value, where)
    if number >= 1:
        raise ConfigError(f"{where} is {value!r}; give a share below 1")
    return number


def _whole(value: Any, where: str) -> int:
    number = _number(value, where)
    if number < 1 or number != int(number):
        raise ConfigError(f"{where} is {value!r}; give a whole number of at least 1")
    return int(number)


def _kinds() -> str:
    return ", ".join(device_kinds())
