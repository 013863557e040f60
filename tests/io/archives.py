"""Tiny archives in the formats of published data sets."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def tar(path: Path, files: dict[str, bytes | str], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def gzipped(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


def picture(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()
