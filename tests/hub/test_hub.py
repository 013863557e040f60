"""polyreme.hub over local repositories and archives in the place of the network."""

import hashlib
import sys
import zipfile

import numpy as np
import pytest

from polyreme import hub
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, DataError, DeviceError
from polyreme.io.serialization import save

HUBCONF = '''
dependencies = ["paddle", "numpy"]
from inside import make

def small(size=2):
    """A small one."""
    return make(size)

def _hidden():
    pass
'''


def repository(folder, hubconf=HUBCONF):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hubconf.py").write_text(hubconf)
    (folder / "inside.py").write_text("from polyreme.nn import Linear\ndef make(size): return Linear(size, 1)\n")
    return str(folder)


@pytest.fixture(autouse=True)
def _inside_is_of_each_test():
    yield
    sys.modules.pop("inside", None)


def test_a_local_repository(tmp_path):
    where = repository(tmp_path / "repo")
    assert hub.list(where, source="local") == ["make", "small"]
    assert hub.help(where, "small", source="local") == "A small one."
    assert hub.load(where, "small", source="local", size=3).weight.shape == [3, 1]
    assert where not in sys.path
    with pytest.raises(ConfigError, match="offers no 'smal'; did you mean 'small'"):
        hub.load(where, "smal", source="local")


@pytest.fixture
def archive(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = tmp_path / "served" / "me-net-main.zip"
    monkeypatch.setitem(hub._ARCHIVES, "github", f"file://{tmp_path}/served/{{owner}}-{{name}}-{{branch}}.zip")

    def serve(hubconf=HUBCONF):
        repository(tmp_path / "net-main", hubconf)
        url.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(url, "w") as made:
            for file in (tmp_path / "net-main").glob("*.py"):
                made.write(file, f"net-main/{file.name}")

    serve()
    return serve


def test_a_repository_on_github_is_fetched_once(archive):
    assert hub.list("me/net") == ["make", "small"]
    archive(HUBCONF.replace("small", "large"))
    assert hub.list("me/net") == ["make", "small"]
    assert hub.list("me/net:main", force_reload=True) == ["large", "make"]


def test_what_is_wrong_with_a_repository_is_named(tmp_path, archive):
    with pytest.raises(ConfigError, match="source='githup'; did you mean 'github'"):
        hub.list("me/net", source="githup")
    with pytest.raises(ConfigError, match="'net' names no repository; write 'owner/name'"):
        hub.list("net")
    with pytest.raises(DataError, match="there is no file"):
        hub.list("me/other")
    with pytest.raises(DataError, match="has no hubconf"):
        hub.list(str(tmp_path), source="local")
    where = repository(tmp_path / "needy", HUBCONF.replace('"numpy"', '"no_such_module"'))
    with pytest.raises(DataError, match="needs no_such_module, not installed here"):
        hub.list(where, source="local")


def test_an_archive_may_not_reach_outside(tmp_path, archive):
    with zipfile.ZipFile(tmp_path / "served" / "me-evil-main.zip", "w") as made:
        made.writestr("../outside.py", "")
    with pytest.raises(DataError, match=r"holds '\.\./outside\.py', which lies outside of the folder"):
        hub.list("me/evil")
    assert not list((tmp_path / "cache" / "polyreme" / "hub").glob("outside.py"))
    (tmp_path / "served" / "me-broken-main.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match="cannot be read"):
        hub.list("me/broken")


def test_state_dicts_by_url(tmp_path):
    value = np.arange(3, dtype="float32")
    save({"w": to_tensor(value), "parts": [to_tensor(value)]}, tmp_path / "net.pdparams")
    digest = hashlib.sha256((tmp_path / "net.pdparams").read_bytes()).hexdigest()
    hashed = tmp_path / f"net-{digest[:8]}.pdparams"
    (tmp_path / "net.pdparams").rename(hashed)
    folder = str(tmp_path / "kept")
    got = hub.load_state_dict_from_url(hashed.as_uri(), folder, check_hash=True, map_location="np")
    np.testing.assert_array_equal(got["w"], value)
    placed = hub.load_state_dict_from_url(hashed.as_uri(), folder, map_location="cpu:1")
    assert placed["parts"][0].place.index == 1
    with zipfile.ZipFile(tmp_path / "net.zip", "w") as package:
        package.write(hashed, "inner/net.pdparams")
    zipped = hub.load_state_dict_from_url((tmp_path / "net.zip").as_uri(), folder)
    np.testing.assert_array_equal(zipped["w"].numpy(), value)
    with pytest.raises(ConfigError, match=r"has no -DIGEST\.EXT"):
        hub.load_state_dict_from_url((tmp_path / "net.zip").as_uri(), folder, check_hash=True)
    with pytest.raises(DataError, match="wanted 00000000; the file is another one"):
        hub.load_state_dict_from_url(hashed.as_uri(), folder, check_hash=True, file_name="net-00000000.pdparams")
    with pytest.raises(DeviceError, match="no xpu is available"):
        hub.load_state_dict_from_url(hashed.as_uri(), folder, map_location="xpu")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as package:
        package.writestr("a", "1")
        package.writestr("b", "2")
    with pytest.raises(DataError, match="is an archive of 2 files"):
        hub.load_state_dict_from_url((tmp_path / "two.zip").as_uri(), folder)
