"""Pictures that a run has: files beside its log, and its pipeline schedule, drawn when it is asked for."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import DEFAULT_SCHEDULE
from polyreme.mesh.schedule import make_schedule
from polyreme.recipes.pictures import has_matplotlib
from polyreme.recipes.planning.schedule_drawing import draw

TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
"""Suffixes of pictures, and what they are told to a browser as."""
_MOST = 50
_MOST_BYTES = 32 << 20


def pictures_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names and paths of pictures in a run's folder and the folders right below it: the loss, a plan that `polyreme
    plan --explain` drew, the timeline, communication graph and placement of `polyreme profile --output`."""
    count = 0
    for place, prefix in [(folder, ""), *((below, f"{below.name}/") for below in _folders(folder))]:
        for entry in _sorted(place):
            path = Path(entry.path)
            try:
                is_picture = path.suffix.lower() in TYPES and entry.is_file(follow_symlinks=False)
                if is_picture and entry.stat().st_size <= _MOST_BYTES and not entry.name.startswith("."):
                    count += 1
                    yield f"{prefix}{entry.name}", path
            except OSError:
                continue
            if count == _MOST:
                return


def drawn_schedule(config: dict[str, Any]) -> bytes | None:
    """The pipeline schedule of a configuration by dotted keys as SVG; None without a pipeline or matplotlib."""
    stages, microbatches = config.get("plan.pp"), config.get("train.accumulation")
    name, virtual = config.get("plan.schedule"), config.get("plan.virtual_stages")
    if not (isinstance(stages, int) and stages > 1 and isinstance(microbatches, int) and has_matplotlib()):
        return None
    return _draw(name if isinstance(name, str) else DEFAULT_SCHEDULE, stages, microbatches, virtual or 1)


@functools.lru_cache(maxsize=16)
def _draw(name: str, stages: int, microbatches: int, virtual: int) -> bytes | None:
    try:
        schedule = make_schedule(name, stages, min(microbatches, 4 * stages), virtual)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "schedule.svg"
            draw([schedule], path)
            return path.read_bytes()
    except (ConfigError, PlacementError, ValueError):  # a schedule of another version of polyreme
        return None


def _folders(folder: Path) -> list[Path]:
    left_out = ("checkpoints", "data", "tensorboard")
    return [Path(e.path) for e in _sorted(folder) if e.name not in left_out and e.is_dir(follow_symlinks=False)]


def _sorted(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
