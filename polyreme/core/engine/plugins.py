"""Devices that come as a PJRT library: registered by name, tried in a process of their own first, then loaded.

register says a name and a library; POLYREME_DEVICES and the entry points "polyreme.devices" of installed packages do so
before the program begins. What jax itself has (CPU, CUDA, TPU, packages of the group "jax_plugins") needs none of this.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.extend import backend as jax_backends
from jaxlib import version as jaxlib_version
from jaxlib import xla_client

from polyreme import flags
from polyreme.errors import ConfigError, DeviceError

_log = logging.getLogger("polyreme.core")
GROUP = "polyreme.devices"
"""The entry points of packages that bring a device: each is a Plugin, or a function that gives one."""
PROBE = Path(__file__).with_name("plugin_probe.py")
PROBE_SECONDS = 120.0
_PRIORITY = -100  # below the processor's: a device that comes along is used when it is asked for
_RESERVED = frozenset({"cpu", "gpu", "cuda", "rocm", "tpu", "gpu_pinned", "interpreter"})


@dataclass(frozen=True)
class Plugin:
    """A device by its library.

    name: as in set_device("name:0"). library: path of the shared library with the PJRT C interface. options: given to
    the library when its client is made. factor_bits: significant bits that it rounds factors of float32 products to, 24
    for none, 11 for tf32, 8 for bfloat16: what `polyreme device check` expects of it. step_options: compiler options of
    programs that hold a forward and its backward; the library must know them.
    """

    name: str
    library: str
    options: Mapping[str, Any] = field(default_factory=dict)
    factor_bits: int = 24
    step_options: Mapping[str, bool | int | str] = field(default_factory=dict)


_plugins: dict[str, Plugin] = {}


def registered() -> Mapping[str, Plugin]:
    """The plugins by name."""
    return _plugins


def register(
    name: str,
    library: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    factor_bits: int = 24,
    step_options: Mapping[str, bool | int | str] | None = None,
    probe: bool = True,
) -> Plugin:
    """Make the devices of a PJRT library known under a name; the default device stays what it is.

    The library is tried in a process of its own first, once for each state of the file (probe=False: not), so that one
    that is none, that speaks another version of the interface, or that ends the process raises DeviceError here, and
    the session goes on. Other arguments: as of Plugin. ConfigError for a name that cannot be, or is another library's.
    """
    plugin = Plugin(name, os.path.abspath(library), dict(options or {}), factor_bits, dict(step_options or {}))
    if not name.isidentifier() or name in _RESERVED:
        raise ConfigError(
            f"device.register: the name {name!r} is {'reserved' if name in _RESERVED else 'no identifier'}; take "
            "another, such as the chip's"
        )
    if name in _plugins:
        if _plugins[name] == plugin:
            return _plugins[name]
        raise ConfigError(
            f"device.register: {name} is {_plugins[name].library} already; name {plugin.library} otherwise"
        )
    if probe:
        _try(plugin)
    started = is_started()
    jax_backends.register_backend_factory(name, lambda: _client(plugin), priority=_PRIORITY, fail_quietly=True)
    _plugins[name] = plugin
    if started:
        jax_backends.backends()[name] = _client(plugin)
    elif platforms := jax.config.jax_platforms:  # type: ignore[attr-defined]  (made at run time)
        jax.config.update("jax_platforms", f"{platforms},{name}")
    return plugin


def name_of(device: Any) -> str | None:
    """The name under which a jax device was registered; None for those of jax itself."""
    for name in _plugins:
        try:
            if jax_backends.get_backend(name) is device.client:
                return name
        except RuntimeError:  # it failed to start
            continue
    return None


def kind_of(device: Any) -> str:
    """The name that plans use for devices like this one: the name they were registered under, or jax's platform."""
    return name_of(device) or device.platform


def of_default_device() -> Plugin | None:
    """The plugin that new arrays go to a device of, if there is one."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  (made at run time)
    name = name_of(device) if _plugins and isinstance(device, jax.Device) else None
    return None if name is None else _plugins[name]


def devices() -> list[Any]:
    """The jax devices of all plugins that started."""
    have = []
    for name in _plugins:
        try:
            have += jax.local_devices(backend=name)
        except RuntimeError as error:
            _log.warning("device %s did not start: %s", name, error)
    return have


def _client(plugin: Plugin) -> Any:
    if not xla_client.pjrt_plugin_loaded(plugin.name):
        xla_client.load_pjrt_plugin_dynamically(plugin.name, plugin.library)
    if not xla_client.pjrt_plugin_initialized(plugin.name):
        xla_client.initialize_pjrt_plugin(plugin.name)
    return xla_client.make_c_api_client(plugin.name, plugin.options)


def is_started() -> bool:
    """Whether jax holds devices. It says so when asked to join processes; a rank that does not exist stops it there."""
    try:
        jax.distributed.initialize("localhost:1", 1, 1, local_device_ids=[0], cluster_detection_method="deactivate")
    except RuntimeError:
        return True
    except ValueError:
        pass
    return False


# ---- the trial ----


def _try(plugin: Plugin) -> None:
    """Raise DeviceError if a process that loads the library and runs a program on its devices fails."""
    path = Path(plugin.library)
    if not path.is_file():
        raise DeviceError(f"device.register: {plugin.name}: there is no file {path}; give the path of the library")
    record = _record(plugin, path)
    if record is not None and record.exists():
        return
    command = [sys.executable, str(PROBE), plugin.name, plugin.library, json.dumps(plugin.options)]
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "POLYREME_DEVICES")}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, env=environment, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"device.register: {plugin.name}: {path} did not answer within {PROBE_SECONDS:.0f} s in a process of its "
            "own; look at its log, and that no other process holds the device"
        ) from None
    answer = _answer(run.stdout)
    if "devices" in answer:
        if record is not None:
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(answer))
        return
    raise DeviceError(f"device.register: {plugin.name}: {path} {_fault(run, answer)}")


def _fault(run: subprocess.CompletedProcess[str], answer: Mapping[str, Any]) -> str:
    version = answer.get("version", "unknown")
    here = f"interface version {version}, jaxlib {jaxlib_version.__version__}"
    if answer.get("stage") == "load":
        return f"is no PJRT plugin: {answer['error']}; give the library that exports GetPjrtApi"
    if "error" in answer:
        return f"failed when its client was made or used ({here}): {answer['error']}; take a build for this jaxlib"
    last = (run.stderr.strip().splitlines() or ["nothing on stderr"])[-1][:300]
    how = f"signal {-run.returncode}" if run.returncode < 0 else f"exit status {run.returncode}"
    return f"ended the process it was tried in by {how} ({here}): {last}; take a build for this jaxlib"


def _answer(text: str) -> dict[str, Any]:
    """The last value that the probe printed for each key: it tells how far it came, so that a crash still has a
    version."""
    answer: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith('{"probe"'):
            answer |= json.loads(line)
    return answer


def _record(plugin: Plugin, path: Path) -> Path | None:
    """The file that says that this library, as it is, with this jaxlib, was tried and is good."""
    folder = flags.compile_cache()
    if folder is None:
        return None
    stat = path.stat()
    options = json.dumps(plugin.options, sort_keys=True)
    parts = (str(path), stat.st_mtime_ns, stat.st_size, jaxlib_version.__version__, options)
    return folder / "plugins" / hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


# ---- what is registered before the program begins ----


def register_known() -> None:
    """Register what POLYREME_DEVICES and entry points name; one that is no good is logged and left out."""
    for name, library in flags.devices().items():
        _register_quietly(Plugin(name, library))
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            plugin = entry.load()
            plugin = plugin if isinstance(plugin, Plugin) else plugin()
        except Exception as error:  # noqa: BLE001  (a vendor's code)
            _log.warning("device %s of %s is left out: %s: %s", entry.name, entry.value, type(error).__name__, error)
            continue
        _register_quietly(plugin)


def _register_quietly(plugin: Plugin) -> None:
    try:
        register(
            plugin.name,
            plugin.library,
            plugin.options,
            factor_bits=plugin.factor_bits,
            step_options=plugin.step_options,
        )
    except (DeviceError, ConfigError) as error:
        _log.warning("%s; it is left out", error)
