"""LocalFS: files and folders of this machine."""

import pytest

from polyreme.distributed.fleet.utils import LocalFS
from polyreme.errors import ConfigError


def test_files_and_folders(tmp_path):
    fs, folder = LocalFS(), str(tmp_path / "a" / "b")
    fs.mkdirs(folder)
    fs.mkdirs(folder)
    fs.touch(f"{folder}/x")
    fs.mkdirs(f"{folder}/c")
    assert fs.ls_dir(folder) == (["c"], ["x"])
    assert fs.list_dirs(folder) == ["c"]
    assert (fs.is_file(f"{folder}/x"), fs.is_dir(f"{folder}/x"), fs.is_exist(f"{folder}/y")) == (True, False, False)
    assert not fs.need_upload_download()
    fs.rename(f"{folder}/x", f"{folder}/y")
    fs.touch(f"{folder}/z")
    with pytest.raises(FileExistsError, match=r"something is at .*z'; delete it, or give overwrite=True"):
        fs.mv(f"{folder}/y", f"{folder}/z")
    fs.mv(f"{folder}/y", f"{folder}/z", overwrite=True)
    assert fs.ls_dir(folder) == (["c"], ["z"])
    with pytest.raises(FileNotFoundError, match="nothing is at"):
        fs.mv(f"{folder}/y", f"{folder}/z")
    with pytest.raises(FileExistsError):
        fs.touch(f"{folder}/z", exist_ok=False)
    with pytest.raises(ConfigError, match=r"mkdirs\(.*there is a file of that name"):
        fs.mkdirs(f"{folder}/z")
    fs.delete(folder)
    fs.delete(folder)
    assert fs.ls_dir(folder) == ([], [])


def test_a_link_is_deleted_and_not_what_it_names(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    LocalFS().delete(str(tmp_path / "link"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
