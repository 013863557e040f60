"""polyreme.version: which release this is, and which vendor libraries the jax here computes with.

What is not there is "False", as text, as in Paddle.
"""

import importlib.metadata

full_version: str = importlib.metadata.version("polyreme")
patch: str
minor: str
major: str
major, minor, patch = (*full_version.split("."), "0")[:3]
_CUDA = ("13", "12")
"""CUDA generations that jax has plugins for, newest first."""


def _version(*packages: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _beside_plugin(library: str) -> str | None:
    """The version of an NVIDIA library that was installed for jax's CUDA plugin; None without the plugin."""
    for generation in _CUDA:
        if _version(f"jax-cuda{generation}-plugin") is not None:
            return _version(f"nvidia-{library}-cu{generation}", f"nvidia-{library}") or "unknown"
    return None


def _rocm() -> str | None:
    return _version("jax-rocm7-plugin", "jax-rocm60-plugin")


hip: str | None = _rocm()
"""The version of jax's ROCm plugin, None without it."""


def cuda() -> str:
    """The CUDA runtime installed for jax; "unknown" if the system's is used; "False" without jax's CUDA plugin."""
    return _beside_plugin("cuda-runtime") or "False"


def cudnn() -> str:
    """The cuDNN installed for jax; "unknown" if the system's is used; "False" without jax's CUDA plugin."""
    return _beside_plugin("cudnn") or "False"


def nccl() -> str:
    """The NCCL installed for jax; "unknown" if the system's is used; "0" without jax's CUDA plugin."""
    return _beside_plugin("nccl") or "0"


def cuda_archs() -> list[int]:
    """[]: XLA compiles for the GPU at hand when a program first runs, for none ahead."""
    return []


def tensorrt() -> str:
    """ "None": XLA computes without TensorRT."""
    return "None"


def xpu() -> str:
    """ "False": XLA has no backend for Kunlun XPUs here; likewise its libraries below."""
    return "False"


def xpu_xre() -> str:
    """ "False", as xpu()."""
    return "False"


def xpu_xccl() -> str:
    """ "False", as xpu()."""
    return "False"


def xpu_xhpc() -> str:
    """ "False", as xpu()."""
    return "False"


def show() -> None:
    """Print the version of polyreme, of jax, and of what jax computes with."""
    facts = {
        "polyreme": _version("polyreme"),
        "jax": _version("jax"),
        "cuda": cuda(),
        "cudnn": cudnn(),
        "nccl": nccl(),
        "hip": hip,
    }
    print("\n".join(f"{name} {value}" for name, value in facts.items()))  # noqa: T201  (what it is for)
