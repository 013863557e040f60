"""Files and folders of this machine, by the calls that scripts make of any file system."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from polyreme.errors import ConfigError


class LocalFS:
    """Files and folders of this machine.

    >>> LocalFS().is_dir("/")
    True
    """

    def ls_dir(self, fs_path: str) -> tuple[list[str], list[str]]:
        """Names of the folders and of the files in a folder, sorted; none where there is no such folder."""
        entries = sorted(os.listdir(fs_path)) if self.is_dir(fs_path) else []
        folders = [name for name in entries if self.is_dir(os.path.join(fs_path, name))]
        return folders, [name for name in entries if name not in folders]

    def list_dirs(self, fs_path: str) -> list[str]:
        """Names of the folders in a folder."""
        return self.ls_dir(fs_path)[0]

    def mkdirs(self, fs_path: str) -> None:
        """Make a folder, and those that it is in; one that is there stays. Raises ConfigError for a file."""
        if self.is_file(fs_path):
            raise ConfigError(f"LocalFS.mkdirs({fs_path!r}): there is a file of that name; choose another name")
        os.makedirs(fs_path, exist_ok=True)

    def rename(self, fs_src_path: str, fs_dst_path: str) -> None:
        """Rename a file or folder."""
        os.rename(fs_src_path, fs_dst_path)

    def delete(self, fs_path: str) -> None:
        """Delete a file, a link, or a folder with all that is in it; what is not there is no error."""
        if os.path.isdir(fs_path) and not os.path.islink(fs_path):
            shutil.rmtree(fs_path)
        elif os.path.lexists(fs_path):
            os.remove(fs_path)

    def need_upload_download(self) -> bool:
        """False: the files are here."""
        return False

    def is_file(self, fs_path: str) -> bool:
        """Whether there is a file of this path."""
        return os.path.isfile(fs_path)

    def is_dir(self, fs_path: str) -> bool:
        """Whether there is a folder of this path."""
        return os.path.isdir(fs_path)

    def is_exist(self, fs_path: str) -> bool:
        """Whether there is anything of this path."""
        return os.path.exists(fs_path)

    def touch(self, fs_path: str, exist_ok: bool = True) -> None:
        """Make an empty file; raises FileExistsError for one that is there unless exist_ok."""
        Path(fs_path).touch(exist_ok=exist_ok)

    def mv(self, src_path: str, dst_path: str, overwrite: bool = False, test_exists: bool = False) -> None:
        """Move a file or folder. overwrite: delete what is at dst_path first.

        Raises FileNotFoundError if there is nothing at src_path, FileExistsError if there is something at dst_path.
        test_exists changes nothing: both are always looked at.
        """
        if not self.is_exist(src_path):
            raise FileNotFoundError(f"LocalFS.mv: nothing is at {src_path!r}")
        if overwrite:
            self.delete(dst_path)
        if self.is_exist(dst_path):
            raise FileExistsError(f"LocalFS.mv: something is at {dst_path!r}; delete it, or give overwrite=True")
        shutil.move(src_path, dst_path)


__all__ = ["LocalFS"]
