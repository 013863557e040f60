"""The folder of a run's checkpoints: names of steps, atomic commit, deletion and recovery after a crash.

A step is there from the moment its folder is renamed to `step_N`; a suffix marks one that is not: `.tmp`
being written, `.replaced` about to be superseded, `.trash` being deleted, `.corrupt` kept for a person to look at.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from polyreme.distributed.checkpoint.manifest import Manifest
from polyreme.errors import CheckpointError
from polyreme.faults import point as fault_point

MANIFEST = "MANIFEST.json"
LATEST = "LATEST"
LOCK = "LOCK"
MANIFEST_BYTES = 256 << 20  # far above any real one: 100k tensors take 30 MB
_OURS = re.compile(r"step_(\d{8,})(\.tmp|\.trash|\.replaced|\.corrupt)?")


def step_name(step: int) -> str:
    """The folder name of a step.

    >>> step_name(7)
    'step_00000007'
    """
    return f"step_{step:08d}"


SHAPES = ".metadata"  # end of the name of a file that trainers write beside a state dict, and read


def scan(root: Path) -> tuple[list[int], list[str]]:
    """Steps that have a folder, ascending, whole or not; and names of stray entries."""
    steps, strays = [], []
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except FileNotFoundError:
        return [], []
    for entry in entries:
        match = _OURS.fullmatch(entry.name)
        if match and entry.is_dir(follow_symlinks=False) and step_name(int(match[1])) == f"step_{match[1]}":
            if match[2] is None:
                steps.append(int(match[1]))
        elif entry.name not in (LATEST, LOCK, f"{LATEST}.tmp", f"{LOCK}.tmp") and not entry.name.endswith(SHAPES):
            strays.append(entry.name)
    return sorted(steps), strays


def read_manifest(root: Path, step: int) -> Manifest:
    """The manifest of a step, checked in itself and against its folder's name; raises CheckpointError."""
    path = root / step_name(step) / MANIFEST
    try:
        with open(path, "rb") as file:
            data = file.read(MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise CheckpointError(f"{MANIFEST}: missing in {path.parent}") from error
    except OSError as error:
        raise CheckpointError(f"{MANIFEST}: cannot be read in {path.parent} ({error.strerror})") from error
    if len(data) > MANIFEST_BYTES:
        raise CheckpointError(f"{MANIFEST}: over {MANIFEST_BYTES} bytes in {path.parent}")
    manifest = Manifest.from_json(data)
    if manifest.step != step:
        raise CheckpointError(f"{MANIFEST}: is of step {manifest.step} but its folder is {path.parent.name}")
    return manifest


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until a folder's list of names is on disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def commit(root: Path, manifest: Manifest) -> None:
    """Turn the finished `.tmp` folder into the step; folders named in manifest.replaces give way to it.

    Killed at any point, recover() leaves either all of the old steps or the new one in their place.
    """
    folder = root / f"{step_name(manifest.step)}.tmp"
    fault_point("ckpt.manifest")
    write_synced(folder / MANIFEST, manifest.to_json())
    sync_folder(folder)
    fault_point("ckpt.rename")
    for name in manifest.replaces:
        _rename(root / name, root / f"{name}.replaced")
        fault_point("ckpt.replace")
    os.rename(folder, root / step_name(manifest.step))
    sync_folder(root)
    fault_point("ckpt.renamed")
    write_synced(root / f"{LATEST}.tmp", f"{step_name(manifest.step)}\n".encode())
    os.replace(root / f"{LATEST}.tmp", root / LATEST)
    fault_point("ckpt.latest")
    for name in manifest.replaces:
        delete(root, f"{name}.replaced")


def delete(root: Path, name: str) -> None:
    """Delete a step's folder: renamed first, so that a half-deleted one is never listed."""
    trash = root / f"{name.removesuffix('.replaced')}.trash"
    fault_point("ckpt.delete")
    _rename(root / name, trash)
    sync_folder(root)
    fault_point("ckpt.trash")
    for entry in sorted(os.listdir(trash), reverse=True):
        path = trash / entry
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        fault_point("ckpt.deleting")
    trash.rmdir()


def set_aside(root: Path, steps: Iterable[int]) -> None:
    """Rename corrupt steps so that they are no longer tried; nothing is deleted but an earlier one of the same name."""
    for step in steps:
        if (root / step_name(step)).is_dir():
            _rename(root / step_name(step), root / f"{step_name(step)}.corrupt")


def recover(root: Path) -> None:
    """Finish or undo what a killed writer left: call it only while holding the lock."""
    names = sorted(entry for entry in os.listdir(root) if _OURS.fullmatch(entry))
    for name in names:
        if name.endswith((".tmp", ".trash")):
            shutil.rmtree(root / name)
    superseded = {name for step in scan(root)[0] for name in _steps_replaced_by(root, step)}
    for name in (name for name in names if name.endswith(".replaced")):
        old = name.removesuffix(".replaced")
        if old in superseded or (root / old).exists():
            delete(root, name)
        else:
            os.rename(root / name, root / old)
            sync_folder(root)


def _steps_replaced_by(root: Path, step: int) -> tuple[str, ...]:
    path = root / step_name(step) / MANIFEST
    try:
        return tuple(json.loads(path.read_bytes())["replaces"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()  # a folder without a readable manifest has superseded nothing


def _rename(old: Path, new: Path) -> None:
    if new.exists():
        shutil.rmtree(new)
    os.rename(old, new)
