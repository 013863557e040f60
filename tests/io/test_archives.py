"""Archives and compressed files: bounds on what they unpack to, and typed errors."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import pytest

from polyreme.errors import DataError
from polyreme.io import archives
from polyreme.io.archives import extract, gunzipped, is_archive, open_tar, open_zip, read_unpacked
from tests.io.archives import tar


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch):
    monkeypatch.setattr(archives, "ALWAYS_BYTES", 10_000)


def zipped(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, bytes])
def test_contents_are_read_whatever_packed_them(tmp_path, pack):
    text = bytes(range(256)) * 30
    (tmp_path / "a").write_bytes(pack(text))
    assert read_unpacked(tmp_path / "a") == text


BOMB = b"\0" * 5_000_000


def bombs(folder):
    (folder / "a.gz").write_bytes(gzip.compress(BOMB))
    tar(folder / "a.tgz", {"x/weights": BOMB})
    zipped(folder / "a.zip", {"x": BOMB})
    # a header that says it is a long name of 5 MB, packed to 5 kB
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, len(BOMB)
    (folder / "name.tgz").write_bytes(gzip.compress(name.tobuf() + BOMB))


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("a.gz", read_unpacked),
        ("a.gz", lambda path: gunzipped(path.read_bytes(), path)),
        ("a.tgz", lambda path: extract(path, path.parent / "out")),
        ("a.zip", lambda path: extract(path, path.parent / "out")),
        ("a.zip", open_zip),
        ("name.tgz", lambda path: extract(path, path.parent / "out")),
    ],
)
def test_bombs_are_refused(tmp_path, name, use):
    bombs(tmp_path)
    with pytest.raises(DataError, match=rf"{name}: .*100 times (its|the archive's) size"):
        use(tmp_path / name)
    # a.tgz has 5 kB, so 500 kB of it are written before the rest is refused
    assert sum(p.stat().st_size for p in tmp_path.glob("out/**/*") if p.is_file()) <= 600_000


def test_archives_of_a_usual_size_are_unpacked(tmp_path):
    for path in (tar(tmp_path / "a.tgz", {"x/y": "text"}), zipped(tmp_path / "b.zip", {"x/y": "text"})):
        out = tmp_path / f"{path.stem}.out"
        out.mkdir()
        assert is_archive(path)
        extract(path, out)
        assert (out / "x" / "y").read_text() == "text"
    (tmp_path / "weights").write_bytes(b"no archive")
    assert not is_archive(tmp_path / "weights")


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "x/../../out", "..\\out"])
def test_names_that_lie_outside_are_refused(tmp_path, name):
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.raises(DataError, match="outside of the folder"):
        extract(zipped(tmp_path / "a.zip", {"ok": "1", name: "2"}), folder)
    assert not list(tmp_path.glob("**/out"))
    if "\\" not in name and not name.startswith("/"):
        with pytest.raises(DataError, match="outside the destination"):
            extract(tar(tmp_path / "a.tar", {name: "2"}, "w"), folder)


def test_damage_is_typed(tmp_path):
    path = tar(tmp_path / "a.tgz", {"x": "text" * 100})
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match="cannot be read"), open_tar(path) as archive:
        archive.getmembers()
    locked = zipped(tmp_path / "a.zip", {"x": "text"})
    data = bytearray(locked.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # says that it is encrypted
    data[6] |= 1
    locked.write_bytes(data)
    with pytest.raises(DataError, match="encrypted"):
        extract(locked, tmp_path)
    # an uncompressed tar whose member says it is ten terabytes
    member = tarfile.TarInfo("x")
    member.size = 10**13
    (tmp_path / "far.tar").write_bytes(member.tobuf(tarfile.GNU_FORMAT) + b"text" * 300)
    with pytest.raises(DataError, match=r"far\.tar"), open_tar(tmp_path / "far.tar") as archive:
        archive.extractfile(archive.next()).read()
    with pytest.raises(DataError, match="cannot be read"):
        gunzipped_file(tmp_path)


def gunzipped_file(folder):
    (folder / "torn.gz").write_bytes(gzip.compress(b"x" * 9000)[:-12])
    assert io.BytesIO(read_unpacked(folder / "torn.gz"))
