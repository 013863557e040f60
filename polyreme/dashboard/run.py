"""A run's folder as the dashboard shows it, and the folders that hold runs."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from polyreme.dashboard.log import FollowedLog, parsed_json
from polyreme.dashboard.pictures import drawn_schedule, pictures_in

LOG = "metrics.jsonl"
_DEEPEST = 4  # folders below one that was named
_MOST_RUNS = 500
_LIVE_SECONDS = 120  # since the log's last record
_FAULTS = ("spike", "not_finite", "fault", "restart", "preempted")
_LEFT_OUT = {".", "checkpoints", "data", "tensorboard"}


class RunFolder:
    """A folder with a metrics.jsonl. id: of its path, for addresses; name: as it is shown, which can be encoded."""

    folder: Path
    name: str
    id: str
    log: FollowedLog

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, _printable(name)
        self.id = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        self.log = FollowedLog(folder / LOG)
        self._config: tuple[Any, dict[str, Any]] = (None, {})

    def summary(self) -> dict[str, Any]:
        """What the list of runs shows: state ("running", "finished", "stopped", "gone"), last step, latest values."""
        self.log.poll()
        curves, total = self.log.curves, self.config().get("train.steps")
        total = total if isinstance(total, int) else None
        try:
            age = time.time() - (self.folder / LOG).stat().st_mtime
        except OSError:
            age = None
        step = self.log.last_step
        state = "gone" if age is None else "running" if age < _LIVE_SECONDS else "stopped"
        if total is not None and step is not None and step >= total and age is not None:
            state = "finished"
        return {
            "id": self.id,
            "name": self.name,
            "folder": _printable(str(self.folder)),
            "state": state,
            "step": step,
            "steps": total,
            "age_seconds": age,
            "curves": sorted(curves),
            "latest": {name: curve.last for name, curve in curves.items()},
            "num_events": self.log.num_events,
            "num_bad": self.log.num_bad,
        }

    def details(self) -> dict[str, Any]:
        """What is shown of one run beside its curves."""
        self.log.poll()
        events, config = self.log.events, self.config()
        return {
            **self.summary(),
            "samples": [{"step": e["step"], "text": e["text"]} for e in events if _is_sample(e)][-50:],
            "faults": [e for e in events if e["kind"] in _FAULTS][-200:],
            "events": [e for e in events if e["kind"] not in (*_FAULTS, "sample")][-200:],
            "checkpoints": list(self._checkpoints()),
            "pictures": [name for name, _ in self._pictures()],
            "config": {key: config[key] for key in sorted(config)},
        }

    def picture(self, name: str) -> Path | None:
        """The file of one of details' pictures, None where there is none of that name."""
        return dict(self._pictures()).get(name)

    def schedule_picture(self) -> bytes | None:
        """The pipeline schedule of the run's plan drawn as SVG, None without a pipeline or matplotlib."""
        return drawn_schedule(self.config())

    def config(self) -> dict[str, Any]:
        """The configuration by dotted keys, as the newest checkpoint has it; empty before the first."""
        newest = max(self._manifests(), default=None, key=lambda path: path.parent.name)
        try:
            key = None if newest is None else (newest, newest.stat().st_mtime_ns)
            if key != self._config[0]:
                found = {} if newest is None else parsed_json(newest.read_bytes())["meta"]["config"]
                self._config = (key, found if isinstance(found, dict) else {})
        except (OSError, ValueError, KeyError, TypeError):  # being written, or not of ours
            return {}
        return self._config[1]

    def _manifests(self) -> list[Path]:
        try:
            return sorted(p for p in (self.folder / "checkpoints").glob("step_*/MANIFEST.json") if p.is_file())
        except OSError:
            return []

    def _checkpoints(self) -> Iterator[dict[str, Any]]:
        for manifest in self._manifests():
            try:
                nbytes = sum(entry.stat().st_size for entry in os.scandir(manifest.parent))
                step = int(manifest.parent.name.removeprefix("step_"))
                yield {"step": step, "bytes": nbytes, "written": manifest.stat().st_mtime}
            except (OSError, ValueError):  # deleted meanwhile, as a run keeps its last few alone
                continue

    def _pictures(self) -> list[tuple[str, Path]]:
        return [(_printable(name), path) for name, path in pictures_in(self.folder)]


class RunList:
    """The runs in some folders, looked for again at each look: they appear, and vanish, while the dashboard runs."""

    folders: list[Path]

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]
        self._runs: dict[Path, RunFolder] = {}

    def runs(self) -> list[RunFolder]:
        """Every run there is, and those whose folder went while they were looked at, by name."""
        for top in self.folders:
            for folder in _runs_below(top, _DEEPEST):
                if folder not in self._runs and len(self._runs) < _MOST_RUNS:
                    self._runs[folder] = RunFolder(folder, self._name_of(folder, top))
        return sorted(self._runs.values(), key=lambda run: run.name)

    def get(self, run_id: str) -> RunFolder | None:
        """The run of an id, None if there is none."""
        return next((run for run in self.runs() if run.id == run_id), None)

    def _name_of(self, folder: Path, top: Path) -> str:
        relative = folder.relative_to(top)
        several = len(self.folders) > 1
        inside = "" if relative == Path() else str(relative)
        return f"{top.name}/{inside}".rstrip("/") if several and inside else inside or top.name or str(top)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if any(entry.name == LOG for entry in entries):
        yield folder
    if depth:
        for entry in entries:
            try:
                is_folder = entry.is_dir(follow_symlinks=False)
            except OSError:
                continue
            if is_folder and entry.name not in _LEFT_OUT and not entry.name.startswith("."):
                yield from _runs_below(Path(entry.path), depth - 1)


def _is_sample(event: dict[str, Any]) -> bool:
    return event["kind"] == "sample" and isinstance(event.get("text"), str)


def _printable(text: str) -> str:
    """Text without the surrogates that stand for bytes of a name that is not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
