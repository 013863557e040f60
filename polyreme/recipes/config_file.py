"""Reading a configuration: YAML, then key=value overrides, each value remembered with where it came from.

Every refusal is a ConfigError that names the file, key and line.
"""

import difflib
import re
import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from polyreme.errors import ConfigError
from polyreme.recipes.config import PlanConfig, PretrainConfig, RunConfig, Section, flatten
from polyreme.recipes.finetune_config import OTHER_WORDS, FinetuneConfig
from polyreme.yaml_loader import YamlLoader

_MAX_BYTES = 1 << 20  # a configuration is written by hand; more is some other file given by mistake
COMMAND_LINE = "command line"
DEFAULT = "default"


class _Loader(YamlLoader):
    """Safe YAML that also reads 1e-4 as a number, which YAML 1.1 does not."""


_Loader.yaml_implicit_resolvers = {
    first: list(pairs) for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@dataclass(frozen=True)
class Loaded:
    """A configuration with the origin of each dotted key: "default", "FILE:LINE" or "command line"."""

    config: Any
    path: Path
    overrides: tuple[str, ...]
    origin: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """Folder of the file; relative data paths are looked for here first."""
        return self.path.parent


@dataclass
class _Values:
    """Settings gathered so far: nested values, and the origin of each dotted key."""

    tree: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, origin: str) -> None:
        *sections, leaf = key.split(".")
        target = self.tree
        for name in sections:
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{origin}: {key}: {name} holds a value, it is not a section")
        target[leaf] = value
        self.origin[key] = origin


def load(path: str | Path, overrides: Iterable[str] = (), kind: type[RunConfig] | None = None) -> Loaded:
    """Read a YAML file and apply dotted overrides such as train.learning_rate=1e-4.

    kind: of the configuration; what the file tells if None, which names a stage or weights to fine-tune, or neither.
    Raises ConfigError for a file that cannot be read, of another kind, a key that does not exist (naming the nearest
    that does), a key given twice, and a value of the wrong type or out of range.
    """
    path, overrides = Path(path), tuple(overrides)
    values, kind = _gather(path, overrides, kind)
    try:
        config = kind.model_validate(values.tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, values, str(path), kind)) from None
    origin = {key: values.origin.get(key, DEFAULT) for key in flatten(config)}
    return Loaded(config, path, overrides, origin)


def devices(path: str | Path, overrides: Iterable[str] = ()) -> tuple[str | None, int]:
    """(device, how many of it the plan needs) of a configuration, whose model is not looked at: what jax is told
    before it is loaded. Raises as load."""
    path = Path(path)
    values, kind = _gather(path, tuple(overrides), None)
    try:
        plan = PlanConfig.model_validate(values.tree.get("plan", {}))
    except ValidationError as error:
        raise ConfigError(_explain(error, values, str(path), kind, "plan")) from None
    device = values.tree.get("device")
    return device if isinstance(device, str) else None, plan.num_devices


def _gather(path: Path, overrides: Iterable[str], wanted: type[RunConfig] | None) -> tuple[_Values, type[RunConfig]]:
    values = _Values()
    _read_file(path, values)
    is_tuned = "stage" in values.tree or isinstance(values.tree.get("model"), str)
    kind: type[RunConfig] = FinetuneConfig if is_tuned else PretrainConfig
    if wanted is not None and wanted is not kind:
        command, what = ("finetune", "names weights to go on from") if is_tuned else ("pretrain", "names none")
        raise ConfigError(
            f"{path}: fine-tuning goes on from weights that model: names, pretraining from none, and this file {what}; "
            f"run polyreme {command}, or name another file"
        )
    for text in overrides:
        key, value = _parse_override(text, kind)
        values.put(key, value, COMMAND_LINE)
    return values, kind


def known_keys(kind: type[RunConfig] = PretrainConfig) -> list[str]:
    """Every dotted key a configuration may hold."""
    keys: list[str] = []
    for name in kind.model_fields:
        section = _section(name, kind)
        keys += [f"{name}.{key}" for key in section.model_fields] if section else [name]
    return keys


def _hint(key: str, kind: type[RunConfig]) -> str:
    """What an unknown key was meant for."""
    known = known_keys(kind)
    meant = OTHER_WORDS.get(key.rsplit(".", 1)[-1])
    return f"; did you mean {meant!r}?" if meant in known else nearest(key, known)


def nearest(word: str, words: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the word most like the one given, or nothing.

    >>> nearest("lerning_rate", ["learning_rate", "steps"])
    "; did you mean 'learning_rate'?"
    """
    words = list(words)
    # a key in the wrong section is closer than any spelling: compare whole keys first, then their last part
    same_leaf = [known for known in words if known.rsplit(".", 1)[-1] == word.rsplit(".", 1)[-1]]
    close = same_leaf or difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _read_file(path: Path, values: _Values) -> None:
    text = _read_text(path)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{path}: the file is empty; it needs sections such as model:, data: and train:")
        for key, node in _entries(root, path, "", loader):
            if isinstance(node, yaml.MappingNode):
                for leaf, leaf_node in _entries(node, path, f"{key}.", loader):
                    values.put(leaf, loader.construct_object(leaf_node, deep=True), _origin(path, leaf_node))
            else:
                values.put(key, loader.construct_object(node, deep=True), _origin(path, node))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; name a configuration file inside it")
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigError(f"{path}: {size:,} bytes is too long for a configuration (at most {_MAX_BYTES:,})")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        # by stems: names of two letters are near any other by ".yaml" alone
        others = {p.stem: p.name for p in path.parent.glob("*.yaml")} if path.parent.is_dir() else {}
        close = difflib.get_close_matches(path.stem, others, n=1)
        near = f"; did you mean {others[close[0]]!r}?" if close else ""
        shipped = "" if near else "; `polyreme examples` writes those that come with polyreme"
        raise ConfigError(f"{path}: no such configuration file{near}{shipped}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _entries(node: yaml.Node, path: Path, prefix: str, loader: _Loader) -> Iterable[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{_origin(path, node)}: expected key: value lines, got {_kind(node)}")
    if node.tag != "tag:yaml.org,2002:map":
        raise ConfigError(f"{_origin(path, node)}: a section is of settings, not of {node.tag!r}; take that tag away")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = prefix + str(loader.construct_object(key_node, deep=True))
        if key in seen:
            raise ConfigError(f"{_origin(path, key_node)}: {key} is given twice; keep one")
        seen.add(key)
        yield key, value_node


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return f"a list of {len(node.value)}"
    return reprlib.repr(node.value)


def _origin(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _parse_override(text: str, kind: type[RunConfig]) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{COMMAND_LINE}: {text!r} is not key=value, for example train.steps=100")
    inside = [known for known in known_keys(kind) if known.startswith(f"{key}.")]
    if inside:
        raise ConfigError(f"{COMMAND_LINE}: {key} is a section; set one of its keys, such as {inside[0]}")
    if key not in known_keys(kind):
        raise ConfigError(f"{COMMAND_LINE}: unknown key {key!r}{_hint(key, kind)}")
    if any("\udc80" <= c <= "\udcff" for c in value):  # how Python spells bytes that it could not read
        raise ConfigError(
            f"{COMMAND_LINE}: {key}: {value!r} has bytes that are not {sys.getfilesystemencoding()}; "
            "write them as UTF-8 and set LC_ALL=C.UTF-8"
        )
    try:
        return key, yaml.load(value, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{COMMAND_LINE}: {key}: {value!r} cannot be read; quote it for YAML") from None


def _explain(error: ValidationError, values: _Values, path: str, kind: type[RunConfig], section: str = "") -> str:
    problems = error.errors()
    keys = [_key_of((section, *problem["loc"]) if section else problem["loc"], kind) for problem in problems]
    first, key = problems[0], keys[0]
    where = f"{values.origin.get(key, path)}: {key}" if key else path
    others = list(dict.fromkeys(other for other in keys[1:] if other not in ("", key)))
    rest = f" (wrong as well: {', '.join(others[:5])})" if others else ""
    if first["type"] == "extra_forbidden":
        inner, known = first["loc"][-1], _keys_inside(key, kind)
        if known:  # of a mapping that is the value of a key
            return f"{where}: unknown key {inner!r} in it{nearest(str(inner), known)}{rest}"
        return f"{where}: unknown key{_hint(key, kind)}{rest}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{where}: {message}{rest}"
    if first["type"] == "missing":
        return f"{where}: it has no value and needs one{rest}"
    return f"{where}: {message[0].lower()}{message[1:]}, got {reprlib.repr(first['input'])}{rest}"


def _key_of(location: tuple[int | str, ...], kind: type[RunConfig]) -> str:
    """Dotted key of a pydantic location, without the indices and union branches at its end."""
    parts = [str(part) for part in location[:2]]
    return ".".join(parts if parts and _section(parts[0], kind) else parts[:1])


def _keys_inside(key: str, kind: type[RunConfig]) -> list[str]:
    """The keys of the mapping that is a known key's value, [] for other values."""
    section, _, leaf = key.partition(".")
    of = _section(section, kind)
    info = of.model_fields.get(leaf) if of else None
    return list(getattr(info.annotation, "model_fields", {})) if info else []


def _section(name: str, kind: type[RunConfig]) -> type[Section] | None:
    """The class of a section, or None if the key is a plain value or unknown."""
    info = kind.model_fields.get(name)
    section = info.annotation if info else None
    return section if isinstance(section, type) and issubclass(section, Section) else None
