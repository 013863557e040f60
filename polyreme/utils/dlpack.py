"""polyreme.utils.dlpack: see polyreme.eager.dlpack."""

from polyreme.eager.dlpack import from_dlpack, to_dlpack

__all__ = ["from_dlpack", "to_dlpack"]
