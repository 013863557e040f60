"""polyreme.sysconfig: folders that compiling code of one's own needs; utils.cpp_extension.load adds them by itself."""

from pathlib import Path

import jax
import jaxlib


def get_include() -> str:
    """The folder of C++ headers for ops: xla/ffi/api/ffi.h, which comes with jaxlib."""
    return jax.ffi.include_dir()


def get_lib() -> str:
    """The folder of the shared libraries that compute: jaxlib's."""
    return str(Path(jaxlib.__file__).parent)


__all__ = ["get_include", "get_lib"]
