"""Foreign code: compiling, loading, packaging; and the examples of docs/custom_ops.md, which are those that run."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from polyreme.core.op import OPS
from polyreme.errors import ConfigError
from polyreme.utils import cpp_extension

# the code under test starts them
pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SOURCE = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Run(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = FACTOR * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Scale, Run, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def _ops_do_not_stay():
    before = set(OPS)
    yield
    for name in set(OPS) - before:
        del OPS[name]


@pytest.mark.slow_cases("pallas", "ffi")
@pytest.mark.parametrize("kind", ["jax", "pallas", pytest.param("ffi", marks=needs_compiler)])
def test_an_example_runs_and_the_page_shows_it(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("POLYREME_EXTENSION_DIR", str(tmp_path))
    page = (ROOT / "docs" / "custom_ops.md").read_text()
    for path in sorted((ROOT / "examples").glob(f"custom_op_{kind}.*")):
        assert path.read_text() in page, f"docs/custom_ops.md shows another {path.name}"
    runpy.run_path(str(ROOT / "examples" / f"custom_op_{kind}.py"))


def _source(folder, text=SOURCE, name="scale.cc"):
    path = folder / name
    path.write_text(text)
    return str(path)


def _scaled(library):
    x = np.float32([1, 2])
    return jax.jit(library.Scale(jax.ShapeDtypeStruct(x.shape, x.dtype)))(x).tolist()


@pytest.mark.slow
@needs_compiler
def test_a_package_of_handlers_is_built_by_setup(tmp_path):
    _source(tmp_path, SOURCE.replace("FACTOR", "4"))
    (tmp_path / "setup.py").write_text(
        "from polyreme.utils.cpp_extension import CppExtension, setup\n"
        "setup(name='scale_ops', version='1', ext_modules=CppExtension(['scale.cc'], extra_compile_args=['-O0']))\n"
    )
    pytest.importorskip("setuptools")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-lib", "built"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(tmp_path / "built"))
    try:
        import scale_ops  # noqa: PLC0415

        assert _scaled(scale_ops) == [4, 8]
    finally:
        sys.path.remove(str(tmp_path / "built"))


@needs_compiler
def test_flags_change_what_is_built_and_a_second_load_builds_nothing(tmp_path, monkeypatch, capsys):
    source = _source(tmp_path)
    first = cpp_extension.load("scale", [source], ["-O0", "-DFACTOR=2"], build_directory=str(tmp_path), verbose=True)
    assert "scale.cc" in capsys.readouterr().out
    assert _scaled(first) == [2, 4]
    again = cpp_extension.load("scale", [source], ["-O0", "-DFACTOR=2"], build_directory=str(tmp_path), verbose=True)
    assert capsys.readouterr().out == ""
    assert again.targets == first.targets
    with pytest.raises(AttributeError, match="has no handler 'Scales'; it has Scale"):
        first.Scales  # noqa: B018
    monkeypatch.setenv("POLYREME_EXTENSION_DIR", str(tmp_path / "deep" / "er"))
    assert cpp_extension.get_build_directory(verbose=True) == str(tmp_path / "deep" / "er")
    assert "deep" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"(?s)scale.cc does not compile: .*FACTOR"):
        cpp_extension.load("scale", [source], build_directory=str(tmp_path))


@needs_compiler
def test_cuda_sources_go_to_nvcc(tmp_path, monkeypatch):
    """A stand-in for nvcc that writes down what it is asked and lets the C++ compiler do it."""
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        'if [ "$1" = -shared ]; then exec c++ "$@"; fi\nshift 2\nexec c++ -fPIC -x c++ "$@"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    source = _source(tmp_path, name="scale.cu")
    library = cpp_extension.load("on_gpu", [source], None, ["-O0", "-DFACTOR=2"], build_directory=str(tmp_path))
    assert list(library.targets) == ["Scale"]
    assert "-Xcompiler -fPIC -O0 -DFACTOR=2" in (tmp_path / "asked").read_text()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"no nvcc for \.cu sources"):
        cpp_extension.load("on_gpu", [source], build_directory=str(tmp_path))


def test_what_cannot_be_built_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = _source(tmp_path, "int f() { return 1; }")
    with pytest.raises(ConfigError, match="no XLA_FFI_DEFINE_HANDLER_SYMBOL"):
        cpp_extension.load("plain", [plain], build_directory=str(tmp_path))
    with pytest.raises(ConfigError, match=r"sources none.cc are not there"):
        cpp_extension.load("none", ["none.cc"])
    with pytest.raises(ConfigError, match="needs sources"):
        cpp_extension.CppExtension([])
    with pytest.raises(ConfigError, match=r"\['optimize'\] is not known; it takes"):
        cpp_extension.CUDAExtension([plain], optimize=True)
    both = cpp_extension.CUDAExtension([plain], extra_compile_args={"cxx": ["-g"], "nvcc": ["-G"]})
    assert (both.extra_compile_args, both.extra_cuda_args) == (("-g",), ("-G",))
    with pytest.raises(ConfigError, match="setup\\(\\) needs name= and ext_modules="):
        cpp_extension.setup(name="x", ext_modules=[plain])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler: 'no-such-compiler' is not found"):
        cpp_extension.load("scale", [_source(tmp_path)], build_directory=str(tmp_path))
