"""Parts of models that are split over devices, under their public paths."""

from polyreme.distributed.models import moe

__all__ = ["moe"]
