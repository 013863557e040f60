"""paddle.incubate.multiprocessing: Python's multiprocessing, whose queues carry Tensors by their values."""

from multiprocessing import *  # noqa: F403
from multiprocessing import __all__

__all__ = [*__all__]
