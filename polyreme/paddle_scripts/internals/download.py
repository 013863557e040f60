"""paddle.utils.download and paddle.dataset.common: files by URL, kept in a folder and unpacked."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from polyreme import flags
from polyreme.io.archives import is_archive
from polyreme.io.download import fetch, unpack, weights_folder

HOME = str(Path.home())
DATA_HOME = str(flags.cache_home() / "paddle" / "dataset")
WEIGHTS_HOME = str(weights_folder())
logger = logging.getLogger("polyreme.download")


def is_url(path: str) -> bool:
    """Whether a path is an http(s) URL."""
    return path.startswith(("http://", "https://"))


def get_path_from_url(
    url: str, root_dir: str, md5sum: str | None = None, check_exist: bool = True, decompress: bool = True,
    method: str = "get",
) -> str:  # fmt: skip
    """Where the file of a URL is in root_dir, fetched once; of an archive, where it is unpacked.

    Raises DataError if it cannot be had or its digest is another.
    """
    path = fetch(url, root_dir, md5=md5sum, again=not check_exist)
    return _decompress(str(path)) if decompress and is_archive(path) else str(path)


def _decompress(fname: str) -> str:
    """Unpack an archive beside itself: the one folder or file in it, else a folder of its name."""
    path = Path(fname)
    folder = path.parent / path.name.split(".")[0]
    if not folder.is_dir():
        unpack(path, folder)
    inside = list(folder.iterdir())
    return str(inside[0] if len(inside) == 1 else folder)


def _map_path(url: str, root_dir: str) -> str:
    return os.path.join(root_dir, url.rpartition("/")[2])


def _download(url: str, path: str, md5sum: str | None = None, method: str = "get") -> str:
    return str(fetch(url, path, md5=md5sum))


def md5file(fname: str) -> str:
    """The MD5 digest of a file."""
    with open(fname, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _md5check(fullname: str, md5sum: str | None = None) -> bool:
    return md5sum is None or md5file(fullname) == md5sum


def download(url: str, module_name: str, md5sum: str, save_name: str | None = None) -> str:
    """Where the file of a URL is below DATA_HOME/module_name, fetched once. Raises DataError if it cannot be had."""
    return str(fetch(url, Path(DATA_HOME) / module_name, save_name, md5=md5sum))


def check_and_create_dir(path: str) -> None:
    """Make the folders that a file of this path is to stand in."""
    must_mkdirs(os.path.dirname(path) or ".")


def must_mkdirs(path: str) -> None:
    """Make a folder, if there is none."""
    os.makedirs(path, exist_ok=True)


def _get_unique_endpoints(trainer_endpoints: Any) -> set[str]:
    """One endpoint of each machine."""
    by_host: dict[str, str] = {}
    for endpoint in trainer_endpoints:
        by_host.setdefault(endpoint.partition(":")[0], endpoint)
    return set(by_host.values())
