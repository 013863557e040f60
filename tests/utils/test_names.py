"""polyreme.utils, sysconfig: small functions, each for what it says."""

import hashlib
import re
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from polyreme import sysconfig, utils, version
from polyreme.errors import ConfigError, DataError
from polyreme.io import download as downloads


def test_deprecated_warns_or_refuses():
    def old(x):
        """Twice."""
        return 2 * x

    quiet = utils.deprecated("new", "0.1", "It is slow.")(old)
    assert quiet.__doc__ == "Deprecated since 0.1; use new. It is slow.\n\nTwice."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quiet(2) == 4
    with pytest.warns(DeprecationWarning, match=r"test_names.*old: Deprecated\."):
        assert utils.deprecated(level=1)(old)(2) == 4
    with pytest.raises(RuntimeError, match="use new"):
        utils.deprecated("new", level=2)(old)(2)

    @utils.deprecated("New", level=2)
    class Old:
        pass

    with pytest.raises(RuntimeError, match="use New"):
        Old()
    with pytest.raises(ConfigError, match="level=3"):
        utils.deprecated(level=3)


def test_require_version_compares_numbers():
    utils.require_version("0.0.9")
    utils.require_version(version.full_version, version.full_version)
    with pytest.raises(ConfigError, match=rf"this is polyreme {re.escape(version.full_version)}, at least 90\.10"):
        utils.require_version("90.10")
    with pytest.raises(ConfigError, match=r"at most 0\.0\.1"):
        utils.require_version("0.0", "0.0.1")
    with pytest.raises(ConfigError, match="'new' is no version"):
        utils.require_version("new")
    with pytest.raises(TypeError, match="min_version is float"):
        utils.require_version(1.0)


def test_try_import():
    assert utils.try_import("json").dumps([1]) == "[1]"
    with pytest.raises(ImportError, match="pip install no_such"):
        utils.try_import("no_such.module")
    with pytest.raises(ImportError, match=r"^needed for this$"):
        utils.try_import("no_such", "needed for this")


def test_switch_goes_to_other_counters_and_back():
    names = utils.unique_name
    with names.guard():
        first = names.generate("fc")
        before, checker = names.switch()
        assert checker is None
        assert names.generate("fc") == first == "fc_0"
        names.switch("own/")
        assert names.generate("fc") == "own/fc_0"
        names.switch(before)
        assert names.generate("fc") == "fc_1"
        with names.guard(before):
            assert names.generate("fc") == "fc_2"
        with pytest.raises(ConfigError, match="no checker of parameter names"):
            names.switch(None, object())


def test_dlpack_copies_to_and_from_other_libraries():
    host = np.arange(6, dtype="float32").reshape(2, 3)
    x = utils.dlpack.from_dlpack(host)
    host[0, 0] = 9
    np.testing.assert_array_equal(x.numpy(), np.arange(6).reshape(2, 3))
    again = utils.dlpack.from_dlpack(utils.dlpack.to_dlpack(x))
    np.testing.assert_array_equal(again.numpy(), x.numpy())
    np.testing.assert_array_equal(np.from_dlpack(x), x.numpy())
    there = utils.dlpack.from_dlpack(x, device="cpu:1", copy=True)
    assert there._array.devices() == {jax.devices()[1]}
    with pytest.raises(ConfigError, match="copy=False; a Tensor owns its memory"):
        utils.dlpack.from_dlpack(host, copy=False)
    with pytest.raises(TypeError, match="got list"):
        utils.dlpack.from_dlpack([1])
    with pytest.raises(TypeError, match="takes a Tensor, got ndarray"):
        utils.dlpack.to_dlpack(host)


def test_sysconfig_says_where_headers_and_libraries_are():
    assert (Path(sysconfig.get_include()) / "xla" / "ffi" / "api" / "ffi.h").is_file()
    assert list(Path(sysconfig.get_lib()).glob("*.so"))


def test_weights_are_fetched_once_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "net weights.pdparams"
    source.write_bytes(b"numbers")
    url = source.as_uri()  # with a blank as %20
    md5 = hashlib.md5(b"numbers", usedforsecurity=False).hexdigest()
    path = utils.download.get_weights_path_from_url(url, md5)
    assert path == str(tmp_path / "cache" / "polyreme" / "weights" / "net weights.pdparams")
    source.unlink()
    assert utils.download.get_weights_path_from_url(url, md5) == path  # it is here
    Path(path).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"there is no file .*net weights"):
        utils.download.get_weights_path_from_url(url, md5)
    source.write_bytes(b"others")
    with pytest.raises(DataError, match=f"wanted {md5}; the file is another one"):
        utils.download.get_weights_path_from_url(url, md5)
    assert list(Path(path).parent.glob("*.part")) == []


def test_what_cannot_be_fetched_is_named(tmp_path, monkeypatch):
    def offline(url, timeout):
        raise OSError("no route to host")

    monkeypatch.setattr(downloads.urllib.request, "urlopen", offline)
    with pytest.raises(DataError, match=r"no route to host\); without a network, put the file at .*/w.bin"):
        downloads.fetch("https://example.org/w.bin", tmp_path)
    with pytest.raises(ConfigError, match="'ftp' is no way to fetch"):
        downloads.fetch("ftp://example.org/w.bin", tmp_path)
    with pytest.raises(ConfigError, match="names no file"):
        downloads.fetch("https://example.org/", tmp_path)
