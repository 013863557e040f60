"""Weights of published networks, read from files that lie on this machine: what pretrained=True loads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from polyreme.errors import ConfigError, DataError
from polyreme.io.serialization import load
from polyreme.nn import Layer

L = TypeVar("L", bound=Layer)

_SUFFIXES = (".pdparams", ".safetensors")


def folders() -> list[Path]:
    """Where files of weights are looked for, in this order."""
    home = os.environ.get("XDG_CACHE_HOME")
    cache = Path(home) if home else Path.home() / ".cache"
    return [cache / "polyreme" / "weights", Path("/usr/share/weights")]


def weights_file(name: str) -> Path:
    """The file NAME.pdparams (as polyreme.save writes it) or NAME.safetensors. Raises DataError where there is none."""
    files = [folder / f"{name}{suffix}" for folder in folders() for suffix in _SUFFIXES]
    path = next((f for f in files if f.is_file()), None)
    if path is None:
        raise DataError(
            f"{name}: pretrained=True, but there is no {files[0]} (nor {', '.join(map(str, files[1:]))}); no weights "
            "come with polyreme and none are downloaded: put a file there, as polyreme.save writes a state_dict"
        )
    return path


def load_weights(network: Layer, path: Path) -> Layer:
    """The network with the weights in a file. Raises DataError where names or shapes are not those of the network."""
    stored, own = load(path), network.state_dict()
    same = {k for k in own if k in stored and list(stored[k].shape) == list(own[k].shape)}
    wrong = sorted((set(own) | set(stored)) - same)
    if wrong:
        raise DataError(
            f"{path}: {len(wrong)} names are missing, unknown or of another shape, such as {', '.join(wrong[:3])}; "
            "give the weights of this network"
        )
    network.set_state_dict(stored)
    return network


def maker(name: str, build: Callable[..., L], about: str, **fixed: Any) -> Callable[..., L]:
    """The function called name: build(**fixed, **kwargs), and weights if its first argument, pretrained, is True.

    fixed: keyword arguments of build; those that are kwargs of the call too are replaced.
    """

    def make(pretrained: bool = False, **kwargs: Any) -> L:
        if not isinstance(pretrained, bool):
            raise ConfigError(f"{name}: pretrained={pretrained!r}; give True or False")
        # looked for first: a large network takes seconds to make
        path = weights_file(name) if pretrained else None
        network = build(**{**fixed, **kwargs})
        return network if path is None else load_weights(network, path)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"{about}; keyword arguments are those of {build.__name__}. pretrained: see weights_file."
    return make
