"""Foreign code as ops: C++ (and CUDA) sources with XLA FFI handlers, compiled with the system's compiler and loaded.

A handler is what XLA_FFI_DEFINE_HANDLER_SYMBOL(Name, ...) of xla/ffi/api/ffi.h defines; the header comes
with jaxlib. polyreme.utils.register_op makes an op of a call to it; see docs/custom_ops.md.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from polyreme import flags
from polyreme.errors import ConfigError

_HANDLER = re.compile(r"^\s*XLA_FFI_DEFINE_HANDLER_SYMBOL\(\s*(\w+)", re.MULTILINE)
_FIRST = """\"\"\"FFI handlers of {name}, compiled when this package was built; see polyreme.utils.cpp_extension.\"\"\"

from pathlib import Path

from polyreme.utils.cpp_extension import Library

_library = Library({name!r}, Path(__file__).parent / {file!r}, {handlers!r})
globals().update({{handler: getattr(_library, handler) for handler in _library.targets}})
"""


@dataclass(frozen=True)
class Extension:
    """Sources of one library, and what its compiler and linker are told besides."""

    sources: tuple[str, ...]
    include_dirs: tuple[str, ...] = ()
    library_dirs: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    extra_compile_args: tuple[str, ...] = ()
    extra_cuda_args: tuple[str, ...] = ()
    extra_link_args: tuple[str, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("an extension needs sources, a list of C++ or CUDA files; got none")
        missing = [s for s in self.sources if not Path(s).is_file()]
        if missing:
            raise ConfigError(f"the sources {', '.join(missing)} are not there, from {Path.cwd()}")


class Library:
    """A loaded library of FFI handlers; each is an attribute, called as jax.ffi.ffi_call without its first argument.

    library.scale(jax.ShapeDtypeStruct(x.shape, x.dtype))(x, factor=numpy.float32(2)) is a call inside an op's
    function. targets: handler -> the name under which jax knows it. path: the file.
    """

    targets: dict[str, str]

    def __init__(self, name: str, path: Path, handlers: dict[str, str]) -> None:
        self.path = path
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise ConfigError(f"load: {path} cannot be loaded ({error}); look at extra_ldflags") from error
        # a library that was changed and loaded again registers its handlers anew
        self.targets = {h: f"{name}.{h}.{path.stem.rpartition('-')[2]}" for h in handlers}
        for handler, platform in handlers.items():
            _register(self.targets[handler], jax.ffi.pycapsule(getattr(library, handler)), platform)

    def __getattr__(self, handler: str) -> Callable[..., Any]:
        targets = self.__dict__.get("targets", {})
        if handler not in targets:
            raise AttributeError(f"{self.__dict__.get('path')} has no handler {handler!r}; it has {', '.join(targets)}")
        return functools.partial(jax.ffi.ffi_call, targets[handler])


@functools.cache
def _register(target: str, capsule: Any, platform: str) -> None:
    jax.ffi.register_ffi_target(target, capsule, platform=platform)


def get_build_directory(verbose: bool = False) -> str:
    """The folder that load() builds in: POLYREME_EXTENSION_DIR, else polyreme/extensions in the user's cache."""
    folder = flags.extension_dir()
    folder.mkdir(parents=True, exist_ok=True)
    if verbose:
        print(f"extensions are built in {folder}")  # noqa: T201  (what verbose asks for)
    return str(folder)


def CppExtension(sources: Sequence[str], *args: Any, **kwargs: Any) -> Extension:
    """The extension that setup() builds of C++ sources. Options: include_dirs, library_dirs, libraries,
    extra_compile_args, extra_link_args, name. Raises ConfigError for other ones.
    """
    return _extension("CppExtension", sources, args, kwargs)


def CUDAExtension(sources: Sequence[str], *args: Any, **kwargs: Any) -> Extension:
    """As CppExtension, of .cu sources too, which nvcc compiles; extra_compile_args may then be a dict of "cxx" and
    "nvcc".
    """
    return _extension("CUDAExtension", sources, args, kwargs)


def _extension(what: str, sources: Sequence[str], args: tuple, kwargs: dict[str, Any]) -> Extension:
    settings = dict(kwargs)
    own = settings.get("extra_compile_args", ())
    if isinstance(own, dict):
        settings["extra_compile_args"], settings["extra_cuda_args"] = own.get("cxx", ()), own.get("nvcc", ())
    known = set(Extension.__dataclass_fields__) - {"sources"}
    if args or not set(settings) <= known:
        raise ConfigError(f"{what}: {args or sorted(set(settings) - known)} is not known; it takes {', '.join(known)}")
    name = settings.pop("name", "")
    return Extension(tuple(map(str, sources)), name=name, **{k: tuple(map(str, v)) for k, v in settings.items()})


def load(
    name: str,
    sources: Sequence[str],
    extra_cxx_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str] | None = None,
    extra_library_paths: Sequence[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
) -> Library:
    """Compile sources, unless that was done before, load them and register their FFI handlers with jax.

    Handlers of .cu files run on NVIDIA GPUs and are compiled by nvcc, those of other files on the host's processor, by
    $CXX or c++. What was compiled is found again by sources, flags and compiler. Raises ConfigError without a compiler,
    for sources it refuses, and for sources without handlers.
    """
    extension = Extension(
        tuple(map(str, sources)),
        include_dirs=tuple(extra_include_paths or ()),
        library_dirs=tuple(extra_library_paths or ()),
        extra_compile_args=tuple(extra_cxx_cflags or ()),
        extra_cuda_args=tuple(extra_cuda_cflags or ()),
        extra_link_args=tuple(extra_ldflags or ()),
        name=name,
    )
    folder = Path(build_directory or get_build_directory())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{_digest(extension)}.so"
    handlers = _handlers(extension)
    if not path.exists():
        _build(extension, path, verbose)
    return Library(name, path, handlers)


def setup(**attr: Any) -> None:
    """In a setup.py: setup(name="my_ops", ext_modules=CppExtension(["my_ops.cc"])) makes an installable package of it.

    The package has the extension's library and, as attributes, its handlers, as what load() returns. Other arguments
    go to setuptools.setup, which must be installed; ConfigError otherwise.
    """
    try:
        import setuptools  # noqa: PLC0415  (optional)
        from setuptools.command.build_ext import build_ext  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("setup() needs setuptools: pip install setuptools; load() does without") from error
    name, given = attr.pop("name", None), attr.pop("ext_modules", None)
    extensions = given if isinstance(given, (list, tuple)) else [given]
    if not name or not all(isinstance(e, Extension) for e in extensions):
        raise ConfigError("setup() needs name= and ext_modules=CppExtension([...])")

    class Build(build_ext):
        """Builds libraries of handlers in the place of Python's extension modules."""

        def run(self) -> None:
            for extension in extensions:
                _package(extension, extension.name or name, Path(self.build_lib))

        def get_outputs(self) -> list[str]:
            return [str(f) for e in extensions for f in (Path(self.build_lib) / (e.name or name)).iterdir()]

    shells = [setuptools.Extension(e.name or name, list(e.sources)) for e in extensions]
    setuptools.setup(name=name, ext_modules=shells, cmdclass={"build_ext": Build, **attr.pop("cmdclass", {})}, **attr)


def _package(extension: Extension, name: str, folder: Path) -> None:
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    path = home / f"{name}-{_digest(extension)}.so"
    handlers = _handlers(extension)
    _build(extension, path, verbose=False)
    (home / "__init__.py").write_text(_FIRST.format(name=name, file=path.name, handlers=handlers))


def _handlers(extension: Extension) -> dict[str, str]:
    """handler -> the platform it is for."""
    handlers = {
        handler: "CUDA" if source.endswith(".cu") else "cpu"
        for source in extension.sources
        for handler in _HANDLER.findall(Path(source).read_text())
    }
    if not handlers:
        raise ConfigError(
            f"{', '.join(extension.sources)}: no XLA_FFI_DEFINE_HANDLER_SYMBOL(Name, ...) in them; write a handler as "
            "docs/custom_ops.md shows (operators of other frameworks' C++ API cannot run here)"
        )
    return handlers


def _digest(extension: Extension) -> str:
    facts = [
        *(Path(s).read_text() for s in extension.sources),
        repr(extension),
        *_compilers(extension),
        jax.__version__,
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]


def _compilers(extension: Extension) -> list[str]:
    """The compilers it needs: for C++, and for CUDA if there is some."""
    wanted = {s.endswith(".cu") for s in extension.sources}
    return [_nvcc() if cuda else _cxx() for cuda in sorted(wanted)]


def _cxx() -> str:
    chosen = os.environ.get("CXX") or "c++"
    compiler = shutil.which(chosen)
    if compiler is None:
        raise ConfigError(
            f"no C++ compiler: {chosen!r} is not found (set CXX, or install g++ or clang); a Pallas kernel needs none"
        )
    return compiler


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    compiler = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if compiler is None:
        raise ConfigError(
            "no nvcc for .cu sources: put it on PATH or set CUDA_HOME to the CUDA toolkit; a Pallas kernel "
            "(docs/custom_ops.md) runs on GPUs without it"
        )
    return compiler


def _build(extension: Extension, path: Path, verbose: bool) -> None:
    """Compile and link into path."""
    includes = [f"-I{d}" for d in (jax.ffi.include_dir(), *extension.include_dirs)]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = []
        for number, source in enumerate(extension.sources):
            objects.append(f"{folder}/{number}.o")
            common = ["-std=c++17", "-O2", *includes, "-c", source, "-o", objects[-1]]
            if source.endswith(".cu"):
                _call([_nvcc(), "-Xcompiler", "-fPIC", *extension.extra_cuda_args, *common], source, verbose)
            else:
                _call([_cxx(), "-fPIC", *extension.extra_compile_args, *common], source, verbose)
        linked = Path(folder) / "library.so"
        search = [f"-L{d}" for d in extension.library_dirs] + [f"-l{n}" for n in extension.libraries]
        linker = _compilers(extension)[-1]
        _call([linker, "-shared", *objects, "-o", str(linked), *search, *extension.extra_link_args], path.name, verbose)
        os.replace(linked, path)  # whole or not at all: other processes may build the same


def _call(command: list[str], what: str, verbose: bool) -> None:
    if verbose:
        print(" ".join(command))  # noqa: T201  (what verbose asks for)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if verbose and done.stderr:
        print(done.stderr, file=sys.stderr)  # noqa: T201
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[:20])
        raise ConfigError(f"{what} does not compile: {' '.join(command[:1])} ended with {done.returncode}:\n{said}")
