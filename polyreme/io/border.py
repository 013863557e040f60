"""Where NumPy batches become Tensors: in the parent process, never in a worker.

Floor: 4.  The only file of the loader that imports jax.
"""

from typing import Any

import ml_dtypes
import numpy as np

from polyreme.eager.tensor import to_tensor
from polyreme.io.structure import map_leaves

_NARROW = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


def to_tensors(batch: Any, place: Any) -> Any:
    """The batch with every numeric array copied into a Tensor on place (None: the current device)."""
    return map_leaves(lambda leaf: to_tensor(leaf, place=place) if _numeric(leaf) else leaf, batch)


def _numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and (leaf.dtype.kind in "biufc" or leaf.dtype.type in _NARROW)
