"""Tensors sent to the host's memory and back beside what the devices compute."""

from polyreme.incubate.tensor import manipulation

__all__ = ["manipulation"]
