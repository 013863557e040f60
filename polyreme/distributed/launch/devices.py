"""The accelerators that each process of this node may use, decided without starting any of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from polyreme.errors import ConfigError

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "rocm": "nccl"}


def platform(environment: Mapping[str, str], device_files: Path = Path("/dev")) -> str:
    """cpu, cuda, rocm, tpu or a plug-in's name: the first of JAX_PLATFORMS, else by what the kernel shows."""
    wanted = environment.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    if wanted:
        return "cuda" if wanted == "gpu" else wanted
    if (device_files / "nvidiactl").exists():
        return "cuda"
    if (device_files / "kfd").exists():
        return "rocm"
    return "tpu" if (device_files / "accel0").exists() else "cpu"


def backend(name: str) -> str:
    """PADDLE_DISTRI_BACKEND of a platform."""
    return _BACKENDS.get(name, "xla")


def share_out(
    name: str, devices: Sequence[int], num_processes: int, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment variables that give each process of this node its share of the devices.

    devices count among those that the node's own variable shows; none given means all. num_processes 0: one for each
    given device, else one. Raises ConfigError for devices that are not there or do not divide evenly.
    """
    if not devices and num_processes <= 1:
        return [{}]
    if name == "cpu":
        if devices:
            raise ConfigError(
                f"launch: --devices {','.join(map(str, devices))}: this node has no accelerators; start processes with "
                "--nproc_per_node, and give each several virtual devices with CPU_NUM"
            )
        return [{}] * num_processes
    if name not in _VISIBLE:
        raise ConfigError(
            f"launch: on {name} one process drives all devices of a node; leave out --devices and --nproc_per_node"
        )
    visible = _visible(name, environment)
    if not devices and visible is None:
        raise ConfigError(f"launch: --nproc_per_node {num_processes}: give --devices, so that they can be shared out")
    chosen = list(devices) or list(range(len(visible or [])))
    if visible is not None and max(chosen) >= len(visible):
        raise ConfigError(
            f"launch: --devices {max(chosen)}: {_VISIBLE[name]}={','.join(visible)} shows {len(visible)} devices, "
            f"numbered from 0"
        )
    count = num_processes or len(chosen)
    share, left_over = divmod(len(chosen), count)
    if share == 0 or left_over:
        raise ConfigError(
            f"launch: {len(chosen)} devices do not divide evenly over --nproc_per_node {count}; each process needs as "
            "many as the others"
        )
    names = [visible[index] if visible is not None else str(index) for index in chosen]
    parts = [names[i : i + share] for i in range(0, len(names), share)]
    own = ",".join(str(index) for index in range(share))  # counted among those the process sees
    return [{_VISIBLE[name]: ",".join(part), "FLAGS_selected_gpus": own} for part in parts]


def _visible(name: str, environment: Mapping[str, str]) -> list[str] | None:
    """The devices the node's own variable shows, else all of its NVIDIA devices; None if unknown."""
    text = environment.get(_VISIBLE[name])
    if text is not None:
        return [part.strip() for part in text.split(",") if part.strip()]
    found = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    return [str(index) for index in range(len(found))] if found and name == "cuda" else None
