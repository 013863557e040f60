"""DistributedStrategy: every setting of a hybrid-parallel job, checked as it is set.

strategy_fields.py says what each setting does; job.py turns a strategy into a Plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from polyreme.distributed.fleet.base import prototxt
from polyreme.distributed.fleet.base.strategy_fields import FIELDS, GATES
from polyreme.distributed.settings import Field, Settings, Table
from polyreme.errors import StrategyError, did_you_mean

_WIDTH = 98  # characters between the rules


class DistributedStrategy:
    """Settings as attributes; a group of settings (`amp_configs`, `hybrid_configs`) is read and set like a dict.

    Setting a group changes the keys given and leaves the others. Raises StrategyError, which is a TypeError, for an
    unknown name or a value of another type. What each setting does is in docs/fleet.md; `fleet.init` refuses what
    cannot be honoured.

    >>> strategy = DistributedStrategy()
    >>> strategy.hybrid_configs = {"dp_degree": 2, "mp_degree": 4}
    >>> strategy.hybrid_configs["pp_configs"].delay_scale_loss = True
    >>> strategy.hybrid_configs["mp_degree"]
    4
    """

    _settings: Settings

    def __init__(self) -> None:
        object.__setattr__(self, "_settings", Settings("", FIELDS))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in FIELDS:
            raise AttributeError(f"DistributedStrategy has no attribute {name!r}{did_you_mean(name, FIELDS)}")
        return self._settings[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "build_strategy" and hasattr(value, "given"):  # a BuildStrategy, which has more settings
            known = FIELDS["build_strategy"]
            value = {key: setting for key, setting in value.given().items() if key in known}
        self._settings[name] = value

    def __delattr__(self, name: str) -> None:
        del self._settings[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *FIELDS})

    def __getstate__(self) -> dict[str, Any]:
        return self._settings.given()

    def __setstate__(self, given: dict[str, Any]) -> None:
        DistributedStrategy.__init__(self)
        self._settings.assign(given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistributedStrategy) and self._settings == other._settings

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # it changes

    @property
    def hybrid_parallel_order(self) -> list[str]:
        """The order of the mesh axes, outermost first: hybrid_configs["order"]."""
        return self._settings["hybrid_configs"]["order"]

    def given(self) -> dict[str, Any]:
        """The settings that were set, whatever their value, as nested dicts."""
        return self._settings.given()

    def changed(self) -> dict[str, Any]:
        """Dotted name -> value of the settings that differ from their defaults.

        >>> strategy = DistributedStrategy()
        >>> strategy.amp = True
        >>> strategy.changed()
        {'amp': True}
        """
        return self._settings.changed()

    def save_to_prototxt(self, output: str) -> None:
        """Write the settings that were set to a file in protobuf's text format."""
        Path(output).write_text(prototxt.write(_as_words(self.given())), encoding="utf-8")

    def load_from_prototxt(self, pb_file: str) -> None:
        """Set what a file written by save_to_prototxt holds; other settings stay as they are.

        Raises ConfigError, changing nothing, for a file that is not in the text format, and StrategyError for a name or
        a value that no strategy has.
        """
        found = prototxt.read(Path(pb_file).read_text(encoding="utf-8"), str(pb_file))
        values = _convert(found, FIELDS, str(pb_file))
        Settings("", FIELDS).assign(values)  # checks all of it before any is set
        self._settings.assign(values)

    def __repr__(self) -> str:
        rule = "+" + "=" * _WIDTH + "+"
        rows = [rule, f"|{'DistributedStrategy':^{_WIDTH}}|", rule]
        plain = {name: self._settings[name] for name, entry in FIELDS.items() if isinstance(entry, Field)}
        rows += [*_rows(plain), rule]
        for name, entry in FIELDS.items():
            if not isinstance(entry, Field):
                off = name in GATES and not plain[GATES[name]]
                title = f"{name} (not in force: {GATES[name]} is off)" if off else name
                rows += [f"|{title:^{_WIDTH}}|", "+" + "-" * _WIDTH + "+"]
                rows += [*_rows(_flat(self._settings[name])), rule]
        return "\n".join(rows)


def _rows(values: Mapping[str, Any]) -> list[str]:
    return [f"| {name:<50}{_show(value):>{_WIDTH - 52}} |" for name, value in values.items()]


def _show(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else repr(value)


def _flat(settings: Settings, prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if not isinstance(value, Settings):
            result[prefix + name] = value
        elif value.changed() or not name.endswith("nccl_config"):
            result.update(_flat(value, f"{prefix}{name}."))
    return result


def _as_words(given: dict[str, Any]) -> dict[str, Any]:
    # the mode is an enumeration, whose values are written without quotes
    return {**given, "mode": prototxt.Word(given["mode"])} if "mode" in given else given


def _convert(found: Mapping[str, list[Any]], table: Table, where: str) -> dict[str, Any]:
    """The values read from a file, converted to the types of the table."""
    values: dict[str, Any] = {}
    for name, texts in found.items():
        if name not in table:
            raise StrategyError(f"{where}: a strategy has no setting {name!r}{did_you_mean(name, table)}")
        entry = table[name]
        if not isinstance(entry, Field):
            parts = [_convert(_message(name, part, where), entry, where) for part in texts]
            values[name] = {key: value for part in parts for key, value in part.items()}
        elif isinstance(entry.default, list):
            values[name] = [_scalar(name, each, entry.item, where) for each in texts]
        else:
            values[name] = _scalar(name, texts[-1], type(entry.default), where)  # the last one counts
    return values


def _message(name: str, value: Any, where: str) -> Mapping[str, list[Any]]:
    if not isinstance(value, Mapping):
        raise StrategyError(f"{where}: {name} is a group of settings, got {value!r}; write {name} {{ ... }}")
    return value


_TRUE, _FALSE = ("true", "True", "t", "1"), ("false", "False", "f", "0")


def _scalar(name: str, value: Any, kind: Any, where: str) -> Any:
    if kind is dict and isinstance(value, Mapping):
        return {key: [_plain(each) for each in given] for key, given in value.items()}
    if isinstance(value, prototxt.Word) == (kind is not str) or (name == "mode" and value):
        try:
            return _CONVERT[kind](value)
        except (KeyError, ValueError):
            pass
    raise StrategyError(f"{where}: {name} cannot be {value!r}; give {_KINDS[kind]}")


_CONVERT: dict[Any, Any] = {
    bool: {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}.__getitem__,
    int: lambda text: int(text, 0),
    float: lambda text: float(text.rstrip("fF")),
    str: str,
}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes", dict: "a message"}


def _plain(value: Any) -> Any:
    """A value read from a file, of a type that follows from its text where no table gives one."""
    if isinstance(value, Mapping):
        return {key: [_plain(each) for each in given] for key, given in value.items()}
    if not isinstance(value, prototxt.Word):
        return value
    for kind in (int, float, bool):
        try:
            return _CONVERT[kind](value)
        except (KeyError, ValueError):
            continue
    return str(value)
