"""Files by URL, kept in a folder: from this machine, or fetched by HTTP once and checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit

from polyreme import flags
from polyreme.errors import ConfigError, DataError
from polyreme.io.archives import extract

_SECONDS = 30  # without a byte, after which a server counts as gone


def weights_folder() -> Path:
    """Where weights are kept: polyreme/weights in the user's cache."""
    return flags.cache_home() / "polyreme" / "weights"


def fetch(
    url: str,
    folder: str | os.PathLike[str],
    file_name: str | None = None,
    md5: str | None = None,
    sha256_prefix: str | None = None,
    again: bool = False,
) -> Path:
    """The file of a URL (http, https, file, or a path) in folder, fetched unless it is there already, or with again.

    Raises DataError if it cannot be had or its digest is another, ConfigError for other URLs.
    """
    parts = urlsplit(url)
    name = file_name or Path(unquote(parts.path)).name
    if not name:
        raise ConfigError(f"{url!r} names no file; give file_name=")
    path = Path(folder) / name
    if path.is_file() and not again and not _wrong(path, md5, sha256_prefix):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f"{name}.", suffix=".part")
    os.close(handle)
    try:
        _copy(url, parts.scheme, Path(part), path)
        wrong = _wrong(Path(part), md5, sha256_prefix)
        if wrong:
            raise DataError(f"{url}: {wrong}; the file is another one, or was damaged on the way")
        os.replace(part, path)  # whole or not at all
    finally:
        Path(part).unlink(missing_ok=True)
    return path


def _copy(url: str, scheme: str, part: Path, path: Path) -> None:
    if scheme in ("http", "https"):
        try:
            with urllib.request.urlopen(url, timeout=_SECONDS) as response, open(part, "wb") as file:
                shutil.copyfileobj(response, file)
        except (OSError, urllib.error.URLError) as error:
            raise DataError(f"{url} cannot be fetched ({error}); without a network, put the file at {path}") from error
        return
    if scheme not in ("", "file"):
        raise ConfigError(f"{url!r}: {scheme!r} is no way to fetch a file; give an http(s) or file URL, or a path")
    source = Path(unquote(urlsplit(url).path) if scheme else url)
    if not source.is_file():
        raise DataError(f"{url}: there is no file {source}")
    shutil.copyfile(source, part)


def _wrong(path: Path, md5: str | None, sha256_prefix: str | None) -> str:
    """What is wrong with a file's digest; empty if nothing."""
    for kind, wanted in (("md5", md5), ("sha256", sha256_prefix)):
        if wanted is None:
            continue
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, kind).hexdigest()
        if not digest.startswith(wanted.lower()):
            return f"{kind} {digest}, wanted {wanted}"
    return ""


def unpack(path: Path, folder: Path) -> list[Path]:
    """Unpack an archive into folder, in the place of what is there; returns its files. Raises DataError as extract."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        content = Path(fresh) / "content"
        content.mkdir()
        extract(path, content)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(content, folder)
    return sorted(p for p in folder.rglob("*") if p.is_file())
