"""polyreme.compat: functions and layers in the form that other libraries give them, and `import torch` for scripts."""

from polyreme.compat import nn
from polyreme.core.rng import fresh_seed as seed
from polyreme.ops.by_dim import equal, max, median, min, nanmedian, slogdet, sort, split, unique

__all__ = ["equal", "max", "median", "min", "nanmedian", "nn", "seed", "slogdet", "sort", "split", "unique"]
