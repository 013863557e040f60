"""Parts of models that are split over devices."""

from polyreme.incubate.distributed.models import moe

__all__ = ["moe"]
