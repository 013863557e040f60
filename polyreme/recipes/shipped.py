"""The configurations and texts that come with polyreme, and a folder with copies of them."""

import shutil
from importlib.resources import files
from pathlib import Path

from polyreme.errors import ConfigError

SHIPPED = ("configs/*.yaml", "data/*.gz", "data/*.jsonl")
"""What `polyreme examples` copies, from the root of a checkout or from the folder that a wheel has of it."""


def shipped_folder() -> Path:
    """The folder of shipped files: in the installed package, or in the checkout that the package is loaded from."""
    package = Path(str(files("polyreme")))
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent


def copy_examples(folder: Path) -> list[Path]:
    """Copy them below a folder and say what was written; a file that is there already is left as it is.

    Raises ConfigError where nothing was shipped, or where the folder cannot be written.
    """
    source = shipped_folder()
    files_there = [path for pattern in SHIPPED for path in sorted(source.glob(pattern))]
    if not files_there:
        raise ConfigError(f"{source}: has no configs and data; install the wheel anew, or use a checkout")
    written = []
    for path in files_there:
        target = folder / path.relative_to(source)
        if target.exists():
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        except OSError as error:
            raise ConfigError(f"{target}: cannot be written: {error.strerror}; name another folder") from None
        written.append(target)
    return written
