"""polyreme.version: which release this is.

Floor: 0.
"""

import importlib.metadata

full_version = importlib.metadata.version("polyreme")
major, minor, patch = (*full_version.split("."), "0")[:3]


def show() -> None:
    """Print the version."""
    print(f"polyreme {full_version}")  # noqa: T201  (what it is for)
