"""What leaves the devices' memory between uses, and for where: part of a Plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyreme.errors import ConfigError, did_you_mean

OFFLOAD = ("param", "state", "expert", "act")
"""What may be kept outside of the devices' memory between uses; gradients go where their parameters go. expert:
parameters of experts, with gradients and state, of which only experts that tokens chose are brought."""

TIERS = ("host", "disk")
"""Where to: the host's memory, or files of the disk that Plan.offload_path names."""

_TO_DISK = ("param", "state", "expert")

BUFFERS = 3
"""Buckets that are on their way at once where a plan does not say: one read, one updated, one written."""


class Offload(Mapping[str, str]):
    """What is offloaded, in the order of OFFLOAD -> one of TIERS; a frozen mapping.

    >>> dict(Offload(["act", "state"])), dict(Offload({"state": "disk"}))
    ({'state': 'host', 'act': 'host'}, {'state': 'disk'})
    """

    __slots__ = ("_tiers",)
    _tiers: dict[str, str]

    def __init__(self, given: Mapping[str, str] | Sequence[str] = ()) -> None:
        """given: a mapping, or what goes to the host. Raises ConfigError for an unknown name or tier."""
        self._tiers = _check(given)

    def __getitem__(self, kind: str) -> str:
        return self._tiers[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    def __hash__(self) -> int:
        return hash(tuple(self._tiers.items()))

    def __repr__(self) -> str:
        return f"Offload({self.plain()!r})"

    def __str__(self) -> str:
        return ", ".join(k if tier == "host" else f"{k} to {tier}" for k, tier in self._tiers.items()) or "none"

    @property
    def on_disk(self) -> tuple[str, ...]:
        """What goes to the disk."""
        return tuple(kind for kind, tier in self._tiers.items() if tier == "disk")

    def plain(self) -> list[str] | dict[str, str]:
        """Fit for JSON and YAML: a list where all goes to the host, else a dict."""
        return dict(self._tiers) if self.on_disk else list(self._tiers)


def check_settings(offload: Offload, path: object, ratio: object, buffers: object) -> None:
    """Raises ConfigError for a setting of a plan's offload that is out of range, missing, or without effect."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        near = 1.0 if isinstance(ratio, (int, float)) and ratio > 1 else 0.1
        raise ConfigError(
            f"offload_ratio={ratio!r} in plan is not a part of the state, above 0 and at most 1; the nearest is {near}"
        )
    if isinstance(buffers, bool) or not isinstance(buffers, int) or buffers < 1:
        raise ConfigError(f"offload_buffers={buffers!r} in plan; give a whole number of at least 1, as {BUFFERS}")
    if offload.on_disk and (not isinstance(path, str) or not path):
        raise ConfigError(
            f"offload {offload.plain()} in plan needs a folder of the disk, offload_path is {path!r}; name one"
        )
    if not offload.on_disk and path is not None:
        raise ConfigError(f"offload_path={path!r} in plan, and nothing goes to disk; set offload to {{state: disk}}")
    if not offload.on_disk and "expert" not in offload and buffers != BUFFERS:
        raise ConfigError(
            f"offload_buffers={buffers} in plan, and nothing goes to disk; leave it out, or set offload to "
            "{state: disk}"
        )
    if offload.get("param") == "disk" and offload.get("state") != "disk":
        raise ConfigError(
            f"offload {offload.plain()} in plan: param to disk with the optimizer's state, which is larger, in memory; "
            "set offload to {param: disk, state: disk}"
        )
    if offload.get("expert") == "host" and offload.on_disk:
        raise ConfigError(
            f"offload {offload.plain()} in plan: experts, the most of a model, in the host's memory, and others on "
            "disk; set expert to disk, or the others to host"
        )
    if "expert" in offload and ratio != 1:
        raise ConfigError(f"offload_ratio={ratio} in plan, and experts are offloaded whole; leave it out, or expert")
    if "param" in offload and ratio != 1:
        raise ConfigError(f"offload_ratio={ratio} in plan, and param is offloaded whole; leave the ratio out, or param")
    if "state" not in offload and ratio != 1:
        raise ConfigError(f"offload_ratio={ratio} in plan, and offload has no state; leave it out, or offload state")


def _check(given: Any) -> dict[str, str]:
    if isinstance(given, str) or not isinstance(given, (Mapping, Sequence)):
        raise ConfigError(
            f"offload={given!r} in plan; give a list with any of {', '.join(OFFLOAD)}, or a mapping of those to "
            f"{' or '.join(TIERS)}"
        )
    tiers = given if isinstance(given, Mapping) else dict.fromkeys(given, "host")
    for kind, tier in tiers.items():
        if kind == "grad":
            raise ConfigError(
                "offload 'grad' in plan is not available by itself: gradients go where 'param' goes; offload 'param', "
                "or leave 'grad' out and use sharding stage 2 to hold fewer gradients on each device"
            )
        if kind not in OFFLOAD:
            raise ConfigError(f"unknown offload {kind!r} in plan{did_you_mean(kind, OFFLOAD)}")
        if tier not in TIERS:
            raise ConfigError(f"unknown tier {tier!r} of offload {kind!r} in plan{did_you_mean(tier, TIERS)}")
        if tier == "disk" and kind not in _TO_DISK:
            raise ConfigError(
                f"offload {kind!r} to disk in plan: only {', '.join(_TO_DISK)} goes there; the nearest is "
                f"{kind!r} to host"
            )
    return {kind: tiers[kind] for kind in OFFLOAD if kind in tiers}
