"""Tries a PJRT library, in a process of its own: loads it, makes its client, runs a program. Imports no polyreme.

python plugin_probe.py NAME LIBRARY OPTIONS prints a line of JSON for each stage that was reached.
"""

import ctypes
import json
import sys
from typing import Any


class _Version(ctypes.Structure):
    """PJRT_Api_Version: its size, extensions, major and minor."""

    _fields_ = (("size", ctypes.c_size_t), ("more", ctypes.c_void_p), ("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Api(ctypes.Structure):
    """The beginning of PJRT_Api, which no version moves."""

    _fields_ = (("size", ctypes.c_size_t), ("more", ctypes.c_void_p), ("version", _Version))


def say(**what: object) -> None:
    """Print a stage."""
    sys.stdout.write(json.dumps({"probe": 1, **what}) + "\n")
    sys.stdout.flush()


def interface_version(library: str) -> str:
    """Major and minor version of a library's interface. Raises OSError or AttributeError if it is no plugin."""
    get = ctypes.CDLL(library).GetPjrtApi
    get.restype = ctypes.POINTER(_Api)
    version = get().contents.version
    return f"{version.major}.{version.minor}"


def start(name: str, library: str, options: dict[Any, Any]) -> list[str]:
    """Start the library and run a program on its first device; the description of its devices."""
    import jax  # noqa: PLC0415  (a library that is no plugin is refused before)
    import numpy as np  # noqa: PLC0415
    from jax.extend import backend  # noqa: PLC0415
    from jaxlib import xla_client  # noqa: PLC0415

    def client() -> object:
        xla_client.load_pjrt_plugin_dynamically(name, library)
        xla_client.initialize_pjrt_plugin(name)
        return xla_client.make_c_api_client(name, options)

    backend.register_backend_factory(name, client, priority=-100, fail_quietly=False)
    jax.config.update("jax_platforms", f"cpu,{name}")
    devices = jax.devices(name)
    total = jax.jit(lambda x: (x + 1).sum())(jax.device_put(np.array([1.0, 2.0]), devices[0]))
    if float(total) != 5:
        raise ValueError(f"the sum of 2 and 3 is {float(total)} on {devices[0]}")
    return [str(d) for d in devices]


def main() -> None:
    """Try what the command line names."""
    name, library, options = sys.argv[1:]
    stage = "load"
    try:
        say(version=interface_version(library))
        stage = "client"
        say(devices=start(name, library, json.loads(options)))
    except Exception as error:  # noqa: BLE001  (what is said goes into the error that the user sees)
        text = " ".join(str(error).split())[:400]
        say(stage=stage, error=f"{type(error).__name__}: {text}")


if __name__ == "__main__":
    main()
