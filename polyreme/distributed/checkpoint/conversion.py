"""Rules that make the tensors of one naming out of those of another: the aoa_config of load_state_dict.

A rule is a line of names, an arrow, names and settings: "q.weight^T, k.weight^T -> qk.weight, axis=1". Rules are read
here once into steps over whole arrays; which part of an array a device holds is decided where it is put.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyreme.core.dtype import as_dtype
from polyreme.errors import ConfigError, did_you_mean

_SETTINGS = ("axis", "dtype", "src_dtype", "dst_dtype", "permute", "num_heads", "num_key_value_groups")
_FUSED = ("fused_ffn", "fused_qkv", "fused_qkv_old")
_KEYS = ("aoa_statements", "aoa_config_reverse", "enable_traceback")
_TRANSPOSED = "^T"
_NOTHING = "_"
_FUSED_AXIS = 1
_OFFSET = "$LAYER_ID_OFFSET"
_PLACE = re.compile(r"\$[A-Z][A-Z_]*")
_RANGE = re.compile(r"(.*)\[(\d+):(\d+)\]$")
_ITEMS = re.compile(r"(?:\"[^\"]*\"|'[^']*'|\[[^\]]*\]|[^,])+")
# states of optimizers go by their parameter's name and this; the latter are one number a parameter
_NUMBERS = ("step_0", "beta1_pow_acc_0", "beta2_pow_acc_0")
_STATES = ("w_0", "moment1_0", "moment2_0", "moment2_max_0", "velocity_0", *_NUMBERS)


@dataclass(frozen=True)
class _Rule:
    """One rule as it is written: names on both sides, settings, and the text for messages."""

    text: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    fused: str | None = None

    def refuse(self, why: str) -> ConfigError:
        return ConfigError(f"aoa_config: {self.text!r}: {why}")


class ConversionRules:
    """The rules of an aoa_config, for checkpoints with these keys.

    config: {"aoa_statements": [rule, ...]}, and "aoa_config_reverse": True to go the other way; "enable_traceback" adds
    nothing, as an error names its rule in any case. A rule has names left and
    right of "->", one of the sides a single one: several names are joined, or split into equal parts, along axis.
    "name^T" is the transpose; "name -> _" leaves a key out, "_ -> name" leaves a target as it is; permute="[0, 2, 1]"
    reorders dims, dtype="float32" casts. fused_ffn joins two along axis 1 (or axis); fused_qkv joins queries, keys and
    values by groups, of num_heads and num_key_value_groups heads, fused_qkv_old one behind the other. $LAYER_ID,
    $EXPERT_ID and other names in capitals stand for the numbers that keys of the checkpoint have there,
    $LAYER_ID_OFFSET for one less on the right; `*` for all numbers at once, name[0:3] for name_0, name_1, name_2. Later
    rules read what earlier ones gave. A target that no rule names is the tensor of its own name. States of optimizers,
    named as weight.moment1_0, follow their weights, without casts.

    Raises ConfigError for a rule that cannot be read.

    >>> rules = ConversionRules({"aoa_statements": ["a^T, b^T -> ab, axis=1"]}, ["a", "b"])
    >>> rules.convert({"a": np.ones((1, 2)), "b": np.zeros((1, 2))}, ["ab"])["ab"].tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    """

    def __init__(self, config: Mapping[str, Any], keys: Iterable[str]) -> None:
        unknown = [key for key in config if key not in _KEYS]
        if unknown:
            raise ConfigError(f"aoa_config: {unknown[0]!r}{did_you_mean(unknown[0], _KEYS)}")
        self.reverse = bool(config.get("aoa_config_reverse", False))
        self._rules = [_parse(text) for text in config.get("aoa_statements") or ()]
        self._keys = list(keys)
        if self.reverse:
            for rule in self._rules:
                if "dtype" in rule.settings:
                    raise rule.refuse("dtype alone cannot be undone: give src_dtype and dst_dtype")
        self.left_alone: set[str] = set()
        """Targets that rules leave as they are, once convert has run."""

    def convert(self, tensors: Mapping[str, Any], targets: Collection[str] | None = None) -> dict[str, Any]:
        """Arrays of the targets out of those of the checkpoint, which are read from `tensors` when a rule needs them.

        targets: by default what no rule takes further. One that cannot be made, because a key is missing or because a
        rule leaves it as it is, is left out. Raises ConfigError for rules that do not fit the shapes.
        """
        wanted = None if targets is None else _by_state(targets)
        results: dict[str, Any] = {}
        for state, names in _by_state(self._keys).items():
            if wanted is None or state in wanted:
                ends = None if wanted is None else wanted[state]
                made = _ConversionRun(self, state, names, ends).convert(lambda name, s=state: tensors[_key(name, s)])
                results.update({_key(name, state): array for name, array in made.items()})
        return results

    def steps(self, sources: Collection[str], targets: Collection[str] | None) -> Iterator[_Rule]:
        """The rules, in the order and direction in which they run, with names written out."""
        expanded = [one for rule in self._rules for one in _expand(rule, sources, targets, self.reverse)]
        yield from reversed(expanded) if self.reverse else expanded


class _ConversionRun:
    """One run of the rules over the tensors of one state."""

    def __init__(
        self, rules: ConversionRules, state: str, sources: Collection[str], targets: Collection[str] | None
    ) -> None:
        self._rules, self._state, self._targets = rules, state, targets
        self._sources = dict.fromkeys(sources)
        self._converted: dict[str, Any] = {}
        self._used: set[str] = set()

    def convert(self, read: Callable[[str], Any]) -> dict[str, Any]:
        self._read = read
        for rule in self._rules.steps(self._sources, self._targets):
            inputs, outputs = (rule.right, rule.left) if self._rules.reverse else (rule.left, rule.right)
            names = [_plain(name) for name in inputs]
            if inputs == (_NOTHING,):
                self._rules.left_alone.update(_key(_plain(name), self._state) for name in outputs)
                continue
            self._used.update(names)
            known = [name for name in names if name in self._converted or name in self._sources]
            if outputs == (_NOTHING,) or not names or len(known) < len(names):
                continue
            arrays = [_turn(self._value(name), given) for name, given in zip(names, inputs, strict=True)]
            for name, array in zip(outputs, self._apply(rule, arrays, len(outputs)), strict=True):
                self._converted[_plain(name)] = _turn(array, name)
                self._used.discard(_plain(name))
        return self._results()

    def _results(self) -> dict[str, Any]:
        if self._targets is None:
            ends = [name for name in (*self._sources, *self._converted) if name not in self._used]
            return {name: self._value(name) for name in dict.fromkeys(ends)}
        known = [name for name in self._targets if name in self._converted or name in self._sources]
        return {name: self._value(name) for name in known if _key(name, self._state) not in self._rules.left_alone}

    def _value(self, name: str) -> Any:
        return self._converted[name] if name in self._converted else self._read(name)

    def _apply(self, rule: _Rule, arrays: list[Any], count: int) -> list[Any]:
        """What a rule gives, in the direction in which it runs."""
        if self._state in _NUMBERS:
            return arrays[:1] * count
        if len(arrays) > 1 and count > 1:
            raise rule.refuse("several names on both sides; one side has a single one")
        settings, reverse = rule.settings, self._rules.reverse
        if "permute" in settings:
            order = settings["permute"] or None
            arrays = [jnp.transpose(arrays[0], np.argsort(order).tolist() if reverse and order else order)]
        dtype = settings.get("dtype", settings.get("src_dtype" if reverse else "dst_dtype"))
        if dtype is not None and not self._state:
            arrays = [array.astype(as_dtype(dtype)) for array in arrays]
        if len(arrays) == count:
            return arrays
        axis = settings.get("axis", _FUSED_AXIS if rule.fused else None)
        if axis is None:
            raise rule.refuse("several names are joined or split along a dim; say which, axis=0")
        if any(not 0 <= axis < array.ndim for array in arrays):
            raise rule.refuse(f"axis={axis} is not a dim of shape {list(arrays[0].shape)}")
        return _join(rule, arrays, axis) if count == 1 else _split_array(rule, arrays[0], axis, count)


def _join(rule: _Rule, arrays: list[Any], axis: int) -> list[Any]:
    if len({(*array.shape[:axis], *array.shape[axis + 1 :]) for array in arrays}) > 1:
        raise rule.refuse(f"shapes {[list(array.shape) for array in arrays]} differ beside dim {axis}")
    if rule.fused == "fused_qkv":
        groups = _groups(rule)
        parts = [_pieces(rule, array, axis, groups) for array in arrays]
        arrays = [part[group] for group in range(groups) for part in parts]
    return [jnp.concatenate(arrays, axis)]


def _split_array(rule: _Rule, array: Any, axis: int, count: int) -> list[Any]:
    if rule.fused not in ("fused_qkv", "fused_qkv_old"):
        return _pieces(rule, array, axis, count)
    groups, heads = _groups(rule), rule.settings["num_heads"]
    if count != 3:
        raise rule.refuse(f"{rule.fused} has queries, keys and values, not {count} parts")
    if rule.fused == "fused_qkv_old":
        units = _pieces(rule, array, axis, heads + 2 * groups)
        bounds = [units[:heads], units[heads : heads + groups], units[heads + groups :]]
        return [jnp.concatenate(part, axis) for part in bounds]
    ratio = heads // groups
    units = _pieces(rule, array, axis, groups * (ratio + 2))
    rows = [units[start : start + ratio + 2] for start in range(0, len(units), ratio + 2)]
    return [
        jnp.concatenate([unit for row in rows for unit in row[:ratio]], axis),
        jnp.concatenate([row[ratio] for row in rows], axis),
        jnp.concatenate([row[ratio + 1] for row in rows], axis),
    ]


def _pieces(rule: _Rule, array: Any, axis: int, count: int) -> list[Any]:
    size = array.shape[axis]
    if size % count:
        raise rule.refuse(f"dim {axis} of shape {list(array.shape)} has no {count} equal parts")
    return jnp.split(jnp.asarray(array), count, axis)


def _groups(rule: _Rule) -> int:
    heads, groups = rule.settings.get("num_heads"), rule.settings.get("num_key_value_groups")
    if not heads or not groups or heads % groups:
        raise rule.refuse(f"{rule.fused} needs num_heads, a multiple of num_key_value_groups; got {heads} and {groups}")
    return groups


def _turn(array: Any, name: str) -> Any:
    return array.T if name.endswith(_TRANSPOSED) else array


def _plain(name: str) -> str:
    return name.removesuffix(_TRANSPOSED)


# reading rules


def _parse(text: str) -> _Rule:
    left, arrow, right = text.partition("->")
    rule = _Rule(text, _names(left), ())
    if not arrow:
        raise rule.refuse("a rule has names, ->, and names")
    names, settings, fused = [], {}, None
    for item in (part.strip() for part in _ITEMS.findall(right)):
        key, equal, value = (part.strip() for part in item.partition("="))
        if equal:
            if key not in _SETTINGS:
                raise rule.refuse(f"the setting {key!r}{did_you_mean(key, _SETTINGS)}")
            settings[key] = _setting(rule, key, value.strip("\"'"))
        elif item in _FUSED:
            fused = item
        elif item:
            names.append(item)
    rule = replace(rule, right=tuple(names), settings=settings, fused=fused)
    wrong = [name for name in (*rule.left, *rule.right) if " " in name]
    if not rule.left or not rule.right or wrong:
        raise rule.refuse("a rule has names, ->, and names" if not wrong else f"{wrong[0]!r} is no name")
    if any(name.endswith(_TRANSPOSED) for name in rule.right):
        raise rule.refuse("^T stands on the left alone")
    return rule


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _setting(rule: _Rule, key: str, value: str) -> Any:
    if "dtype" in key:
        return value
    numbers = [int(n) for n in re.findall(r"\d+", value)]
    if key == "permute":
        return tuple(numbers)
    if not value.isdigit():
        raise rule.refuse(f"{key} is a whole number, got {value!r}")
    return numbers[0]


def _expand(rule: _Rule, sources: Collection[str], targets: Collection[str] | None, reverse: bool) -> Iterator[_Rule]:
    """The rule once for each set of numbers that its placeholders stand for, ranges and stars written out."""
    first, second = (targets or (), sources) if reverse else (sources, targets or ())
    for one in _numbered(rule, sources, reverse):
        left, right = _listed(one.left, first), _listed(one.right, second)
        yield replace(one, left=left, right=right)


def _numbered(rule: _Rule, sources: Collection[str], reverse: bool) -> list[_Rule]:
    inputs = rule.right if reverse else rule.left
    places = sorted({place for name in (*rule.left, *rule.right) for place in _PLACE.findall(name)})
    if not places:
        return [rule]
    pattern = next((_plain(name) for name in inputs if _PLACE.search(name)), None)
    if pattern is None:
        raise rule.refuse(f"{places[0]} has no name to be looked up by")
    seen: set[str] = set()
    expression = ""
    for part in re.split(r"(\$[A-Z][A-Z_]*)", pattern):
        if not _PLACE.fullmatch(part):
            expression += re.escape(part)
        else:
            expression += f"(?P={part[1:]})" if part in seen else rf"(?P<{part[1:]}>\d+)"
            seen.add(part)
    if not seen >= set(places):
        raise rule.refuse(f"{sorted(set(places) - seen)[0]} is not in {pattern!r}, by which numbers are looked up")
    matches = [match.groupdict() for match in map(re.compile(expression).fullmatch, sources) if match]
    combinations = sorted({tuple(int(match[place[1:]]) for place in places) for match in matches})
    return [_with_numbers(rule, dict(zip(places, numbers, strict=True))) for numbers in combinations]


def _with_numbers(rule: _Rule, numbers: Mapping[str, int]) -> _Rule:
    def fill(names: tuple[str, ...], shift: int) -> tuple[str, ...]:
        values = {place: n - shift if place == _OFFSET else n for place, n in numbers.items()}
        return tuple(_PLACE.sub(lambda match: str(values[match[0]]), name) for name in names)

    return replace(rule, left=fill(rule.left, 0), right=fill(rule.right, 1))


def _listed(names: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    listed: list[str] = []
    for name in names:
        bounds = _RANGE.match(name)
        if bounds:
            listed += [f"{bounds[1]}_{n}" for n in range(int(bounds[2]), int(bounds[3]))]
        elif "*" in name:
            head, _, tail = _plain(name).partition("*")
            numbers = re.compile(re.escape(head) + r"(\d+)" + re.escape(tail))
            found = sorted((int(match[1]), match[0]) for match in map(numbers.fullmatch, known) if match)
            listed += [key + name[len(_plain(name)) :] for _, key in found]
        else:
            listed.append(name)
    return tuple(listed)


# states of optimizers


def _by_state(keys: Iterable[str]) -> dict[str, list[str]]:
    """State of an optimizer, "" for a weight -> names of the weights."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        name, _, state = key.rpartition(".")
        if state not in _STATES:
            name, state = key, ""
        groups.setdefault(state, []).append(name)
    return groups


def _key(name: str, state: str) -> str:
    return f"{name}.{state}" if state else name
