"""Parameter groups: parameters that share settings, and the checks on what is given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyreme.eager.tensor import Tensor
from polyreme.errors import ArgumentTypeError, ConfigError, NotReadyError, did_you_mean
from polyreme.nn.clip import GradientClip


@dataclass
class ParameterGroup:
    """Parameters that share settings; settings missing here are the optimizer's own."""

    params: list[Any]
    settings: dict[str, Any] = field(default_factory=dict)


def split_groups(owner: str, parameters: Any) -> list[ParameterGroup]:
    """The groups in `parameters=`: one of all of them, or one for each dict; running statistics are left out.

    Raises ConfigError for anything else.
    """
    if parameters is None:
        raise NotReadyError(f"{owner} needs parameters=, a list such as model.parameters()")
    if isinstance(parameters, (Tensor, str, dict)) or not isinstance(parameters, Iterable):
        is_uncalled = hasattr(parameters, "parameters") or callable(parameters)
        instead = "; write parameters=model.parameters()" if is_uncalled else ""
        raise ArgumentTypeError(
            f"{owner}: parameters= is a list of Parameters or of dicts with 'params', got one "
            f"{type(parameters).__name__}{instead}"
        )
    listed = list(parameters)
    if not any(isinstance(entry, dict) for entry in listed):
        groups = [ParameterGroup(listed)]
    else:
        groups = [_group(owner, entry) for entry in listed]
    for p in (p for g in groups for p in g.params):
        if not isinstance(p, Tensor):
            raise ArgumentTypeError(f"{owner}: parameters= must hold Parameters, got {type(p).__name__}")
        if (whole := getattr(p, "whole", p)) is not p:
            raise ConfigError(
                f"{owner}: {p.name!r} in parameters= is an entry of one parameter of shape {list(whole.shape)} for "
                "all experts; give the parameters() of the layer that holds them all"
            )
    for group in groups:
        group.params = [p for p in group.params if not getattr(p, "is_statistic", False)]
    return groups


def _group(owner: str, entry: Any) -> ParameterGroup:
    if not isinstance(entry, dict) or "params" not in entry:
        raise ConfigError(
            f"{owner}: parameter groups are dicts with 'params', and cannot be mixed with plain Parameters; got "
            f"{sorted(entry) if isinstance(entry, dict) else type(entry).__name__}"
        )
    params = entry["params"]
    listed = [params] if isinstance(params, Tensor) else list(params)
    return ParameterGroup(listed, {k: v for k, v in entry.items() if k != "params"})


def check_common(owner: str, name: str, value: Any) -> None:
    """Raises ConfigError for a weight_decay, grad_clip or learning-rate factor that cannot be one."""
    if name == "learning_rate":
        nonnegative(owner, "learning_rate (a factor, in a group)", value)
    elif name == "weight_decay" and value is not None and not hasattr(value, "gradient"):
        nonnegative(owner, "weight_decay (if not a regularizer)", value)
    elif name == "grad_clip" and value is not None and not isinstance(value, GradientClip):
        raise ArgumentTypeError(f"{owner}: grad_clip is a ClipGradBy... or None, got {value!r}")


def check_known(owner: str, group: ParameterGroup, known: Iterable[str]) -> None:
    """Raises ConfigError for a group setting that is not among the known ones."""
    for name in group.settings:
        if name not in known:
            raise ConfigError(f"{owner}: parameter group setting {name!r} is not known{did_you_mean(name, known)}")


def check_unique(owner: str, parameters: list[Any]) -> None:
    """Raises ConfigError for a parameter given twice, or two of one name."""
    names: dict[str, Any] = {}
    for p in parameters:
        other = names.get(p.name)
        if other is p:
            raise ConfigError(f"{owner}: parameter {p.name!r} appears twice in parameters=; give it once")
        if other is not None:
            raise ConfigError(
                f"{owner}: two parameters are named {p.name!r} (shapes {list(other.shape)} and {p.shape}); rename one"
            )
        names[p.name] = p


def _describe(value: Any) -> str:
    """A wrong number as a message has it: parameters in its place are told by their name."""
    if isinstance(value, (list, tuple, Iterator)) and any(isinstance(v, (Tensor, Mapping)) for v in value):
        return "a list of Tensors; write parameters=..."
    return repr(value)


def nonnegative(owner: str, name: str, value: Any) -> float:
    """value as a float; ConfigError unless it is finite and at least 0, ArgumentTypeError if it is no number."""
    value = value.item() if isinstance(value, Tensor) and value.size == 1 else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{owner}: {name} is a number of at least 0, got {_describe(value)}")
    if not 0 <= value < math.inf:
        raise ConfigError(f"{owner}: {name} is a number of at least 0, got {_describe(value)}")
    return float(value)


def fraction(owner: str, name: str, value: Any) -> float:
    """value as a float; ConfigError unless it is a number in [0, 1)."""
    value = value.item() if isinstance(value, Tensor) and value.size == 1 else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{owner}: {name} is a number in [0, 1), got {_describe(value)}")
    if not 0 <= value < 1:
        raise ConfigError(f"{owner}: {name} is a number in [0, 1), got {_describe(value)}")
    return float(value)


def flag(owner: str, name: str, value: Any) -> bool:
    """value as it is; ConfigError unless it is True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{owner}: {name} is True or False, got {value!r}")
    return value
