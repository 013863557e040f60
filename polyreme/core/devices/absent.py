"""Devices that are not here, for which programs are compiled all the same: of a TPU slice, or a GPU by its name."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from polyreme.errors import ConfigError


@dataclass(frozen=True)
class AbsentDevice:
    """A device of which only the platform is known, as kernels ask for it."""

    platform: str
    device_kind: str


def slice_devices(name: str) -> list[Any]:
    """The devices of a TPU slice, such as "v5e:4x4", which need not exist.

    Raises ConfigError for a topology that is no TPU slice, or if libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(f"compiling for {name} needs libtpu; install polyreme[tpu-check], or leave the topology out")
    # else libtpu asks a cloud's metadata server, for minutes, what machine this is
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "none"}
    # several processes may compile at once, as none of them touches a chip
    for variable, value in {**quiet, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        os.environ.setdefault(variable, value)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"topology {name}: give a TPU slice such as v5e:2x4 ({reason})") from error
