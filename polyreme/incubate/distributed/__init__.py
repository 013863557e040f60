"""Names for training over devices that Paddle keeps under incubate."""

from polyreme.incubate.distributed import models

__all__ = ["models"]
