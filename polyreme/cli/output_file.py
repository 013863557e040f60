"""The file that --output names: whether it can be written, and writing it whole or not at all."""

import os
from pathlib import Path

from polyreme.errors import ConfigError


def check_writable(path: Path) -> None:
    """Raise ConfigError for an --output that a file cannot be put at, or that is a device or a pipe."""
    if path.is_dir():
        raise ConfigError(f"--output {path}: is a folder; give the name of a file in it")
    if path.exists() and not path.is_file():
        raise ConfigError(f"--output {path}: is no regular file, and would be replaced by one; give another name")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--output {path}: the folder {path.parent} cannot be written to; give another")


def write(path: Path, text: str) -> None:
    """Put text at path at once: a reader finds the old file or the new one. Raises ConfigError where it cannot be."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written ({error.strerror}); give another name") from None
