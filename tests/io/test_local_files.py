"""Published files: where they are looked for, their digests, what is read from archives."""

import hashlib

import pytest

from polyreme.errors import ConfigError, DataError
from polyreme.io.local_files import Published, chosen_mode, tar_files, tar_texts
from tests.io.archives import tar


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "polyreme" / "datasets" / "words"
    folder.mkdir(parents=True)
    return folder


def test_a_published_file_is_found_and_checked(cache):
    md5 = hashlib.md5(b"text", usedforsecurity=False).hexdigest()
    published = Published("words", "words.txt", md5, "https://example.org/words.txt")
    missing = (
        r"Words: no words.txt in .*datasets/words or .*; nothing is downloaded: fetch https://example.org/words.txt"
    )
    with pytest.raises(DataError, match=rf"{missing} \(md5 {md5}\) into one of them, or give data_file"):
        published.find("Words", None, True)
    (cache / "words.txt").write_bytes(b"text")
    assert published.find("Words", None, False) == cache / "words.txt"
    (cache / "words.txt").write_bytes(b"other")
    with pytest.raises(DataError, match=f"is not that of the published file .{md5}.; fetch it again"):
        published.find("Words", None, True)
    assert published.find("Words", cache / "words.txt", True) == cache / "words.txt"
    with pytest.raises(DataError, match="data_file='nowhere' is no file"):
        published.find("Words", "nowhere", True)
    with pytest.raises(ConfigError, match="download='yes'"):
        published.find("Words", None, "yes")


def test_tar_archives_are_read(tmp_path):
    path = tar(tmp_path / "a.tgz", {"./data/one.txt": "1", "data/two.txt": "2"})
    assert [(name, file.read()) for name, file in tar_files(path)] == [("data/one.txt", b"1"), ("data/two.txt", b"2")]
    assert tar_texts(path, ("two.txt",)) == {"two.txt": b"2"}
    with pytest.raises(DataError, match=r"holds no three\.txt"):
        tar_texts(path, ("three.txt",))
    path.write_bytes(path.read_bytes()[:90])
    with pytest.raises(DataError, match="cannot be read"):
        tar_texts(path, ("two.txt",))


def test_a_mode_is_known_by_any_case_or_refused():
    assert chosen_mode("Words", "TRAIN", ("train", "test")) == "train"
    with pytest.raises(ConfigError, match="Words: mode='all'; give one of 'train', 'test'"):
        chosen_mode("Words", "all", ("train", "test"))
