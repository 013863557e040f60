"""matplotlib, which comes with the extra polyreme[logs] and is imported when a picture is asked for.

Never imports: jax.
"""

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError


def has_matplotlib() -> bool:
    """Whether pictures can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def matplotlib_part(name: str, asked: str) -> Any:
    """A module of matplotlib; ConfigError where it is not installed, with the option that asked for a picture."""
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{asked} needs matplotlib, which is not installed; run pip install polyreme[logs], or leave {asked} out"
        ) from error


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format of the path's suffix, the whole file at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format=path.suffix.lower()[1:])
    os.replace(temporary, path)
