"""Configures jax once, before any array exists: virtual CPU devices, 64-bit types, mesh-independent random numbers.

Imported first by polyreme.core.  Never imports: anything above.
"""

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxlib.version

from polyreme import flags


def _ask_for_devices() -> None:
    count = flags.cpu_num()
    if count is not None:
        kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if "xla_force_host_platform_device_count" not in f]
        os.environ["XLA_FLAGS"] = " ".join([*kept, f"--xla_force_host_platform_device_count={count}"])


_ask_for_devices()

import jax  # noqa: E402  (XLA reads XLA_FLAGS when its first client starts)

from polyreme.core.engine import (  # noqa: E402
    host_memory,
    ir_context,
    plugins,
    threefry,
    xla_flags,
)
from polyreme.core.engine.compile_cache import ProgramFolder  # noqa: E402
from polyreme.core.engine.plugins import is_started  # noqa: E402, F401  (asked here before jax is started)
from polyreme.core.engine.turns import turns  # noqa: E402
from polyreme.kernels import select  # noqa: E402

if TYPE_CHECKING:
    Device = Any  # jaxlib ships no types: to a checker jax.Device is a variable, not a class
else:
    Device = jax.Device

config: Any = jax.config
"""jax's options. jax makes their attributes at run time, where a type checker does not see them."""


def _ask_for_quick_compilation() -> None:
    """Give XLA the flags of xla_flags.QUICK, less those named in XLA_FLAGS already.

    Only for a jaxlib known to have them: XLA ends a process whose XLA_FLAGS it does not know.
    """
    text = os.environ.get("XLA_FLAGS", "")
    if jaxlib.version.__version_info__[:2] == (0, 10):
        unnamed = (f"--{name}={value}" for name, value in xla_flags.QUICK.items() if name not in text)
        os.environ["XLA_FLAGS"] = " ".join([text, *unnamed]).strip()


def _configure() -> None:
    _ask_for_quick_compilation()
    jax.config.update("jax_enable_x64", flags.x64())
    # random numbers do not depend on how an array is sharded
    jax.config.update("jax_threefry_partitionable", True)
    _take_turns()
    cache = flags.compile_cache()
    if cache is not None and _writable(cache):
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", flags.compile_cache_seconds())
        jax.config.update("jax_raise_persistent_cache_errors", False)
        ProgramFolder(cache, flags.compile_cache_bytes()).keep_trimmed()


def take_cpu_num() -> None:
    """Look at CPU_NUM again, which scripts set after the import; without effect once a device was used."""
    _ask_for_devices()
    _take_turns()


def _take_turns() -> None:
    """Run programs one at a time on virtual devices: with collectives they starve each other of XLA's threads."""
    if _num_virtual_devices() > 1:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        turns.are_taken = True


def _num_virtual_devices() -> int:
    """CPU devices that XLA_FLAGS asks for, by CPU_NUM or by hand; the last of several settings counts."""
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else 1


def step_options() -> dict[str, Any] | None:
    """Options of jax.jit for a program that holds a forward and its backward, for select.platform: xla_flags, and what
    the plugin says whose device is the default one."""
    plugin = None if select.absent_device() else plugins.of_default_device()
    if plugin is None:
        return step_options_for(select.platform(), select.absent_device())
    general = step_options_for(select.platform(), None, plugin.name) or {}
    return {**general, **plugin.step_options} or None


@functools.cache
def step_options_for(platform: str, absent: Device | None, plugin: str = "") -> dict[str, Any] | None:
    """step_options of a platform, of which `absent` is a device that is not here, or of a plugin that it is of."""
    options = xla_flags.chosen(platform, os.environ)
    if absent is None and jax.device_count() == 1:
        options |= xla_flags.chosen(platform, os.environ, xla_flags.ONE_DEVICE)
    if (os.cpu_count() or 1) > select.FEW_CORES:
        options |= xla_flags.chosen(platform, os.environ, xla_flags.MANY_CORES)
    return xla_flags.known(options, absent) or None


def is_depth_first() -> bool:
    """Whether the operations of a program with step_options are ordered by xla_flags.DEPTH_FIRST."""
    option = xla_flags.DEPTH_FIRST
    return (step_options() or {}).get(option.name) == option.value


def options_alone(table: Mapping[str, tuple[xla_flags.Option, ...]]) -> dict[str, Any] | None:
    """Options of jax.jit for a program that is run by itself, for select.platform. table: one of xla_flags."""
    return xla_flags.chosen(select.platform(), os.environ, table) or None


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def prepare_for_processes() -> None:
    """Options for a job of several processes; takes effect until the first array exists."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # with asynchronous dispatch two programs may reach gloo in another order on each rank, and wait for ever
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # jax would swallow SIGTERM
    jax.config.update("jax_enable_preemption_service", False)


def run_in_calling_thread() -> None:
    """Make CPU programs run in the thread that calls them; takes effect until the first array exists, process-wide.

    Handing a program to another thread and waiting for it costs 28 us on the machine of benchmarks/results/inference*,
    which a server that reads each result at once pays for nothing; a program that a training loop does not wait for is
    better handed over.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


_configure()
plugins.register_known()
ir_context.reuse_contexts()
threefry.lower_on_cpu()
if flags.keep_freed():
    host_memory.keep_freed()
