"""The key of a server, from a file."""

from pathlib import Path

from polyreme.errors import ConfigError


def first_line(path: Path) -> str:
    """What --api-key-file names. Raises ConfigError for a file that is empty or not of ASCII."""
    try:
        lines = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: not a readable file of ASCII ({type(error).__name__})") from None
    if not lines:
        raise ConfigError(f"--api-key-file {path}: is empty; give the key on its first line")
    return lines[0]
