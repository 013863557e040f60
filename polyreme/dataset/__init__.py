"""polyreme.dataset: readers over data sets that lie on this machine; nothing is downloaded."""

from typing import Any

from polyreme.dataset import mnist

__all__ = ["mnist"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"polyreme.dataset has no {name!r}, only mnist: nothing is downloaded here; write a reader, a function that "
        "yields samples, over files of your own"
    )
