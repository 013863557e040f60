"""polyreme.hub: models that a repository offers in its hubconf.py, on this machine or on GitHub or Gitee.

hubconf.py is ordinary Python and is run: load from repositories you trust.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyreme import flags
from polyreme.core.devices.place import as_place
from polyreme.core.state import TensorState
from polyreme.errors import ConfigError, DataError, did_you_mean
from polyreme.io import serialization
from polyreme.io.archives import is_archive
from polyreme.io.download import fetch, unpack, weights_folder
from polyreme.module_names import suggest_names

_ARCHIVES = {
    "github": "https://github.com/{owner}/{name}/archive/{branch}.zip",
    "gitee": "https://gitee.com/{owner}/{name}/repository/archive/{branch}.zip",
}
_REPOSITORY = re.compile(r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(:(?P<branch>[\w./-]+))?")
_HASHED = re.compile(r"-([0-9a-f]{8,64})\.[^-]*$")
builtin_list = list


def list(repo_dir: str, source: str = "github", force_reload: bool = False) -> builtin_list[str]:
    """Names that a repository offers: the public functions of its hubconf.py. Arguments are those of load."""
    with _hubconf(repo_dir, source, force_reload) as module:
        return sorted(_entries(module))


def help(repo_dir: str, model: str, source: str = "github", force_reload: bool = False) -> str | None:
    """The docstring of what a repository offers under a name. Arguments are those of load."""
    with _hubconf(repo_dir, source, force_reload) as module:
        return _entry(module, model, repo_dir).__doc__


def load(repo_dir: str, model: str, source: str = "github", force_reload: bool = False, **kwargs: Any) -> Any:
    """What the repository's function called model gives for kwargs: usually a Layer.

    repo_dir: with source="local" a folder; with "github" or "gitee" "owner/name" or "owner/name:branch" (main by
    default), fetched once into the user's cache, again with force_reload. Raises ConfigError for what is named wrongly,
    DataError for what cannot be had: the repository, its hubconf.py, or modules that it lists as dependencies.
    """
    with _hubconf(repo_dir, source, force_reload) as module:
        return _entry(module, model, repo_dir)(**kwargs)


def load_state_dict_from_url(
    url: str,
    model_dir: str | None = None,
    check_hash: bool = False,
    file_name: str | None = None,
    map_location: Any = None,
) -> Any:
    """What polyreme.load reads from the file of a URL, fetched once into model_dir (the user's cache by default).

    An archive is unpacked, and must hold one file. check_hash: the file's name ends in -DIGEST.EXT, the first eight or
    more digits of its SHA-256, which is then checked. map_location: "numpy" or "np" gives ndarrays, a device or its
    name puts Tensors there. Raises DataError, ConfigError.
    """
    digest = None
    if check_hash:
        found = _HASHED.search(file_name or url)
        if found is None:
            raise ConfigError(f"load_state_dict_from_url: check_hash=True, and {file_name or url!r} has no -DIGEST.EXT")
        digest = found[1]
    path = fetch(url, model_dir or weights_folder(), file_name, sha256_prefix=digest)
    if is_archive(path):
        files = unpack(path, path.parent / f"{path.name}.unpacked")
        if len(files) != 1:
            raise DataError(f"{url} is an archive of {len(files)} files; one with a single file of weights is needed")
        (path,) = files
    if map_location in ("numpy", "np"):
        return serialization.load(path, return_numpy=True)
    loaded = serialization.load(path)
    return loaded if map_location is None else _place(loaded, as_place(map_location))


def _place(value: Any, place: Any) -> Any:
    if isinstance(value, TensorState):
        return value.to(place)  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {k: _place(v, place) for k, v in value.items()}
    return type(value)(_place(v, place) for v in value) if isinstance(value, (builtin_list, tuple)) else value


def _folder(repo_dir: str, source: str, force_reload: bool) -> Path:
    if source == "local":
        return Path(repo_dir).expanduser()
    if source not in _ARCHIVES:
        raise ConfigError(f"hub: source={source!r}{did_you_mean(source, [*_ARCHIVES, 'local'])}")
    match = _REPOSITORY.fullmatch(repo_dir)
    if match is None:
        raise ConfigError(
            f"hub: {repo_dir!r} names no repository; write 'owner/name' or 'owner/name:branch', or source='local'"
        )
    owner, name, branch = match["owner"], match["name"], match["branch"] or "main"
    home = flags.cache_home() / "polyreme" / "hub" / f"{source}_{owner}_{name}_{branch.replace('/', '_')}"
    if force_reload or not home.is_dir():
        url = _ARCHIVES[source].format(owner=owner, name=name, branch=branch)
        unpack(fetch(url, home.parent, f"{home.name}.zip", again=True), home)
    # the archive holds one folder, the repository
    inside = [p for p in home.iterdir() if p.is_dir()]
    return inside[0] if len(inside) == 1 and not (home / "hubconf.py").exists() else home


@contextmanager
def _hubconf(repo_dir: str, source: str, force_reload: bool) -> Any:
    """The module hubconf.py of a repository, whose folder is importable inside the block."""
    folder = _folder(repo_dir, source, force_reload)
    path = folder / "hubconf.py"
    if not path.is_file():
        raise DataError(f"hub: {repo_dir!r} has no hubconf.py, at {path}")
    spec = importlib.util.spec_from_file_location("hubconf", path)
    assert spec is not None  # it is a .py file
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        _check_dependencies(path)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(folder))


def _check_dependencies(path: Path) -> None:
    """Raise DataError if a module that hubconf.py lists as dependencies is not installed."""
    found = re.search(r"^dependencies\s*=\s*\[(.*?)\]", path.read_text(), re.MULTILINE | re.DOTALL)
    wanted = re.findall(r"""["']([\w.]+)["']""", found[1]) if found else []
    missing = [m for m in wanted if m not in ("paddle", "polyreme") and importlib.util.find_spec(m) is None]
    if missing:
        raise DataError(f"hub: {path} needs {', '.join(missing)}, not installed here; pip install {' '.join(missing)}")


def _entries(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    return {n: v for n, v in vars(module).items() if callable(v) and not n.startswith("_")}


def _entry(module: types.ModuleType, name: str, repo_dir: str) -> Callable[..., Any]:
    entries = _entries(module)
    if name not in entries:
        raise ConfigError(f"hub: {repo_dir!r} offers no {name!r}{did_you_mean(name, entries)}")
    return entries[name]


__all__ = ["help", "list", "load", "load_state_dict_from_url"]

suggest_names(__name__)
