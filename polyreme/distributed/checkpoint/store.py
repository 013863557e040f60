"""CheckpointStore: save, restore and keep the checkpoints of one run.

The protocol: write files into a temporary folder, sync them, write MANIFEST.json, sync, rename, sync parent.
"""

import concurrent.futures
import errno
import os
import shutil
import threading
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from polyreme.distributed.checkpoint import folder
from polyreme.distributed.checkpoint.lock import FolderLock, hold
from polyreme.distributed.checkpoint.manifest import (
    CheckpointVersionError,
    FileEntry,
    Manifest,
    TensorEntry,
    plain_json,
)
from polyreme.distributed.checkpoint.match import mismatches, report
from polyreme.distributed.checkpoint.parts import collect, everyone_says, hand_in, hand_in_failure, raise_together
from polyreme.distributed.checkpoint.shards import HostShard, ShardReader, StoredFile, snapshot, write_files
from polyreme.errors import CheckpointError, ConfigError, NoSpaceError
from polyreme.faults import point as fault_point
from polyreme.io.safetensors_file import refuse_foreign
from polyreme.optimizer.on_disk import StoredArray

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SCANS = 5  # of a folder that a run writes while it is read; each meets a commit at most
_MANIFEST_ROOM = 1 << 16  # bytes kept free for the manifest and the folder itself


class CheckpointWarning(UserWarning):
    """A checkpoint or an entry of its folder was passed over; the text says which and why."""


class CheckpointStore:
    """The checkpoints of one run in one folder.

    Opening it to write takes the folder's lock and clears what a killed run left behind. max_to_keep: how many of the
    newest steps are kept (None: all); keep_period: steps that are multiples of it are kept as well. read_only: takes no
    lock and changes nothing. files: what data is written to, "bin" or "safetensors"; either is read. Raises ConfigError
    if the folder cannot be written or another process is writing it.

    With several processes (init_parallel_env) the folder must be on a disk that all of them share. Each opens it, and
    calls save, wait, restore and close in the same order with the same arguments; each writes the shards it has, the
    first process the manifest. An error of one is raised in all. A read_only store reads for its own process alone.

    >>> import tempfile, numpy as np
    >>> with CheckpointStore(tempfile.mkdtemp()) as store:
    ...     store.save(10, {"weight": np.arange(3.0)}, {"config": {"lr": 0.1}}, blocking=True)
    ...     arrays, meta = store.restore()
    >>> arrays["weight"], meta["step"], meta["config"]
    (array([0., 1., 2.]), 10, {'lr': 0.1})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        read_only: bool = False,
        files: str = "bin",
    ) -> None:
        for name, value in (("max_to_keep", max_to_keep), ("keep_period", keep_period)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r}: needs a whole number of at least 1, or None")
        self.path: Path = Path(path)
        if files not in ("bin", "safetensors"):
            raise ConfigError(f"files={files!r}: needs 'bin' or 'safetensors'")
        if read_only:
            refuse_foreign(self.path)
        self._is_shared = jax.process_count() > 1 and not read_only
        self._is_first = jax.process_index() == 0
        self._is_open = not read_only
        self._is_abandoned = threading.Event()
        self.max_to_keep = max_to_keep
        self.keep_period = keep_period
        self.read_only = read_only
        self.files = files
        self._bad: set[int] = set()  # steps whose data proved corrupt; set aside when the next step is committed
        self._warned: set[str] = set()
        self._manifests: dict[int, tuple[tuple[int, ...], Manifest]] = {}
        self._pending: tuple[int, concurrent.futures.Future] | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._lock = self._open_to_write() if self._is_open and self._is_first else None
        if self._is_shared:
            everyone_says(None)  # the folder is cleared before the others look
        if self._is_first:
            self._warn_of_strays()

    def _open_to_write(self) -> FolderLock:
        lock = hold(self.path, folder.LOCK)
        folder.recover(self.path)
        return lock

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the error under way matters more than one of a save
            self._release()

    def close(self) -> None:
        """Wait for a save under way, give the folder free; raises what the save raised."""
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        self._is_open = False
        self._is_abandoned.set()
        self._writer.shutdown(wait=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- what is there

    def steps(self) -> list[int]:
        """Steps whole as far as their manifests and file sizes tell, ascending; corrupt data shows in restore."""
        return [step for step in folder.scan(self.path)[0] if step not in self._bad and self._reason(step) is None]

    def latest_step(self) -> int | None:
        """The newest of steps(); None if the folder holds no step at all.

        Raises CheckpointError if it holds steps but none is whole: a run that resumes must not start over silently.
        """
        steps = self.steps()
        if not steps and (found := folder.scan(self.path)[0]):
            raise CheckpointError(self._none_valid({step: self._reason(step) or "corrupt" for step in found}))
        return steps[-1] if steps else None

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step: tensors with shapes, dtypes, placements and files, and the meta saved with them."""
        stat = self._stat(step)
        if step not in self._manifests or self._manifests[step][0] != stat:
            self._manifests[step] = (stat, folder.read_manifest(self.path, step))
        return self._manifests[step][1]

    def verify(self, step: int) -> None:
        """Read every data file of a step and compare digests; raises CheckpointError naming file and tensors."""
        self._reader(step).verify_files()

    def _stat(self, step: int) -> tuple[int, ...]:
        try:
            found = os.stat(self.path / folder.step_name(step) / folder.MANIFEST)
        except OSError:
            return ()  # reading it gives the error its name
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _reader(self, step: int) -> ShardReader:
        return ShardReader(self.path / folder.step_name(step), self.manifest(step))

    def _reason(self, step: int) -> str | None:
        """Why a step is not whole, from its manifest and file sizes; None if it is."""
        try:
            with self._reader(step):
                return None
        except CheckpointVersionError:
            raise
        except CheckpointError as error:
            return str(error)

    def _warn_of_strays(self) -> None:
        strays = [name for name in folder.scan(self.path)[1] if name not in self._warned]
        if strays:
            self._warned.update(strays)
            shown = ", ".join(strays[:10]) + (f" and {len(strays) - 10} more" if len(strays) > 10 else "")
            warnings.warn(f"{self.path}: entries that are no checkpoints ignored: {shown}", CheckpointWarning, 3)

    # -- save

    def save(
        self,
        step: int,
        arrays: dict[str, jax.Array | Any],
        meta: dict[str, Any] | None = None,
        *,
        blocking: bool = False,
        overwrite: bool | str = False,
    ) -> None:
        """Save arrays and meta as a step, in the background unless blocking.

        Arrays are copied to the host before it returns, so they may be donated at once; of optimizer state on disk
        (StoredArray) the files are linked to, or copied where another disk has them. meta is plain JSON; by
        convention "config" (its digest is stored too), "data" (position of the input) and "host" (schedulers,
        counters). A save under way is waited for first, and its error raised here. overwrite: allow a step that is not
        above the latest; it replaces that step and every later one, as a run that was rolled back does; "alone": only
        that step.
        Raises CheckpointError; NoSpaceError if the disk is too full.
        """
        self.wait()
        if not self._is_open:
            raise CheckpointError(f"save of step {step}: {self.path} was opened read_only or is closed")
        if type(step) is not int or step < 0:
            raise CheckpointError(f"save of step {step!r}: needs a whole number from 0")
        meta = self._check_meta(step, meta or {})
        tensors, shards, stored = snapshot(arrays)
        # a link takes no room, but the next write of what it links to does
        nbytes = sum(shard.data.nbytes for shard in shards) + sum(file.frozen.nbytes for file in stored)
        replaces = self._begin(step, overwrite, nbytes)
        for file in stored:
            file.link(self._temporary(step))
        self._pending = step, self._writer.submit(self._write, step, tensors, shards, stored, meta, replaces)
        if blocking:
            self.wait()

    def check(self) -> None:
        """Raise the error of a save that has ended since, in this process; never waits."""
        if self._pending is None or not self._pending[1].done():
            return
        if not self._is_shared:
            self.wait()
            return
        step, future = self._pending  # stays pending: that it is done is told to all in wait()
        error = _name(future.exception(), step)
        if error is not None:
            raise error

    def _begin(self, step: int, overwrite: bool | str, nbytes: int) -> tuple[str, ...]:
        """Refuse in every process what the first cannot take, before any writes; -> folders that the step replaces."""
        if self._is_shared:
            nbytes = sum(everyone_says(nbytes))
        replaces: tuple[str, ...] = ()
        refusal: CheckpointError | None = None
        if self._is_first:
            try:
                if self._lock is not None:
                    self._lock.check()
                replaces = self._replaces(step, overwrite)
                self._check_room(step, nbytes, replaces)
                self._temporary(step).mkdir()
            except (CheckpointError, OSError) as error:
                refusal = _name(self._full(error, step, nbytes), step)
        if self._is_shared:
            raise_together(refusal, f"save of step {step}")
        elif refusal is not None:
            raise refusal
        return replaces

    def _full(self, error: Exception, step: int, nbytes: int) -> Exception:
        """A full disk as NoSpaceError, any other error as it is."""
        if isinstance(error, OSError) and error.errno in _FULL:
            return _no_space(step, self.path, nbytes + _MANIFEST_ROOM, shutil.disk_usage(self.path).free)
        return error

    def _temporary(self, step: int) -> Path:
        return self.path / f"{folder.step_name(step)}.tmp"

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the save under way, at most timeout seconds; raises its error, once, or CheckpointError if late."""
        if self._pending is None:
            return
        step, future = self._pending
        if not concurrent.futures.wait([future], timeout).done:
            raise CheckpointError(f"save of step {step} into {self.path} is not done after {timeout} s")
        self._pending = None
        error = _name(future.exception(), step)
        if self._is_shared and not isinstance(error, _UntoldError):
            raise_together(error, f"save of step {step}")
        elif error is not None:
            raise error

    def _check_meta(self, step: int, meta: dict[str, Any]) -> dict[str, Any]:
        if meta.get("step", step) != step:
            raise CheckpointError(f"save of step {step}: meta says step {meta['step']}; leave it out of meta")
        return plain_json({**meta, "step": step}, f"meta of step {step}")

    def _replaces(self, step: int, overwrite: bool | str) -> tuple[str, ...]:
        later = [saved for saved in self.steps() if saved == step or (saved > step and overwrite != "alone")]
        if later and not overwrite:
            raise CheckpointError(
                f"save of step {step}: {self.path} already has step {later[-1]}; pass overwrite=True to replace steps "
                f"{later[0]} to {later[-1]}, or save into another folder"
            )
        return tuple(folder.step_name(saved) for saved in later)

    def _check_room(self, step: int, nbytes: int, replaces: tuple[str, ...]) -> None:
        need, free = nbytes + _MANIFEST_ROOM, shutil.disk_usage(self.path).free
        if free < need:
            self._retain(replaces)  # a run that now keeps fewer steps would never get to a save that deletes the others
            free = shutil.disk_usage(self.path).free
        if free < need:
            raise _no_space(step, self.path, need, free)

    def _write(
        self,
        step: int,
        tensors: dict[str, TensorEntry],
        shards: list[HostShard],
        stored: list[StoredFile],
        meta: dict,
        replaces: tuple[str, ...],
    ) -> None:
        """In the background: this process's files, then, by the first process, everything else."""
        temporary = self._temporary(step)
        done = False
        try:
            fault_point("ckpt.data")
            written = write_files(temporary, tensors, shards, self.files, stored)
            if self._is_first:
                if self._is_shared:
                    written = collect(temporary, written, self._is_abandoned.is_set)
                self._commit(step, *written, meta, replaces)
            else:
                hand_in(temporary, written)
            done = True
        except Exception as problem:  # whatever it is, the others must hear of it
            error = self._full(problem, step, sum(shard.data.nbytes for shard in shards))
            if not self._is_first and not hand_in_failure(temporary, error):
                raise _UntoldError(f"save of step {step} failed: {error}") from problem
            if error is problem:
                raise
            raise error from problem
        finally:
            if not done and self._is_first:
                folder.recover(self.path)
        if self._is_first:
            self._retain()

    def _commit(
        self,
        step: int,
        tensors: dict[str, TensorEntry],
        files: tuple[FileEntry, ...],
        meta: dict,
        replaces: tuple[str, ...],
    ) -> None:
        unusable = {found for found in folder.scan(self.path)[0] if found == step and found not in self.steps()}
        folder.set_aside(self.path, self._bad | unusable)
        folder.commit(self.path, Manifest(step, tensors, files, meta, replaces))
        self._bad.clear()

    def _retain(self, replaced: tuple[str, ...] = ()) -> None:
        """Delete the steps beyond those to be kept; replaced: folders that are not counted among either."""
        if self.max_to_keep is None:
            return
        steps = [step for step in self.steps() if folder.step_name(step) not in replaced]
        for step in steps[: -self.max_to_keep]:
            if self.keep_period is None or step % self.keep_period:
                folder.delete(self.path, folder.step_name(step))

    # -- restore

    def restore(
        self,
        target: dict[str, Any] | None = None,
        step: int | str | None = None,
        *,
        strict: bool = False,
        partial: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arrays and meta of the newest valid step, or of the step asked for; meta["step"] says which.

        target gives the shape, dtype and sharding of each array (jax.ShapeDtypeStruct or an array); any sharding will
        do, the bits are those that were saved. A StoredArray is filled where it lies. Without target, or without a
        sharding, arrays are NumPy's. A step that proves bad (with several processes: to any of them) is passed over
        with a CheckpointWarning naming file and tensor; strict, or a step asked for, raises CheckpointError instead. If
        names, shapes or dtypes differ nothing is loaded and CheckpointError lists them; partial loads those that fit
        and warns of target entries left out.
        """
        self.wait()
        if self._is_first:
            self._warn_of_strays()
        steps = folder.scan(self.path)[0]
        if self._is_shared:
            steps = everyone_says(steps)[0]
        if step in (None, "latest") and self.read_only:
            return self._restore_beside_writer(steps, target, strict, partial)
        if step not in (None, "latest"):
            if step not in steps:
                raise CheckpointError(f"step {step!r} is not in {self.path}, which has {self._shown(steps)}")
            return self._restore_everywhere(int(step), target, partial)
        return self._restore_newest(steps, target, strict, partial)

    def _restore_beside_writer(
        self, steps: list[int], target: dict[str, Any] | None, strict: bool, partial: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same as _restore_newest while another run writes, which may delete listed steps before they are read."""
        for _ in range(_SCANS - 1):
            try:
                return self._restore_newest(steps, target, strict, partial)
            except CheckpointError:
                before, steps = steps, folder.scan(self.path)[0]
                if steps == before:
                    raise
        return self._restore_newest(steps, target, strict, partial)

    def _restore_newest(
        self, steps: list[int], target: dict[str, Any] | None, strict: bool, partial: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if not steps:
            raise CheckpointError(f"no checkpoint in {self.path}; check the path, or train from the start")
        reasons: dict[int, str] = {}
        for candidate in reversed(steps):
            try:
                return self._restore_everywhere(candidate, target, partial)
            except (CheckpointVersionError, _MismatchError):
                raise
            except CheckpointError as error:
                if strict:
                    raise CheckpointError(f"step {candidate} of {self.path}: {error}") from error
                reasons[candidate] = str(error)
                if self.read_only and candidate not in folder.scan(self.path)[0]:
                    continue  # deleted since it was listed
                self._bad.add(candidate)
                warnings.warn(f"{self.path}: step {candidate} passed over: {error}", CheckpointWarning, 2)
        raise CheckpointError(self._none_valid(reasons))

    def _restore_everywhere(self, step: int, target: dict[str, Any] | None, partial: bool) -> tuple[dict, dict]:
        if not self._is_shared:
            return self._restore_step(step, target, partial)
        restored, problem = None, None
        try:
            restored = self._restore_step(step, target, partial)
        except (CheckpointVersionError, _MismatchError):
            raise  # the same in every process
        except CheckpointError as error:
            problem = error
        raise_together(problem, f"restore of step {step}")
        assert restored is not None
        return restored

    def _restore_step(self, step: int, target: dict[str, Any] | None, partial: bool) -> tuple[dict, dict]:
        manifest = self.manifest(step)
        names = list(manifest.tensors) if target is None else self._fitting(manifest, target, partial)
        shardings = {
            name: want if isinstance(want, StoredArray) else getattr(want, "sharding", None)
            for name, want in (target or {}).items()
        }
        with self._reader(step) as reader:
            return reader.read(names, shardings), plain_json(manifest.meta, "meta")

    def _fitting(self, manifest: Manifest, target: dict[str, Any], partial: bool) -> list[str]:
        reasons = mismatches(target, manifest.tensors)
        text = report(reasons, target, manifest.tensors)
        if reasons and not partial:
            raise _MismatchError(
                f"step {manifest.step} of {self.path} does not fit, nothing was loaded; {len(reasons)} differ:\n{text}"
                "\nmake the model the same as when it was saved, or pass partial=True to load what fits"
            )
        left = [name for name in reasons if name in target]
        if left:
            shown = report({name: reasons[name] for name in left}, target, manifest.tensors)
            warnings.warn(f"step {manifest.step}: {len(left)} entries not loaded:\n{shown}", CheckpointWarning, 4)
        return [name for name in target if name not in reasons]

    def _none_valid(self, reasons: dict[int, str]) -> str:
        lines = [f"  step {step}: {reason}" for step, reason in sorted(reasons.items(), reverse=True)]
        return f"no valid checkpoint in {self.path}:\n" + "\n".join(lines)

    def _shown(self, steps: list[int]) -> str:
        return f"steps {', '.join(map(str, steps[-10:]))}" if steps else "none"


class _UntoldError(CheckpointError):
    """A part could not be written, nor this be said where the first process looks: it ends with this process."""


def _name(error: BaseException | None, step: int) -> CheckpointError | None:
    """The error of a failed save, as a CheckpointError."""
    if error is None or isinstance(error, CheckpointError):
        return error
    named = CheckpointError(f"save of step {step} failed: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


class _MismatchError(CheckpointError):
    """A valid checkpoint of another model: an older step would not fit either."""


def _no_space(step: int, path: Path, need: int, free: int) -> NoSpaceError:
    return NoSpaceError(
        f"save of step {step} into {path}: needs {need} bytes, {free} are free; make room, or keep fewer steps "
        "(max_to_keep; checkpoint.keep of a configuration)",
        need,
        free,
    )
